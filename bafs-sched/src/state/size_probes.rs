//! Which jobs and pipelines wait until volumes of unknown size were measured, for all who ask.
//! What is measured says `policy/failure/sizes.rs`.

use bafs_workflow::{JobIndex, VolumeIndex};

use crate::state::scheduler_state::State;
use crate::state::volume_sizes::SizeClass;

impl State {
    /// Scratch volumes that a job may write.
    pub(crate) fn scratch_written(&self, job: JobIndex) -> Vec<VolumeIndex> {
        if self.settings.has_private_data_at_home() {
            return Vec::new();
        }
        let mounted = self.graph.mounted(job).into_iter();
        let written = mounted
            .filter(|(volume, is_writable)| *is_writable && !self.graph.volume(*volume).is_cache);
        written.map(|(volume, _)| volume).collect()
    }

    /// Whether a pipeline waits until another was measured.
    pub(crate) fn waits_for_probe(&self, pipeline: u32) -> bool {
        let sizes = &self.sizes;
        if sizes.probes.is_empty() {
            return false;
        }
        let Some(shape) = sizes.shape_of.get(&pipeline) else {
            return false;
        };
        let probe = sizes.probes.get(shape);
        probe.is_some_and(|probe| *probe != pipeline && sizes.unknown[shape].contains(&pipeline))
    }

    /// Pipelines that are measured now.
    pub(crate) fn probes(&self) -> impl Iterator<Item = u32> {
        self.sizes.probes.values().copied()
    }

    /// Whether a job waits until one of its like was measured: one is under way that makes a volume
    /// of the same kind, of which none has been measured yet; or one found its volume too small,
    /// and runs again with a larger one.
    pub(crate) fn waits_for_like(&self, job: JobIndex) -> bool {
        let kinds = self.unmeasured_crowds(job);
        if kinds.is_empty() {
            return false;
        }
        let is_like = |volume: VolumeIndex| {
            let kind = self.sizes.kind_of.get(&volume);
            kind.is_some_and(|kind| kinds.contains(kind))
        };
        let writes_like = |other: &JobIndex| {
            let mut mounted = self.graph.mounted(*other).into_iter();
            *other != job && mounted.any(|(volume, writable)| writable && is_like(volume))
        };
        self.attempts.keys().any(writes_like) || self.is_like_grown(job, &kinds)
    }

    /// Whether a job waits to run again because its volume, of one of these kinds, was too small:
    /// others would find out the same. A job whose own volume was made larger does not ask.
    fn is_like_grown(&self, job: JobIndex, kinds: &[SizeClass]) -> bool {
        let grown = &self.sizes.grown;
        let mut own = self.scratch_written(job).into_iter();
        if grown.is_empty() || own.any(|volume| grown.contains(&volume)) {
            return false;
        }
        let is_awaited = |volume: &VolumeIndex| {
            let kind = self.sizes.kind_of.get(volume);
            let mut writers = self.graph.volume(*volume).writers.iter();
            kind.is_some_and(|kind| kinds.contains(kind))
                && writers.any(|writer| self.queues.contains(*writer))
        };
        grown.iter().any(is_awaited)
    }

    /// The kinds of volumes which a job is to make that others of its pipeline are of too, while
    /// none of them was measured.
    fn unmeasured_crowds(&self, job: JobIndex) -> Vec<SizeClass> {
        let (crowds, learned) = (&self.sizes.crowds, &self.sizes.learned);
        if crowds.keys().all(|kind| learned.contains_key(kind)) {
            return Vec::new();
        }
        let made = self.scratch_written(job).into_iter();
        let made = made.filter(|volume| !self.volumes.is_live(*volume));
        let kinds = made.filter_map(|volume| self.sizes.kind_of.get(&volume).copied());
        let unmeasured =
            |kind: &SizeClass| crowds.contains_key(kind) && !learned.contains_key(kind);
        kinds.filter(unmeasured).collect()
    }
}
