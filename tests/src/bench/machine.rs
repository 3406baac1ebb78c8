//! The measured machine: its properties, its load, and how to make its caches cold.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
use tempfile::TempDir;

/// Above this load for each processor, other programs disturb the measurement.
const QUIET_LOAD_MAX: f64 = 0.2;

/// One paragraph about the machine, with a warning when it is not calm.
pub fn describe_machine() -> String {
    let cores = count_processors();
    let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let load = read_load();
    let kind = if cfg!(debug_assertions) {
        "a debug build: NOTHING HERE IS WORTH QUOTING"
    } else {
        "an optimised build"
    };
    let mut text = format!(
        "machine: {cores} processors, Linux {}, load {load:.2}; {kind}",
        kernel.trim()
    );
    if load > QUIET_LOAD_MAX * cores as f64 {
        text.push_str("\nWARNING: the machine is busy with other things; only ratios may be used");
    }
    text
}

/// Processors that this process may use.
pub fn count_processors() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// Average number of runnable processes of the last minute.
fn read_load() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    let first = text.split_whitespace().next().unwrap_or_default();
    first.parse().unwrap_or(0.0)
}

/// Memory that may be used without anything being moved to a disk, in bytes; 0 when the kernel does
/// not say.
pub fn read_free_bytes() -> usize {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with("MemAvailable:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1));
    kib.and_then(|kib| kib.parse::<usize>().ok())
        .map_or(0, |kib| kib << 10)
}

/// Uses memory once and gives it back. Virtual machines get memory from their hosts at the first
/// touch, at some 400 MB/s on one such machine, which must not count.
pub fn warm_memory(bytes: usize) {
    const PIECE: usize = 1 << 20;
    let pieces = (0..bytes / PIECE).map(|_| std::hint::black_box(vec![1_u8; PIECE]));
    drop(pieces.collect::<Vec<_>>());
}

/// How caches were made cold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CacheDropScope {
    /// The kernel dropped every clean page, name and attribute.
    Everything,
    /// Not root: the kernel dropped only pages of the named files, and perhaps not all of them.
    NamedFiles,
}

/// Empties the page cache: all of it as root, else the pages of these files.
///
/// # Errors
/// A file that cannot be opened.
pub fn drop_caches(files: &[&Path]) -> Result<CacheDropScope> {
    nix::unistd::sync();
    if fs::write("/proc/sys/vm/drop_caches", "3").is_ok() {
        return Ok(CacheDropScope::Everything);
    }
    for path in files {
        let file = fs::File::open(path).with_context(|| path.display().to_string())?;
        posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
    }
    Ok(CacheDropScope::NamedFiles)
}

/// A place for plain directories that begin far from each other on the disk, as volumes do in a
/// store: else one of two has its files where the other has just removed as many.
#[derive(Debug)]
pub struct SpreadDirectories(TempDir);

impl SpreadDirectories {
    /// Makes the place, among other temporary files.
    ///
    /// # Errors
    /// An I/O error.
    pub fn new() -> Result<Self> {
        let place = tempfile::tempdir()?;
        let directory = fs::File::open(place.path())?;
        // Not every file system can do so, and where it cannot, volumes are not spread either.
        let _ = ioctl_getflags(&directory)
            .and_then(|flags| ioctl_setflags(&directory, flags | IFlags::TOPDIR));
        Ok(Self(place))
    }

    /// Makes a directory in it.
    ///
    /// # Errors
    /// An I/O error.
    pub fn create_directory(&self, name: &str) -> Result<PathBuf> {
        let path = self.0.path().join(name);
        fs::create_dir(&path)?;
        Ok(path)
    }
}

/// Time that all processors spent working and in all, in clock ticks.
#[derive(Debug, Clone, Copy)]
pub struct ProcessorTime {
    busy_ticks: u64,
    total_ticks: u64,
}

impl ProcessorTime {
    /// Reads the kernel's count.
    pub fn now() -> Self {
        let text = fs::read_to_string("/proc/stat").unwrap_or_default();
        let line = text.lines().next().unwrap_or_default();
        let ticks: Vec<u64> = line
            .split_whitespace()
            .skip(1)
            .take(8)
            .filter_map(|tick| tick.parse().ok())
            .collect();
        let total = ticks.iter().sum();
        // The fourth is idle, the fifth waits for a disk.
        let idle = ticks.iter().skip(3).take(2).sum::<u64>();
        let busy = total - idle;
        Self {
            busy_ticks: busy,
            total_ticks: total,
        }
    }

    /// Share of all processors' time that was spent working since then, from 0 to 1.
    pub fn busy_fraction_since(&self) -> f64 {
        let now = Self::now();
        let total = now.total_ticks.saturating_sub(self.total_ticks).max(1);
        now.busy_ticks.saturating_sub(self.busy_ticks) as f64 / total as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_description_is_plausible() {
        let before = ProcessorTime::now();
        assert!(before.total_ticks > before.busy_ticks, "{before:?}");
        assert!((0.0..=1.0).contains(&before.busy_fraction_since()));
        assert!(
            describe_machine().contains("processors, Linux "),
            "{}",
            describe_machine()
        );
    }
}
