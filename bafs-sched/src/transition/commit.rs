//! How decisions take effect: each by one method.

use crate::decision::Decision;
use crate::state::scheduler_state::State;

impl State {
    /// Carries out a decision, and keeps it for whoever records decisions.
    pub(crate) fn commit(&mut self, decision: Decision) {
        self.decisions.push(decision.clone());
        match decision {
            // Family `failure`.
            Decision::Retry { job, pause_ms } => self.settle(job, pause_ms),
            Decision::Fail {
                job,
                reason,
                output_tail,
            } => self.fail_job(job, reason, output_tail),
            Decision::Quarantine {
                node,
                duration_ms,
                reason,
            } => self.begin_quarantine(node, duration_ms, reason),
            Decision::GiveUpNode { node } => self.lose_server(node),
            Decision::Redo { job } => self.undo(job),
            Decision::Resize { pipeline, sizes } => self.resize_volumes(pipeline, &sizes),
            Decision::ReserveUnmade { volumes, size } => {
                for volume in volumes {
                    self.resize(volume, size);
                }
            }
            Decision::ReuseVolume {
                volume,
                node,
                is_copy,
            } => self.reuse_volume(volume, node, is_copy),
            Decision::SkipRedo { jobs } => self.skip_redo(&jobs),
            // Family `replication`.
            Decision::CopyVolume {
                source,
                server,
                base_copy,
            } => self.begin_copy(source, server, base_copy),
            Decision::DropCopies { volume, copies } => self.delete_copies(volume, &copies),
            Decision::RestoreVolume { volume, copy } => self.restore_volume(volume, copy),
        }
    }
}
