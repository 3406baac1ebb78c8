//! Clusters of simulated nodes and their cooperative caches: cached bytes of each volume, and the
//! waits of readers. Starts no flow itself.
//!
//! Blocks are modelled as amounts. The first reader of missing data starts a transfer over the link
//! to home, and others wait for the same transfer. At its end, the remaining bytes of longer
//! readers form the next transfer. If a cache has less space than its nodes' shares
//! (`load_imbalance.rs`), a scan under MRU finds as much as fits; under LRU it finds little or
//! nothing.

use std::collections::BTreeMap;

use bafs_workflow::{CachePolicy, VolumeIndex};

use super::link::FlowId;
use super::load_imbalance::ScanDistribution;

/// Caches that are fetched before their readers start.
#[derive(Debug, Clone, Default)]
pub(super) struct Warmings {
    /// Caches that are to be fetched, with their clusters, and how much of each.
    pub(super) wanted_bytes: BTreeMap<(u32, u32), u64>,
    /// For each cluster the flow in progress, its cache and its bytes.
    pub(super) active_flows: BTreeMap<u32, (FlowId, u32, u64)>,
    /// The largest read of a cache by one job, once computed.
    pub(super) read_bytes_max: BTreeMap<VolumeIndex, u64>,
}

/// A cache volume in one cluster.
#[derive(Debug, Clone)]
pub(super) struct ClusterCache {
    policy: CachePolicy,
    /// Capacity of all instances together.
    space_bytes: u64,
    /// Instances, by their nodes, with the capacity of each.
    instance_bytes: BTreeMap<u32, u64>,
    /// For instances with space for all data that is read: the bytes that their own readers have
    /// inserted.
    peer_read_bytes: BTreeMap<u32, u64>,
    /// The distribution of blocks over nodes, if hashing places them.
    placement_seed: Option<u64>,
    /// For a scan of so many bytes; reset when instances change.
    scan_distribution: Option<(u64, ScanDistribution)>,
    /// The links of these nodes together, as a link of the simulation.
    pub(super) link: u32,
    /// Rate of that link, in bytes per second.
    rate: u64,
    /// Bytes that have been fetched and are still cached, from the start of the volume.
    resident_bytes: u64,
    /// The length of a scan under LRU that evicted its own beginning, and the bytes that the next
    /// scan of that length finds.
    lru_remainder: Option<(u64, u64)>,
    fetching: Option<HomeTransfer>,
    /// The execution, with its generation, that fetched last under LRU: a reader that starts while
    /// it reads finds its data.
    pub(super) leader: Option<(u32, u32)>,
    /// Readers that wait for the transfer in progress.
    pub(super) waiting_readers: Vec<WaitingReader>,
    /// How often all of it was lost: earlier data in nodes' memory is useless then.
    pub(super) generation: u32,
}

/// A transfer over the link to home for a cache.
#[derive(Debug, Clone, Copy)]
struct HomeTransfer {
    bytes: u64,
    /// Bytes that a scan of the same length finds afterwards.
    stays_bytes: u64,
    /// Whether the beginning has been pushed out then.
    is_rolling: bool,
    /// Bytes that its first reader reads, from the start of the volume.
    read_bytes: u64,
}

/// An execution, with its generation, that waits for so many bytes of a cache.
#[derive(Debug, Clone, Copy)]
pub(super) struct WaitingReader {
    pub(super) execution: u32,
    pub(super) generation: u32,
    pub(super) bytes: u64,
}

impl ClusterCache {
    /// An instance was created on a node with a link of this rate; answers the rate of all.
    pub(super) fn add_instance(&mut self, node: u32, bytes: u64, rate: u64) -> u64 {
        self.instance_bytes.insert(node, bytes);
        self.scan_distribution = None;
        self.space_bytes += bytes;
        self.rate = self.rate.saturating_add(rate);
        self.rate
    }

    /// An instance is lost with its blocks; returns the remaining share.
    pub(super) fn remove_instance(&mut self, node: u32, bytes: u64, rate: u64) -> u64 {
        let space_bytes = self.space_bytes;
        let left = |held: u64| {
            let lost = u128::from(held) * u128::from(bytes);
            held.saturating_sub(lost.checked_div(u128::from(space_bytes)).unwrap_or(0) as u64)
        };
        self.resident_bytes = left(self.resident_bytes);
        self.lru_remainder = self.lru_remainder.map(|(scan, found)| (scan, left(found)));
        if let Some(transfer) = &mut self.fetching {
            transfer.stays_bytes = left(transfer.stays_bytes);
        }
        self.instance_bytes.remove(&node);
        self.peer_read_bytes.remove(&node);
        self.scan_distribution = None;
        self.space_bytes -= bytes;
        if self.instance_bytes.is_empty() {
            self.resident_bytes = 0;
            self.lru_remainder = None;
            self.generation += 1;
        }
        self.rate = self.rate.saturating_sub(rate);
        self.rate
    }

    /// How many nodes have a part.
    pub(super) fn instance_count(&self) -> u32 {
        self.instance_bytes.len() as u32
    }

    /// How what readers of `bytes` scan lies on the nodes.
    fn distribute_scan(&mut self, bytes: u64) -> ScanDistribution {
        let is_short = || self.instance_bytes.values().any(|part| *part < bytes);
        let seed = match self.placement_seed {
            Some(seed) if is_short() => seed,
            _ => {
                return ScanDistribution::uniform(
                    self.space_bytes,
                    self.instance_bytes.len() as u64,
                    bytes,
                );
            }
        };
        match self.scan_distribution {
            Some((known, spread)) if known == bytes => spread,
            _ => {
                let spread = ScanDistribution::hashed(&self.instance_bytes, bytes, seed);
                self.scan_distribution = Some((bytes, spread));
                spread
            }
        }
    }

    /// Bytes that a reader of `bytes` has to fetch over the link to home: 0 if all are cached.
    /// During a transfer, readers wait for that one. A number of bytes has just `passed`: their
    /// waiters have read them, whether they stay cached or not.
    pub(super) fn bytes_to_fetch(&mut self, bytes: u64, passed: u64) -> u64 {
        if self.fetching.is_some() {
            return 0;
        }
        let spread = self.distribute_scan(bytes);
        let is_roomy = spread.retained_bytes >= bytes;
        if is_roomy && self.resident_bytes >= bytes {
            return 0;
        }
        let is_rolling = !is_roomy && self.policy == CachePolicy::Lru;
        let left = self
            .lru_remainder
            .filter(|(scan, _)| is_rolling && *scan == bytes);
        let found = left.map_or(self.resident_bytes, |(_, found)| found);
        let transfer = HomeTransfer {
            bytes: bytes.saturating_sub(found.max(passed)).max(1),
            stays_bytes: match is_roomy {
                true => bytes,
                false => spread.hit_bytes(bytes, self.policy),
            },
            is_rolling,
            read_bytes: bytes,
        };
        self.fetching = Some(transfer);
        transfer.bytes
    }

    /// Bytes of the first `bytes` of it that are not there and would stay.
    pub(super) fn missing_bytes(&self, bytes: u64) -> u64 {
        bytes
            .min(self.space_bytes)
            .saturating_sub(self.resident_bytes)
    }

    /// Warming fetched so many bytes.
    pub(super) fn add_warmed(&mut self, bytes: u64) {
        self.resident_bytes = (self.resident_bytes + bytes).min(self.space_bytes);
    }

    /// Bytes of the transfer in progress; 0 without one.
    pub(super) fn transfer_bytes(&self) -> u64 {
        self.fetching.map_or(0, |transfer| transfer.bytes)
    }

    /// The transfer has ended: returns how much a reader may have read by it.
    pub(super) fn end_transfer(&mut self) -> u64 {
        let Some(transfer) = self.fetching.take() else {
            return 0;
        };
        let stays = transfer.stays_bytes;
        if transfer.is_rolling {
            self.resident_bytes = 0;
            self.lru_remainder = Some((transfer.read_bytes, stays));
        } else {
            self.resident_bytes = self.resident_bytes.max(stays).min(self.space_bytes);
            self.lru_remainder = None;
        }
        transfer.read_bytes
    }

    /// Cached bytes that an instance of so many bytes has.
    pub(super) fn instance_share(&self, bytes: u64) -> u64 {
        let share = u128::from(self.resident_bytes) * u128::from(bytes);
        let share = share.checked_div(u128::from(self.space_bytes));
        share.unwrap_or(0) as u64
    }

    /// Of `bytes` that are read by the instance of a node, of which the reader has all but a
    /// `rest` in memory, those that come from peers: a distributed hash gives each instance an
    /// equal share of the blocks.
    pub(super) fn bytes_from_peers(&self, holder: u32, bytes: u64, rest: u64) -> u64 {
        let brought = self.peer_read_bytes.get(&holder).copied().unwrap_or(0);
        // Both are of the beginning.
        let new = rest.min(bytes.saturating_sub(brought));
        new - new / u64::from(self.instance_count().max(1))
    }

    /// So many bytes were read by the instance of a node, from the beginning on. With space for
    /// all, it keeps the data that it got from its peers, if blocks are placed as on real nodes.
    pub(super) fn note_read(&mut self, holder: u32, bytes: u64) {
        let is_whole = self
            .instance_bytes
            .get(&holder)
            .is_some_and(|part| *part >= bytes);
        if is_whole && self.placement_seed.is_some() {
            let brought = self.peer_read_bytes.entry(holder).or_default();
            *brought = bytes.max(*brought);
        }
    }
}

/// All caches.
#[derive(Debug, Clone, Default)]
pub(super) struct ClusterCaches {
    all: Vec<ClusterCache>,
    index_of: BTreeMap<(u32, VolumeIndex), u32>,
}

impl ClusterCaches {
    /// The cache of a volume in a cluster, if a part of it was ever there.
    pub(super) fn find(&self, cluster: u32, volume: VolumeIndex) -> Option<u32> {
        self.index_of.get(&(cluster, volume)).copied()
    }

    /// The cache of a volume in a cluster; if there is none yet, one with this link.
    pub(super) fn find_or_create(
        &mut self,
        cluster: u32,
        volume: VolumeIndex,
        policy: CachePolicy,
        (link, imbalance): (u32, Option<u64>),
    ) -> u32 {
        *self.index_of.entry((cluster, volume)).or_insert_with(|| {
            self.all.push(ClusterCache {
                policy,
                space_bytes: 0,
                instance_bytes: BTreeMap::new(),
                peer_read_bytes: BTreeMap::new(),
                placement_seed: imbalance,
                scan_distribution: None,
                link,
                rate: 0,
                resident_bytes: 0,
                lru_remainder: None,
                fetching: None,
                leader: None,
                waiting_readers: Vec::new(),
                generation: 0,
            });
            self.all.len() as u32 - 1
        })
    }

    pub(super) fn get(&mut self, index: u32) -> &mut ClusterCache {
        &mut self.all[index as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_cache(policy: CachePolicy, shares: &[u64]) -> ClusterCache {
        let mut caches = ClusterCaches::default();
        let index = caches.find_or_create(0, VolumeIndex(0), policy, (0, None));
        let cache = caches.get(index);
        for (node, share) in shares.iter().enumerate() {
            cache.add_instance(node as u32, *share, 1);
        }
        cache.clone()
    }

    fn scan_cache(cache: &mut ClusterCache, bytes: u64) -> u64 {
        let missing = cache.bytes_to_fetch(bytes, 0);
        assert_eq!(cache.transfer_bytes(), missing);
        cache.end_transfer();
        missing
    }

    #[test]
    fn bytes_cross_once_while_the_cache_has_space() {
        let mut cache = test_cache(CachePolicy::Lru, &[50, 50]);
        assert_eq!(cache.bytes_to_fetch(100, 0), 100);
        assert_eq!(
            cache.bytes_to_fetch(100, 0),
            0,
            "the second reader waits for the first"
        );
        cache.end_transfer();
        assert_eq!(scan_cache(&mut cache, 100), 0);
        assert_eq!(cache.bytes_from_peers(0, 100, 100), 50);
        cache.remove_instance(1, 50, 1);
        cache.add_instance(1, 50, 1);
        assert_eq!(
            scan_cache(&mut cache, 100),
            50,
            "what a lost node held is fetched again"
        );
    }

    #[test]
    fn node_holding_the_whole_cache_asks_peers_once() {
        let mut cache = test_cache(CachePolicy::Lru, &[100, 60]);
        cache.placement_seed = Some(1);
        cache.note_read(0, 80);
        cache.note_read(1, 80);
        let at_peers = [0, 1].map(|node| cache.bytes_from_peers(node, 80, 80));
        assert_eq!(at_peers, [0, 40]);
        assert_eq!(
            cache.bytes_from_peers(0, 100, 100),
            10,
            "the rest is new to it"
        );
        assert_eq!(
            cache.bytes_from_peers(0, 100, 40),
            10,
            "what is in memory is what the node has brought too"
        );
        cache.remove_instance(0, 100, 1);
        cache.add_instance(0, 100, 1);
        assert_eq!(cache.bytes_from_peers(0, 80, 80), 40);
    }

    #[test]
    fn reader_fetches_the_rest_after_a_shorter_transfer() {
        let mut cache = test_cache(CachePolicy::Lru, &[100, 100]);
        assert_eq!(cache.bytes_to_fetch(10, 0), 10);
        let passed = cache.end_transfer();
        assert_eq!((passed, cache.bytes_to_fetch(200, passed)), (10, 190));
    }

    #[test]
    fn data_lost_during_a_transfer_is_refetched() {
        let mut cache = test_cache(CachePolicy::Lru, &[50, 50]);
        cache.bytes_to_fetch(100, 0);
        cache.remove_instance(1, 50, 1);
        cache.add_instance(1, 50, 1);
        cache.end_transfer();
        assert_eq!(scan_cache(&mut cache, 100), 50);
    }

    #[test]
    fn long_scans_thrash_lru_but_only_degrade_mru() {
        let mb = |mb: [u64; 2]| mb.map(|mb| mb * 1_000_000);
        let mut lru = test_cache(CachePolicy::Lru, &mb([40, 40]));
        let scans = [(); 2].map(|()| scan_cache(&mut lru, 100_000_000));
        assert_eq!(scans, mb([100, 100]));
        let mut mru = test_cache(CachePolicy::Mru, &[40, 40]);
        assert_eq!(
            [scan_cache(&mut mru, 100), scan_cache(&mut mru, 100)],
            [100, 20]
        );
    }

    #[test]
    fn nearly_fitting_scan_under_lru_refetches_little() {
        const MB: u64 = 1_000_000;
        let mut lru = test_cache(CachePolicy::Lru, &[50 * MB, 49_700_000]);
        assert_eq!(scan_cache(&mut lru, 100 * MB), 100 * MB);
        let again = scan_cache(&mut lru, 100 * MB);
        // 0.3 MB of each 1.6 at first, later of each 10, that are asked for at once or stay.
        assert!((3 * MB..6 * MB).contains(&again), "{again}");
        assert_eq!(scan_cache(&mut lru, 100 * MB), again);
        assert_eq!(scan_cache(&mut lru, MB), MB, "the beginning was pushed out");
    }
}
