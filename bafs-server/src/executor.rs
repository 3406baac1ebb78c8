//! Runs the jobs of this node, each in an agent process of its own.
//!
//! The scheduler decides which job runs where. It starts an execution under an id that it chose,
//! waits for its end, and reads the job's output:
//!
//! ```text
//!  StartJob ──▶ record the id on disk ──▶ start the agent ──▶ JobReport
//!  WatchJobs ◀─ reports: as soon as an execution has ended, or after the asked time
//! ```
//!
//! * [`Executor::start`] notes the execution in `started_executions.rs` before it starts the agent.
//!   So no execution starts twice, not even after a restart of the node.
//! * `agent.rs` runs one agent: it writes the job to standard input, and reads the report from
//!   standard output. The pipe stays open while the node lives. If it ends, the agent kills the
//!   job.
//! * `agent_log.rs` keeps what agents and jobs print: at most 4,000 files and 128 MiB, for at most
//!   30 days.
//! * `control_groups.rs` makes the control group that holds a job to its memory, where the node
//!   may. `job_limits.rs` watches the memory else.
//! * `temporary_directory.rs` makes the directory for `/tmp` and `/var/tmp`. It kills a job that
//!   takes more than its share. `spare_directories.rs` keeps those that a job left empty.
//!
//! **Errors.** `start` fails with `Busy` when four jobs for each slot run, `Unsupported` on a node
//! without slots, and `Conflict` when the id is another job. It fails with `WrongState` for an
//! execution that the node began before its restart: its volumes may be half written. An agent that
//! cannot start is no error, but a report with `EnvironmentFailed`.
//!
//! **Reports.** The executor keeps the last 10,000 reports, 128 MiB at most. One reply holds 768
//! KiB of them. A report that does not fit counts as running until the next call.
//!
//! **Concurrency.** A mutex guards the table of executions. One task supervises each agent, and a
//! watch channel wakes the waiting calls at each start and end. [`Executor::stop`] aborts the
//! tasks, and each kills its agent.

mod agent;
mod agent_log;
mod agent_process;
mod control_groups;
mod group_location;
mod job_limits;
mod job_processes;
mod program_search;
mod spare_directories;
mod started_executions;
mod temporary_directory;
mod unlinked_files;

use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bafs_proto::hash::Digest;
use bafs_proto::ids::ExecutionId;
use bafs_proto::limits::PROGRAMS_MAX;
use bafs_proto::message::{
    Done, FindPrograms, JobOutcome, JobOutput, JobReport, JobReports, JobState, KillJob,
    MissingPrograms, ReadJobOutput, StartJob, WatchJobs,
};
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result, codec};
use bytes::Bytes;
use tokio::sync::watch;
use tokio::task::AbortHandle;

use self::control_groups::ControlGroups;
pub use self::group_location::{GroupLocation, GroupObstacle};
use self::program_search::find_missing_programs;
use self::started_executions::StartedExecutions;
pub use self::temporary_directory::{DiskSpace, TemporaryQuota, machine_memory_bytes};
use crate::counters::Counters;
use crate::departure::Departure;
use crate::errors;
use crate::full_disk::{DiskFullFlag, FreeSpace};
use crate::storage::is_path_missing;

/// Jobs that may run at once, per slot: a scheduler that overlaps the end of one job with the start
/// of the next stays well below.
const JOBS_PER_SLOT: usize = 4;

/// Most reports kept of jobs that ended, and most bytes of them.
const REPORTS_MAX: usize = 10_000;
const REPORT_BYTES_MAX: usize = 128 << 20;

/// Most bytes of the reports in one answer, to fit a header; the others follow in the next one.
const REPLY_REPORT_BYTES_MAX: usize = 768 << 10;

/// Most executions that one call asks for.
const WATCHED_EXECUTIONS_MAX: usize = 16_384;

/// An answer is on its way so long before the deadline, in milliseconds, to arrive in time.
const REPLY_MARGIN_MS: u64 = 200;

/// SIGTERM, and what a shell makes of it.
const SIGTERM: i32 = 15;
const SIGTERM_EXIT: i32 = 128 + SIGTERM;

/// Between the signals to a job and to its node may be so long: both are of one pass over the
/// processes of a pilot, and a report takes a few milliseconds.
const SIGNAL_SPREAD: Duration = Duration::from_millis(200);

/// Configuration of an executor.
#[derive(Debug, Clone)]
pub struct ExecutorConfig {
    /// Jobs that the node is meant to run at once; 0 for a node that runs none.
    pub slots: u32,
    /// The program whose hidden command `agent` runs a job.
    pub program: PathBuf,
    /// Directory with the identity that agents show.
    pub identity: PathBuf,
    /// Memory of each agent for data that pass through it, in bytes; its own default if `None`.
    pub memory_bytes: Option<u64>,
    /// Where the agents' standard error goes.
    pub log_directory: PathBuf,
    /// The file with all started executions.
    pub started_file: PathBuf,
    /// The directory of this node's volumes: without it, no job is reported.
    pub volume_directory: PathBuf,
    /// Where temporary files of jobs are.
    pub temporary_directory: PathBuf,
    /// Resources of each slot.
    pub temporary_quota: TemporaryQuota,
    /// When the node leaves.
    pub departure: Departure,
    /// Whether agents are copies of one process, which `agent --spawner` starts: they start faster.
    pub copies_agents: bool,
}

/// Starts the jobs of this node, and keeps the reports of those that ended.
#[derive(Debug)]
pub struct Executor {
    config: ExecutorConfig,
    shared: agent::SharedParts,
    /// Where it can, the node holds jobs to their memory by these.
    groups: Option<Arc<ControlGroups>>,
    state: Mutex<ExecutorState>,
    changed: watch::Sender<u64>,
    /// Whether a job failed on a full disk.
    full_disk: DiskFullFlag,
    counters: Counters,
}

#[derive(Debug)]
struct ExecutorState {
    started: StartedExecutions,
    executions: BTreeMap<ExecutionId, Execution>,
    running: usize,
    ended: VecDeque<ExecutionId>,
    ended_bytes: usize,
    is_stopped: bool,
}

#[derive(Debug)]
enum Execution {
    Running {
        job: Digest,
        kill: watch::Sender<bool>,
        task: Option<AbortHandle>,
    },
    Ended {
        /// Tells a repeated start from another job; `None` for one that never started.
        job: Option<Digest>,
        report: JobReport,
        bytes: usize,
    },
}

impl Executor {
    /// An executor without jobs. Blocks.
    ///
    /// # Errors
    /// `ServerFault` if the list of earlier executions is unreadable.
    pub fn open(config: ExecutorConfig, counters: Counters) -> Result<Arc<Self>> {
        let starts =
            StartedExecutions::open(&config.started_file).map_err(|e| not_recorded_error(&e))?;
        let state = ExecutorState {
            started: starts,
            executions: BTreeMap::new(),
            running: 0,
            ended: VecDeque::new(),
            ended_bytes: 0,
            is_stopped: false,
        };
        let changed = watch::Sender::new(0);
        let groups = open_groups(&config);
        Ok(Arc::new(Self {
            config,
            shared: agent::SharedParts::default(),
            groups,
            state: Mutex::new(state),
            changed,
            full_disk: DiskFullFlag::default(),
            counters,
        }))
    }

    /// Wakes whenever a job starts or ends.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Jobs that run now.
    pub fn running_jobs(&self) -> u32 {
        u32::try_from(self.state().running).unwrap_or(u32::MAX)
    }

    /// Starts a job; harmless to repeat, also after it has ended. Returns when the agent is about
    /// to be started: a failure to start it is a report like any other.
    ///
    /// # Errors `Conflict` when the execution is another job, `Unsupported` on a node without
    /// slots, `Busy` when too many jobs run or the node is stopping, `WrongState` when the node has
    /// begun it before it restarted: its volumes may have changed; `ServerFault` when that it
    /// begins cannot be noted.
    pub fn start(self: &Arc<Self>, call: StartJob) -> Result<Done> {
        let id = call.execution;
        let (kill, killed) = watch::channel(false);
        let mut state = self.state();
        let known = match state.executions.get(&id) {
            Some(Execution::Running { job, .. }) => Some(*job == job_digest(&call)),
            Some(Execution::Ended { job, .. }) => {
                Some(job.is_none_or(|job| job == job_digest(&call)))
            }
            None => None,
        };
        match known {
            Some(true) => return Ok(Done),
            Some(false) => {
                let text = format!("execution {id} is another job; choose a new id");
                return Err(Error::new(ErrorCode::Conflict, text));
            }
            None => self.check_admission(&state, id)?,
        }
        state
            .started
            .record(id)
            .map_err(|e| not_recorded_error(&e))?;
        let running = Execution::Running {
            job: job_digest(&call),
            kill,
            task: None,
        };
        state.executions.insert(id, running);
        state.running += 1;
        let this = self.clone();
        let task = tokio::spawn(async move {
            let accompanying = this.clone();
            let report = errors::run_in_task("the supervision of a job", async move {
                let Self {
                    config,
                    shared,
                    groups,
                    ..
                } = &*accompanying;
                let means = (shared, groups.as_ref());
                Ok(agent::run_job(config, means, &call, killed).await)
            });
            let report = report.await;
            let report =
                report.unwrap_or_else(|error| minimal_report(JobOutcome::EnvironmentFailed(error)));
            let report = this.explain_interruption(report).await;
            this.finish(id, report);
        });
        // The task cannot have ended yet: its last act needs the lock that is held here.
        if let Some(Execution::Running { task: slot, .. }) = state.executions.get_mut(&id) {
            *slot = Some(task.abort_handle());
        }
        drop(state);
        self.counters.add("jobs_started", 1);
        self.notify();
        Ok(Done)
    }

    /// Kills a job; harmless to repeat. An execution that is not known yet is dead from now on, so
    /// that a delayed start cannot revive it.
    pub fn kill(&self, call: KillJob) -> Done {
        let mut state = self.state();
        match state.executions.get(&call.execution) {
            Some(Execution::Running { kill, .. }) => {
                kill.send_replace(true);
            }
            Some(Execution::Ended { .. }) => {}
            None => {
                if let Err(error) = state.started.record(call.execution) {
                    tracing::warn!(%error, "a later life of the node may start what was killed");
                }
                state.insert_ended(call.execution, None, minimal_report(JobOutcome::Killed));
                drop(state);
                self.notify();
            }
        }
        Done
    }

    /// States of executions, as soon as one of them has ended, or after the asked time.
    ///
    /// # Errors
    /// `Malformed` when too many are asked for.
    pub async fn watch(&self, call: WatchJobs, deadline: Deadline) -> Result<JobReports> {
        if call.executions.len() > WATCHED_EXECUTIONS_MAX {
            let text = format!(
                "{} executions are too many for one call",
                call.executions.len()
            );
            return Err(Error::new(ErrorCode::Malformed, text));
        }
        let near = deadline
            .remaining()
            .saturating_sub(Duration::from_millis(REPLY_MARGIN_MS));
        let wait = near.min(Duration::from_millis(u64::from(call.wait_ms)));
        let until = Deadline::after(wait);
        let mut changes = self.changes();
        loop {
            let reports = self.state().reports(&call.executions);
            let news = |report: &Option<JobState>| !matches!(report, Some(JobState::Running));
            let over = reports.iter().any(news) || reports.is_empty();
            let waited = tokio::time::timeout_at(until.instant().into(), changes.changed());
            if over || waited.await.is_err() {
                return Ok(JobReports { reports });
            }
        }
    }

    /// The output of an ended execution.
    ///
    /// # Errors
    /// `NotFound` when it has not ended here or its log is gone, `ServerFault` when the disk does
    /// not give it.
    pub async fn read_output(&self, call: ReadJobOutput) -> Result<(JobOutput, Bytes)> {
        let (id, logs) = (call.execution, self.config.log_directory.clone());
        let has_ended = matches!(
            self.state().executions.get(&id),
            Some(Execution::Ended { .. })
        );
        let reading =
            tokio::task::spawn_blocking(move || agent_log::read_output(&logs, id, has_ended));
        let read = reading.await.map_err(std::io::Error::other);
        let read = read.and_then(|read| read).map_err(|error| {
            let text = format!("the output of execution {id}: {error}");
            Error::new(ErrorCode::ServerFault, text)
        })?;
        let gone = || {
            let text = format!("the output of execution {id} is not kept");
            Error::new(ErrorCode::NotFound, text)
        };
        let (stdout, stderr) = read.ok_or_else(gone)?;
        let stdout_bytes = u32::try_from(stdout.len()).unwrap_or(u32::MAX);
        let body = [stdout, stderr].concat();
        Ok((JobOutput { stdout_bytes }, body.into()))
    }

    /// Programs that jobs of this node would not find.
    ///
    /// # Errors
    /// `Malformed` when there are too many.
    pub async fn find_programs(&self, call: FindPrograms) -> Result<MissingPrograms> {
        let count = call.programs.len();
        if count > PROGRAMS_MAX {
            let text = format!("{count} programs are too many for one call");
            return Err(Error::new(ErrorCode::Malformed, text));
        }
        let searching = tokio::task::spawn_blocking(|| find_missing_programs(call.programs));
        let programs = searching.await.map_err(|error| {
            let text = format!("looking for programs: {error}");
            Error::new(ErrorCode::ServerFault, text)
        })?;
        Ok(MissingPrograms { programs })
    }

    /// Kills all agents at once, and takes no more jobs.
    pub fn stop(&self) {
        let mut state = self.state();
        state.is_stopped = true;
        for execution in state.executions.values() {
            if let Execution::Running {
                task: Some(task), ..
            } = execution
            {
                task.abort();
            }
        }
    }

    /// Removes what jobs that [`Self::stop`] has killed leave in the kernel, as soon as they are
    /// dead: two seconds later at most.
    pub async fn remove_left_groups(&self) {
        if let Some(groups) = &self.groups {
            groups.remove_all().await;
        }
    }

    fn check_admission(&self, state: &ExecutorState, id: ExecutionId) -> Result<()> {
        let slots = self.config.slots as usize;
        if state.started.is_from_earlier_incarnation(id) {
            let text = format!(
                "the node restarted during execution {id}; the state of its volumes is unknown"
            );
            return Err(Error::new(ErrorCode::WrongState, text));
        }
        if slots == 0 {
            let text = "this node runs no jobs; it only holds volumes";
            return Err(Error::new(ErrorCode::Unsupported, text));
        }
        if state.is_stopped {
            return Err(Error::new(ErrorCode::Busy, "the node is stopping"));
        }
        if state.running >= slots * JOBS_PER_SLOT {
            let text = format!(
                "{} jobs run on {slots} slots; wait for one to end",
                state.running
            );
            return Err(Error::new(ErrorCode::Busy, text));
        }
        Ok(())
    }

    /// Whether a job failed on a full disk since this was asked the last time.
    pub fn take_disk_full(&self) -> bool {
        self.full_disk.take()
    }

    /// What fails on a node that is asked to end says nothing of the job: a batch system signals
    /// every process of a pilot.
    async fn explain_interruption(&self, mut report: JobReport) -> JobReport {
        let departure = &self.config.departure;
        let is_interrupted = match &report.outcome {
            JobOutcome::Exited(0) | JobOutcome::NotStarted(_) | JobOutcome::Killed => false,
            JobOutcome::Signaled(SIGTERM) | JobOutcome::Exited(SIGTERM_EXIT) => {
                departure.wait_for_interruption(SIGNAL_SPREAD).await
            }
            JobOutcome::EnvironmentFailed(error) if error.code == ErrorCode::ServerFault => {
                departure.wait_for_interruption(SIGNAL_SPREAD).await
            }
            _ => departure.interrupts_jobs(),
        };
        if is_interrupted {
            let text = "the node was asked to end while the job ran";
            let error = Error::new(ErrorCode::NodeLeaving, text);
            report.outcome = JobOutcome::EnvironmentFailed(error);
        }
        report
    }

    fn finish(&self, id: ExecutionId, mut report: JobReport) {
        if is_path_missing(&self.config.volume_directory) {
            let store = self.config.volume_directory.display();
            let text = format!("the store of its node was removed while it ran: no {store}");
            report.outcome = JobOutcome::EnvironmentFailed(Error::new(ErrorCode::StoreLost, text));
        }
        if report.outcome != JobOutcome::Exited(0) {
            let volumes = report.volumes.iter();
            let found =
                volumes.map(|used| FreeSpace::reported(used.disk_free_bytes, used.disk_free_files));
            found.for_each(|free| self.full_disk.note_no_space(free));
        }
        let mut state = self.state();
        if let Some(Execution::Running { job, .. }) = state.executions.remove(&id) {
            state.running -= 1;
            state.insert_ended(id, Some(job), report);
        }
        drop(state);
        self.counters.add("jobs_ended", 1);
        self.notify();
    }

    fn state(&self) -> MutexGuard<'_, ExecutorState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn notify(&self) {
        self.changed.send_modify(|version| *version += 1);
    }
}

impl ExecutorState {
    fn insert_ended(&mut self, id: ExecutionId, job: Option<Digest>, report: JobReport) {
        let bytes = codec::encode(&report).map_or(0, |encoded| encoded.len());
        self.ended_bytes += bytes;
        self.ended.push_back(id);
        self.executions
            .insert(id, Execution::Ended { job, report, bytes });
        while self.ended.len() > REPORTS_MAX || self.ended_bytes > REPORT_BYTES_MAX {
            let Some(oldest) = self.ended.pop_front() else {
                return;
            };
            if let Some(Execution::Ended { bytes, .. }) = self.executions.remove(&oldest) {
                self.ended_bytes -= bytes;
            }
        }
    }

    /// One state for each execution. A report that does not fit is sent with the next answer: until
    /// then the execution counts as running.
    fn reports(&self, executions: &[ExecutionId]) -> Vec<Option<JobState>> {
        let mut left = REPLY_REPORT_BYTES_MAX;
        let state = |id: &ExecutionId| match self.executions.get(id)? {
            Execution::Ended { report, bytes, .. } if *bytes <= left => {
                left -= bytes;
                Some(JobState::Ended(report.clone()))
            }
            Execution::Ended { .. } | Execution::Running { .. } => Some(JobState::Running),
        };
        executions.iter().map(state).collect()
    }
}

/// Finds out how the node holds jobs to their memory, and says so.
fn open_groups(config: &ExecutorConfig) -> Option<Arc<ControlGroups>> {
    if config.slots == 0 {
        return None;
    }
    match ControlGroups::open() {
        Ok(groups) => {
            let place = groups.describe();
            tracing::info!(place, "control groups hold jobs to their request_memory");
            Some(groups)
        }
        Err(obstacle) => {
            tracing::info!(%obstacle, "no control groups; the memory of jobs is watched");
            None
        }
    }
}

fn not_recorded_error(error: &std::io::Error) -> Error {
    let text = format!("the list of executions that were begun: {error}");
    Error::new(ErrorCode::ServerFault, text)
}

/// A job's description without the parts that may exceed a header. Capabilities are no part of it,
/// as a scheduler that was started anew gives others for the same job.
fn job_digest(call: &StartJob) -> Digest {
    let job = &call.job;
    let mounts = job.mounts.iter();
    let mounts: Vec<_> = mounts
        .map(|mount| (&mount.path, &mount.target, mount.writable))
        .collect();
    let what = (call.execution, &job.name, &job.command, mounts);
    Digest::of(&serde_json::to_vec(&what).unwrap_or_default())
}

/// A report of the outcome and nothing else.
fn minimal_report(outcome: JobOutcome) -> JobReport {
    JobReport {
        outcome,
        wall_ms: 0,
        cpu_ms: 0,
        memory_bytes_max: 0,
        output_tail: String::new(),
        volumes: Vec::new(),
    }
}
