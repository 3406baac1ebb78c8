//! Whether work may begin: feasibility, limits, the banker's check, deadlock.

mod bankers;
pub(crate) mod bankers_check;
pub(crate) mod batch_room;
pub(crate) mod cache_feasibility;
pub(crate) mod deadlock;
pub(crate) mod feasibility;
pub(crate) mod gather_feasibility;
pub(crate) mod limits;
pub(crate) mod node_gathering;
pub(crate) mod node_survey;
pub(crate) mod pipeline_trial;

use super::Policy;

/// Decides which starts keep every pipeline able to end.
pub(crate) trait Admission: Policy {}

/// All of them, the default first.
pub(crate) static ADMISSIONS: &[&dyn Admission] = &[&bankers::Bankers];
