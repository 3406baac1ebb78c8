//! Traffic, unique and static bytes and operations, by file, program and role (Tables 2.2 to 2.4).

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use crate::byte_ranges::ByteRanges;
use crate::role::Role;
use crate::trace::{AccessKind, Trace};

/// Files and bytes of one direction, or of both.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Volume {
    /// Files that were accessed.
    pub files: u64,
    /// Bytes that flowed into or out of programs.
    pub traffic_bytes: u64,
    /// Different bytes of files among them.
    pub unique_bytes: u64,
    /// The sizes of the files accessed.
    pub static_bytes: u64,
}

impl Volume {
    fn add(&mut self, other: Self) {
        self.files += other.files;
        self.traffic_bytes += other.traffic_bytes;
        self.unique_bytes += other.unique_bytes;
        self.static_bytes += other.static_bytes;
    }
}

/// How many operations there were of each kind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct OperationCounts {
    /// Opens.
    pub open: u64,
    /// Closes, also of copies of descriptors.
    pub close: u64,
    /// Reads, and pages of mappings that were read in.
    pub read: u64,
    /// Writes, and pages of mappings that were written back.
    pub write: u64,
    /// Reads and writes that began elsewhere than the last one ended.
    pub seek: u64,
    /// Looks at attributes; repeated ones within a second count once.
    pub stat: u64,
    /// All others.
    pub other: u64,
}

impl OperationCounts {
    /// All operations.
    pub fn total(&self) -> u64 {
        self.open + self.close + self.read + self.write + self.seek + self.stat + self.other
    }

    fn add(&mut self, other: Self) {
        self.open += other.open;
        self.close += other.close;
        self.read += other.read;
        self.write += other.write;
        self.seek += other.seek;
        self.stat += other.stat;
        self.other += other.other;
    }
}

/// The use of one file by one program of one trace.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct FileUse {
    pub(crate) read: ByteRanges,
    pub(crate) written: ByteRanges,
    pub(crate) read_bytes: u64,
    pub(crate) written_bytes: u64,
    pub(crate) operations: OperationCounts,
}

impl FileUse {
    fn merge(&mut self, other: &Self) {
        self.read.merge(&other.read);
        self.written.merge(&other.written);
        self.read_bytes += other.read_bytes;
        self.written_bytes += other.written_bytes;
        self.operations.add(other.operations);
    }

    fn is_data_used(&self) -> bool {
        self.operations.read + self.operations.write + self.operations.open > 0
    }

    fn read_volume(&self, static_bytes: u64) -> Volume {
        match self.operations.read {
            0 => Volume::default(),
            _ => Volume {
                files: 1,
                traffic_bytes: self.read_bytes,
                unique_bytes: self.read.count_bytes(),
                static_bytes,
            },
        }
    }

    fn written_volume(&self, static_bytes: u64) -> Volume {
        match self.operations.write {
            0 => Volume::default(),
            _ => Volume {
                files: 1,
                traffic_bytes: self.written_bytes,
                unique_bytes: self.written.count_bytes(),
                static_bytes,
            },
        }
    }

    fn total_volume(&self, static_bytes: u64) -> Volume {
        if !self.is_data_used() {
            return Volume::default();
        }
        let mut all = self.read.clone();
        all.merge(&self.written);
        Volume {
            files: 1,
            traffic_bytes: self.read_bytes + self.written_bytes,
            unique_bytes: all.count_bytes(),
            static_bytes,
        }
    }
}

/// The file use of one program, or of several.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Traffic {
    /// Reads and writes.
    pub total: Volume,
    /// Reads.
    pub reads: Volume,
    /// Writes.
    pub writes: Volume,
    /// By role, in the order of [`Role::ALL`].
    pub roles: [Volume; 3],
    /// Operations.
    pub operations: OperationCounts,
}

impl Traffic {
    /// The part of a role.
    pub fn role(&self, role: Role) -> Volume {
        self.roles[role as usize]
    }
}

/// The use of each file: by program and path.
pub(crate) fn collect_uses(trace: &Trace) -> BTreeMap<(u32, u32), FileUse> {
    let mut uses: BTreeMap<(u32, u32), FileUse> = BTreeMap::new();
    for access in &trace.accesses {
        let used = uses.entry((access.program, access.file)).or_default();
        let counts = &mut used.operations;
        counts.seek += access.seeks;
        match access.kind {
            AccessKind::Read | AccessKind::MappedRead => {
                counts.read += access.count;
                used.read_bytes += access.total_bytes();
                used.read.insert(access.range());
            }
            AccessKind::Write | AccessKind::MappedWrite => {
                counts.write += access.count;
                used.written_bytes += access.total_bytes();
                used.written.insert(access.range());
            }
            AccessKind::Open => counts.open += access.count,
            AccessKind::Close => counts.close += access.count,
            AccessKind::Stat => counts.stat += access.count,
            AccessKind::Other => counts.other += access.count,
        }
    }
    uses
}

/// Sums the use of files by path, so that a file that several programs or stages use counts once.
pub fn sum_traffic(
    traces: &[&Trace],
    roles: &BTreeMap<String, Role>,
    only_program: Option<&str>,
) -> Traffic {
    let mut by_path: BTreeMap<&str, (FileUse, u64)> = BTreeMap::new();
    for trace in traces {
        for ((program, file), used) in collect_uses(trace) {
            let is_other = |wanted: &str| trace.programs[program as usize] != wanted;
            if only_program.is_some_and(is_other) {
                continue;
            }
            let file = &trace.files[file as usize];
            let (sum, size) = by_path.entry(&file.path).or_default();
            sum.merge(&used);
            *size = (*size).max(file.size_bytes_max);
        }
    }
    let mut traffic = Traffic::default();
    for (path, (used, size)) in by_path {
        let total = used.total_volume(size);
        traffic.total.add(total);
        traffic.reads.add(used.read_volume(size));
        traffic.writes.add(used.written_volume(size));
        traffic.operations.add(used.operations);
        if let Some(role) = roles.get(path) {
            traffic.roles[*role as usize].add(total);
        }
    }
    traffic
}

/// The use of one file in all traces.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct FileRow {
    /// Its path.
    pub path: String,
    /// What it is to the workload.
    pub role: Role,
    /// Instances that used it.
    pub instances: u64,
    /// Programs that used it.
    pub programs: Vec<String>,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Different bytes among them.
    pub unique_bytes: u64,
    /// The most that it held.
    pub static_bytes: u64,
}

/// What is summed up of a file.
#[derive(Default)]
struct FileSum<'a> {
    used: FileUse,
    size_bytes: u64,
    instances: BTreeSet<&'a str>,
    programs: BTreeSet<&'a str>,
}

/// The use of each file, in the order of paths.
pub fn list_files(traces: &[Trace], roles: &BTreeMap<String, Role>) -> Vec<FileRow> {
    let mut by_path: BTreeMap<&str, FileSum<'_>> = BTreeMap::new();
    for trace in traces {
        for ((program, file), used) in collect_uses(trace) {
            let file = &trace.files[file as usize];
            let sum = by_path.entry(&file.path).or_default();
            sum.used.merge(&used);
            sum.size_bytes = sum.size_bytes.max(file.size_bytes_max);
            sum.instances.insert(&trace.instance);
            sum.programs.insert(&trace.programs[program as usize]);
        }
    }
    let row = |(path, sum): (&str, FileSum<'_>)| FileRow {
        path: path.to_owned(),
        role: roles.get(path).copied().unwrap_or(Role::Endpoint),
        instances: sum.instances.len() as u64,
        programs: sum.programs.into_iter().map(str::to_owned).collect(),
        read_bytes: sum.used.read_bytes,
        written_bytes: sum.used.written_bytes,
        unique_bytes: sum.used.total_volume(sum.size_bytes).unique_bytes,
        static_bytes: sum.size_bytes,
    };
    by_path.into_iter().map(row).collect()
}
