//! Faults beyond dying nodes: stopped nodes, cut links, full disks, a catalog and a scheduler that
//! die. And the run that meets all of them.

use std::collections::BTreeMap;

use bafs_proto::ids::{ExecutionId, ServerId};
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode};

use super::{CALL_MS, Content, Due, Execution, Faults, Node, NodeSpec, World};
use crate::io::contact::Contact;
use crate::io::listing::Listing;
use crate::logic::{Action, Event, Outcome, Scheduler, Settings, Space};
use crate::workflow::{Workflow, parse_workflow};

/// Pipelines and stages of the workflow of a chaos run, and the nodes that it has.
const WIDTH: u32 = 40;
const DEPTH: u32 = 4;
const NODES: usize = 6;

/// What a job writes that does not come to its end.
const HALF: u64 = 1;

/// Faults happen for so long, in milliseconds; without any a run takes a minute.
const UNTIL_MS: u64 = 90_000;
const LIMIT_MS: u64 = 8 * 3_600_000;

/// What came of a chaos run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// Every job is done and every file is at home.
    pub is_complete: bool,
    /// Every file at home is that of a run without faults, also where it came twice.
    pub is_identical: bool,
    /// Volumes and jobs that nodes still have a minute after the end.
    pub leaks: u64,
    /// Faults that happened: nodes lost, and executions beyond one of each job.
    pub lost: u64,
    /// Executions beyond one of each job.
    pub again: u64,
    /// How often jobs came to their end beyond once for each.
    pub completed_again: u64,
    /// How often the scheduler found itself cut off.
    pub cut_off: u64,
    /// How often the scheduler was killed.
    pub restarts: u64,
}

/// A digest of what comes in this order (FNV-1a).
pub(super) fn digest(values: impl Iterator<Item = u64>) -> u64 {
    let bytes = values.flat_map(u64::to_le_bytes);
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// 40 pipelines of four stages: each job reads a batch volume and what the one before wrote, and
/// changes what all of its pipeline have in common.
fn workflow() -> Workflow {
    let mut text = String::from("volume batch cache bafs://home/data 40 MB files 10\n");
    for p in 0..WIDTH {
        text += &format!("volume w{p} scratch 2 MB files 10\n");
        for at in 0..DEPTH {
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
        text += &format!("extract v{p}_{} out bafs://home/out.{p}\n", DEPTH - 1);
    }
    let none = |path: &str| Err(path.to_owned());
    let parsed = parse_workflow("chaos.bafs", &text, &none);
    parsed
        .expect("the workflow of chaos runs is right")
        .workflow
}

fn world(seed: u64, faults: Faults) -> World {
    let node = NodeSpec {
        capacity: Space {
            bytes: 100_000_000,
            files: 10_000,
        },
        slots: 3,
    };
    let usual = Settings::default();
    // Half of the runs judge jobs and nodes as runs of users do: nobody is blamed wrongly.
    let is_usual = seed.is_multiple_of(2);
    let faults_max = |usual: u32| if is_usual { usual } else { 1_000 };
    let settings = Settings {
        environment_faults_max: faults_max(usual.environment_faults_max),
        killed_nodes_max: faults_max(usual.killed_nodes_max),
        nodes_wait_ms: 600_000,
        stuck_wait_ms: 600_000,
        cleanup_ms: 600_000,
        ..usual
    };
    World::new(seed, workflow(), settings, vec![node; NODES], faults)
}

impl World {
    /// What a run without faults brings home, by position: a digest of each file.
    ///
    /// # Panics
    /// When it does not end complete.
    pub fn calm() -> BTreeMap<u32, u64> {
        let mut world = world(0, Faults::default());
        assert_eq!(world.run(LIMIT_MS), Outcome::Complete, "without any fault");
        assert_eq!(world.outputs.len(), WIDTH as usize, "every file is at home");
        world.outputs
    }

    /// Runs 40 pipelines of four stages on six nodes, while nodes, links, disks, the catalog and
    /// the scheduler fail as the seed says. `calm` is what [`Self::calm`] answers.
    ///
    /// # Panics
    /// When an invariant of the core does not hold, or the run does not end.
    pub fn chaos(seed: u64, calm: &BTreeMap<u32, u64>) -> Verdict {
        Self::chaos_of(seed, calm, Self::all_faults())
    }

    /// The faults of [`Self::chaos`].
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
            until_ms: UNTIL_MS,
            ..Faults::default()
        }
    }

    /// Runs the same with nothing but cut links, both of the scheduler and of groups of nodes, and
    /// the scheduler that is killed.
    ///
    /// # Panics
    /// As [`Self::chaos`].
    pub fn cuts(seed: u64, calm: &BTreeMap<u32, u64>, group_cut: u64) -> Verdict {
        let faults = Faults {
            scheduler_dies: 40,
            scheduler_cut: 60,
            group_cut,
            until_ms: UNTIL_MS,
            ..Faults::default()
        };
        Self::chaos_of(seed, calm, faults)
    }

    fn chaos_of(seed: u64, calm: &BTreeMap<u32, u64>, faults: Faults) -> Verdict {
        let mut world = world(seed, faults);
        let outcome = world.run(LIMIT_MS);
        let leaks = world.leaks();
        let progress = world.scheduler.progress();
        let is_same = world.outputs == *calm && world.mismatches == 0;
        let restarted = |(_, event): &&(Time, Event)| matches!(event, Event::Resumed { .. });
        let cut_off = |(_, event): &&(Time, Event)| matches!(event, Event::CutOff { .. });
        Verdict {
            cut_off: world.records.iter().filter(cut_off).count() as u64,
            is_complete: outcome == Outcome::Complete,
            is_identical: is_same,
            leaks,
            lost: progress.nodes_lost,
            again: progress.executions - progress.jobs_total,
            completed_again: world.completed.values().map(|n| u64::from(n - 1)).sum(),
            restarts: world.records.iter().filter(restarted).count() as u64,
        }
    }

    /// Volumes and jobs that nodes still have when a minute has passed, but for volumes of nodes
    /// that were given up: these end with their leases.
    fn leaks(&mut self) -> u64 {
        let end = self.now.plus_ms(60_000);
        while self.due.keys().next().is_some_and(|(at, _)| *at < end) {
            let Some(((at, _), due)) = self.due.pop_first() else {
                break;
            };
            self.now = at;
            self.come_back();
            match due {
                Due::Serve(action) => self.serve(action),
                Due::End(server, execution) => self.end(server, execution),
                Due::Return(server) => self.node(server).died = None,
                Due::Tell(_) | Due::Kill(_) | Due::Second => {}
            }
        }
        // What is on a node that was given up and not seen again, its lease ends.
        let volumes = |(server, node): (&ServerId, &Node)| {
            let is_kept = !self.scheduler.is_lost(*server);
            node.volumes.len() * usize::from(is_kept) + node.executions.len()
        };
        let left = self.nodes.iter().map(volumes);
        left.sum::<usize>() as u64
    }

    /// What an execution leaves in the volumes that its job may write: it depends on all that it
    /// found, also on what an earlier attempt left there.
    pub(super) fn write(&mut self, ended: &Execution) {
        let seen = ended.volumes.iter().filter_map(|mounted| {
            let content = self.content(mounted)?;
            Some(digest(content.values().copied()))
        });
        let written = digest(std::iter::once(u64::from(ended.job.0)).chain(seen));
        self.leave(ended, written);
    }

    /// What an execution leaves that did not come to its end: something.
    pub(super) fn write_half(&mut self, ended: &Execution) {
        self.leave(ended, HALF);
    }

    fn leave(&mut self, ended: &Execution, written: u64) {
        let mounts = self.scheduler.workflow().job(ended.job).mounts.clone();
        for (mount, mounted) in mounts.iter().zip(&ended.volumes) {
            if let (true, Some(server)) = (mount.writable, mounted.server)
                && let Some((_, _, content)) = self.node(server).volumes.get_mut(&mounted.id)
            {
                let content: &mut Content = content;
                content.insert(ended.job, written);
            }
        }
    }

    /// A node dies, and may return.
    pub(super) fn kill(&mut self, server: ServerId) {
        let now = self.now;
        let is_wiped = self.is_faulty(self.faults.node_wiped);
        for ended in std::mem::take(&mut self.node(server).executions).values() {
            self.write_half(ended);
        }
        let node = self.node(server);
        node.died = Some(now);
        node.was_hurt = true;
        node.reports.clear();
        if is_wiped {
            node.volumes.clear();
            node.begun.clear();
        }
        let away_ms = 500 + self.dice.below(15_000);
        self.at(away_ms, Due::Return(server));
    }

    /// A node is back, and knows nothing of what it ran.
    pub(super) fn revive(&mut self, server: ServerId) {
        self.node(server).died = None;
        let running: Vec<_> = self
            .scheduler
            .running()
            .filter(|(_, at)| *at == server)
            .collect();
        for (execution, _) in running {
            self.at(100, Due::Tell(Event::JobUnknown { execution }));
        }
    }

    /// When the node of an action is away but back before a caller gives up: how long until then,
    /// in milliseconds.
    pub(super) fn back_in_time(&self, action: &Action) -> Option<u64> {
        let server = match action {
            Action::CreateVolume { server, .. }
            | Action::CopyVolume { server, .. }
            | Action::DeleteVolume { server, .. }
            | Action::StartJob { server, .. }
            | Action::FindVolumes { server, .. }
            | Action::KillJob { server, .. } => *server,
            _ => return None,
        };
        let (_, back) = self.nodes.get(&server)?.away?;
        let left = back.ms_since(self.now);
        (left < CALL_MS).then_some(left + 1)
    }

    /// Whether a node knows an execution already, and tells so. Else it notes that it begins it.
    pub(super) fn is_started_again(&mut self, server: ServerId, execution: ExecutionId) -> bool {
        let report = self.nodes[&server].reports.get(&execution).cloned();
        let is_known = report.is_some() || self.nodes[&server].executions.contains_key(&execution);
        if is_known {
            self.at(10, Due::Tell(Event::JobStarted { execution }));
        }
        if let Some(report) = report {
            self.at(30, Due::Tell(Event::JobEnded { execution, report }));
        }
        let is_begun = !self.node(server).begun.insert(execution);
        if is_begun && !is_known {
            // What it left when it was begun is unknown.
            let error = Error::new(ErrorCode::WrongState, "it was begun before a restart");
            self.at(10, Due::Tell(Event::JobStartFailed { execution, error }));
        }
        is_known || is_begun
    }

    /// Nodes answer again whose time away is over.
    fn come_back(&mut self) {
        let now = self.now;
        for node in self.nodes.values_mut() {
            if node.away.is_some_and(|(_, back)| now >= back) {
                node.away = None;
                node.is_stopped = false;
            }
        }
    }

    /// The faults of one second that are not deaths of nodes.
    pub(super) fn more_faults(&mut self) {
        self.come_back();
        for server in self.nodes.keys().copied().collect::<Vec<_>>() {
            if !self.is_alive(server) {
                continue;
            }
            let is_stopped = self.is_faulty(self.faults.node_stops);
            if is_stopped || self.is_faulty(self.faults.link_cut) {
                let back = self.now.plus_ms(1_000 + self.dice.below(25_000));
                let now = self.now;
                let node = self.node(server);
                node.away = Some((now, back));
                node.is_stopped = is_stopped;
                node.was_hurt = true;
            }
            if self.is_faulty(self.faults.disk_full) {
                let until = self.now.plus_ms(1_000 + self.dice.below(10_000));
                self.node(server).full_until = until;
            }
        }
        self.cut_links();
        if self.is_faulty(self.faults.catalog_dies) {
            self.catalog_back = self.now.plus_ms(1_000 + self.dice.below(10_000));
        }
        if self.is_faulty(self.faults.scheduler_dies) {
            self.restart_scheduler();
        }
    }

    /// Kills the scheduler: what it knew is what its journal tells.
    fn restart_scheduler(&mut self) {
        let (run, workflow) = (self.scheduler.run(), workflow());
        let settings = self.scheduler.settings().clone();
        let mut scheduler = Scheduler::new(run, workflow, settings);
        for (now, event) in &self.records {
            scheduler.step(*now, event.clone(), &mut Vec::new());
        }
        assert!(scheduler == self.scheduler, "the replay differs");
        let due = std::mem::take(&mut self.due);
        for (at, due) in due {
            let is_kept = match &due {
                Due::Tell(_) => false,
                Due::Serve(_) => self.dice.chance(500),
                _ => true,
            };
            if is_kept {
                self.due.insert(at, due);
            }
        }
        self.scheduler = scheduler;
        self.listing = Listing::default();
        self.contact = Contact::resumed(&self.scheduler, self.now);
        let outstanding = self.scheduler.outstanding();
        let running: Vec<_> = self.scheduler.running().collect();
        for action in outstanding {
            self.at(1, Due::Serve(action));
        }
        for (execution, server) in running {
            self.look_at(server, execution);
        }
        let series = u32::try_from(1 + self.dice.below(u64::from(u32::MAX) - 1)).unwrap_or(1);
        self.tell(Event::Resumed { series });
    }

    /// A new scheduler asks a node for an execution that it should run.
    fn look_at(&mut self, server: ServerId, execution: ExecutionId) {
        if !self.is_alive(server) {
            // Its end is told when it is back, or it is given up.
            if self.nodes[&server].died.is_none() {
                let report = self.nodes[&server].reports.get(&execution).cloned();
                let back = self.nodes[&server]
                    .away
                    .map_or(0, |(_, back)| back.ms_since(self.now));
                if let Some(report) = report {
                    self.at(back + 10, Due::Tell(Event::JobEnded { execution, report }));
                }
            }
            return;
        }
        let node = &self.nodes[&server];
        let event = match node.reports.get(&execution).cloned() {
            Some(report) => Event::JobEnded { execution, report },
            None if node.executions.contains_key(&execution) => return,
            None => Event::JobUnknown { execution },
        };
        self.at(10, Due::Tell(event));
    }
}
