//! A run that a service started: it obeys the share that the service gives it, and tells what it
//! used and how it ended. Decides nothing.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Result;
use bafs_proto::time::Time;
use bafs_queue::{RunOutcome, RunUsage};
use bafs_sched::report::RunReport;
use bafs_sched::{ClusterLimit, JobFailure, Outcome, Progress, RunLimit};
use bafs_server::clock;

use crate::output::print_notice;
use crate::service::run_files::{RunFiles, UsageFile};

/// The share is read, and the usage written, so often.
const EXCHANGE_INTERVAL: Duration = Duration::from_secs(1);

/// Jobs of which the service is told why they failed.
const FAILURES_TOLD_MAX: usize = 5;

/// Characters of one reason, or of one line of output.
const TOLD_CHARS_MAX: usize = 300;

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
        let own = identify_directory(directory)?;
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
                serving.end_if_replaced(own);
                if let Err(error) = serving.exchange() {
                    tracing::warn!("the service is not told of the usage: {error:#}");
                }
            }
        });
        Ok(link)
    }

    /// Ends this process at once if a copy took the place of its directory: the service starts the
    /// run of the copy, and two would drive the same jobs.
    fn end_if_replaced(&self, own: Option<(u64, u64)>) {
        let directory = self.files.directory();
        if identify_directory(directory).is_ok_and(|found| found != own) {
            let directory = directory.display();
            print_notice(&format!(
                "the run ends: {directory} was removed or replaced"
            ));
            std::process::exit(1);
        }
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
                let told = jobs
                    .iter()
                    .take(FAILURES_TOLD_MAX)
                    .map(describe_job_failure);
                let omitted = jobs.len().saturating_sub(FAILURES_TOLD_MAX);
                let omitted = (omitted > 0).then(|| format!("{omitted} further jobs failed"));
                let all = told.chain(omitted).chain(messages.iter().cloned());
                RunOutcome::Failed(all.collect::<Vec<String>>().join("; "))
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

/// What the owner of a workflow is told of a job, who has no other way to its log.
fn describe_job_failure(failure: &JobFailure) -> String {
    let mut text = format!("job '{}' failed", failure.name);
    if !failure.node.is_empty() {
        text += &format!(" on {}", failure.node);
    }
    text += &format!(": {}", shorten(&failure.reason));
    let mut lines = failure.output_tail.lines().map(str::trim);
    if let Some(last) = lines.rfind(|line| !line.is_empty()) {
        text += &format!("; it printed last: {}", shorten(last));
    }
    text
}

/// The text, or its beginning.
fn shorten(text: &str) -> String {
    match text.char_indices().nth(TOLD_CHARS_MAX) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// Which directory is at a path now; nothing if there is none.
fn identify_directory(path: &Path) -> io::Result<Option<(u64, u64)>> {
    match fs::metadata(path) {
        Ok(found) => Ok(Some((found.dev(), found.ino()))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn service_is_told_why_a_job_failed() {
        let mut failure = JobFailure {
            job: bafs_workflow::JobIndex(0),
            name: "a".to_owned(),
            node: "n1".to_owned(),
            reason: "exit code 1".to_owned(),
            output_tail: "one\ntwo: no such file\n\n".to_owned(),
        };
        let told = describe_job_failure(&failure);
        assert_eq!(
            told,
            "job 'a' failed on n1: exit code 1; it printed last: two: no such file"
        );
        failure.output_tail = "ö".repeat(9_000);
        assert!(describe_job_failure(&failure).len() < 800);
    }

    #[test]
    fn replaced_directory_is_another_one() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("0");
        assert_eq!(identify_directory(&path).expect("known"), None);
        fs::create_dir(&path).expect("mkdir");
        let first = identify_directory(&path).expect("known");
        fs::rename(&path, directory.path().join("old")).expect("rename");
        fs::create_dir(&path).expect("mkdir");
        assert!(first.is_some() && identify_directory(&path).expect("known") != first);
    }
}
