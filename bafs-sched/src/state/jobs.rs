//! Jobs and volumes of the workflow with what is left of each. Knows no servers.

use std::collections::BTreeMap;
use std::sync::Arc;

use bafs_proto::ids::ServerId;
use bafs_workflow::{Job, JobIndex, VolumeIndex, VolumeKind, Workflow};
use serde::{Deserialize, Serialize};

use crate::space::Space;
use crate::state::batch_sets::BatchSets;
use crate::state::changes::Changed;
use crate::state::critical_path::Chains;
use crate::state::cross_pipeline::CrossDependencies;
use crate::state::failure_history::FailureHistory;
use crate::state::job_order::Courses;
use crate::state::mounts::{Mounted, Mounts};
use crate::state::pipeline_status::{Counted, Standing};
use crate::state::recorded::kept;
use crate::state::successors::followers;
use crate::state::tracked::{Rows, Table};
use crate::state::work_counter::WorkCounter;

/// Where a job is in its life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// A job that it depends on is not done.
    Waiting,
    /// It may start.
    Ready,
    /// It may start, but is held back for a while after a failure.
    HeldBack,
    /// An attempt is under way.
    Active,
    /// It succeeded.
    Done,
    /// It failed for good.
    Failed,
    /// It does not run because a job that it depends on failed for good.
    Skipped,
}

impl JobState {
    /// Whether the job has its volumes, or needs none any more.
    pub(crate) fn has_begun(self) -> bool {
        self == Self::Active || self.is_final()
    }

    /// Whether the job will never run.
    pub(crate) fn is_dead(self) -> bool {
        matches!(self, Self::Failed | Self::Skipped)
    }

    /// Whether the job may start soon, or runs.
    pub(crate) fn is_near(self) -> bool {
        matches!(self, Self::Ready | Self::HeldBack | Self::Active)
    }

    /// Whether the job has nothing left to do.
    pub(crate) fn is_final(self) -> bool {
        self == Self::Done || self.is_dead()
    }
}

/// What is left of a job.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct JobNode {
    pub(crate) state: JobState,
    /// Parents, and others that it follows in the use of a volume, that are not done.
    pub(crate) parents_left: u32,
    /// How long its last success kept its slots, in milliseconds.
    pub(crate) took_ms: u64,
    /// Where its last attempt was.
    pub(crate) last_server: Option<ServerId>,
    /// Executions of it that ended.
    pub(crate) ended: u32,
    pub(crate) failure_history: FailureHistory,
}

impl JobNode {
    fn new(job: &Job) -> Self {
        Self {
            state: match job.parents.is_empty() {
                true => JobState::Ready,
                false => JobState::Waiting,
            },
            parents_left: count(job.parents.len()),
            took_ms: 0,
            last_server: None,
            ended: 0,
            failure_history: FailureHistory::default(),
        }
    }
}

/// What is left of a volume.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct VolumeNode {
    pub(crate) is_cache: bool,
    /// Jobs that may write it, ascending.
    pub(crate) writers: Vec<JobIndex>,
    /// The job that writes it now: a scratch volume has one writer at a time.
    pub(crate) writer: Option<JobIndex>,
    /// Users that are not final.
    pub(crate) users_left: u32,
    /// Writers that are not done.
    pub(crate) writers_left: u32,
    /// Writers that are dead.
    pub(crate) writers_dead: u32,
    /// Extracts from it, as positions in the workflow's list.
    pub(crate) extracts: Vec<u32>,
    /// Extracts that are neither done nor given up.
    pub(crate) extracts_left: u32,
    /// Of a cache, pipelines of its users that are not closed.
    pub(crate) pipelines_open: u32,
    /// Users that are ready, held back or active.
    pub(crate) users_near: u32,
    /// Those of them whose pipelines are not under way.
    pub(crate) users_outside: u32,
    /// Users that are not final, of pipelines that were never rolled back.
    pub(crate) users_steady: u32,
    /// Those of them whose pipelines are not under way.
    pub(crate) steady_outside: u32,
}

impl VolumeNode {
    /// Whether somebody will still use it, or may have to: a job that runs again because a volume
    /// of its pipeline was lost reads its inputs again.
    pub(crate) fn is_needed(&self) -> bool {
        !self.is_idle() || self.pipelines_open > 0
    }

    /// Whether nobody will use it unless something is lost.
    pub(crate) fn is_idle(&self) -> bool {
        self.users_left == 0 && self.extracts_left == 0
    }
}

/// How many jobs are in which final state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Totals {
    pub(crate) done: u64,
    pub(crate) failed: u64,
    pub(crate) skipped: u64,
}

/// The workflow with what is left of it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Graph {
    /// Shared with whoever gave it: that of a million jobs has a gigabyte.
    pub(crate) workflow: Arc<Workflow>,
    mounts: Mounts,
    jobs: Rows<JobNode>,
    volumes: Rows<VolumeNode>,
    /// Sizes that are not those of the workflow as it was given.
    pub(crate) sizes: Table<VolumeIndex, Space>,
    pub(crate) totals: Totals,
    /// Place of each job in the topological order.
    rank: Vec<u32>,
    /// Jobs before each job on its longest way from a first one.
    level: Vec<u32>,
    /// The first job of each job's kind.
    kinds: Vec<u32>,
    /// Jobs that wait for each job beside its children.
    followers: Vec<Vec<JobIndex>>,
    /// Pipeline of each job: jobs that share scratch volumes, directly or through others.
    pipeline: Vec<u32>,
    /// Jobs of each pipeline that are not final.
    pipeline_left: Vec<u32>,
    /// Jobs and extracts of each pipeline that are not final; at zero it is closed, and nothing of
    /// it can have to run again.
    pipeline_open: Vec<u32>,
    /// Children in other pipelines, and parents there, of which pipelines wait for each other.
    pub(crate) cross_dependencies: CrossDependencies,
    /// Cache volumes that jobs of each pipeline read, each once.
    pipeline_caches: Vec<Vec<VolumeIndex>>,
    /// The next job of each job's pipeline, itself when it is the last.
    sibling: Vec<u32>,
    /// What rules know of each pipeline.
    pub(crate) standing: Rows<Standing>,
    /// In which order each pipeline needs little space.
    pub(crate) courses: Courses,
    /// How long the jobs after each job take, and how much is left.
    pub(crate) chains: Chains,
    /// Which batch volumes stages read at once.
    pub(crate) batch: BatchSets,
    /// How often a job began, or was not begun any more.
    begun_changes: u64,
    /// Jobs that began, or were not begun any more.
    pub(crate) begun: Changed<JobIndex>,
    /// Jobs and volumes that were looked at.
    pub(crate) tally: WorkCounter,
}

impl Graph {
    pub(crate) fn new(workflow: Arc<Workflow>) -> Self {
        let mut jobs: Vec<JobNode> = workflow.jobs.iter().map(JobNode::new).collect();
        let mut volumes = volume_nodes(&workflow);
        let mut rank = vec![0; jobs.len()];
        let order = workflow.topological_order();
        for (position, job) in order.iter().enumerate() {
            rank[job.as_usize()] = count(position);
        }
        let level = workflow.levels_in(&order);
        let kinds = kinds(&workflow, &volumes);
        let followers = followers(&workflow, &rank);
        for follower in followers.iter().flatten() {
            jobs[follower.as_usize()].parents_left += 1;
        }
        let pipeline = workflow.pipelines();
        let courses = Courses::new(&workflow, &pipeline, &order);
        let batch = BatchSets::new(&workflow, &pipeline, &level, &order);
        let chains = Chains::new(&workflow, &order);
        let mut pipeline_left = vec![0; jobs.len()];
        for pipeline in &pipeline {
            pipeline_left[*pipeline as usize] += 1;
        }
        let mut pipeline_open = pipeline_left.clone();
        for extract in &workflow.extracts {
            if let Some(user) = workflow.volume(extract.volume).users.first() {
                pipeline_open[pipeline[user.as_usize()] as usize] += 1;
            }
        }
        let cross_dependencies = CrossDependencies::new(&workflow, &pipeline);
        let pipeline_caches = pipeline_caches(&workflow, &pipeline);
        for cache in pipeline_caches.iter().flatten() {
            volumes[cache.as_usize()].pipelines_open += 1;
        }
        let sibling = siblings(&pipeline);
        let standing = vec![Standing::default(); jobs.len()];
        let mut graph = Self {
            mounts: Mounts::new(&workflow),
            workflow,
            jobs: jobs.into(),
            volumes: volumes.into(),
            sizes: Table::default(),
            totals: Totals::default(),
            rank,
            level,
            kinds,
            followers,
            pipeline,
            pipeline_left,
            pipeline_open,
            cross_dependencies,
            pipeline_caches,
            sibling,
            standing: standing.into(),
            courses,
            chains,
            batch,
            begun_changes: 0,
            begun: Changed::default(),
            tally: WorkCounter::default(),
        };
        for job in graph.job_indexes() {
            let counted = Counted::of(graph.state(job), Standing::default());
            graph.recount(job, Counted::NOWHERE, counted);
        }
        graph
    }

    /// Whether a volume is a cache that several jobs read.
    pub(crate) fn is_batch(&self, volume: VolumeIndex) -> bool {
        self.volume(volume).is_cache && self.workflow.volume(volume).users.len() > 1
    }

    /// Jobs of one kind read the same caches and ask for as many slots.
    pub(crate) fn kind(&self, job: JobIndex) -> u32 {
        self.kinds[job.as_usize()]
    }

    /// The jobs of a pipeline.
    pub(crate) fn members(&self, pipeline: u32) -> impl Iterator<Item = JobIndex> {
        let next = |job: &u32| {
            let next = self.sibling[*job as usize];
            (next != *job).then_some(next)
        };
        std::iter::successors(Some(pipeline), next).map(JobIndex)
    }

    /// The pipeline of a job, named by its first job.
    pub(crate) fn pipeline(&self, job: JobIndex) -> u32 {
        self.pipeline[job.as_usize()]
    }

    /// Whether every job of a pipeline has nothing left to do.
    pub(crate) fn is_pipeline_final(&self, pipeline: u32) -> bool {
        self.pipeline_left[pipeline as usize] == 0
    }

    /// The pipeline of a volume's users, which is one for a scratch volume.
    pub(crate) fn pipeline_of(&self, volume: VolumeIndex) -> Option<u32> {
        let user = self.workflow.volume(volume).users.first()?;
        Some(self.pipeline(*user))
    }

    /// Whether a pipeline is final and its files are at home.
    pub(crate) fn is_pipeline_closed(&self, pipeline: u32) -> bool {
        self.pipeline_open[pipeline as usize] == 0
    }

    /// The caches that nothing of this pipeline can need any more; none while it is open.
    pub(crate) fn caches_of_closed(&self, pipeline: u32) -> Vec<VolumeIndex> {
        let caches = self
            .is_pipeline_closed(pipeline)
            .then(|| self.pipeline_caches[pipeline as usize].clone());
        caches.unwrap_or_default()
    }

    /// Takes note that an extract from `volume` is done or given up. Answers its pipeline.
    pub(crate) fn close_extract(&mut self, volume: VolumeIndex) -> Option<u32> {
        self.volumes[volume.as_usize()].extracts_left -= 1;
        let pipeline = self.pipeline_of(volume)?;
        self.count_open(pipeline, true, false);
        Some(pipeline)
    }

    /// Takes note that what an extract from `volume` sent home is to be sent again.
    pub(crate) fn reopen_extract(&mut self, volume: VolumeIndex) {
        self.volumes[volume.as_usize()].extracts_left += 1;
        if let Some(pipeline) = self.pipeline_of(volume) {
            self.count_open(pipeline, false, true);
        }
    }

    fn count_open(&mut self, pipeline: u32, before: bool, after: bool) {
        let open = &mut self.pipeline_open[pipeline as usize];
        let was_open = *open > 0;
        adjust(open, before, after);
        let is_open = *open > 0;
        if was_open != is_open {
            for cache in &self.pipeline_caches[pipeline as usize] {
                let count = &mut self.volumes.derived_mut(cache.as_usize()).pipelines_open;
                adjust(count, was_open, is_open);
            }
        }
    }

    pub(crate) fn job(&self, job: JobIndex) -> &JobNode {
        self.tally.one();
        &self.jobs[job.as_usize()]
    }

    pub(crate) fn job_mut(&mut self, job: JobIndex) -> &mut JobNode {
        &mut self.jobs[job.as_usize()]
    }

    pub(crate) fn volume(&self, volume: VolumeIndex) -> &VolumeNode {
        self.tally.one();
        &self.volumes[volume.as_usize()]
    }

    pub(crate) fn volume_mut(&mut self, volume: VolumeIndex) -> &mut VolumeNode {
        &mut self.volumes[volume.as_usize()]
    }

    /// A volume for its counts, which are rebuilt from the states of jobs.
    pub(crate) fn volume_counts_mut(&mut self, volume: VolumeIndex) -> &mut VolumeNode {
        self.volumes.derived_mut(volume.as_usize())
    }

    pub(crate) fn state(&self, job: JobIndex) -> JobState {
        self.tally.one();
        self.jobs[job.as_usize()].state
    }

    /// Jobs that start only when this one is done: its children, and those that follow it in the
    /// use of a volume.
    pub(crate) fn waiting_for(&self, job: JobIndex) -> impl Iterator<Item = JobIndex> {
        let children = self.workflow.job(job).children.iter();
        children.chain(&self.followers[job.as_usize()]).copied()
    }

    pub(crate) fn rank(&self, job: JobIndex) -> u32 {
        self.rank[job.as_usize()]
    }

    /// How many jobs come before a job on its longest way from a first one.
    pub(crate) fn level(&self, job: JobIndex) -> u32 {
        self.level[job.as_usize()]
    }

    pub(crate) fn job_indexes(&self) -> impl Iterator<Item = JobIndex> + use<> {
        (0..count(self.jobs.len())).map(JobIndex)
    }

    pub(crate) fn volume_indexes(&self) -> impl Iterator<Item = VolumeIndex> + use<> {
        (0..count(self.volumes.len())).map(VolumeIndex)
    }

    /// The volumes of a job, each once, with whether the job may write them.
    pub(crate) fn mounted(&self, job: JobIndex) -> Mounted {
        let mounted = self.mounts.of(job);
        self.tally.add(mounted.len() as u64);
        mounted
    }

    /// Whether every job has nothing left to do.
    pub(crate) fn is_final(&self) -> bool {
        self.finals() == self.jobs.len() as u64
    }

    /// Jobs that have nothing left to do.
    pub(crate) fn finals(&self) -> u64 {
        let Totals {
            done,
            failed,
            skipped,
        } = self.totals;
        done + failed + skipped
    }

    /// How often a job began, or was not begun any more.
    pub(crate) fn begun_changes(&self) -> u64 {
        self.begun_changes
    }

    /// Puts a job into a state and keeps every count right.
    pub(crate) fn set_state(&mut self, job: JobIndex, state: JobState) {
        let before = self.jobs[job.as_usize()].state;
        if before == state {
            return;
        }
        self.job_mut(job).state = state;
        let (was_done, is_done) = (before == JobState::Done, state == JobState::Done);
        self.count(before, false);
        self.count(state, true);
        let left = &mut self.pipeline_left[self.pipeline[job.as_usize()] as usize];
        adjust(left, !before.is_final(), !state.is_final());
        if before.is_final() != state.is_final() {
            let children = &self.workflow.job(job).children;
            let change = (!before.is_final(), !state.is_final());
            self.cross_dependencies
                .count(job, children, &self.pipeline, change);
            self.chains.count(&self.workflow, job, !state.is_final());
        }
        self.count_open(self.pipeline(job), !before.is_final(), !state.is_final());
        let standing = self.standing[self.pipeline(job) as usize];
        self.recount(
            job,
            Counted::of(before, standing),
            Counted::of(state, standing),
        );
        if before.has_begun() != state.has_begun() {
            let jobs = &self.jobs;
            let has_begun = |job: JobIndex| jobs[job.as_usize()].state.has_begun();
            let pipeline = self.pipeline[job.as_usize()];
            self.courses.moved(pipeline, job, has_begun);
            self.begun_changes += 1;
            self.begun.note(job);
        }
        for (volume, writable) in self.mounted(job) {
            let volume = self.volumes.derived_mut(volume.as_usize());
            adjust(
                &mut volume.users_left,
                !before.is_final(),
                !state.is_final(),
            );
            if writable {
                adjust(&mut volume.writers_left, !was_done, !is_done);
                adjust(&mut volume.writers_dead, before.is_dead(), state.is_dead());
            }
        }
        if was_done != is_done {
            for child in self.waiting_for(job).collect::<Vec<_>>() {
                adjust(
                    &mut self.jobs.derived_mut(child.as_usize()).parents_left,
                    !was_done,
                    !is_done,
                );
            }
        }
    }

    fn count(&mut self, state: JobState, is_now: bool) {
        let total = match state {
            JobState::Done => &mut self.totals.done,
            JobState::Failed => &mut self.totals.failed,
            JobState::Skipped => &mut self.totals.skipped,
            _ => return,
        };
        if is_now { *total += 1 } else { *total -= 1 }
    }

    /// Whether a job that this one waits for will never be done.
    pub(crate) fn has_dead_parent(&self, job: JobIndex) -> bool {
        if self.job(job).parents_left == 0 {
            return false;
        }
        let mut dead = self
            .before(job)
            .filter(|other| self.state(*other).is_dead());
        dead.any(|other| self.waiting_for(other).any(|later| later == job))
    }

    /// All that a job may wait for, some more than once: its parents, and users of its scratch
    /// volumes. A cache, which very many may use, makes nobody wait.
    pub(crate) fn before(&self, job: JobIndex) -> impl Iterator<Item = JobIndex> {
        let mounted = self.mounted(job).into_iter();
        let scratch = mounted.filter(|(volume, _)| !self.volume(*volume).is_cache);
        let users = scratch.flat_map(|(volume, _)| &self.workflow.volume(volume).users);
        self.workflow.job(job).parents.iter().chain(users).copied()
    }
}

kept! {
    /// What was written of the graph.
    GraphChanges of Graph;
    values { begun_changes: u64 }
    tables {}
    indexed {
        jobs: Rows<JobNode>,
        volumes: Rows<VolumeNode>,
        sizes: Table<VolumeIndex, Space>,
        standing: Rows<Standing>,
    }
    parts { courses: Courses }
    rebuilt {
        workflow, mounts, totals, rank, level, kinds, followers, pipeline, pipeline_left,
        pipeline_open, cross_dependencies, pipeline_caches, sibling, chains, batch, begun, tally,
    }
}

impl Graph {
    /// Whether what is written is noted for a journal.
    pub(crate) fn is_recording(&self) -> bool {
        self.jobs.is_recording()
    }
}

/// The volumes of a workflow of which nothing is done.
fn volume_nodes(workflow: &Workflow) -> Vec<VolumeNode> {
    let mut volumes: Vec<_> = workflow
        .volumes
        .iter()
        .map(|volume| VolumeNode {
            is_cache: matches!(volume.kind, VolumeKind::Cache { .. }),
            writers: Vec::new(),
            writer: None,
            users_left: count(volume.users.len()),
            writers_left: 0,
            writers_dead: 0,
            extracts: Vec::new(),
            extracts_left: 0,
            pipelines_open: 0,
            users_near: 0,
            users_outside: 0,
            users_steady: 0,
            steady_outside: 0,
        })
        .collect();
    for (position, job) in workflow.jobs.iter().enumerate() {
        for mount in job.mounts.iter().filter(|mount| mount.writable) {
            let volume = &mut volumes[mount.volume.as_usize()];
            let job = JobIndex(count(position));
            if volume.writers.last() != Some(&job) {
                volume.writers.push(job);
                volume.writers_left += 1;
            }
        }
    }
    for (position, extract) in workflow.extracts.iter().enumerate() {
        let volume = &mut volumes[extract.volume.as_usize()];
        volume.extracts.push(count(position));
        volume.extracts_left += 1;
    }
    volumes
}

/// For each job the first that reads the same caches and asks for as much of a node.
fn kinds(workflow: &Workflow, volumes: &[VolumeNode]) -> Vec<u32> {
    let mut first: BTreeMap<_, BTreeMap<Vec<VolumeIndex>, u32>> = BTreeMap::new();
    let mut caches = Vec::new();
    let jobs = workflow.jobs.iter().enumerate();
    let kinds = jobs.map(|(position, job)| {
        let mounted = job.mounts.iter().map(|mount| mount.volume);
        caches.clear();
        caches.extend(mounted.filter(|volume| volumes[volume.as_usize()].is_cache));
        let node_needs = (job.cpus, job.memory_bytes, job.limits.temporary_bytes);
        let first = first.entry(node_needs).or_default();
        // A million jobs are of few kinds: a list is copied for the first of each.
        match first.get(caches.as_slice()) {
            Some(kind) => *kind,
            None => *first
                .entry(caches.clone())
                .or_insert_with(|| count(position)),
        }
    });
    kinds.collect()
}

/// The next job of each job's pipeline, itself when it is the last.
fn siblings(pipeline: &[u32]) -> Vec<u32> {
    let mut sibling: Vec<u32> = (0..count(pipeline.len())).collect();
    let mut last = sibling.clone();
    for (job, pipeline) in pipeline.iter().enumerate() {
        let last = &mut last[*pipeline as usize];
        if *last as usize != job {
            sibling[*last as usize] = count(job);
            *last = count(job);
        }
    }
    sibling
}

/// The caches that jobs of each pipeline read, each once.
fn pipeline_caches(workflow: &Workflow, pipeline: &[u32]) -> Vec<Vec<VolumeIndex>> {
    let mut caches = vec![Vec::new(); pipeline.len()];
    for (position, volume) in workflow.volumes.iter().enumerate() {
        if !matches!(volume.kind, VolumeKind::Cache { .. }) {
            continue;
        }
        let cache = VolumeIndex(count(position));
        for user in &volume.users {
            let of_pipeline: &mut Vec<VolumeIndex> =
                &mut caches[pipeline[user.as_usize()] as usize];
            if of_pipeline.last() != Some(&cache) {
                of_pipeline.push(cache);
            }
        }
    }
    caches
}

pub(crate) fn adjust(count: &mut u32, before: bool, after: bool) {
    match (before, after) {
        (false, true) => *count += 1,
        (true, false) => *count -= 1,
        _ => {}
    }
}

fn count(length: usize) -> u32 {
    u32::try_from(length).expect("the workflow's own indexes have 32 bits")
}
