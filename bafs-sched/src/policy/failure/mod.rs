//! What a failure means and what runs again.

pub(crate) mod alike_volumes;
pub(crate) mod attribution;
mod evidence;
pub(crate) mod extraction_failures;
pub(crate) mod full_disk;
pub(crate) mod listed_nodes;
pub(crate) mod recovery;
pub(crate) mod refused_writes;
pub(crate) mod resize;
mod retry_only;
pub(crate) mod returned_nodes;
pub(crate) mod sizes;
pub(crate) mod space_refusals;
pub(crate) mod undeclared_access;

use bafs_proto::ids::ServerId;

use super::{Policy, View};

/// Decides whether a node is to blame for the failures of jobs there.
pub(crate) trait FailureAttribution: Policy {
    /// Whether a node is put into quarantine because the environment of jobs failed there so often
    /// in a row. The last failure is counted already.
    fn blames_for_faults(&self, view: View<'_>, server: ServerId) -> bool;

    /// Whether a node is put into quarantine because jobs that failed there by their own fault, as
    /// it seemed, succeeded on other nodes. The last of them is counted already.
    fn blames_for_jobs(&self, view: View<'_>, server: ServerId) -> bool;

    /// Whether a job is tried first on nodes where it has not failed.
    fn avoids_failed_nodes(&self) -> bool;
}

/// All of them, the default first.
pub(crate) static ATTRIBUTIONS: &[&dyn FailureAttribution] =
    &[&evidence::Evidence, &retry_only::RetryOnly];
