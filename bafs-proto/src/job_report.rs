//! What the report of a job says of its volumes, and what follows from it.

use serde::{Deserialize, Serialize};

use crate::hash::{Digest, DigestHasher};
use crate::ids::ExecutionId;
use crate::message::JobReport;
use crate::source::{SourceEntry, SourceIdentity, SourceKind};

/// What a job did to one of its volumes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeUse {
    /// Name of the mount.
    pub name: String,
    /// Bytes that the kernel asked the agent for.
    pub read_bytes: u64,
    /// Bytes that the kernel gave the agent.
    pub written_bytes: u64,
    /// Files that were opened for reading.
    pub read_opens: u64,
    /// Changes of files and directories: opened for writing, created, renamed, removed, given
    /// other attributes. Where a job works on the directory itself (a watched volume) 1 when
    /// anything there is not as it was, or nobody knows.
    pub changes: u64,
    /// Other operations: names looked up, attributes asked for, directories listed.
    #[serde(default)]
    pub metadata_ops: u64,
    /// Whether the job works on the directory itself: then nothing that it read, looked at or was
    /// refused is counted.
    #[serde(default)]
    pub has_no_counts: bool,
    /// Path of the first file that was read, empty if none was.
    pub first_read_path: String,
    /// Path of the first file that was changed, empty if none was.
    pub first_changed_path: String,
    /// Bytes and files that it held at the end, 0 when that is not known.
    pub used_bytes: u64,
    /// See `used_bytes`.
    pub used_files: u64,
    /// Bytes that the disk which it lies on had free at the end, where nothing is counted at the
    /// least; nothing when that is not known.
    #[serde(default)]
    pub disk_free_bytes: Option<u64>,
    /// Files, in the same way.
    #[serde(default)]
    pub disk_free_files: Option<u64>,
    /// For a cache volume and for a home mount: the distinct 4 KiB pages that were read.
    pub pages: Vec<TouchedPages>,
    /// Longest time a call waited, in milliseconds.
    pub call_ms_max: u64,
    /// Time in which at least one call was under way, in milliseconds: an upper bound of how long
    /// the job waited for this volume. What the kernel does without the agent is not in it.
    #[serde(default)]
    pub wait_ms: u64,
    /// Calls that failed because the volume had no space left, for bytes or for files.
    #[serde(default)]
    pub no_space_errors: u64,
    /// How the agent reached the volume, and why not in a faster way, for people.
    #[serde(default)]
    pub access_path: String,
    /// What the job saw of the source that the volume shows; nothing when nobody knows exactly:
    /// then it may have seen all of it.
    #[serde(default)]
    pub inputs: Option<ObservedInputs>,
}

/// What a job saw of a source: if this is the same, the job sees the same again. Paths are below
/// the source; the empty path is the source itself.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObservedInputs {
    /// Files and links whose names were found.
    pub files: Vec<(String, SourceIdentity)>,
    /// Directories whose names were found.
    pub directories: Vec<String>,
    /// Directories that were listed, each with [`directory_digest`].
    pub listed: Vec<(String, Digest)>,
    /// Names that were looked for and are not there.
    pub missing: Vec<String>,
}

/// What a listing of a directory shows: names, kinds and identities of what is directly in it, in
/// whatever order.
pub fn directory_digest<'e>(entries: impl Iterator<Item = &'e SourceEntry>) -> Digest {
    let name_of = |entry: &'e SourceEntry| entry.path.rsplit('/').next().unwrap_or_default();
    let mut entries: Vec<_> = entries.map(|entry| (name_of(entry), entry)).collect();
    entries.sort_unstable_by_key(|(name, _)| *name);
    let mut hasher = DigestHasher::new();
    for (name, entry) in entries {
        hasher.update(&(name.len() as u64).to_le_bytes());
        hasher.update(name.as_bytes());
        hash_content(&mut hasher, entry);
    }
    hasher.digest()
}

/// What stands for the listing of a directory that its home could not read.
pub fn unreadable_directory_digest() -> Digest {
    Digest::of(b"unreadable directory")
}

/// All that a listing of a source tells: paths, kinds and identities.
pub fn source_digest<'e>(entries: impl Iterator<Item = &'e SourceEntry>) -> Digest {
    let mut hasher = DigestHasher::new();
    for entry in entries {
        hasher.update(&(entry.path.len() as u64).to_le_bytes());
        hasher.update(entry.path.as_bytes());
        hash_content(&mut hasher, entry);
    }
    hasher.digest()
}

/// The time of a directory, which changes with what is in it, does not count.
fn hash_content(hasher: &mut DigestHasher, entry: &SourceEntry) {
    let (kind, target): (u8, &[u8]) = match &entry.kind {
        SourceKind::File => (0, &[]),
        SourceKind::Directory => (1, &[]),
        SourceKind::Symlink(target) => (2, target),
        SourceKind::UnreadableDirectory => (3, &[]),
    };
    hasher.update(&[kind]);
    hasher.update(&(target.len() as u64).to_le_bytes());
    hasher.update(target);
    if entry.kind == SourceKind::File {
        let SourceIdentity {
            size,
            mtime_ns,
            ctime_ns,
        } = entry.identity;
        hasher.update(&size.to_le_bytes());
        hasher.update(&mtime_ns.to_le_bytes());
        hasher.update(&ctime_ns.to_le_bytes());
    }
}

/// Pages of a file that were read: pairs of first page and number of pages, ascending.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TouchedPages {
    /// Path in the volume.
    pub path: String,
    /// Size of the file in bytes (the last page may be short).
    pub size: u64,
    /// Runs of pages of 4096 bytes.
    pub page_runs: Vec<(u64, u64)>,
}

/// Reads what an execution printed that has ended: beginning and end of standard output and of
/// standard error.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadJobOutput {
    /// This execution.
    pub execution: ExecutionId,
}

/// What an execution printed. The body has that of standard output, then that of standard error;
/// where the middle of one was left out, a line in it says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobOutput {
    /// So many bytes of the body are of standard output.
    pub stdout_bytes: u32,
}

/// Asks a node which programs its jobs would not find.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FindPrograms {
    /// Absolute paths, and names for `PATH`; at most
    /// [`PROGRAMS_MAX`](crate::limits::PROGRAMS_MAX).
    pub programs: Vec<String>,
}

/// Programs that a node does not have, in the order of the question.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MissingPrograms {
    /// As they were asked for.
    pub programs: Vec<String>,
}

impl JobReport {
    /// Time in which it computed, in milliseconds: that in which it did not wait for its volumes.
    pub fn compute_ms(&self) -> u64 {
        let waited = self.volumes.iter().map(|used| used.wait_ms);
        let waited = waited.fold(0, u64::saturating_add);
        // Waits for several volumes may have been the same time, and what the processors did was
        // no waiting.
        let least = self.cpu_ms.min(self.wall_ms);
        self.wall_ms.saturating_sub(waited).max(least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::JobOutcome;

    #[test]
    fn compute_time_excludes_waiting_time() {
        let computed = |wall_ms, cpu_ms, waits: &[u64]| {
            let volume = |waited_ms: &u64| VolumeUse {
                wait_ms: *waited_ms,
                ..VolumeUse::default()
            };
            let report = JobReport {
                outcome: JobOutcome::Exited(0),
                wall_ms,
                cpu_ms,
                memory_bytes_max: 0,
                output_tail: String::new(),
                volumes: waits.iter().map(volume).collect(),
            };
            report.compute_ms()
        };
        assert_eq!(computed(100, 1, &[]), 100, "one that sleeps");
        assert_eq!(computed(100, 1, &[30, 20]), 50);
        assert_eq!(computed(100, 60, &[70, 20]), 60);
        assert_eq!(computed(100, 400, &[u64::MAX, 1]), 100);
    }
}
