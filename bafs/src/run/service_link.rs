//! A run that a service started: it obeys the share that the service gives it, and tells what it
//! used and how it ended. Decides nothing.

use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;
use bafs_proto::time::Time;
use bafs_queue::{RunOutcome, RunUsage};
use bafs_sched::report::RunReport;
use bafs_sched::{ClusterLimit, Outcome, Progress, RunLimit};
use bafs_server::clock;

use crate::output::print_notice;
use crate::service::run_files::{RunFiles, UsageFile};

/// The share is read, and the usage written, so often.
const EXCHANGE_INTERVAL: Duration = Duration::from_secs(1);

/// What a run has used so far.
#[derive(Debug)]
struct UsageMeter {
    /// Of earlier processes of the run.
    earlier: RunUsage,
    slot_ms: u64,
    progress: Progress,
    since: Time,
}

/// The way to the service.
#[derive(Debug, Clone)]
pub(super) struct ServiceLink {
    files: RunFiles,
    limit: RunLimit,
    meter: Arc<Mutex<UsageMeter>>,
}

impl ServiceLink {
    /// Opens the way through a directory. The process must hear signals before.
    pub(super) fn open(directory: &Path) -> Result<Self> {
        let files = RunFiles::new(directory.to_owned());
        let earlier = files.read_usage().unwrap_or_default().used;
        let link = Self {
            limit: RunLimit::default(),
            meter: Arc::new(Mutex::new(UsageMeter {
                earlier,
                slot_ms: 0,
                progress: Progress::default(),
                since: clock::now(),
            })),
            files,
        };
        link.exchange()?;
        let serving = link.clone();
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(EXCHANGE_INTERVAL).await;
                if let Err(error) = serving.exchange() {
                    tracing::warn!("the service is not told of the usage: {error:#}");
                }
            }
        });
        Ok(link)
    }

    /// What the run may use.
    pub(super) fn limit(&self) -> RunLimit {
        self.limit.clone()
    }

    /// Takes how far the run is.
    pub(super) fn report_progress(&self, progress: &Progress) {
        let mut meter = self.meter.lock().unwrap_or_else(PoisonError::into_inner);
        meter.add_time(clock::now());
        meter.progress = *progress;
    }

    /// Tells how the run ended.
    pub(super) fn report_outcome(&self, report: &RunReport) -> Result<()> {
        self.exchange()?;
        self.files.write_outcome(&match &report.outcome {
            Outcome::Complete => RunOutcome::Complete,
            Outcome::Cancelled => RunOutcome::Cancelled,
            Outcome::Failed { jobs, messages } => {
                let jobs = jobs
                    .iter()
                    .map(|failure| format!("job '{}' failed", failure.name));
                let all: Vec<String> = jobs.chain(messages.iter().cloned()).collect();
                RunOutcome::Failed(all.join("; "))
            }
        })
    }

    /// Tells that no job had to run.
    pub(super) fn report_nothing_to_run(&self) -> Result<()> {
        self.files.write_outcome(&RunOutcome::Complete)
    }

    fn exchange(&self) -> Result<()> {
        if let Some(share) = self.files.read_share() {
            self.limit.set(Some(ClusterLimit {
                slots: share.slots,
                bytes: share.bytes,
            }));
        }
        let used = {
            let mut meter = self.meter.lock().unwrap_or_else(PoisonError::into_inner);
            meter.add_time(clock::now());
            meter.total()
        };
        let process = std::process::id();
        self.files.write_usage(UsageFile { process, used })
    }
}

impl UsageMeter {
    fn add_time(&mut self, now: Time) {
        let ms = now.ms_since(self.since);
        self.slot_ms = self.slot_ms.saturating_add(ms * self.progress.jobs_running);
        self.since = now;
    }

    fn total(&self) -> RunUsage {
        // Resumed runs count what earlier processes sent, too.
        let sent = self.progress.extracted_bytes;
        RunUsage {
            slot_ms: self.earlier.slot_ms.saturating_add(self.slot_ms),
            home_bytes: self.earlier.home_bytes.max(sent),
        }
    }
}

/// The way to the service, if one started the run.
pub(super) fn open_service_link(directory: Option<&Path>) -> Result<Option<ServiceLink>> {
    directory.map(ServiceLink::open).transpose()
}

/// Tells the service of a run that there was nothing to do.
pub(super) fn tell_nothing_to_run(directory: Option<&Path>) {
    let link = directory.map(ServiceLink::open);
    let told = link.map(|link| link.and_then(|link| link.report_nothing_to_run()));
    if let Some(Err(error)) = told {
        print_notice(&format!("the service is not told of the end: {error:#}"));
    }
}
