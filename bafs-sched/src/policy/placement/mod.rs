//! Where a job and its volumes go.

pub(crate) mod capacity;
mod job_resources;
mod most_free;
mod remaining_time;
pub(crate) mod remote_data;
pub(crate) mod scratch_volumes;

use bafs_proto::ids::ServerId;

use super::{Policy, View};
use crate::space::Space;
use bafs_workflow::JobIndex;

/// Chooses the nodes on which a job is tried. A job starts on the first of them where all its
/// volumes fit and the admission policy lets it.
pub(crate) trait Placement: Policy {
    /// The node that a ready job waits for because its data are there; `None` for a job that may
    /// start anywhere. `need` is the space of its volumes that do not exist.
    fn binding(&self, view: View<'_>, job: JobIndex, need: Space) -> Option<ServerId>;

    /// Nodes with free slots on which a job without a binding is tried, best first.
    fn candidates(&self, view: View<'_>, job: JobIndex) -> Vec<ServerId>;
}

/// All of them, the default first.
pub(crate) static PLACEMENTS: &[&dyn Placement] = &[&capacity::Capacity, &most_free::MostFree];
