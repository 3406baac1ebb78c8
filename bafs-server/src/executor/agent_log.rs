//! Standard error of agents and output of their jobs, in files of bounded size, number and age.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use bafs_proto::ids::ExecutionId;
use bafs_proto::limits::JOB_LOG_BYTES_MAX;
use bafs_proto::time::Time;
use tokio::io::AsyncReadExt;
use tokio::net::unix::pipe::Receiver;
use tokio::task::spawn_blocking;

use crate::clock;

/// Half of the bytes kept of one execution: the file and the one before it.
const LOG_FILE_BYTES_MAX: u64 = 512 << 10;

/// Most log files; the oldest go when a job starts, as with the next two bounds.
const LOGS_MAX: usize = 4_000;

/// Log files of a job, and most bytes of them.
const LOGS_PER_JOB: usize = 4;
const LOG_BYTES_PER_JOB: u64 = 2 * (LOG_FILE_BYTES_MAX + JOB_LOG_BYTES_MAX as u64);

/// What stays where there are too many: a look at 1,000 files takes a millisecond, and must not be
/// taken for every job.
const LOGS_KEPT: usize = 3_600;

/// A look is taken after so long in any case, in milliseconds: logs grow old.
const LOOK_MS_MAX: u64 = 3_600_000;

/// Most bytes of all log files. Jobs that are running add to them until the next one starts.
/// Enough for a scheduler that was away while two hundred jobs ended which print much.
const LOGS_BYTES_MAX: u64 = 128 << 20;

/// A log to which nothing was added for so long goes.
const LOG_AGE_MAX: Duration = Duration::from_secs(30 * 24 * 3600);

/// The logs of a node. Looks through them when they may exceed their bounds.
#[derive(Debug, Default)]
pub(super) struct LogDirectory(Mutex<NextLook>);

/// When logs may be too many.
#[derive(Debug, Default)]
struct NextLook {
    jobs_until_look: u64,
    look_by: Time,
}

impl LogDirectory {
    /// Notes that a job begins; whether its node must look through the logs before.
    fn begin_job(&self, now: Time) -> bool {
        let mut next = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = next.jobs_until_look == 0 || now >= next.look_by;
        next.jobs_until_look = next.jobs_until_look.saturating_sub(1);
        is_due
    }

    /// Takes note of the number and the bytes of the logs that a look has left.
    fn note_look(&self, now: Time, (count, bytes): (usize, u64)) {
        let by_count = LOGS_MAX.saturating_sub(count) / LOGS_PER_JOB;
        let by_bytes = LOGS_BYTES_MAX.saturating_sub(bytes) / LOG_BYTES_PER_JOB;
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = NextLook {
            jobs_until_look: by_bytes.min(by_count as u64),
            look_by: now.plus_ms(LOOK_MS_MAX),
        };
    }
}

/// Copies the agent's standard error to `path` until its end. The pipe is emptied even when the
/// log cannot be written, or the agent would block.
pub(super) async fn copy_stderr(mut errors: Receiver, path: PathBuf, logs: Arc<LogDirectory>) {
    let shown = path.display().to_string();
    let opening = spawn_blocking(move || AgentLog::open(path, &logs)).await;
    let mut log = opening.map_err(io::Error::other).and_then(|opened| opened);
    let mut buffer = vec![0; 16 << 10];
    while let Ok(length) = errors.read(&mut buffer).await
        && length > 0
    {
        let Ok(mut open) = log else { continue };
        let piece = buffer[..length].to_vec();
        let writing = spawn_blocking(move || open.write(&piece).map(|()| open)).await;
        log = writing
            .map_err(io::Error::other)
            .and_then(|written| written);
        if let Err(error) = &log {
            tracing::warn!(log = %shown, %error, "log of an agent is cut");
        }
    }
}

/// Prefix of the files with a job's output: `.out` for standard output, `.err` for standard error.
pub(super) fn output_path_prefix(logs: &Path, execution: ExecutionId) -> PathBuf {
    logs.join(execution.to_string())
}

/// A job's standard output and standard error; empty after its logs are removed. A stream without a
/// file printed nothing, if the agent has ended.
pub(super) fn read_output(
    logs: &Path,
    execution: ExecutionId,
    has_ended: bool,
) -> io::Result<Option<(Vec<u8>, Vec<u8>)>> {
    let read = |ending: &str| {
        let path = output_path_prefix(logs, execution).with_extension(ending);
        let Some(file) = ignore_missing(File::open(path))? else {
            return Ok(None);
        };
        let mut bytes = Vec::new();
        file.take(JOB_LOG_BYTES_MAX as u64)
            .read_to_end(&mut bytes)?;
        io::Result::Ok(Some(bytes))
    };
    let (stdout, stderr) = (read("out")?, read("err")?);
    let is_kept = stdout.is_some() || stderr.is_some() || {
        // The agent's own log came before them, and goes before them.
        has_ended
            && output_path_prefix(logs, execution)
                .with_extension("log")
                .exists()
    };
    Ok(is_kept.then(|| (stdout.unwrap_or_default(), stderr.unwrap_or_default())))
}

/// One log that is being written.
struct AgentLog {
    path: PathBuf,
    file: File,
    size: u64,
}

impl AgentLog {
    fn open(path: PathBuf, logs: &LogDirectory) -> io::Result<Self> {
        let now = clock::now();
        if let Some(directory) = path.parent().filter(|_| logs.begin_job(now)) {
            let since = Duration::from_millis(now.0);
            let left = remove_old_logs(directory, SystemTime::UNIX_EPOCH + since)?;
            logs.note_look(now, left);
        }
        Ok(Self {
            file: File::create(&path)?,
            path,
            size: 0,
        })
    }

    fn write(&mut self, piece: &[u8]) -> io::Result<()> {
        if self.size + piece.len() as u64 > LOG_FILE_BYTES_MAX {
            // A log that was silent for long may be gone.
            ignore_missing(fs::rename(&self.path, self.path.with_extension("log.old")))?;
            self.file = File::create(&self.path)?;
            self.size = 0;
        }
        self.size += piece.len() as u64;
        self.file.write_all(piece)
    }
}

/// Removes logs beyond the bounds; answers the number and the bytes of those that stay.
fn remove_old_logs(directory: &Path, now: SystemTime) -> io::Result<(usize, u64)> {
    let mut logs = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        // Other jobs start concurrently and remove old files.
        if let Some(found) = ignore_missing(entry.metadata())? {
            logs.push((found.modified()?, found.len(), entry.path()));
        }
    }
    logs.sort_by(|one, other| other.cmp(one));
    let count_max = match logs.len() + LOGS_PER_JOB > LOGS_MAX {
        true => LOGS_KEPT,
        false => LOGS_MAX,
    };
    let (mut kept, mut bytes) = ((0, 0), 0);
    for (place, (changed, length, path)) in logs.into_iter().enumerate() {
        bytes += length;
        let age = now.duration_since(changed).unwrap_or_default();
        if place >= count_max || bytes > LOGS_BYTES_MAX || age > LOG_AGE_MAX {
            ignore_missing(fs::remove_file(path))?;
        } else {
            kept = (place + 1, bytes);
        }
    }
    Ok(kept)
}

/// The result for a file, `None` if it no longer exists.
fn ignore_missing<T>(done: io::Result<T>) -> io::Result<Option<T>> {
    match done {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        done => done.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_keeps_its_end_within_bounds() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("1.log");
        let mut log = AgentLog::open(path.clone(), &LogDirectory::default()).expect("open");
        for number in 0..2_000u32 {
            log.write(format!("{number:1023}\n").as_bytes())
                .expect("write");
        }
        let old = fs::read(path.with_extension("log.old")).expect("old");
        let new = fs::read(&path).expect("new");
        assert!(old.len() + new.len() <= 2 * LOG_FILE_BYTES_MAX as usize);
        assert!(new.ends_with(b"1999\n") && old.len() >= 500_000);
    }

    #[test]
    fn the_number_of_logs_is_bounded() {
        let directory = tempfile::tempdir().expect("directory");
        for number in 0..LOGS_MAX + 5 {
            fs::write(directory.path().join(format!("{number}.log")), b"").expect("write");
        }
        let logs = LogDirectory::default();
        drop(AgentLog::open(directory.path().join("new.log"), &logs).expect("open"));
        let count = || fs::read_dir(directory.path()).expect("list").count();
        assert_eq!(count(), LOGS_KEPT + 1);
        drop(AgentLog::open(directory.path().join("newer.log"), &logs).expect("open"));
        assert_eq!(count(), LOGS_KEPT + 2);
    }

    #[test]
    fn logs_are_counted_when_they_may_exceed_bounds() {
        let jobs_until_look = |left| {
            let logs = LogDirectory::default();
            let now = Time(1);
            assert!(logs.begin_job(now));
            logs.note_look(now, left);
            let mut jobs = 0;
            while !logs.begin_job(now) {
                jobs += 1;
            }
            jobs
        };
        assert_eq!(jobs_until_look((0, 0)), 85);
        assert_eq!(jobs_until_look((LOGS_MAX - 9, 0)), 2);
        assert_eq!(jobs_until_look((1, LOGS_BYTES_MAX)), 0);
        let logs = LogDirectory::default();
        logs.note_look(Time(1), (0, 0));
        assert!(!logs.begin_job(Time(LOOK_MS_MAX)) && logs.begin_job(Time(1 + LOOK_MS_MAX)));
    }

    /// The remaining bytes of each log, the oldest first, when a new log begins after so long.
    fn remaining_logs(lengths: &[u64], after: Duration) -> Vec<String> {
        let directory = tempfile::tempdir().expect("directory");
        let begin = SystemTime::UNIX_EPOCH + 10 * LOG_AGE_MAX;
        for (number, length) in lengths.iter().enumerate() {
            let log = File::create(directory.path().join(format!("{number}.log")));
            let log = log.expect("create");
            log.set_len(*length).expect("length");
            let changed = begin + Duration::from_secs(number as u64);
            log.set_modified(changed).expect("time");
        }
        remove_old_logs(directory.path(), begin + after).expect("remove");
        let left = fs::read_dir(directory.path()).expect("list");
        let name = |entry: io::Result<fs::DirEntry>| entry.expect("entry").file_name();
        let mut left: Vec<String> = left
            .map(|entry| name(entry).to_string_lossy().into_owned())
            .collect();
        left.sort();
        left
    }

    #[test]
    fn oldest_logs_are_removed_beyond_the_byte_limit() {
        let half = LOGS_BYTES_MAX / 2;
        let soon = Duration::from_secs(60);
        assert_eq!(remaining_logs(&[half, half], soon), ["0.log", "1.log"]);
        assert_eq!(
            remaining_logs(&[1, half, 0, half], soon),
            ["1.log", "2.log", "3.log"]
        );
        assert_eq!(remaining_logs(&[LOGS_BYTES_MAX + 1], soon), [""; 0]);
    }

    #[test]
    fn idle_logs_are_removed_after_their_maximum_age() {
        let before = LOG_AGE_MAX;
        let after = LOG_AGE_MAX + Duration::from_millis(500);
        assert_eq!(remaining_logs(&[1, 1], before), ["0.log", "1.log"]);
        assert_eq!(remaining_logs(&[1, 1], after), ["1.log"]);
    }

    #[test]
    fn a_removed_log_is_created_anew() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("1.log");
        let mut log = AgentLog::open(path.clone(), &LogDirectory::default()).expect("open");
        fs::remove_file(&path).expect("remove");
        log.write(&vec![b'x'; LOG_FILE_BYTES_MAX as usize])
            .expect("write");
        log.write(b"the end").expect("write");
        assert_eq!(fs::read(&path).expect("read"), b"the end");
    }
}
