//! A simulated cluster with faults, in virtual time, around the real scheduler core.
//!
//! [`SimulatedCluster`] plays nodes, catalog and network in one thread. It tests that a workflow
//! ends complete and correct, whatever fails:
//!
//! ```text
//!  due_events, by time ─▶ serve_action: a node makes, copies or deletes a volume, starts a job
//!         ▲                    │ reply, or a lost reply, some milliseconds later
//!         │                    ▼
//!         └── actions ◀── Scheduler::step, then Scheduler::check (invariants)
//! ```
//!
//! * A seed and [`Faults`] decide what fails: nodes die and return, with or without their volumes;
//!   replies get lost; volumes vanish; jobs fail at most as often as they are retried.
//! * `chaos.rs` adds stopped nodes, cut links, full disks, and a catalog and a scheduler that die.
//!   The scheduler then continues from its recorded events, as from a journal.
//! * Each volume holds a digest of each job's output, over all that this job saw. So a job that
//!   reads wrong input changes what arrives at home, and the test compares that.
//! * `link_cuts.rs` cuts the scheduler off, and `observed_access.rs` makes jobs use other volumes
//!   than they declare.
//!
//! It models what servers do to volumes and jobs. Apart from a few milliseconds for each action, it
//! does not model how long data take: that is [`crate::simulator`].
//!
//! **Result.** [`SimulatedCluster::run_to_end`] returns the [`Outcome`]. It panics if an invariant
//! of the core breaks, or if the run is not over at the time limit. It also panics if a node that
//! did not fail still has a volume or an execution. In the end all nodes return permanently, so
//! every run must complete.
//!
//! **Determinism.** Time is virtual, in milliseconds, and all choices come from the seed. Equal
//! arguments give the same run, so a failed seed can be repeated.
//!
//! `bafs-sim/tests/chaos.rs` runs a hundred seeds as an ordinary test. `cargo xtask bench chaos`
//! runs more.

mod chaos;
mod faults;
mod fixtures;
mod link_cuts;
mod observed_access;
mod recording;
mod transfers;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::seeded_rng::SeededRng;

use bafs_proto::ids::{ExecutionId, ExtractionId, RunId, ServerId, VolumeId};
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode};
use bafs_sched::io::connectivity::Connectivity;
use bafs_sched::io::listing_tracker::ListingTracker;
use bafs_sched::{
    Action, Event, MountedVolume, NodeInfo, Outcome, RecordedStep, Scheduler, Settings, Space,
};
use bafs_workflow::{JobIndex, VolumeIndex, Workflow};
pub use chaos::ChaosResult;
pub use faults::{Faults, NodeSpec};
pub use fixtures::{parse_workflow_text, successful_report};

/// Time for which adverts of a dead node stay listed, in milliseconds.
const ADVERT_TTL_MS: u64 = 4_000;
const POLL_MS: u64 = 1_000;
/// A call to a dead node fails after so long, in milliseconds.
const CALL_TIMEOUT_MS: u64 = 20_000;

#[derive(Debug, Clone)]
struct ClusterNode {
    spec: NodeSpec,
    died_at: Option<Time>,
    has_failed: bool,
    /// Since when, and until when, it answers nothing although it lives.
    unreachable: Option<(Time, Time)>,
    /// While it is stopped, its jobs stop too.
    is_stopped: bool,
    full_until: Time,
    /// Volumes with the jobs whose output they hold.
    volumes: BTreeMap<VolumeId, (Space, VolumeIndex, VolumeWrites)>,
    /// Volumes that ended, or were deleted before they were made: a delayed call creates none of
    /// them, as at a server.
    tombstones: BTreeSet<VolumeId>,
    executions: BTreeMap<ExecutionId, ClusterExecution>,
    /// Executions that it has started, or must never start: stored on disk, so they survive a
    /// restart.
    started_executions: BTreeSet<ExecutionId>,
    /// Reports of executions that ended.
    reports: BTreeMap<ExecutionId, JobReport>,
}

/// Digest of each job's writes into a volume: of the job and of its inputs.
type VolumeWrites = BTreeMap<JobIndex, u64>;

#[derive(Debug, Clone)]
struct ClusterExecution {
    job: JobIndex,
    volumes: Vec<MountedVolume>,
    runtime_ms: u64,
}

/// The messages that are lost between the scheduler and all nodes.
#[derive(Debug, Clone, Copy)]
struct SchedulerCut {
    until: Time,
    /// The scheduler's messages arrive, but no answer does.
    is_one_way: bool,
}

#[derive(Debug, Clone)]
enum ClusterEvent {
    ServeAction(Action),
    ApplyEvent(Event),
    ExecutionEnds(ServerId, ExecutionId),
    /// A scheduler that took up the run asks for an execution.
    QueryExecution(ServerId, ExecutionId),
    NodeReturns(ServerId),
    NodeDies(ServerId),
    SecondPasses,
}

/// A simulated cluster that runs one workflow, in virtual time.
#[derive(Debug, Clone)]
pub struct SimulatedCluster {
    /// The core under test.
    pub scheduler: Scheduler,
    /// All facts that the core got.
    pub records: Vec<(Time, Event)>,
    /// The same as a journal keeps them.
    pub steps: Vec<RecordedStep>,
    /// A core that is told what the other one wrote, and decides nothing; compared after each
    /// step.
    restored: Option<Scheduler>,
    /// What was different then.
    pub restored_differences: Vec<String>,
    /// Digests of the files at home, by position in the workflow.
    pub outputs: BTreeMap<u32, u64>,
    /// Access of jobs to volumes, by their names, if it differs from the declaration: whether they
    /// read, and whether they write.
    pub observed_access: BTreeMap<(String, String), (bool, bool)>,
    /// Needed space of volumes, by name: a job that finds less fails for lack of space.
    pub needed_space: BTreeMap<String, Space>,
    /// Extracts that arrived at home, by position in the workflow, with how often they did.
    pub extract_arrivals: BTreeMap<u32, u32>,
    /// Caches that were to be fetched before their readers start, with their nodes.
    pub warmed_caches: BTreeMap<VolumeId, ServerId>,
    /// As it was given: sizes may change.
    given_workflow: Arc<Workflow>,
    now: Time,
    rng: SeededRng,
    faults: Faults,
    nodes: BTreeMap<ServerId, ClusterNode>,
    due_events: BTreeMap<(Time, u64), ClusterEvent>,
    next_sequence: u64,
    listing_tracker: ListingTracker,
    connectivity: Connectivity,
    /// The messages that are lost between the scheduler and all nodes.
    scheduler_cut: Option<SchedulerCut>,
    /// How often executions of each job ended, reported or not.
    completions: BTreeMap<JobIndex, u32>,
    /// Files that came home a second time with other content.
    mismatches: u64,
    /// The catalog lists nothing before this time.
    catalog_returns_at: Time,
    job_failures: BTreeMap<JobIndex, u32>,
    extract_attempts: BTreeMap<ExtractionId, u32>,
}

impl SimulatedCluster {
    /// A cluster about to run a workflow.
    pub fn new(
        seed: u64,
        workflow: impl Into<Arc<Workflow>>,
        settings: Settings,
        nodes: Vec<NodeSpec>,
        faults: Faults,
    ) -> Self {
        let workflow = workflow.into();
        let nodes = nodes.into_iter().enumerate().map(|(at, spec)| {
            let node = ClusterNode {
                spec,
                died_at: None,
                has_failed: false,
                unreachable: None,
                is_stopped: false,
                full_until: Time(0),
                volumes: BTreeMap::new(),
                tombstones: BTreeSet::new(),
                executions: BTreeMap::new(),
                started_executions: BTreeSet::new(),
                reports: BTreeMap::new(),
            };
            (ServerId(at as u64 + 1), node)
        });
        let mut world = Self {
            given_workflow: Arc::clone(&workflow),
            scheduler: Scheduler::new(RunId(seed), workflow, settings),
            records: Vec::new(),
            steps: Vec::new(),
            restored: None,
            restored_differences: Vec::new(),
            outputs: BTreeMap::new(),
            mismatches: 0,
            catalog_returns_at: Time(0),
            observed_access: BTreeMap::new(),
            needed_space: BTreeMap::new(),
            extract_arrivals: BTreeMap::new(),
            warmed_caches: BTreeMap::new(),
            now: Time(0),
            rng: SeededRng::new(seed),
            faults,
            nodes: nodes.collect(),
            due_events: BTreeMap::new(),
            next_sequence: 0,
            listing_tracker: ListingTracker::default(),
            connectivity: Connectivity::default(),
            scheduler_cut: None,
            completions: BTreeMap::new(),
            job_failures: BTreeMap::new(),
            extract_attempts: BTreeMap::new(),
        };
        world.scheduler.start_recording();
        world.schedule_due(0, ClusterEvent::SecondPasses);
        world
    }

    /// Runs until the workflow is over, checking the core after every step.
    ///
    /// # Panics
    /// When an invariant does not hold, or the workflow is not over at `limit_ms`.
    pub fn run_to_end(&mut self, limit_ms: u64) -> Outcome {
        while self.scheduler.outcome().is_none() {
            assert!(
                self.now.0 < limit_ms,
                "not over in time: {:?}",
                self.scheduler.progress()
            );
            self.advance();
        }
        // The last requested actions still happen.
        while self
            .due_events
            .values()
            .any(|due| matches!(due, ClusterEvent::ServeAction(_)))
        {
            self.advance();
        }
        for (server, node) in &self.nodes {
            if !node.has_failed {
                assert!(
                    node.volumes.is_empty(),
                    "volumes leak on {server}: {:?}",
                    node.volumes
                );
            }
            assert!(
                node.executions.is_empty() || node.has_failed,
                "a job goes on at {server}"
            );
        }
        self.scheduler
            .outcome()
            .cloned()
            .expect("the loop above waits for it")
    }

    /// Gives the core a fact at this time, in milliseconds.
    pub fn schedule_event(&mut self, at_ms: u64, event: Event) {
        self.schedule_due(at_ms, ClusterEvent::ApplyEvent(event));
    }

    /// How long the run took in virtual time, in milliseconds.
    pub fn elapsed_ms(&self) -> u64 {
        self.now.0
    }

    fn schedule_due(&mut self, delay_ms: u64, due: ClusterEvent) {
        self.next_sequence += 1;
        self.due_events
            .insert((self.now.plus_ms(delay_ms), self.next_sequence), due);
    }

    fn advance(&mut self) {
        let timer = self.scheduler.next_timer();
        let first = self.due_events.keys().next().map(|(at, _)| *at);
        if let Some(timer) = timer
            && first.is_none_or(|first| timer < first)
        {
            self.now = self.now.max(timer);
            self.apply_event(Event::Tick);
            return;
        }
        let ((at, _), due) = self
            .due_events
            .pop_first()
            .expect("a second always follows");
        self.now = at;
        match due {
            ClusterEvent::ServeAction(_)
                if self.scheduler_cut.is_some_and(|cut| !cut.is_one_way) =>
            {
                self.delay_until_connected(due)
            }
            ClusterEvent::ApplyEvent(_) if self.scheduler_cut.is_some() => {
                self.delay_until_connected(due)
            }
            ClusterEvent::ServeAction(action) => self.serve_action(action),
            ClusterEvent::ApplyEvent(event) => self.apply_event(event),
            ClusterEvent::ExecutionEnds(server, execution) => self.end_execution(server, execution),
            ClusterEvent::QueryExecution(server, execution) => {
                self.query_execution(server, execution)
            }
            ClusterEvent::NodeReturns(server) => self.revive_node(server),
            ClusterEvent::NodeDies(server) => {
                if self.is_alive(server) {
                    self.kill_node(server);
                }
            }
            ClusterEvent::SecondPasses => self.pass_second(),
        }
    }

    fn apply_event(&mut self, event: Event) {
        self.records.push((self.now, event.clone()));
        let step = self.scheduler.record_step(self.now, event);
        self.scheduler.check();
        self.compare_restored(&step);
        let actions = step.actions.clone();
        self.steps.push(step);
        for action in actions {
            let delay = 1 + self.rng.next_below(20);
            self.schedule_due(delay, ClusterEvent::ServeAction(action));
        }
    }

    fn has_fault(&mut self, permille: u64) -> bool {
        self.now.0 < self.faults.until_ms && self.rng.next_bool(permille)
    }

    fn is_alive(&self, server: ServerId) -> bool {
        let node = &self.nodes[&server];
        node.died_at.is_none() && node.unreachable.is_none()
    }

    fn send_reply(&mut self, event: Event, lost: Event) {
        if self.has_fault(self.faults.reply_lost) {
            self.schedule_due(CALL_TIMEOUT_MS, ClusterEvent::ApplyEvent(lost));
        } else {
            let delay = 1 + self.rng.next_below(20);
            self.schedule_due(delay, ClusterEvent::ApplyEvent(event));
        }
    }

    fn serve_action(&mut self, action: Action) {
        if let Some(back) = self.ms_until_reachable(&action) {
            self.schedule_due(back, ClusterEvent::ServeAction(action));
            return;
        }
        if matches!(action, Action::KillJob { server, .. } if self.scheduler.is_lost(server)) {
            return;
        }
        match action {
            Action::CreateVolume {
                id,
                volume,
                server,
                size,
            } => {
                self.serve_create(id, volume, server, size);
            }
            Action::CopyVolume {
                id,
                source,
                server,
                size,
                base_copy: base,
            } => self.serve_copy(id, source, server, size, base),
            Action::WarmCache { id, server } => drop(self.warmed_caches.insert(id, server)),
            Action::InspectCache { id, server } => self.inspect_cache(id, server),
            Action::DeleteVolume { id, server } => {
                let lost = Event::VolumeDeleteFailed { volume: id };
                if !self.is_alive(server) {
                    self.schedule_due(CALL_TIMEOUT_MS, ClusterEvent::ApplyEvent(lost));
                    return;
                }
                self.node(server).end_volume(id);
                self.send_reply(Event::VolumeDeleted { volume: id }, lost);
            }
            Action::StartJob {
                execution,
                job,
                server,
                volumes,
                ..
            } => self.serve_start(execution, job, server, volumes),
            Action::KillJob { execution, server } => {
                if !self.is_alive(server) {
                    // The node kills it after its return, unless it is declared lost before.
                    self.schedule_due(CALL_TIMEOUT_MS, ClusterEvent::ServeAction(action));
                } else if let Some(killed) = self.node(server).executions.remove(&execution) {
                    self.write_partial_outputs(&killed);
                    let report = report(JobOutcome::Killed);
                    self.schedule_due(
                        50,
                        ClusterEvent::ApplyEvent(Event::JobEnded { execution, report }),
                    );
                } else {
                    self.node(server).started_executions.insert(execution);
                    self.schedule_due(
                        50,
                        ClusterEvent::ApplyEvent(Event::JobUnknown { execution }),
                    );
                }
            }
            Action::ExtractFile {
                extract,
                index,
                source,
            } => {
                self.serve_extract(extract, index, source);
            }
            Action::ProbeVolumes { server, volumes } => self.serve_probe(server, volumes),
            Action::FindVolumes { server, volumes } => self.serve_find(server, volumes),
            Action::Finish { .. } => {}
        }
    }

    fn serve_start(
        &mut self,
        execution: ExecutionId,
        job: JobIndex,
        server: ServerId,
        volumes: Vec<MountedVolume>,
    ) {
        let lost = Event::JobStartFailed {
            execution,
            error: unreachable_error(),
        };
        if !self.is_alive(server) {
            self.schedule_due(CALL_TIMEOUT_MS, ClusterEvent::ApplyEvent(lost));
            return;
        }
        if self.has_started_before(server, execution) {
            return;
        }
        self.check_start(job, &volumes);
        let runtime_ms = 500 + self.rng.next_below(4_000);
        let running = ClusterExecution {
            job,
            volumes,
            runtime_ms,
        };
        self.node(server).executions.insert(execution, running);
        match self.faults.poison_job == Some(job) {
            true => self.schedule_due(300, ClusterEvent::NodeDies(server)),
            false => self.schedule_due(runtime_ms, ClusterEvent::ExecutionEnds(server, execution)),
        }
        self.send_reply(Event::JobStarted { execution }, lost);
    }

    fn serve_create(&mut self, id: VolumeId, volume: VolumeIndex, server: ServerId, size: Space) {
        let failed = |error| Event::VolumeCreateFailed { volume: id, error };
        if !self.is_alive(server) {
            self.schedule_due(
                CALL_TIMEOUT_MS,
                ClusterEvent::ApplyEvent(failed(unreachable_error())),
            );
            return;
        }
        if self.refuse_ended(id, server) {
            return;
        }
        if self.now < self.nodes[&server].full_until {
            let error = Error::new(ErrorCode::NoSpaceBytes, "the disk is full");
            self.schedule_due(10, ClusterEvent::ApplyEvent(failed(error)));
            return;
        }
        let node = self.node(server);
        let used = node
            .volumes
            .values()
            .fold(Space::ZERO, |sum, (size, ..)| sum.saturating_add(*size));
        if !node.volumes.contains_key(&id)
            && !node.spec.capacity.saturating_sub(used).can_hold(size)
        {
            assert!(node.has_failed, "{server} was asked for more than it has");
            let error = Error::new(ErrorCode::NoSpaceBytes, "old volumes are still there");
            self.schedule_due(10, ClusterEvent::ApplyEvent(failed(error)));
            return;
        }
        node.volumes
            .entry(id)
            .or_insert((size, volume, VolumeWrites::new()));
        self.send_reply(
            Event::VolumeCreated { volume: id },
            failed(unreachable_error()),
        );
    }

    fn end_execution(&mut self, server: ServerId, execution: ExecutionId) {
        if let (true, Some((_, back))) = (
            self.nodes[&server].is_stopped,
            self.nodes[&server].unreachable,
        ) {
            self.schedule_due(
                back.ms_since(self.now) + 1,
                ClusterEvent::ExecutionEnds(server, execution),
            );
            return;
        }
        let Some(ended) = self.node(server).executions.remove(&execution) else {
            return;
        };
        let lost = ended
            .volumes
            .iter()
            .any(|mounted| mounted.server.is_some() && self.content(mounted).is_none());
        let retries = self.scheduler.workflow().job(ended.job).retries;
        let outcome = if lost {
            JobOutcome::EnvironmentFailed(Error::new(ErrorCode::VolumeLost, "a volume is gone"))
        } else if self.is_too_small(&ended.volumes) {
            // The program gets the error and fails; the agent's report counts.
            JobOutcome::Exited(1)
        } else if self.faults.poison_node == Some(server) {
            JobOutcome::Exited(1)
        } else if self.has_fault(self.faults.environment_fails) {
            JobOutcome::EnvironmentFailed(unreachable_error())
        } else if self.has_fault(self.faults.job_fails)
            && self.job_failures.get(&ended.job).copied().unwrap_or(0) < retries
        {
            *self.job_failures.entry(ended.job).or_default() += 1;
            JobOutcome::Exited(1)
        } else {
            self.write_outputs(&ended);
            *self.completions.entry(ended.job).or_default() += 1;
            JobOutcome::Exited(0)
        };
        if outcome != JobOutcome::Exited(0) {
            self.write_partial_outputs(&ended);
        }
        let report = JobReport {
            wall_ms: ended.runtime_ms,
            volumes: self.reported_uses(ended.job, &ended.volumes),
            ..report(outcome)
        };
        let away = self.nodes[&server].unreachable;
        self.node(server).reports.insert(execution, report.clone());
        let delay = 20 + away.map_or(0, |(_, back)| back.ms_since(self.now));
        self.schedule_due(
            delay,
            ClusterEvent::ApplyEvent(Event::JobEnded { execution, report }),
        );
    }

    fn node(&mut self, server: ServerId) -> &mut ClusterNode {
        self.nodes
            .get_mut(&server)
            .expect("the core names nodes that it was told of")
    }

    fn pass_second(&mut self) {
        self.inject_faults();
        for server in self.nodes.keys().copied().collect::<Vec<_>>() {
            if self.is_alive(server) && self.has_fault(self.faults.node_dies) {
                self.kill_node(server);
            }
            let ids: Vec<_> = self.nodes[&server].volumes.keys().copied().collect();
            for id in ids {
                if self.has_fault(self.faults.volume_vanishes) {
                    self.node(server).end_volume(id);
                    self.node(server).has_failed = true;
                }
            }
        }
        let nodes = self
            .nodes
            .iter()
            .filter(|(_, node)| is_listed(node, self.now));
        let nodes: Vec<NodeInfo> = nodes
            .map(|(server, node)| observed_access::node_info(*server, node))
            .collect();
        self.check_silent_nodes(self.now >= self.catalog_returns_at, nodes);
        self.schedule_due(POLL_MS, ClusterEvent::SecondPasses);
    }
}

fn is_listed(node: &ClusterNode, now: Time) -> bool {
    let is_fresh = |since: Time| now.ms_since(since) < ADVERT_TTL_MS;
    node.died_at.is_none_or(is_fresh) && node.unreachable.is_none_or(|(since, _)| is_fresh(since))
}

fn unreachable_error() -> Error {
    Error::new(ErrorCode::Unreachable, "no answer")
}

fn report(outcome: JobOutcome) -> JobReport {
    JobReport {
        outcome,
        wall_ms: 1,
        cpu_ms: 1,
        memory_bytes_max: 0,
        output_tail: String::new(),
        volumes: Vec::new(),
    }
}
