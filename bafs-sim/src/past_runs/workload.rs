//! Jobs with amounts of data become a workflow with volumes. Reads no text.
//!
//! Own input is a scratch volume that is filled from home. Shared input of jobs of one set is a
//! cache volume. Output is a scratch volume that later jobs read, or that goes home if no job reads
//! it.

use std::collections::BTreeMap;

use bafs_proto::volume::LimitKind;
use bafs_workflow::{
    CachePolicy, Extract, Job, JobIndex, JobLimits, Mount, ProgramSpec, Scheme, Url, Volume,
    VolumeIndex, VolumeKind, Workflow, topological_sort,
};

use super::PastError;

use crate::simulator::{JobLoad, MeasuredLoad, MountLoad};

/// One job as it was.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct PastJob {
    /// Its line in the file.
    pub(super) line: usize,
    /// Unique.
    pub(super) name: String,
    pub(super) cpus: u32,
    pub(super) compute_us: u64,
    /// Positions of the jobs whose output it read.
    pub(super) parents: Vec<usize>,
    /// Data that it shared with others of the same set, and how much of them it read.
    pub(super) shared_data: Option<(String, u64)>,
    /// Bytes that it alone read from home.
    pub(super) input_bytes: u64,
    /// Bytes that it wrote.
    pub(super) output_bytes: u64,
}

/// The workflow of these jobs, and the measured load of each.
pub(super) fn build_workload(
    name: &str,
    jobs: &[PastJob],
) -> Result<(Workflow, MeasuredLoad), PastError> {
    let mut builder = WorkloadBuilder {
        workflow: Workflow {
            name: name.to_owned(),
            jobs: Vec::with_capacity(jobs.len()),
            volumes: Vec::new(),
            extracts: Vec::new(),
        },
        measured: MeasuredLoad::default(),
        outputs: Vec::new(),
    };
    let mut children = vec![Vec::new(); jobs.len()];
    for (at, job) in jobs.iter().enumerate() {
        for &parent in &job.parents {
            children[parent].push(JobIndex(at as u32));
        }
    }
    builder.add_outputs(jobs, &children);
    let sets = builder.add_shared_caches(jobs);
    for (at, job) in jobs.iter().enumerate() {
        let mut own = std::mem::take(&mut children[at]);
        own.dedup();
        builder.add_job(at, job, jobs, own, &sets);
    }
    let order = topological_sort(&builder.workflow.jobs);
    if order.len() < jobs.len() {
        let is_ordered: std::collections::BTreeSet<JobIndex> = order.into_iter().collect();
        let first = (0..jobs.len()).find(|at| !is_ordered.contains(&JobIndex(*at as u32)));
        let job = &jobs[first.unwrap_or(0)];
        let message = format!("job '{}' depends on itself through other jobs", job.name);
        return Err(PastError::at_line(job.line, message));
    }
    Ok((builder.workflow, builder.measured))
}

struct WorkloadBuilder {
    workflow: Workflow,
    measured: MeasuredLoad,
    /// The output volume of each job that wrote something.
    outputs: Vec<Option<VolumeIndex>>,
}

impl WorkloadBuilder {
    fn add_volume(&mut self, name: String, kind: VolumeKind, bytes: u64) -> VolumeIndex {
        self.workflow.volumes.push(Volume {
            name,
            kind,
            size_bytes: bytes,
            size_files: 1,
            limit: LimitKind::Exact,
            users: Vec::new(),
        });
        VolumeIndex(self.workflow.volumes.len() as u32 - 1)
    }

    fn add_outputs(&mut self, jobs: &[PastJob], children: &[Vec<JobIndex>]) {
        for (job, children) in jobs.iter().zip(children) {
            if job.output_bytes == 0 {
                self.outputs.push(None);
                continue;
            }
            let kind = VolumeKind::Scratch { fill: None };
            let volume = self.add_volume(format!("out.{}", job.name), kind, job.output_bytes);
            self.outputs.push(Some(volume));
            if children.is_empty() {
                self.workflow.extracts.push(Extract {
                    volume,
                    path: "result".to_owned(),
                    selections: Vec::new(),
                    target: home_url(format!("/out/{}", self.workflow.extracts.len())),
                });
            }
        }
    }

    /// The cache volume of each set, as large as the largest read of one job.
    fn add_shared_caches(&mut self, jobs: &[PastJob]) -> BTreeMap<String, VolumeIndex> {
        let mut most: BTreeMap<&str, u64> = BTreeMap::new();
        for (set, bytes) in jobs.iter().filter_map(|job| job.shared_data.as_ref()) {
            let most = most.entry(set).or_default();
            *most = (*most).max(*bytes);
        }
        let mut volumes = BTreeMap::new();
        for (at, (set, bytes)) in most.into_iter().enumerate() {
            let kind = VolumeKind::Cache {
                source: home_url(format!("/shared/{at}")),
                policy: CachePolicy::Lru,
                is_warmed: false,
            };
            if bytes > 0 {
                volumes.insert(set.to_owned(), self.add_volume(set.to_owned(), kind, bytes));
            }
        }
        volumes
    }

    fn add_job(
        &mut self,
        at: usize,
        job: &PastJob,
        jobs: &[PastJob],
        children: Vec<JobIndex>,
        sets: &BTreeMap<String, VolumeIndex>,
    ) {
        let reads = |read_bytes| MountLoad {
            read_bytes,
            ..MountLoad::default()
        };
        let mut parents: Vec<usize> = job.parents.clone();
        parents.sort_unstable();
        parents.dedup();
        let mut mounts: Vec<(String, VolumeIndex, bool, MountLoad)> = Vec::new();
        for &parent in &parents {
            if let Some(volume) = self.outputs[parent] {
                let path = format!("/from/{parent}");
                mounts.push((path, volume, false, reads(jobs[parent].output_bytes)));
            }
        }
        if job.input_bytes > 0 {
            let fill = Some(home_url(format!("/in/{at}")));
            let name = format!("in.{}", job.name);
            let volume = self.add_volume(name, VolumeKind::Scratch { fill }, job.input_bytes);
            mounts.push(("/in".to_owned(), volume, false, reads(job.input_bytes)));
        }
        if let Some(volume) = self.outputs[at] {
            let load = MountLoad {
                written_bytes: job.output_bytes,
                ..MountLoad::default()
            };
            mounts.push(("/out".to_owned(), volume, true, load));
        }
        if let Some((set, bytes)) = &job.shared_data
            && let Some(volume) = sets.get(set)
        {
            mounts.push(("/shared".to_owned(), *volume, false, reads(*bytes)));
        }
        mounts.sort_by(|a, b| a.0.cmp(&b.0));
        let index = JobIndex(at as u32);
        for (_, volume, ..) in &mounts {
            self.workflow.volumes[volume.as_usize()].users.push(index);
        }
        self.measured.jobs.push(JobLoad {
            compute_us: job.compute_us,
            mounts: mounts.iter().map(|mount| mount.3).collect(),
        });
        let mounts = mounts.into_iter().map(|(path, volume, writable, _)| Mount {
            volume,
            path,
            writable,
            write_back: false,
        });
        self.workflow.jobs.push(Job {
            name: job.name.clone(),
            command: empty_command(),
            cpus: job.cpus,
            memory_bytes: 0,
            limits: JobLimits::default(),
            runtime_s: Some(job.compute_us.div_ceil(1_000_000)),
            retries: 0,
            priority: 0,
            mounts: mounts.collect(),
            parents: parents.into_iter().map(|p| JobIndex(p as u32)).collect(),
            children,
        });
    }
}

/// Past jobs are only simulated, so their programs do not matter.
fn empty_command() -> ProgramSpec {
    ProgramSpec {
        executable: "past".to_owned(),
        arguments: Vec::new(),
        environment: Vec::new(),
        directory: "/".to_owned(),
        stdout: None,
        stderr: None,
        required_files: vec![],
        produced_files: vec![],
        shared_directories: Vec::new(),
    }
}

fn home_url(path: String) -> Url {
    Url {
        scheme: Scheme::Bafs,
        host: "home".to_owned(),
        path,
    }
}
