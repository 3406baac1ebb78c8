//! Copies that take far longer than they should while a job waits for them are let go: mostly
//! their node has died, which the catalog tells only seconds later. The next copies go elsewhere,
//! until one to that node is complete.

use bafs_proto::ids::VolumeId;
use bafs_workflow::VolumeIndex;

use crate::state::jobs::JobState;
use crate::state::overdue_copies::PATIENCE_MS_MIN;
use crate::state::scheduler_state::State;
use crate::state::timers::Timer;
use crate::state::volumes::InstanceState;

impl State {
    /// A copy begins: sets the time when it is looked at.
    pub(crate) fn watch_copy(&mut self, id: VolumeId) {
        let Some(copy) = self.volumes.get(id) else {
            return;
        };
        let (volume, target) = (copy.volume, copy.server);
        let source = self.volumes.scratch(volume).and_then(|(_, server)| server);
        if let (Some(source), Some(target)) = (source, target) {
            let bytes = self.held_bytes(volume);
            let expected_ms = self.checkpoints.expected_ms((source, target), bytes);
            let ms = self.checkpoints.overdue.patience_ms(expected_ms);
            self.timers.set(self.now.plus_ms(ms), Timer::Copy(id));
        }
    }

    /// A copy should have been complete long ago: it is let go if it holds a job up.
    pub(crate) fn copy_is_overdue(&mut self, id: VolumeId) {
        let copy = self.volumes.get(id);
        let Some(copy) = copy.filter(|copy| copy.state == InstanceState::Copying) else {
            return;
        };
        if !self.is_waited_for(copy.volume) {
            // Who comes to wait for it waits for half as long again; a long copy costs few looks.
            let since = self.copied_since(copy.volume, id).unwrap_or(self.now);
            let ms = (self.now.ms_since(since) / 2).max(PATIENCE_MS_MIN);
            self.timers.set(self.now.plus_ms(ms), Timer::Copy(id));
            return;
        }
        if let Some(target) = copy.server {
            *self.checkpoints.overdue.let_go.entry(target).or_default() += 1;
        }
        self.copy_failed(id);
    }

    /// Whether a job that waits only for a slot or for a copy writes the volume.
    pub(crate) fn is_waited_for(&self, volume: VolumeIndex) -> bool {
        let mut writers = self.graph.volume(volume).writers.iter();
        writers.any(|writer| self.graph.state(*writer) == JobState::Ready)
    }
}
