//! Clusters of simulated nodes and their cooperative caches: how much of each volume is there, and
//! what a reader has to wait for. Starts no flow itself.
//!
//! Blocks are modelled as amounts. The first reader of what is missing makes it cross the link to
//! home, others wait for the same transfer; when it is over, what those miss who read more comes
//! with the next one. Where a cache has less space than what falls on its nodes
//! (`load_imbalance.rs`), a scan finds under MRU as much as there is space, under LRU little or
//! nothing of what stayed.

use std::collections::BTreeMap;

use bafs_workflow::{CachePolicy, VolumeIndex};

use super::load_imbalance::ScanDistribution;

/// A cache volume in one cluster.
#[derive(Debug, Clone)]
pub(super) struct ClusterCache {
    policy: CachePolicy,
    /// What its instances can hold together.
    space_bytes: u64,
    /// Instances, by their nodes, with what each can hold.
    instance_bytes: BTreeMap<u32, u64>,
    /// Of instances that can hold all that is read, how much their own readers have brought there.
    peer_read_bytes: BTreeMap<u32, u64>,
    /// Of how blocks fall on nodes, where hashing places them.
    placement_seed: Option<u64>,
    /// For a scan of so many bytes; forgotten when instances come or go.
    scan_distribution: Option<(u64, ScanDistribution)>,
    /// The links of these nodes together, as a link of the simulation.
    pub(super) link: u32,
    /// Rate of that link, in bytes per second.
    rate: u64,
    /// What has been fetched and is still there, from the beginning on.
    resident_bytes: u64,
    /// The length of a scan under LRU that pushed out its own beginning, and what the next of that
    /// length finds of it.
    lru_remainder: Option<(u64, u64)>,
    fetching: Option<HomeTransfer>,
    /// The execution, with its generation, that fetched last under LRU: who comes while it reads
    /// finds what it has brought.
    pub(super) leader: Option<(u32, u32)>,
    /// Readers that wait for the transfer under way.
    pub(super) waiting_readers: Vec<WaitingReader>,
    /// How often all of it was lost: what nodes have in memory is of no use then.
    pub(super) generation: u32,
}

/// What crosses the link to home for a cache.
#[derive(Debug, Clone, Copy)]
struct HomeTransfer {
    bytes: u64,
    /// What a scan as long finds when it is over.
    stays_bytes: u64,
    /// Whether the beginning has been pushed out then.
    is_rolling: bool,
    /// What its first reader reads, from the beginning on.
    read_bytes: u64,
}

/// An execution, with its generation, that waits to read so much of a cache.
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

    /// An instance is gone, with the blocks that it held; answers the rate of those left.
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

    /// Bytes that a reader of `bytes` has to make cross the link to home: nothing when all is
    /// there. While a transfer is under way, readers wait for that one. So many bytes have just
    /// `passed`: who waited for them has read them, whether they stay or not.
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

    /// So many bytes came before anybody read them.
    pub(super) fn add_warmed(&mut self, bytes: u64) {
        self.resident_bytes = (self.resident_bytes + bytes).min(self.space_bytes);
    }

    /// Bytes of the transfer under way; 0 when there is none.
    pub(super) fn transfer_bytes(&self) -> u64 {
        self.fetching.map_or(0, |transfer| transfer.bytes)
    }

    /// The transfer is over: answers how much a reader may have read by it.
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

    /// What an instance of so many bytes has of what is there.
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

    /// So many bytes were read by the instance of a node, from the beginning on. With room for all
    /// it keeps what it got from its peers, where blocks are placed as real nodes do.
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
