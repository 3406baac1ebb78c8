//! Sizes that are not declared: measured by pipelines that run first and learned from every
//! finished job. Alike volumes of one pipeline are `policy/failure/alike_volumes.rs`. What becomes
//! of sizes that are too small is in `policy/failure/resize.rs`, what follows from sizes in
//! `transition/volume_sizes.rs`. Places nothing.

use bafs_proto::message::JobReport;
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::policy::View;
use crate::space::{Space, scale_up};
use crate::state::job_order::RemainingNeed;
use crate::state::jobs::JobState;
use crate::state::volume_sizes::{Offered, PipelineShapeId, SizeClass};

/// What is reserved beyond what was measured, in thousandths, and at least so many bytes and files.
pub(super) const MARGIN_PERMILLE: u64 = 250;
const MARGIN_MIN: Space = Space {
    bytes: 1 << 20,
    files: 64,
};

/// A volume of unknown size has room for no more files than one for so many of its bytes, but for
/// so many at least.
const FILE_BYTES_MADE_UP: u64 = 1 << 10;
const FILES_MADE_UP_MIN: u64 = 1 << 20;

fn with_margin(held: Space) -> Space {
    let more = |held: u64, least: u64| {
        held.saturating_add(scale_up(held, MARGIN_PERMILLE, 1000).max(least))
    };
    Space {
        bytes: more(held.bytes, MARGIN_MIN.bytes),
        files: more(held.files, MARGIN_MIN.files),
    }
}

/// What a finished job tells of a kind of volumes.
#[derive(Debug)]
pub(crate) struct Measurement {
    pub(crate) kind: SizeClass,
    /// What the volume held.
    pub(crate) held: Space,
    /// What is reserved for others of its kind from now on, if that is more than before.
    pub(crate) size: Option<Space>,
}

/// What becomes of the measurement of a shape when a pipeline of it is at its end.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ProbeVerdict {
    /// Another one is measured.
    Unchanged,
    /// It succeeded: there is nothing more to wait for.
    Measured,
    /// It came to nothing, and this one is measured instead.
    Next(u32),
    /// It came to nothing, and no other is left.
    NoneLeft,
}

/// Sizes of volumes of each kind of which none was measured, when nodes offer something else than
/// when sizes were last made up: the first nodes that are seen may be the smallest.
pub(crate) fn make_up_sizes(view: View<'_>) -> Option<(Offered, Vec<(SizeClass, Space)>)> {
    if view.sizes.learned.len() == view.sizes.kinds.len() {
        return None;
    }
    let offered = offered(view);
    let is_none_left = offered.largest == Space::ZERO;
    let is_same = |before: Offered| is_none_left || before.is_alike(offered);
    if view.sizes.made_for.is_some_and(is_same) {
        return None;
    }
    let kinds = view.sizes.kinds.keys().copied();
    let unmeasured = kinds.filter(|kind| !view.sizes.learned.contains_key(kind));
    let sizes = unmeasured.map(|kind| (kind, made_up(view, kind, offered)));
    Some((offered, sizes.collect()))
}

/// What nodes may ever offer to this run: what others hold at the moment they give back.
pub(crate) fn offered(view: View<'_>) -> Offered {
    let workers = view.fleet.live().filter(|(_, node)| node.seen.slots > 0);
    let largest = workers.map(|(id, _)| view.fleet.offered(id)).max();
    let all = view.fleet.live().map(|(id, _)| view.fleet.offered(id));
    Offered {
        largest: largest.unwrap_or_default(),
        all: all.fold(Space::ZERO, Space::saturating_add),
    }
}

/// The part of a volume of this kind when a pipeline fits twice into what is left beside what
/// it declares: on the largest node, and with whole caches on all nodes. Where a pipeline has
/// several volumes of a kind it fits once, also when one was measured and the others get what
/// it held and the margin.
pub(crate) fn made_up(view: View<'_>, kind: SizeClass, offered: Offered) -> Space {
    let left = left_for_unknown(view, kind, offered);
    let kinds = view.sizes.kinds_of(kind.0).count() as u64;
    let more = |(_, count): (&SizeClass, &u64)| count - 1;
    let crowds = view.sizes.crowds_of(kind.0).map(more).sum::<u64>();
    let parts = match crowds {
        0 => 2 * kinds,
        _ => kinds + (crowds * (1000 + MARGIN_PERMILLE)).div_ceil(1000),
    };
    let bytes = (left.bytes / parts).max(1);
    // A disk without a limit of files would give more than anybody can make sense of.
    let files_most = (bytes / FILE_BYTES_MADE_UP).max(FILES_MADE_UP_MIN);
    Space {
        bytes,
        files: (left.files / parts).clamp(1, files_most),
    }
}

/// What is left for the volumes of unknown size of a pipeline beside what it declares.
pub(crate) fn left_for_unknown(view: View<'_>, kind: SizeClass, offered: Offered) -> Space {
    let Offered { largest, all } = offered;
    let declared = view.sizes.declared.get(&kind.0).copied();
    let RemainingNeed { least, whole } = declared.unwrap_or_default();
    let beside_caches = Space {
        bytes: all.saturating_sub(whole).bytes,
        files: u64::MAX,
    };
    largest.saturating_sub(least).component_min(beside_caches)
}

/// The most that a node may ever offer on which scratch volumes may lie.
pub(crate) fn largest_offered(view: View<'_>) -> Space {
    let nodes = view.nodes_for_scratch().map(|id| view.fleet.offered(id));
    nodes.fold(Space::ZERO, Space::component_max)
}

/// Volumes of a kind that get another size: those that do not exist and were not grown.
pub(crate) fn find_unmade(view: View<'_>, kind: SizeClass) -> Vec<VolumeIndex> {
    let volumes = view.sizes.kinds[&kind].iter().copied();
    let is_grown = |volume: &VolumeIndex| view.sizes.grown.contains(volume);
    volumes
        .filter(|volume| !is_grown(volume) && !view.volumes.is_live(*volume))
        .collect()
}

/// What a finished job tells of sizes: what its volumes hold is what others of their kind will
/// need.
pub(crate) fn measure_volumes(
    view: View<'_>,
    job: JobIndex,
    report: &JobReport,
) -> Vec<Measurement> {
    let measure = |(volume, writable): (VolumeIndex, bool)| {
        let name = &view.graph.workflow.volume(volume).name;
        let used = report.volumes.iter().find(|used| used.name == *name)?;
        let kind = *view.sizes.kind_of.get(&volume)?;
        let held = Space {
            bytes: used.used_bytes,
            files: used.used_files,
        };
        let known = view.sizes.learned.get(&kind).copied();
        // The margin is there to be used, but not up to its end.
        let is_enough = known.is_some_and(|known| known.can_hold(held.saturating_add(half(held))));
        // What is empty at the end may have held much, or have not been looked at.
        let is_only_writer = writable && view.graph.volume(volume).writers.len() == 1;
        let is_untouched = is_only_writer && used.changes == 0;
        if held == Space::ZERO && !is_untouched {
            return None;
        }
        let size = with_margin(held).component_max(known.unwrap_or_default());
        let is_more = !is_enough && known != Some(size);
        let size = is_more.then_some(size);
        Some(Measurement { kind, held, size })
    };
    let mounted = view.graph.mounted(job).into_iter();
    mounted.filter_map(measure).collect()
}

/// Judges the measurement of a shape when this pipeline of it is at its end.
pub(crate) fn judge_probe(view: View<'_>, pipeline: u32, shape: PipelineShapeId) -> ProbeVerdict {
    if view.sizes.probes.get(&shape) != Some(&pipeline) {
        return ProbeVerdict::Unchanged;
    }
    let is_done = |job| view.graph.state(job) == JobState::Done;
    if view.graph.members(pipeline).all(is_done) {
        return ProbeVerdict::Measured;
    }
    let next = view.sizes.unknown.get(&shape).and_then(|left| left.first());
    next.map_or(ProbeVerdict::NoneLeft, |next| ProbeVerdict::Next(*next))
}

/// Shapes whose measurement waits for a job that waits for it, each with the next of its like that
/// has a job ready.
pub(crate) fn find_stuck_probes(view: View<'_>) -> Vec<(PipelineShapeId, u32)> {
    let is_ready = |pipeline: &u32| {
        let mut jobs = view.graph.members(*pipeline);
        jobs.any(|job| view.queues.contains(job))
    };
    let probes = view.sizes.probes.iter();
    let stuck = probes.filter(|(_, probe)| !is_ready(probe));
    let next = stuck.filter_map(|(shape, _)| {
        let mut others = view.sizes.unknown[shape].iter().copied();
        others.find(is_ready).map(|next| (*shape, next))
    });
    next.collect()
}

fn half(held: Space) -> Space {
    Space {
        bytes: scale_up(held.bytes, MARGIN_PERMILLE / 2, 1000),
        files: scale_up(held.files, MARGIN_PERMILLE / 2, 1000),
    }
}
