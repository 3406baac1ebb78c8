//! Traffic and processor time over the time of an instance (Fig 2.6), and the lives of blocks.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::cache_curve::BLOCK_BYTES;
use crate::role::Role;
use crate::trace::Trace;

/// A part of the time of an instance.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct TimeSlice {
    /// When it begins, in seconds since the instance began.
    pub start_s: f64,
    /// How long it is, in seconds.
    pub length_s: f64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Traffic by role, in the order of [`Role::ALL`].
    pub role_bytes: [u64; 3],
    /// Processors in use, on average.
    pub processors: f64,
    /// Different blocks of 4 KiB that were used, in bytes.
    pub working_set_bytes: u64,
}

/// Divides the time of an instance, whose stages run one after the other, into equal slices.
pub fn slice_time(
    stages: &[&Trace],
    roles: &BTreeMap<String, Role>,
    slice_count: usize,
) -> Vec<TimeSlice> {
    let wall_us: u64 = stages.iter().map(|trace| trace.wall_us).sum();
    let length_us = (wall_us as f64 / slice_count as f64).max(1.0);
    let mut slices: Vec<TimeSlice> = (0..slice_count)
        .map(|at| TimeSlice {
            start_s: at as f64 * length_us / 1e6,
            length_s: length_us / 1e6,
            ..TimeSlice::default()
        })
        .collect();
    let slice_at = |us: f64| ((us / length_us) as usize).min(slice_count - 1);
    let mut blocks: Vec<BTreeMap<(&str, u64), ()>> = vec![BTreeMap::new(); slice_count];
    let mut begin_us = 0;
    for trace in stages {
        for access in &trace.accesses {
            if access.bytes == 0 {
                continue;
            }
            let path = trace.files[access.file as usize].path.as_str();
            let duration_us = (access.end_us - access.start_us) as f64;
            for at in 0..access.count {
                let part = at as f64 / (access.count.max(2) - 1) as f64;
                let us = (begin_us + access.start_us) as f64 + duration_us * part;
                let number = slice_at(us);
                let slice = &mut slices[number];
                match access.kind.is_write() {
                    true => slice.written_bytes += access.bytes,
                    false => slice.read_bytes += access.bytes,
                }
                if let Some(role) = roles.get(path) {
                    slice.role_bytes[*role as usize] += access.bytes;
                }
                let start = access.offset + at * access.bytes;
                for block in start / BLOCK_BYTES..=(start + access.bytes - 1) / BLOCK_BYTES {
                    blocks[number].insert((path, block), ());
                }
            }
        }
        let mut before = (0, 0);
        for (us, cpu_us) in &trace.cpu_samples {
            let used = cpu_us.saturating_sub(before.1) as f64;
            // A sample tells of the time before it.
            let middle = begin_us as f64 + (before.0 + us) as f64 / 2.0;
            slices[slice_at(middle)].processors += used / length_us;
            before = (*us, *cpu_us);
        }
        begin_us += trace.wall_us;
    }
    for (slice, blocks) in slices.iter_mut().zip(blocks) {
        slice.working_set_bytes = blocks.len() as u64 * BLOCK_BYTES;
    }
    slices
}

/// The life of neighbouring blocks of a file: from the first access to the last.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct BlockLife {
    /// The file.
    pub path: String,
    /// Its role.
    pub role: Role,
    /// The first block.
    pub first_block: u64,
    /// Past the last block.
    pub end_block: u64,
    /// The first access, in seconds since the instance began.
    pub first_s: f64,
    /// The last access.
    pub last_s: f64,
}

/// The lives of the blocks of an instance. Neighbours are put together, so that there are about
/// `rows` lives.
pub fn list_block_lives(
    stages: &[&Trace],
    roles: &BTreeMap<String, Role>,
    rows: u64,
) -> Vec<BlockLife> {
    let mut sizes: BTreeMap<&str, u64> = BTreeMap::new();
    for file in stages.iter().flat_map(|trace| &trace.files) {
        let size = sizes.entry(&file.path).or_default();
        *size = (*size).max(file.size_bytes_max.div_ceil(BLOCK_BYTES));
    }
    let group_blocks = sizes.values().sum::<u64>().div_ceil(rows.max(1)).max(1);
    let mut lives: BTreeMap<(&str, u64), (u64, u64)> = BTreeMap::new();
    let mut begin_us = 0;
    for trace in stages {
        for access in trace.accesses.iter().filter(|access| access.bytes > 0) {
            let path = trace.files[access.file as usize].path.as_str();
            let (start, end) = access.range();
            let first = start / BLOCK_BYTES / group_blocks;
            let last = (end - 1) / BLOCK_BYTES / group_blocks;
            let groups = last - first + 1;
            let span_us = access.end_us - access.start_us;
            for group in first..=last {
                // Accesses of a run are spread over its time.
                let from = begin_us + access.start_us + span_us * (group - first) / groups;
                let until = begin_us + access.start_us + span_us * (group - first + 1) / groups;
                let life = lives.entry((path, group)).or_insert((from, until));
                *life = (life.0.min(from), life.1.max(until));
            }
        }
        begin_us += trace.wall_us;
    }
    let life = |((path, group), (first_us, last_us)): ((&str, u64), (u64, u64))| BlockLife {
        path: path.to_owned(),
        role: roles.get(path).copied().unwrap_or(Role::Endpoint),
        first_block: group * group_blocks,
        end_block: (group + 1) * group_blocks,
        first_s: first_us as f64 / 1e6,
        last_s: last_us as f64 / 1e6,
    };
    lives.into_iter().map(life).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{Access, AccessKind, FileTrace};

    fn trace() -> Trace {
        let access = |kind, offset, count, start_us, end_us| Access {
            program: 0,
            file: 0,
            kind,
            offset,
            bytes: BLOCK_BYTES,
            count,
            seeks: 0,
            start_us,
            end_us,
        };
        Trace {
            wall_us: 1_000_000,
            programs: vec!["p".to_owned()],
            files: vec![FileTrace {
                path: "/f".to_owned(),
                size_bytes_max: 10 * BLOCK_BYTES,
                ..FileTrace::default()
            }],
            accesses: vec![
                access(AccessKind::Write, 0, 10, 0, 450_000),
                access(AccessKind::Read, 0, 1, 900_000, 900_000),
            ],
            cpu_samples: vec![(500_000, 500_000), (1_000_000, 500_000)],
            ..Trace::default()
        }
    }

    #[test]
    fn slices_divide_traffic_and_processor_time() {
        let trace = trace();
        let slices = slice_time(&[&trace], &find_role(), 2);
        let found: Vec<_> = slices
            .iter()
            .map(|it| (it.written_bytes, it.read_bytes))
            .collect();
        assert_eq!(found, [(10 * BLOCK_BYTES, 0), (0, BLOCK_BYTES)]);
        assert_eq!(slices[0].working_set_bytes, 10 * BLOCK_BYTES);
        assert_eq!((slices[0].processors, slices[1].processors), (1.0, 0.0));
    }

    #[test]
    fn lives_reach_from_first_to_last_access() {
        let trace = trace();
        let lives = list_block_lives(&[&trace], &find_role(), 10);
        assert_eq!(lives.len(), 10);
        assert_eq!((lives[0].first_s, lives[0].last_s), (0.0, 0.9));
        assert!(lives[9].last_s <= 0.45);
    }

    fn find_role() -> BTreeMap<String, Role> {
        BTreeMap::from([("/f".to_owned(), Role::Pipeline)])
    }
}
