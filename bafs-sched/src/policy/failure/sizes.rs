//! Sizes that are not declared: measured by pipelines that run first and learned from every
//! finished job. Alike volumes of one pipeline are `policy/failure/alike_volumes.rs`. What becomes
//! of sizes that are too small is in `policy/failure/resize.rs`. Places nothing.

use std::collections::BTreeMap;

use bafs_proto::message::JobReport;
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::space::{Space, scale_up};
use crate::state::job_order::{Courses, RemainingNeed};
use crate::state::jobs::{Graph, JobState};
use crate::state::scheduler_state::State;
use crate::state::timers::Timer;
use crate::state::volume_sizes::{Offered, PipelineShapeId, SizeClass};

/// What is reserved beyond what was measured, in thousandths, and at least so many bytes and files.
pub(crate) const MARGIN_PERMILLE: u64 = 250;
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

impl State {
    /// Nodes are known: volumes of unknown size get so much that a pipeline fits on the largest
    /// node twice, and one pipeline of each shape is run first.
    pub(crate) fn begin_probes(&mut self) {
        let is_begun = self.sizes.made_for.is_some();
        self.make_sizes_up();
        if !is_begun && !self.settings.has_private_data_at_home() {
            for (shape, pipelines) in &self.sizes.unknown {
                self.sizes
                    .probes
                    .extend(pipelines.first().map(|first| (*shape, *first)));
            }
            self.enqueue_all();
        }
    }

    /// The first nodes that are seen may be the smallest, and what they offer changes: volumes
    /// that do not exist, and of whose like none was measured, are given sizes again.
    pub(crate) fn make_sizes_up(&mut self) {
        if self.sizes.learned.len() == self.sizes.kinds.len() {
            return;
        }
        let offered = self.offered();
        let is_none_left = offered.largest == Space::ZERO;
        let is_same = |before: Offered| is_none_left || before.is_alike(offered);
        if self.sizes.made_for.is_some_and(is_same) {
            return;
        }
        self.sizes.made_for = Some(offered);
        let kinds: Vec<SizeClass> = self.sizes.kinds.keys().copied().collect();
        for kind in kinds {
            if self.sizes.learned.contains_key(&kind) {
                continue;
            }
            let size = self.made_up(kind, offered);
            self.resize_unmade(kind, size);
        }
        self.sizes_changed();
    }

    /// What nodes may ever offer to this run: what others hold at the moment they give back.
    pub(crate) fn offered(&self) -> Offered {
        let workers = self.fleet.live().filter(|(_, node)| node.seen.slots > 0);
        let largest = workers.map(|(id, _)| self.fleet.offered(id)).max();
        let all = self.fleet.live().map(|(id, _)| self.fleet.offered(id));
        Offered {
            largest: largest.unwrap_or_default(),
            all: all.fold(Space::ZERO, Space::saturating_add),
        }
    }

    /// The part of a volume of this kind when a pipeline fits twice into what is left beside what
    /// it declares: on the largest node, and with whole caches on all nodes. Where a pipeline has
    /// several volumes of a kind it fits once, also when one was measured and the others get what
    /// it held and the margin.
    pub(crate) fn made_up(&self, kind: SizeClass, offered: Offered) -> Space {
        let left = self.left_for_unknown(kind, offered);
        let kinds = self.sizes.kinds_of(kind.0).count() as u64;
        let more = |(_, count): (&SizeClass, &u64)| count - 1;
        let crowds = self.sizes.crowds_of(kind.0).map(more).sum::<u64>();
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
    pub(crate) fn left_for_unknown(&self, kind: SizeClass, offered: Offered) -> Space {
        let Offered { largest, all } = offered;
        let declared = self.sizes.declared.get(&kind.0).copied();
        let RemainingNeed { least, whole } = declared.unwrap_or_default();
        let beside_caches = Space {
            bytes: all.saturating_sub(whole).bytes,
            files: u64::MAX,
        };
        largest.saturating_sub(least).component_min(beside_caches)
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

    /// A job is done: what its volumes hold is what others of their kind will need.
    pub(crate) fn learn_sizes(&mut self, job: JobIndex, report: &JobReport) {
        let mut raised = Vec::new();
        for (volume, writable) in self.graph.mounted(job) {
            let name = &self.graph.workflow.volume(volume).name;
            let used = report.volumes.iter().find(|used| used.name == *name);
            let (Some(kind), Some(used)) = (self.sizes.kind_of.get(&volume), used) else {
                continue;
            };
            let held = Space {
                bytes: used.used_bytes,
                files: used.used_files,
            };
            let known = self.sizes.learned.get(kind).copied();
            // The margin is there to be used, but not up to its end.
            let is_enough =
                known.is_some_and(|known| known.can_hold(held.saturating_add(half(held))));
            // What is empty at the end may have held much, or have not been looked at.
            let is_only_writer = writable && self.graph.volume(volume).writers.len() == 1;
            let is_untouched = is_only_writer && used.changes == 0;
            let is_measured = held != Space::ZERO || is_untouched;
            if is_measured {
                let most = self.sizes.held.entry(*kind).or_default();
                *most = most.component_max(held);
            }
            if is_measured && (known.is_none() || !is_enough) {
                let size = with_margin(held).component_max(known.unwrap_or_default());
                if known != Some(size) {
                    raised.push((*kind, size));
                }
            }
        }
        for (kind, size) in raised {
            self.sizes.learned.insert(kind, size);
            if self.sizes.is_known(kind.0) {
                self.end_probe(kind.0);
            } else if self.sizes.crowds.contains_key(&kind) {
                self.resize_learned(kind, size);
                self.sizes_changed();
            }
        }
    }

    /// A shape was measured: its pipelines wait no more, and reserve what is known.
    fn end_probe(&mut self, shape: PipelineShapeId) {
        self.sizes.probes.remove(&shape);
        let learned: Vec<(SizeClass, Space)> =
            self.sizes.learned.iter().map(|(k, s)| (*k, *s)).collect();
        for (kind, size) in learned.into_iter().filter(|(kind, _)| kind.0 == shape) {
            self.resize_learned(kind, size);
        }
        self.sizes_changed();
    }

    /// Gives a size to all volumes of a kind that do not exist and were not grown.
    pub(crate) fn resize_unmade(&mut self, kind: SizeClass, size: Space) {
        for position in 0..self.sizes.kinds[&kind].len() {
            let volume = self.sizes.kinds[&kind][position];
            let is_grown = self.sizes.grown.contains(&volume);
            if !is_grown && !self.volumes.is_live(volume) {
                self.resize(volume, size);
            }
        }
    }

    /// The most that a node may ever offer on which scratch volumes may lie.
    pub(crate) fn largest_offered(&self) -> Space {
        let nodes = self.nodes_for_scratch().map(|id| self.fleet.offered(id));
        nodes.fold(Space::ZERO, Space::component_max)
    }

    /// A pipeline is at its end: if it was measured and came to nothing, the next one is. If it
    /// succeeded, there is nothing more to wait for.
    pub(crate) fn pass_probe_on(&mut self, pipeline: u32) {
        let Some(&shape) = self.sizes.shape_of.get(&pipeline) else {
            return;
        };
        if let Some(unknown) = self.sizes.unknown.get_mut(&shape) {
            unknown.remove(&pipeline);
        }
        if self.sizes.probes.get(&shape) != Some(&pipeline) {
            return;
        }
        let is_done = |job| self.graph.state(job) == JobState::Done;
        if self.graph.members(pipeline).all(is_done) {
            self.end_probe(shape);
            return;
        }
        let next = self.sizes.unknown.get(&shape).and_then(|left| left.first());
        match next.copied() {
            Some(next) => {
                self.sizes.probes.insert(shape, next);
                self.enqueue_members(next);
            }
            None => drop(self.sizes.probes.remove(&shape)),
        }
        self.queues.wake_all();
    }

    /// Nothing goes on: where what is measured waits for a job that waits for the measurement,
    /// the next of its like that has a job ready is measured. Answers whether there was one.
    pub(crate) fn pass_stuck_probes_on(&mut self) -> bool {
        let is_ready = |pipeline: &u32| {
            let mut jobs = self.graph.members(*pipeline);
            jobs.any(|job| self.queues.contains(job))
        };
        let mut passed = Vec::new();
        for (shape, probe) in &self.sizes.probes {
            let mut others = self.sizes.unknown[shape].iter().copied();
            if !is_ready(probe) {
                passed.extend(others.find(is_ready).map(|next| (*shape, next)));
            }
        }
        if passed.is_empty() {
            return false;
        }
        for (shape, next) in passed {
            let before = self.sizes.probes.insert(shape, next);
            before.into_iter().for_each(|p| self.enqueue_members(p));
            self.enqueue_members(next);
        }
        self.queues.wake_all();
        // No fact need follow that would make anybody look again.
        self.timers.set(self.now.plus_ms(1), Timer::Patience);
        true
    }

    /// Everything that was derived from sizes is derived anew.
    pub(crate) fn sizes_changed(&mut self) {
        self.graph.measure_courses();
        self.scratch_volume_max = self.largest_scratch_volume();
        self.scratch_need_max = self.largest_scratch_need();
        self.enqueue_all();
        self.queues.wake_all();
    }

    /// The order of all waiting jobs changed.
    fn enqueue_all(&mut self) {
        for job in self.graph.job_indexes() {
            if self.queues.contains(job) {
                self.enqueue(job);
            }
        }
    }

    /// The order of the waiting jobs of a pipeline changed.
    pub(crate) fn enqueue_members(&mut self, pipeline: u32) {
        let members: Vec<JobIndex> = self.graph.members(pipeline).collect();
        for job in members {
            if self.queues.contains(job) {
                self.enqueue(job);
            }
        }
    }
}

fn half(held: Space) -> Space {
    Space {
        bytes: scale_up(held.bytes, MARGIN_PERMILLE / 2, 1000),
        files: scale_up(held.files, MARGIN_PERMILLE / 2, 1000),
    }
}

impl State {
    /// Changes what is to be reserved for a volume from now on.
    pub(crate) fn resize(&mut self, volume: VolumeIndex, size: Space) {
        self.graph.resize(volume, size);
        self.volumes.resize(volume, size.bytes);
    }
}

impl Graph {
    fn resize(&mut self, volume: VolumeIndex, size: Space) {
        let spec = &mut self.workflow.volumes[volume.as_usize()];
        (spec.size_bytes, spec.size_files) = (size.bytes, size.files);
        self.sizes.insert(volume, size);
    }

    /// Sizes of one pipeline changed: what it needs at once is counted anew.
    pub(crate) fn measure_course(&mut self, pipeline: u32) {
        let mut members: Vec<JobIndex> = self.members(pipeline).collect();
        members.sort_unstable_by_key(|job| self.rank(*job));
        // What its home must keep free is counted anew, too.
        if let Some(first) = members.first() {
            self.begun.note(*first);
        }
        let states = members.iter().map(|job| (*job, self.state(*job)));
        let states: BTreeMap<JobIndex, JobState> = states.collect();
        let has_begun = |job: JobIndex| states[&job].has_begun();
        self.courses
            .measure(&self.workflow, pipeline, members, has_begun);
    }

    /// Sizes changed: what pipelines need at once is counted anew. Courses stay when they are as
    /// good.
    pub(crate) fn measure_courses(&mut self) {
        let pipelines: Vec<u32> = self.job_indexes().map(|job| self.pipeline(job)).collect();
        let order = self.workflow.topological_order();
        let mut courses = Courses::new(&self.workflow, &pipelines, &order);
        let has_begun = |job: JobIndex| self.state(job).has_begun();
        for job in &order {
            courses.moved(pipelines[job.as_usize()], *job, has_begun);
        }
        for job in order.iter().rev() {
            courses.moved(pipelines[job.as_usize()], *job, has_begun);
        }
        self.courses = courses;
        self.begun.note_all();
    }
}
