//! What servers last said of themselves, until their time is up. Reads no clock, keeps no promise:
//! everything here may be forgotten and is learned again.

use std::collections::BTreeMap;

use bafs_proto::ids::ServerId;
use bafs_proto::limits::HEAD_BYTES_MAX;
use bafs_proto::message::{Advert, CacheAdvert, QueryServers, ServerKind};
use bafs_proto::path::is_control_or_bidirectional;
use bafs_proto::time::Time;

/// Most servers that one catalog knows.
pub const ADVERTS_MAX: usize = 2_000;

/// Most bytes of all adverts together, encoded: they must fit the header of one reply.
const ADVERTS_BYTES_MAX: usize = HEAD_BYTES_MAX as usize - 1024;

/// Longest time that an advert may ask to be remembered, in milliseconds.
pub const TTL_MS_MAX: u64 = 60_000;

/// Longest name, address, group or cache name in an advert, in bytes.
const TEXT_BYTES_MAX: usize = 255;

/// Most cooperative caches in one advert.
const CACHES_MAX: usize = 1024;

/// Why an advert is not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AdvertRefusal {
    /// The catalog knows as many live servers as one reply can name.
    Full,
    /// A text or a list in it is too long, or a text has control characters.
    Malformed,
    /// Another home of that name lives: whose data a URL means must not be left to chance.
    NameInUse {
        /// Where that one listens.
        address: String,
    },
    /// Another home lives that exports the same directory.
    SameDirectory {
        /// What it is called.
        name: String,
        /// Where it listens.
        address: String,
    },
}

/// Live adverts by server.
#[derive(Debug, Default)]
pub struct Adverts {
    live: BTreeMap<ServerId, ListedAdvert>,
}

#[derive(Debug)]
struct ListedAdvert {
    /// As it was at `updated_at`: the time that is left to a node passes here, too.
    advert: Advert,
    updated_at: Time,
    until: Time,
}

impl Adverts {
    /// Takes an advert in place of the server's earlier one, and returns how many servers live.
    ///
    /// # Errors
    /// [`AdvertRefusal`], the earlier advert stays.
    pub fn advertise(&mut self, now: Time, advert: Advert) -> Result<usize, AdvertRefusal> {
        self.expire(now);
        let texts = [&advert.name, &advert.address, &advert.group];
        let unfit =
            |text: &str| text.len() > TEXT_BYTES_MAX || text.contains(is_control_or_bidirectional);
        if texts.iter().any(|text| unfit(text))
            || advert.caches.len() > CACHES_MAX
            || advert.caches.iter().any(|cache| unfit(&cache.cooperative))
            || !advert.attributes.is_well_formed()
        {
            return Err(AdvertRefusal::Malformed);
        }
        if let Some(address) = self.same_name_address(&advert) {
            return Err(AdvertRefusal::NameInUse { address });
        }
        if let Some(twin) = self.same_directory_advert(&advert) {
            let (name, address) = (twin.name.clone(), twin.address.clone());
            return Err(AdvertRefusal::SameDirectory { name, address });
        }
        let others = self.live.iter().filter(|(id, _)| **id != advert.id);
        let (servers, bytes) = others.fold((0, 0), |(servers, bytes), (_, other)| {
            (servers + 1, bytes + encoded_bytes(&other.advert))
        });
        if servers >= ADVERTS_MAX || bytes + encoded_bytes(&advert) > ADVERTS_BYTES_MAX {
            return Err(AdvertRefusal::Full);
        }
        let until = now.plus_ms(advert.ttl_ms.min(TTL_MS_MAX));
        let listed = ListedAdvert {
            updated_at: now,
            until,
            advert,
        };
        self.live.insert(listed.advert.id, listed);
        Ok(self.live.len())
    }

    /// Where another home of the same name lives.
    fn same_name_address(&self, advert: &Advert) -> Option<String> {
        let is_home = |advert: &Advert| advert.kind == ServerKind::Home;
        let mut others = self.live.values().map(|listed| &listed.advert);
        let namesake = others.find(|other| {
            is_home(other)
                && is_home(advert)
                && other.id != advert.id
                && other.name.eq_ignore_ascii_case(&advert.name)
        });
        namesake.map(|other| other.address.clone())
    }

    /// Another home that has its id of the same directory. One that was started again with another
    /// name or at another address waits until its former life is forgotten.
    fn same_directory_advert(&self, advert: &Advert) -> Option<&Advert> {
        let other = &self.live.get(&advert.id)?.advert;
        let is_home = advert.kind == ServerKind::Home && other.kind == ServerKind::Home;
        let is_same = (&other.name, &other.address) == (&advert.name, &advert.address);
        (is_home && !is_same).then_some(other)
    }

    /// Live servers that fit the query, ordered by id.
    pub fn query(&mut self, now: Time, query: &QueryServers) -> Vec<Advert> {
        self.expire(now);
        let fits = |advert: &Advert| {
            let is_of_kind = query.kind.is_none_or(|kind| advert.kind == kind);
            is_of_kind && query.constraint.is_satisfied(|name| advert.attribute(name))
        };
        self.live
            .values()
            .filter(|listed| fits(&listed.advert))
            .map(|listed| listed.advert.clone())
            .collect()
    }

    fn expire(&mut self, now: Time) {
        self.live.retain(|_, listed| listed.until > now);
        for listed in self.live.values_mut() {
            listed.pass_time(now);
        }
    }
}

impl ListedAdvert {
    fn pass_time(&mut self, now: Time) {
        let passed_ms = now.ms_since(self.updated_at);
        let left_ms = &mut self.advert.lifetime.left_ms;
        *left_ms = left_ms.map(|left_ms| left_ms.saturating_sub(passed_ms));
        self.updated_at = self.updated_at.max(now);
    }
}

/// Size of an advert in a reply, in bytes: its numbers, and its texts with their lengths.
fn encoded_bytes(advert: &Advert) -> usize {
    const NUMBERS: usize = 8 + 4 + 5 * 8 + 2 * 4 + 2 * 8 + 2;
    const CACHE_NUMBERS: usize = 16 + 32 + 2 * 8;
    let text = |text: &String| 8 + text.len();
    let cache = |cache: &CacheAdvert| CACHE_NUMBERS + text(&cache.cooperative);
    let caches: usize = advert.caches.iter().map(cache).sum();
    let attributes = advert.attributes.iter();
    let attributes = attributes.map(|(name, value)| 8 + name.len() + 1 + 8 + value.encoded_len());
    let lists = caches + attributes.sum::<usize>();
    let left_bytes = 8 * usize::from(advert.lifetime.left_ms.is_some());
    let texts = text(&advert.name) + text(&advert.address) + text(&advert.group);
    NUMBERS + left_bytes + texts + lists
}

#[cfg(test)]
mod tests {
    use super::*;
    use bafs_proto::attributes::{AttributeValue, Attributes, Constraint};
    use bafs_proto::codec;
    use bafs_proto::hash::Digest;
    use bafs_proto::ids::VolumeId;
    use bafs_proto::message::{HEAD_ATTRIBUTES, Lifetime, ServerList};

    fn advert(id: u64) -> Advert {
        Advert {
            id: ServerId(id),
            kind: ServerKind::Node,
            name: format!("n{id}"),
            address: format!("10.0.0.{id}:1"),
            group: "g".to_owned(),
            ttl_ms: 4_000,
            capacity_bytes: 10,
            capacity_files: 10,
            free_bytes: 10,
            free_files: 10,
            slots: 1,
            jobs: 0,
            caches: Vec::new(),
            lifetime: Lifetime::default(),
            attributes: Attributes::default(),
        }
    }

    fn ids(found: &[Advert]) -> Vec<u64> {
        found.iter().map(|advert| advert.id.0).collect()
    }

    #[test]
    fn time_left_shrinks_while_an_advert_is_listed() {
        let mut adverts = Adverts::default();
        let lifetime = Lifetime {
            left_ms: Some(1_500),
            is_draining: true,
        };
        let leaving = Advert {
            lifetime,
            ttl_ms: 4_000,
            ..advert(1)
        };
        adverts.advertise(Time(0), leaving).expect("it is taken");
        let left_ms = |adverts: &mut Adverts, now| {
            let listed = adverts.query(Time(now), &QueryServers::default());
            listed[0].lifetime.left_ms
        };
        assert_eq!(left_ms(&mut adverts, 0), Some(1_500));
        assert_eq!(left_ms(&mut adverts, 1_000), Some(500));
        let constraint = Constraint(vec!["left_ms >= 500".parse().expect("a comparison")]);
        let mut lasting = |now| {
            let kind = Some(ServerKind::Node);
            let constraint = constraint.clone();
            ids(&adverts.query(Time(now), &QueryServers { kind, constraint }))
        };
        assert_eq!(lasting(1_000), [1]);
        assert!(lasting(1_001).is_empty());
        assert_eq!(left_ms(&mut adverts, 3_000), Some(0));
    }

    #[test]
    fn server_without_a_lifetime_is_unlisted() {
        let mut adverts = Adverts::default();
        adverts.advertise(Time(0), advert(1)).expect("it is taken");
        let gone = Advert {
            ttl_ms: 0,
            ..advert(1)
        };
        adverts.advertise(Time(1), gone).expect("it is taken");
        assert!(adverts.query(Time(1), &QueryServers::default()).is_empty());
    }

    #[test]
    fn an_advert_expires_after_its_ttl() {
        let mut adverts = Adverts::default();
        assert_eq!(adverts.advertise(Time(1_000), advert(2)), Ok(1));
        assert_eq!(adverts.advertise(Time(2_000), advert(1)), Ok(2));
        let all = QueryServers::default();
        assert_eq!(ids(&adverts.query(Time(4_999), &all)), [1, 2]);
        assert_eq!(ids(&adverts.query(Time(5_000), &all)), [1]);
        assert_eq!(adverts.advertise(Time(5_500), advert(1)), Ok(1));
        assert_eq!(ids(&adverts.query(Time(9_499), &all)), [1]);
        assert!(adverts.query(Time(9_500), &all).is_empty());
    }

    #[test]
    fn the_ttl_of_adverts_is_bounded() {
        let mut adverts = Adverts::default();
        let eternal = Advert {
            ttl_ms: u64::MAX,
            ..advert(1)
        };
        adverts.advertise(Time(0), eternal).expect("room");
        assert!(
            adverts
                .query(Time(TTL_MS_MAX), &QueryServers::default())
                .is_empty()
        );
    }

    #[test]
    fn queries_filter_by_kind_group_and_cache() {
        let mut adverts = Adverts::default();
        let cache = CacheAdvert {
            cooperative: "db".to_owned(),
            volume: VolumeId(1),
            manifest: Digest::of(b"m"),
            capacity_bytes: 1,
            used_bytes: 0,
        };
        let home = Advert {
            kind: ServerKind::Home,
            ..advert(1)
        };
        let other = Advert {
            group: "h".to_owned(),
            ..advert(2)
        };
        let caching = Advert {
            caches: vec![cache],
            ..advert(3)
        };
        for advert in [home, other, caching] {
            adverts.advertise(Time(0), advert).expect("room");
        }
        let mut ask = |query: QueryServers| ids(&adverts.query(Time(1), &query));
        let none = QueryServers::default();
        assert_eq!(
            ask(QueryServers {
                kind: Some(ServerKind::Home),
                ..none.clone()
            }),
            [1]
        );
        assert_eq!(
            ask(QueryServers {
                constraint: Constraint::default().and_equal("group", "h"),
                ..none.clone()
            }),
            [2]
        );
        assert_eq!(
            ask(QueryServers {
                constraint: Constraint::default().and_contains("caches", "db"),
                ..none.clone()
            }),
            [3]
        );
        assert!(
            ask(QueryServers {
                constraint: Constraint::default().and_contains("caches", "no"),
                ..none
            })
            .is_empty()
        );
    }

    #[test]
    fn servers_are_chosen_by_any_attribute() {
        let mut adverts = Adverts::default();
        for (id, memory) in [(1, 4), (2, 16)] {
            let mut machine = advert(id);
            let memory = AttributeValue::Integer(memory);
            machine.attributes.set("memory_bytes", memory);
            adverts.advertise(Time(0), machine).expect("room");
        }
        adverts.advertise(Time(0), advert(3)).expect("room");
        let mut ask = |text: &str| {
            let comparison = text.parse().expect("a comparison");
            let constraint = Constraint(vec![comparison]);
            let kind = Some(ServerKind::Node);
            ids(&adverts.query(Time(1), &QueryServers { kind, constraint }))
        };
        assert_eq!(ask("memory_bytes >= 16"), [2]);
        assert_eq!(ask("memory_bytes != 16"), [1]);
        assert_eq!(ask("free_bytes >= 10"), [1, 2, 3]);
        assert!(ask("unheard_of == 1").is_empty());
    }

    #[test]
    fn each_field_of_an_advert_is_an_attribute() {
        let mut leaving = advert(1);
        leaving.lifetime.left_ms = Some(1_000);
        for name in HEAD_ATTRIBUTES {
            assert!(leaving.attribute(name).is_some(), "{name}");
        }
    }

    #[test]
    fn attributes_with_control_characters_are_refused() {
        let mut adverts = Adverts::default();
        let mut coloured = advert(1);
        let red = AttributeValue::Text("\u{1b}[31mred".to_owned());
        coloured.attributes.set("owner", red);
        let refused = adverts.advertise(Time(0), coloured);
        assert_eq!(refused, Err(AdvertRefusal::Malformed));
    }

    #[test]
    fn a_full_catalog_refuses_only_new_servers() {
        let mut adverts = Adverts::default();
        for id in 0..ADVERTS_MAX as u64 {
            adverts.advertise(Time(0), advert(id)).expect("room");
        }
        assert_eq!(
            adverts.advertise(Time(1), advert(u64::MAX)),
            Err(AdvertRefusal::Full)
        );
        assert_eq!(adverts.advertise(Time(1), advert(7)), Ok(ADVERTS_MAX));
        let long = Advert {
            name: "x".repeat(256),
            ..advert(7)
        };
        assert_eq!(
            adverts.advertise(Time(1), long),
            Err(AdvertRefusal::Malformed)
        );
        assert_eq!(adverts.advertise(Time(5_000), advert(u64::MAX)), Ok(1));
    }

    #[test]
    fn names_with_control_characters_are_refused() {
        let mut adverts = Adverts::default();
        for text in ["x\ny", "\u{1b}[31mred", "\u{9b}2J"] {
            let mut named = advert(1);
            text.clone_into(&mut named.name);
            assert_eq!(
                adverts.advertise(Time(0), named),
                Err(AdvertRefusal::Malformed)
            );
            let mut grouped = advert(1);
            text.clone_into(&mut grouped.group);
            assert_eq!(
                adverts.advertise(Time(0), grouped),
                Err(AdvertRefusal::Malformed)
            );
        }
        let plain = Advert {
            name: "größe 1".to_owned(),
            group: "10.0.0.0/24".to_owned(),
            ..advert(1)
        };
        assert_eq!(adverts.advertise(Time(0), plain), Ok(1));
    }

    #[test]
    fn the_first_home_of_a_name_is_listed() {
        let mut adverts = Adverts::default();
        let home = |id, name: &str| Advert {
            kind: ServerKind::Home,
            name: name.to_owned(),
            ..advert(id)
        };
        let of_first = Err(AdvertRefusal::NameInUse {
            address: "10.0.0.1:1".to_owned(),
        });
        assert_eq!(adverts.advertise(Time(0), home(1, "home")), Ok(1));
        assert_eq!(adverts.advertise(Time(1), home(2, "Home")), of_first);
        assert_eq!(adverts.advertise(Time(2), home(1, "home")), Ok(1));
        assert_eq!(adverts.advertise(Time(3), home(2, "other")), Ok(2));
        // Nodes are told apart otherwise.
        let node = Advert {
            name: "home".to_owned(),
            ..advert(3)
        };
        assert_eq!(adverts.advertise(Time(4), node), Ok(3));
        assert_eq!(adverts.advertise(Time(4_001), home(2, "home")), of_first);
        assert_eq!(adverts.advertise(Time(4_003), home(2, "home")), Ok(2));
    }

    #[test]
    fn the_first_home_of_a_directory_is_listed() {
        let mut adverts = Adverts::default();
        let home = |name: &str, address: &str| Advert {
            kind: ServerKind::Home,
            name: name.to_owned(),
            address: address.to_owned(),
            ..advert(1)
        };
        let first = Err(AdvertRefusal::SameDirectory {
            name: "home".to_owned(),
            address: "a:1".to_owned(),
        });
        assert_eq!(adverts.advertise(Time(0), home("home", "a:1")), Ok(1));
        assert_eq!(adverts.advertise(Time(1), home("second", "a:2")), first);
        assert_eq!(adverts.advertise(Time(1), home("home", "a:2")), first);
        assert_eq!(adverts.advertise(Time(2), home("home", "a:1")), Ok(1));
        assert_eq!(adverts.advertise(Time(4_001), home("home", "a:2")), first);
        assert_eq!(adverts.advertise(Time(4_002), home("home", "a:2")), Ok(1));
    }

    #[test]
    fn the_whole_catalog_fits_one_reply() {
        let cache = |n: u64| CacheAdvert {
            cooperative: format!("{n:0>255}"),
            volume: VolumeId(1),
            manifest: Digest::of(b"m"),
            capacity_bytes: 1,
            used_bytes: 0,
        };
        let mut adverts = Adverts::default();
        let mut attributes = Attributes::default();
        attributes.set(
            "data_sets",
            AttributeValue::TextList(vec!["nr".to_owned(); 3]),
        );
        attributes.set("processors", AttributeValue::Integer(8));
        let large = |id| Advert {
            caches: (0..100).map(cache).collect(),
            attributes: attributes.clone(),
            ..advert(id)
        };
        let taken = (0..)
            .take_while(|id| adverts.advertise(Time(0), large(*id)).is_ok())
            .count();
        assert!((20..ADVERTS_MAX).contains(&taken), "{taken}");
        let servers = adverts.query(Time(0), &QueryServers::default());
        let bytes: usize = servers.iter().map(encoded_bytes).sum();
        let encoded = codec::encode(&ServerList { servers }).expect("fits");
        assert_eq!(encoded.len(), bytes + 8);
    }
}
