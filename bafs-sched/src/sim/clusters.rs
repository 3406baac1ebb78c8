//! Clusters of simulated nodes and their cooperative caches: how much of each volume is there, and
//! what a reader has to wait for. Starts no flow itself.
//!
//! Blocks are modelled as amounts. The first reader of what is missing makes it cross the link to
//! home, others wait for the same transfer; when it is over, what those miss who read more comes
//! with the next one. Where a cache has less space than the volume, a scan
//! finds under LRU nothing that stayed, under MRU as much as there is space.

use std::collections::BTreeMap;

use crate::workflow::{CachePolicy, VolumeIndex};

/// A cache volume in one cluster.
#[derive(Debug, Clone)]
pub(super) struct Cache {
    policy: CachePolicy,
    /// What its instances can hold together.
    space_bytes: u64,
    /// Instances, one for each node that has one.
    instances: u32,
    /// The links of these nodes together, as a link of the simulation.
    pub(super) link: u32,
    /// Rate of that link, in bytes per second.
    rate: u64,
    /// What has been fetched and is still there.
    resident_bytes: u64,
    fetching: Option<Transfer>,
    /// Readers that wait for the transfer under way.
    pub(super) waiting: Vec<Waiting>,
    /// How often all of it was lost: what nodes have in memory is of no use then.
    pub(super) generation: u32,
}

/// What crosses the link to home for a cache.
#[derive(Debug, Clone, Copy)]
struct Transfer {
    bytes: u64,
    /// What is there when it is over.
    stays_bytes: u64,
    /// What its first reader reads, from the beginning on.
    read_bytes: u64,
}

/// An execution, with its generation, that waits to read so much of a cache.
#[derive(Debug, Clone, Copy)]
pub(super) struct Waiting {
    pub(super) execution: u32,
    pub(super) generation: u32,
    pub(super) bytes: u64,
}

impl Cache {
    /// An instance was created on a node with a link of this rate; answers the rate of all.
    pub(super) fn add(&mut self, bytes: u64, rate: u64) -> u64 {
        self.instances += 1;
        self.space_bytes += bytes;
        self.rate = self.rate.saturating_add(rate);
        self.rate
    }

    /// An instance is gone, with the blocks that it held; answers the rate of those left.
    pub(super) fn remove(&mut self, bytes: u64, rate: u64) -> u64 {
        let space_bytes = self.space_bytes;
        let left = |held: u64| {
            let lost = u128::from(held) * u128::from(bytes);
            held.saturating_sub(lost.checked_div(u128::from(space_bytes)).unwrap_or(0) as u64)
        };
        self.resident_bytes = left(self.resident_bytes);
        if let Some(transfer) = &mut self.fetching {
            transfer.stays_bytes = left(transfer.stays_bytes);
        }
        self.instances -= 1;
        self.space_bytes -= bytes;
        if self.instances == 0 {
            self.resident_bytes = 0;
            self.generation += 1;
        }
        self.rate = self.rate.saturating_sub(rate);
        self.rate
    }

    /// How many nodes have a part.
    pub(super) fn instances(&self) -> u32 {
        self.instances
    }

    /// Bytes that a reader of `bytes` has to make cross the link to home: nothing when all is
    /// there. While a transfer is under way, readers wait for that one. So many bytes have just
    /// `passed`: who waited for them has read them, whether they stay or not.
    pub(super) fn missing(&mut self, bytes: u64, passed: u64) -> u64 {
        if self.fetching.is_some() {
            return 0;
        }
        let is_roomy = self.space_bytes >= bytes;
        if is_roomy && self.resident_bytes >= bytes {
            return 0;
        }
        let (stays, found) = match (is_roomy, self.policy) {
            (true, _) => (bytes, self.resident_bytes),
            (false, CachePolicy::Lru) => (0, 0),
            (false, CachePolicy::Mru) => (self.space_bytes, self.resident_bytes),
        };
        let transfer = Transfer {
            bytes: bytes.saturating_sub(found.max(passed)).max(1),
            stays_bytes: stays,
            read_bytes: bytes,
        };
        self.fetching = Some(transfer);
        transfer.bytes
    }

    /// Bytes of the first `bytes` of it that are not there and would stay.
    pub(super) fn lacking(&self, bytes: u64) -> u64 {
        bytes
            .min(self.space_bytes)
            .saturating_sub(self.resident_bytes)
    }

    /// So many bytes came before anybody read them.
    pub(super) fn came(&mut self, bytes: u64) {
        self.resident_bytes = (self.resident_bytes + bytes).min(self.space_bytes);
    }

    /// Bytes of the transfer under way; 0 when there is none.
    pub(super) fn coming(&self) -> u64 {
        self.fetching.map_or(0, |transfer| transfer.bytes)
    }

    /// The transfer is over: answers how much a reader may have read by it.
    pub(super) fn fetched(&mut self) -> u64 {
        let Some(transfer) = self.fetching.take() else {
            return 0;
        };
        let all = transfer.stays_bytes;
        self.resident_bytes = self.resident_bytes.max(all).min(self.space_bytes);
        transfer.read_bytes
    }

    /// Of `bytes` that a reader on a node with an instance reads, those that come from peers: a
    /// distributed hash gives each instance an equal share of the blocks.
    pub(super) fn at_peers(&self, bytes: u64) -> u64 {
        bytes - bytes / u64::from(self.instances.max(1))
    }
}

/// All caches.
#[derive(Debug, Clone, Default)]
pub(super) struct Caches {
    all: Vec<Cache>,
    known: BTreeMap<(u32, VolumeIndex), u32>,
}

impl Caches {
    /// The cache of a volume in a cluster, if a part of it was ever there.
    pub(super) fn find(&self, cluster: u32, volume: VolumeIndex) -> Option<u32> {
        self.known.get(&(cluster, volume)).copied()
    }

    /// The cache of a volume in a cluster; if there is none yet, one with this link.
    pub(super) fn index(
        &mut self,
        cluster: u32,
        volume: VolumeIndex,
        policy: CachePolicy,
        link: u32,
    ) -> u32 {
        *self.known.entry((cluster, volume)).or_insert_with(|| {
            self.all.push(Cache {
                policy,
                space_bytes: 0,
                instances: 0,
                link,
                rate: 0,
                resident_bytes: 0,
                fetching: None,
                waiting: Vec::new(),
                generation: 0,
            });
            self.all.len() as u32 - 1
        })
    }

    pub(super) fn get(&mut self, index: u32) -> &mut Cache {
        &mut self.all[index as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(policy: CachePolicy, shares: &[u64]) -> Cache {
        let mut caches = Caches::default();
        let index = caches.index(0, VolumeIndex(0), policy, 0);
        let cache = caches.get(index);
        for share in shares {
            cache.add(*share, 1);
        }
        cache.clone()
    }

    fn scan(cache: &mut Cache, bytes: u64) -> u64 {
        let missing = cache.missing(bytes, 0);
        assert_eq!(cache.coming(), missing);
        cache.fetched();
        missing
    }

    #[test]
    fn each_byte_crosses_once_while_there_is_space() {
        let mut cache = cache(CachePolicy::Lru, &[50, 50]);
        assert_eq!(cache.missing(100, 0), 100);
        assert_eq!(
            cache.missing(100, 0),
            0,
            "the second reader waits for the first"
        );
        cache.fetched();
        assert_eq!(scan(&mut cache, 100), 0);
        assert_eq!(cache.at_peers(100), 50);
        cache.remove(50, 1);
        cache.add(50, 1);
        assert_eq!(
            scan(&mut cache, 100),
            50,
            "what a lost node held is fetched again"
        );
    }

    #[test]
    fn who_waited_for_less_than_it_reads_fetches_the_rest() {
        let mut cache = cache(CachePolicy::Lru, &[100, 100]);
        assert_eq!(cache.missing(10, 0), 10);
        let passed = cache.fetched();
        assert_eq!((passed, cache.missing(200, passed)), (10, 190));
    }

    #[test]
    fn what_a_node_held_that_was_lost_during_a_transfer_is_fetched_again() {
        let mut cache = cache(CachePolicy::Lru, &[50, 50]);
        cache.missing(100, 0);
        cache.remove(50, 1);
        cache.add(50, 1);
        cache.fetched();
        assert_eq!(scan(&mut cache, 100), 50);
    }

    #[test]
    fn a_scan_longer_than_the_cache_falls_off_under_lru_and_degrades_under_mru() {
        let mut lru = cache(CachePolicy::Lru, &[40, 40]);
        assert_eq!([scan(&mut lru, 100), scan(&mut lru, 100)], [100, 100]);
        let mut mru = cache(CachePolicy::Mru, &[40, 40]);
        assert_eq!([scan(&mut mru, 100), scan(&mut mru, 100)], [100, 20]);
    }
}
