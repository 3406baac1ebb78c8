//! How the blocks of a cache are distributed over its nodes, and how much an overloaded node
//! fetches again. Knows no flows.
//!
//! Nodes place extents by rendezvous hashing with bounded loads (`bafs-server`, `placement`): each
//! gets about its share, none more than a little beyond it, nor more than it can keep while there
//! is room elsewhere. Integers only, so the same nodes get the same on every machine.

use std::collections::BTreeMap;

use bafs_workflow::CachePolicy;

use super::random::draw_normal;
use crate::seeded_rng::SeededRng;

/// Bytes of a block.
const BLOCK_BYTES: u64 = 64 << 10;
/// Most bytes that are placed as one.
const EXTENT_BYTES_MAX: u64 = 1 << 20;
/// A source is cut into about so many extents at least.
const EXTENTS_MIN: u64 = 256;
/// With more extents times nodes than this, loads are not bounded.
const SCORES_MAX: u64 = 1 << 21;
/// A node takes this part more than its share before the next one is asked.
const SURPLUS_DIVISOR: u64 = 16;

/// Bytes of a reader's first request: the kernel's first read-ahead.
const READAHEAD_BYTES_MIN: u64 = 128 << 10;
/// Bytes that a sequential reader has requested at once: the kernel reads a mebibyte ahead and
/// requests the next one when the reader reaches it, so that one or two are in transfer. Nodes
/// fetch nothing ahead of readers where it would not stay until these come.
const READAHEAD_BYTES_MAX: u64 = 3 << 19;
/// What is there ahead of that a node has stay for its reader: a quarter of what it has read, no
/// more than this, nor than half of the node's part.
const RETAINED_BYTES_MAX: u64 = 8 << 20;

/// How much of the readers' scans the nodes can keep, and how much of it a later scan finds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ScanDistribution {
    /// Bytes that all nodes keep together.
    pub(super) retained_bytes: u64,
    /// Bytes that the next scan under LRU fetches again.
    pub(super) refetched_bytes: u64,
}

impl ScanDistribution {
    /// Of a scan of `bytes` on so many nodes that have so much space: to the byte even.
    pub(super) fn uniform(space_bytes: u64, nodes: u64, bytes: u64) -> Self {
        let over = bytes.saturating_sub(space_bytes);
        Self {
            retained_bytes: bytes.min(space_bytes),
            refetched_bytes: refetch_bytes(bytes, over, space_bytes / nodes.max(1)),
        }
    }

    /// The same where hashing places the blocks; the seed is that of this cache.
    pub(super) fn hashed(parts: &BTreeMap<u32, u64>, bytes: u64, seed: u64) -> Self {
        let mut spread = Self {
            retained_bytes: bytes,
            refetched_bytes: 0,
        };
        for (load, space) in hashed_loads(parts, bytes, seed)
            .into_iter()
            .zip(parts.values())
        {
            // They keep whole blocks.
            let over = load.saturating_sub(space / BLOCK_BYTES * BLOCK_BYTES);
            spread.retained_bytes -= over.min(spread.retained_bytes);
            // As if all nodes had as much too little: readers ask all of them at once.
            let of_all = refetch_bytes(bytes, scale_value(over, bytes, load), *space);
            spread.refetched_bytes += scale_value(of_all, load, bytes);
        }
        spread
    }

    /// Bytes that a scan finds of the previous one.
    pub(super) fn hit_bytes(&self, bytes: u64, policy: CachePolicy) -> u64 {
        match policy {
            CachePolicy::Mru => self.retained_bytes,
            CachePolicy::Lru => bytes.saturating_sub(self.refetched_bytes),
        }
    }
}

/// Bytes that a scan of `bytes` fetches under LRU if `over` bytes less remained of the previous
/// scan, on nodes with a partition of so many bytes.
///
/// Of what is asked for at once all that is there is found, and counts as used, before what is
/// missing has come and pushes out what follows; so does what is there behind that. So each time
/// `over` bytes are missing, or all when less is asked and kept.
fn refetch_bytes(bytes: u64, over: u64, part: u64) -> u64 {
    if over == 0 {
        return 0;
    }
    let kept_max = RETAINED_BYTES_MAX.min(part / 2);
    let (mut at, mut again, mut asked) = (0, 0, READAHEAD_BYTES_MIN);
    while at < bytes {
        let window = asked + (at / 4).min(kept_max);
        if window == READAHEAD_BYTES_MAX + kept_max {
            return again + scale_value(bytes - at, over.min(window), window);
        }
        let now = window.min(bytes - at);
        again += over.min(now);
        at += now;
        asked = (2 * asked).min(READAHEAD_BYTES_MAX);
    }
    again
}

/// For each part, in their order, how many of `bytes` fall on it.
fn hashed_loads(parts: &BTreeMap<u32, u64>, bytes: u64, seed: u64) -> Vec<u64> {
    let extent = (bytes / EXTENTS_MIN).clamp(1, EXTENT_BYTES_MAX);
    let extent = (1u64 << extent.ilog2()).max(BLOCK_BYTES);
    let extents = bytes.div_ceil(extent);
    let space: u64 = parts.values().sum();
    let is_bounded = extents.saturating_mul(parts.len() as u64) <= SCORES_MAX;
    let placed = parts.iter().map(|(node, part)| {
        let share = scale_value(bytes, *part, space);
        let bound = match bytes >= space {
            true => share + extent,
            false => (share + extent.max(share / SURPLUS_DIVISOR)).min(*part),
        };
        let drawn = draw_extents(extents, *part, space, seed ^ (u64::from(*node) << 32));
        match is_bounded {
            true => (drawn.min(bound / extent), bound / extent),
            false => (drawn, u64::MAX),
        }
    });
    let (mut loads, bounds): (Vec<u64>, Vec<u64>) = placed.unzip();
    balance_loads(&mut loads, &bounds, extents);
    // The last extent may be short; it takes a whole one all the same.
    loads.iter().map(|load| load * extent).collect()
}

/// How many extents choose a node first: binomially distributed, taken as normal.
fn draw_extents(extents: u64, part: u64, space: u64, seed: u64) -> u64 {
    let mean = scale_value(extents << 10, part, space);
    let variance = scale_value(mean, space - part, space) << 10;
    let deviation_ppm = scale_value(variance.isqrt(), 1_000_000, mean);
    (draw_normal(&mut SeededRng::new(seed), mean, deviation_ppm) + (1 << 9)) >> 10
}

/// Makes the sum right: what finds no room goes where there is some, and to all alike when there
/// is none; what is too much is taken from all alike.
fn balance_loads(loads: &mut [u64], bounds: &[u64], wanted: u64) {
    let count = loads.len() as u64;
    let mut sum: u64 = loads.iter().sum();
    while sum < wanted {
        let roomy = |(load, bound): &(&u64, &u64)| load < bound;
        let roomy = loads.iter().zip(bounds).filter(roomy).count() as u64;
        let each = (wanted - sum).div_ceil(if roomy > 0 { roomy } else { count });
        for (load, bound) in loads.iter_mut().zip(bounds) {
            let room = if roomy > 0 {
                bound.saturating_sub(*load)
            } else {
                each
            };
            let more = each.min(room).min(wanted - sum);
            *load += more;
            sum += more;
        }
    }
    while sum > wanted {
        let each = (sum - wanted).div_ceil(count);
        for load in loads.iter_mut() {
            let less = each.min(*load).min(sum - wanted);
            *load -= less;
            sum -= less;
        }
    }
}

/// `value` times `part` over `whole`, 0 for a whole of nothing.
fn scale_value(value: u64, part: u64, whole: u64) -> u64 {
    let product = u128::from(value) * u128::from(part);
    let scaled = product.checked_div(u128::from(whole)).unwrap_or(0);
    u64::try_from(scaled).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    const MB: u64 = 1_000_000;

    fn equal_parts(count: u32, bytes: u64) -> BTreeMap<u32, u64> {
        (0..count).map(|node| (node, bytes)).collect()
    }

    /// Blocks that a second scan fetches from a cache of so many blocks, one by one: asked for as
    /// readers ask, kept by LRU.
    fn count_refetches(blocks: u64, room: u64) -> u64 {
        let kept_max = RETAINED_BYTES_MAX.min(room * BLOCK_BYTES / 2) / BLOCK_BYTES;
        let (mut kept, mut again) = (VecDeque::new(), 0);
        for scan in 0..2 {
            let (mut at, mut window) = (0, READAHEAD_BYTES_MIN / BLOCK_BYTES);
            while at < blocks {
                let asked = at..(at + window + (at / 4).min(kept_max)).min(blocks);
                window = (2 * window).min(READAHEAD_BYTES_MAX / BLOCK_BYTES);
                let missing = asked.clone().filter(|block| !kept.contains(block));
                let missing: Vec<u64> = missing.collect();
                kept.retain(|block| !asked.contains(block));
                kept.extend(asked.clone());
                while kept.len() as u64 > room {
                    kept.pop_front();
                }
                again += if scan == 1 { missing.len() as u64 } else { 0 };
                at = asked.end;
            }
        }
        again
    }

    #[test]
    fn refetch_formula_matches_a_block_by_block_scan() {
        for (blocks, over) in [
            (245, 1),
            (930, 4),
            (930, 12),
            (930, 20),
            (1075, 90),
            (2000, 7),
        ] {
            let expected = count_refetches(blocks, blocks - over);
            let [bytes, over_bytes, part] = [blocks, over, blocks - over].map(|n| n * BLOCK_BYTES);
            let found = refetch_bytes(bytes, over_bytes, part) / BLOCK_BYTES;
            let off = found.abs_diff(expected) as f64 / expected as f64;
            assert!(off < 0.1, "{blocks}, {over}: {found}, {expected}");
        }
    }

    #[test]
    fn large_shortages_refetch_everything() {
        assert_eq!(refetch_bytes(100_000, BLOCK_BYTES, MB), BLOCK_BYTES);
        assert_eq!(refetch_bytes(500_000, 0, MB), 0);
        for (over, part) in [(2 * MB, 100_000), (10 * MB, 100 * MB), (50 * MB, 100 * MB)] {
            assert_eq!(refetch_bytes(100 * MB, over, part), 100 * MB);
        }
    }

    /// As real nodes do: four in one process fetched 0.10 to 0.11 of 48 MB again.
    #[test]
    fn exactly_sized_caches_refetch_about_a_tenth() {
        let parts = |parts: [u64; 4]| parts.into_iter().zip(0..).map(|(part, node)| (node, part));
        let again = |bytes: u64, of: [u64; 4]| {
            let of =
                |seed| ScanDistribution::hashed(&parts(of).collect(), bytes, seed).refetched_bytes;
            (0..20).map(of).sum::<u64>() as f64 / (20 * bytes) as f64
        };
        let small = again(16 * MB, [3_967_259, 3_967_259, 3_967_259, 4_098_223]);
        let large = again(48 * MB, [11_934_464, 11_934_464, 12_065_536, 12_065_536]);
        assert!((0.06..0.12).contains(&small), "{small}");
        assert!((0.06..0.12).contains(&large), "{large}");
    }

    #[test]
    fn hashed_loads_are_complete_and_bounded() {
        for (count, part, bytes) in [
            (4, 4 * MB, 16 * MB),
            (16, 40 * MB, 600 * MB),
            (3, MB, 9 * MB),
        ] {
            for seed in 0..20 {
                let loads = hashed_loads(&equal_parts(count, part), bytes, seed);
                let sum: u64 = loads.iter().sum();
                assert!(sum - bytes < EXTENT_BYTES_MAX, "{sum} of {bytes}");
                let share = bytes / u64::from(count);
                let extent = (share / 16).max(2 * BLOCK_BYTES).max(2 * EXTENT_BYTES_MAX);
                assert!(
                    loads.iter().all(|load| *load <= share + extent),
                    "{loads:?}"
                );
            }
        }
    }

    #[test]
    fn only_exactly_sized_caches_lose_hashed_blocks() {
        let lost = |part: u64| -> Vec<u64> {
            let of = |seed| ScanDistribution::hashed(&equal_parts(4, part), 16 * MB, seed);
            (0..20)
                .map(|seed| 16 * MB - of(seed).retained_bytes)
                .collect()
        };
        let tight = lost(4 * MB);
        assert!(
            tight
                .iter()
                .all(|lost| *lost > 0 && *lost <= 4 * BLOCK_BYTES),
            "{tight:?}"
        );
        assert_eq!(lost(4_400_000), [0; 20]);
    }

    #[test]
    fn many_extents_spread_by_chance() {
        // 10⁶ extents on 100 nodes: a deviation of 99.5 for each.
        let loads = hashed_loads(&equal_parts(100, 20 << 30), 1_000_000 << 20, 3);
        let off = |load: &u64| ((*load >> 20) as f64 - 10_000.0).powi(2);
        let deviation = (loads.iter().map(off).sum::<f64>() / 100.0).sqrt();
        assert!((80.0..120.0).contains(&deviation), "{deviation}");
    }
}
