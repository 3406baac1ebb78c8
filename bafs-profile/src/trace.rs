//! The file use of one command, as it is recorded and kept. Values only.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// The file use of one command: one stage of one instance of a workload.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Trace {
    /// The instance, which is one pipeline of a workload.
    pub instance: String,
    /// The name of the stage: the same for the same step of each instance.
    pub stage: String,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// The absolute working directory.
    pub directory: String,
    /// The absolute directories whose files were traced.
    pub roots: Vec<String>,
    /// From the start of the command to its end, in microseconds.
    pub wall_us: u64,
    /// Processor time of all its processes, in microseconds.
    pub cpu_us: u64,
    /// The largest resident memory of a process, in bytes.
    pub memory_bytes_max: u64,
    /// The exit code; 128 and the number of a signal.
    pub exit_code: i32,
    /// Names of programs, which accesses refer to.
    pub programs: Vec<String>,
    /// Files, which accesses refer to.
    pub files: Vec<FileTrace>,
    /// Symbolic links that were followed: their paths and what they name.
    pub links: Vec<(String, String)>,
    /// Paths that are results, whoever reads them later.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub results: Vec<String>,
    /// Directories that the command made, also by names that they had before.
    pub made_directories: Vec<String>,
    /// Directories of all paths that files had.
    pub used_directories: BTreeSet<String>,
    /// Accesses in the order of their ends.
    pub accesses: Vec<Access>,
    /// Processor time used until a time, both in microseconds since the start, ascending.
    pub cpu_samples: Vec<(u64, u64)>,
}

impl Trace {
    /// Lets the time of the trace begin so much later, but not after the first access.
    pub fn delay_start(&mut self, delay_us: u64) {
        let first_us = self
            .accesses
            .first()
            .map_or(delay_us, |access| access.start_us);
        let delay_us = delay_us.min(first_us);
        for access in &mut self.accesses {
            access.start_us -= delay_us;
            access.end_us -= delay_us;
        }
        self.cpu_samples.retain(|(us, _)| *us >= delay_us);
        for (us, _) in &mut self.cpu_samples {
            *us -= delay_us;
        }
    }
}

/// One file of a trace.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct FileTrace {
    /// Its absolute path, the last one if it was renamed.
    pub path: String,
    /// The most bytes that it held.
    pub size_bytes_max: u64,
    /// Whether this command made it, or emptied it before it read anything.
    pub is_created: bool,
    /// Whether it was gone at the end.
    pub is_removed: bool,
    /// Whether it was read by an open that began after a writer had closed it.
    pub is_read_back: bool,
}

/// What was done to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum AccessKind {
    /// A read call.
    Read,
    /// A page of a mapping, or of a program, that was read in.
    MappedRead,
    /// A write call.
    Write,
    /// Changed pages of a mapping.
    MappedWrite,
    /// An open.
    Open,
    /// A close.
    Close,
    /// A look at its attributes. Repeated looks within a second count once.
    Stat,
    /// Any other operation on it.
    Other,
}

impl AccessKind {
    /// Whether bytes flow into the program.
    pub fn is_read(self) -> bool {
        matches!(self, Self::Read | Self::MappedRead)
    }

    /// Whether bytes flow out of the program.
    pub fn is_write(self) -> bool {
        matches!(self, Self::Write | Self::MappedWrite)
    }
}

/// Equal operations of one program on one file, one right after the other and without another
/// operation between.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access {
    /// Position in [`Trace::programs`].
    pub program: u32,
    /// Position in [`Trace::files`].
    pub file: u32,
    /// What was done.
    pub kind: AccessKind,
    /// Where the first operation began, in bytes.
    pub offset: u64,
    /// Bytes of each operation.
    pub bytes: u64,
    /// How many operations.
    pub count: u64,
    /// How many of them began elsewhere than the last one of the same open ended: 0 or 1.
    pub seeks: u64,
    /// When the first one was, in microseconds since the start.
    pub start_us: u64,
    /// When the last one was.
    pub end_us: u64,
}

impl Access {
    /// All its bytes.
    pub fn total_bytes(&self) -> u64 {
        self.bytes.saturating_mul(self.count)
    }

    /// The bytes of the file that it touches: first, and past the last.
    pub fn range(&self) -> (u64, u64) {
        (self.offset, self.offset.saturating_add(self.total_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn traces_begin_before_their_first_access() {
        let access = |start_us, end_us| Access {
            program: 0,
            file: 0,
            kind: AccessKind::Open,
            offset: 0,
            bytes: 0,
            count: 1,
            seeks: 0,
            start_us,
            end_us,
        };
        let mut trace = Trace {
            accesses: vec![access(80, 80), access(200, 300)],
            cpu_samples: vec![(50, 1), (150, 2)],
            ..Trace::default()
        };
        trace.delay_start(100);
        let times = trace.accesses.iter().map(|it| (it.start_us, it.end_us));
        assert_eq!(times.collect::<Vec<_>>(), [(0, 0), (120, 220)]);
        assert_eq!(trace.cpu_samples, [(70, 2)]);
    }
}
