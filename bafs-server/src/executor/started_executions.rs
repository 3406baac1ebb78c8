//! Executions that earlier lives of the node have begun, so that none is begun twice. Does not know
//! how they ended; that is the caller's concern.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use bafs_proto::ids::ExecutionId;

/// Executions in each of the two files; beyond that the older file is removed.
const EXECUTIONS_PER_FILE_MAX: usize = 50_000;

/// The executions of earlier lives, and the file to which those of this one are added.
#[derive(Debug)]
pub(super) struct StartedExecutions {
    path: PathBuf,
    file: File,
    written_count: usize,
    earlier: BTreeSet<ExecutionId>,
}

impl StartedExecutions {
    /// Reads what earlier lives have left at `path`. Blocks.
    ///
    /// # Errors
    /// I/O errors.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let of_file = read_executions(path)?;
        let mut before = read_executions(&older_path(path))?;
        let written = of_file.len();
        before.extend(of_file);
        Ok(Self {
            file: append_to(path)?,
            path: path.to_owned(),
            written_count: written,
            earlier: before,
        })
    }

    /// Whether an earlier life has begun it.
    pub(super) fn is_from_earlier_incarnation(&self, id: ExecutionId) -> bool {
        self.earlier.contains(&id)
    }

    /// Takes note of an execution before it is begun. The note outlives the process; a machine that
    /// loses power is away for longer than callers repeat a start.
    ///
    /// # Errors
    /// I/O errors; the execution must not start then.
    pub(super) fn record(&mut self, id: ExecutionId) -> io::Result<()> {
        if self.written_count >= EXECUTIONS_PER_FILE_MAX {
            match fs::rename(&self.path, older_path(&self.path)) {
                // It was moved before, and no new one could be made then.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                moved => moved?,
            }
            self.file = append_to(&self.path)?;
            self.written_count = 0;
        }
        // A line that was cut, as the disk was full, must not spoil the next.
        self.file.write_all(format!("\n{id}").as_bytes())?;
        self.written_count += 1;
        Ok(())
    }
}

fn older_path(path: &Path) -> PathBuf {
    path.with_extension("old")
}

fn append_to(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

fn read_executions(path: &Path) -> io::Result<BTreeSet<ExecutionId>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(text.lines().filter_map(|line| line.parse().ok()).collect()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(BTreeSet::new()),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restart_recalls_executions_despite_a_torn_line() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("starts");
        let mut first = StartedExecutions::open(&path).expect("open");
        first.record(ExecutionId(1)).expect("note");
        assert!(
            !first.is_from_earlier_incarnation(ExecutionId(1)),
            "it is of this life"
        );
        append_to(&path)
            .and_then(|mut file| file.write_all(b"\n7"))
            .expect("a cut line");
        first.record(ExecutionId(2)).expect("note");
        let second = StartedExecutions::open(&path).expect("open");
        let known = [1, 2, 3, 7].map(|id| second.is_from_earlier_incarnation(ExecutionId(id)));
        assert_eq!(known, [true, true, false, false]);
    }

    #[test]
    fn the_record_of_starts_is_bounded() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("starts");
        let mut starts = StartedExecutions::open(&path).expect("open");
        let all = 2 * EXECUTIONS_PER_FILE_MAX as u128 + 10;
        for id in 1..=all {
            starts.record(ExecutionId(id)).expect("note");
        }
        let later = StartedExecutions::open(&path).expect("open");
        assert_eq!(later.earlier.len(), EXECUTIONS_PER_FILE_MAX + 10);
        assert!(
            later.is_from_earlier_incarnation(ExecutionId(all))
                && !later.is_from_earlier_incarnation(ExecutionId(1))
        );
    }
}
