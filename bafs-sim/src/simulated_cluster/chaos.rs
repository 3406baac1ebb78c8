//! Faults beyond dying nodes: stopped nodes, cut links, full disks, a catalog and a scheduler that
//! die. And the run that meets all of them.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::{ExecutionId, ServerId};
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode};
use bafs_sched::io::connectivity::Connectivity;
use bafs_sched::io::journal::JournalTail;
use bafs_sched::io::listing_tracker::ListingTracker;
use bafs_sched::{Action, Event, NullSelector, Outcome, Scheduler, Settings, Space};
use bafs_workflow::{Workflow, parse_workflow};

use super::{
    CALL_TIMEOUT_MS, ClusterEvent, ClusterExecution, ClusterNode, Faults, NodeSpec,
    SimulatedCluster, VolumeWrites,
};

/// Pipelines and stages of the workflow of a chaos run, and the nodes that it has.
const CHAOS_WIDTH: u32 = 40;
const CHAOS_DEPTH: u32 = 4;
const CHAOS_NODES: usize = 6;

/// Ids of nodes that take the place of those of a journal.
const NEW_NODES_FROM: u64 = 1_000;

/// A call is on the wire for so long, in milliseconds.
const WIRE_MS_MAX: u64 = 21;

/// Digest of the writes of an interrupted job.
const PARTIAL_WRITE: u64 = 1;

/// Faults happen for so long, in milliseconds; without any a run takes a minute.
const FAULTS_UNTIL_MS: u64 = 90_000;
const LIMIT_MS: u64 = 8 * 3_600_000;

/// The result of a chaos run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChaosResult {
    /// Every job is done and every file is at home.
    pub is_complete: bool,
    /// Every file at home is that of a run without faults, also where it came twice.
    pub is_identical: bool,
    /// Volumes and jobs that nodes still have a minute after the end.
    pub leaks: u64,
    /// Faults that happened: nodes lost, and executions beyond one of each job.
    pub faults: u64,
    /// Executions beyond one of each job.
    pub reruns: u64,
    /// How often jobs came to their end beyond once for each.
    pub repeated_completions: u64,
    /// How often the scheduler found itself cut off.
    pub cut_offs: u64,
    /// How often the scheduler was killed.
    pub restarts: u64,
}

/// A digest of a sequence (FNV-1a).
pub(super) fn digest(values: impl Iterator<Item = u64>) -> u64 {
    let bytes = values.flat_map(u64::to_le_bytes);
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// 40 pipelines of four levels: each job reads a batch volume and its predecessor's output, and
/// changes a volume that its pipeline shares.
fn chaos_workflow() -> Workflow {
    let mut text = String::from("volume batch cache bafs://home/data 40 MB files 10\n");
    for p in 0..CHAOS_WIDTH {
        text += &format!("volume w{p} scratch 2 MB files 10\n");
        for at in 0..CHAOS_DEPTH {
            text += &format!("job j{p}_{at} {{\nexecutable = x\nretry = 3\n}}\n");
            text += &format!(
                "volume v{p}_{at} scratch {} MB files 10\n",
                2 + (p + at) % 7
            );
            text += &format!("mount batch j{p}_{at} /data\nmount v{p}_{at} j{p}_{at} /out\n");
            text += &format!("mount w{p} j{p}_{at} /work\n");
            if at > 0 {
                let before = at - 1;
                text += &format!("parent j{p}_{before} child j{p}_{at}\n");
                text += &format!("mount v{p}_{before} j{p}_{at} /in ro\n");
            }
        }
        text += &format!("extract v{p}_{} out bafs://home/out.{p}\n", CHAOS_DEPTH - 1);
    }
    let none = |path: &str| Err(path.to_owned());
    let parsed = parse_workflow("chaos.bafs", &text, &none);
    parsed
        .expect("the workflow of chaos runs is right")
        .workflow
}

fn chaos_cluster(seed: u64, faults: Faults) -> SimulatedCluster {
    let node = NodeSpec {
        capacity: Space {
            bytes: 100_000_000,
            files: 10_000,
        },
        slots: 3,
    };
    let usual = Settings::default();
    // Half of the runs judge jobs and nodes as user runs do: no node or job is blamed wrongly.
    let is_usual = seed.is_multiple_of(2);
    let faults_max = |usual: u32| if is_usual { usual } else { 1_000 };
    let settings = Settings {
        environment_faults_max: faults_max(usual.environment_faults_max),
        killed_nodes_max: faults_max(usual.killed_nodes_max),
        nodes_timeout_ms: 600_000,
        space_timeout_ms: 600_000,
        cleanup_timeout_ms: 600_000,
        ..usual
    };
    SimulatedCluster::new(
        seed,
        chaos_workflow(),
        settings,
        vec![node; CHAOS_NODES],
        faults,
    )
}

impl SimulatedCluster {
    /// The files that a run without faults extracts, by position: a digest of each.
    ///
    /// # Panics
    /// When it does not end complete.
    pub fn run_without_faults() -> BTreeMap<u32, u64> {
        let mut world = chaos_cluster(0, Faults::default());
        assert_eq!(
            world.run_to_end(LIMIT_MS),
            Outcome::Complete,
            "without any fault"
        );
        assert_eq!(
            world.outputs.len(),
            CHAOS_WIDTH as usize,
            "every file is at home"
        );
        world.outputs
    }

    /// Runs 40 pipelines of four levels on six nodes, while nodes, links, disks, the catalog and
    /// the scheduler fail by the seed. `calm` is what `Self::calm` answers.
    ///
    /// # Panics
    /// When an invariant of the core does not hold, or the run does not end.
    pub fn run_chaos(seed: u64, calm: &BTreeMap<u32, u64>) -> ChaosResult {
        Self::run_with_faults(seed, calm, Self::all_faults())
    }

    /// The faults of `Self::chaos`.
    fn all_faults() -> Faults {
        Faults {
            node_dies: 8,
            node_wiped: 500,
            reply_lost: 20,
            job_fails: 20,
            environment_fails: 20,
            volume_vanishes: 1,
            node_stops: 6,
            link_cut: 6,
            disk_full: 10,
            catalog_dies: 20,
            scheduler_dies: 40,
            scheduler_cut: 20,
            group_cut: 5,
            until_ms: FAULTS_UNTIL_MS,
            ..Faults::default()
        }
    }

    /// Runs the same with nothing but cut links, both of the scheduler and of groups of nodes, and
    /// the scheduler that is killed.
    ///
    /// # Panics
    /// As `Self::chaos`.
    pub fn run_link_cuts(seed: u64, calm: &BTreeMap<u32, u64>, group_cut: u64) -> ChaosResult {
        let faults = Faults {
            scheduler_dies: 40,
            scheduler_cut: 60,
            group_cut,
            until_ms: FAULTS_UNTIL_MS,
            ..Faults::default()
        };
        Self::run_with_faults(seed, calm, faults)
    }

    fn run_with_faults(seed: u64, calm: &BTreeMap<u32, u64>, faults: Faults) -> ChaosResult {
        let mut world = chaos_cluster(seed, faults);
        let outcome = world.run_to_end(LIMIT_MS);
        let leaks = world.count_leaks();
        let progress = world.scheduler.progress();
        let is_same = world.outputs == *calm && world.mismatches == 0;
        let restarted =
            |(_, event): &&(Time, Event)| matches!(event, Event::SchedulerResumed { .. });
        let cut_off = |(_, event): &&(Time, Event)| matches!(event, Event::CutOff { .. });
        ChaosResult {
            cut_offs: world.records.iter().filter(cut_off).count() as u64,
            is_complete: outcome == Outcome::Complete,
            is_identical: is_same,
            leaks,
            faults: progress.nodes_lost,
            reruns: progress.executions - progress.jobs_total,
            repeated_completions: world.completions.values().map(|n| u64::from(n - 1)).sum(),
            restarts: world.records.iter().filter(restarted).count() as u64,
        }
    }

    /// Volumes and jobs that nodes still have after a minute, except volumes of lost nodes: these
    /// end with their leases.
    fn count_leaks(&mut self) -> u64 {
        let end = self.now.plus_ms(60_000);
        while self
            .due_events
            .keys()
            .next()
            .is_some_and(|(at, _)| *at < end)
        {
            let Some(((at, _), due)) = self.due_events.pop_first() else {
                break;
            };
            self.now = at;
            self.restore_nodes();
            match due {
                ClusterEvent::ServeAction(action) => self.serve_action(action),
                ClusterEvent::ExecutionEnds(server, execution) => {
                    self.end_execution(server, execution)
                }
                ClusterEvent::NodeReturns(server) => self.node(server).died_at = None,
                ClusterEvent::ApplyEvent(_)
                | ClusterEvent::QueryExecution(..)
                | ClusterEvent::NodeDies(_)
                | ClusterEvent::SecondPasses => {}
            }
        }
        // A lost node that never returned frees its data when its lease ends.
        let volumes = |(server, node): (&ServerId, &ClusterNode)| {
            let is_kept = !self.scheduler.is_lost(*server);
            node.volumes.len() * usize::from(is_kept) + node.executions.len()
        };
        let left = self.nodes.iter().map(volumes);
        left.sum::<usize>() as u64
    }

    /// The writes of an execution into its job's writable volumes: they depend on all data that it
    /// found, also on the writes of an earlier attempt.
    pub(super) fn write_outputs(&mut self, ended: &ClusterExecution) {
        let seen = ended.volumes.iter().filter_map(|mounted| {
            let content = self.content(mounted)?;
            Some(digest(content.values().copied()))
        });
        let written = digest(std::iter::once(u64::from(ended.job.0)).chain(seen));
        self.write_into_volumes(ended, written);
    }

    /// The writes of an interrupted execution: some data.
    pub(super) fn write_partial_outputs(&mut self, ended: &ClusterExecution) {
        self.write_into_volumes(ended, PARTIAL_WRITE);
    }

    fn write_into_volumes(&mut self, ended: &ClusterExecution, written: u64) {
        let mounts = self.scheduler.workflow().job(ended.job).mounts.clone();
        for (mount, mounted) in mounts.iter().zip(&ended.volumes) {
            if let (true, Some(server)) = (mount.writable, mounted.server)
                && let Some((_, _, content)) = self.node(server).volumes.get_mut(&mounted.id)
            {
                let content: &mut VolumeWrites = content;
                content.insert(ended.job, written);
            }
        }
    }

    /// A node dies, and may return.
    pub(super) fn kill_node(&mut self, server: ServerId) {
        let now = self.now;
        let is_wiped = self.has_fault(self.faults.node_wiped);
        for ended in std::mem::take(&mut self.node(server).executions).values() {
            self.write_partial_outputs(ended);
        }
        let node = self.node(server);
        node.died_at = Some(now);
        node.has_failed = true;
        node.reports.clear();
        if is_wiped {
            let ended: Vec<_> = node.volumes.keys().copied().collect();
            ended.into_iter().for_each(|id| node.end_volume(id));
            node.started_executions.clear();
        }
        let away_ms = 500 + self.rng.next_below(15_000);
        self.schedule_due(away_ms, ClusterEvent::NodeReturns(server));
    }

    /// A node has restarted and has forgotten its executions.
    pub(super) fn revive_node(&mut self, server: ServerId) {
        self.node(server).died_at = None;
        let running: Vec<_> = self
            .scheduler
            .running_executions()
            .filter(|(_, at)| *at == server)
            .collect();
        for (execution, _) in running {
            self.schedule_due(
                100,
                ClusterEvent::ApplyEvent(Event::JobUnknown { execution }),
            );
        }
    }

    /// How long the node of an action stays absent, in milliseconds, if it returns before its
    /// caller times out.
    pub(super) fn ms_until_reachable(&self, action: &Action) -> Option<u64> {
        let server = match action {
            Action::CreateVolume { server, .. }
            | Action::CopyVolume { server, .. }
            | Action::DeleteVolume { server, .. }
            | Action::StartJob { server, .. }
            | Action::FindVolumes { server, .. }
            | Action::KillJob { server, .. } => *server,
            _ => return None,
        };
        let (_, back) = self.nodes.get(&server)?.unreachable?;
        let left = back.ms_since(self.now);
        (left < CALL_TIMEOUT_MS).then_some(left + 1)
    }

    /// Whether a node already knows an execution and reports it. Else it notes that it begins it.
    pub(super) fn has_started_before(&mut self, server: ServerId, execution: ExecutionId) -> bool {
        let report = self.nodes[&server].reports.get(&execution).cloned();
        let is_known = report.is_some() || self.nodes[&server].executions.contains_key(&execution);
        if is_known {
            self.schedule_due(
                10,
                ClusterEvent::ApplyEvent(Event::JobStarted { execution }),
            );
        }
        if let Some(report) = report {
            self.schedule_due(
                30,
                ClusterEvent::ApplyEvent(Event::JobEnded { execution, report }),
            );
        }
        let is_begun = !self.node(server).started_executions.insert(execution);
        if is_begun && !is_known {
            // Its writes from before are unknown.
            let error = Error::new(ErrorCode::WrongState, "it was begun before a restart");
            self.schedule_due(
                10,
                ClusterEvent::ApplyEvent(Event::JobStartFailed { execution, error }),
            );
        }
        is_known || is_begun
    }

    /// Nodes answer again whose time away is over.
    fn restore_nodes(&mut self) {
        let now = self.now;
        for node in self.nodes.values_mut() {
            if node.unreachable.is_some_and(|(_, back)| now >= back) {
                node.unreachable = None;
                node.is_stopped = false;
            }
        }
    }

    /// The faults of one second that are not deaths of nodes.
    pub(super) fn inject_faults(&mut self) {
        self.restore_nodes();
        for server in self.nodes.keys().copied().collect::<Vec<_>>() {
            if !self.is_alive(server) {
                continue;
            }
            let is_stopped = self.has_fault(self.faults.node_stops);
            if is_stopped || self.has_fault(self.faults.link_cut) {
                let back = self.now.plus_ms(1_000 + self.rng.next_below(25_000));
                let now = self.now;
                let node = self.node(server);
                node.unreachable = Some((now, back));
                node.is_stopped = is_stopped;
                node.has_failed = true;
            }
            if self.has_fault(self.faults.disk_full) {
                let until = self.now.plus_ms(1_000 + self.rng.next_below(10_000));
                self.node(server).full_until = until;
            }
        }
        self.inject_link_cuts();
        if self.has_fault(self.faults.catalog_dies) {
            self.catalog_returns_at = self.now.plus_ms(1_000 + self.rng.next_below(10_000));
        }
        if self.has_fault(self.faults.scheduler_dies) {
            self.restart_scheduler();
        }
    }

    /// Kills the scheduler: it restarts from its journal.
    fn restart_scheduler(&mut self) {
        let mut scheduler = self.new_scheduler();
        scheduler.start_recording();
        for step in &self.steps {
            scheduler.redo(&step.changes);
        }
        self.scheduler.check_restored(&scheduler);
        scheduler.finish_redo();
        let due = std::mem::take(&mut self.due_events);
        for ((at, sequence), due) in due {
            let is_on_the_wire = at.ms_since(self.now) <= WIRE_MS_MAX;
            let at = match &due {
                ClusterEvent::ApplyEvent(_) => continue,
                // Calls that were sent arrive before another scheduler has started.
                ClusterEvent::ServeAction(_) => match is_on_the_wire && self.rng.next_bool(500) {
                    true => self.now,
                    false => continue,
                },
                _ => at,
            };
            self.due_events.insert((at, sequence), due);
        }
        self.take_up(scheduler);
    }

    /// A scheduler takes up the run.
    fn take_up(&mut self, scheduler: Scheduler) {
        self.scheduler = scheduler;
        self.listing_tracker = ListingTracker::default();
        self.connectivity = Connectivity::for_resumed_run(&self.scheduler, self.now);
        let outstanding = self.scheduler.outstanding_actions();
        let running: Vec<_> = self.scheduler.running_executions().collect();
        for action in outstanding {
            self.schedule_due(1, ClusterEvent::ServeAction(action));
        }
        for (execution, server) in running {
            self.query_execution(server, execution);
        }
        let series = u32::try_from(1 + self.rng.next_below(u64::from(u32::MAX) - 1)).unwrap_or(1);
        self.apply_event(Event::SchedulerResumed { id_prefix: series });
    }

    /// A cluster in which a scheduler takes up a run from its journal. All nodes of that time are
    /// gone; others are there.
    ///
    /// # Panics
    /// The journal cannot be read.
    pub fn resume_on_new_nodes(tail: JournalTail, nodes: Vec<NodeSpec>) -> Self {
        let mut scheduler = tail.header.new_scheduler(&NullSelector);
        scheduler.start_recording();
        let restored = tail.restore(&mut scheduler);
        restored.expect("what was read before is read again");
        let header = tail.header;
        let seed = header.run.0;
        let (workflow, settings) = (header.workflow, header.settings);
        let mut world = Self::new(seed, workflow, settings, nodes, Faults::default());
        let new = std::mem::take(&mut world.nodes).into_iter();
        world.nodes = new
            .map(|(server, node)| (ServerId(server.0 + NEW_NODES_FROM), node))
            .collect();
        for (server, seen) in scheduler.nodes() {
            let gone = ClusterNode {
                spec: NodeSpec {
                    capacity: seen.capacity,
                    slots: seen.slots,
                },
                died_at: Some(Time(0)),
                has_failed: true,
                unreachable: None,
                is_stopped: false,
                full_until: Time(0),
                volumes: BTreeMap::new(),
                tombstones: BTreeSet::new(),
                executions: BTreeMap::new(),
                started_executions: BTreeSet::new(),
                reports: BTreeMap::new(),
            };
            world.nodes.insert(server, gone);
        }
        world.now = scheduler.now();
        world.due_events.clear();
        world.schedule_due(0, ClusterEvent::SecondPasses);
        world.take_up(scheduler);
        world
    }

    /// A new scheduler asks a node for an execution that it should run, until it is answered or the
    /// node is lost.
    pub(super) fn query_execution(&mut self, server: ServerId, execution: ExecutionId) {
        let place = self.scheduler.execution(execution);
        if place.is_none_or(|(_, at)| at != server) {
            return;
        }
        if !self.is_alive(server) {
            let away = self.nodes[&server].unreachable;
            let pause_ms = away.map_or(1_000, |(_, back)| back.ms_since(self.now) + 10);
            self.schedule_due(pause_ms, ClusterEvent::QueryExecution(server, execution));
            return;
        }
        let node = &self.nodes[&server];
        let event = match node.reports.get(&execution).cloned() {
            Some(report) => Event::JobEnded { execution, report },
            None if node.executions.contains_key(&execution) => return,
            None => Event::JobUnknown { execution },
        };
        self.schedule_due(10, ClusterEvent::ApplyEvent(event));
    }
}
