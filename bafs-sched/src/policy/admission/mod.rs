//! Whether work may begin: feasibility, limits, the banker's check, deadlock.

mod bankers;
pub(crate) mod bankers_check;
pub(crate) mod cache_feasibility;
pub(crate) mod deadlock;
pub(crate) mod feasibility;
pub(crate) mod gather_feasibility;
pub(crate) mod limits;
pub(crate) mod node_gathering;
pub(crate) mod pipeline_trial;

use bafs_proto::ids::ServerId;
use bafs_workflow::JobIndex;

use super::{Policy, View};
use crate::space::Space;
use crate::state::planned_volumes::Create;

/// Decides which starts keep every pipeline able to end.
pub(crate) trait Admission: Policy {
    /// The nodes that borrow room of others once a job has started on `server` and created these
    /// volumes, each with what it lacks. `None` if it must not start: a pipeline that has begun
    /// could not end.
    fn borrows(
        &self,
        view: View<'_>,
        job: JobIndex,
        server: ServerId,
        creates: &[Create],
    ) -> Option<Vec<(ServerId, Space)>>;
}

/// All of them, the default first.
pub(crate) static ADMISSIONS: &[&dyn Admission] = &[&bankers::Bankers];
