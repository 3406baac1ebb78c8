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

use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use bafs_queue::{RunOutcome, WorkflowId};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::process::{Child, Command};
use tokio::sync::watch;

use super::queue_service::QueueService;
use super::run_files::RunFiles;
use crate::logs::sibling_path;
use crate::run::is_run_locked;

/// A run without an outcome is looked at so often.
const LOOK_INTERVAL: Duration = Duration::from_millis(300);

/// Processes of a run that end in a row without an outcome, before it counts as failed: each goes
/// on where the one before ended.
const ATTEMPTS_MAX: u32 = 5;

/// Pause after the first of them; it doubles each time.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

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
        let mut attempts = 0;
        loop {
            if let Some(outcome) = self.files.read_outcome() {
                return outcome;
            }
            if is_run_locked(&self.journal) {
                self.wait_for_adopted().await;
                continue;
            }
            if *self.cancelled.borrow() && !self.journal.exists() {
                return RunOutcome::Cancelled;
            }
            if attempts == ATTEMPTS_MAX {
                return match *self.cancelled.borrow() {
                    true => RunOutcome::Cancelled,
                    false => RunOutcome::Failed(self.describe_failure()),
                };
            }
            if attempts > 0 {
                tokio::time::sleep(RETRY_PAUSE * 2u32.pow(attempts - 1)).await;
            }
            let began = tokio::time::Instant::now();
            match self.start_process() {
                Ok(process) => self.wait_for_process(process).await,
                Err(error) => tracing::warn!(workflow = %self.id, "cannot start: {error:#}"),
            }
            attempts = match began.elapsed() > LONG_ATTEMPT {
                true => 1,
                false => attempts + 1,
            };
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
            .stdout(output("output.log")?)
            .stderr(output("messages.log")?)
            // Ctrl-C at the terminal of the service is not meant for the run.
            .process_group(0)
            .kill_on_drop(false);
        for variable in SERVICE_VARIABLES {
            command.env_remove(variable);
        }
        command.spawn().context("cannot start bafs run")
    }

    async fn wait_for_process(&mut self, mut process: Child) {
        let pid = process.id();
        let mut is_told = false;
        loop {
            tokio::select! {
                _ = process.wait() => return,
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
        let path = self.files.directory().join("messages.log");
        let bytes = fs::read(path).unwrap_or_default();
        let from = bytes.len().saturating_sub(SHOWN_BYTES);
        let text = String::from_utf8_lossy(&bytes[from..]).into_owned();
        format!(
            "the run ends without a result; it printed last: {}",
            text.trim()
        )
    }
}
