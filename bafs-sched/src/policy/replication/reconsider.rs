//! When losses turn out to be more frequent than was believed, or it is known for the first time
//! what a copy costs, the volumes that have none are weighed once more: jobs of equal length end
//! together, and their volumes are all weighed before anything is known. How they are weighed says
//! `policy/replication/copy_estimate.rs`.

use bafs_workflow::VolumeIndex;

use crate::state::jobs::JobState;
use crate::state::scheduler_state::State;
use crate::state::volumes::InstanceState;

impl State {
    /// A server or a volume was lost. Weighs again only where losses are believed to be twice as
    /// frequent as the last time, so that it is seldom, however many nodes fail.
    pub(crate) fn note_loss(&mut self) {
        self.checkpoints.losses += 1;
        if self.checkpoints.has_worsened() {
            self.weigh_again();
        }
    }

    /// Weighs every volume again that has no copy.
    pub(crate) fn weigh_again(&mut self) {
        if !self.policies().replication.weighs() {
            return;
        }
        let instances = self.volumes.iter();
        let scratch = instances.filter(|(_, instance)| {
            let is_cache = self.graph.volume(instance.volume).is_cache;
            instance.state == InstanceState::Ready && !is_cache
        });
        let volumes: Vec<VolumeIndex> = scratch.map(|(_, instance)| instance.volume).collect();
        for volume in volumes {
            if self.is_finished(volume) && !self.is_being_copied(volume) {
                self.consider_copy(volume);
            }
        }
    }

    /// Whether a volume has what a finished job wrote, of which there is no copy, and nobody
    /// changes it now.
    fn is_finished(&self, volume: VolumeIndex) -> bool {
        let writers = &self.graph.volume(volume).writers;
        self.good_copy(volume).is_none()
            && writers
                .iter()
                .any(|writer| self.graph.state(*writer) == JobState::Done)
            && !writers
                .iter()
                .any(|writer| self.attempts.contains_key(writer))
    }
}
