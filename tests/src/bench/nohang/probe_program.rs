//! The program that meets the faults: it works on a directory call by call, and writes its current
//! call into a file on the host for observers. Knows nothing of volumes.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, IntoRawFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::time::{ClockId, clock_gettime};

use crate::cache_cluster::DATA_FILE;
use crate::content::Content;
use crate::seeded_rng::SeededRng;

/// Its name on the command line of the benchmarks.
pub const PROBE_COMMAND: &str = "nohang-probe";

/// As [`PROBE_COMMAND`], for the one that looks afterwards.
pub const CHECK_COMMAND: &str = "nohang-check";

/// The file that grows on a scratch volume, in records of this size.
const LOG_FILE: &str = "log";
const RECORD_BYTES: usize = 4096;
const RECORDS_PER_WRITE: u64 = 8;

/// Every so many rounds there is an fsync, and names change.
const ROUNDS_PER_SYNC: u64 = 4;

/// The content of a cache volume.
pub(super) const SET_BYTES: usize = 8 << 20;
const SET_SEED: u64 = 77;
const READ_BYTES: u64 = 64 << 10;

/// Pause between two rounds: others want to work as well.
const ROUND_PAUSE: Duration = Duration::from_millis(5);

/// The target of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProbeVolume {
    Scratch,
    Cache,
}

impl ProbeVolume {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Scratch => "scratch",
            Self::Cache => "cache",
        }
    }
}

/// The durability of a program's records on a scratch volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Durability {
    /// Synced records: its agent's death ends the program too.
    WhenSynced,
    /// Records of closed files.
    WhenClosed,
}

impl Durability {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::WhenSynced => "synced",
            Self::WhenClosed => "closed",
        }
    }
}

/// The state of a probe: its position, and its errors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct ProbeState {
    /// Records in a file that was closed or synced, according to [`Durability`]: no fault may lose
    /// them.
    pub(super) durable_records: u64,
    /// Calls that returned.
    pub(super) calls_returned: u64,
    /// Start of the current call, in nanoseconds of the machine's clock; 0 without one.
    pub(super) call_began_ns: u64,
    /// The longest call so far.
    pub(super) call_ns_max: u64,
    /// The error that ended it; 0 without one.
    pub(super) errno: u64,
    /// Bytes that it read and that were wrong.
    pub(super) wrong_bytes: u64,
}

impl ProbeState {
    /// The last state of a probe; `None` before its start.
    pub(super) fn read(path: &Path) -> Self {
        let mut bytes = [0; 48];
        let read = File::open(path).and_then(|file| file.read_exact_at(&mut bytes, 0));
        if read.is_err() {
            return Self::default();
        }
        let mut numbers = bytes.chunks_exact(8).map(|eight| {
            let mut number = [0; 8];
            number.copy_from_slice(eight);
            u64::from_le_bytes(number)
        });
        let mut next = || numbers.next().unwrap_or(0);
        Self {
            durable_records: next(),
            calls_returned: next(),
            call_began_ns: next(),
            call_ns_max: next(),
            errno: next(),
            wrong_bytes: next(),
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let numbers = [
            self.durable_records,
            self.calls_returned,
            self.call_began_ns,
            self.call_ns_max,
            self.errno,
            self.wrong_bytes,
        ];
        numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
    }
}

/// The machine's clock, the same in each process: nanoseconds.
pub(super) fn now_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from);
    now.map_or(0, |now| u64::try_from(now.as_nanos()).unwrap_or(u64::MAX))
}

/// The files at home for cache volumes.
pub(super) fn cache_content() -> Content {
    Content::new(SET_SEED, SET_BYTES)
}

/// `nohang-probe KIND DIRECTORY STATE synced|closed`: works until an error, or a signal, ends it.
pub(super) fn run_probe(arguments: &[String]) -> Result<()> {
    let (arguments, keeps) = match arguments.split_last() {
        Some((last, rest)) if last == Durability::WhenSynced.name() => {
            (rest, Durability::WhenSynced)
        }
        Some((_, rest)) => (rest, Durability::WhenClosed),
        None => (arguments, Durability::WhenClosed),
    };
    let (work, directory, state) = parse_arguments(arguments)?;
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .open(state)?;
    // Runs as if started there: without the mount, it does not find the directory below.
    std::env::set_current_dir(&directory)?;
    let mut probe = Probe {
        state_file: file,
        state: ProbeState::default(),
        rng: SeededRng::new(u64::from(std::process::id())),
    };
    let ended = match work {
        ProbeVolume::Scratch => probe.write_until_error(keeps),
        ProbeVolume::Cache => probe.read_until_error(),
    };
    let error = ended.err().context("it goes on for ever")?;
    probe.state.errno = u64::from(error.raw_os_error().unwrap_or(255).unsigned_abs());
    probe.write_state();
    Err(error.into())
}

/// `nohang-check KIND DIRECTORY STATE`: prints how many of a probe's kept bytes are wrong.
pub(super) fn run_check(arguments: &[String]) -> Result<()> {
    let (_, directory, state) = parse_arguments(arguments)?;
    let state = ProbeState::read(&state);
    let log = fs::read(directory.join(LOG_FILE)).unwrap_or_default();
    let mut wrong = (state.durable_records as usize * RECORD_BYTES).saturating_sub(log.len());
    for (index, found) in log.chunks(RECORD_BYTES).enumerate() {
        let is_kept = (index as u64) < state.durable_records;
        let expected = record_bytes(index as u64);
        // The rest may be missing or truncated; no other data may be in its place.
        let is_right =
            found == &expected[..found.len()] || (!is_kept && found.iter().all(|b| *b == 0));
        wrong += if is_right { 0 } else { found.len() };
    }
    println!("{wrong}");
    Ok(())
}

fn parse_arguments(arguments: &[String]) -> Result<(ProbeVolume, PathBuf, PathBuf)> {
    ensure!(arguments.len() == 3, "a probe needs KIND DIRECTORY STATE");
    let work = match arguments[0].as_str() {
        "scratch" => ProbeVolume::Scratch,
        _ => ProbeVolume::Cache,
    };
    Ok((work, (&arguments[1]).into(), (&arguments[2]).into()))
}

fn record_bytes(index: u64) -> Vec<u8> {
    Content::new(index + 1, RECORD_BYTES).bytes().to_vec()
}

struct Probe {
    state_file: File,
    state: ProbeState,
    rng: SeededRng,
}

impl Probe {
    fn write_until_error(&mut self, keeps: Durability) -> io::Result<()> {
        let log = PathBuf::from(LOG_FILE);
        let mut written = 0;
        for round in 0.. {
            let first = written;
            let records: Vec<u8> = (first..first + RECORDS_PER_WRITE)
                .flat_map(record_bytes)
                .collect();
            let mut options = OpenOptions::new();
            options.create(true).append(true);
            let mut file = self.time_call(|| options.open(&log))?;
            self.time_call(|| file.write_all(&records))?;
            if round % ROUNDS_PER_SYNC == 0 {
                self.time_call(|| file.sync_all())?;
            }
            self.time_call(|| close_file(file))?;
            written += RECORDS_PER_WRITE;
            if keeps == Durability::WhenClosed || round % ROUNDS_PER_SYNC == 0 {
                self.state.durable_records = written;
            }
            let at = self.rng.next_below(written);
            let found = self.read_uncached(&log, at * RECORD_BYTES as u64, RECORD_BYTES)?;
            self.state.wrong_bytes += count_different(&found, &record_bytes(at));
            if round % ROUNDS_PER_SYNC == 0 {
                self.rename_files(round)?;
            }
            std::thread::sleep(ROUND_PAUSE);
        }
        Ok(())
    }

    fn rename_files(&mut self, round: u64) -> io::Result<()> {
        let (one, two) = (format!("one-{round}"), "two");
        let mut file = self.time_call(|| File::create(&one))?;
        self.time_call(|| file.write_all(b"one"))?;
        self.time_call(|| close_file(file))?;
        self.time_call(|| fs::rename(&one, two))?;
        self.time_call(|| fs::remove_file(two))
    }

    fn read_until_error(&mut self) -> io::Result<()> {
        let path = PathBuf::from(DATA_FILE);
        let set = cache_content();
        loop {
            let at = self.rng.next_below(SET_BYTES as u64 - READ_BYTES);
            let found = self.read_uncached(&path, at, READ_BYTES as usize)?;
            self.state.wrong_bytes += set.count_wrong_bytes(at, &found);
            std::thread::sleep(ROUND_PAUSE);
        }
    }

    /// Reads beyond the kernel's cache, so that it must ask the server.
    fn read_uncached(&mut self, path: &Path, at: u64, length: usize) -> io::Result<Vec<u8>> {
        let file = self.time_call(|| File::open(path))?;
        // Only advice: dirty pages stay, which is as good.
        let _ = posix_fadvise(file.as_fd(), 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED);
        let mut found = vec![0; length];
        self.time_call(|| file.read_exact_at(&mut found, at))?;
        self.time_call(|| close_file(file))?;
        Ok(found)
    }

    /// One call, which may take long.
    fn time_call<T>(&mut self, call: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
        self.state.call_began_ns = now_ns();
        self.write_state();
        let result = call();
        let took = now_ns().saturating_sub(self.state.call_began_ns);
        self.state.call_began_ns = 0;
        self.state.calls_returned += 1;
        self.state.call_ns_max = self.state.call_ns_max.max(took);
        self.write_state();
        result
    }

    fn write_state(&self) {
        // The host's own disk; if that fails, observers see a stuck probe.
        let _ = self.state_file.write_all_at(&self.state.bytes(), 0);
    }
}

/// Errors of `close` are errors.
fn close_file(file: File) -> io::Result<()> {
    nix::unistd::close(file.into_raw_fd()).map_err(io::Error::from)
}

fn count_different(found: &[u8], expected: &[u8]) -> u64 {
    let pairs = found.iter().zip(expected);
    pairs.filter(|(a, b)| a != b).count() as u64
}
