//! Which servers share a cooperative cache, as this server believes. Makes no call.
//!
//! Beliefs come from adverts, every second or so. New members announce themselves sooner. A peer
//! that failed is suspect for a while, and is asked again later.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::cache::CacheMember;
use bafs_proto::hash::Digest;
use bafs_proto::ids::ServerId;
use bafs_proto::message::{Advert, CacheAdvert, ServerKind};
use bafs_proto::time::Time;

use crate::serving::ADVERT_TTL_MS;

/// An announcement counts until adverts had the time to say the same.
const ANNOUNCEMENT_MS: u64 = 2 * ADVERT_TTL_MS;

/// A peer that failed is skipped for so long, and twice as long after each further failure.
const SUSPECT_MS_MIN: u64 = 2_000;
const SUSPECT_MS_MAX: u64 = 60_000;

/// After so long without an answer from home, readers no longer wait for a peer. A peer that does
/// not report that for the time of the pause has home again.
const CUT_OFF_MS: u64 = 15_000;
const CUT_OFF_PAUSE_MS: u64 = 5_000;

/// Names a state of a cooperative cache.
pub(crate) type CacheName = (String, Digest);

/// What this server believes of others.
#[derive(Debug)]
pub(crate) struct Peers {
    own: ServerId,
    nodes: BTreeMap<ServerId, ListedNode>,
    announced: BTreeMap<(CacheName, ServerId), (CacheMember, Time)>,
    suspects: BTreeMap<ServerId, Suspicion>,
    /// Peers that home does not answer: since when, and when they reported it last.
    cut_off: BTreeMap<ServerId, (Time, Time)>,
}

/// A node that the catalog listed.
#[derive(Debug)]
struct ListedNode {
    advert: Advert,
    /// When it was listed last.
    last: Time,
}

#[derive(Debug, Clone, Copy)]
struct Suspicion {
    until: Time,
    failures: u32,
}

/// Most announcements that are remembered. Further members come from the catalog.
const ANNOUNCED_MAX: usize = 16_384;

impl Peers {
    /// No belief yet.
    pub(crate) fn new(own: ServerId) -> Self {
        Self {
            own,
            nodes: BTreeMap::new(),
            announced: BTreeMap::new(),
            suspects: BTreeMap::new(),
            cut_off: BTreeMap::new(),
        }
    }

    /// Takes the live nodes of the group from the catalog. A node that is no longer listed stays
    /// until its last advert expires: a restarted catalog learns of the nodes one by one, and a
    /// dead peer shows by itself.
    pub(crate) fn set(&mut self, adverts: Vec<Advert>, now: Time) {
        let nodes = adverts
            .into_iter()
            .filter(|a| a.kind == ServerKind::Node && a.id != self.own);
        let mut listed = BTreeSet::new();
        for advert in nodes {
            listed.insert(advert.id);
            let last = now;
            self.nodes.insert(advert.id, ListedNode { advert, last });
        }
        let mut gone = BTreeSet::new();
        self.nodes.retain(|server, node| {
            let stays = listed.contains(server) || now.ms_since(node.last) < node.advert.ttl_ms;
            if !stays {
                gone.insert(*server);
            }
            stays
        });
        // A node that was never listed has just come.
        self.announced.retain(|(_, server), (_, since)| {
            now.ms_since(*since) < ANNOUNCEMENT_MS && !gone.contains(server)
        });
        let (nodes, announced) = (&self.nodes, &self.announced);
        self.suspects.retain(|server, _| {
            nodes.contains_key(server) || announced.keys().any(|(_, other)| other == server)
        });
    }

    /// Addresses of the other nodes of the group.
    pub(crate) fn addresses(&self) -> BTreeSet<String> {
        let nodes = self.nodes.values();
        nodes.map(|node| node.advert.address.clone()).collect()
    }

    /// A server announced that it shares a cache. It counts at once, even if the catalog does not
    /// list it yet.
    pub(crate) fn announce(&mut self, name: &CacheName, member: CacheMember, now: Time) {
        if member.server == self.own || self.announced.len() >= ANNOUNCED_MAX {
            return;
        }
        // It lives, whatever was believed of it.
        self.suspects.remove(&member.server);
        let key = (name.clone(), member.server);
        self.announced.insert(key, (member, now));
    }

    /// The other servers that share this state of a cache, ordered by id.
    pub(crate) fn of(&self, name: &CacheName, now: Time) -> Vec<CacheMember> {
        let mut peers: BTreeMap<ServerId, CacheMember> = BTreeMap::new();
        for (server, ListedNode { advert, .. }) in &self.nodes {
            if let Some(cache) = advertised(advert, name) {
                let peer = CacheMember {
                    server: *server,
                    address: advert.address.clone(),
                    capacity_bytes: cache.capacity_bytes,
                };
                peers.insert(*server, peer);
            }
        }
        // An announcement is fresher: the server may have restarted at another address.
        let of_name = (name.clone(), ServerId(0))..=(name.clone(), ServerId(u64::MAX));
        for ((_, server), (member, since)) in self.announced.range(of_name) {
            if now.ms_since(*since) < ANNOUNCEMENT_MS {
                peers.insert(*server, member.clone());
            }
        }
        peers.into_values().collect()
    }

    /// Bytes that a server stored of a cache, by its last advert.
    pub(crate) fn used_bytes(&self, name: &CacheName, server: ServerId) -> Option<u64> {
        Some(advertised(&self.nodes.get(&server)?.advert, name)?.used_bytes)
    }

    /// Whether a peer failed so lately that it is not asked now.
    pub(crate) fn is_suspect(&self, server: ServerId, now: Time) -> bool {
        self.suspects
            .get(&server)
            .is_some_and(|suspicion| now < suspicion.until)
    }

    /// A peer could not be reached, or gave a wrong answer.
    pub(crate) fn suspect(&mut self, server: ServerId, now: Time) {
        let before = self.suspects.get(&server).copied();
        // Concurrent calls fail together: that is one failure.
        if before.is_some_and(|suspicion| now < suspicion.until) {
            return;
        }
        let failures = before.map_or(0, |suspicion| suspicion.failures) + 1;
        let pause_ms = SUSPECT_MS_MIN.saturating_mul(1 << (failures - 1).min(16));
        let until = now.plus_ms(pause_ms.min(SUSPECT_MS_MAX));
        self.suspects.insert(server, Suspicion { until, failures });
    }

    /// A peer reported that home does not answer it.
    pub(crate) fn note_cut_off_from_home(&mut self, server: ServerId, now: Time) {
        let fresh = |(_, last): &mut (Time, Time)| now.ms_since(*last) < CUT_OFF_PAUSE_MS;
        self.cut_off.retain(|_, times| fresh(times));
        self.cut_off.entry(server).or_insert((now, now)).1 = now;
    }

    /// Whether home has not answered a peer for long: then others ask home in its place.
    pub(crate) fn is_cut_off_from_home(&self, server: ServerId, now: Time) -> bool {
        self.cut_off.get(&server).is_some_and(|(since, last)| {
            now.ms_since(*last) < CUT_OFF_PAUSE_MS && now.ms_since(*since) >= CUT_OFF_MS
        })
    }

    /// A server does not share this state of a cache, whatever was believed.
    pub(crate) fn forget(&mut self, name: &CacheName, server: ServerId) {
        self.announced.remove(&(name.clone(), server));
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
    // Of several volumes of one name all servers must pick the same one.
    let all = advert.caches.iter().filter(same);
    all.min_by_key(|cache| cache.volume)
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::VolumeId;

    use super::*;
    use bafs_proto::attributes::Attributes;
    use bafs_proto::message::Lifetime;

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
            lifetime: Lifetime::default(),
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
    fn an_announced_peer_stays_until_its_announcement_expires() {
        let mut peers = Peers::new(ServerId(1));
        let name = (NAME.to_owned(), Digest([7; 32]));
        let member = CacheMember {
            server: ServerId(2),
            address: "n2".to_owned(),
            capacity_bytes: 5,
        };
        peers.suspect(member.server, Time(0));
        peers.announce(&name, member.clone(), Time(0));
        assert!(!peers.is_suspect(member.server, Time(0)), "it speaks");
        peers.set(vec![advert(2, &[])], Time(0));
        assert_eq!(ids(&peers, 8, 0), [] as [u64; 0]);
        assert_eq!(ids(&peers, 7, ANNOUNCEMENT_MS - 1), [2]);
        assert_eq!(ids(&peers, 7, ANNOUNCEMENT_MS), [] as [u64; 0]);
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
            peers.note_cut_off_from_home(peer, now);
            assert!(!peers.is_cut_off_from_home(peer, now), "{second} s");
        }
        peers.note_cut_off_from_home(peer, Time(CUT_OFF_MS));
        assert!(peers.is_cut_off_from_home(peer, Time(CUT_OFF_MS)));
        let later = Time(CUT_OFF_MS + CUT_OFF_PAUSE_MS);
        assert!(!peers.is_cut_off_from_home(peer, later));
        peers.note_cut_off_from_home(peer, later);
        assert!(!peers.is_cut_off_from_home(peer, later), "it begins anew");
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
