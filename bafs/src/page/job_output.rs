//! What jobs print, from the files beside the journal: kept output of attempts that ended, and that
//! of running ones, for which the run is asked.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use bafs_api::LogView;
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode, Result};
use bafs_sched::Scheduler;
use bafs_sched::io::followed_output::{FollowRequest, read_followed};
use bafs_sched::io::job_logs::{LoggedAttempt, read_index};
use bafs_server::clock;
use bafs_workflow::JobIndex;

/// Bytes of a stream that are shown: its end.
const STREAM_BYTES_MAX: usize = 256 << 10;

/// A running job that nobody looked at for so long is followed no more, in milliseconds.
const FOLLOW_MS: u64 = 15_000;

/// Where output is kept, and the jobs that are followed for somebody.
pub(super) struct JobOutput {
    logs: Option<PathBuf>,
    followed: Mutex<Followed>,
}

#[derive(Default)]
struct Followed {
    requests: BTreeMap<JobIndex, (FollowRequest, Time)>,
    count: u64,
}

impl JobOutput {
    pub(super) fn new(logs: Option<PathBuf>) -> Self {
        Self {
            logs,
            followed: Mutex::default(),
        }
    }

    /// What an attempt printed: the given one, or the running one, or the last.
    pub(super) fn read(
        &self,
        scheduler: &Scheduler,
        job: JobIndex,
        attempt: Option<u32>,
    ) -> Result<LogView> {
        let name = scheduler.workflow().job(job).name.clone();
        let Some(logs) = &self.logs else {
            let text = "the output of jobs is not kept in this run";
            return Err(Error::new(ErrorCode::NotFound, text));
        };
        let index = match read_index(logs) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            read => read.map_err(|e| cannot_read(logs, &e))?,
        };
        let ended: Vec<LoggedAttempt> = index.into_iter().filter(|it| it.job == name).collect();
        let running = scheduler.running_attempt(job);
        let running = running.map(|_| scheduler.ended_attempts(job) + 1);
        let last = running.or_else(|| ended.last().map(|it| it.attempt));
        let Some(wanted) = attempt.or(last) else {
            return Ok(LogView {
                missing_reason: Some("the job has not printed anything yet".to_owned()),
                job: name,
                ..LogView::default()
            });
        };
        let missing = || {
            let text = match last {
                None => format!("job '{name}' has no ended attempt"),
                Some(last) => format!("job '{name}' has no such attempt; the last is {last}"),
            };
            Error::new(ErrorCode::NotFound, text)
        };
        let attempts = last.unwrap_or(wanted);
        if let Some(found) = ended.iter().rfind(|it| it.attempt == wanted) {
            return show_ended(logs, found, attempts);
        }
        match running == Some(wanted) {
            true => self.show_running(scheduler, logs, job, wanted),
            false => Err(missing()),
        }
    }

    fn show_running(
        &self,
        scheduler: &Scheduler,
        logs: &Path,
        job: JobIndex,
        attempt: u32,
    ) -> Result<LogView> {
        let name = &scheduler.workflow().job(job).name;
        self.follow(logs, job, name)?;
        let printed = read_followed(logs, name, attempt).map_err(|e| cannot_read(logs, &e))?;
        let server = scheduler.running_attempt(job).map(|(_, server)| server);
        let node = server.and_then(|server| scheduler.node(server));
        let [stdout, stderr] = printed;
        let mut view = LogView {
            job: name.clone(),
            attempt,
            attempts: attempt,
            node: node.map(|node| node.name.clone()).unwrap_or_default(),
            is_running: true,
            ..LogView::default()
        };
        show_streams(&mut view, &stdout, &stderr);
        Ok(view)
    }

    /// Asks the run for the output of a job, and stops to ask for that of others.
    fn follow(&self, logs: &Path, job: JobIndex, name: &str) -> Result<()> {
        let mut followed = self.followed.lock().unwrap_or_else(PoisonError::into_inner);
        let now = clock::now();
        let is_wanted = |(_, asked): &(FollowRequest, Time)| now.ms_since(*asked) < FOLLOW_MS;
        followed.requests.retain(|_, request| is_wanted(request));
        if let Some((request, asked)) = followed.requests.get_mut(&job) {
            *asked = now;
            return request.repeat().map_err(|e| cannot_read(logs, &e));
        }
        followed.count += 1;
        let request = FollowRequest::send_numbered(logs, name, followed.count);
        let request = request.map_err(|e| cannot_read(logs, &e))?;
        followed.requests.insert(job, (request, now));
        Ok(())
    }
}

fn show_ended(logs: &Path, attempt: &LoggedAttempt, attempts: u32) -> Result<LogView> {
    let mut streams = [Vec::new(), Vec::new()];
    let mut removed = false;
    let sizes = [attempt.stdout_bytes, attempt.stderr_bytes];
    for ((stream, path), bytes) in streams.iter_mut().zip(attempt.log_paths(logs)).zip(sizes) {
        *stream = match std::fs::read(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                removed |= bytes > 0;
                Vec::new()
            }
            read => read.map_err(|e| cannot_read(&path, &e))?,
        };
    }
    let missing_reason = attempt.missing_reason.clone();
    let removed = removed.then(|| "removed, as the logs of the run take too much space".to_owned());
    let mut view = LogView {
        job: attempt.job.clone(),
        attempt: attempt.attempt,
        attempts,
        node: attempt.node.clone(),
        end: attempt.end_description.clone(),
        missing_reason: missing_reason.or(removed),
        ..LogView::default()
    };
    show_streams(&mut view, &streams[0], &streams[1]);
    Ok(view)
}

fn show_streams(view: &mut LogView, stdout: &[u8], stderr: &[u8]) {
    let tail = |bytes: &[u8]| {
        let cut = bytes.len().saturating_sub(STREAM_BYTES_MAX);
        (String::from_utf8_lossy(&bytes[cut..]).into_owned(), cut > 0)
    };
    let ((stdout, is_stdout_cut), (stderr, is_stderr_cut)) = (tail(stdout), tail(stderr));
    (view.stdout, view.stderr) = (stdout, stderr);
    view.is_cut = is_stdout_cut || is_stderr_cut;
}

fn cannot_read(path: &Path, error: &io::Error) -> Error {
    let text = format!("cannot use {}: {error}", path.display());
    Error::new(ErrorCode::ServerFault, text)
}
