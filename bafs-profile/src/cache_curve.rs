//! Hit rates of an LRU cache of any size, from one pass over a trace (Figs 2.3 and 2.4).
//!
//! R. L. Mattson et al., *Evaluation techniques for storage hierarchies*, IBM Systems Journal 9(2),
//! 1970: an access hits exactly those caches that hold more blocks than its stack distance.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::role::Role;
use crate::trace::Trace;

/// The block size of the thesis' simulated cache.
pub const BLOCK_BYTES: u64 = 4096;

/// The hit rate of a cache of one size.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct CachePoint {
    /// The size of the cache.
    pub cache_bytes: u64,
    /// The part of all block accesses that hit, from 0 to 1.
    pub hit_rate: f64,
}

/// Counts accesses by stack distance.
#[derive(Debug, Default)]
struct StackDistances {
    /// When each block was used last.
    last_use: BTreeMap<(u32, u64), usize>,
    /// Fenwick tree over times: 1 where a block was used last.
    marks: Vec<u32>,
    clock: usize,
    last_block: Option<(u32, u64)>,
    /// Accesses of a distance below 2^k and not below 2^(k-1) blocks, by k.
    by_exponent: BTreeMap<u32, u64>,
    accesses: u64,
}

impl StackDistances {
    fn with_room(accesses: usize) -> Self {
        Self {
            marks: vec![0; accesses + 1],
            ..Self::default()
        }
    }

    fn access(&mut self, block: (u32, u64)) {
        self.accesses += 1;
        if self.last_block == Some(block) {
            *self.by_exponent.entry(0).or_default() += 1;
            return;
        }
        self.last_block = Some(block);
        self.clock += 1;
        if let Some(before) = self.last_use.insert(block, self.clock) {
            let distance = self.last_use.len() - self.count_until(before) as usize;
            let exponent = (distance as u64 + 1).next_power_of_two().trailing_zeros();
            *self.by_exponent.entry(exponent).or_default() += 1;
            self.add(before, -1);
        }
        self.add(self.clock, 1);
    }

    fn add(&mut self, mut at: usize, change: i32) {
        while at < self.marks.len() {
            self.marks[at] = self.marks[at].wrapping_add_signed(change);
            at += at & at.wrapping_neg();
        }
    }

    fn count_until(&self, mut at: usize) -> u32 {
        let mut count = 0;
        while at > 0 {
            count += self.marks[at];
            at &= at - 1;
        }
        count
    }

    fn curve(&self) -> Vec<CachePoint> {
        let exponent_max = (self.last_use.len().max(1) as u64).next_power_of_two();
        let mut hits = 0;
        let mut points = Vec::new();
        for exponent in 0..=exponent_max.trailing_zeros() {
            hits += self.by_exponent.get(&exponent).copied().unwrap_or(0);
            points.push(CachePoint {
                cache_bytes: BLOCK_BYTES << exponent,
                hit_rate: hits as f64 / self.accesses as f64,
            });
        }
        points
    }
}

/// Replays the accesses of a role, one trace after the other, in caches of powers of two of blocks.
/// Empty where there are none.
pub fn compute_cache_curve(
    traces: &[Trace],
    roles: &BTreeMap<String, Role>,
    role: Role,
) -> Vec<CachePoint> {
    let mut numbers: BTreeMap<(&str, &str), u32> = BTreeMap::new();
    let mut accesses = Vec::new();
    for trace in traces {
        let mut number_of_file = Vec::new();
        for file in &trace.files {
            // A private path of several instances is a file of each.
            let owner = match role {
                Role::Batch => "",
                _ => trace.instance.as_str(),
            };
            let count = numbers.len() as u32;
            let number = *numbers.entry((owner, &file.path)).or_insert(count);
            number_of_file.push((roles.get(&file.path) == Some(&role)).then_some(number));
        }
        for access in &trace.accesses {
            let is_data = access.kind.is_read() || access.kind.is_write();
            if let (Some(number), true) = (number_of_file[access.file as usize], is_data) {
                accesses.push((number, access));
            }
        }
    }
    let blocks_of = |start: u64, bytes: u64| match bytes {
        0 => 0..0,
        _ => start / BLOCK_BYTES..(start + bytes - 1) / BLOCK_BYTES + 1,
    };
    // Each block of an access takes one time; neighbours in one block take one together.
    let room = accesses.iter().map(|(_, access)| {
        let (start, end) = access.range();
        let blocks = (end - start).div_ceil(BLOCK_BYTES) + 1;
        (blocks + access.count.min(blocks)) as usize
    });
    let mut distances = StackDistances::with_room(room.sum());
    for (number, access) in accesses {
        for at in 0..access.count {
            let start = access.offset + at * access.bytes;
            for block in blocks_of(start, access.bytes) {
                distances.access((number, block));
            }
        }
    }
    match distances.accesses {
        0 => Vec::new(),
        _ => distances.curve(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The hits of an LRU cache, by a list.
    fn simulate(blocks: &[u64], capacity: usize) -> u64 {
        let mut stack: Vec<u64> = Vec::new();
        let mut hits = 0;
        for block in blocks {
            let found = stack.iter().position(|held| held == block);
            if let Some(at) = found {
                hits += 1;
                stack.remove(at);
            }
            stack.insert(0, *block);
            stack.truncate(capacity);
        }
        hits
    }

    #[test]
    fn curve_matches_simulated_caches() {
        let mut number: u64 = 3;
        let blocks: Vec<u64> = (0..3000)
            .map(|_| {
                number = number
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                let far = (number >> 40) % 300;
                far * far / 300
            })
            .collect();
        let mut distances = StackDistances::with_room(blocks.len());
        blocks
            .iter()
            .for_each(|block| distances.access((0, *block)));
        for point in distances.curve() {
            let capacity = (point.cache_bytes / BLOCK_BYTES) as usize;
            let expected = simulate(&blocks, capacity) as f64 / 3000.0;
            assert!(
                (point.hit_rate - expected).abs() < 1e-9,
                "{capacity}: {point:?}, {expected}"
            );
        }
    }
}
