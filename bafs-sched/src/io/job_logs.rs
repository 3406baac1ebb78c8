//! What jobs printed, in files of a directory beside the journal of their run, and a list of them.
//! Bounded in all. Decides nothing about jobs.
//!
//! `JOB.ATTEMPT.out` and `JOB.ATTEMPT.err` have what is kept of standard output and standard error.
//! `index` has a line of JSON for the run and one for each attempt that ended.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use bafs_proto::hash::Digest;
use bafs_proto::ids::{ExecutionId, RunId, ServerId};
use bafs_proto::limits::JOB_LOG_BYTES_MAX;
use bafs_proto::message::{JobOutcome, JobReport, ReadJobOutput};
use bafs_proto::time::Deadline;
use bafs_proto::{Error, Result};
use serde::{Deserialize, Serialize};

use super::servers::Servers;
use crate::describe::describe_end;

/// Most bytes of all logs of a run: those of successful attempts go first, the oldest of them
/// first.
pub const LOGS_BYTES_MAX: u64 = 256 << 20;

/// Most files of all logs of a run.
pub const LOG_FILES_MAX: usize = 20_000;

/// A node may take so long to tell what an execution printed, in milliseconds.
const READ_TIMEOUT_MS: u64 = 10_000;

const INDEX_FILE: &str = "index";

/// Linux takes no longer name of a file.
const FILE_NAME_BYTES_MAX: usize = 255;

/// Bytes of `.out`, and of `.err`.
const ENDING_BYTES: usize = 4;

/// So many characters of the digest of a long name tell it from others.
const DIGEST_CHARS: usize = 16;

/// Of which run the logs are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct IndexHeader {
    run: RunId,
}

/// A line of the list: what it says of earlier attempts of a job is no longer so.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct ForgottenJob {
    forgotten_job: String,
}

/// An execution that has ended, and what is to be kept of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndedAttempt {
    /// Which.
    pub execution: ExecutionId,
    /// Where it was.
    pub server: ServerId,
    /// Which attempt of its job, and how it ended.
    pub attempt: LoggedAttempt,
}

/// One attempt that ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoggedAttempt {
    /// Name of the job.
    pub job: String,
    /// Which attempt of those that ended, from 1 on.
    pub attempt: u32,
    /// Name of its node.
    pub node: String,
    /// How it ended, as the rest of a sentence that begins with its name.
    pub end_description: String,
    /// Whether it failed.
    pub has_failed: bool,
    /// So many bytes are kept of standard output,
    pub stdout_bytes: u64,
    /// and so many of standard error.
    pub stderr_bytes: u64,
    /// Why nothing is kept, if so.
    pub missing_reason: Option<String>,
}

impl LoggedAttempt {
    /// An attempt of a job of this name, which ended as the report says.
    pub(crate) fn new(job: String, attempt: u32, node: String, report: &JobReport) -> Self {
        Self {
            job,
            attempt,
            node,
            end_description: describe_end(report),
            has_failed: report.outcome != JobOutcome::Exited(0),
            stdout_bytes: 0,
            stderr_bytes: 0,
            missing_reason: None,
        }
    }

    /// An attempt that has not ended.
    pub(super) fn running(job: String, attempt: u32) -> Self {
        Self {
            job,
            attempt,
            node: String::new(),
            end_description: String::new(),
            has_failed: false,
            stdout_bytes: 0,
            stderr_bytes: 0,
            missing_reason: None,
        }
    }

    /// Where its standard output is kept, and its standard error.
    #[must_use]
    pub fn log_paths(&self, directory: &Path) -> [PathBuf; 2] {
        ["out", "err"].map(|ending| {
            let name = format!("{}.{ending}", self.file_stem());
            directory.join(name)
        })
    }

    /// The name of its files without the ending: of a job whose name is too long for that its
    /// beginning, and what tells it from others.
    fn file_stem(&self) -> String {
        let stem = format!("{}.{}", self.job, self.attempt);
        if stem.len() + ENDING_BYTES <= FILE_NAME_BYTES_MAX {
            return stem;
        }
        let digest = Digest::of(self.job.as_bytes()).to_string();
        let tail = format!("-{}.{}", &digest[..DIGEST_CHARS], self.attempt);
        let most = FILE_NAME_BYTES_MAX - ENDING_BYTES - tail.len();
        let end = (0..=most).rev().find(|end| self.job.is_char_boundary(*end));
        format!("{}{tail}", &self.job[..end.unwrap_or(0)])
    }
}

/// What an execution printed, as its node keeps it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ExecutionOutput {
    pub(super) stdout: Vec<u8>,
    pub(super) stderr: Vec<u8>,
}

impl Servers {
    /// Asks a node what an execution printed; one that runs, so far.
    pub(crate) async fn read_output(
        &self,
        address: &str,
        execution: ExecutionId,
    ) -> Result<ExecutionOutput> {
        let call = ReadJobOutput { execution };
        let deadline = Deadline::after_ms(READ_TIMEOUT_MS);
        let token = self.make_call_token(address, call.into(), READ_TIMEOUT_MS)?;
        let body = bytes::Bytes::new();
        let asked = self
            .pool
            .call_with_body(address, &token, call, body, deadline);
        let (told, mut stdout) = asked.await?;
        let length = stdout.len().min(told.stdout_bytes as usize);
        let mut stderr = stdout.split_off(length);
        // Whatever the node sends: no more is kept of a stream.
        stdout.truncate(JOB_LOG_BYTES_MAX);
        stderr.truncate(JOB_LOG_BYTES_MAX);
        Ok(ExecutionOutput {
            stdout: stdout.into(),
            stderr: stderr.into(),
        })
    }
}

/// A log that takes room.
#[derive(Debug)]
struct StoredLog {
    files: Vec<PathBuf>,
    bytes: u64,
}

/// The logs of a run that goes on.
#[derive(Debug)]
pub(crate) struct JobLogs {
    directory: PathBuf,
    index: File,
    /// What takes room, of attempts that succeeded and of those that failed, the oldest first.
    succeeded: VecDeque<StoredLog>,
    failed: VecDeque<StoredLog>,
    bytes: u64,
    files: usize,
    bytes_max: u64,
    files_max: usize,
    /// Attempts that are listed.
    listed_attempts: BTreeSet<(String, u32)>,
    /// Those of earlier runs of jobs that have not run since, with their files.
    earlier: BTreeMap<String, Vec<PathBuf>>,
}

impl JobLogs {
    /// The logs of a run in a directory, which is made. Those of earlier runs stay as long as their
    /// jobs do not run again, within the same bounds.
    ///
    /// # Errors
    /// What the disk answers; `WouldBlock` when another run has them open.
    pub(crate) fn open(directory: &Path, run: RunId) -> io::Result<Self> {
        create_directory(directory)?;
        let mut index = private_options()
            .read(true)
            .create(true)
            .open(directory.join(INDEX_FILE))?;
        index.try_lock().map_err(|error| match error {
            TryLockError::WouldBlock => io::Error::new(
                io::ErrorKind::WouldBlock,
                "another run keeps its logs there",
            ),
            TryLockError::Error(error) => error,
        })?;
        let (heading, attempts) = parse_index(&index)?;
        let mut logs = Self {
            directory: directory.to_owned(),
            index: index.try_clone()?,
            succeeded: VecDeque::new(),
            failed: VecDeque::new(),
            bytes: 0,
            files: 0,
            bytes_max: LOGS_BYTES_MAX,
            files_max: LOG_FILES_MAX,
            listed_attempts: BTreeSet::new(),
            earlier: BTreeMap::new(),
        };
        attempts
            .iter()
            .for_each(|attempt| logs.count_attempt(attempt));
        if heading.is_some_and(|heading| heading.run == run) {
            // The last line may be torn.
            index.seek(SeekFrom::End(0))?;
            index.write_all(b"\n")?;
        } else {
            index.set_len(0)?;
            index.seek(SeekFrom::Start(0))?;
            logs.append_to_index(&IndexHeader { run })?;
            for attempt in attempts {
                logs.append_to_index(&attempt)?;
                let files = attempt.log_paths(directory);
                logs.earlier.entry(attempt.job).or_default().extend(files);
            }
            logs.listed_attempts.clear();
        }
        Ok(logs)
    }

    /// Whether an attempt is listed.
    pub(crate) fn has_attempt(&self, job: &str, attempt: u32) -> bool {
        self.listed_attempts.contains(&(job.to_owned(), attempt))
    }

    /// Keeps what an attempt printed, or why that is not known.
    ///
    /// # Errors
    /// What the disk answers.
    pub(crate) fn store_output(
        &mut self,
        mut attempt: LoggedAttempt,
        printed: Result<ExecutionOutput>,
    ) -> io::Result<()> {
        if let Some(files) = self.earlier.remove(&attempt.job) {
            files.iter().for_each(|file| remove_log(file));
            self.forget_files(&files);
            let forgotten_job = attempt.job.clone();
            self.append_to_index(&ForgottenJob { forgotten_job })?;
        }
        match printed {
            Ok(printed) => {
                let written = self.write_output(&attempt, &printed);
                (attempt.stdout_bytes, attempt.stderr_bytes) =
                    (printed.stdout.len() as u64, printed.stderr.len() as u64);
                if let Err(error) = written {
                    attempt.missing_reason = Some(format!("it could not be written: {error}"));
                }
            }
            Err(error) => attempt.missing_reason = Some(describe_missing(&attempt, &error)),
        }
        self.append_to_index(&attempt)?;
        self.count_attempt(&attempt);
        self.evict_logs();
        Ok(())
    }

    fn write_output(&self, attempt: &LoggedAttempt, printed: &ExecutionOutput) -> io::Result<()> {
        let streams = [&printed.stdout, &printed.stderr];
        for (path, bytes) in attempt.log_paths(&self.directory).iter().zip(streams) {
            if !bytes.is_empty() {
                // What has the name, as a link to elsewhere, is not written through.
                remove_log(path);
                private_options()
                    .create_new(true)
                    .open(path)?
                    .write_all(bytes)?;
            }
        }
        Ok(())
    }

    fn append_to_index(&mut self, line: &impl Serialize) -> io::Result<()> {
        let mut line = serde_json::to_vec(line)?;
        line.push(b'\n');
        self.index.write_all(&line)
    }

    fn count_attempt(&mut self, attempt: &LoggedAttempt) {
        self.listed_attempts
            .insert((attempt.job.clone(), attempt.attempt));
        let files = attempt.log_paths(&self.directory).into_iter();
        let bytes = [attempt.stdout_bytes, attempt.stderr_bytes];
        let kept = files.zip(bytes).filter(|(_, bytes)| *bytes > 0);
        let files: Vec<PathBuf> = kept.map(|(file, _)| file).collect();
        if files.is_empty() || !files.iter().any(|file| file.exists()) {
            return;
        }
        let kept = StoredLog {
            bytes: bytes.iter().sum(),
            files,
        };
        self.bytes += kept.bytes;
        self.files += kept.files.len();
        match attempt.has_failed {
            true => self.failed.push_back(kept),
            false => self.succeeded.push_back(kept),
        }
    }

    /// These files take no room any more.
    fn forget_files(&mut self, gone: &[PathBuf]) {
        let gone: BTreeSet<&PathBuf> = gone.iter().collect();
        let (bytes, files) = (&mut self.bytes, &mut self.files);
        for kept in [&mut self.succeeded, &mut self.failed] {
            kept.retain(|log| {
                let is_gone = log.files.iter().any(|file| gone.contains(file));
                if is_gone {
                    *bytes -= log.bytes;
                    *files -= log.files.len();
                }
                !is_gone
            });
        }
    }

    /// Removes logs until the rest is within the bounds.
    fn evict_logs(&mut self) {
        while self.bytes > self.bytes_max || self.files > self.files_max {
            let oldest = self.succeeded.pop_front();
            let Some(gone) = oldest.or_else(|| self.failed.pop_front()) else {
                return;
            };
            self.bytes -= gone.bytes;
            self.files -= gone.files.len();
            gone.files.iter().for_each(|file| remove_log(file));
        }
    }
}

/// Opens what only its owner reads.
pub(super) fn private_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.write(true).mode(0o600);
    options
}

/// Makes the directory, or takes one that is ours: what another one put there might lead elsewhere.
/// One with files in it that are no logs keeps the rights that its owner gave it; the logs in it
/// are readable to him alone all the same.
pub(super) fn create_directory(directory: &Path) -> io::Result<()> {
    match DirBuilder::new().mode(0o700).create(directory) {
        Ok(()) => return Ok(()),
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        Err(_) => {}
    }
    let (there, own) = (
        fs::symlink_metadata(directory)?,
        fs::metadata("/proc/self")?.uid(),
    );
    if !there.is_dir() || there.uid() != own {
        return Err(io::Error::other("it is no directory of yours"));
    }
    Ok(())
}

fn remove_log(path: &Path) {
    if let Err(error) = fs::remove_file(path)
        && error.kind() != io::ErrorKind::NotFound
    {
        tracing::warn!(path = %path.display(), %error, "an old log of a job is not removed");
    }
}

fn describe_missing(attempt: &LoggedAttempt, error: &Error) -> String {
    format!("node {} did not tell it: {error}", attempt.node)
}

/// What the list of a directory says; lines that are torn say nothing.
fn parse_index(index: &File) -> io::Result<(Option<IndexHeader>, Vec<LoggedAttempt>)> {
    // A torn line may end within a character.
    let mut lines = BufReader::new(index).split(b'\n');
    let heading = lines.next().transpose()?;
    let heading = heading.and_then(|line| serde_json::from_slice(&line).ok());
    let mut attempts = Vec::new();
    let mut forgotten: BTreeMap<String, usize> = BTreeMap::new();
    for line in lines {
        let line = line?;
        if let Ok(attempt) = serde_json::from_slice::<LoggedAttempt>(&line) {
            attempts.push(attempt);
        } else if let Ok(line) = serde_json::from_slice::<ForgottenJob>(&line) {
            forgotten.insert(line.forgotten_job, attempts.len());
        }
    }
    let kept = attempts.into_iter().enumerate();
    let kept = kept.filter(|(at, attempt)| {
        let since = forgotten.get(&attempt.job);
        since.is_none_or(|since| at >= since)
    });
    Ok((heading, kept.map(|(_, attempt)| attempt).collect()))
}

/// All attempts that a directory has logs of, in the order in which they came.
///
/// # Errors
/// What the disk answers.
pub fn read_index(directory: &Path) -> io::Result<Vec<LoggedAttempt>> {
    Ok(parse_index(&File::open(directory.join(INDEX_FILE))?)?.1)
}

/// Whether a run that goes on keeps its logs in a directory.
///
/// # Errors
/// What the disk answers.
pub fn is_in_use(directory: &Path) -> io::Result<bool> {
    let index = match File::open(directory.join(INDEX_FILE)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        opened => opened?,
    };
    match index.try_lock() {
        Ok(()) => Ok(false),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    fn test_attempt(job: &str, has_failed: bool) -> LoggedAttempt {
        LoggedAttempt {
            job: job.to_owned(),
            attempt: 1,
            node: "n1".to_owned(),
            end_description: "is done".to_owned(),
            has_failed,
            stdout_bytes: 0,
            stderr_bytes: 0,
            missing_reason: None,
        }
    }

    fn output_of_size(bytes: usize) -> Result<ExecutionOutput> {
        Ok(ExecutionOutput {
            stdout: vec![b'x'; bytes],
            stderr: Vec::new(),
        })
    }

    /// Names of the logs that are there.
    fn stored_names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).expect("list");
        let name = |entry: io::Result<fs::DirEntry>| {
            entry
                .expect("entry")
                .file_name()
                .to_string_lossy()
                .into_owned()
        };
        let mut names: Vec<String> = entries
            .map(name)
            .filter(|name| name != INDEX_FILE)
            .collect();
        names.sort();
        names
    }

    #[test]
    fn logs_of_successful_jobs_are_deleted_first() {
        let directory = tempfile::tempdir().expect("directory");
        let mut logs = JobLogs::open(directory.path(), RunId(1)).expect("open");
        logs.bytes_max = 30;
        for (job, has_failed) in [
            ("bad", true),
            ("old", false),
            ("new", false),
            ("last", true),
        ] {
            let kept = logs.store_output(test_attempt(job, has_failed), output_of_size(10));
            kept.expect("keep");
        }
        let left = ["bad.1.out", "last.1.out", "new.1.out"];
        assert_eq!(stored_names(directory.path()), left);
        logs.files_max = 1;
        logs.store_output(test_attempt("empty", false), output_of_size(0))
            .expect("keep");
        assert_eq!(
            stored_names(directory.path()),
            ["last.1.out"],
            "the oldest failure goes last"
        );
        assert_eq!(read_index(directory.path()).expect("index").len(), 5);
    }

    #[test]
    fn resumed_run_keeps_its_logs_and_bounds() {
        let directory = tempfile::tempdir().expect("directory");
        let open = |run| JobLogs::open(directory.path(), RunId(run));
        let mut logs = open(1).expect("open");
        assert!(open(1).is_err(), "two runs write one list");
        logs.store_output(test_attempt("a", false), output_of_size(10))
            .expect("keep");
        logs.index
            .write_all(b"{\"job\": \"to\xc3")
            .expect("a torn line");
        drop(logs);
        let mut logs = open(1).expect("open");
        assert!(logs.has_attempt("a", 1) && !logs.has_attempt("a", 2));
        assert_eq!((logs.bytes, logs.files), (10, 1));
        logs.store_output(test_attempt("b", true), output_of_size(5))
            .expect("keep");
        drop(logs);
        assert_eq!(read_index(directory.path()).expect("index").len(), 2);
        let own = directory.path().join("mine");
        fs::write(&own, "of the user").expect("write");
        let logs = open(2).expect("open");
        assert!(!logs.has_attempt("a", 1));
        let left = ["a.1.out", "b.1.out", "mine"];
        assert_eq!(stored_names(directory.path()), left);
    }

    #[test]
    fn job_that_runs_again_replaces_its_logs() {
        let directory = tempfile::tempdir().expect("directory");
        let open = |run| JobLogs::open(directory.path(), RunId(run)).expect("open");
        let mut logs = open(1);
        for attempt in [1, 2] {
            let attempt = LoggedAttempt {
                attempt,
                ..test_attempt("a", true)
            };
            logs.store_output(attempt, output_of_size(10))
                .expect("keep");
        }
        logs.store_output(test_attempt("b", true), output_of_size(10))
            .expect("keep");
        drop(logs);
        let mut logs = open(2);
        logs.store_output(test_attempt("a", false), output_of_size(3))
            .expect("keep");
        assert_eq!(stored_names(directory.path()), ["a.1.out", "b.1.out"]);
        drop(logs);
        drop(open(3));
        let listed = read_index(directory.path()).expect("index");
        let listed: Vec<_> = listed.iter().map(|it| (&*it.job, it.has_failed)).collect();
        assert_eq!(listed, [("b", true), ("a", false)]);
    }

    #[test]
    fn logs_of_long_job_names_are_kept() {
        let directory = tempfile::tempdir().expect("directory");
        let mut logs = JobLogs::open(directory.path(), RunId(1)).expect("open");
        let names = ["x", "y"].map(|end| "\u{e4}".repeat(127) + end);
        for name in &names {
            let attempt = test_attempt(name, true);
            logs.store_output(attempt, output_of_size(3)).expect("keep");
        }
        let stored = stored_names(directory.path());
        assert_eq!(stored.len(), 2, "{stored:?}");
        assert!(
            stored.iter().all(|name| name.len() <= FILE_NAME_BYTES_MAX),
            "{stored:?}"
        );
        let kept = read_index(directory.path()).expect("index");
        let is_there = |it: &LoggedAttempt| it.log_paths(directory.path())[0].exists();
        assert!(
            kept.iter()
                .all(|it| it.missing_reason.is_none() && is_there(it)),
            "{kept:?}"
        );
    }

    #[test]
    fn user_directory_keeps_its_mode() {
        let parent = tempfile::tempdir().expect("directory");
        let directory = parent.path().join("w.bafs.logs");
        fs::create_dir(&directory).expect("directory");
        let shared = fs::Permissions::from_mode(0o755);
        fs::set_permissions(&directory, shared).expect("chmod");
        JobLogs::open(&directory, RunId(1)).expect("open");
        assert_eq!(
            fs::metadata(&directory).expect("there").mode() & 0o777,
            0o755
        );
    }

    #[test]
    fn logs_are_private() {
        let parent = tempfile::tempdir().expect("directory");
        let directory = parent.path().join("w.bafs.logs");
        let mut logs = JobLogs::open(&directory, RunId(1)).expect("open");
        logs.store_output(test_attempt("a", true), output_of_size(3))
            .expect("keep");
        let mode = |path: &Path| fs::metadata(path).expect("there").mode() & 0o777;
        assert_eq!(mode(&directory), 0o700);
        assert_eq!(mode(&directory.join("a.1.out")), 0o600);
        assert_eq!(mode(&directory.join(INDEX_FILE)), 0o600);
        let link = parent.path().join("link");
        std::os::unix::fs::symlink(&directory, &link).expect("link");
        assert!(JobLogs::open(&link, RunId(1)).is_err());
    }
}
