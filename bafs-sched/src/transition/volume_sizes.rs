//! Sizes of volumes that are not declared: which pipelines measure them, and what follows when they
//! are known. What is reserved says `policy/failure/sizes.rs`.

use bafs_proto::message::JobReport;
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::decision::Decision;
use crate::policy::View;
use crate::policy::failure::alike_volumes;
use crate::policy::failure::sizes::{self, ProbeVerdict};
use crate::space::Space;
use crate::state::scheduler_state::State;
use crate::state::timers::Timer;
use crate::state::volume_sizes::{Growth, PipelineShapeId, SizeClass};

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
        let Some((offered, sizes)) = sizes::make_up_sizes(View::new(self)) else {
            return;
        };
        self.sizes.made_for = Some(offered);
        for (kind, size) in sizes {
            self.resize_unmade(kind, size);
        }
        self.sizes_changed();
    }

    /// A job is done: what its volumes hold is what others of their kind will need.
    pub(crate) fn learn_sizes(&mut self, job: JobIndex, report: &JobReport) {
        let measured = sizes::measure_volumes(View::new(self), job, report);
        for measurement in &measured {
            let most = self.sizes.held.entry(measurement.kind).or_default();
            *most = most.component_max(measurement.held);
        }
        let raised = measured.iter().filter_map(|it| Some((it.kind, it.size?)));
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

    /// A kind was measured: volumes of it that do not exist get what they need.
    fn resize_learned(&mut self, kind: SizeClass, measured: Space) {
        let size = alike_volumes::size_to_reserve(View::new(self), kind, measured);
        self.resize_unmade(kind, size);
    }

    /// Gives a size to all volumes of a kind that do not exist and were not grown.
    fn resize_unmade(&mut self, kind: SizeClass, size: Space) {
        let volumes = sizes::find_unmade(View::new(self), kind);
        self.commit(Decision::ReserveUnmade { volumes, size });
    }

    /// A pipeline is at its end: it was measured, or the next one is.
    pub(crate) fn pass_probe_on(&mut self, pipeline: u32) {
        let Some(&shape) = self.sizes.shape_of.get(&pipeline) else {
            return;
        };
        if let Some(unknown) = self.sizes.unknown.get_mut(&shape) {
            unknown.remove(&pipeline);
        }
        match sizes::judge_probe(View::new(self), pipeline, shape) {
            ProbeVerdict::Unchanged => return,
            ProbeVerdict::Measured => return self.end_probe(shape),
            ProbeVerdict::Next(next) => {
                self.sizes.probes.insert(shape, next);
                self.enqueue_members(next);
            }
            ProbeVerdict::NoneLeft => drop(self.sizes.probes.remove(&shape)),
        }
        self.queues.wake_all();
    }

    /// Nothing goes on: where what is measured waits for a job that waits for the measurement,
    /// the next of its like that has a job ready is measured. Answers whether there was one.
    pub(crate) fn pass_stuck_probes_on(&mut self) -> bool {
        let passed = sizes::find_stuck_probes(View::new(self));
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
        self.timers.set(self.now.plus_ms(1), Timer::WaitTimeout);
        true
    }

    /// An attempt ended: those that waited for what it would measure may start.
    pub(crate) fn pass_measurement_on(&mut self, job: JobIndex) {
        if alike_volumes::is_measurement_awaited(View::new(self), job) {
            self.queues.wake_all();
        }
    }

    /// Volumes proved too small although some of their kind were measured.
    pub(crate) fn raise_measured(&mut self, growths: &[Growth]) {
        let mut is_raised = false;
        for growth in growths {
            if let Some((kind, size)) = alike_volumes::raise_measured(View::new(self), growth) {
                is_raised |= self.sizes.learned.insert(kind, size) != Some(size);
                self.resize_learned(kind, size);
            }
        }
        if is_raised {
            self.sizes_changed();
        }
    }

    /// Changes what is to be reserved for a volume from now on.
    pub(crate) fn resize(&mut self, volume: VolumeIndex, size: Space) {
        self.graph.resize(volume, size);
        self.volumes.resize(volume, size.bytes);
    }

    /// Everything that was derived from sizes is derived anew.
    fn sizes_changed(&mut self) {
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
