//! Volumes of unknown size that one pipeline has many of, as a job gathers from jobs that are
//! alike: one of them is measured before the others are made. What is measured says
//! `policy/failure/sizes.rs`.

use std::collections::BTreeMap;

use bafs_workflow::{JobIndex, VolumeIndex};

use crate::policy::failure::sizes::MARGIN_PERMILLE;
use crate::space::Space;
use crate::state::scheduler_state::State;
use crate::state::volume_sizes::SizeClass;

impl State {
    /// Whether a job waits until one of its like was measured: one is under way that makes a volume
    /// of the same kind, of which none has been measured yet.
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
        self.attempts.keys().any(writes_like)
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

    /// An attempt ended: those that waited for what it would measure may start, and one of them is
    /// measured instead where it told nothing.
    pub(crate) fn pass_measurement_on(&mut self, job: JobIndex) {
        let (crowds, learned) = (&self.sizes.crowds, &self.sizes.learned);
        if crowds.is_empty() {
            return;
        }
        let kind_of = |volume: &VolumeIndex| self.sizes.kind_of.get(volume);
        let mut kinds = self.scratch_written(job).into_iter();
        let is_awaited =
            |kind: &SizeClass| crowds.contains_key(kind) && !learned.contains_key(kind);
        if kinds.any(|volume| kind_of(&volume).is_some_and(is_awaited)) {
            self.queues.wake_all();
        }
    }

    /// Volumes proved too small although some of their kind were measured: the others of a pipeline
    /// that do not exist get more too, or each would find that out by failing.
    pub(crate) fn raise_measured(&mut self, changes: &[(VolumeIndex, Space, Space)]) {
        let mut is_raised = false;
        for (volume, _, after) in changes {
            let Some(kind) = self.sizes.kind_of.get(volume).copied() else {
                continue;
            };
            if let (true, Some(known)) = (
                self.sizes.crowds.contains_key(&kind),
                self.sizes.learned.get_mut(&kind),
            ) {
                let size = known.component_max(*after);
                is_raised |= size != std::mem::replace(known, size);
                self.resize_learned(kind, size);
            }
        }
        if is_raised {
            self.sizes_changed();
        }
    }

    /// A kind was measured: volumes of it that do not exist get what they need. The margin is less
    /// where with all of it the volumes of a pipeline did not fit on a node, but without it do.
    pub(crate) fn resize_learned(&mut self, kind: SizeClass, size: Space) {
        let offered = self.offered();
        let mut size = size.component_min(self.largest_offered());
        if let (Some(count), Some(held)) = (
            self.sizes.crowds.get(&kind).copied(),
            self.sizes.held.get(&kind).copied(),
        ) {
            let left = self.left_for_unknown(kind, offered);
            let left = left.saturating_sub(self.unknown_beside(kind));
            let (made, sum) = self.made_of(kind);
            let (left, parts) = (left.saturating_sub(sum), count.saturating_sub(made).max(1));
            let part = Space {
                bytes: left.bytes / parts,
                files: left.files / parts,
            };
            if part.can_hold(held) {
                size = size.component_min(part);
            }
        }
        self.resize_unmade(kind, size);
    }

    /// A volume of a kind of which none was measured is made larger: the others of its pipeline
    /// that do not exist count as what is left for them then. Answers these with the sizes that
    /// they had.
    pub(crate) fn make_way_for_grown(
        &mut self,
        pipeline: u32,
        growth: &(VolumeIndex, Space, Space),
    ) -> Vec<(VolumeIndex, Space)> {
        let &(grown, _, after) = growth;
        let Some(kind) = self.sizes.kind_of.get(&grown).copied() else {
            return Vec::new();
        };
        if self.sizes.learned.contains_key(&kind) || !self.sizes.crowds.contains_key(&kind) {
            return Vec::new();
        }
        let left = self.left_for_unknown(kind, self.offered());
        let left = left
            .saturating_sub(self.unknown_beside(kind))
            .saturating_sub(after);
        let is_other = |volume: &VolumeIndex| {
            let user = self.graph.workflow.volume(*volume).users.first();
            let is_here = user.is_some_and(|user| self.graph.pipeline(*user) == pipeline);
            *volume != grown && is_here && !self.volumes.is_live(*volume)
        };
        let others = self.sizes.kinds[&kind].iter().copied();
        let others: Vec<VolumeIndex> = others.filter(is_other).collect();
        let parts = (others.len() as u64).max(1) * (1000 + MARGIN_PERMILLE);
        let part = Space {
            bytes: (left.bytes / parts * 1000).max(1),
            files: (left.files / parts * 1000).max(1),
        };
        let before: Vec<_> = others
            .into_iter()
            .map(|it| (it, self.size_of(it)))
            .collect();
        for &(volume, size) in &before {
            self.resize(volume, size.component_min(part));
        }
        before
    }

    /// What volumes of other kinds of a pipeline take whose size is not declared.
    fn unknown_beside(&self, kind: SizeClass) -> Space {
        let others = self.sizes.kinds_of(kind.0).filter(|other| **other != kind);
        let taken = |other: &SizeClass| {
            let count = self.sizes.crowds.get(other).copied().unwrap_or(1);
            let first = self.sizes.kinds[other].first().copied();
            let size = first.map_or(Space::ZERO, |volume| self.size_of(volume));
            Space {
                bytes: size.bytes.saturating_mul(count),
                files: size.files.saturating_mul(count),
            }
        };
        others.map(taken).fold(Space::ZERO, Space::saturating_add)
    }

    /// How many volumes of a kind exist in the pipeline that has most of them, and what they take.
    fn made_of(&self, kind: SizeClass) -> (u64, Space) {
        let mut made: BTreeMap<u32, (u64, Space)> = BTreeMap::new();
        let volumes = self.sizes.kinds[&kind].iter().copied();
        for volume in volumes.filter(|volume| self.volumes.is_live(*volume)) {
            let Some(user) = self.graph.workflow.volume(volume).users.first() else {
                continue;
            };
            let (count, sum) = made.entry(self.graph.pipeline(*user)).or_default();
            (*count, *sum) = (*count + 1, sum.saturating_add(self.size_of(volume)));
        }
        let most = made.into_values().max_by_key(|(count, _)| *count);
        most.unwrap_or_default()
    }
}
