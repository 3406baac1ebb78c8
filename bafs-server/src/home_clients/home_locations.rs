//! Where home servers are now, and calls to the one that must be there. Asks no catalog: its
//! listing is brought. A home is known by
//! its id, so another one at its address, or of its name, is never taken for it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use bafs_proto::Result;
use bafs_proto::ids::ServerId;
use bafs_proto::message::{Advert, Call, ServerKind};
use bafs_proto::net::pool::Pool;
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bytes::Bytes;

/// Homes that are remembered; beyond, those that are not listed are forgotten.
const HOMES_MAX: usize = 1_024;

/// A home as somebody who uses it knows it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HomeAddress<'a> {
    /// Where it was in the beginning.
    pub(crate) address: &'a str,
    /// Which home server that is; `None` for whoever is at the address.
    pub(crate) id: Option<ServerId>,
}

/// Where home servers are, as far as this node has heard.
#[derive(Debug, Default)]
pub(super) struct HomeLocations(Mutex<BTreeMap<ServerId, String>>);

impl HomeLocations {
    /// Learns from a catalog's listing. A home that is not listed stays where it was.
    pub(super) fn update(&self, adverts: &[Advert]) {
        let homes = adverts.iter().filter(|it| it.kind == ServerKind::Home);
        let listed = homes.map(|home| (home.id, home.address.clone()));
        let listed: BTreeMap<_, _> = listed.collect();
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.extend(listed.clone());
        if known.len() > HOMES_MAX {
            *known = listed;
        }
    }

    /// The same home, at the address where it was last heard of.
    pub(super) fn current_address(&self, home: HomeAddress<'_>) -> String {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let place = home.id.and_then(|id| known.get(&id).cloned());
        place.unwrap_or_else(|| home.address.to_owned())
    }
}

/// Where a home server is, and which one must be there. Cheap to clone.
#[derive(Clone)]
pub(super) struct HomeServerLocation {
    pool: Pool,
    address: Arc<str>,
    id: Option<ServerId>,
}

impl HomeServerLocation {
    pub(super) fn new(pool: Pool, address: &str, id: Option<ServerId>) -> Self {
        let address = address.into();
        Self { pool, address, id }
    }

    /// Makes a call with raw data, once, and to no other server.
    pub(super) async fn call<C: Call>(
        &self,
        token: &Token,
        call: C,
        body: Bytes,
        deadline: Deadline,
    ) -> Result<(C::Reply, Bytes)> {
        let there = self.pool.connection_to(self.id, &self.address, deadline);
        let there = there.await?;
        there.call_with_body(token, call, body, deadline).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bafs_proto::attributes::Attributes;
    use bafs_proto::message::Lifetime;

    fn home(id: u64, address: &str) -> Advert {
        Advert {
            id: ServerId(id),
            kind: ServerKind::Home,
            name: "home".to_owned(),
            address: address.to_owned(),
            group: String::new(),
            ttl_ms: 4_000,
            capacity_bytes: 0,
            capacity_files: 0,
            free_bytes: 0,
            free_files: 0,
            slots: 0,
            jobs: 0,
            caches: Vec::new(),
            attributes: Attributes::default(),
            lifetime: Lifetime::default(),
        }
    }

    fn at(id: Option<u64>) -> HomeAddress<'static> {
        HomeAddress {
            address: "a:1",
            id: id.map(ServerId),
        }
    }

    #[test]
    fn a_home_is_found_at_its_current_address() {
        let known = HomeLocations::default();
        assert_eq!(known.current_address(at(Some(1))), "a:1", "never heard of");
        // Another one of the same name, elsewhere.
        known.update(&[home(1, "a:1"), home(2, "b:1")]);
        assert_eq!(known.current_address(at(Some(1))), "a:1");
        known.update(&[home(1, "a:2"), home(2, "a:1")]);
        assert_eq!(known.current_address(at(Some(1))), "a:2");
        assert_eq!(known.current_address(at(None)), "a:1", "whoever is there");
        known.update(&[]);
        assert_eq!(
            known.current_address(at(Some(1))),
            "a:2",
            "away for a moment"
        );
    }

    #[test]
    fn the_table_of_addresses_is_bounded() {
        let known = HomeLocations::default();
        for n in 0..2_000 {
            known.update(&[home(n, &format!("a:{n}")), home(9_999, "kept:1")]);
        }
        assert!(known.0.lock().expect("table").len() <= HOMES_MAX);
        assert_eq!(known.current_address(at(Some(9_999))), "kept:1");
    }
}
