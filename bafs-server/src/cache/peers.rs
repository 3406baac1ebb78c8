//! Which servers share a cooperative cache, as this server believes; makes no call.
//!
//! Beliefs come from adverts (every second or so) and, sooner, from newcomers that introduce
//! themselves. A peer that failed is suspect for a while and asked again later.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::cache::CacheMember;
use bafs_proto::hash::Digest;
use bafs_proto::ids::ServerId;
use bafs_proto::message::{Advert, CacheAdvert, ServerKind};
use bafs_proto::time::Time;

use crate::serving::ADVERT_TTL_MS;

/// An introduction counts until adverts had the time to say the same.
const INTRODUCTION_MS: u64 = 2 * ADVERT_TTL_MS;

/// A peer that failed is left alone for so long, and twice as long after each further failure.
const SUSPECT_MS_MIN: u64 = 2_000;
const SUSPECT_MS_MAX: u64 = 60_000;

/// A peer whom home has not answered for so long is no longer waited for; a pause of the complaints
/// this long ends them.
const HOMELESS_MS: u64 = 15_000;
const HOMELESS_PAUSE_MS: u64 = 5_000;

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

impl PeerCache {
    /// As a server that shares the cache tells others of it.
    pub(crate) fn into_member(self) -> CacheMember {
        CacheMember {
            server: self.server,
            address: self.address,
            capacity_bytes: self.capacity_bytes,
        }
    }
}

impl From<CacheMember> for PeerCache {
    fn from(member: CacheMember) -> Self {
        Self {
            server: member.server,
            address: member.address,
            capacity_bytes: member.capacity_bytes,
        }
    }
}

/// Names a state of a cooperative cache.
pub(crate) type CacheName = (String, Digest);

/// What this server believes of others.
#[derive(Debug)]
pub(crate) struct Peers {
    own: ServerId,
    nodes: BTreeMap<ServerId, Named>,
    introduced: BTreeMap<(CacheName, ServerId), (CacheMember, Time)>,
    suspects: BTreeMap<ServerId, Suspicion>,
    /// Whom home does not answer: since when, and when that was said last.
    homeless: BTreeMap<ServerId, (Time, Time)>,
}

/// A node that the catalog named.
#[derive(Debug)]
struct Named {
    advert: Advert,
    /// When it was named last.
    last: Time,
}

#[derive(Debug, Clone, Copy)]
struct Suspicion {
    until: Time,
    failures: u32,
}

/// Most introductions that are remembered: whoever comes after them is learned from the catalog.
const INTRODUCED_MAX: usize = 16_384;

impl Peers {
    /// No belief yet.
    pub(crate) fn new(own: ServerId) -> Self {
        Self {
            own,
            nodes: BTreeMap::new(),
            introduced: BTreeMap::new(),
            suspects: BTreeMap::new(),
            homeless: BTreeMap::new(),
        }
    }

    /// Takes the live nodes of the group, as the catalog names them. Who is named no more stays as
    /// long as its last advert is good: a catalog that starts again learns of the nodes one by one,
    /// and a peer that is dead shows by itself.
    pub(crate) fn set(&mut self, adverts: Vec<Advert>, now: Time) {
        let nodes = adverts
            .into_iter()
            .filter(|a| a.kind == ServerKind::Node && a.id != self.own);
        let mut named = BTreeSet::new();
        for advert in nodes {
            named.insert(advert.id);
            let last = now;
            self.nodes.insert(advert.id, Named { advert, last });
        }
        let mut gone = BTreeSet::new();
        self.nodes.retain(|server, node| {
            let stays = named.contains(server) || now.ms_since(node.last) < node.advert.ttl_ms;
            if !stays {
                gone.insert(*server);
            }
            stays
        });
        // Who was never named has just come.
        self.introduced.retain(|(_, server), (_, since)| {
            now.ms_since(*since) < INTRODUCTION_MS && !gone.contains(server)
        });
        let (nodes, introduced) = (&self.nodes, &self.introduced);
        self.suspects.retain(|server, _| {
            nodes.contains_key(server) || introduced.keys().any(|(_, other)| other == server)
        });
    }

    /// Other nodes of the group with their addresses.
    pub(crate) fn nodes(&self) -> Vec<(ServerId, String)> {
        self.nodes
            .iter()
            .map(|(id, node)| (*id, node.advert.address.clone()))
            .collect()
    }

    /// A server said that it shares a cache; it counts at once, even if the catalog did not name
    /// it yet.
    pub(crate) fn introduce(&mut self, name: &CacheName, member: CacheMember, now: Time) {
        if member.server == self.own || self.introduced.len() >= INTRODUCED_MAX {
            return;
        }
        // A server that speaks lives, whatever was thought of it.
        self.suspects.remove(&member.server);
        let key = (name.clone(), member.server);
        self.introduced.insert(key, (member, now));
    }

    /// The other servers that share this state of a cache, ordered by id.
    pub(crate) fn of(&self, name: &CacheName, now: Time) -> Vec<PeerCache> {
        let mut peers: BTreeMap<ServerId, PeerCache> = BTreeMap::new();
        for (server, Named { advert, .. }) in &self.nodes {
            if let Some(cache) = advertised(advert, name) {
                let peer = PeerCache {
                    server: *server,
                    address: advert.address.clone(),
                    capacity_bytes: cache.capacity_bytes,
                };
                peers.insert(*server, peer);
            }
        }
        // What a server says itself is fresher: it may have started again at another address.
        let of_name = (name.clone(), ServerId(0))..=(name.clone(), ServerId(u64::MAX));
        for ((_, server), (member, since)) in self.introduced.range(of_name) {
            if now.ms_since(*since) < INTRODUCTION_MS {
                let peer = PeerCache {
                    server: *server,
                    address: member.address.clone(),
                    capacity_bytes: member.capacity_bytes,
                };
                peers.insert(*server, peer);
            }
        }
        peers.into_values().collect()
    }

    /// Bytes that a server kept of a cache when it last told the catalog.
    pub(crate) fn used_bytes(&self, name: &CacheName, server: ServerId) -> Option<u64> {
        Some(advertised(&self.nodes.get(&server)?.advert, name)?.used_bytes)
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

    /// A peer said that home does not answer it.
    pub(crate) fn note_homeless(&mut self, server: ServerId, now: Time) {
        let fresh = |(_, last): &mut (Time, Time)| now.ms_since(*last) < HOMELESS_PAUSE_MS;
        self.homeless.retain(|_, times| fresh(times));
        self.homeless.entry(server).or_insert((now, now)).1 = now;
    }

    /// Whether home has not answered a peer for long: others may have to ask in its place.
    pub(crate) fn is_homeless(&self, server: ServerId, now: Time) -> bool {
        self.homeless.get(&server).is_some_and(|(since, last)| {
            now.ms_since(*last) < HOMELESS_PAUSE_MS && now.ms_since(*since) >= HOMELESS_MS
        })
    }

    /// A server does not share this state of a cache, whatever was believed.
    pub(crate) fn forget(&mut self, name: &CacheName, server: ServerId) {
        self.introduced.remove(&(name.clone(), server));
        if let Some(node) = self.nodes.get_mut(&server) {
            let is_other = |c: &CacheAdvert| c.cooperative != name.0 || c.manifest != name.1;
            node.advert.caches.retain(is_other);
        }
    }

    /// A peer answered as it should.
    pub(crate) fn trust(&mut self, server: ServerId) {
        self.suspects.remove(&server);
    }
}

fn advertised<'a>(advert: &'a Advert, name: &CacheName) -> Option<&'a CacheAdvert> {
    let same = |cache: &&CacheAdvert| cache.cooperative == name.0 && cache.manifest == name.1;
    // Several volumes of one name: all servers must pick the same one.
    let all = advert.caches.iter().filter(same);
    all.min_by_key(|cache| cache.volume)
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::VolumeId;

    use super::*;
    use bafs_proto::attributes::Attributes;

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
            attributes: Attributes::default(),
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
    fn only_peers_with_the_same_manifest_share() {
        let mut peers = Peers::new(ServerId(1));
        peers.set(
            vec![advert(1, &[7]), advert(2, &[7]), advert(3, &[8])],
            Time(0),
        );
        assert_eq!(ids(&peers, 7, 0), [2]);
        assert_eq!(ids(&peers, 8, 0), [3]);
    }

    #[test]
    fn peers_stay_until_their_adverts_expire() {
        let mut peers = Peers::new(ServerId(1));
        peers.set(vec![advert(2, &[7]), advert(3, &[7])], Time(0));
        // It started again, and one of them has told it since.
        peers.set(vec![], Time(100));
        peers.set(vec![advert(3, &[7])], Time(200));
        assert_eq!(ids(&peers, 7, 200), [2, 3]);
        peers.set(vec![advert(3, &[7])], Time(ADVERT_TTL_MS - 1));
        assert_eq!(ids(&peers, 7, ADVERT_TTL_MS - 1), [2, 3]);
        peers.set(vec![advert(3, &[7])], Time(ADVERT_TTL_MS));
        assert_eq!(ids(&peers, 7, ADVERT_TTL_MS), [3], "it is gone");
    }

    #[test]
    fn an_introduced_peer_stays_until_its_introduction_expires() {
        let mut peers = Peers::new(ServerId(1));
        let name = (NAME.to_owned(), Digest([7; 32]));
        let member = CacheMember {
            server: ServerId(2),
            address: "n2".to_owned(),
            capacity_bytes: 5,
        };
        peers.suspect(member.server, Time(0));
        peers.introduce(&name, member.clone(), Time(0));
        assert!(!peers.is_suspect(member.server, Time(0)), "it speaks");
        peers.set(vec![advert(2, &[])], Time(0));
        assert_eq!(ids(&peers, 8, 0), [] as [u64; 0]);
        assert_eq!(ids(&peers, 7, INTRODUCTION_MS - 1), [2]);
        assert_eq!(ids(&peers, 7, INTRODUCTION_MS), [] as [u64; 0]);
    }

    #[test]
    fn a_peer_leaving_one_cache_stays_in_others() {
        let mut peers = Peers::new(ServerId(1));
        peers.set(vec![advert(2, &[7, 8])], Time(0));
        peers.forget(&(NAME.to_owned(), Digest([7; 32])), ServerId(2));
        assert_eq!(ids(&peers, 7, 0), [] as [u64; 0]);
        assert_eq!(ids(&peers, 8, 0), [2]);
        assert!(!peers.is_suspect(ServerId(2), Time(0)));
    }

    #[test]
    fn waiting_for_a_peer_without_home_is_bounded() {
        let mut peers = Peers::new(ServerId(1));
        let peer = ServerId(2);
        for second in 0..15 {
            let now = Time(second * 1_000);
            peers.note_homeless(peer, now);
            assert!(!peers.is_homeless(peer, now), "{second} s");
        }
        peers.note_homeless(peer, Time(HOMELESS_MS));
        assert!(peers.is_homeless(peer, Time(HOMELESS_MS)));
        let later = Time(HOMELESS_MS + HOMELESS_PAUSE_MS);
        assert!(!peers.is_homeless(peer, later));
        peers.note_homeless(peer, later);
        assert!(!peers.is_homeless(peer, later), "it begins anew");
    }

    #[test]
    fn suspicion_periods_grow_to_a_maximum() {
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
