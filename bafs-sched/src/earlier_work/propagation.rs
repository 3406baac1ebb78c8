//! What follows when some jobs must run. Forward: a job that reads what another one writes, or is
//! declared its child, runs again with it. Backward: the writers of a volume that a job needs and
//! that is gone run again, too.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bafs_proto::ids::ExecutionId;
use bafs_workflow::{JobIndex, VolumeIndex, VolumeKind, Workflow};

use super::reason::RunReason;
use super::record::{JobRecord, KeptVolume};

/// Which jobs run and why, and which kept volumes they use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobDecisions {
    /// For each job why it runs; nothing for those that are up to date.
    pub reasons: Vec<Option<RunReason>>,
    /// Kept volumes that jobs which run need, by their place in the workflow; each with its place
    /// among those that were given.
    pub adopted: BTreeMap<VolumeIndex, usize>,
}

impl JobDecisions {
    /// The jobs that run.
    pub fn running(&self) -> impl Iterator<Item = JobIndex> {
        let jobs = self.reasons.iter().zip(0u32..);
        jobs.filter(|(reason, _)| reason.is_some())
            .map(|(_, index)| JobIndex(index))
    }

    /// The jobs that are up to date.
    pub fn up_to_date(&self) -> impl Iterator<Item = JobIndex> {
        let jobs = self.reasons.iter().zip(0u32..);
        jobs.filter(|(reason, _)| reason.is_none())
            .map(|(_, index)| JobIndex(index))
    }
}

/// Decides which jobs run, when some must for a reason of their own.
pub fn decide_jobs(
    workflow: &Workflow,
    records: &BTreeMap<String, JobRecord>,
    own: Vec<Option<RunReason>>,
    kept: &[KeptVolume],
) -> JobDecisions {
    let graph = VolumeGraph::new(workflow);
    let mut search = Search {
        usable: graph.usable(records, kept),
        graph,
        open: VecDeque::new(),
        reasons: vec![None; own.len()],
    };
    for (reason, index) in own.into_iter().zip(0u32..) {
        if let Some(reason) = reason {
            search.mark(JobIndex(index), reason);
        }
    }
    while let Some(job) = search.open.pop_front() {
        search.follow(job);
    }
    let is_needed = |volume: &VolumeIndex| {
        let mut users = workflow.volume(*volume).users.iter();
        users.any(|user| search.reasons[user.as_usize()].is_some())
    };
    let adopted = search.usable.iter().filter(|(volume, _)| is_needed(volume));
    let adopted = adopted.map(|(volume, kept)| (*volume, kept.position));
    JobDecisions {
        adopted: adopted.collect(),
        reasons: search.reasons,
    }
}

/// For each job those whose execution its own depends on: parents, and writers of its scratch
/// volumes before it.
pub(crate) fn producers_of(workflow: &Workflow) -> Vec<BTreeSet<JobIndex>> {
    let graph = VolumeGraph::new(workflow);
    let jobs = workflow.jobs.iter().zip(0u32..);
    let producers = jobs.map(|(job, index)| {
        let index = JobIndex(index);
        let volumes = graph.scratch_of(index);
        let writers = volumes.flat_map(|volume| graph.writers_before(volume, index));
        job.parents.iter().copied().chain(writers).collect()
    });
    producers.collect()
}

/// For each volume the last of its writers in the order of jobs.
pub(crate) fn last_writers(workflow: &Workflow) -> Vec<Option<JobIndex>> {
    let graph = VolumeGraph::new(workflow);
    let last = |writers: &Vec<JobIndex>| {
        let writers = writers.iter().copied();
        writers.max_by_key(|writer| graph.rank[writer.as_usize()])
    };
    graph.writers.iter().map(last).collect()
}

/// Writers of scratch volumes, and the order of jobs.
struct VolumeGraph<'w> {
    workflow: &'w Workflow,
    rank: Vec<u32>,
    /// Nothing for caches.
    writers: Vec<Vec<JobIndex>>,
}

impl<'w> VolumeGraph<'w> {
    fn new(workflow: &'w Workflow) -> Self {
        let mut rank = vec![0; workflow.jobs.len()];
        for (job, position) in workflow.topological_order().into_iter().zip(0u32..) {
            rank[job.as_usize()] = position;
        }
        let mut writers = vec![Vec::new(); workflow.volumes.len()];
        for (job, index) in workflow.jobs.iter().zip(0u32..) {
            for mount in job.mounts.iter().filter(|mount| mount.writable) {
                let of_volume: &mut Vec<JobIndex> = &mut writers[mount.volume.as_usize()];
                if of_volume.last() != Some(&JobIndex(index)) {
                    of_volume.push(JobIndex(index));
                }
            }
        }
        Self {
            workflow,
            rank,
            writers,
        }
    }

    fn scratch_of(&self, job: JobIndex) -> impl Iterator<Item = VolumeIndex> {
        let mounts = self.workflow.job(job).mounts.iter();
        let volumes = mounts.map(|mount| mount.volume);
        volumes.filter(|volume| {
            let kind = &self.workflow.volume(*volume).kind;
            matches!(kind, VolumeKind::Scratch { .. })
        })
    }

    fn writers_before(&self, volume: VolumeIndex, job: JobIndex) -> Vec<JobIndex> {
        let writers = self.writers[volume.as_usize()].iter().copied();
        writers
            .filter(|writer| self.is_before(*writer, job))
            .collect()
    }

    fn is_before(&self, one: JobIndex, other: JobIndex) -> bool {
        self.rank[one.as_usize()] < self.rank[other.as_usize()]
    }

    /// Jobs that depend on the output of one: children, and later users of what it writes.
    fn dependents(&self, job: JobIndex) -> Vec<JobIndex> {
        let mounts = self.workflow.job(job).mounts.iter();
        let written = mounts.filter(|mount| mount.writable);
        let users = written.flat_map(|mount| &self.workflow.volume(mount.volume).users);
        let later = users.copied().filter(|user| self.is_before(job, *user));
        let children = self.workflow.job(job).children.iter().copied();
        children.chain(later).collect()
    }

    /// Kept volumes that have what records say that their writers wrote last, of the size that is
    /// declared.
    fn usable(
        &self,
        records: &BTreeMap<String, JobRecord>,
        kept: &[KeptVolume],
    ) -> BTreeMap<VolumeIndex, UsableVolume> {
        let volumes = self.workflow.volumes.iter().zip(0u32..);
        let volumes = volumes.filter(|(it, _)| matches!(it.kind, VolumeKind::Scratch { .. }));
        let by_name: BTreeMap<&str, VolumeIndex> = volumes
            .map(|(volume, index)| (volume.name.as_str(), VolumeIndex(index)))
            .collect();
        let mut usable = BTreeMap::new();
        for (position, kept) in kept.iter().enumerate() {
            let Some(&volume) = by_name.get(kept.name.as_str()) else {
                continue;
            };
            let spec = self.workflow.volume(volume);
            let is_size = kept.size.bytes >= spec.size_bytes && kept.size.files >= spec.size_files;
            if !is_size {
                continue;
            }
            let is_current = |(name, execution): &(String, ExecutionId)| {
                let record = records.get(name);
                record.is_some_and(|record| record.execution == *execution)
            };
            let find = |(name, _): &(String, ExecutionId)| {
                let writers = self.writers[volume.as_usize()].iter();
                let mut writers = writers.copied();
                writers.find(|writer| self.workflow.job(*writer).name == *name)
            };
            let writers: Option<BTreeSet<JobIndex>> = kept.writers.iter().map(find).collect();
            if let Some(writers) = writers
                && kept.writers.iter().all(is_current)
            {
                usable.insert(volume, UsableVolume { position, writers });
            }
        }
        usable
    }
}

/// A kept volume, and the jobs whose output it has.
struct UsableVolume {
    position: usize,
    writers: BTreeSet<JobIndex>,
}

struct Search<'w> {
    graph: VolumeGraph<'w>,
    usable: BTreeMap<VolumeIndex, UsableVolume>,
    open: VecDeque<JobIndex>,
    reasons: Vec<Option<RunReason>>,
}

impl Search<'_> {
    fn mark(&mut self, job: JobIndex, reason: RunReason) {
        if self.reasons[job.as_usize()].is_none() {
            self.reasons[job.as_usize()] = Some(reason);
            self.open.push_back(job);
        }
    }

    fn runs(&self, job: JobIndex) -> bool {
        self.reasons[job.as_usize()].is_some()
    }

    /// What follows from a job that runs.
    fn follow(&mut self, job: JobIndex) {
        let workflow = self.graph.workflow;
        for dependent in self.graph.dependents(job) {
            let producer = workflow.job(job).name.clone();
            self.mark(dependent, RunReason::ProducerRuns { producer });
        }
        for volume in self.graph.scratch_of(job).collect::<Vec<_>>() {
            let has = |kept: &UsableVolume| {
                let before = self.graph.writers_before(volume, job);
                kept.writers == before.into_iter().collect()
                    && !kept.writers.iter().any(|writer| self.runs(*writer))
            };
            if self.usable.get(&volume).is_some_and(has) {
                // Who writes it later has not, in what is kept.
                let kept = &self.usable[&volume].writers;
                let writers = self.graph.writers[volume.as_usize()].iter().copied();
                let later = writers.filter(|writer| !kept.contains(writer));
                self.need_writers(volume, job, later.collect());
                continue;
            }
            let writers = self.graph.writers[volume.as_usize()].clone();
            self.need_writers(volume, job, writers);
            if self.usable.remove(&volume).is_some() {
                // Others that run took it for kept.
                let users = workflow.volume(volume).users.iter().copied();
                let running = users.filter(|user| *user != job && self.runs(*user));
                self.open.extend(running.collect::<Vec<_>>());
            }
        }
    }

    fn need_writers(&mut self, volume: VolumeIndex, reader: JobIndex, writers: Vec<JobIndex>) {
        for writer in writers.into_iter().filter(|writer| *writer != reader) {
            let workflow = self.graph.workflow;
            let reason = RunReason::VolumeGone {
                volume: workflow.volume(volume).name.clone(),
                reader: workflow.job(reader).name.clone(),
            };
            self.mark(writer, reason);
        }
    }
}
