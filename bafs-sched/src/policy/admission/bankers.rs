//! The banker's check of Dijkstra, node by node (`bankers_check.rs`).

use bafs_proto::ids::ServerId;
use bafs_workflow::JobIndex;

use super::{Admission, Policy, View};
use crate::space::Space;
use crate::state::planned_volumes::Create;

/// Admits a start when every pipeline that has begun can still end.
#[derive(Debug)]
pub(super) struct Bankers;

impl Policy for Bankers {
    fn name(&self) -> &'static str {
        "bankers"
    }

    fn summary(&self) -> &'static str {
        "a job starts when every started pipeline can still end with the space that is left"
    }
}

impl Admission for Bankers {
    fn borrows(
        &self,
        view: View<'_>,
        job: JobIndex,
        server: ServerId,
        creates: &[Create],
    ) -> Option<Vec<(ServerId, Space)>> {
        view.borrows(job, server, creates)
    }
}
