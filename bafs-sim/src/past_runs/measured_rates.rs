//! Rates of links, from the time that jobs of a run waited for reads and writes.

use std::collections::BTreeMap;

use bafs_proto::ids::ServerId;
use bafs_sched::timeline::{ExecutionOutcome, ExecutionRecord, Timeline, VolumeRole};
use bafs_workflow::{VolumeIndex, VolumeKind};

use super::journal::VolumeUses;
use crate::simulator::MeasuredLoad;

/// The time of a smaller transfer depends more on latency than on rates.
const MEASURED_BYTES_MIN: u64 = 1_000_000;
/// A shorter wait, in milliseconds, is too inaccurate to measure a rate.
const MEASURED_WAIT_MS_MIN: u64 = 20;
/// A reader of a cache that is at most so many times as fast as the link to home may have waited
/// for that link. If another job has read all data before and they are still cached, it need only
/// be as fast as the link.
const HOME_RATE_FACTOR: u64 = 2;

/// Bytes that crossed the link to home over the time in which some did. Of a cache counts the
/// reader that waited longest: the others waited for the same bytes.
pub(super) fn measure_home_rate(
    timeline: &Timeline,
    uses: &VolumeUses<'_>,
    measured: &MeasuredLoad,
) -> Option<u64> {
    let mut transfers: Vec<(u64, u64, u64)> = Vec::new();
    for sending in &timeline.extract_attempts {
        if let (Some(end), Some(bytes)) = (sending.ended_ms, sending.bytes) {
            transfers.push((sending.requested_ms, end, bytes));
        }
    }
    for making in timeline.volumes.iter().filter(|making| making.is_filled) {
        if let (Some(end), Some(bytes)) =
            (making.created_ms, measured.fill_bytes.get(&making.volume))
        {
            transfers.push((making.requested_ms, end, *bytes));
        }
    }
    let mut longest: BTreeMap<VolumeIndex, (u64, u64, u64)> = BTreeMap::new();
    for execution in completed_executions(timeline) {
        for mount in &uses.workflow.job(execution.job).mounts {
            let kind = &uses.workflow.volume(mount.volume).kind;
            let used = uses.use_of(execution.job, mount.volume);
            if let (VolumeKind::Cache { .. }, Some(used)) = (kind, used) {
                let bytes = uses
                    .mount_load(execution.job, mount.volume, false)
                    .read_bytes;
                let read = (used.wait_ms, execution.requested_ms, bytes);
                let most = longest.entry(mount.volume).or_default();
                *most = read.max(*most);
            }
        }
    }
    let longest = longest.into_values();
    transfers
        .extend(longest.map(|(waited, from, bytes)| (from, from.saturating_add(waited), bytes)));
    transfers.retain(|(from, to, bytes)| {
        *bytes >= MEASURED_BYTES_MIN && to.saturating_sub(*from) >= MEASURED_WAIT_MS_MIN
    });
    transfers.sort_unstable();
    let (mut busy_ms, mut until, mut sum) = (0, 0, 0u64);
    for (from, to, bytes) in transfers {
        busy_ms = to.saturating_sub(from.max(until)).saturating_add(busy_ms);
        until = until.max(to);
        sum = sum.saturating_add(bytes);
    }
    bytes_per_s(sum, busy_ms)
}

/// Reads of one job from a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct CacheRead {
    /// Time of the start action, in milliseconds.
    from_ms: u64,
    /// and how long it waited.
    waited_ms: u64,
    bytes: u64,
}

/// Rates of nodes, in bytes per second, if enough was read or written to measure them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct MeasuredNodeRates {
    /// Of their links.
    pub(super) link_bytes_per_s: Option<u64>,
    /// Rates of their disks, or of the page cache.
    pub(super) disk_bytes_per_s: Option<u64>,
}

/// Rates of nodes' links and disks. A link's rate is the fastest access to a scratch volume of
/// another node, or the cache bytes of all readers on the node per time that they took. A disk's
/// rate is the same for scratch volumes of the own node and for caches that a node keeps whole. A
/// reader that may have waited for home is not counted.
pub(super) fn measure_node_rates(
    timeline: &Timeline,
    uses: &VolumeUses<'_>,
    home_bytes_per_s: Option<u64>,
) -> MeasuredNodeRates {
    let (mut own, mut others) = (None, None);
    let mut caches: BTreeMap<(VolumeIndex, ServerId), Vec<CacheRead>> = BTreeMap::new();
    for execution in completed_executions(timeline) {
        for mount in &uses.workflow.job(execution.job).mounts {
            let Some(used) = uses.use_of(execution.job, mount.volume) else {
                continue;
            };
            if let VolumeKind::Cache { .. } = uses.workflow.volume(mount.volume).kind {
                let reading = CacheRead {
                    from_ms: execution.requested_ms,
                    waited_ms: used.wait_ms,
                    bytes: uses
                        .mount_load(execution.job, mount.volume, false)
                        .read_bytes,
                };
                let of_node = caches.entry((mount.volume, execution.server));
                of_node.or_default().push(reading);
                continue;
            }
            let bytes = used.read_bytes.saturating_add(used.written_bytes);
            if bytes < MEASURED_BYTES_MIN || used.wait_ms < MEASURED_WAIT_MS_MIN {
                continue;
            }
            let mut mounted = execution.mounts.iter().map(|at| &timeline.volumes[*at]);
            let is_own =
                mounted.any(|it| it.volume == mount.volume && it.server == execution.server);
            let fastest = if is_own { &mut own } else { &mut others };
            *fastest = bytes_per_s(bytes, used.wait_ms).max(*fastest);
        }
    }
    let mut parts: BTreeMap<VolumeIndex, BTreeMap<ServerId, u64>> = BTreeMap::new();
    for making in &timeline.volumes {
        if making.role == VolumeRole::Cache {
            let of_volume = parts.entry(making.volume).or_default();
            of_volume.insert(making.server, making.bytes);
        }
    }
    let (mut links, mut disks) = (Vec::new(), Vec::new());
    let came = completion_times(&caches);
    for ((volume, server), readings) in caches {
        let parts = parts.get(&volume);
        let holders = parts.map_or(1, |parts| parts.len() as u64);
        let most = readings.iter().map(|it| it.bytes).max().unwrap_or(0);
        let held = parts.map_or(0, |parts| {
            parts.values().fold(0, |sum, it| it.saturating_add(sum))
        });
        let came_ms = came.get(&volume).filter(|_| held >= most);
        let own = parts.and_then(|parts| parts.get(&server));
        let is_whole = own.is_some_and(|own| *own >= most);
        let (found, holders) = match is_whole {
            true => (&mut disks, 1),
            false => (&mut links, holders),
        };
        let home = home_bytes_per_s.map(|bytes_per_s| CacheOrigin {
            bytes_per_s,
            complete_ms: came_ms.copied(),
        });
        found.extend(transfers_to_node(readings, holders, home));
    }
    MeasuredNodeRates {
        link_bytes_per_s: others.max(mean_rate(&links)),
        disk_bytes_per_s: own.max(mean_rate(&disks)),
    }
}

/// The source of a cache.
#[derive(Debug, Clone, Copy)]
struct CacheOrigin {
    bytes_per_s: u64,
    /// When all that is read of the cache had come, in milliseconds, if it stayed.
    complete_ms: Option<u64>,
}

/// When the first reader of all that is read of a cache had it.
fn completion_times(
    caches: &BTreeMap<(VolumeIndex, ServerId), Vec<CacheRead>>,
) -> BTreeMap<VolumeIndex, u64> {
    let mut came: BTreeMap<VolumeIndex, (u64, u64)> = BTreeMap::new();
    for ((volume, _), readings) in caches {
        for reading in readings {
            let until_ms = reading.from_ms.saturating_add(reading.waited_ms);
            let (bytes, ms) = came.entry(*volume).or_default();
            if reading.bytes > *bytes {
                (*bytes, *ms) = (reading.bytes, until_ms);
            } else if reading.bytes == *bytes {
                *ms = until_ms.min(*ms);
            }
        }
    }
    let came = came.into_iter();
    came.map(|(volume, (_, ms))| (volume, ms)).collect()
}

/// All bytes over all the milliseconds that they took.
fn mean_rate(moved: &[(u64, u64)]) -> Option<u64> {
    let sum = |(bytes, ms): (u64, u64), it: &(u64, u64)| {
        (bytes.saturating_add(it.0), ms.saturating_add(it.1))
    };
    let (bytes, ms) = moved.iter().fold((0, 0), sum);
    bytes_per_s(bytes, ms)
}

/// A node's transfer from a cache that is spread over so many nodes, once for all concurrent
/// readers: bytes, and the milliseconds beyond those of earlier readers.
fn transfers_to_node(
    mut readings: Vec<CacheRead>,
    holders: u64,
    home: Option<CacheOrigin>,
) -> Vec<(u64, u64)> {
    readings.sort_unstable();
    let of_home = |from_ms: u64| {
        let Some(home) = home else { return 0 };
        let is_there = home.complete_ms.is_some_and(|came_ms| came_ms <= from_ms);
        let times = if is_there { 1 } else { HOME_RATE_FACTOR };
        home.bytes_per_s.saturating_mul(times)
    };
    let mut moved = Vec::new();
    let (mut rest, mut counted_ms) = (readings.as_slice(), 0u64);
    while let Some(first) = rest.first() {
        // A reader that starts in the second half of the first one's wait belongs to the next
        // batch.
        let half_ms = first.from_ms.saturating_add(first.waited_ms / 2);
        let count = rest.partition_point(|it| it.from_ms <= half_ms);
        let (lot, later) = rest.split_at(count);
        rest = later;
        let until = |it: &CacheRead| it.from_ms.saturating_add(it.waited_ms);
        let until_ms = lot.iter().map(until).max().unwrap_or(0);
        let ms = until_ms
            .saturating_sub(first.from_ms)
            .max(MEASURED_WAIT_MS_MIN);
        let most = lot.iter().map(|it| it.bytes).max().unwrap_or(0);
        if most < MEASURED_BYTES_MIN
            || bytes_per_s(most, ms).is_none_or(|rate| rate < of_home(first.from_ms))
        {
            continue;
        }
        // Each node has its partition; with one holder all data comes from its disk.
        let all = lot
            .iter()
            .fold(0u64, |sum, it| sum.saturating_add(it.bytes));
        let from_peers = all - all / holders.max(1);
        let crossed = if holders > 1 { from_peers } else { all };
        let before_ms = counted_ms.saturating_sub(first.from_ms).min(ms);
        counted_ms = counted_ms.max(first.from_ms.saturating_add(ms));
        moved.push((crossed, ms - before_ms));
    }
    moved
}

pub(super) fn completed_executions(timeline: &Timeline) -> impl Iterator<Item = &ExecutionRecord> {
    timeline
        .executions
        .iter()
        .filter(|execution| execution.outcome == ExecutionOutcome::Done)
}

fn bytes_per_s(bytes: u64, ms: u64) -> Option<u64> {
    let rate = (u128::from(bytes) * 1_000).checked_div(u128::from(ms))?;
    u64::try_from(rate).ok().filter(|rate| *rate > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    fn cache_read(from_ms: u64, waited_ms: u64, mb: u64) -> CacheRead {
        CacheRead {
            from_ms,
            waited_ms,
            bytes: mb * MB,
        }
    }

    #[test]
    fn simultaneous_readers_share_their_nodes_link() {
        let readings = vec![cache_read(0, 900, 48), cache_read(10, 990, 48)];
        // Three quarters of 96 MB in a second.
        let moved = transfers_to_node(readings.clone(), 4, None);
        assert_eq!(
            (&*moved, mean_rate(&moved)),
            (&[(72 * MB, 1_000)][..], Some(72 * MB))
        );
        assert_eq!(transfers_to_node(readings, 1, None), [(96 * MB, 1_000)]);
        let one_by_one = vec![cache_read(1_000, 1_000, 48), cache_read(0, 500, 48)];
        let moved = transfers_to_node(one_by_one, 2, None);
        assert_eq!(moved, [(24 * MB, 500), (24 * MB, 1_000)]);
        assert_eq!(mean_rate(&moved), Some(32 * MB));
    }

    #[test]
    fn overlapping_reads_count_their_time_once() {
        let moved = transfers_to_node(
            vec![cache_read(0, 1_000, 45), cache_read(600, 900, 45)],
            1,
            None,
        );
        assert_eq!(moved, [(45 * MB, 1_000), (45 * MB, 500)]);
        assert_eq!(mean_rate(&moved), Some(60 * MB));
        let within = vec![cache_read(0, 1_000, 45), cache_read(600, 300, 45)];
        assert_eq!(
            mean_rate(&transfers_to_node(within, 1, None)),
            Some(90 * MB)
        );
    }

    #[test]
    fn reads_waiting_for_home_reveal_no_node_rate() {
        let (cold, warm) = (cache_read(0, 3_000, 48), cache_read(4_000, 1_000, 48));
        let moved = transfers_to_node(vec![cold, warm], 4, cache_origin(None));
        assert_eq!(moved, [(36 * MB, 1_000)]);
        assert!(transfers_to_node(vec![cold], 4, cache_origin(None)).is_empty());
    }

    #[test]
    fn reads_after_the_cache_filled_reveal_slow_links() {
        let (cold, warm) = (cache_read(0, 1_000, 16), cache_read(1_100, 600, 16));
        let of = |came_ms| transfers_to_node(vec![cold, warm], 4, cache_origin(came_ms));
        assert_eq!(of(Some(1_000)), [(12 * MB, 600)]);
        assert!(of(None).is_empty(), "it may not stay");
        assert!(of(Some(1_200)).is_empty(), "it is still coming");
        let lots = |of: [Vec<CacheRead>; 2]| {
            let nodes = of.into_iter().zip([ServerId(1), ServerId(2)]);
            let of_node = nodes.map(|(lot, node)| ((VolumeIndex(0), node), lot));
            completion_times(&of_node.collect())
        };
        // Half of it is not all.
        let half = cache_read(0, 400, 8);
        let found = lots([vec![half, warm], vec![cold]]);
        assert_eq!(found.into_values().collect::<Vec<_>>(), [1_000]);
    }

    fn cache_origin(came_ms: Option<u64>) -> Option<CacheOrigin> {
        Some(CacheOrigin {
            bytes_per_s: 16 * MB,
            complete_ms: came_ms,
        })
    }

    #[test]
    fn reads_without_waiting_count_as_fastest_measurable() {
        let readings = vec![cache_read(0, 0, 8)];
        let moved = transfers_to_node(readings, 2, cache_origin(None));
        assert_eq!(moved, [(4 * MB, 20)]);
        assert!(transfers_to_node(vec![cache_read(0, 0, 0)], 2, None).is_empty());
    }
}
