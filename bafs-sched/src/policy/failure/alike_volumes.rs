//! Volumes of unknown size that one pipeline has many of, as a job gathers from jobs that are
//! alike: one of them is measured before the others are made. What is measured says
//! `policy/failure/sizes.rs`.

use std::collections::BTreeMap;

use bafs_workflow::{JobIndex, VolumeIndex};

use super::sizes::{MARGIN_PERMILLE, largest_offered, left_for_unknown, offered};
use crate::policy::View;
use crate::space::Space;
use crate::state::volume_sizes::{Growth, SizeClass};

/// Whether others waited for what an attempt that ended would measure. They may start, and one of
/// them is measured instead where it told nothing.
pub(crate) fn is_measurement_awaited(view: View<'_>, job: JobIndex) -> bool {
    let (crowds, learned) = (&view.sizes.crowds, &view.sizes.learned);
    if crowds.is_empty() {
        return false;
    }
    let kind_of = |volume: &VolumeIndex| view.sizes.kind_of.get(volume);
    let mut kinds = view.scratch_written(job).into_iter();
    let is_awaited = |kind: &SizeClass| crowds.contains_key(kind) && !learned.contains_key(kind);
    kinds.any(|volume| kind_of(&volume).is_some_and(is_awaited))
}

/// What is reserved for volumes of a kind when one proved too small although some were measured:
/// the others of a pipeline that do not exist get more too, or each would find that out by failing.
pub(crate) fn raise_measured(view: View<'_>, growth: &Growth) -> Option<(SizeClass, Space)> {
    let (volume, _, after) = growth;
    let kind = *view.sizes.kind_of.get(volume)?;
    let known = view.sizes.learned.get(&kind)?;
    let is_of_many = view.sizes.crowds.contains_key(&kind);
    is_of_many.then(|| (kind, known.component_max(*after)))
}

/// What volumes of a kind that was measured get. The margin is less where with all of it the
/// volumes of a pipeline did not fit on a node, but without it do.
pub(crate) fn size_to_reserve(view: View<'_>, kind: SizeClass, measured: Space) -> Space {
    let size = measured.component_min(largest_offered(view));
    let (Some(count), Some(held)) = (
        view.sizes.crowds.get(&kind).copied(),
        view.sizes.held.get(&kind).copied(),
    ) else {
        return size;
    };
    let left = left_for_unknown(view, kind, offered(view));
    let left = left.saturating_sub(unknown_beside(view, kind, |volume| view.size_of(volume)));
    let (made, sum) = made_of(view, kind);
    let (left, parts) = (left.saturating_sub(sum), count.saturating_sub(made).max(1));
    let part = Space {
        bytes: left.bytes / parts,
        files: left.files / parts,
    };
    match part.can_hold(held) {
        true => size.component_min(part),
        false => size,
    }
}

/// A volume of a kind of which none was measured is made larger: the others of its pipeline that do
/// not exist count as what is left for them then. Adds their sizes to those that are `cut`.
pub(super) fn cut_others(
    view: View<'_>,
    pipeline: u32,
    growth: &Growth,
    cut: &mut BTreeMap<VolumeIndex, Space>,
) {
    let &(grown, _, after) = growth;
    let Some(kind) = view.sizes.kind_of.get(&grown).copied() else {
        return;
    };
    if view.sizes.learned.contains_key(&kind) || !view.sizes.crowds.contains_key(&kind) {
        return;
    }
    let size_of = |volume: VolumeIndex| {
        let size = cut.get(&volume).copied();
        size.unwrap_or_else(|| view.size_of(volume))
    };
    let left = left_for_unknown(view, kind, offered(view));
    let left = left
        .saturating_sub(unknown_beside(view, kind, size_of))
        .saturating_sub(after);
    let is_other = |volume: &VolumeIndex| {
        let user = view.graph.workflow.volume(*volume).users.first();
        let is_here = user.is_some_and(|user| view.graph.pipeline(*user) == pipeline);
        *volume != grown && is_here && !view.volumes.is_live(*volume)
    };
    let others = view.sizes.kinds[&kind].iter().copied();
    let others: Vec<VolumeIndex> = others.filter(is_other).collect();
    let parts = (others.len() as u64).max(1) * (1000 + MARGIN_PERMILLE);
    let part = Space {
        bytes: (left.bytes / parts * 1000).max(1),
        files: (left.files / parts * 1000).max(1),
    };
    let others = others.into_iter();
    let smaller: Vec<_> = others
        .map(|volume| (volume, size_of(volume).component_min(part)))
        .collect();
    cut.extend(smaller);
}

/// What volumes of other kinds of a pipeline take whose size is not declared.
fn unknown_beside(
    view: View<'_>,
    kind: SizeClass,
    size_of: impl Fn(VolumeIndex) -> Space,
) -> Space {
    let others = view.sizes.kinds_of(kind.0).filter(|other| **other != kind);
    let taken = |other: &SizeClass| {
        let count = view.sizes.crowds.get(other).copied().unwrap_or(1);
        let first = view.sizes.kinds[other].first().copied();
        let size = first.map_or(Space::ZERO, &size_of);
        Space {
            bytes: size.bytes.saturating_mul(count),
            files: size.files.saturating_mul(count),
        }
    };
    others.map(taken).fold(Space::ZERO, Space::saturating_add)
}

/// How many volumes of a kind exist in the pipeline that has most of them, and what they take.
fn made_of(view: View<'_>, kind: SizeClass) -> (u64, Space) {
    let mut made: BTreeMap<u32, (u64, Space)> = BTreeMap::new();
    let volumes = view.sizes.kinds[&kind].iter().copied();
    for volume in volumes.filter(|volume| view.volumes.is_live(*volume)) {
        let Some(user) = view.graph.workflow.volume(volume).users.first() else {
            continue;
        };
        let (count, sum) = made.entry(view.graph.pipeline(*user)).or_default();
        (*count, *sum) = (*count + 1, sum.saturating_add(view.size_of(volume)));
    }
    let most = made.into_values().max_by_key(|(count, _)| *count);
    most.unwrap_or_default()
}
