//! Reads, computing and writes of each job: as declared, or as measured. It takes no time itself.
//!
//! A job reads its volumes one after the other in the order of its mounts, then computes, then
//! writes in the same order. Unless measured, it reads caches in full, and scratch volumes that
//! others wrote (or home filled); it writes volumes of its own in full. Of a scratch volume that
//! several jobs write, each reads one half and writes the other.

use std::collections::{BTreeMap, BTreeSet};

use bafs_workflow::{FirstUsers, JobIndex, VolumeIndex, VolumeKind, Workflow};

use super::link::SECOND_US;
use super::random::draw_normal;
use crate::seeded_rng::SeededRng;

/// The load of jobs.
#[derive(Debug, Clone, PartialEq)]
pub enum LoadModel {
    /// As the workflow declares: run times vary with a standard deviation of so many millionths of
    /// their mean.
    Declared {
        /// Standard deviation over mean, in millionths.
        variability_ppm: u64,
    },
    /// As was measured.
    Measured(MeasuredLoad),
}

/// The measured load of a workflow.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MeasuredLoad {
    /// Each job of the workflow, in its order.
    pub jobs: Vec<JobLoad>,
    /// Bytes that volumes were filled with from home; by default their sizes.
    pub fill_bytes: BTreeMap<VolumeIndex, u64>,
    /// Bytes of files that went home, by their positions in the workflow; by default the sizes of
    /// their volumes.
    pub extract_bytes: BTreeMap<u32, u64>,
}

/// The load of one job.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct JobLoad {
    /// Time of computing in microseconds, on a node of usual speed.
    pub compute_us: u64,
    /// For each mount of the job, in their order.
    pub mounts: Vec<MountLoad>,
}

/// The access of one job to one volume.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MountLoad {
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Whether it was a directory of the job's node: how long the job waited for that is in its
    /// time of computing.
    pub is_bind_mount: bool,
}

/// Jobs and their mounts.
#[derive(Debug, Clone, Copy)]
pub(super) struct WorkflowJobs<'w> {
    pub(super) workflow: &'w Workflow,
    pub(super) first_users: &'w FirstUsers,
    /// Volumes without a declared size: they count as empty.
    pub(super) unsized_volumes: &'w BTreeSet<VolumeIndex>,
}

/// One thing that a job does before the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum WorkStep {
    /// Reads so many bytes of the volume at this position of its mounts.
    Read(usize, u64),
    /// Computing time, in microseconds.
    Compute(u64),
    /// Writes so many bytes to the volume at this position of its mounts.
    Write(usize, u64),
    /// The end.
    End,
}

impl LoadModel {
    /// Whether seeds differ in how long jobs compute.
    pub(super) fn is_variable(&self) -> bool {
        matches!(self, Self::Declared { variability_ppm } if *variability_ppm > 0)
    }

    /// The `step`th step of a job, including steps that take no time.
    pub(super) fn work_step(
        &self,
        jobs: WorkflowJobs<'_>,
        seed: u64,
        job: JobIndex,
        step: usize,
    ) -> WorkStep {
        let mounts = jobs.workflow.job(job).mounts.len();
        if step < mounts {
            return WorkStep::Read(step, self.mount_load(jobs, job, step).read_bytes);
        }
        match step - mounts {
            0 => WorkStep::Compute(self.compute_us(jobs.workflow, seed, job)),
            at if at <= mounts => {
                WorkStep::Write(at - 1, self.mount_load(jobs, job, at - 1).written_bytes)
            }
            _ => WorkStep::End,
        }
    }

    /// Bytes that cross the link to home when a volume of `size_bytes` is filled.
    pub(super) fn fill_bytes(&self, volume: VolumeIndex, size_bytes: u64) -> u64 {
        let measured = match self {
            Self::Declared { .. } => None,
            Self::Measured(measured) => measured.fill_bytes.get(&volume),
        };
        measured.copied().unwrap_or(size_bytes)
    }

    /// Bytes of a file that goes home from a volume of `size_bytes`.
    pub(super) fn extract_bytes(&self, index: u32, size_bytes: u64) -> u64 {
        let measured = match self {
            Self::Declared { .. } => None,
            Self::Measured(measured) => measured.extract_bytes.get(&index),
        };
        measured.copied().unwrap_or(size_bytes)
    }

    /// The most that one job reads of a volume.
    pub(super) fn read_bytes_max(&self, jobs: WorkflowJobs<'_>, volume: VolumeIndex) -> u64 {
        let users = jobs.workflow.volume(volume).users.iter();
        let read = users.flat_map(|user| {
            let mounts = jobs.workflow.job(*user).mounts.iter().enumerate();
            let of_volume = mounts.filter(|(_, mount)| mount.volume == volume);
            of_volume.map(|(at, _)| self.mount_load(jobs, *user, at).read_bytes)
        });
        read.max().unwrap_or(0)
    }

    pub(super) fn compute_us(&self, workflow: &Workflow, seed: u64, job: JobIndex) -> u64 {
        match self {
            // The same in every attempt and under every policy: policies are compared by pairs.
            Self::Declared { variability_ppm } => {
                let mean = workflow.job(job).runtime_s.unwrap_or(0) * SECOND_US;
                let mut rng = SeededRng::new(seed ^ (u64::from(job.0) << 24));
                draw_normal(&mut rng, mean, *variability_ppm)
            }
            Self::Measured(measured) => {
                let load = measured.jobs.get(job.as_usize());
                load.map_or(0, |load| load.compute_us)
            }
        }
    }

    pub(super) fn mount_load(&self, jobs: WorkflowJobs<'_>, job: JobIndex, at: usize) -> MountLoad {
        if let Self::Measured(measured) = self {
            let load = measured.jobs.get(job.as_usize());
            let mount = load.and_then(|load| load.mounts.get(at));
            return mount.copied().unwrap_or_default();
        }
        let mount = &jobs.workflow.job(job).mounts[at];
        declared_load(jobs, job, mount.volume, mount.writable)
    }
}

fn declared_load(
    jobs: WorkflowJobs<'_>,
    job: JobIndex,
    volume: VolumeIndex,
    writable: bool,
) -> MountLoad {
    let spec = jobs.workflow.volume(volume);
    // The scheduler's assumed size does not describe its content.
    let all = match jobs.unsized_volumes.contains(&volume) {
        true => 0,
        false => spec.size_bytes,
    };
    let VolumeKind::Scratch { fill } = &spec.kind else {
        return MountLoad {
            read_bytes: all,
            ..MountLoad::default()
        };
    };
    if !writable {
        return MountLoad {
            read_bytes: all,
            ..MountLoad::default()
        };
    }
    let [first, second] = jobs.first_users[volume.as_usize()];
    let is_first = first == Some(job) && fill.is_none();
    // The second user represents all: in a chain of volumes it only reads.
    let is_shared = second.is_some_and(|user| {
        let mounts = &jobs.workflow.job(user).mounts;
        mounts.iter().any(|m| m.volume == volume && m.writable)
    });
    match is_first && !is_shared {
        true => MountLoad {
            written_bytes: all,
            ..MountLoad::default()
        },
        false => MountLoad {
            read_bytes: all / 2,
            written_bytes: all / 2,
            ..MountLoad::default()
        },
    }
}

#[cfg(test)]
mod tests {
    use bafs_workflow::parse_workflow;

    use super::*;

    #[test]
    fn first_running_job_writes_whatever_the_declaration_order() {
        let job = |name: &str| format!("job {name} {{\nexecutable = x\nruntime = 9 s\n}}\n");
        let rest = "parent a child z\nvolume v scratch 8 MB\nmount v a /v\nmount v z /v ro\n";
        for (jobs, writer) in [([job("a"), job("z")], 0), ([job("z"), job("a")], 1)] {
            let none = |_: &str| Err("no files".to_owned());
            let text = jobs.concat() + rest;
            let workflow = parse_workflow("w.bafs", &text, &none).unwrap().workflow;
            let first_users = workflow.first_users();
            let jobs = WorkflowJobs {
                workflow: &workflow,
                first_users: &first_users,
                unsized_volumes: &BTreeSet::new(),
            };
            let load = LoadModel::Declared { variability_ppm: 0 };
            let moved = |job| {
                let load = load.mount_load(jobs, JobIndex(job), 0);
                (load.read_bytes, load.written_bytes)
            };
            assert_eq!(moved(writer), (0, 8_000_000));
            assert_eq!(moved(1 - writer), (8_000_000, 0));
        }
    }
}
