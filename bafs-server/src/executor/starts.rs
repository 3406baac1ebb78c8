//! Executions that earlier lives of the node have begun, so that none is begun twice. Knows nothing
//! of how they ended: whoever asked sees to that.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use bafs_proto::ids::ExecutionId;

/// Executions that one of the two files tells of; beyond that the older file goes.
const HALF: usize = 50_000;

/// The executions of earlier lives, and the file to which those of this one are added.
#[derive(Debug)]
pub(super) struct Starts {
    path: PathBuf,
    file: File,
    written: usize,
    before: BTreeSet<ExecutionId>,
}

impl Starts {
    /// Reads what earlier lives have left at `path`. Blocks.
    ///
    /// # Errors
    /// What the disk says.
    pub(super) fn open(path: &Path) -> io::Result<Self> {
        let of_file = read(path)?;
        let mut before = read(&older(path))?;
        let written = of_file.len();
        before.extend(of_file);
        Ok(Self {
            file: append_to(path)?,
            path: path.to_owned(),
            written,
            before,
        })
    }

    /// Whether an earlier life has begun it.
    pub(super) fn is_of_before(&self, id: ExecutionId) -> bool {
        self.before.contains(&id)
    }

    /// Takes note of an execution before it is begun. The note outlives the process; a machine that
    /// loses power is away for longer than callers repeat a start.
    ///
    /// # Errors
    /// What the disk says; the execution must not be begun then.
    pub(super) fn note(&mut self, id: ExecutionId) -> io::Result<()> {
        if self.written >= HALF {
            match fs::rename(&self.path, older(&self.path)) {
                // It was moved before, and no new one could be made then.
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                moved => moved?,
            }
            self.file = append_to(&self.path)?;
            self.written = 0;
        }
        // A line that was cut, as the disk was full, must not spoil the next.
        self.file.write_all(format!("\n{id}").as_bytes())?;
        self.written += 1;
        Ok(())
    }
}

fn older(path: &Path) -> PathBuf {
    path.with_extension("old")
}

fn append_to(path: &Path) -> io::Result<File> {
    OpenOptions::new().create(true).append(true).open(path)
}

fn read(path: &Path) -> io::Result<BTreeSet<ExecutionId>> {
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
    fn what_was_begun_is_known_to_later_lives_also_behind_a_line_that_was_cut() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("starts");
        let mut first = Starts::open(&path).expect("open");
        first.note(ExecutionId(1)).expect("note");
        assert!(!first.is_of_before(ExecutionId(1)), "it is of this life");
        append_to(&path)
            .and_then(|mut file| file.write_all(b"\n7"))
            .expect("a cut line");
        first.note(ExecutionId(2)).expect("note");
        let second = Starts::open(&path).expect("open");
        let known = [1, 2, 3, 7].map(|id| second.is_of_before(ExecutionId(id)));
        assert_eq!(known, [true, true, false, false]);
    }

    #[test]
    fn the_notes_stay_within_bounds() {
        let directory = tempfile::tempdir().expect("directory");
        let path = directory.path().join("starts");
        let mut starts = Starts::open(&path).expect("open");
        let all = 2 * HALF as u128 + 10;
        for id in 1..=all {
            starts.note(ExecutionId(id)).expect("note");
        }
        let later = Starts::open(&path).expect("open");
        assert_eq!(later.before.len(), HALF + 10);
        assert!(later.is_of_before(ExecutionId(all)) && !later.is_of_before(ExecutionId(1)));
    }
}
