//! Properties of a workload that strategies need: sizes at its largest level, and work. It does not
//! decide placements.
//!
//! A canonical workload has an exact shape. Any other graph is reduced to its bottleneck: a
//! pipeline is a connected part of the graph, and the largest level of any pipeline represents all.

use std::collections::{BTreeMap, BTreeSet};

use bafs_workflow::{Job, JobIndex, Volume, VolumeIndex, VolumeKind, Workflow};
use serde::{Deserialize, Serialize};

use super::canonical::CanonicalWorkload;
use super::environment::Environment;
use super::scratch_sizes::{ScratchSize, ScratchSizes};

/// Sizes of scratch volumes up to which each of them is kept.
const SIZES_MAX: usize = 10_000;

/// Sizes and work of a workload, as strategies need them. Bytes are exact. The `f64` fields serve
/// predictions only.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Shape {
    /// Pipelines, of jobs that scratch volumes or their order connect.
    pub width: u64,
    /// Pipelines as the scheduler counts them, connected by scratch volumes alone, for each of
    /// these.
    pub(super) scheduler_pipelines: u64,
    /// Stages of the longest pipeline.
    pub depth: u64,
    /// Jobs of a pipeline, on average: more than stages where stages have several.
    pub pipeline_jobs: f64,
    /// Batch data of the stage that has most.
    pub batch_bytes: u128,
    /// All batch data, each volume once.
    pub batch_total_bytes: u128,
    /// Batch data that one job reads, on average.
    pub batch_read_bytes: f64,
    /// The most batch volumes that one stage reads, at least one.
    pub level_volumes: u64,
    /// Private data that a pipeline holds while it runs its largest stage.
    pub running_bytes: u128,
    /// Private data that it holds between its two stages that share most.
    pub waiting_bytes: u128,
    /// Private data that it holds when nothing is freed before its end.
    pub retained_bytes: u128,
    /// The largest scratch volume, which one node must hold.
    pub largest_volume_bytes: u64,
    /// Whether all scratch volumes, if there are any, are that large and have room for as many
    /// files, so that it is known how many lie side by side.
    pub has_equal_volumes: bool,
    /// The most files that a scratch volume has room for.
    pub volume_files: u64,
    /// All scratch volumes, if a packing search is needed: not for a canonical workload, nor for
    /// the rest of a workload.
    #[serde(skip)]
    pub(super) scratch: ScratchSizes,
    /// All scratch volumes in bytes, each with its own size; `None` if pipelines are equal.
    #[serde(skip)]
    pub(super) scratch_bytes: Option<u128>,
    /// Files of the batch data of the stage that has most.
    pub batch_files: u64,
    /// Files of all batch data.
    pub batch_total_files: u64,
    /// Private data that a stage of a pipeline reads, on average; it writes as much.
    pub private_io_bytes: f64,
    /// Bytes that a pipeline reads from home besides batch data.
    pub endpoint_in_bytes: f64,
    /// Bytes that a pipeline commits to home.
    pub endpoint_out_bytes: f64,
    /// Mean computing time of a job; where stages have more jobs or fewer, that of a stage of one
    /// pipeline.
    pub run_s: f64,
    /// Standard deviation of the computing time as a share of its mean.
    pub variability: f64,
    /// Processors that a job keeps while it computes, on average over that time.
    pub cpus: f64,
    /// How many processors single jobs keep, the most first, with the share of all work that these
    /// jobs are; empty when each keeps one.
    #[serde(skip)]
    pub(super) cpu_widths: Vec<(u32, f64)>,
    /// Computing on the longest way through any pipeline, over that of a pipeline of mean jobs.
    pub critical_path_ratio: f64,
}

impl Shape {
    /// The shape of a workflow: as the equations want it where they describe it, else that of its
    /// largest stages.
    pub fn from_workflow(workflow: &Workflow, variability: f64) -> Self {
        CanonicalWorkload::recognise(workflow, variability).map_or_else(
            |_| Self::from_largest_levels(workflow, variability).0,
            |canonical| canonical.shape(),
        )
    }

    /// The shape of any workflow by its largest levels, and the approximations, as sentences.
    pub fn from_largest_levels(workflow: &Workflow, variability: f64) -> (Self, Vec<String>) {
        let pipelines = ConnectedPipelines::from_workflow(workflow);
        let levels = workflow.levels();
        let mut shape = Self::from_batch_data(workflow, &levels);
        shape.width = pipelines.members.len() as u64;
        let counted: BTreeSet<u32> = workflow.pipelines().into_iter().collect();
        shape.scheduler_pipelines = (counted.len() as u64).div_ceil(shape.width.max(1));
        shape.pipeline_jobs = workflow.jobs.len() as f64 / shape.width.max(1) as f64;
        shape.variability = variability;
        shape.set_volumes(workflow);
        for members in &pipelines.members {
            shape.include_pipeline(&PrivateData::of_pipeline(workflow, members, &levels));
        }
        shape.set_transferred(workflow);
        shape.set_computing(workflow, |job| {
            workflow.job(job).runtime_s.unwrap_or(0) as f64
        });
        (
            shape,
            describe_approximations(workflow, &pipelines, &levels),
        )
    }

    fn set_volumes(&mut self, workflow: &Workflow) {
        let is_scratch = |volume: &&Volume| matches!(volume.kind, VolumeKind::Scratch { .. });
        let scratch = || workflow.volumes.iter().filter(is_scratch);
        self.volume_files = scratch().map(|volume| volume.size_files).max().unwrap_or(0);
        let mut pieces: BTreeMap<ScratchSize, u64> = BTreeMap::new();
        for volume in scratch() {
            let piece = ScratchSize {
                bytes: volume.size_bytes,
                files: volume.size_files,
            };
            *pieces.entry(piece).or_default() += 1;
        }
        self.has_equal_volumes = pieces.len() <= 1;
        self.scratch_bytes = Some(total_bytes(&pieces));
        if pieces.len() <= SIZES_MAX {
            self.scratch = pieces.into_iter().rev().collect();
        }
    }

    /// Transferred bytes, which are added up: the mean of a level and of a pipeline.
    fn set_transferred(&mut self, workflow: &Workflow) {
        let bytes = |volume: VolumeIndex| match &workflow.volume(volume).kind {
            VolumeKind::Scratch { .. } => workflow.volume(volume).size_bytes as f64,
            VolumeKind::Cache { .. } => 0.0,
        };
        let mounted = |job: &Job| -> f64 {
            let volumes: BTreeSet<_> = job.mounts.iter().map(|mount| mount.volume).collect();
            volumes.into_iter().map(bytes).sum()
        };
        let mounted: f64 = workflow.jobs.iter().map(mounted).sum();
        self.private_io_bytes = mounted / 2.0 / (self.width * self.depth).max(1) as f64;
        let is_filled = |volume: &&Volume| {
            let is_filled = matches!(volume.kind, VolumeKind::Scratch { fill: Some(_) });
            is_filled && !volume.users.is_empty()
        };
        let filled = workflow.volumes.iter().filter(is_filled);
        let filled: f64 = filled.map(|volume| volume.size_bytes as f64).sum();
        let extracted: BTreeSet<_> = workflow.extracts.iter().map(|it| it.volume).collect();
        let extracted: f64 = extracted.into_iter().map(bytes).sum();
        let width = self.width.max(1) as f64;
        (self.endpoint_in_bytes, self.endpoint_out_bytes) = (filled / width, extracted / width);
    }

    /// The same with other computing times of jobs, in seconds, than they declare.
    pub fn with_times(mut self, workflow: &Workflow, run_s: impl Fn(JobIndex) -> f64) -> Self {
        self.set_computing(workflow, run_s);
        self
    }

    fn set_computing(&mut self, workflow: &Workflow, run_s: impl Fn(JobIndex) -> f64) {
        let (mut all_s, mut processor_s, mut longest_s) = (0.0, 0.0, 0.0f64);
        let mut widths: BTreeMap<u32, f64> = BTreeMap::new();
        let mut until_s = vec![0.0f64; workflow.jobs.len()];
        for index in workflow.topological_order() {
            let job = workflow.job(index);
            let run_s = run_s(index);
            all_s += run_s;
            processor_s += run_s * f64::from(job.cpus);
            *widths.entry(job.cpus).or_default() += run_s * f64::from(job.cpus);
            let parents = job.parents.iter().map(|parent| until_s[parent.as_usize()]);
            let end_s = run_s + parents.fold(0.0, f64::max);
            until_s[index.as_usize()] = end_s;
            longest_s = longest_s.max(end_s);
        }
        self.run_s = all_s / (self.width * self.depth).max(1) as f64;
        if all_s > 0.0 {
            self.cpus = processor_s / all_s;
            self.critical_path_ratio = longest_s / (self.run_s * self.depth as f64);
        }
        if widths.keys().any(|cpus| *cpus != 1) {
            let share = |seconds: f64| match processor_s > 0.0 {
                true => seconds / processor_s,
                false => 0.0,
            };
            let widest_first = widths.into_iter().rev();
            self.cpu_widths = widest_first.map(|(cpus, s)| (cpus, share(s))).collect();
        }
    }

    /// Processors that the widest and the narrowest job keep.
    pub(super) fn cpus_range(&self) -> (u32, u32) {
        let cpus = |width: Option<&(u32, f64)>| width.map_or(1, |(cpus, _)| *cpus);
        (cpus(self.cpu_widths.first()), cpus(self.cpu_widths.last()))
    }

    /// Why the workload cannot start on the nodes at the start, if a job fits on none of them.
    pub fn why_too_wide(&self, environment: &Environment) -> Option<String> {
        let (widest, _) = self.cpus_range();
        (environment.usable_cpus(widest) == 0).then(|| {
            format!("a job needs {widest} processors, more than any node has at the start")
        })
    }

    /// Less than this no strategy takes on these nodes, in seconds: all computing together, that
    /// of jobs that only some nodes can run on these, and that on the longest way.
    pub fn time_s_min(&self, environment: &Environment) -> f64 {
        let pipeline_s = self.run_s * self.depth as f64;
        let all_s = pipeline_s * self.width as f64 * self.cpus;
        let (mut least_s, mut share) = (pipeline_s * self.critical_path_ratio, 0.0);
        for (cpus, part) in &self.cpu_widths {
            share += part;
            least_s = least_s.max(all_s * share / environment.usable_cpus(*cpus).max(1) as f64);
        }
        least_s.max(all_s / environment.usable_nodes(self).cpus().max(1) as f64)
    }

    /// The same with another number of pipelines: fewer hold at most the total of all, more hold as
    /// much as the largest, each.
    pub fn with_width(&self, width: u64) -> Self {
        let mut shape = self.clone();
        if width != self.width {
            // It is unknown which pipelines remain.
            shape.scratch.clear();
        }
        if width > self.width {
            shape.scratch_bytes = None;
        }
        shape.width = width;
        shape
    }

    /// Private data when nothing is freed before the end of all, at most.
    pub(super) fn retained_by_all(&self) -> u128 {
        let as_largest = self.retained_bytes * u128::from(self.width);
        self.scratch_bytes
            .map_or(as_largest, |bytes| bytes.min(as_largest))
    }

    /// Files that all volumes together have room for, each volume once.
    pub(super) fn total_files(&self) -> u128 {
        let scratch = match self.scratch.is_empty() {
            true => {
                let volumes = match u128::from(self.largest_volume_bytes) {
                    0 => u128::from(self.depth) + 1,
                    bytes => self.retained_bytes / bytes,
                };
                volumes * u128::from(self.width) * u128::from(self.volume_files)
            }
            false => {
                let files = |(piece, count): &(ScratchSize, u64)| {
                    u128::from(piece.files) * u128::from(*count)
                };
                self.scratch.iter().map(files).sum()
            }
        };
        scratch + u128::from(self.batch_total_files)
    }

    fn from_batch_data(workflow: &Workflow, levels: &[u32]) -> Self {
        let mut stages: BTreeMap<u32, BTreeSet<VolumeIndex>> = BTreeMap::new();
        let mut read_bytes = 0.0;
        for (job, &level) in workflow.jobs.iter().zip(levels) {
            for mount in &job.mounts {
                let volume = workflow.volume(mount.volume);
                if matches!(volume.kind, VolumeKind::Cache { .. }) {
                    stages.entry(level).or_default().insert(mount.volume);
                    read_bytes += volume.size_bytes as f64;
                }
            }
        }
        let bytes = |volumes: &BTreeSet<VolumeIndex>| -> u128 {
            volumes
                .iter()
                .map(|&v| u128::from(workflow.volume(v).size_bytes))
                .sum()
        };
        let files = |volumes: &BTreeSet<VolumeIndex>| -> u64 {
            let files = volumes.iter().map(|&v| workflow.volume(v).size_files);
            files.fold(0, u64::saturating_add)
        };
        let all = stages.values().flatten().copied().collect();
        let volumes = stages.values().map(|volumes| volumes.len() as u64);
        Self {
            width: 0,
            scheduler_pipelines: 1,
            depth: levels.iter().max().map_or(1, |&level| u64::from(level) + 1),
            pipeline_jobs: 0.0,
            batch_bytes: stages.values().map(bytes).max().unwrap_or(0),
            batch_total_bytes: bytes(&all),
            batch_files: stages.values().map(files).max().unwrap_or(0),
            batch_total_files: files(&all),
            batch_read_bytes: read_bytes / workflow.jobs.len().max(1) as f64,
            level_volumes: volumes.max().unwrap_or(1),
            running_bytes: 0,
            waiting_bytes: 0,
            retained_bytes: 0,
            largest_volume_bytes: 0,
            has_equal_volumes: false,
            volume_files: 0,
            scratch: ScratchSizes::new(),
            scratch_bytes: None,
            private_io_bytes: 0.0,
            endpoint_in_bytes: 0.0,
            endpoint_out_bytes: 0.0,
            run_s: 0.0,
            variability: 0.0,
            cpus: 1.0,
            cpu_widths: Vec::new(),
            critical_path_ratio: 1.0,
        }
    }

    fn include_pipeline(&mut self, private: &PrivateData) {
        self.running_bytes = self.running_bytes.max(private.running_bytes);
        self.waiting_bytes = self.waiting_bytes.max(private.waiting_bytes);
        self.retained_bytes = self.retained_bytes.max(private.retained_bytes);
        self.largest_volume_bytes = self.largest_volume_bytes.max(private.largest_volume_bytes);
    }
}

fn total_bytes(pieces: &BTreeMap<ScratchSize, u64>) -> u128 {
    let bytes = |(piece, count): (&ScratchSize, &u64)| u128::from(piece.bytes) * u128::from(*count);
    pieces.iter().map(bytes).sum()
}

/// The private data of one pipeline.
#[derive(Default)]
struct PrivateData {
    running_bytes: u128,
    waiting_bytes: u128,
    retained_bytes: u128,
    largest_volume_bytes: u64,
}

impl PrivateData {
    /// A volume is held from the stage of its first user to that of its last.
    fn of_pipeline(workflow: &Workflow, members: &[JobIndex], levels: &[u32]) -> Self {
        let mounts = members.iter().flat_map(|&job| &workflow.job(job).mounts);
        let volumes: BTreeSet<VolumeIndex> = mounts.map(|mount| mount.volume).collect();
        let stages = members
            .iter()
            .map(|job| levels[job.as_usize()] as usize + 1)
            .max()
            .unwrap_or(1);
        let (mut taken, mut freed) = (vec![0u128; stages], vec![0u128; stages]);
        let mut private = Self::default();
        for &index in &volumes {
            let volume = workflow.volume(index);
            let VolumeKind::Scratch { .. } = volume.kind else {
                continue;
            };
            let users = volume.users.iter();
            let users = users.map(|job| levels[job.as_usize()] as usize);
            let (first, last) = (users.clone().min().unwrap_or(0), users.max().unwrap_or(0));
            let bytes = u128::from(volume.size_bytes);
            taken[first] += bytes;
            freed[last] += bytes;
            private.retained_bytes += bytes;
            private.largest_volume_bytes = private.largest_volume_bytes.max(volume.size_bytes);
        }
        let mut held = 0;
        for (taken, freed) in taken.into_iter().zip(freed) {
            held += taken;
            private.running_bytes = private.running_bytes.max(held);
            held -= freed;
            private.waiting_bytes = private.waiting_bytes.max(held);
        }
        private
    }
}

/// The parts of a workflow that neither order nor scratch volumes connect.
pub(super) struct ConnectedPipelines {
    /// The jobs of each part, parents before children; parts by their first declared job.
    pub(super) members: Vec<Vec<JobIndex>>,
}

impl ConnectedPipelines {
    pub(super) fn from_workflow(workflow: &Workflow) -> Self {
        let first = workflow.connected_pipelines();
        let mut parts: BTreeMap<u32, Vec<JobIndex>> = BTreeMap::new();
        for job in workflow.topological_order() {
            parts.entry(first[job.as_usize()]).or_default().push(job);
        }
        let members = parts.into_values().collect();
        Self { members }
    }
}

fn describe_approximations(
    workflow: &Workflow,
    pipelines: &ConnectedPipelines,
    levels: &[u32],
) -> Vec<String> {
    let mut notes = vec![
        "each pipeline counts with the storage of the largest pipeline at its largest level; where \
         that is too pessimistic, the table says 'likely' or 'at most'"
            .to_owned(),
        "the times are rough: each volume counts as read and written in full, and all pipelines as \
         equally long"
            .to_owned(),
    ];
    let unknown = workflow
        .jobs
        .iter()
        .filter(|job| job.runtime_s.is_none())
        .count();
    if unknown > 0 {
        notes.push(format!(
            "{unknown} jobs declare no runtime and count as 0 s of computing"
        ));
    }
    let branching = pipelines.members.iter().any(|members| {
        let stages: BTreeSet<u32> = members.iter().map(|job| levels[job.as_usize()]).collect();
        stages.len() < members.len()
    });
    if branching {
        notes.push(
            "jobs of one pipeline count as sequential, also where they could run in parallel: the \
             concurrency is a lower bound"
                .to_owned(),
        );
    }
    notes
}

#[cfg(test)]
mod tests {
    use bafs_workflow::parse_workflow;

    use super::*;

    fn workflow_from_text(text: &str) -> Workflow {
        let none = |_: &str| Err("no files".to_owned());
        parse_workflow("w.bafs", text, &none).unwrap().workflow
    }

    /// A large volume lives through the first two of three stages, a small one through the last
    /// two; the second pipeline has a small volume only.
    const UNEQUAL_VOLUMES: &str = "
        volume db cache bafs://home/db 10 GB
        volume more cache bafs://home/more 5 GB
        volume large scratch 7 GB exact from bafs://home/in
        volume small scratch 2 GB exact
        volume own scratch 1 GB exact
        job a {
          executable = x
          runtime = 10 s
        }
        job b {
          executable = x
          runtime = 30 s
        }
        job c {
          executable = x
          runtime = 20 s
        }
        job d {
          executable = x
        }
        parent a child b
        parent b child c
        mount db a /db
        mount db b /db
        mount more b /more
        mount more d /more
        mount large a /l
        mount large b /l
        mount small b /s
        mount small c /s
        mount own d /o
        extract small out bafs://home/out";

    #[test]
    fn shape_is_that_of_the_largest_level() {
        let (shape, notes) = Shape::from_largest_levels(&workflow_from_text(UNEQUAL_VOLUMES), 0.5);
        let gb = |bytes: u128| bytes / 1_000_000_000;
        assert_eq!((shape.width, shape.depth), (2, 3));
        // Both caches are read in the second stage, and `more` in the first as well.
        assert_eq!(
            (gb(shape.batch_bytes), gb(shape.batch_total_bytes)),
            (15, 15)
        );
        assert_eq!((gb(shape.running_bytes), gb(shape.waiting_bytes)), (9, 7));
        assert_eq!(
            (gb(shape.retained_bytes), shape.largest_volume_bytes),
            (9, 7_000_000_000)
        );
        assert_eq!(
            (shape.endpoint_in_bytes, shape.endpoint_out_bytes),
            (3.5e9, 1e9),
            "of all that are moved, for each of two"
        );
        // Five mounts of the first pipeline and one of the second, in six stages of a pipeline.
        assert_eq!(shape.private_io_bytes, 19e9 / 2.0 / 6.0);
        assert_eq!((shape.run_s, shape.variability), (10.0, 0.5));
        assert_eq!(shape.level_volumes, 2);
        // The first pipeline computes 60 s, twice the mean of both.
        let environment = Environment::parse(
            "home-rate = \"1 MB/s\"\nlocal-rate = \"1 MB/s\"\n\n[[nodes]]\ncount = 100\ncpus = 1\n\
             storage = \"1 GB\"\n",
        );
        let least_s = shape.time_s_min(&environment.expect("it is right"));
        assert_eq!((shape.critical_path_ratio, least_s), (2.0, 60.0));
        assert!(
            notes
                .iter()
                .any(|note| note.starts_with("1 jobs declare no runtime"))
        );
        assert!(!notes.iter().any(|note| note.contains("in parallel")));
    }

    #[test]
    fn branches_and_workflows_without_volumes_have_a_shape() {
        let fan = UNEQUAL_VOLUMES.replace("parent a child b", "parent a child b d");
        let (shape, notes) = Shape::from_largest_levels(&workflow_from_text(&fan), 0.0);
        assert_eq!((shape.width, shape.depth), (1, 3));
        assert_eq!(
            shape.running_bytes, 10_000_000_000,
            "b and d of one stage hold 9 and 1 GB"
        );
        assert!(notes.iter().any(|note| note.contains("in parallel")));
        assert_eq!(shape.scheduler_pipelines, 2, "order alone connects b and d");
        let bare = workflow_from_text("job a {\nexecutable = x\n}\njob b {\nexecutable = x\n}");
        let (shape, _) = Shape::from_largest_levels(&bare, 0.0);
        assert_eq!((shape.width, shape.depth, shape.retained_bytes), (2, 1, 0));
        assert!(shape.has_equal_volumes, "there are none");
    }
}
