//! Which home server an address means, and where that one is now. Asks nobody: the catalog's
//! listing is brought. A home is known by its id, so another one at its address, or of its name,
//! is never taken for it.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bafs_proto::ids::ServerId;
use bafs_proto::message::{Advert, ServerKind};
use bafs_proto::{Error, ErrorCode, Result};
use tokio::sync::watch;

/// Addresses that are remembered; beyond, those of homes that are not listed are forgotten.
const ADDRESSES_MAX: usize = 1_024;

/// A home as somebody who uses it knows it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct At<'a> {
    /// Where it was in the beginning.
    pub(crate) address: &'a str,
    /// Which home server that was; `None` for whoever was there last.
    pub(crate) whose: Option<ServerId>,
}

impl<'a> From<&'a str> for At<'a> {
    fn from(address: &'a str) -> Self {
        Self {
            address,
            whose: None,
        }
    }
}

/// Where home servers are, as far as this node has heard.
#[derive(Debug, Default)]
pub(super) struct Whereabouts {
    table: Mutex<Table>,
    changes: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Table {
    /// Who was last heard of at an address.
    whose: BTreeMap<String, ServerId>,
    /// Where a home was last heard of.
    places: BTreeMap<ServerId, String>,
}

impl Whereabouts {
    /// Learns from a catalog's listing. A home that is not listed stays where it was.
    pub(super) fn learn(&self, adverts: &[Advert]) {
        let mut moved = false;
        let mut table = self.lock();
        let homes = adverts.iter().filter(|it| it.kind == ServerKind::Home);
        for home in homes.clone() {
            table.whose.insert(home.address.clone(), home.id);
            let before = table.places.insert(home.id, home.address.clone());
            moved |= before.is_some_and(|before| before != home.address);
        }
        if table.whose.len() > ADDRESSES_MAX {
            let listed: Vec<_> = homes.map(|home| home.id).collect();
            table.whose.retain(|_, id| listed.contains(id));
            table.places.retain(|id, _| listed.contains(id));
        }
        drop(table);
        if moved {
            self.changes.send_replace(());
        }
    }

    /// Which home was last heard of at an address.
    pub(super) fn whose(&self, address: &str) -> Option<ServerId> {
        self.lock().whose.get(address).copied()
    }

    /// Where a home is now.
    ///
    /// # Errors
    /// `Unreachable` while another home is where this one was last.
    pub(super) fn find(&self, home: At<'_>) -> Result<String> {
        let table = self.lock();
        let whose = home
            .whose
            .or_else(|| table.whose.get(home.address).copied());
        let Some((id, place)) = whose.and_then(|id| Some((id, table.places.get(&id)?))) else {
            return Ok(home.address.to_owned());
        };
        if table.whose.get(place) == Some(&id) {
            return Ok(place.clone());
        }
        let text = format!(
            "home {} is away, and another one is at {place}: start the one again that was there, \
             at whatever address",
            home.address
        );
        Err(Error::new(ErrorCode::Unreachable, text))
    }

    /// Waits until a home is heard of somewhere else than at `place`.
    pub(super) async fn leaves(&self, home: At<'_>, place: &str) {
        let mut changes = self.changes.subscribe();
        while self.find(home).is_ok_and(|now| now == place) {
            if changes.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        }
    }

    fn of(id: u64) -> At<'static> {
        At {
            address: "a:1",
            whose: Some(ServerId(id)),
        }
    }

    #[test]
    fn a_home_is_found_where_it_is_now_and_no_other_of_its_name_is_taken_for_it() {
        let known = Whereabouts::default();
        assert_eq!(known.find("a:1".into()).unwrap(), "a:1", "never heard of");
        known.learn(&[home(1, "a:1")]);
        // Another one of the same name, elsewhere.
        known.learn(&[home(2, "b:1")]);
        assert_eq!(known.find(of(1)).unwrap(), "a:1");
        known.learn(&[home(1, "a:2"), home(2, "b:1")]);
        assert_eq!(known.find(of(1)).unwrap(), "a:2");
        assert_eq!(known.find("a:1".into()).unwrap(), "a:2");
        known.learn(&[]);
        assert_eq!(known.find(of(1)).unwrap(), "a:2", "away for a moment");
    }

    #[test]
    fn who_began_with_a_home_does_not_go_to_the_next_at_its_address() {
        let known = Whereabouts::default();
        known.learn(&[home(1, "a:1")]);
        known.learn(&[home(2, "a:1")]);
        let error = known.find(of(1)).unwrap_err();
        assert!(error.is_transient() && error.detail.contains("another one"));
        assert_eq!(known.find(of(2)).unwrap(), "a:1");
        assert_eq!(known.whose("a:1"), Some(ServerId(2)));
        known.learn(&[home(1, "c:1")]);
        assert_eq!(known.find(of(1)).unwrap(), "c:1");
    }

    #[test]
    fn not_everything_is_remembered() {
        let known = Whereabouts::default();
        for n in 0..2_000 {
            known.learn(&[home(n, &format!("a:{n}")), home(9_999, "kept:1")]);
        }
        assert!(known.lock().whose.len() <= ADDRESSES_MAX);
        assert_eq!(known.whose("kept:1"), Some(ServerId(9_999)));
        assert_eq!(known.whose("a:1"), None);
    }
}
