//! What a core is told and what it asks for, turned into intervals.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::{ExecutionId, ExtractionId, ServerId, VolumeId};
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_proto::time::Time;

use super::{
    CopyReceipt, Execution, Fate, Holding, JobStanding, Making, NodeStanding, Sending, Timeline,
};
use crate::logic::{
    Action, Decision, Event, JobState, MountedVolume, NodeSeen, Receipt, Scheduler,
};
use crate::workflow::{JobIndex, VolumeIndex, VolumeKind};

/// Size of the pages in which agents report what was read, in bytes.
const PAGE_BYTES: u64 = 4_096;

/// Follows a core through its journal, and notes when what began and ended.
pub(super) struct Observer {
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
    sending_at: BTreeMap<ExtractionId, usize>,
    /// Nodes that may have been lost or come back since they were looked at.
    is_fleet_stale: bool,
}

impl Observer {
    /// Of a core that has not been told anything yet, in a run that began at `began`.
    pub(super) fn new(scheduler: Scheduler, began: Time) -> Self {
        Self {
            scheduler,
            began,
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

    /// Tells the core its next fact, and notes what follows.
    pub(super) fn step(&mut self, now: Time, event: Event) {
        // Clocks of machines step back now and then; a run's time does not.
        self.at_ms = self.at_ms.max(now.ms_since(self.began));
        self.told(&event);
        let mut actions = Vec::new();
        self.scheduler.step(now, event, &mut actions);
        self.look();
        for action in &actions {
            self.asked(action);
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
                group: node.group.clone(),
                capacity_bytes: node.capacity.bytes,
                free: node.capacity.minus(node.foreign),
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
        execution.waited_ms = sum(|used| used.wait_ms);
        execution.read_bytes = sum(|used| used.read_bytes);
        execution.written_bytes = sum(|used| used.written_bytes);
        execution.distinct_bytes = sum(|used| {
            let runs = used.pages.iter().flat_map(|file| &file.page_runs);
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

    fn sent(&mut self, extract: ExtractionId, bytes: Option<u64>) {
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

    fn send(&mut self, extract: ExtractionId, index: u32) {
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

    /// The intervals of all that was told.
    pub(super) fn finish(mut self) -> Timeline {
        // Jobs that were rolled back and have not started again.
        for (&job, &at) in &self.done {
            if self.scheduler.job_state(job) != JobState::Done {
                self.executions[at].fate = Fate::RolledBack;
            }
        }
        let workflow = self.scheduler.workflow();
        let stages = workflow.levels();
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

fn how(outcome: &JobOutcome) -> String {
    match outcome {
        JobOutcome::Exited(0) => "done".to_owned(),
        JobOutcome::Exited(code) => format!("exit code {code}"),
        JobOutcome::Signaled(signal) => format!("signal {signal}"),
        JobOutcome::NotStarted(why) => format!("not started: {why}"),
        JobOutcome::EnvironmentFailed(error) => format!("environment: {error}"),
        JobOutcome::Killed => "killed".to_owned(),
    }
}
