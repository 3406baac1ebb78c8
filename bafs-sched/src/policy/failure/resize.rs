//! Sizes that are too small: doubled when a job found no space, for all of their like that have not
//! begun; declared ones once, others as long as a node has more. What nobody declared is measured
//! by `policy/failure/sizes.rs`; whether it was the disk of the node that had no space says
//! `policy/failure/full_disk.rs`. What follows is in `transition/small_volumes.rs`.

use std::collections::BTreeMap;

use bafs_proto::message::JobReport;
use bafs_workflow::{JobIndex, VolumeIndex};

use super::alike_volumes::cut_others;
use super::sizes::{largest_offered, made_up, offered};
use super::space_refusals::refused_for_space;
use crate::policy::View;
use crate::space::Space;
use crate::state::volume_sizes::{Growth, Offered, Taught};

/// Of which pipelines which volumes are made larger.
pub(crate) struct Lesson {
    /// Sizes of the scratch volumes of each job.
    kind: Vec<Vec<Space>>,
    /// Positions of jobs, places among their volumes, sizes before and after.
    places: Vec<(usize, usize, Space, Space)>,
}

/// One way to make volumes of a pipeline larger.
pub(crate) struct GrowthPlan {
    /// Those that proved too small.
    pub(crate) growths: Vec<Growth>,
    /// New sizes of all volumes that change, in this order.
    pub(crate) sizes: Vec<(VolumeIndex, Space)>,
}

/// Into so many parts a growth is divided where not all of it fits.
const GROWTH_PARTS: u64 = 4;

/// Volumes of a job that found no space, with their sizes and larger ones: those in which it
/// found none, else those that are nearly full, else all that it may write, unless they were
/// declared and made larger before.
pub(crate) fn find_growths(view: View<'_>, job: JobIndex, report: &JobReport) -> Vec<Growth> {
    let mounted = view.graph.mounted(job).into_iter();
    let is_scratch = |(volume, writable): &(VolumeIndex, bool)| {
        *writable && !view.graph.volume(*volume).is_cache && may_grow(view, *volume)
    };
    let all: Vec<VolumeIndex> = mounted
        .filter(is_scratch)
        .map(|(volume, _)| volume)
        .collect();
    let is_full = |volume: &VolumeIndex| {
        let (size, spec) = (view.size_of(*volume), view.graph.workflow.volume(*volume));
        let mut used = report.volumes.iter().filter(|used| used.name == spec.name);
        used.any(|used| {
            used.used_bytes >= size.bytes - size.bytes / 10
                || used.used_files >= size.files - size.files / 10
        })
    };
    let refused = refused_for_space(view, job, report);
    let volumes: Vec<VolumeIndex> = if !refused.is_empty() {
        all.into_iter().filter(|v| refused.contains(v)).collect()
    } else if all.iter().any(is_full) {
        all.into_iter().filter(is_full).collect()
    } else {
        all
    };
    let largest = largest_offered(view);
    let offered = Offered {
        largest,
        ..offered(view)
    };
    let larger = |volume: VolumeIndex| {
        let size = view.size_of(volume);
        let kind = view.sizes.kind_of.get(&volume);
        // Where nodes were small when its size was made up, or one was measured that needs less
        // than others, twice that says little.
        let made_up = kind.map(|kind| made_up(view, *kind, offered));
        let twice = size
            .saturating_add(size)
            .component_max(made_up.unwrap_or_default());
        twice.component_min(largest).component_max(size)
    };
    let grows = |volume: &VolumeIndex| larger(*volume) != view.size_of(*volume);
    let volumes: Vec<VolumeIndex> = volumes.into_iter().filter(grows).collect();
    let change = |volume: VolumeIndex| {
        let before = view.size_of(volume);
        (volume, before, larger(volume))
    };
    volumes.into_iter().map(change).collect()
}

/// Whether a volume may be made larger: a declared size once, as more would be a guess.
fn may_grow(view: View<'_>, volume: VolumeIndex) -> bool {
    view.sizes.is_undeclared(volume) || !view.sizes.grown.contains(&volume)
}

/// Ways to make volumes of a pipeline larger, the first the best; each is of use only if the
/// pipeline then fits. Of sizes that nobody declared a part of the growth may do, and what others
/// are taken to need that were not measured is made up anew.
pub(crate) fn plan_growths(view: View<'_>, pipeline: u32, growths: &[Growth]) -> Vec<GrowthPlan> {
    let is_declared = |(volume, ..): &Growth| !view.sizes.is_undeclared(*volume);
    let least = match growths.iter().any(is_declared) {
        true => GROWTH_PARTS,
        false => 1,
    };
    let parts = (least..=GROWTH_PARTS).rev();
    let plans = parts.map(|part| {
        let partly = growths.iter().map(|growth| take_part(*growth, part));
        let growths: Vec<Growth> = partly
            .filter(|(_, before, after)| before != after)
            .collect();
        let mut cut = BTreeMap::new();
        for growth in &growths {
            cut_others(view, pipeline, growth, &mut cut);
        }
        let grown = growths.iter().map(|&(volume, _, after)| (volume, after));
        let sizes = cut.into_iter().chain(grown).collect();
        GrowthPlan { growths, sizes }
    });
    plans.filter(|plan| !plan.growths.is_empty()).collect()
}

/// A part of a growth.
fn take_part((volume, before, after): Growth, part: u64) -> Growth {
    let more = |before: u64, after: u64| before + (after - before) / GROWTH_PARTS * part;
    let after = match part == GROWTH_PARTS {
        true => after,
        false => Space {
            bytes: more(before.bytes, after.bytes),
            files: more(before.files, after.files),
        },
    };
    (volume, before, after)
}

/// What a pipeline of this `kind` was before some of its volumes were made larger.
pub(crate) fn find_lesson(
    view: View<'_>,
    pipeline: u32,
    kind: Vec<Vec<Space>>,
    changes: &[Growth],
) -> Lesson {
    let mut places = Vec::new();
    for (position, job) in view.graph.courses.of(pipeline).iter().enumerate() {
        for (place, volume) in view.scratch_of(*job).into_iter().enumerate() {
            let change = changes.iter().find(|(changed, ..)| *changed == volume);
            places.extend(change.map(|(_, before, after)| (position, place, *before, *after)));
        }
    }
    Lesson { kind, places }
}

impl Lesson {
    /// What of it is remembered, so that all of its like are looked at once.
    pub(crate) fn taught(&self) -> impl Iterator<Item = Taught> + use<'_> {
        let places = self.places.iter();
        places.map(|(position, place, before, _)| (self.kind.len(), *position, *place, *before))
    }
}

/// Pipelines that have not begun and are like one of which volumes proved too small: they get
/// larger ones too, or each would find that out by failing.
pub(crate) fn find_alike(view: View<'_>, lesson: &Lesson) -> Vec<u32> {
    let length = lesson.kind.len();
    let has_begun = |job| view.graph.state(job).has_begun();
    let is_alike = |pipeline: &u32| {
        let is_first = view.graph.pipeline(JobIndex(*pipeline)) == *pipeline;
        is_first
            && view.graph.courses.of(*pipeline).len() == length
            && !view.graph.members(*pipeline).any(has_begun)
            && view.kind(*pipeline) == lesson.kind
    };
    let heads = view.graph.job_indexes().map(|job| job.0);
    heads.filter(is_alike).collect()
}

/// The sizes that volumes of such a pipeline get.
pub(crate) fn sizes_by_lesson(
    view: View<'_>,
    pipeline: u32,
    lesson: &Lesson,
) -> Vec<(VolumeIndex, Space)> {
    let places = lesson.places.iter();
    let larger = places.filter_map(|&(position, place, _, after)| {
        let job = view.graph.courses.of(pipeline)[position];
        let volume = view.scratch_of(job)[place];
        let is_larger = may_grow(view, volume) && after.can_hold(view.size_of(volume));
        is_larger.then_some((volume, after))
    });
    larger.collect()
}
