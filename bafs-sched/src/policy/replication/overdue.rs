//! Copies that take far longer than they should while a job waits for them are let go: mostly
//! their node has died, which the catalog tells only seconds later. The next copies go elsewhere,
//! until one to that node is complete.

use std::collections::BTreeMap;

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_workflow::VolumeIndex;

use crate::state::jobs::JobState;
use crate::state::scheduler_state::State;
use crate::state::timers::Timer;
use crate::state::volumes::InstanceState;

/// So many times what it should take a copy may take.
const PATIENCE_FACTOR: u64 = 4;

/// A copy may take so long at least, in milliseconds: a busy machine is not a dead one.
const PATIENCE_MS_MIN: u64 = 2_000;

/// The patience doubles so often at most.
const DOUBLINGS_MAX: u32 = 10;

/// Nodes to which copies were let go since one was complete there, with how many.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Overdue(BTreeMap<ServerId, u32>);

impl Overdue {
    pub(crate) fn is_slow(&self, target: ServerId) -> bool {
        self.0.contains_key(&target)
    }

    /// A copy there is complete, or the node is lost.
    pub(crate) fn forget(&mut self, target: ServerId) {
        self.0.remove(&target);
    }

    /// How long a copy may take that should take `expected_ms`: longer after each that was let go,
    /// wherever it went, as what is expected may be wrong.
    fn patience_ms(&self, expected_ms: u64) -> u64 {
        let let_go: u32 = self.0.values().sum();
        let first_ms = expected_ms.saturating_mul(PATIENCE_FACTOR);
        let first_ms = first_ms.max(PATIENCE_MS_MIN);
        first_ms.saturating_mul(1 << let_go.min(DOUBLINGS_MAX))
    }
}

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
            *self.checkpoints.overdue.0.entry(target).or_default() += 1;
        }
        self.copy_failed(id);
    }

    /// Whether a job that waits only for a slot or for a copy writes the volume.
    pub(crate) fn is_waited_for(&self, volume: VolumeIndex) -> bool {
        let mut writers = self.graph.volume(volume).writers.iter();
        writers.any(|writer| self.graph.state(*writer) == JobState::Ready)
    }
}
