//! Jobs whose output somebody follows while they run: who follows asks by a file, and the run
//! answers by files. Both are in the directory `followed` of the run's logs.
//!
//! A request is named for the process that asks (and numbered if it follows several jobs), has the
//! name of the job, and counts for ten
//! seconds. An answer has the name of the log that the attempt will have.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use bafs_proto::time::Time;

use super::job_logs::{ExecutionOutput, LoggedAttempt, create_directory, private_options};

/// The directory, in that of the logs.
const DIRECTORY: &str = "followed";

/// A request counts for so long, in milliseconds: who asks repeats it twice a second.
const REQUEST_LIFETIME_MS: u64 = 10_000;

/// Most jobs that are followed at once.
const FOLLOWED_MAX: usize = 16;

/// Longest name of a job that is read.
const NAME_BYTES_MAX: u64 = 4_096;

/// A wish to follow a job, withdrawn when this is dropped.
#[derive(Debug)]
pub struct FollowRequest {
    path: PathBuf,
    job: String,
}

impl FollowRequest {
    /// Asks the run that keeps these logs for the output of a job.
    ///
    /// # Errors
    /// What the disk answers.
    pub fn send(logs: &Path, job: &str) -> io::Result<Self> {
        Self::send_as(logs, job, std::process::id().to_string())
    }

    /// Asks for the output of a job as one of several that this process follows.
    ///
    /// # Errors
    /// What the disk answers.
    pub fn send_numbered(logs: &Path, job: &str, number: u64) -> io::Result<Self> {
        Self::send_as(logs, job, format!("{}-{number}", std::process::id()))
    }

    fn send_as(logs: &Path, job: &str, name: String) -> io::Result<Self> {
        let directory = logs.join(DIRECTORY);
        create_directory(&directory)?;
        let request = Self {
            path: directory.join(name),
            job: job.to_owned(),
        };
        request.repeat()?;
        Ok(request)
    }

    /// Asks once more.
    ///
    /// # Errors
    /// What the disk answers.
    pub fn repeat(&self) -> io::Result<()> {
        let mut options = private_options();
        let mut file = options.create(true).truncate(true).open(&self.path)?;
        file.write_all(self.job.as_bytes())
    }
}

impl Drop for FollowRequest {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// What a running attempt printed so far: standard output, then standard error.
///
/// # Errors
/// What the disk answers; nothing is there before the run answers.
pub fn read_followed(logs: &Path, job: &str, attempt: u32) -> io::Result<[Vec<u8>; 2]> {
    let paths = answer_paths(logs, job, attempt);
    let read = |path: &PathBuf| match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        read => read,
    };
    Ok([read(&paths[0])?, read(&paths[1])?])
}

/// The jobs that somebody follows. Old requests, and answers that nobody wants, are removed.
pub(crate) fn read_requests(logs: &Path, now: Time) -> BTreeSet<String> {
    let mut jobs = BTreeSet::new();
    // Mostly there is none.
    let Ok(entries) = fs::read_dir(logs.join(DIRECTORY)) else {
        return jobs;
    };
    let entries: Vec<_> = entries.flatten().collect();
    let is_fresh = |entry: &fs::DirEntry| {
        let changed = entry.metadata().and_then(|found| found.modified());
        let since = changed
            .ok()
            .and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        let at_ms = since.map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(0));
        at_ms.saturating_add(REQUEST_LIFETIME_MS) >= now.0
    };
    for entry in &entries {
        let is_request = entry.path().extension().is_none();
        match is_fresh(entry) {
            true if is_request && jobs.len() < FOLLOWED_MAX => {
                let is_short = entry.metadata().is_ok_and(|it| it.len() <= NAME_BYTES_MAX);
                jobs.extend(
                    is_short
                        .then(|| fs::read_to_string(entry.path()).ok())
                        .flatten(),
                );
            }
            true => {}
            false => drop(fs::remove_file(entry.path())),
        }
    }
    jobs
}

/// Shows what a running attempt printed so far.
///
/// # Errors
/// What the disk answers.
pub(crate) fn write_answer(
    logs: &Path,
    (job, attempt): (&str, u32),
    printed: &ExecutionOutput,
) -> io::Result<()> {
    let streams = [&printed.stdout, &printed.stderr];
    for (path, bytes) in answer_paths(logs, job, attempt).iter().zip(streams) {
        let draft = path.with_extension("new");
        let _ = fs::remove_file(&draft);
        let mut file = private_options().create_new(true).open(&draft)?;
        file.write_all(bytes)?;
        fs::rename(&draft, path)?;
    }
    Ok(())
}

fn answer_paths(logs: &Path, job: &str, attempt: u32) -> [PathBuf; 2] {
    LoggedAttempt::running(job.to_owned(), attempt).log_paths(&logs.join(DIRECTORY))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn now(of: &Path) -> Time {
        let changed = fs::metadata(of)
            .and_then(|it| it.modified())
            .expect("a file");
        let since = changed.duration_since(UNIX_EPOCH).expect("after 1970");
        Time(u64::try_from(since.as_millis()).expect("it fits"))
    }

    #[test]
    fn requests_count_for_ten_seconds() {
        let logs = tempfile::tempdir().expect("directory");
        let request = FollowRequest::send(logs.path(), "map.1").expect("request");
        let asked = now(&request.path);
        assert_eq!(
            read_requests(logs.path(), asked),
            ["map.1".to_owned()].into()
        );
        let late = asked.plus_ms(REQUEST_LIFETIME_MS + 1);
        assert!(read_requests(logs.path(), late).is_empty());
        assert!(!request.path.exists());
        let request = FollowRequest::send(logs.path(), "map.1").expect("request");
        drop(request);
        assert!(read_requests(logs.path(), asked).is_empty(), "withdrawn");
    }

    #[test]
    fn answers_are_read_as_written() {
        let logs = tempfile::tempdir().expect("directory");
        let _request = FollowRequest::send(logs.path(), "a").expect("request");
        let nothing = read_followed(logs.path(), "a", 2).expect("read");
        assert_eq!(nothing, [vec![0_u8; 0], Vec::new()]);
        for text in ["one", "one\ntwo"] {
            let printed = ExecutionOutput {
                stdout: text.into(),
                stderr: Vec::new(),
            };
            write_answer(logs.path(), ("a", 2), &printed).expect("write");
            let read = read_followed(logs.path(), "a", 2).expect("read");
            assert_eq!(read, [text.as_bytes().to_vec(), Vec::new()]);
        }
    }
}
