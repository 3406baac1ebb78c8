//! What a run did, job by job, collected from its facts. Decides nothing.

use std::collections::BTreeMap;
use std::path::Path;

use bafs_proto::Result;
use bafs_proto::ids::RunId;
use bafs_proto::job_report::VolumeUse;
use bafs_proto::message::JobOutcome;
use bafs_proto::time::Time;
use bafs_workflow::JobIndex;
use serde::{Deserialize, Serialize};

use crate::io::journal::{History, visit_steps};
pub use crate::state::extractions::UnsentResult;
use crate::{Event, NullSelector, Outcome, Progress, Scheduler, Settings, StrategySelector};

/// What a run did.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunReport {
    /// The run.
    pub run: RunId,
    /// Name of the workflow.
    pub workflow: String,
    /// How it ended.
    pub outcome: Outcome,
    /// From the first fact to the last, in milliseconds; restarts included.
    pub wall_ms: u64,
    /// Numbers at the end.
    pub totals: Progress,
    /// Each job of which an execution ended, in the order of declaration.
    pub jobs: Vec<JobSummary>,
    /// What of the command had no effect, and what jobs did against the declarations of the
    /// workflow, in sentences.
    pub warnings: Vec<String>,
    /// Further ones that were not kept.
    pub warnings_omitted: u64,
    /// Results that could not be sent; the outcome or the warnings tell them too.
    #[serde(skip)]
    pub unsent_results: Vec<UnsentResult>,
}

/// What became of one job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobSummary {
    /// Which.
    pub job: JobIndex,
    /// Its name.
    pub name: String,
    /// Name of the node of the last execution that ended.
    pub node: String,
    /// Executions that ended.
    pub attempts: u32,
    /// How the last one ended.
    pub outcome: JobOutcome,
    /// Wall time of the last one, in milliseconds.
    pub wall_ms: u64,
    /// CPU time of the last one, in milliseconds.
    pub cpu_ms: u64,
    /// Time in which the last one computed and did not wait for its volumes, in milliseconds.
    pub computed_ms: u64,
    /// When the last one ended.
    pub ended: Time,
    /// End of what the last one printed.
    pub output_tail: String,
    /// What the last one did to its volumes.
    pub volumes: Vec<VolumeUse>,
}

/// Collects a [`RunReport`].
#[derive(Debug, Clone, Default)]
pub struct RunReportBuilder {
    jobs: BTreeMap<JobIndex, JobSummary>,
    first_event: Option<Time>,
    last_event: Time,
    warnings: Vec<String>,
}

impl RunReportBuilder {
    /// Warns of what has no effect since `scheduler` has what the journal tells behind it: that a
    /// run is started which is over, and settings that are not those with which it began.
    pub(crate) fn warn_of_ignored_settings(
        &mut self,
        scheduler: &Scheduler,
        journal: &Path,
        wanted: &Settings,
    ) {
        let journal = journal.display();
        if scheduler.outcome().is_some() {
            self.warnings.push(format!(
                "nothing to run: the journal {journal} shows that this run has ended"
            ));
        } else if scheduler.settings() != wanted {
            let text = format!(
                "the run resumes with its first options: other options (--order, \
                 --resource-timeout, …) have no effect with the journal {journal}"
            );
            tracing::warn!("{text}");
            self.warnings.push(text);
        }
    }

    /// Notes a fact that `scheduler` is about to be told.
    pub fn note_event(&mut self, scheduler: &Scheduler, now: Time, event: &Event) {
        self.first_event.get_or_insert(now);
        self.last_event = self.last_event.max(now);
        let Event::JobEnded { execution, report } = event else {
            return;
        };
        let Some((job, server)) = scheduler.execution(*execution) else {
            return;
        };
        let attempts = self.jobs.get(&job).map_or(0, |summary| summary.attempts) + 1;
        let summary = JobSummary {
            job,
            name: scheduler.workflow().job(job).name.clone(),
            node: scheduler
                .node(server)
                .map(|node| node.name.clone())
                .unwrap_or_default(),
            attempts,
            outcome: report.outcome.clone(),
            wall_ms: report.wall_ms,
            cpu_ms: report.cpu_ms,
            computed_ms: report.compute_ms(),
            ended: now,
            output_tail: report.output_tail.clone(),
            volumes: report.volumes.clone(),
        };
        self.jobs.insert(job, summary);
    }

    /// The same from a journal. Answers also the scheduler as it is at its end.
    pub fn from_history(history: &History, selector: &dyn StrategySelector) -> (Self, Scheduler) {
        let mut scheduler = history.header.new_scheduler(selector);
        let mut builder = Self::default();
        for step in &history.steps {
            builder.note_event(&scheduler, step.at, &step.event);
            scheduler.redo(&step.changes);
        }
        scheduler.finish_redo();
        (builder, scheduler)
    }

    /// The same without all of a journal in memory.
    ///
    /// # Errors
    /// That it cannot be read.
    pub(crate) fn from_journal(path: &Path) -> Result<Self> {
        let mut builder = Self::default();
        let mut scheduler = None;
        visit_steps(path, |header, step| {
            let scheduler = scheduler.get_or_insert_with(|| header.new_scheduler(&NullSelector));
            builder.note_event(scheduler, step.at, &step.event);
            scheduler.redo(&step.changes);
        })?;
        Ok(builder)
    }

    /// With the warnings of another, which was there from the start of this scheduler.
    pub(crate) fn with_warnings_of(mut self, other: Self) -> Self {
        self.warnings.extend(other.warnings);
        self
    }

    /// The report of a run that is over.
    pub fn build_report(self, scheduler: &Scheduler, outcome: Outcome) -> RunReport {
        let declared = scheduler.warnings().iter();
        let declared = declared.map(|warning| warning.text.clone());
        RunReport {
            run: scheduler.run(),
            workflow: scheduler.workflow().name.clone(),
            outcome,
            wall_ms: self
                .last_event
                .ms_since(self.first_event.unwrap_or(self.last_event)),
            totals: scheduler.progress(),
            jobs: self.jobs.into_values().collect(),
            warnings: self.warnings.into_iter().chain(declared).collect(),
            warnings_omitted: scheduler.warnings_omitted(),
            unsent_results: scheduler.unsent_results(),
        }
    }
}
