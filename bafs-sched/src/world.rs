//! A cluster in one thread: simulated nodes, virtual time, a seed, chosen faults, and the real
//! scheduler core. Models what servers do to volumes and jobs, not how long data take.
//!
//! Allowed faults: nodes die and return (with their volumes or wiped), replies get lost, volumes
//! vanish, jobs fail at most as often as they are retried. In the end all nodes return for good,
//! so every workflow must end complete.

mod chaos;
mod deeds;
mod faults;
mod links;
mod samples;
mod transfers;

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::{ExecutionId, ExtractionId, RunId, ServerId, VolumeId};
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode};

use crate::dice::SeededRng;
use crate::io::contact::Contact;
use crate::io::listing::Listing;
use crate::logic::{Action, Event, MountedVolume, NodeSeen, Outcome, Scheduler, Settings, Space};
use crate::workflow::{JobIndex, VolumeIndex, Workflow};

pub use chaos::Verdict;
pub use faults::{Faults, NodeSpec};
pub use samples::{success, workflow};

/// Adverts are believed for so long after a node died, in milliseconds.
const ADVERT_TTL_MS: u64 = 4_000;
const POLL_MS: u64 = 1_000;
/// A call to a dead node fails after so long, in milliseconds.
const CALL_MS: u64 = 20_000;

#[derive(Debug, Clone)]
struct Node {
    spec: NodeSpec,
    died: Option<Time>,
    was_hurt: bool,
    /// Since when, and until when, it answers nothing although it lives.
    away: Option<(Time, Time)>,
    /// While it is away, its jobs stand still too.
    is_stopped: bool,
    full_until: Time,
    /// Volumes with the jobs whose output they hold.
    volumes: BTreeMap<VolumeId, (Space, VolumeIndex, Content)>,
    executions: BTreeMap<ExecutionId, Execution>,
    /// What it has begun, or is never to begin: noted on disk, so it outlives a restart.
    begun: BTreeSet<ExecutionId>,
    /// Reports of executions that ended.
    reports: BTreeMap<ExecutionId, JobReport>,
}

/// What each job wrote into a volume: a digest of the job and of all that it saw.
type Content = BTreeMap<JobIndex, u64>;

#[derive(Debug, Clone)]
struct Execution {
    job: JobIndex,
    volumes: Vec<MountedVolume>,
    runtime_ms: u64,
}

/// What does not pass between the scheduler and all others.
#[derive(Debug, Clone, Copy)]
struct Cut {
    until: Time,
    /// What the scheduler sends arrives, but no answer does.
    is_one_way: bool,
}

#[derive(Debug, Clone)]
enum Due {
    Serve(Action),
    Tell(Event),
    End(ServerId, ExecutionId),
    Return(ServerId),
    Kill(ServerId),
    Second,
}

/// The simulated cluster.
#[derive(Debug, Clone)]
pub struct World {
    /// The core under test.
    pub scheduler: Scheduler,
    /// All facts that it was told.
    pub records: Vec<(Time, Event)>,
    /// Digests of what arrived at home, by position in the workflow.
    pub outputs: BTreeMap<u32, u64>,
    /// What jobs do to volumes, by their names, where it is not what they declare: whether they
    /// read, and whether they write.
    pub deeds: BTreeMap<(String, String), (bool, bool)>,
    /// What volumes need, by name: a job that finds less ends without space.
    pub needs: BTreeMap<String, Space>,
    /// Extracts that arrived at home, by position in the workflow, with how often they did.
    pub home: BTreeMap<u32, u32>,
    /// Caches that were to be fetched before their readers start, with their nodes.
    pub warmed: BTreeMap<VolumeId, ServerId>,
    now: Time,
    dice: SeededRng,
    faults: Faults,
    nodes: BTreeMap<ServerId, Node>,
    due: BTreeMap<(Time, u64), Due>,
    next: u64,
    listing: Listing,
    contact: Contact,
    /// What does not pass between the scheduler and all others.
    cut: Option<Cut>,
    /// How often executions of each job came to their end, whoever heard of it.
    completed: BTreeMap<JobIndex, u32>,
    /// Files that came home a second time with other content.
    mismatches: u64,
    /// The catalog lists nothing before this time.
    catalog_back: Time,
    failed: BTreeMap<JobIndex, u32>,
    sent: BTreeMap<ExtractionId, u32>,
}

impl World {
    /// A cluster about to run a workflow.
    pub fn new(
        seed: u64,
        workflow: Workflow,
        settings: Settings,
        nodes: Vec<NodeSpec>,
        faults: Faults,
    ) -> Self {
        let nodes = nodes.into_iter().enumerate().map(|(at, spec)| {
            let node = Node {
                spec,
                died: None,
                was_hurt: false,
                away: None,
                is_stopped: false,
                full_until: Time(0),
                volumes: BTreeMap::new(),
                executions: BTreeMap::new(),
                begun: BTreeSet::new(),
                reports: BTreeMap::new(),
            };
            (ServerId(at as u64 + 1), node)
        });
        let mut world = Self {
            scheduler: Scheduler::new(RunId(seed), workflow, settings),
            records: Vec::new(),
            outputs: BTreeMap::new(),
            mismatches: 0,
            catalog_back: Time(0),
            deeds: BTreeMap::new(),
            needs: BTreeMap::new(),
            home: BTreeMap::new(),
            warmed: BTreeMap::new(),
            now: Time(0),
            dice: SeededRng::new(seed),
            faults,
            nodes: nodes.collect(),
            due: BTreeMap::new(),
            next: 0,
            listing: Listing::default(),
            contact: Contact::default(),
            cut: None,
            completed: BTreeMap::new(),
            failed: BTreeMap::new(),
            sent: BTreeMap::new(),
        };
        world.at(0, Due::Second);
        world
    }

    /// Runs until the workflow is over, checking the core after every step.
    ///
    /// # Panics
    /// When an invariant does not hold, or the workflow is not over at `limit_ms`.
    pub fn run(&mut self, limit_ms: u64) -> Outcome {
        while self.scheduler.outcome().is_none() {
            assert!(
                self.now.0 < limit_ms,
                "not over in time: {:?}",
                self.scheduler.progress()
            );
            self.advance();
        }
        // What was asked for last still happens.
        while self.due.values().any(|due| matches!(due, Due::Serve(_))) {
            self.advance();
        }
        for (server, node) in &self.nodes {
            if !node.was_hurt {
                assert!(
                    node.volumes.is_empty(),
                    "volumes leak on {server}: {:?}",
                    node.volumes
                );
            }
            assert!(
                node.executions.is_empty() || node.was_hurt,
                "a job goes on at {server}"
            );
        }
        self.scheduler
            .outcome()
            .cloned()
            .expect("the loop above waits for it")
    }

    /// Has the core told a fact at this time, in milliseconds.
    pub fn tell_at(&mut self, at_ms: u64, event: Event) {
        self.at(at_ms, Due::Tell(event));
    }

    /// How long the run took in virtual time, in milliseconds.
    pub fn elapsed_ms(&self) -> u64 {
        self.now.0
    }

    fn at(&mut self, delay_ms: u64, due: Due) {
        self.next += 1;
        self.due
            .insert((self.now.plus_ms(delay_ms), self.next), due);
    }

    fn advance(&mut self) {
        let timer = self.scheduler.next_timer();
        let first = self.due.keys().next().map(|(at, _)| *at);
        if let Some(timer) = timer
            && first.is_none_or(|first| timer < first)
        {
            self.now = self.now.max(timer);
            self.tell(Event::Tick);
            return;
        }
        let ((at, _), due) = self.due.pop_first().expect("a second always follows");
        self.now = at;
        match due {
            Due::Serve(_) if self.cut.is_some_and(|cut| !cut.is_one_way) => self.wait_for_link(due),
            Due::Tell(_) if self.cut.is_some() => self.wait_for_link(due),
            Due::Serve(action) => self.serve(action),
            Due::Tell(event) => self.tell(event),
            Due::End(server, execution) => self.end(server, execution),
            Due::Return(server) => self.revive(server),
            Due::Kill(server) => {
                if self.is_alive(server) {
                    self.kill(server);
                }
            }
            Due::Second => self.second(),
        }
    }

    fn tell(&mut self, event: Event) {
        self.records.push((self.now, event.clone()));
        let mut actions = Vec::new();
        self.scheduler.step(self.now, event, &mut actions);
        self.scheduler.check();
        for action in actions {
            let delay = 1 + self.dice.below(20);
            self.at(delay, Due::Serve(action));
        }
    }

    fn is_faulty(&mut self, permille: u64) -> bool {
        self.now.0 < self.faults.until_ms && self.dice.chance(permille)
    }

    fn is_alive(&self, server: ServerId) -> bool {
        let node = &self.nodes[&server];
        node.died.is_none() && node.away.is_none()
    }

    fn answer(&mut self, event: Event, lost: Event) {
        if self.is_faulty(self.faults.reply_lost) {
            self.at(CALL_MS, Due::Tell(lost));
        } else {
            let delay = 1 + self.dice.below(20);
            self.at(delay, Due::Tell(event));
        }
    }

    fn serve(&mut self, action: Action) {
        if let Some(back) = self.back_in_time(&action) {
            self.at(back, Due::Serve(action));
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
                base,
            } => self.serve_copy(id, source, server, size, base),
            Action::WarmVolume { id, server } => drop(self.warmed.insert(id, server)),
            Action::LookAtCache { id, server } => self.look_at_cache(id, server),
            Action::DeleteVolume { id, server } => {
                let lost = Event::VolumeDeleteFailed { volume: id };
                if !self.is_alive(server) {
                    self.at(CALL_MS, Due::Tell(lost));
                    return;
                }
                self.node(server).volumes.remove(&id);
                self.answer(Event::VolumeDeleted { volume: id }, lost);
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
                    // It is killed when it is back, unless it is given up before.
                    self.at(CALL_MS, Due::Serve(action));
                } else if let Some(killed) = self.node(server).executions.remove(&execution) {
                    self.write_half(&killed);
                    let report = report(JobOutcome::Killed);
                    self.at(50, Due::Tell(Event::JobEnded { execution, report }));
                } else {
                    self.node(server).begun.insert(execution);
                    self.at(50, Due::Tell(Event::JobUnknown { execution }));
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
            self.at(CALL_MS, Due::Tell(lost));
            return;
        }
        if self.is_started_again(server, execution) {
            return;
        }
        self.check_start(job, &volumes);
        let runtime_ms = 500 + self.dice.below(4_000);
        let running = Execution {
            job,
            volumes,
            runtime_ms,
        };
        self.node(server).executions.insert(execution, running);
        match self.faults.poison_job == Some(job) {
            true => self.at(300, Due::Kill(server)),
            false => self.at(runtime_ms, Due::End(server, execution)),
        }
        self.answer(Event::JobStarted { execution }, lost);
    }

    fn serve_create(&mut self, id: VolumeId, volume: VolumeIndex, server: ServerId, size: Space) {
        let failed = |error| Event::VolumeCreateFailed { volume: id, error };
        if !self.is_alive(server) {
            self.at(CALL_MS, Due::Tell(failed(unreachable_error())));
            return;
        }
        if self.now < self.nodes[&server].full_until {
            let error = Error::new(ErrorCode::NoSpaceBytes, "the disk is full");
            self.at(10, Due::Tell(failed(error)));
            return;
        }
        let node = self.node(server);
        let used = node
            .volumes
            .values()
            .fold(Space::ZERO, |sum, (size, ..)| sum.plus(*size));
        if !node.volumes.contains_key(&id) && !node.spec.capacity.minus(used).holds(size) {
            assert!(node.was_hurt, "{server} was asked for more than it has");
            let error = Error::new(ErrorCode::NoSpaceBytes, "old volumes are still there");
            self.at(10, Due::Tell(failed(error)));
            return;
        }
        node.volumes
            .entry(id)
            .or_insert((size, volume, Content::new()));
        self.answer(
            Event::VolumeCreated { volume: id },
            failed(unreachable_error()),
        );
    }

    fn end(&mut self, server: ServerId, execution: ExecutionId) {
        if let (true, Some((_, back))) = (self.nodes[&server].is_stopped, self.nodes[&server].away)
        {
            self.at(back.ms_since(self.now) + 1, Due::End(server, execution));
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
            // The program is told, and gives up; its agent counts.
            JobOutcome::Exited(1)
        } else if self.faults.poison_node == Some(server) {
            JobOutcome::Exited(1)
        } else if self.is_faulty(self.faults.environment_fails) {
            JobOutcome::EnvironmentFailed(unreachable_error())
        } else if self.is_faulty(self.faults.job_fails)
            && self.failed.get(&ended.job).copied().unwrap_or(0) < retries
        {
            *self.failed.entry(ended.job).or_default() += 1;
            JobOutcome::Exited(1)
        } else {
            self.write(&ended);
            *self.completed.entry(ended.job).or_default() += 1;
            JobOutcome::Exited(0)
        };
        if outcome != JobOutcome::Exited(0) {
            self.write_half(&ended);
        }
        let report = JobReport {
            wall_ms: ended.runtime_ms,
            volumes: self.uses(ended.job, &ended.volumes),
            ..report(outcome)
        };
        let away = self.nodes[&server].away;
        self.node(server).reports.insert(execution, report.clone());
        let delay = 20 + away.map_or(0, |(_, back)| back.ms_since(self.now));
        self.at(delay, Due::Tell(Event::JobEnded { execution, report }));
    }

    fn node(&mut self, server: ServerId) -> &mut Node {
        self.nodes
            .get_mut(&server)
            .expect("the core names nodes that it was told of")
    }

    fn second(&mut self) {
        self.more_faults();
        for server in self.nodes.keys().copied().collect::<Vec<_>>() {
            if self.is_alive(server) && self.is_faulty(self.faults.node_dies) {
                self.kill(server);
            }
            let ids: Vec<_> = self.nodes[&server].volumes.keys().copied().collect();
            for id in ids {
                if self.is_faulty(self.faults.volume_vanishes) {
                    self.node(server).volumes.remove(&id);
                    self.node(server).was_hurt = true;
                }
            }
        }
        let nodes = self
            .nodes
            .iter()
            .filter(|(_, node)| is_listed(node, self.now));
        let nodes: Vec<NodeSeen> = nodes
            .map(|(server, node)| deeds::seen(*server, node))
            .collect();
        self.judge_silence(self.now >= self.catalog_back, nodes);
        self.at(POLL_MS, Due::Second);
    }
}

fn is_listed(node: &Node, now: Time) -> bool {
    let is_fresh = |since: Time| now.ms_since(since) < ADVERT_TTL_MS;
    node.died.is_none_or(is_fresh) && node.away.is_none_or(|(since, _)| is_fresh(since))
}

fn unreachable_error() -> Error {
    Error::new(ErrorCode::Unreachable, "no answer")
}

fn report(outcome: JobOutcome) -> JobReport {
    JobReport {
        outcome,
        wall_ms: 1,
        cpu_ms: 1,
        output_tail: String::new(),
        volumes: Vec::new(),
    }
}
