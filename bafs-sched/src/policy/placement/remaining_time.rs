//! Nodes that leave at a known time get no job that is known to take longer.

use bafs_proto::ids::ServerId;
use bafs_workflow::JobIndex;

use crate::policy::View;

impl View<'_> {
    /// Whether a job is not known to outlast a node: a run time is known if it is declared.
    pub(crate) fn can_end_in_time(&self, job: JobIndex, server: ServerId) -> bool {
        let Some(at) = self.fleet.departure(server).at else {
            return true;
        };
        let runtime_s = self.graph.workflow.job(job).runtime_s.unwrap_or(0);
        self.now.plus_ms(runtime_s.saturating_mul(1_000)) <= at
    }
}
