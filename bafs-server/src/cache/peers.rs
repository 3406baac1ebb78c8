//! Which servers share a cooperative cache, as this server believes; makes no call.
//!
//! Beliefs come from adverts (every second or so) and, sooner, from newcomers that introduce
//! themselves. A peer that failed is suspect for a while and asked again later.

use std::collections::BTreeMap;

use bafs_proto::hash::Digest;
use bafs_proto::ids::ServerId;
use bafs_proto::message::{Advert, ServerKind};
use bafs_proto::time::Time;

use crate::serving::ADVERT_TTL_MS;

/// An introduction counts until adverts had the time to say the same.
const INTRODUCTION_MS: u64 = 2 * ADVERT_TTL_MS;

/// A peer that failed is left alone for so long, and twice as long after each further failure.
const SUSPECT_MS_MIN: u64 = 2_000;
const SUSPECT_MS_MAX: u64 = 60_000;

/// After a change of the peers, who became primary first asks who was it before, for so long.
const INHERIT_MS: u64 = 600_000;

/// A server that holds blocks of a cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PeerCache {
    /// The server.
    pub(crate) server: ServerId,
    /// Where it listens.
    pub(crate) address: String,
    /// Most bytes that it keeps of this cache.
    pub(crate) capacity_bytes: u64,
}

/// Names a state of a cooperative cache.
pub(crate) type CacheName = (String, Digest);

/// What this server believes of others.
#[derive(Debug)]
pub(crate) struct Peers {
    own: ServerId,
    nodes: BTreeMap<ServerId, Advert>,
    introduced: BTreeMap<(CacheName, ServerId), (u64, Time)>,
    suspects: BTreeMap<ServerId, Suspicion>,
    /// The last set of peers seen for a cache, and when it last changed.
    changes: BTreeMap<CacheName, (Vec<ServerId>, Time)>,
}

#[derive(Debug, Clone, Copy)]
struct Suspicion {
    until: Time,
    failures: u32,
}

/// Names may come and go; the memory of changes is cut to those in use beyond this number.
const CHANGES_MAX: usize = 4096;

impl Peers {
    /// No belief yet.
    pub(crate) fn new(own: ServerId) -> Self {
        Self {
            own,
            nodes: BTreeMap::new(),
            introduced: BTreeMap::new(),
            suspects: BTreeMap::new(),
            changes: BTreeMap::new(),
        }
    }

    /// Takes the live nodes of the group, instead of those known before.
    pub(crate) fn set(&mut self, adverts: Vec<Advert>, now: Time) {
        let nodes = adverts
            .into_iter()
            .filter(|a| a.kind == ServerKind::Node && a.id != self.own);
        self.nodes = nodes.map(|advert| (advert.id, advert)).collect();
        let nodes = &self.nodes;
        self.introduced.retain(|(_, server), (_, since)| {
            nodes.contains_key(server) && now.ms_since(*since) < INTRODUCTION_MS
        });
        self.suspects.retain(|server, _| nodes.contains_key(server));
    }

    /// Other nodes of the group with their addresses.
    pub(crate) fn nodes(&self) -> Vec<(ServerId, String)> {
        self.nodes
            .iter()
            .map(|(id, advert)| (*id, advert.address.clone()))
            .collect()
    }

    /// A server said that it shares a cache. Tells whether that is news.
    pub(crate) fn introduce(
        &mut self,
        name: &CacheName,
        server: ServerId,
        capacity_bytes: u64,
        now: Time,
    ) -> bool {
        if server == self.own || !self.nodes.contains_key(&server) {
            return false;
        }
        let known = self.of(name, now).iter().any(|peer| peer.server == server);
        self.introduced
            .insert((name.clone(), server), (capacity_bytes, now));
        !known
    }

    /// The other servers that share this state of a cache, ordered by id.
    pub(crate) fn of(&self, name: &CacheName, now: Time) -> Vec<PeerCache> {
        let peer = |(server, advert): (&ServerId, &Advert)| {
            let advertised = advert
                .caches
                .iter()
                .filter(|cache| cache.cooperative == name.0 && cache.manifest == name.1)
                // Several volumes of one name: all servers must pick the same one.
                .min_by_key(|cache| cache.volume)
                .map(|cache| cache.capacity_bytes);
            let introduced = self.introduced.get(&(name.clone(), *server));
            let capacity_bytes = advertised.or_else(|| {
                introduced
                    .filter(|(_, since)| now.ms_since(*since) < INTRODUCTION_MS)
                    .map(|(capacity_bytes, _)| *capacity_bytes)
            })?;
            let address = advert.address.clone();
            Some(PeerCache {
                server: *server,
                address,
                capacity_bytes,
            })
        };
        self.nodes.iter().filter_map(peer).collect()
    }

    /// Whether the set of peers of a cache changed so lately that blocks may still be at who was
    /// primary before.
    pub(crate) fn changed_lately(
        &mut self,
        name: &CacheName,
        peers: &[PeerCache],
        now: Time,
    ) -> bool {
        if self.changes.len() > CHANGES_MAX {
            self.changes.clear();
        }
        let servers: Vec<_> = peers.iter().map(|peer| peer.server).collect();
        let change = self
            .changes
            .entry(name.clone())
            .or_insert_with(|| (servers.clone(), now));
        if change.0 != servers {
            *change = (servers, now);
        }
        now.ms_since(change.1) < INHERIT_MS
    }

    /// Whether a peer failed so lately that it is not asked now.
    pub(crate) fn is_suspect(&self, server: ServerId, now: Time) -> bool {
        self.suspects
            .get(&server)
            .is_some_and(|suspicion| now < suspicion.until)
    }

    /// A peer could not be reached or answered what it must not.
    pub(crate) fn suspect(&mut self, server: ServerId, now: Time) {
        let before = self.suspects.get(&server).copied();
        // Calls that were under way together fail together: that is one failure.
        if before.is_some_and(|suspicion| now < suspicion.until) {
            return;
        }
        let failures = before.map_or(0, |suspicion| suspicion.failures) + 1;
        let pause_ms = SUSPECT_MS_MIN.saturating_mul(1 << (failures - 1).min(16));
        let until = now.plus_ms(pause_ms.min(SUSPECT_MS_MAX));
        self.suspects.insert(server, Suspicion { until, failures });
    }

    /// A peer answered as it should.
    pub(crate) fn trust(&mut self, server: ServerId) {
        self.suspects.remove(&server);
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::VolumeId;
    use bafs_proto::message::CacheAdvert;

    use super::*;

    const NAME: &str = "nr";

    fn advert(id: u64, manifests: &[u8]) -> Advert {
        let caches = manifests.iter().map(|&manifest| CacheAdvert {
            cooperative: NAME.to_owned(),
            volume: VolumeId(1),
            manifest: Digest([manifest; 32]),
            capacity_bytes: 100 * id,
            used_bytes: 0,
        });
        Advert {
            id: ServerId(id),
            kind: ServerKind::Node,
            name: String::new(),
            address: format!("n{id}"),
            group: String::new(),
            ttl_ms: ADVERT_TTL_MS,
            capacity_bytes: 0,
            capacity_files: 0,
            free_bytes: 0,
            free_files: 0,
            slots: 0,
            jobs: 0,
            caches: caches.collect(),
        }
    }

    fn ids(peers: &Peers, manifest: u8, now: u64) -> Vec<u64> {
        let name = (NAME.to_owned(), Digest([manifest; 32]));
        peers
            .of(&name, Time(now))
            .iter()
            .map(|peer| peer.server.0)
            .collect()
    }

    #[test]
    fn only_the_same_state_of_the_source_is_shared() {
        let mut peers = Peers::new(ServerId(1));
        peers.set(
            vec![advert(1, &[7]), advert(2, &[7]), advert(3, &[8])],
            Time(0),
        );
        assert_eq!(ids(&peers, 7, 0), [2]);
        assert_eq!(ids(&peers, 8, 0), [3]);
    }

    #[test]
    fn an_introduction_counts_until_adverts_must_know() {
        let mut peers = Peers::new(ServerId(1));
        let name = (NAME.to_owned(), Digest([7; 32]));
        assert!(
            !peers.introduce(&name, ServerId(2), 5, Time(0)),
            "not a live node"
        );
        peers.set(vec![advert(2, &[])], Time(0));
        assert!(peers.introduce(&name, ServerId(2), 5, Time(0)));
        assert!(!peers.introduce(&name, ServerId(2), 5, Time(0)), "no news");
        assert_eq!(ids(&peers, 7, INTRODUCTION_MS - 1), [2]);
        assert_eq!(ids(&peers, 7, INTRODUCTION_MS), [] as [u64; 0]);
    }

    #[test]
    fn suspicion_grows_and_ends() {
        let mut peers = Peers::new(ServerId(1));
        let peer = ServerId(2);
        peers.suspect(peer, Time(0));
        peers.suspect(peer, Time(1));
        assert!(peers.is_suspect(peer, Time(SUSPECT_MS_MIN - 1)));
        assert!(!peers.is_suspect(peer, Time(SUSPECT_MS_MIN)));
        peers.suspect(peer, Time(SUSPECT_MS_MIN));
        assert!(peers.is_suspect(peer, Time(3 * SUSPECT_MS_MIN - 1)));
        for _ in 0..40 {
            let now = Time(peers.suspects[&peer].until.0);
            peers.suspect(peer, now);
            assert!(!peers.is_suspect(peer, now.plus_ms(SUSPECT_MS_MAX)));
        }
        peers.trust(peer);
        assert!(!peers.is_suspect(peer, Time(0)));
    }
}
