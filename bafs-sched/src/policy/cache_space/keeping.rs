//! Which volumes outlive a run that did not end well: those that spare the next run work. They go
//! first when space is wanted.

use bafs_proto::ids::VolumeId;
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::policy::View;
use crate::state::jobs::JobState;
use crate::state::volumes::InstanceState;

impl View<'_> {
    /// Whether a volume has the output of a job that is done, for one that is not.
    pub(crate) fn is_worth_keeping(&self, volume: VolumeIndex) -> bool {
        let node = self.graph.volume(volume);
        if self.settings.keep_ms == 0 || node.is_cache || node.writer.is_some() {
            return false;
        }
        let live = self.volumes.scratch(volume);
        let instance = live.and_then(|(id, _)| self.volumes.get(id));
        let is_ready = instance.is_some_and(|it| it.state == InstanceState::Ready);
        let is_done = |job: &JobIndex| self.graph.state(*job) == JobState::Done;
        let mut users = self.graph.workflow.volume(volume).users.iter();
        is_ready && node.writers.iter().any(is_done) && users.any(|user| !is_done(user))
    }

    /// Volumes that only the next run could use: their space goes to jobs of this one.
    pub(crate) fn kept_to_evict(&self) -> Vec<VolumeId> {
        if self.settings.keep_ms == 0 {
            return Vec::new();
        }
        let kept = self.volumes.iter().filter(|(_, instance)| {
            let node = self.graph.volume(instance.volume);
            instance.state == InstanceState::Ready
                && node.is_idle()
                && self.is_worth_keeping(instance.volume)
        });
        kept.map(|(id, _)| id).collect()
    }
}
