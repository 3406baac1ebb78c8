//! The trait of placement policies, apart from the list of them.

use bafs_proto::ids::ServerId;
use bafs_workflow::JobIndex;

use crate::policy::{Policy, View};
use crate::space::Space;

/// Chooses the nodes on which a job is tried. A job starts on the first of them where all its
/// volumes fit and the admission policy lets it.
pub(crate) trait Placement: Policy {
    /// The node that a ready job waits for because its data are there; `None` for a job that may
    /// start anywhere. `need` is the space of its volumes that do not exist.
    fn binding(&self, view: View<'_>, job: JobIndex, need: Space) -> Option<ServerId>;

    /// Nodes with free slots on which a job without a binding is tried, best first.
    fn candidates(&self, view: View<'_>, job: JobIndex) -> Vec<ServerId>;
}
