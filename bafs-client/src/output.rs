//! Keeps the beginning and the end of what a job prints, on pipes or into files of its volumes: for
//! messages, and as logs of the job. Interprets nothing.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use bafs_proto::limits::{JOB_LOG_HEAD_BYTES, JOB_LOG_TAIL_BYTES};
use nix::fcntl::OFlag;
use nix::unistd::pipe2;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2};
use tokio::sync::watch;

use crate::limits::OUTPUT_TAIL_BYTES;

/// How long the end of a job's output is waited for, once the job is over.
const OUTPUT_END_TIMEOUT: Duration = Duration::from_secs(2);

/// How long the files that took a job's output may take to be read: their server may be away.
const FILE_READ_TIMEOUT: Duration = Duration::from_secs(10);

/// How old what is shown of a running job's output may be.
const SNAPSHOT_INTERVAL: Duration = Duration::from_secs(1);

/// Pause after a look at the pipes that the kernel had no memory for.
const NO_MEMORY_PAUSE: Duration = Duration::from_millis(10);

/// Standard output, then standard error.
const STREAM_COUNT: usize = 2;

/// Beginning and end of one stream.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct HeadTail {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    /// All bytes of the stream.
    total_bytes: u64,
}

impl HeadTail {
    fn push(&mut self, bytes: &[u8]) {
        self.total_bytes += bytes.len() as u64;
        let room = JOB_LOG_HEAD_BYTES - self.head.len();
        let (first, rest) = bytes.split_at(room.min(bytes.len()));
        self.head.extend(first);
        push_bounded(&mut self.tail, rest, JOB_LOG_TAIL_BYTES);
    }

    /// Of a file, which nobody writes any more.
    fn of_file(file: &File) -> io::Result<Self> {
        let length = file.metadata()?.len();
        let mut head = vec![0; JOB_LOG_HEAD_BYTES.min(saturating_length(length))];
        file.read_exact_at(&mut head, 0)?;
        let rest = length - head.len() as u64;
        let mut tail = vec![0; JOB_LOG_TAIL_BYTES.min(saturating_length(rest))];
        let start = length - tail.len() as u64;
        file.read_exact_at(&mut tail, start)?;
        Ok(Self {
            head,
            tail: tail.into(),
            total_bytes: length,
        })
    }

    /// What of it is kept, with a line where the middle is missing.
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.head.clone();
        let left_out = self.total_bytes - (self.head.len() + self.tail.len()) as u64;
        if left_out > 0 {
            bytes.extend(format!("\n[... {left_out} bytes left out ...]\n").bytes());
        }
        bytes.extend(&self.tail);
        bytes
    }
}

fn saturating_length(length: u64) -> usize {
    usize::try_from(length).unwrap_or(usize::MAX)
}

/// Adds bytes to the end of what is kept; what was first goes where that is too much.
fn push_bounded(buffer: &mut VecDeque<u8>, bytes: &[u8], most: usize) {
    let bytes = &bytes[bytes.len().saturating_sub(most)..];
    let excess = (buffer.len() + bytes.len()).saturating_sub(most);
    buffer.drain(..excess);
    buffer.extend(bytes);
}

/// What a job printed, as far as it is kept.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CapturedOutput {
    /// Beginning and end of standard output.
    pub stdout: Vec<u8>,
    /// The same of standard error.
    pub stderr: Vec<u8>,
}

impl CapturedOutput {
    /// Leaves it in files that begin with `prefix`; none where nothing was printed. Whoever reads
    /// them meanwhile sees a file of before, or a whole one.
    ///
    /// # Errors
    /// What the disk answers.
    pub fn write(&self, prefix: &Path) -> io::Result<()> {
        for (ending, bytes) in [("out", &self.stdout), ("err", &self.stderr)] {
            if bytes.is_empty() {
                continue;
            }
            let draft = prefix.with_extension(format!("{ending}.new"));
            OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&draft)?
                .write_all(bytes)?;
            fs::rename(draft, prefix.with_extension(ending))?;
        }
        Ok(())
    }
}

/// A file of a volume that takes one of a job's streams.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OutputFile {
    /// Where this process sees the volume.
    pub(crate) volume: PathBuf,
    /// The file's path in it.
    pub(crate) path: PathBuf,
}

impl OutputFile {
    /// Opens it without leaving its volume, and without waiting for a writer of a pipe that a job
    /// put there.
    fn open(&self) -> io::Result<File> {
        let directory = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let volume = openat(CWD, &self.volume, directory, Mode::empty())?;
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let within = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let file = File::from(openat2(volume, &self.path, flags, Mode::empty(), within)?);
        match file.metadata()?.is_file() {
            true => Ok(file),
            false => Err(io::Error::other("it is no longer a regular file")),
        }
    }

    async fn read(self) -> Option<HeadTail> {
        let path = self.path.display().to_string();
        let reading = tokio::task::spawn_blocking(move || HeadTail::of_file(&self.open()?));
        let why = match tokio::time::timeout(FILE_READ_TIMEOUT, reading).await {
            Ok(Ok(Ok(read))) => return Some(read),
            Ok(Ok(Err(error))) => error.to_string(),
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("it did not appear within {} s", FILE_READ_TIMEOUT.as_secs()),
        };
        tracing::warn!(path, why, "cannot read an output file of the job");
        None
    }
}

/// What a job prints on pipes. Cheap to clone; clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct OutputCollector(Arc<CollectedOutput>);

#[derive(Debug, Default)]
struct CollectedOutput {
    streams: Mutex<CollectedStreams>,
    /// Whether nobody has the output open any more, and all of it came.
    is_complete: watch::Sender<bool>,
}

#[derive(Debug, Default)]
struct CollectedStreams {
    streams: [HeadTail; STREAM_COUNT],
    /// The end of both together, as they came.
    tail: VecDeque<u8>,
}

impl OutputCollector {
    /// Takes what is written to the returned descriptors, standard output and standard error,
    /// until their last copies close.
    pub(crate) fn collect() -> io::Result<(Self, [OwnedFd; STREAM_COUNT])> {
        let (from_stdout, stdout) = pipe2(OFlag::O_CLOEXEC)?;
        let (from_stderr, stderr) = pipe2(OFlag::O_CLOEXEC)?;
        let collector = Self::default();
        let filled = collector.clone();
        thread::Builder::new()
            .name("bafs-output".to_owned())
            .spawn(move || {
                filled.drain(vec![(0, from_stdout.into()), (1, from_stderr.into())]);
                filled.0.is_complete.send_replace(true);
            })?;
        Ok((collector, [stdout, stderr]))
    }

    /// One thread for both: what comes at about the same time stays in order.
    fn drain(&self, mut open: Vec<(usize, File)>) {
        let mut piece = vec![0; OUTPUT_TAIL_BYTES];
        while !open.is_empty() {
            let watched = open
                .iter()
                .map(|(_, pipe)| PollFd::new(pipe, PollFlags::IN));
            let mut watched: Vec<PollFd<'_>> = watched.collect();
            if poll(&mut watched, None).is_err() {
                // It passes; a pipe that nobody empties would stop the job.
                thread::sleep(NO_MEMORY_PAUSE);
                continue;
            }
            let is_ready = watched.iter().map(|pipe| !pipe.revents().is_empty());
            let mut is_ready = is_ready.collect::<Vec<_>>().into_iter();
            open.retain_mut(|(stream, pipe)| {
                if is_ready.next() != Some(true) {
                    return true;
                }
                match pipe.read(&mut piece) {
                    Ok(length @ 1..) => {
                        self.push(*stream, &piece[..length]);
                        true
                    }
                    Err(error) => error.kind() == io::ErrorKind::Interrupted,
                    Ok(0) => false,
                }
            });
        }
    }

    fn push(&self, stream: usize, bytes: &[u8]) {
        let kept = self.0.streams.lock();
        let mut kept = kept.unwrap_or_else(PoisonError::into_inner);
        kept.streams[stream].push(bytes);
        push_bounded(&mut kept.tail, bytes, OUTPUT_TAIL_BYTES);
    }

    /// Leaves what came so far in files that begin with `prefix`, again and again, as long as
    /// nobody stops it. What a job writes into files of its volumes is not in it.
    pub(crate) async fn write_while_running(&self, prefix: &Path) {
        let mut written_bytes = 0;
        loop {
            tokio::time::sleep(SNAPSHOT_INTERVAL).await;
            let (snapshot, bytes) = self.snapshot();
            if bytes == written_bytes {
                continue;
            }
            // Some 512 KiB at most, and not synced: it takes less than a turn of the scheduler.
            if let Err(error) = snapshot.write(prefix) {
                tracing::debug!(%error, "the output so far is not shown");
            }
            written_bytes = bytes;
        }
    }

    /// What came so far, and how many bytes that was in all.
    fn snapshot(&self) -> (CapturedOutput, u64) {
        let kept = self.0.streams.lock();
        let kept = kept.unwrap_or_else(PoisonError::into_inner);
        let [stdout, stderr] = &kept.streams;
        let bytes = stdout.total_bytes + stderr.total_bytes;
        let snapshot = CapturedOutput {
            stdout: stdout.bytes(),
            stderr: stderr.bytes(),
        };
        (snapshot, bytes)
    }

    /// What a job that is over printed, and its last words, at most 64 KiB; bytes that are no text
    /// are replaced there. `stream_files` are files that took a stream in place of the pipe; their
    /// last words are told of a job that failed.
    pub(crate) async fn finish(
        &self,
        stream_files: [Option<OutputFile>; STREAM_COUNT],
        has_failed: bool,
    ) -> (CapturedOutput, String) {
        let [stdout, stderr] = stream_files;
        let is_named = stdout.is_some() || stderr.is_some();
        // What went to one file is told once.
        let stderr_apart = stderr.filter(|file| Some(file) != stdout.as_ref());
        let mut files = Vec::new();
        for file in [stdout, stderr_apart] {
            files.push(match file {
                Some(file) => file.read().await,
                None => None,
            });
        }
        // On a busy machine the thread above may be behind. Who was started otherwise than by the
        // job may keep its output open for as long as it likes.
        let mut whole = self.0.is_complete.subscribe();
        let _ =
            tokio::time::timeout(OUTPUT_END_TIMEOUT, whole.wait_for(|is_whole| *is_whole)).await;
        let kept = self.0.streams.lock();
        let kept = kept.unwrap_or_else(PoisonError::into_inner);
        let each = files.iter().zip(&kept.streams);
        let each: Vec<Vec<u8>> = each
            .map(|(file, piped)| file.as_ref().unwrap_or(piped).bytes())
            .collect();
        let mut tail = kept.tail.clone();
        if is_named && has_failed {
            tail.clear();
            // Of both the end of standard error is told last: there is why it failed.
            for bytes in &each {
                if tail.back().is_some_and(|last| *last != b'\n') && !bytes.is_empty() {
                    tail.push_back(b'\n');
                }
                push_bounded(&mut tail, bytes, OUTPUT_TAIL_BYTES);
            }
        }
        let tail: Vec<u8> = tail.into();
        let mut each = each.into_iter();
        let printed = CapturedOutput {
            stdout: each.next().unwrap_or_default(),
            stderr: each.next().unwrap_or_default(),
        };
        (printed, String::from_utf8_lossy(&tail).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: [Option<OutputFile>; STREAM_COUNT] = [None, None];

    #[test]
    fn buffer_keeps_head_and_tail() {
        let mut kept = HeadTail::default();
        let all: Vec<u8> = (0..600_000u32).map(|at| (at % 251) as u8).collect();
        for piece in all.chunks(7_001) {
            kept.push(piece);
        }
        let bytes = kept.bytes();
        let left_out = all.len() - JOB_LOG_HEAD_BYTES - JOB_LOG_TAIL_BYTES;
        let line = format!("\n[... {left_out} bytes left out ...]\n");
        assert_eq!(bytes[..JOB_LOG_HEAD_BYTES], all[..JOB_LOG_HEAD_BYTES]);
        let (middle, tail) = bytes[JOB_LOG_HEAD_BYTES..].split_at(line.len());
        assert_eq!(middle, line.as_bytes());
        assert_eq!(tail, &all[all.len() - JOB_LOG_TAIL_BYTES..]);
    }

    #[test]
    fn buffer_keeps_short_output_whole() {
        let all = vec![b'x'; JOB_LOG_HEAD_BYTES + JOB_LOG_TAIL_BYTES];
        for length in [0, 1, JOB_LOG_HEAD_BYTES, JOB_LOG_HEAD_BYTES + 1, all.len()] {
            let mut kept = HeadTail::default();
            kept.push(&all[..length]);
            assert_eq!(kept.bytes(), all[..length], "{length} bytes");
        }
    }

    #[tokio::test]
    async fn output_appears_while_the_job_runs() {
        let directory = tempfile::tempdir().unwrap();
        let prefix = directory.path().join("execution");
        let (collector, [stdout, _stderr]) = OutputCollector::collect().unwrap();
        let shown = collector.clone();
        let showing = {
            let prefix = prefix.clone();
            tokio::spawn(async move { shown.write_while_running(&prefix).await })
        };
        let mut job = File::from(stdout);
        for text in ["one\n", "one\ntwo\n"] {
            job.write_all(&text.as_bytes()[text.len() - 4..]).unwrap();
            let file = prefix.with_extension("out");
            for _ in 0..100 {
                if fs::read_to_string(&file).is_ok_and(|read| read == text) {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
            assert_eq!(fs::read_to_string(&file).unwrap(), text);
        }
        showing.abort();
        assert!(
            !prefix.with_extension("err").exists(),
            "nothing was printed there"
        );
    }

    #[test]
    fn files_are_truncated_like_pipes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("log");
        let all: Vec<u8> = (0..700_000u32).map(|at| (at % 241) as u8).collect();
        for length in [0, 1, 70_000, 300_000, all.len()] {
            fs::write(&path, &all[..length]).unwrap();
            let mut piped = HeadTail::default();
            piped.push(&all[..length]);
            let read = HeadTail::of_file(&File::open(&path).unwrap()).unwrap();
            assert!(read == piped, "{length} bytes");
        }
    }

    #[tokio::test]
    async fn output_is_collected_per_stream_and_combined() {
        let (collector, [stdout, stderr]) = OutputCollector::collect().unwrap();
        let (mut stdout, mut stderr) = (File::from(stdout), File::from(stderr));
        stdout.write_all(b"out\n").unwrap();
        drop(stdout);
        thread::sleep(Duration::from_millis(100));
        stderr.write_all(b"err\n").unwrap();
        drop(stderr);
        let (printed, tail) = collector.finish(NONE, true).await;
        assert_eq!(
            (&printed.stdout[..], &printed.stderr[..]),
            (&b"out\n"[..], &b"err\n"[..])
        );
        assert_eq!(tail, "out\nerr\n");
    }

    #[tokio::test]
    async fn the_collector_waits_for_the_output_tail() {
        let (collector, [stdout, stderr]) = OutputCollector::collect().unwrap();
        drop(stderr);
        let job = thread::spawn(move || {
            let mut to = File::from(stdout);
            to.write_all(&vec![b'x'; 3 * OUTPUT_TAIL_BYTES]).unwrap();
            to.write_all(b"the end\xff").unwrap();
        });
        let (_, text) = collector.finish(NONE, true).await;
        job.join().unwrap();
        assert!(text.ends_with("the end\u{fffd}"));
        assert_eq!(text.len(), OUTPUT_TAIL_BYTES + '\u{fffd}'.len_utf8() - 1);
    }

    #[tokio::test]
    async fn the_collector_ignores_streams_held_open() {
        let (collector, [stdout, _stderr]) = OutputCollector::collect().unwrap();
        let mut kept = File::from(stdout);
        kept.write_all(b"before").unwrap();
        assert_eq!(collector.finish(NONE, true).await.1, "before");
    }

    fn output_file(volume: &Path, path: &str) -> Option<OutputFile> {
        Some(OutputFile {
            volume: volume.to_owned(),
            path: path.into(),
        })
    }

    #[tokio::test]
    async fn a_failed_job_reports_its_log_tail() {
        let volume = tempfile::tempdir().unwrap();
        fs::write(volume.path().join("log.out"), "progress").unwrap();
        fs::write(volume.path().join("log.err"), "why\n").unwrap();
        let (collector, _) = OutputCollector::collect().unwrap();
        let files = || {
            [
                output_file(volume.path(), "log.out"),
                output_file(volume.path(), "log.err"),
            ]
        };
        let (printed, tail) = collector.finish(files(), true).await;
        assert_eq!(tail, "progress\nwhy\n");
        assert_eq!(printed.stderr, b"why\n");
        let (printed, tail) = collector.finish(files(), false).await;
        assert_eq!(tail, "", "of success nothing is told");
        assert_eq!(printed.stdout, b"progress");
        let both = [
            output_file(volume.path(), "log.err"),
            output_file(volume.path(), "log.err"),
        ];
        assert_eq!(collector.finish(both, true).await.1, "why\n");
    }

    #[tokio::test]
    async fn log_is_not_read_outside_its_volume() {
        let volume = tempfile::tempdir().unwrap();
        let secret = tempfile::NamedTempFile::new().unwrap();
        fs::write(secret.path(), "secret").unwrap();
        std::os::unix::fs::symlink(secret.path(), volume.path().join("link")).unwrap();
        nix::unistd::mkfifo(&volume.path().join("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let (collector, _) = OutputCollector::collect().unwrap();
        let files = [
            output_file(volume.path(), "link"),
            output_file(volume.path(), "pipe"),
        ];
        let (printed, tail) = collector.finish(files, true).await;
        assert_eq!((printed, tail), (CapturedOutput::default(), String::new()));
    }
}
