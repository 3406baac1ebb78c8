//! A run once more, from its journal: what was told to the core, what it decided, and why. Needs no
//! server and changes nothing; the same journal gives the same lines on every machine.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::{ExecutionId, ExtractionId, ServerId, VolumeId};
use bafs_proto::time::Time;
use bafs_workflow::{JobIndex, VolumeIndex};
use serde::Serialize;

pub use crate::verification::{DecisionDifference, verify_decisions};

use crate::describe::{describe_end, format_seconds};
use crate::io::journal::History;
use crate::{
    Action, CopyDecision, CopyOutcome, Event, NodeInfo, Outcome, RecordedStep, Scheduler,
    StrategySelector, UserCommand,
};

/// One thing that happened or was decided.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HistoryLine {
    /// When, in milliseconds since the run's first fact.
    pub at_ms: u64,
    /// Names of the jobs, volumes and nodes that it is about.
    pub subjects: Vec<String>,
    /// What, in a sentence.
    pub text: String,
}

/// Tells a run from its journal, with the selector of the run. Nothing is decided again. Answers
/// every line, and the core as it is at the end.
pub fn replay_history(
    history: History,
    selector: &dyn StrategySelector,
) -> (Vec<HistoryLine>, Scheduler) {
    let mut teller = HistoryWriter::new(history.header.new_scheduler(selector));
    for step in &history.steps {
        teller.step(step);
    }
    teller.scheduler.finish_redo();
    (teller.lines, teller.scheduler)
}

/// What a job waits for, or why it never ran, or what a node has left, at the end of what was
/// replayed; nothing when there is no more to say of that name.
pub fn describe_status(scheduler: &Scheduler, name: &str) -> Option<String> {
    let is_over = scheduler.outcome().is_some();
    let mut jobs = scheduler.workflow().jobs.iter();
    if let Some(position) = jobs.position(|job| job.name == name) {
        let job = JobIndex(u32::try_from(position).ok()?);
        let why = scheduler.describe_wait(job)?;
        // It may have run before: what it made was lost, or made way for others.
        let state = if is_over {
            "is not done"
        } else {
            "does not run"
        };
        return Some(format!("job '{name}' {state}: {why}"));
    }
    if is_over {
        return None;
    }
    let mut nodes = scheduler.nodes();
    let (server, _) = nodes.find(|(_, node)| node.name == name)?;
    let has = scheduler.describe_node(server)?;
    Some(format!("node {name}: {has}"))
}

/// Follows a core through its journal, and tells what happens.
pub(crate) struct HistoryWriter {
    scheduler: Scheduler,
    began: Option<Time>,
    at_ms: u64,
    lines: Vec<HistoryLine>,
    listed: BTreeSet<ServerId>,
    executions: BTreeMap<ExecutionId, (JobIndex, ServerId)>,
    volumes: BTreeMap<VolumeId, (VolumeIndex, ServerId)>,
    extracts: BTreeMap<ExtractionId, u32>,
    /// Decisions about copies that were told.
    written_decisions: BTreeMap<VolumeIndex, Vec<CopyDecision>>,
    /// Volumes about which something may have been decided since they were looked at.
    touched_volumes: BTreeSet<VolumeIndex>,
    /// Warnings that were told.
    warnings_written: usize,
    /// Choices of a strategy that were told.
    strategy_changes_written: usize,
}

impl HistoryWriter {
    pub(crate) fn new(scheduler: Scheduler) -> Self {
        Self {
            scheduler,
            began: None,
            at_ms: 0,
            lines: Vec::new(),
            listed: BTreeSet::new(),
            executions: BTreeMap::new(),
            volumes: BTreeMap::new(),
            extracts: BTreeMap::new(),
            written_decisions: BTreeMap::new(),
            touched_volumes: BTreeSet::new(),
            warnings_written: 0,
            strategy_changes_written: 0,
        }
    }

    /// Takes the next step.
    pub(crate) fn step(&mut self, step: &RecordedStep) {
        let began = *self.began.get_or_insert(step.at);
        self.at_ms = step.at.ms_since(began);
        self.write_event(&step.event);
        self.scheduler.redo(&step.changes);
        for action in &step.actions {
            self.write_action(action);
        }
        self.write_copy_decisions();
        self.write_warnings();
        self.write_strategy_changes();
    }

    /// What was told since the last time.
    pub(crate) fn take_lines(&mut self) -> Vec<HistoryLine> {
        std::mem::take(&mut self.lines)
    }

    fn add_line(&mut self, about: &[&str], text: String) {
        let about = about.iter().map(|&name| name.to_owned()).collect();
        let at_ms = self.at_ms;
        self.lines.push(HistoryLine {
            at_ms,
            subjects: about,
            text,
        });
    }

    fn job_name(&self, job: JobIndex) -> String {
        self.scheduler.workflow().job(job).name.clone()
    }

    fn volume_name(&self, volume: VolumeIndex) -> String {
        self.scheduler.workflow().volume(volume).name.clone()
    }

    fn node_name(&self, server: ServerId) -> String {
        let node = self.scheduler.node(server);
        node.map_or_else(|| server.to_string(), |node| node.name.clone())
    }

    fn write_event(&mut self, event: &Event) {
        match event {
            Event::NodesListed { nodes, unlisted } => self.write_nodes(nodes, unlisted),
            Event::HomeListed { name, address, .. } => {
                self.add_line(&[name], format!("home {name} is at {address}"));
            }
            Event::ServerSilent { server } => {
                let node = self.node_name(*server);
                self.add_line(&[&node], format!("node {node} does not answer: it is lost"));
            }
            Event::CutOff { has_catalog, .. } => self.write_cut_off(*has_catalog),
            Event::Reconnected => {
                self.add_line(&[], "nodes answer again: the run continues".to_owned())
            }
            Event::VolumeCreateFailed { volume, error } => {
                self.write_volume(*volume, &format!("cannot be created: {error}"));
            }
            Event::VolumeCopied { volume, .. } => {
                let copied = self.volumes.get(volume).map(|(volume, _)| *volume);
                self.touched_volumes.extend(copied);
            }
            Event::VolumesFound { found, .. } => {
                let text = "is back with its node; the run uses it unless a replacement has \
                            started";
                found.iter().for_each(|id| self.write_volume(*id, text));
            }
            Event::VolumesProbed { lost, .. } => {
                lost.iter().for_each(|id| self.write_volume(*id, "is lost"));
            }
            Event::CacheInspected {
                volume,
                primary_bytes,
                refetched_bytes,
            } => {
                let text = format!(
                    "holds {primary_bytes} bytes as primary, and fetched {refetched_bytes} \
                     bytes again"
                );
                self.write_volume(*volume, &text);
            }
            Event::JobStartFailed { execution, error } => {
                self.write_job(*execution, &format!("cannot start: {error}"));
            }
            Event::JobUnknown { execution } => {
                self.write_job(*execution, "is no longer known there");
            }
            Event::JobEnded { execution, report } => {
                self.write_job(*execution, &describe_end(report));
            }
            Event::FileExtracted { extract, bytes } => {
                self.write_extract(*extract, &format!("is at home: {bytes} bytes"));
            }
            Event::ExtractFailed { extract, error } => {
                self.write_extract(*extract, &format!("failed to reach home: {error}"));
            }
            Event::EarlierWorkFound(work) => self.write_earlier_work(work.up_to_date.len()),
            Event::CommandReceived { command, .. } => self.write_command(*command),
            Event::CancelRequested => self.add_line(&[], "the user cancels the run".to_owned()),
            Event::SchedulerResumed { .. } => {
                self.add_line(&[], "a scheduler resumes the run".to_owned())
            }
            Event::VolumeCreated { .. }
            | Event::SourceWarningsReceived { .. }
            | Event::QuotasChanged { .. }
            | Event::VolumeDeleted { .. }
            | Event::VolumeDeleteFailed { .. }
            | Event::JobStarted { .. }
            | Event::ResultIdentified { .. }
            | Event::Tick => {}
        }
    }

    fn write_earlier_work(&mut self, done: usize) {
        let all = self.scheduler.workflow().jobs.len();
        let text = format!("the run begins; {done} of {all} jobs are up to date");
        self.add_line(&[], text);
    }

    fn write_cut_off(&mut self, has_catalog: bool) {
        let who = match has_catalog {
            true => "no node",
            false => "neither the catalog nor any node",
        };
        let text = format!("{who} answers: the scheduler is cut off and waits");
        self.add_line(&[], text);
    }

    fn write_strategy_changes(&mut self) {
        let followed = self.scheduler.strategy_changes()[self.strategy_changes_written..].to_vec();
        self.strategy_changes_written += followed.len();
        for last in followed {
            let what = match last.strategy {
                Some(strategy) => format!("the run follows strategy {strategy}"),
                None => "the run follows no strategy".to_owned(),
            };
            self.add_line(&[], format!("{what}: {}", last.reason));
        }
    }

    /// How the run ends, and which jobs are why.
    fn write_outcome(&mut self, outcome: &Outcome) {
        let how = match outcome {
            Outcome::Complete => "complete",
            Outcome::Failed { jobs, messages } => {
                for failure in jobs {
                    let text = format!("{failure}; the scheduler does not retry it");
                    self.add_line(&[&failure.name], text);
                }
                for message in messages {
                    self.add_line(&[], message.clone());
                }
                "failed"
            }
            Outcome::Cancelled => "cancelled",
        };
        self.add_line(&[], format!("the run ends: {how}"));
    }

    /// Names of the jobs that run in a pipeline with this one.
    fn pipeline_job_names(&self, job: JobIndex) -> Vec<String> {
        let workflow = self.scheduler.workflow();
        let pipelines = workflow.pipelines();
        let jobs = workflow.jobs.iter().zip(&pipelines);
        let own = pipelines[job.as_usize()];
        let members = jobs.filter(|(_, pipeline)| **pipeline == own);
        members.map(|(job, _)| job.name.clone()).collect()
    }

    fn write_command(&mut self, stop_request: Option<UserCommand>) {
        let jobs = self.scheduler.workflow().jobs.len();
        match stop_request {
            Some(UserCommand::SetPriority { job, priority }) if job.as_usize() < jobs => {
                let name = self.job_name(job);
                let text = format!("the user gives the pipeline of job {name} priority {priority}");
                self.add_line(&[&name], text);
            }
            Some(UserCommand::Cancel { job }) if job.as_usize() < jobs => {
                let name = self.job_name(job);
                let text = format!("the user cancels the pipeline of job {name}");
                let names = self.pipeline_job_names(job);
                let names: Vec<&str> = names.iter().map(String::as_str).collect();
                self.add_line(&names, text);
            }
            Some(UserCommand::Hold { job: None }) => {
                self.add_line(&[], "the user holds the run".to_owned());
            }
            Some(UserCommand::Release { job: None }) => {
                self.add_line(&[], "the user releases the run".to_owned());
            }
            Some(UserCommand::Hold { job: Some(job) }) if job.as_usize() < jobs => {
                self.write_held(job, "holds");
            }
            Some(UserCommand::Release { job: Some(job) }) if job.as_usize() < jobs => {
                self.write_held(job, "releases");
            }
            _ => self.add_line(
                &[],
                "the scheduler ignores an unknown command of the user".to_owned(),
            ),
        }
    }

    fn write_held(&mut self, job: JobIndex, what: &str) {
        let names = self.pipeline_job_names(job);
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let text = format!("the user {what} the pipeline of job {}", self.job_name(job));
        self.add_line(&names, text);
    }

    fn write_nodes(&mut self, nodes: &[NodeInfo], missed: &[ServerId]) {
        for node in nodes {
            if self.listed.insert(node.id) {
                let text = format!(
                    "the catalog lists node {} with {} slots",
                    node.name, node.slots
                );
                self.add_line(&[&node.name], text);
            }
        }
        for server in missed {
            let node = self.node_name(*server);
            self.add_line(&[&node], format!("the catalog no longer lists node {node}"));
            self.listed.remove(server);
        }
    }

    fn write_job(&mut self, execution: ExecutionId, what: &str) {
        let Some(&(job, server)) = self.executions.get(&execution) else {
            return;
        };
        let mounts = &self.scheduler.workflow().job(job).mounts;
        let volumes: Vec<VolumeIndex> = mounts.iter().map(|mount| mount.volume).collect();
        self.touched_volumes.extend(volumes);
        let (job, node) = (self.job_name(job), self.node_name(server));
        self.add_line(&[&job, &node], format!("job {job} on node {node} {what}"));
    }

    fn write_volume(&mut self, id: VolumeId, what: &str) {
        let Some(&(volume, server)) = self.volumes.get(&id) else {
            return;
        };
        self.touched_volumes.insert(volume);
        let (volume, node) = (self.volume_name(volume), self.node_name(server));
        let text = format!("volume {volume} on node {node} {what}");
        self.add_line(&[&volume, &node], text);
    }

    fn write_extract(&mut self, extract: ExtractionId, what: &str) {
        let Some(&index) = self.extracts.get(&extract) else {
            return;
        };
        let spec = &self.scheduler.workflow().extracts[index as usize];
        let (noun, path) = (spec.noun(), spec.path.clone());
        let volume = self.volume_name(spec.volume);
        self.add_line(
            &[&volume],
            format!("{noun} {path} of volume {volume} {what}"),
        );
    }

    fn write_action(&mut self, action: &Action) {
        match action {
            Action::CreateVolume {
                id,
                volume,
                server,
                size,
            } => {
                self.volumes.insert(*id, (*volume, *server));
                self.write_volume(*id, &format!("is created with {} bytes", size.bytes));
            }
            Action::CopyVolume {
                id,
                source,
                server,
                base_copy: base,
                ..
            } => {
                self.volumes.insert(*id, (source.volume, *server));
                let what = match base {
                    Some(_) => "is created as a copy, from an older copy there",
                    None => "is created as a copy",
                };
                self.write_volume(*id, what);
            }
            Action::WarmCache { id, .. } => {
                self.write_volume(*id, "is warmed before its readers start");
            }
            Action::DeleteVolume { id, .. } => self.write_volume(*id, "is deleted"),
            Action::StartJob {
                execution,
                job,
                server,
                ..
            } => {
                self.executions.insert(*execution, (*job, *server));
                self.write_job(*execution, "starts");
            }
            Action::KillJob { execution, .. } => self.write_job(*execution, "is killed"),
            Action::ExtractFile { extract, index, .. } => {
                self.extracts.insert(*extract, *index);
                let what = match self.scheduler.is_failed_log(*extract) {
                    true => "is sent home as the log of a failed job",
                    false => "is sent home",
                };
                self.write_extract(*extract, what);
            }
            Action::InspectCache { .. }
            | Action::ProbeVolumes { .. }
            | Action::FindVolumes { .. } => {}
            Action::Finish { outcome } => self.write_outcome(outcome),
        }
    }

    /// Tells what was decided about copies of the volumes that were touched.
    fn write_copy_decisions(&mut self) {
        for volume in std::mem::take(&mut self.touched_volumes) {
            let receipts = self.scheduler.copy_decisions_of(volume).to_vec();
            let told = self.written_decisions.insert(volume, receipts.clone());
            let told = told.unwrap_or_default();
            let name = self.volume_name(volume);
            for receipt in receipts.iter().filter(|receipt| !told.contains(receipt)) {
                let text = format!(
                    "a copy of volume {name} {}",
                    self.describe_copy_reason(receipt)
                );
                self.add_line(&[&name], text);
            }
        }
    }

    /// Tells what jobs did against the declarations.
    fn write_warnings(&mut self) {
        let new = self
            .scheduler
            .warnings()
            .get(self.warnings_written..)
            .unwrap_or_default()
            .to_vec();
        self.warnings_written += new.len();
        for warning in new {
            let job = warning.job.map(|job| self.job_name(job));
            let volume = warning.volume.map(|volume| self.volume_name(volume));
            let node = warning.node.map(|node| self.node_name(node));
            let about: Vec<&str> = [&job, &volume, &node]
                .into_iter()
                .flatten()
                .map(|n| &**n)
                .collect();
            self.add_line(&about, format!("warning: {}", warning.text));
        }
    }

    fn describe_copy_reason(&self, receipt: &CopyDecision) -> String {
        let further = match receipt.has_base_copy {
            true => " from an older copy there",
            false => "",
        };
        let cost = match receipt.copy_ms {
            Some(ms) => format!(
                "takes {} s, and jobs wait for {} s of it",
                format_seconds(ms),
                format_seconds(receipt.wait_ms)
            ),
            None => "takes an unknown time".to_owned(),
        };
        let waits = match receipt.space_ms {
            0 => String::new(),
            ms => format!(", and its space delays {} s of work", format_seconds(ms)),
        };
        let anyway = match receipt.is_cheap {
            true => ", and a copy this cheap is always made",
            false => "",
        };
        let weighed = format!(
            "{cost}{further}{waits}; without it a loss costs {} s, with a probability of {:.4} % \
             in the {} s of its use: the expected gain is {:.3} s{anyway}",
            format_seconds(receipt.redo_ms),
            receipt.risk_ppm as f64 / 1e4,
            format_seconds(receipt.exposure_ms),
            receipt.benefit_us as f64 / 1e6,
        );
        match receipt.outcome {
            CopyOutcome::NotWorthwhile => format!("is not made: it {weighed}"),
            CopyOutcome::NoRoom => format!("does not fit on another node; it {weighed}"),
            CopyOutcome::Copying(to) => {
                format!("goes to node {}: it {weighed}", self.node_name(to))
            }
            CopyOutcome::Copied(on, moved) => {
                format!(
                    "is complete on node {} after {} s: {} bytes crossed the network for its {} \
                     bytes",
                    self.node_name(on),
                    format_seconds(moved.duration_ms),
                    moved.received_bytes,
                    moved.held_bytes
                )
            }
            CopyOutcome::Failed => "failed".to_owned(),
            CopyOutcome::UsedForRecovery(ms) => format!(
                "replaces the lost volume and saves {} s of work",
                format_seconds(ms)
            ),
            CopyOutcome::Replaced(_) => "is replaced by a newer one".to_owned(),
            CopyOutcome::Unused(moved) => format!(
                "was never needed: it cost {} s and {} bytes over the network",
                format_seconds(moved.duration_ms),
                moved.received_bytes
            ),
        }
    }
}
