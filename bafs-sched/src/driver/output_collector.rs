//! What jobs printed: asked of their nodes when they have ended, and kept beside the journal. The
//! run goes on meanwhile, and does not depend on it.

use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bafs_proto::ids::RunId;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::Driver;
use crate::io::job_logs::{EndedAttempt, JobLogs};
use crate::io::servers::Servers;

/// Nodes that are asked at once.
const CONCURRENT_READS_MAX: usize = 16;

/// The end of a run waits so long for the last outputs.
const FINISH_TIMEOUT: Duration = Duration::from_secs(15);

/// After a restart outputs of so many attempts are asked for, if their files are missing: nodes
/// keep no more for long.
const EARLIER_OUTPUTS_MAX: usize = 1_000;

/// What is under way.
#[derive(Debug)]
pub(super) struct OutputCollector {
    logs: Option<Arc<Mutex<JobLogs>>>,
    tasks: JoinSet<()>,
    permits: Arc<Semaphore>,
    /// The last attempts that ended, of earlier schedulers too.
    ended_attempts: VecDeque<EndedAttempt>,
}

impl OutputCollector {
    /// Outputs that are kept in a directory, if there is one and it can be used.
    pub(super) fn open(directory: Option<&Path>, run: RunId) -> Self {
        let logs = directory.and_then(|directory| {
            let opened = JobLogs::open(directory, run);
            let told = opened.inspect_err(|error| {
                let directory = directory.display();
                tracing::warn!(%error, "job output is not kept: cannot use {directory}");
            });
            told.ok().map(|logs| Arc::new(Mutex::new(logs)))
        });
        Self {
            logs,
            tasks: JoinSet::new(),
            permits: Arc::new(Semaphore::new(CONCURRENT_READS_MAX)),
            ended_attempts: VecDeque::new(),
        }
    }

    /// Takes note of an attempt that has ended.
    pub(super) fn note_ended(&mut self, ended: EndedAttempt) {
        if self.logs.is_none() {
            return;
        }
        if self.ended_attempts.len() >= EARLIER_OUTPUTS_MAX {
            self.ended_attempts.pop_front();
        }
        self.ended_attempts.push_back(ended);
    }

    /// The last attempts that ended.
    pub(super) fn ended_attempts(&self) -> Vec<EndedAttempt> {
        self.ended_attempts.iter().cloned().collect()
    }

    fn spawn_read(&mut self, servers: Servers, address: String, ended: EndedAttempt) {
        while self.tasks.try_join_next().is_some() {}
        let Some(logs) = self.logs.clone() else {
            return;
        };
        let permits = Arc::clone(&self.permits);
        self.tasks.spawn(async move {
            let _permit = permits.acquire_owned().await;
            let printed = servers.read_output(&address, ended.execution).await;
            let keeping = tokio::task::spawn_blocking(move || {
                let mut logs = logs.lock().unwrap_or_else(PoisonError::into_inner);
                logs.store_output(ended.attempt, printed)
            });
            let kept = keeping.await.map_err(io::Error::other);
            if let Err(error) = kept.and_then(|kept| kept) {
                tracing::warn!(%error, "job output is not kept");
            }
        });
    }

    /// Waits for the last of them, for a while.
    pub(super) async fn finish(&mut self) {
        let all = async { while self.tasks.join_next().await.is_some() {} };
        if tokio::time::timeout(FINISH_TIMEOUT, all).await.is_err() {
            tracing::warn!("some job output is not kept: its nodes do not answer");
        }
        self.tasks.shutdown().await;
    }
}

impl Driver {
    /// Has what an attempt printed kept.
    pub(super) fn collect_output(&mut self, ended: EndedAttempt) {
        if self.output_collector.logs.is_some() {
            let address = self.server_address(ended.server).address;
            self.output_collector.note_ended(ended.clone());
            self.output_collector
                .spawn_read(self.servers.clone(), address, ended);
        }
    }

    /// Asks for what attempts printed that ended when the scheduler before this one was killed.
    pub(super) fn collect_earlier_outputs(&mut self) {
        for ended in self.output_collector.ended_attempts() {
            let (job, attempt) = (&ended.attempt.job, ended.attempt.attempt);
            let is_known = self.output_collector.logs.as_ref().is_none_or(|logs| {
                let logs = logs.lock().unwrap_or_else(PoisonError::into_inner);
                logs.has_attempt(job, attempt)
            });
            if !is_known && !self.scheduler.is_lost(ended.server) {
                let address = self.server_address(ended.server).address;
                self.output_collector
                    .spawn_read(self.servers.clone(), address, ended);
            }
        }
    }
}
