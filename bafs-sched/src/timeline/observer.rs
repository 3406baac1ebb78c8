//! Turns the core's facts and actions into intervals.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::{ExecutionId, ExtractionId, ServerId, VolumeId};
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_proto::time::Time;
use bafs_workflow::{JobIndex, VolumeIndex, VolumeKind};

use super::{
    CopyDecisionRecord, ExecutionOutcome, ExecutionRecord, ExtractAttempt, JobStatus, NodeRecord,
    Timeline, VolumeRecord, VolumeRole,
};
use crate::{
    Action, CopyDecision, CopyOutcome, Event, JobState, MountedVolume, NodeInfo, RecordedStep,
    Scheduler,
};

/// Size of the pages in which agents report reads, in bytes.
const PAGE_BYTES: u64 = 4_096;

/// Follows a core through its journal, and notes when what began and ended.
#[derive(Clone)]
pub(crate) struct Observer {
    scheduler: Scheduler,
    /// When the first step was; before it nothing.
    began: Option<Time>,
    at_ms: u64,
    executions: Vec<ExecutionRecord>,
    volumes: Vec<VolumeRecord>,
    sendings: Vec<ExtractAttempt>,
    nodes: Vec<NodeRecord>,
    node_at: BTreeMap<ServerId, usize>,
    /// Running executions, by position.
    open_executions: BTreeMap<ExecutionId, usize>,
    /// The last execution that did each job.
    completed_jobs: BTreeMap<JobIndex, usize>,
    volume_at: BTreeMap<VolumeId, usize>,
    sending_at: BTreeMap<ExtractionId, usize>,
    /// Nodes that may have been lost or come back since they were looked at.
    is_fleet_stale: bool,
}

impl Observer {
    /// Observes a core without any fact yet.
    pub(crate) fn new(scheduler: Scheduler) -> Self {
        Self {
            scheduler,
            began: None,
            at_ms: 0,
            executions: Vec::new(),
            volumes: Vec::new(),
            sendings: Vec::new(),
            nodes: Vec::new(),
            node_at: BTreeMap::new(),
            open_executions: BTreeMap::new(),
            completed_jobs: BTreeMap::new(),
            volume_at: BTreeMap::new(),
            sending_at: BTreeMap::new(),
            is_fleet_stale: false,
        }
    }

    /// The core as it is after the last step, without what is rebuilt.
    pub(crate) fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// Takes the next step, and notes what follows.
    pub(crate) fn step(&mut self, step: RecordedStep) {
        let began = *self.began.get_or_insert(step.at);
        // Clocks of machines step back now and then; a run's time does not.
        self.at_ms = self.at_ms.max(step.at.ms_since(began));
        self.note_event(&step.event);
        self.scheduler.redo(&step.changes);
        self.observe_state();
        for action in &step.actions {
            self.note_action(action);
        }
    }

    /// Notes a fact before the core gets it.
    fn note_event(&mut self, event: &Event) {
        match event {
            Event::NodesListed { nodes, .. } => {
                nodes.iter().for_each(|node| self.note_node(node));
                self.is_fleet_stale = true;
            }
            Event::VolumeCreated { volume } | Event::VolumeCopied { volume, .. } => {
                self.note_created(*volume, false);
            }
            Event::VolumeCreateFailed { volume, .. } => {
                self.note_created(*volume, true);
                // Its server may be lost with it.
                self.is_fleet_stale = true;
            }
            Event::VolumeDeleted { volume } => self.note_deleted(*volume, false),
            Event::VolumesProbed { lost, .. } => {
                lost.iter()
                    .for_each(|volume| self.note_deleted(*volume, true));
            }
            Event::JobEnded { execution, report } => self.note_ended(*execution, report),
            Event::JobStartFailed { execution, error } => {
                self.close_execution(
                    *execution,
                    ExecutionOutcome::Failed,
                    format!("not started: {error}"),
                );
            }
            Event::JobUnknown { execution } => {
                self.close_execution(
                    *execution,
                    ExecutionOutcome::Abandoned,
                    "its node restarted".to_owned(),
                );
            }
            Event::FileExtracted { extract, bytes } => self.note_extracted(*extract, Some(*bytes)),
            Event::ExtractFailed { extract, .. } => self.note_extracted(*extract, None),
            // The core's actions show the rest.
            _ => self.is_fleet_stale |= matches!(event, Event::ServerSilent { .. } | Event::Tick),
        }
    }

    fn note_node(&mut self, node: &NodeInfo) {
        let at = *self.node_at.entry(node.id).or_insert_with(|| {
            self.nodes.push(NodeRecord {
                server: node.id,
                name: node.name.clone(),
                slots: node.slots,
                group: node.group.clone(),
                capacity_bytes: node.capacity.bytes,
                free_space: node.capacity.saturating_sub(node.foreign_space),
                presence: Vec::new(),
            });
            self.nodes.len() - 1
        });
        let standing = &mut self.nodes[at];
        (standing.slots, standing.capacity_bytes) = (node.slots, node.capacity.bytes);
    }

    fn note_created(&mut self, id: VolumeId, is_lost: bool) {
        if let Some(&at) = self.volume_at.get(&id) {
            let making = &mut self.volumes[at];
            making.created_ms.get_or_insert(self.at_ms);
            if is_lost {
                making.is_lost = true;
                making.deleted_ms.get_or_insert(self.at_ms);
            }
        }
    }

    fn note_deleted(&mut self, id: VolumeId, is_lost: bool) {
        if let Some(&at) = self.volume_at.get(&id) {
            let making = &mut self.volumes[at];
            making.is_lost |= is_lost;
            making.deleted_ms.get_or_insert(self.at_ms);
        }
    }

    fn note_ended(&mut self, id: ExecutionId, report: &JobReport) {
        let Some(&at) = self.open_executions.get(&id) else {
            return;
        };
        let execution = &mut self.executions[at];
        let sum = |of: fn(&bafs_proto::job_report::VolumeUse) -> u64| {
            report.volumes.iter().map(of).fold(0, u64::saturating_add)
        };
        execution.reported = Some(report.outcome.clone());
        execution.wall_ms = report.wall_ms;
        execution.cpu_ms = report.cpu_ms;
        execution.memory_bytes_max = report.memory_bytes_max;
        execution.held_bytes = sum(|used| used.used_bytes);
        if report.outcome != JobOutcome::Exited(0) {
            execution.output_tail.clone_from(&report.output_tail);
        }
        execution.waited_ms = sum(|used| used.wait_ms);
        execution.read_bytes = sum(|used| used.read_bytes);
        execution.written_bytes = sum(|used| used.written_bytes);
        execution.distinct_bytes = sum(|used| {
            let runs = used.pages.iter().flat_map(|file| &file.page_runs);
            runs.map(|(_, pages)| pages.saturating_mul(PAGE_BYTES))
                .fold(0, u64::saturating_add)
        });
        let health = match report.outcome {
            JobOutcome::Killed => ExecutionOutcome::Abandoned,
            _ => ExecutionOutcome::Failed,
        };
        self.close_execution(id, health, describe_outcome(&report.outcome));
    }

    /// An execution is over; whether it did its job is the core's to say.
    fn close_execution(&mut self, id: ExecutionId, health: ExecutionOutcome, how: String) {
        if let Some(&at) = self.open_executions.get(&id) {
            let execution = &mut self.executions[at];
            execution.ended_ms = Some(self.at_ms);
            execution.outcome = health;
            execution.end_description = how;
        }
    }

    fn note_extracted(&mut self, extract: ExtractionId, bytes: Option<u64>) {
        if let Some(&at) = self.sending_at.get(&extract) {
            self.sendings[at].ended_ms = Some(self.at_ms);
            self.sendings[at].bytes = bytes;
        }
    }

    /// Notes changes of the core's state after a fact.
    fn observe_state(&mut self) {
        let over: Vec<_> = self
            .open_executions
            .iter()
            .filter(|(id, _)| self.scheduler.execution(**id).is_none())
            .map(|(id, at)| (*id, *at))
            .collect();
        for (id, at) in over {
            self.open_executions.remove(&id);
            let execution = &mut self.executions[at];
            let is_done = self.scheduler.job_state(execution.job) == JobState::Done;
            if execution.ended_ms.is_none() {
                execution.ended_ms = Some(self.at_ms);
                execution.outcome = ExecutionOutcome::Abandoned;
                execution.end_description = "its node was lost".to_owned();
            } else if is_done && execution.outcome == ExecutionOutcome::Failed {
                execution.outcome = ExecutionOutcome::Done;
                self.completed_jobs.insert(execution.job, at);
            }
        }
        if std::mem::take(&mut self.is_fleet_stale) {
            self.observe_fleet();
        }
    }

    fn observe_fleet(&mut self) {
        for (&server, &at) in &self.node_at {
            let is_lost = self.scheduler.is_lost(server);
            let present = &mut self.nodes[at].presence;
            let is_present = present.last().is_some_and(|(_, until)| until.is_none());
            if is_lost && is_present {
                if let Some((_, until)) = present.last_mut() {
                    *until = Some(self.at_ms);
                }
                // Its volumes are useless, and no server reports that.
                let there = self.volumes.iter_mut();
                for making in there.filter(|m| m.server == server && m.deleted_ms.is_none()) {
                    making.is_lost = true;
                    making.deleted_ms = Some(self.at_ms);
                }
            } else if !is_lost && !is_present {
                present.push((self.at_ms, None));
            }
        }
    }

    /// Notes an action of the core.
    fn note_action(&mut self, action: &Action) {
        match action {
            Action::CreateVolume {
                id,
                volume,
                server,
                size,
            } => self.note_creation(*id, *volume, *server, size.bytes, None),
            Action::CopyVolume {
                id,
                source,
                server,
                size,
                ..
            } => self.note_creation(
                *id,
                source.volume,
                *server,
                size.bytes,
                Some(VolumeRole::Copy),
            ),
            Action::StartJob {
                execution,
                job,
                server,
                volumes,
                ..
            } => self.note_start(*execution, *job, *server, volumes),
            Action::ExtractFile { extract, index, .. } => self.note_extract(*extract, *index),
            _ => {}
        }
    }

    fn note_creation(
        &mut self,
        id: VolumeId,
        volume: VolumeIndex,
        server: ServerId,
        bytes: u64,
        as_copy: Option<VolumeRole>,
    ) {
        if self.volume_at.contains_key(&id) {
            return;
        }
        let declared = self.scheduler.workflow().volume(volume);
        let (holding, is_filled) = match &declared.kind {
            VolumeKind::Scratch { fill } => (VolumeRole::Scratch, fill.is_some()),
            VolumeKind::Cache { .. } => (VolumeRole::Cache, false),
        };
        self.volume_at.insert(id, self.volumes.len());
        self.volumes.push(VolumeRecord {
            name: declared.name.clone(),
            volume,
            role: as_copy.unwrap_or(holding),
            server,
            node: self.node_name(server),
            bytes,
            is_filled: is_filled && as_copy.is_none(),
            requested_ms: self.at_ms,
            created_ms: None,
            deleted_ms: None,
            is_lost: false,
        });
    }

    fn note_start(
        &mut self,
        id: ExecutionId,
        job: JobIndex,
        server: ServerId,
        volumes: &[MountedVolume],
    ) {
        // The same start may be asked for again after a restart of the scheduler.
        if self.open_executions.contains_key(&id) {
            return;
        }
        if let Some(earlier) = self.completed_jobs.remove(&job) {
            self.executions[earlier].outcome = ExecutionOutcome::RolledBack;
        }
        let at = |mounted: &MountedVolume| self.volume_at.get(&mounted.id).copied();
        let mounts: BTreeSet<usize> = volumes.iter().filter_map(at).collect();
        self.open_executions.insert(id, self.executions.len());
        self.executions.push(ExecutionRecord {
            job,
            server,
            node: self.node_name(server),
            requested_ms: self.at_ms,
            ended_ms: None,
            outcome: ExecutionOutcome::Running,
            end_description: String::new(),
            output_tail: String::new(),
            reported: None,
            wall_ms: 0,
            cpu_ms: 0,
            memory_bytes_max: 0,
            held_bytes: 0,
            waited_ms: 0,
            read_bytes: 0,
            written_bytes: 0,
            distinct_bytes: 0,
            slots: self.scheduler.workflow().job(job).cpus.max(1),
            mounts: mounts.into_iter().collect(),
        });
    }

    fn note_extract(&mut self, extract: ExtractionId, index: u32) {
        // The same try may be asked for again after a restart of the scheduler.
        let known = self.sending_at.get(&extract);
        if known.is_some_and(|at| self.sendings[*at].ended_ms.is_none()) {
            return;
        }
        let target = &self.scheduler.workflow().extracts[index as usize].target;
        self.sending_at.insert(extract, self.sendings.len());
        self.sendings.push(ExtractAttempt {
            index,
            target: target.to_string(),
            requested_ms: self.at_ms,
            ended_ms: None,
            bytes: None,
        });
    }

    fn node_name(&self, server: ServerId) -> String {
        let node = self.scheduler.node(server);
        node.map_or_else(|| server.to_string(), |node| node.name.clone())
    }

    /// The intervals of all facts.
    pub(crate) fn finish(mut self) -> Timeline {
        // Jobs that were rolled back and have not started again.
        for (&job, &at) in &self.completed_jobs {
            if self.scheduler.job_state(job) != JobState::Done {
                self.executions[at].outcome = ExecutionOutcome::RolledBack;
            }
        }
        let workflow = self.scheduler.workflow();
        let stages = workflow.levels();
        let standing = |(at, job): (usize, &bafs_workflow::Job)| JobStatus {
            name: job.name.clone(),
            state: self.scheduler.job_state(JobIndex(at as u32)),
            level: stages[at],
        };
        let receipts = self.scheduler.copy_decisions();
        Timeline {
            run: self.scheduler.run(),
            workflow: workflow.name.clone(),
            began_at: self.began.unwrap_or(Time(0)),
            wall_ms: self.at_ms,
            outcome: self.scheduler.outcome().cloned(),
            progress: self.scheduler.progress(),
            jobs: workflow.jobs.iter().enumerate().map(standing).collect(),
            copy_decisions: receipts
                .map(|(volume, receipt)| self.copy_decision(volume, receipt))
                .collect(),
            warnings: self
                .scheduler
                .warnings()
                .iter()
                .map(|warning| warning.text.clone())
                .collect(),
            executions: self.executions,
            volumes: self.volumes,
            extract_attempts: self.sendings,
            nodes: self.nodes,
        }
    }

    fn copy_decision(&self, volume: VolumeIndex, receipt: &CopyDecision) -> CopyDecisionRecord {
        let decision = match receipt.outcome {
            CopyOutcome::NotWorthwhile => "not worthwhile".to_owned(),
            CopyOutcome::NoRoom => "no space on another node".to_owned(),
            CopyOutcome::Copying(to) => format!("being copied to {}", self.node_name(to)),
            CopyOutcome::Copied(on, moved) => format!(
                "copied to {} in {} ms: {} bytes crossed the network for a volume of {} bytes",
                self.node_name(on),
                moved.duration_ms,
                moved.received_bytes,
                moved.held_bytes
            ),
            CopyOutcome::Failed => "failed or superseded".to_owned(),
            CopyOutcome::UsedForRecovery(ms) => format!("saved {ms} ms of work"),
            CopyOutcome::Replaced(moved) => {
                format!("replaced after {} ms of copying", moved.duration_ms)
            }
            CopyOutcome::Unused(moved) => {
                format!("unused after {} ms of copying", moved.duration_ms)
            }
        };
        CopyDecisionRecord {
            volume: self.scheduler.workflow().volume(volume).name.clone(),
            at_ms: receipt.decided_at.ms_since(self.began.unwrap_or(Time(0))),
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

fn describe_outcome(outcome: &JobOutcome) -> String {
    match outcome {
        JobOutcome::Exited(0) => "done".to_owned(),
        JobOutcome::Exited(code) => format!("exit code {code}"),
        JobOutcome::Signaled(signal) => format!("signal {signal}"),
        JobOutcome::NotStarted(why) => format!("not started: {why}"),
        JobOutcome::EnvironmentFailed(error) => format!("environment: {error}"),
        JobOutcome::Killed => "killed".to_owned(),
    }
}
