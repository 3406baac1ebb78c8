//! Drives the runs of a service: one process of `bafs run` for each workflow that is under way.
//!
//! A process outlives the service. It holds the lock of its journal, so a second one for the same
//! workflow ends at once. It writes how it ended before it gives up the lock. So a service that
//! starts again finds one of three things, and nothing runs twice:
//!
//! | Found | Done |
//! |---|---|
//! | an outcome | the queue is told |
//! | the lock is held | the service waits until it is free |
//! | neither | the process is started again, and goes on from its journal |
//!
//! A process that cannot be started fails no workflow: the disk of the state may be full. Nor does
//! one soon that ends because it cannot write its journal.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use bafs_queue::{RunOutcome, WorkflowId};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::time::Instant;

use super::queue_service::QueueService;
use super::run_files::{MESSAGES_FILE, OUTPUT_FILE, RunFiles};
use crate::config::FILE_VARIABLE;
use crate::logs::sibling_path;
use crate::run::is_run_locked;

/// A run without an outcome is looked at so often.
const LOOK_INTERVAL: Duration = Duration::from_millis(300);

/// Processes of a run that are killed or end by a fault of the program in a row, before it counts
/// as failed: each goes on where the one before ended.
const ATTEMPTS_MAX: u32 = 5;

/// A process that says that it cannot go on is started again for so long: as long as results wait
/// for their home.
const RETRY_TIME: Duration = Duration::from_secs(12 * 3600);

/// What `bafs run` ends with that cannot go on.
const EXIT_CANNOT_RUN: i32 = 1;

/// Pause after the first process that ended without an outcome; it doubles each time.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// It grows no longer than this.
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(60);

/// A process that ran for so long did something: it does not count.
const LONG_ATTEMPT: Duration = Duration::from_secs(300);

/// What a process printed last is shown where nothing else says why it failed.
const SHOWN_BYTES: usize = 2_000;

/// Variables that would make runs share what each needs for itself, or use other clusters.
const SERVICE_VARIABLES: [&str; 6] = [
    "BAFS_IDENTITY",
    "BAFS_CATALOG",
    "BAFS_LISTEN",
    "BAFS_METRICS",
    "BAFS_SERVICE",
    "BAFS_USER",
];

/// Processes of a run that ended in a row without an outcome.
#[derive(Debug, Default)]
struct FailedAttempts {
    all: u32,
    /// Those that did not say themselves that they cannot go on.
    faults: u32,
    /// When the first began.
    since: Option<Instant>,
}

impl FailedAttempts {
    /// Counts one with its begin and end, and how it ended; nothing if it did not start.
    fn add(&mut self, (began, now): (Instant, Instant), status: Option<ExitStatus>) {
        if now - began > LONG_ATTEMPT {
            *self = Self::default();
        }
        self.since.get_or_insert(began);
        self.all = self.all.saturating_add(1);
        let is_fault = status.is_some_and(|status| status.code() != Some(EXIT_CANNOT_RUN));
        self.faults += u32::from(is_fault);
        if status.is_none() {
            // Nothing of the run failed.
            self.since = None;
        }
    }

    /// Whether another one would end in the same way.
    fn is_final(&self, now: Instant) -> bool {
        let lasts = self.since.is_some_and(|since| now - since > RETRY_TIME);
        self.faults >= ATTEMPTS_MAX || lasts
    }

    fn pause(&self) -> Duration {
        let doublings = self.all.saturating_sub(1).min(16);
        (RETRY_PAUSE * 2u32.pow(doublings)).min(RETRY_PAUSE_MAX)
    }
}

/// One run of a workflow.
pub(super) struct RunSupervisor {
    service: Arc<QueueService>,
    id: WorkflowId,
    user: String,
    program: PathBuf,
    workflow: PathBuf,
    journal: PathBuf,
    files: RunFiles,
    cancelled: watch::Receiver<bool>,
}

impl RunSupervisor {
    /// The supervisor of a workflow that is under way; `program` is `bafs`.
    pub(super) fn new(
        service: Arc<QueueService>,
        id: WorkflowId,
        program: PathBuf,
        cancelled: watch::Receiver<bool>,
    ) -> Option<Self> {
        let (user, name) = {
            let queue = service.queue();
            let record = queue.state().workflows().get(&id)?;
            (record.user.clone(), record.name.clone())
        };
        let files = service.run_files(id);
        let workflow = files.directory().join(name);
        Some(Self {
            journal: sibling_path(&workflow, "journal"),
            service,
            id,
            user,
            program,
            workflow,
            files,
            cancelled,
        })
    }

    /// Drives the run to its end.
    pub(super) async fn drive(mut self) -> RunOutcome {
        let mut failed = FailedAttempts::default();
        loop {
            if let Some(outcome) = self.files.read_outcome() {
                return outcome;
            }
            if is_run_locked(&self.journal) {
                self.wait_for_adopted().await;
                continue;
            }
            let is_cancelled = *self.cancelled.borrow();
            if is_cancelled && (!self.journal.exists() || failed.all >= ATTEMPTS_MAX) {
                return RunOutcome::Cancelled;
            }
            if failed.is_final(Instant::now()) {
                return RunOutcome::Failed(self.describe_failure());
            }
            if failed.all > 0 {
                self.pause(failed.pause()).await;
            }
            let began = Instant::now();
            let status = match self.start_process() {
                Ok(process) => {
                    self.service.note_start_fault(self.id, None);
                    let status = self.wait_for_process(process).await;
                    let why = format!("it is started again: {}", self.describe_failure());
                    self.service.note_start_fault(self.id, Some(why));
                    status
                }
                Err(error) => {
                    tracing::warn!(workflow = %self.id, "cannot start: {error:#}");
                    let why = format!("it waits, because it cannot be started: {error:#}");
                    self.service.note_start_fault(self.id, Some(why));
                    None
                }
            };
            failed.add((began, Instant::now()), status);
        }
    }

    /// Waits before the next process, not longer than its user wants one.
    async fn pause(&mut self, pause: Duration) {
        let is_cancelled = *self.cancelled.borrow();
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            Ok(()) = self.cancelled.changed(), if !is_cancelled => {}
        }
    }

    fn start_process(&self) -> Result<Child> {
        self.service.publish_share(self.id)?;
        let identity = self.service.user_identity(&self.user)?;
        let output = |name: &str| {
            let path = self.files.directory().join(name);
            let mut options = OpenOptions::new();
            let file = options.create(true).append(true).mode(0o600).open(&path);
            file.with_context(|| path.display().to_string())
        };
        let mut command = Command::new(&self.program);
        command
            .arg("run")
            .arg(&self.workflow)
            .arg("--identity")
            .arg(identity)
            .args(["--catalog", &self.service.catalog, "--json"])
            .arg("--journal")
            .arg(&self.journal)
            .args(["--user", &self.user])
            .arg("--service-directory")
            .arg(self.files.directory())
            .arg("--learned")
            .arg(self.service.learned_path())
            .current_dir(self.files.directory())
            .stdin(Stdio::null())
            .stdout(output(OUTPUT_FILE)?)
            .stderr(output(MESSAGES_FILE)?)
            // Ctrl-C at the terminal of the service is not meant for the run.
            .process_group(0)
            .kill_on_drop(false);
        for variable in SERVICE_VARIABLES {
            command.env_remove(variable);
        }
        // Options of whoever runs the service are not for the workflows of its users.
        command.env(FILE_VARIABLE, "");
        command.spawn().context("cannot start bafs run")
    }

    async fn wait_for_process(&mut self, mut process: Child) -> Option<ExitStatus> {
        let pid = process.id();
        let mut is_told = false;
        loop {
            tokio::select! {
                ended = process.wait() => return ended.ok(),
                () = tokio::time::sleep(LOOK_INTERVAL), if !is_told => {
                    is_told = *self.cancelled.borrow() && self.end_process(pid);
                }
            }
        }
    }

    /// Waits for a process that an earlier service started.
    async fn wait_for_adopted(&mut self) {
        let mut told = None;
        while is_run_locked(&self.journal) {
            let process = self.files.read_usage().map(|usage| usage.process);
            if *self.cancelled.borrow() && told != process && self.end_process(process) {
                told = process;
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    /// Asks the process of the run to cancel it, once it hears that.
    fn end_process(&self, process: Option<u32>) -> bool {
        let hearing = self.files.read_usage().map(|usage| usage.process);
        let pid = process.filter(|process| hearing == Some(*process));
        let pid = pid.and_then(|pid| i32::try_from(pid).ok());
        pid.is_some_and(|pid| kill(Pid::from_raw(pid), Signal::SIGINT).is_ok())
    }

    fn describe_failure(&self) -> String {
        let path = self.files.directory().join(MESSAGES_FILE);
        let bytes = fs::read(path).unwrap_or_default();
        let from = bytes.len().saturating_sub(SHOWN_BYTES);
        let text = String::from_utf8_lossy(&bytes[from..]).into_owned();
        format!(
            "the run ends without a result; it printed last: {}",
            text.trim()
        )
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    /// Counts one that ends at once, by the status of wait(2).
    fn add(failed: &mut FailedAttempts, now: Instant, status: Option<i32>) {
        failed.add((now, now), status.map(ExitStatus::from_raw));
    }

    #[test]
    fn process_that_cannot_start_fails_nothing() {
        let mut failed = FailedAttempts::default();
        let mut now = Instant::now();
        for _ in 0..100 {
            add(&mut failed, now, None);
            now += RETRY_TIME;
            assert!(!failed.is_final(now));
        }
        assert_eq!(failed.pause(), RETRY_PAUSE_MAX);
    }

    #[test]
    fn run_without_room_is_retried_for_hours() {
        let mut failed = FailedAttempts::default();
        let now = Instant::now();
        for _ in 0..100 {
            add(&mut failed, now, Some(EXIT_CANNOT_RUN << 8));
        }
        assert!(!failed.is_final(now + RETRY_TIME));
        assert!(failed.is_final(now + RETRY_TIME + RETRY_PAUSE));
    }

    #[test]
    fn run_that_crashes_fails_soon() {
        for status in [101 << 8, 2 << 8, 9] {
            let mut failed = FailedAttempts::default();
            let now = Instant::now();
            for _ in 0..ATTEMPTS_MAX {
                assert!(!failed.is_final(now));
                add(&mut failed, now, Some(status));
            }
            assert!(failed.is_final(now), "{status}");
        }
    }
}
