//! A run as intervals of time: executions, volumes, files on their way home, nodes; from its
//! journal. Needs no server and changes nothing.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::{ExecutionId, ExtractId, RunId, ServerId, VolumeId};
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_proto::time::Time;
use serde::Serialize;

use crate::io::journal::History;
use crate::logic::{
    Action, Decision, Event, JobState, MountedVolume, NodeSeen, Outcome, Progress, Receipt,
    Scheduler,
};
use crate::workflow::{JobIndex, VolumeIndex, VolumeKind, Workflow};

/// A run as intervals. All times are milliseconds since its first fact.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Timeline {
    /// The run.
    pub run: RunId,
    /// Name of the workflow.
    pub workflow: String,
    /// When the first fact was noted.
    pub began: Time,
    /// From the first fact to the last.
    pub wall_ms: u64,
    /// How it ended; `None` while it is under way.
    pub outcome: Option<Outcome>,
    /// Numbers at the end.
    pub progress: Progress,
    /// Every job, in the order of declaration.
    pub jobs: Vec<JobStanding>,
    /// Every execution, in the order of their start.
    pub executions: Vec<Execution>,
    /// Every volume that a server was asked for, in the order of asking.
    pub volumes: Vec<Making>,
    /// Every try to send a file home, in the order of asking.
    pub sendings: Vec<Sending>,
    /// Every node that was seen, in the order of their coming.
    pub nodes: Vec<NodeStanding>,
    /// The last decision about a copy of each volume for which there was one.
    pub receipts: Vec<CopyReceipt>,
    /// What the scheduler warned of.
    pub warnings: Vec<String>,
}

/// A job at the end of the journal.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct JobStanding {
    /// Its name.
    pub name: String,
    /// Where it is in its life.
    pub state: JobState,
    /// Jobs before it on its longest way from a first one.
    pub stage: u32,
}

/// What became of an execution.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Fate {
    /// It is under way.
    Running,
    /// It did its job.
    Done,
    /// It did its job, but what it wrote was lost and is made again.
    RolledBack,
    /// It ended without having done its job.
    Failed,
    /// It was given up: its node was lost, or it was killed.
    GivenUp,
}

impl Fate {
    /// Whether its work was for nothing.
    pub fn is_lost(self) -> bool {
        matches!(self, Self::RolledBack | Self::Failed | Self::GivenUp)
    }
}

/// One execution.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Execution {
    /// Of which job.
    pub job: JobIndex,
    /// On which node,
    pub server: ServerId,
    /// by its name: a node whose store was lost returns as another of the same name.
    pub node: String,
    /// When the node was asked to start it.
    pub asked_ms: u64,
    /// When it ended or was given up, as far as that happened.
    pub ended_ms: Option<u64>,
    /// What became of it.
    pub fate: Fate,
    /// How it ended, in a few words; empty while it runs.
    pub ended_how: String,
    /// Wall time that the node reports.
    pub wall_ms: u64,
    /// CPU time that the node reports.
    pub cpu_ms: u64,
    /// The sum of its volumes' [`waited_ms`](bafs_proto::report::VolumeUse::waited_ms).
    pub waited_ms: u64,
    /// Bytes that it read through its agent.
    pub read_bytes: u64,
    /// Bytes that it wrote through its agent.
    pub written_bytes: u64,
    /// Of caches and home mounts, bytes of the distinct pages that it read.
    pub distinct_bytes: u64,
    /// Slots that it occupied.
    pub slots: u32,
    /// Positions in [`Timeline::volumes`] of what it mounts.
    pub mounts: Vec<usize>,
}

/// What a volume is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Holding {
    /// A scratch volume.
    Scratch,
    /// A part of a cache.
    Cache,
    /// A copy of a scratch volume.
    Copy,
}

/// A volume on a server, from the asking to its end.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Making {
    /// Its name in the workflow.
    pub name: String,
    /// Which volume of the workflow.
    pub volume: VolumeIndex,
    /// What it is.
    pub holding: Holding,
    /// On which node,
    pub server: ServerId,
    /// by its name: a node whose store was lost returns as another of the same name.
    pub node: String,
    /// Bytes reserved for it.
    pub bytes: u64,
    /// Whether it is filled from home.
    pub is_filled: bool,
    /// When its server was asked for it.
    pub asked_ms: u64,
    /// When it was there, or known not to come.
    pub made_ms: Option<u64>,
    /// When it was gone.
    pub gone_ms: Option<u64>,
    /// Whether it was lost or never came to exist.
    pub is_lost: bool,
}

/// A try to send a file home.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Sending {
    /// Position in the workflow's list of extracts.
    pub index: u32,
    /// Where it goes.
    pub target: String,
    /// When its server was asked.
    pub asked_ms: u64,
    /// When it was at home, or the try failed.
    pub ended_ms: Option<u64>,
    /// Its size; `None` unless it is at home.
    pub bytes: Option<u64>,
}

/// A node and when it was there.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NodeStanding {
    /// Which.
    pub server: ServerId,
    /// Its name.
    pub name: String,
    /// Jobs that it runs at once.
    pub slots: u32,
    /// Its space for volumes.
    pub capacity_bytes: u64,
    /// From when to when it was in use; the last one may go on.
    pub present: Vec<(u64, Option<u64>)>,
}

/// A decision about a copy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CopyReceipt {
    /// Of which volume.
    pub volume: String,
    /// When.
    pub at_ms: u64,
    /// Work that a loss would have cost.
    pub redo_ms: u64,
    /// Probability of a loss while the volume is needed, in millionths.
    pub risk_ppm: u64,
    /// What a copy was expected to save, in microseconds.
    pub benefit_us: u64,
    /// What copying was expected to take; `None` before anything was copied.
    pub copy_ms: Option<u64>,
    /// What of that jobs would have waited.
    pub wait_ms: u64,
    /// Work that the copy's space would have kept waiting.
    pub space_ms: u64,
    /// What was decided, and what became of it.
    pub decision: String,
}

/// Reads a run's intervals from its journal.
pub fn timeline(history: History) -> Timeline {
    let header = history.header;
    let scheduler = Scheduler::new(header.run, header.workflow, header.settings);
    let mut observer = Observer::new(scheduler);
    observer.began = history.records.first().map_or(Time(0), |(now, _)| *now);
    for (now, event) in history.records {
        // Clocks of machines step back now and then; a run's time does not.
        observer.at_ms = observer.at_ms.max(now.ms_since(observer.began));
        observer.told(&event);
        let mut actions = Vec::new();
        observer.scheduler.step(now, event, &mut actions);
        observer.look();
        for action in &actions {
            observer.asked(action);
        }
    }
    observer.finish()
}

struct Observer {
    scheduler: Scheduler,
    began: Time,
    at_ms: u64,
    executions: Vec<Execution>,
    volumes: Vec<Making>,
    sendings: Vec<Sending>,
    nodes: Vec<NodeStanding>,
    node_at: BTreeMap<ServerId, usize>,
    /// Executions that are under way, by position.
    open: BTreeMap<ExecutionId, usize>,
    /// The last execution that did each job.
    done: BTreeMap<JobIndex, usize>,
    volume_at: BTreeMap<VolumeId, usize>,
    sending_at: BTreeMap<ExtractId, usize>,
    /// Nodes that may have been lost or come back since they were looked at.
    is_fleet_stale: bool,
}

impl Observer {
    fn new(scheduler: Scheduler) -> Self {
        Self {
            scheduler,
            began: Time(0),
            at_ms: 0,
            executions: Vec::new(),
            volumes: Vec::new(),
            sendings: Vec::new(),
            nodes: Vec::new(),
            node_at: BTreeMap::new(),
            open: BTreeMap::new(),
            done: BTreeMap::new(),
            volume_at: BTreeMap::new(),
            sending_at: BTreeMap::new(),
            is_fleet_stale: false,
        }
    }

    /// Notes a fact that the core is about to be told.
    fn told(&mut self, event: &Event) {
        match event {
            Event::ServersSeen { nodes, .. } => {
                nodes.iter().for_each(|node| self.seen(node));
                self.is_fleet_stale = true;
            }
            Event::VolumeCreated { volume } | Event::VolumeCopied { volume, .. } => {
                self.made(*volume, false);
            }
            Event::VolumeCreateFailed { volume, .. } => {
                self.made(*volume, true);
                // Its server may be lost with it.
                self.is_fleet_stale = true;
            }
            Event::VolumeDeleted { volume } => self.gone(*volume, false),
            Event::VolumesProbed { lost, .. } => {
                lost.iter().for_each(|volume| self.gone(*volume, true));
            }
            Event::JobEnded { execution, report } => self.ended(*execution, report),
            Event::JobStartFailed { execution, error } => {
                self.close(*execution, Fate::Failed, format!("not started: {error}"));
            }
            Event::JobUnknown { execution } => {
                self.close(*execution, Fate::GivenUp, "its node restarted".to_owned());
            }
            Event::FileExtracted { extract, bytes } => self.sent(*extract, Some(*bytes)),
            Event::ExtractFailed { extract, .. } => self.sent(*extract, None),
            // The rest shows in what the core wants done.
            _ => self.is_fleet_stale |= matches!(event, Event::ServerSilent { .. } | Event::Tick),
        }
    }

    fn seen(&mut self, node: &NodeSeen) {
        let at = *self.node_at.entry(node.id).or_insert_with(|| {
            self.nodes.push(NodeStanding {
                server: node.id,
                name: node.name.clone(),
                slots: node.slots,
                capacity_bytes: node.capacity.bytes,
                present: Vec::new(),
            });
            self.nodes.len() - 1
        });
        let standing = &mut self.nodes[at];
        (standing.slots, standing.capacity_bytes) = (node.slots, node.capacity.bytes);
    }

    fn made(&mut self, id: VolumeId, is_lost: bool) {
        if let Some(&at) = self.volume_at.get(&id) {
            let making = &mut self.volumes[at];
            making.made_ms.get_or_insert(self.at_ms);
            if is_lost {
                making.is_lost = true;
                making.gone_ms.get_or_insert(self.at_ms);
            }
        }
    }

    fn gone(&mut self, id: VolumeId, is_lost: bool) {
        if let Some(&at) = self.volume_at.get(&id) {
            let making = &mut self.volumes[at];
            making.is_lost |= is_lost;
            making.gone_ms.get_or_insert(self.at_ms);
        }
    }

    fn ended(&mut self, id: ExecutionId, report: &JobReport) {
        let Some(&at) = self.open.get(&id) else {
            return;
        };
        let execution = &mut self.executions[at];
        let sum = |of: fn(&bafs_proto::report::VolumeUse) -> u64| {
            report.volumes.iter().map(of).fold(0, u64::saturating_add)
        };
        execution.wall_ms = report.wall_ms;
        execution.cpu_ms = report.cpu_ms;
        execution.waited_ms = sum(|used| used.waited_ms);
        execution.read_bytes = sum(|used| used.read_bytes);
        execution.written_bytes = sum(|used| used.written_bytes);
        execution.distinct_bytes = sum(|used| {
            let runs = used.pages.iter().flat_map(|file| &file.runs);
            runs.map(|(_, pages)| pages.saturating_mul(PAGE_BYTES))
                .fold(0, u64::saturating_add)
        });
        let fate = match report.outcome {
            JobOutcome::Killed => Fate::GivenUp,
            _ => Fate::Failed,
        };
        self.close(id, fate, how(&report.outcome));
    }

    /// An execution is over; whether it did its job is the core's to say.
    fn close(&mut self, id: ExecutionId, fate: Fate, how: String) {
        if let Some(&at) = self.open.get(&id) {
            let execution = &mut self.executions[at];
            execution.ended_ms = Some(self.at_ms);
            execution.fate = fate;
            execution.ended_how = how;
        }
    }

    fn sent(&mut self, extract: ExtractId, bytes: Option<u64>) {
        if let Some(&at) = self.sending_at.get(&extract) {
            self.sendings[at].ended_ms = Some(self.at_ms);
            self.sendings[at].bytes = bytes;
        }
    }

    /// Looks at what the core believes after a fact.
    fn look(&mut self) {
        let over: Vec<_> = self
            .open
            .iter()
            .filter(|(id, _)| self.scheduler.execution(**id).is_none())
            .map(|(id, at)| (*id, *at))
            .collect();
        for (id, at) in over {
            self.open.remove(&id);
            let execution = &mut self.executions[at];
            let is_done = self.scheduler.job_state(execution.job) == JobState::Done;
            if execution.ended_ms.is_none() {
                execution.ended_ms = Some(self.at_ms);
                execution.fate = Fate::GivenUp;
                execution.ended_how = "its node was lost".to_owned();
            } else if is_done && execution.fate == Fate::Failed {
                execution.fate = Fate::Done;
                self.done.insert(execution.job, at);
            }
        }
        if std::mem::take(&mut self.is_fleet_stale) {
            self.look_at_fleet();
        }
    }

    fn look_at_fleet(&mut self) {
        for (&server, &at) in &self.node_at {
            let is_lost = self.scheduler.is_lost(server);
            let present = &mut self.nodes[at].present;
            let is_present = present.last().is_some_and(|(_, until)| until.is_none());
            if is_lost && is_present {
                if let Some((_, until)) = present.last_mut() {
                    *until = Some(self.at_ms);
                }
                // What was on it is of no use any more, and no server will say so.
                let there = self.volumes.iter_mut();
                for making in there.filter(|m| m.server == server && m.gone_ms.is_none()) {
                    making.is_lost = true;
                    making.gone_ms = Some(self.at_ms);
                }
            } else if !is_lost && !is_present {
                present.push((self.at_ms, None));
            }
        }
    }

    /// Notes what the core wants done.
    fn asked(&mut self, action: &Action) {
        match action {
            Action::CreateVolume {
                id,
                volume,
                server,
                size,
            } => self.making(*id, *volume, *server, size.bytes, None),
            Action::CopyVolume {
                id,
                source,
                server,
                size,
                ..
            } => self.making(*id, source.volume, *server, size.bytes, Some(Holding::Copy)),
            Action::StartJob {
                execution,
                job,
                server,
                volumes,
                ..
            } => self.start(*execution, *job, *server, volumes),
            Action::ExtractFile { extract, index, .. } => self.send(*extract, *index),
            _ => {}
        }
    }

    fn making(
        &mut self,
        id: VolumeId,
        volume: VolumeIndex,
        server: ServerId,
        bytes: u64,
        as_copy: Option<Holding>,
    ) {
        if self.volume_at.contains_key(&id) {
            return;
        }
        let declared = self.scheduler.workflow().volume(volume);
        let (holding, is_filled) = match &declared.kind {
            VolumeKind::Scratch { fill } => (Holding::Scratch, fill.is_some()),
            VolumeKind::Cache { .. } => (Holding::Cache, false),
        };
        self.volume_at.insert(id, self.volumes.len());
        self.volumes.push(Making {
            name: declared.name.clone(),
            volume,
            holding: as_copy.unwrap_or(holding),
            server,
            node: self.node(server),
            bytes,
            is_filled: is_filled && as_copy.is_none(),
            asked_ms: self.at_ms,
            made_ms: None,
            gone_ms: None,
            is_lost: false,
        });
    }

    fn start(
        &mut self,
        id: ExecutionId,
        job: JobIndex,
        server: ServerId,
        volumes: &[MountedVolume],
    ) {
        // The same start may be asked for again after a restart of the scheduler.
        if self.open.contains_key(&id) {
            return;
        }
        if let Some(earlier) = self.done.remove(&job) {
            self.executions[earlier].fate = Fate::RolledBack;
        }
        let at = |mounted: &MountedVolume| self.volume_at.get(&mounted.id).copied();
        let mounts: BTreeSet<usize> = volumes.iter().filter_map(at).collect();
        self.open.insert(id, self.executions.len());
        self.executions.push(Execution {
            job,
            server,
            node: self.node(server),
            asked_ms: self.at_ms,
            ended_ms: None,
            fate: Fate::Running,
            ended_how: String::new(),
            wall_ms: 0,
            cpu_ms: 0,
            waited_ms: 0,
            read_bytes: 0,
            written_bytes: 0,
            distinct_bytes: 0,
            slots: self.scheduler.workflow().job(job).cpus.max(1),
            mounts: mounts.into_iter().collect(),
        });
    }

    fn send(&mut self, extract: ExtractId, index: u32) {
        // The same try may be asked for again after a restart of the scheduler.
        let known = self.sending_at.get(&extract);
        if known.is_some_and(|at| self.sendings[*at].ended_ms.is_none()) {
            return;
        }
        let target = &self.scheduler.workflow().extracts[index as usize].target;
        self.sending_at.insert(extract, self.sendings.len());
        self.sendings.push(Sending {
            index,
            target: target.to_string(),
            asked_ms: self.at_ms,
            ended_ms: None,
            bytes: None,
        });
    }

    fn node(&self, server: ServerId) -> String {
        let node = self.scheduler.node(server);
        node.map_or_else(|| server.to_string(), |node| node.name.clone())
    }

    fn finish(mut self) -> Timeline {
        // Jobs that were rolled back and have not started again.
        for (&job, &at) in &self.done {
            if self.scheduler.job_state(job) != JobState::Done {
                self.executions[at].fate = Fate::RolledBack;
            }
        }
        let workflow = self.scheduler.workflow();
        let stages = stages(workflow);
        let standing = |(at, job): (usize, &crate::workflow::Job)| JobStanding {
            name: job.name.clone(),
            state: self.scheduler.job_state(JobIndex(at as u32)),
            stage: stages[at],
        };
        let receipts = self.scheduler.receipts();
        Timeline {
            run: self.scheduler.run(),
            workflow: workflow.name.clone(),
            began: self.began,
            wall_ms: self.at_ms,
            outcome: self.scheduler.outcome().cloned(),
            progress: self.scheduler.progress(),
            jobs: workflow.jobs.iter().enumerate().map(standing).collect(),
            receipts: receipts
                .map(|(volume, receipt)| self.receipt(volume, receipt))
                .collect(),
            warnings: self
                .scheduler
                .warnings()
                .iter()
                .map(|warning| warning.text.clone())
                .collect(),
            executions: self.executions,
            volumes: self.volumes,
            sendings: self.sendings,
            nodes: self.nodes,
        }
    }

    fn receipt(&self, volume: VolumeIndex, receipt: &Receipt) -> CopyReceipt {
        let decision = match receipt.decision {
            Decision::NotWorth => "not worth it".to_owned(),
            Decision::NoRoom => "no room on another node".to_owned(),
            Decision::Copying(to) => format!("being copied to {}", self.node(to)),
            Decision::Copied(on, moved) => format!(
                "copied to {} in {} ms: {} bytes crossed the network for the {} that it holds",
                self.node(on),
                moved.ms,
                moved.received_bytes,
                moved.held_bytes
            ),
            Decision::Failed => "failed or overtaken".to_owned(),
            Decision::Saved(ms) => format!("saved {ms} ms of work"),
            Decision::Replaced(moved) => format!("replaced, after {} ms of copying", moved.ms),
            Decision::Unused(moved) => format!("never needed, {} ms in vain", moved.ms),
        };
        CopyReceipt {
            volume: self.scheduler.workflow().volume(volume).name.clone(),
            at_ms: receipt.at.ms_since(self.began),
            redo_ms: receipt.redo_ms,
            risk_ppm: receipt.risk_ppm,
            benefit_us: receipt.benefit_us,
            copy_ms: receipt.copy_ms,
            wait_ms: receipt.wait_ms,
            space_ms: receipt.space_ms,
            decision,
        }
    }
}

/// Size of the pages in which agents report what was read, in bytes.
const PAGE_BYTES: u64 = 4_096;

/// For each job, the jobs before it on its longest way from a first one.
pub fn stages(workflow: &Workflow) -> Vec<u32> {
    let mut stages = vec![0; workflow.jobs.len()];
    for job in workflow.topological_order() {
        let parents = workflow.job(job).parents.iter();
        let above = parents.map(|parent| stages[parent.as_usize()] + 1).max();
        stages[job.as_usize()] = above.unwrap_or(0);
    }
    stages
}

fn how(outcome: &JobOutcome) -> String {
    match outcome {
        JobOutcome::Exited(0) => "done".to_owned(),
        JobOutcome::Exited(code) => format!("exit code {code}"),
        JobOutcome::Signaled(signal) => format!("signal {signal}"),
        JobOutcome::NotStarted(why) => format!("not started: {why}"),
        JobOutcome::Environment(error) => format!("environment: {error}"),
        JobOutcome::Killed => "killed".to_owned(),
    }
}
