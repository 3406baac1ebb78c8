//! Runs of one user for the API, each by its journal.

use std::sync::Arc;

use bafs_api::{
    HistoryPage, JobDetails, LogView, MetricsView, RunCommand, RunSource, RunSummary, RunView,
};
use bafs_proto::{Error, ErrorCode};
use bafs_queue::Requester;

use super::followed_run::FollowedRun;
use crate::metrics::PublishedProgress;

/// The run that is served first, whatever its id is.
const CURRENT_RUN: &str = "current";

/// Runs of one user, each by its journal.
pub(super) struct JournalSource {
    user: String,
    runs: Vec<FollowedRun>,
}

impl JournalSource {
    /// The runs of a user.
    pub(super) fn new(user: String, runs: Vec<FollowedRun>) -> Self {
        Self { user, runs }
    }

    fn find(&self, requester: &Requester, run: &str) -> bafs_proto::Result<&FollowedRun> {
        let unknown = || Error::new(ErrorCode::NotFound, format!("there is no run '{run}'"));
        if requester.user != self.user && !requester.is_operator {
            return Err(unknown());
        }
        if run == CURRENT_RUN {
            return self.runs.first().ok_or_else(unknown);
        }
        let is_it = |it: &&FollowedRun| it.summary().is_ok_and(|summary| summary.id == run);
        self.runs.iter().find(is_it).ok_or_else(unknown)
    }
}

impl RunSource for JournalSource {
    fn list_runs(&self, requester: &Requester) -> bafs_proto::Result<Vec<RunSummary>> {
        match requester.user == self.user || requester.is_operator {
            true => self.runs.iter().map(FollowedRun::summary).collect(),
            false => Ok(Vec::new()),
        }
    }

    fn view_run(&self, requester: &Requester, run: &str) -> bafs_proto::Result<Arc<RunView>> {
        self.find(requester, run)?.view()
    }

    fn describe_job(
        &self,
        requester: &Requester,
        run: &str,
        job: u32,
    ) -> bafs_proto::Result<JobDetails> {
        self.find(requester, run)?.describe_job(job)
    }

    fn explain_jobs(
        &self,
        requester: &Requester,
        run: &str,
        jobs: &[u32],
    ) -> bafs_proto::Result<Vec<Option<String>>> {
        self.find(requester, run)?.explain_jobs(jobs)
    }

    fn read_log(
        &self,
        requester: &Requester,
        run: &str,
        job: u32,
        attempt: Option<u32>,
    ) -> bafs_proto::Result<LogView> {
        self.find(requester, run)?.read_log(job, attempt)
    }

    fn read_history(
        &self,
        requester: &Requester,
        run: &str,
        from: u64,
        limit: usize,
    ) -> bafs_proto::Result<HistoryPage> {
        self.find(requester, run)?.read_history(from, limit)
    }

    fn send_command(
        &self,
        requester: &Requester,
        run: &str,
        command: RunCommand,
    ) -> bafs_proto::Result<()> {
        self.find(requester, run)?.send_command(command)
    }

    fn read_metrics(&self, requester: &Requester) -> bafs_proto::Result<MetricsView> {
        let progress = self.find(requester, CURRENT_RUN)?.progress()?;
        let published = PublishedProgress::default();
        published.publish(&progress);
        let figures = published.read_figures()();
        let gauges = figures.gauges.into_iter();
        Ok(MetricsView {
            counters: figures.counters,
            gauges: gauges
                .map(|(name, value)| (name.to_owned(), value))
                .collect(),
        })
    }
}
