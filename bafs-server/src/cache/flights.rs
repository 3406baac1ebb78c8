//! Blocks that are on their way: whoever wants one that is already coming waits for it instead of
//! fetching it again. Fetches nothing itself.
//!
//! Two servers that both believe to be the primary of a block would both read it from home. So each
//! asks the other before, as an heir, and finds its flight or leaves a claim. Of two that ask each
//! other while both are undecided, the one with the larger id waits. Whoever finds a claim asks who
//! left it before going home. So undecided flights wait for servers with smaller ids only, and
//! decided ones for home.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bafs_proto::hash::Digest;
use bafs_proto::ids::ServerId;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use tokio::sync::watch;

use crate::logic::block_claims::BlockClaims;
use crate::logic::blocks::BlockKey;

/// A block with the digest of its origin.
pub(crate) type Block = (Bytes, Digest);

type Landing = Option<Result<Block>>;

/// Blocks that are on their way from one kind of place.
#[derive(Default, Clone)]
pub(crate) struct Flights(Arc<Mutex<InflightState>>);

#[derive(Default)]
struct InflightState {
    flying: BTreeMap<BlockKey, InflightFetch>,
    claims: BlockClaims,
}

struct InflightFetch {
    landing: watch::Receiver<Landing>,
    /// It waits for home and for nobody else.
    from_home: bool,
    /// Who may bring the block too, and was not asked since.
    claimants: BTreeSet<ServerId>,
    urgency: Urgency,
}

/// Whether somebody waits for blocks that are on their way; shared by all that come together.
#[derive(Debug, Clone)]
pub(crate) struct Urgency(Arc<watch::Sender<bool>>);

impl Urgency {
    /// Urgent from the beginning or not.
    pub(crate) fn new(urgent: bool) -> Self {
        Self(Arc::new(watch::Sender::new(urgent)))
    }

    pub(crate) fn is_urgent(&self) -> bool {
        *self.0.borrow()
    }

    /// Somebody waits from here on.
    pub(crate) fn raise(&self) {
        self.0
            .send_if_modified(|urgent| !std::mem::replace(urgent, true));
    }

    /// Returns when somebody waits.
    pub(crate) async fn raised(&self) {
        // The sender lives as long as this does.
        let _ = self.0.subscribe().wait_for(|urgent| *urgent).await;
    }
}

/// How a block that somebody wants is to be had.
pub(crate) enum Boarding {
    /// It is already on its way.
    Joined(Passenger),
    /// The caller must fetch it, with the pilot.
    Started(Passenger, Pilot),
    /// It landed on disk meanwhile.
    Here,
}

/// Waits for a block.
pub(crate) struct Passenger(watch::Receiver<Landing>);

/// Brings a block. The flight ends, with an error unless it landed, when this is dropped.
pub(crate) struct Pilot {
    flights: Flights,
    key: BlockKey,
    landing: watch::Sender<Landing>,
}

impl Flights {
    /// Joins or starts the flight of a block, unless `is_here` says that there is no need. A
    /// flight ends only after its block is on disk, so exactly one of the three holds.
    pub(crate) fn board(
        &self,
        key: BlockKey,
        urgency: &Urgency,
        is_here: impl FnOnce() -> bool,
    ) -> Boarding {
        let mut state = self.lock();
        if let Some(flight) = state.flying.get(&key).filter(|flight| !flight.has_failed()) {
            return Boarding::Joined(flight.take(urgency));
        }
        if is_here() {
            return Boarding::Here;
        }
        let (sender, receiver) = watch::channel(None);
        let flight = InflightFetch {
            landing: receiver.clone(),
            from_home: false,
            claimants: state.claims.claimants(key).iter().copied().collect(),
            urgency: urgency.clone(),
        };
        state.flying.insert(key, flight);
        let pilot = Pilot {
            flights: self.clone(),
            key,
            landing: sender,
        };
        Boarding::Started(Passenger(receiver), pilot)
    }

    /// Joins the flight of a block, if there is one.
    pub(crate) fn join(&self, key: BlockKey, urgency: &Urgency) -> Option<Passenger> {
        let state = self.lock();
        let flight = state.flying.get(&key).filter(|flight| !flight.has_failed());
        flight.map(|flight| flight.take(urgency))
    }

    /// Whether a block is on its way.
    pub(crate) fn is_flying(&self, key: BlockKey) -> bool {
        self.lock().flying.contains_key(&key)
    }

    /// Joins the flight of a block for another server that is about to ask home, if that one may
    /// wait for it; else remembers that it asked.
    pub(crate) fn join_for_heir(
        &self,
        key: BlockKey,
        own: ServerId,
        heir: ServerId,
    ) -> Option<Passenger> {
        let mut state = self.lock();
        let flight = state.flying.get_mut(&key);
        if let Some(flight) = flight.filter(|flight| !flight.has_failed()) {
            if flight.from_home || own < heir || flight.has_landed() {
                return Some(flight.take(&Urgency::new(true)));
            }
            flight.claimants.insert(heir);
        }
        state.claims.note_claim(key, heir);
        None
    }

    /// Who asked in vain for one of these blocks, and may have read it since.
    pub(crate) fn claimants(&self, keys: impl Iterator<Item = BlockKey>) -> BTreeSet<ServerId> {
        let state = self.lock();
        keys.flat_map(|key| state.claims.claimants(key))
            .copied()
            .collect()
    }

    fn lock(&self) -> MutexGuard<'_, InflightState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl InflightFetch {
    fn has_landed(&self) -> bool {
        matches!(*self.landing.borrow(), Some(Ok(_)))
    }

    /// Whoever wants the block after that asks anew: what was wrong may have passed, or changed.
    fn has_failed(&self) -> bool {
        matches!(*self.landing.borrow(), Some(Err(_)))
    }

    fn take(&self, urgency: &Urgency) -> Passenger {
        if urgency.is_urgent() {
            self.urgency.raise();
        }
        Passenger(self.landing.clone())
    }
}

impl Passenger {
    /// The block, when it has landed.
    ///
    /// # Errors
    /// Why it did not.
    pub(crate) async fn wait(&mut self) -> Result<Block> {
        let landed = self.0.wait_for(Option::is_some).await;
        let landed = landed.ok().and_then(|landing| landing.clone());
        landed.unwrap_or_else(|| {
            let text = "the fetch of a cached block was cancelled; retry";
            Err(Error::new(ErrorCode::ServerFault, text))
        })
    }

    /// Returns when the flight is over: its block is on disk then, if it will ever be.
    pub(crate) async fn until_over(&mut self) {
        while self.0.changed().await.is_ok() {}
    }
}

impl Pilot {
    /// From here on these flights, which began together, wait for home and for nobody else; unless
    /// there are servers that claimed one of their blocks and were not asked since: then nothing
    /// changes, and these are returned. All turn at once, or a server that waits for one of them
    /// could make another one wait for it.
    pub(crate) fn turn_home<'a>(pilots: impl Iterator<Item = &'a Self> + Clone) -> Vec<ServerId> {
        let Some(flights) = pilots.clone().next().map(|pilot| &pilot.flights) else {
            return Vec::new();
        };
        let mut state = flights.lock();
        let mut claimants = BTreeSet::new();
        for pilot in pilots.clone() {
            if let Some(flight) = state.flying.get_mut(&pilot.key) {
                claimants.append(&mut flight.claimants);
            }
        }
        for pilot in pilots.filter(|_| claimants.is_empty()) {
            if let Some(flight) = state.flying.get_mut(&pilot.key) {
                flight.from_home = true;
            }
        }
        claimants.into_iter().collect()
    }

    /// Gives the block, or why there is none, to everyone who waits. The flight of a block can
    /// still be joined until the pilot is dropped.
    pub(crate) fn land(&self, result: Result<Block>) {
        self.landing.send_replace(Some(result));
    }
}

impl Drop for Pilot {
    fn drop(&mut self) {
        let mut state = self.flights.lock();
        // After a failure the next one may fly already.
        let flight = state.flying.get(&self.key);
        let own = self.landing.subscribe();
        if flight.is_some_and(|flight| flight.landing.same_channel(&own)) {
            state.flying.remove(&self.key);
        }
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::{BlockIndex, FileIndex};

    use super::*;

    const KEY: BlockKey = BlockKey {
        file: FileIndex(0),
        block: BlockIndex(0),
    };

    const SMALL: ServerId = ServerId(1);
    const LARGE: ServerId = ServerId(2);

    fn start(flights: &Flights) -> Pilot {
        match flights.board(KEY, &Urgency::new(true), || false) {
            Boarding::Started(_, pilot) => pilot,
            _ => panic!("nobody flies yet"),
        }
    }

    /// Two servers that take themselves for the primary of a block: exactly one reads it from home,
    /// whoever asks first and whoever is undecided.
    #[test]
    fn only_one_of_two_primaries_reads_from_home() {
        for first in [SMALL, LARGE] {
            let second = if first == SMALL { LARGE } else { SMALL };
            // Who was asked before it had a flight asks back before it goes home.
            let flights = Flights::default();
            assert!(flights.join_for_heir(KEY, second, first).is_none());
            let late = start(&flights);
            assert_eq!(Pilot::turn_home([&late].into_iter()), [first]);
            assert_eq!(Pilot::turn_home([&late].into_iter()), [], "it was asked");
            // Who has decided is waited for, whoever asks.
            assert!(flights.join_for_heir(KEY, second, first).is_some());
        }
        // Both are undecided: the larger one waits, the smaller one does not, and is asked.
        let [small, large] = [Flights::default(), Flights::default()];
        let pilots = [start(&small), start(&large)];
        assert!(small.join_for_heir(KEY, SMALL, LARGE).is_some());
        assert!(large.join_for_heir(KEY, LARGE, SMALL).is_none());
        assert_eq!(Pilot::turn_home([&pilots[1]].into_iter()), [SMALL]);
        assert_eq!(Pilot::turn_home([&pilots[0]].into_iter()), []);
    }

    #[test]
    fn later_readers_do_not_see_an_earlier_failure() {
        let flights = Flights::default();
        let urgency = Urgency::new(true);
        let failed = start(&flights);
        failed.land(Err(Error::new(
            ErrorCode::SourceChanged,
            "it is another one",
        )));
        assert!(flights.join(KEY, &urgency).is_none());
        assert!(flights.join_for_heir(KEY, LARGE, SMALL).is_none());
        let next = start(&flights);
        drop(failed);
        assert!(flights.join(KEY, &urgency).is_some(), "the next one flies");
        drop(next);
        assert!(!flights.is_flying(KEY));
    }

    #[test]
    fn fetches_started_together_decide_for_home_together() {
        let flights = Flights::default();
        let other = BlockKey {
            file: FileIndex(0),
            block: BlockIndex(1),
        };
        let one = start(&flights);
        let Boarding::Started(_, two) = flights.board(other, &Urgency::new(true), || false) else {
            panic!("nobody flies yet")
        };
        assert!(flights.join_for_heir(other, LARGE, SMALL).is_none());
        assert_eq!(Pilot::turn_home([&one, &two].into_iter()), [SMALL]);
        let undecided = flights.join_for_heir(KEY, LARGE, SMALL);
        assert!(undecided.is_none(), "its neighbour waits for somebody");
    }

    #[tokio::test]
    async fn one_fetch_serves_all_waiters() {
        let flights = Flights::default();
        let urgent = Urgency::new(true);
        let Boarding::Started(first, pilot) = flights.board(KEY, &Urgency::new(false), || false)
        else {
            panic!("nobody flies yet")
        };
        let Boarding::Joined(second) = flights.board(KEY, &urgent, || panic!("is on its way"))
        else {
            panic!("one flies already")
        };
        assert!(
            flights.lock().flying[&KEY].urgency.is_urgent(),
            "the second one waits"
        );
        assert_eq!(Pilot::turn_home([&pilot].into_iter()), []);
        let third = flights.join_for_heir(KEY, LARGE, SMALL);
        let third = third.expect("it waits for home");
        pilot.land(Ok((Bytes::from_static(b"x"), Digest::of(b"x"))));
        drop(pilot);
        for mut passenger in [first, second, third] {
            assert_eq!(
                passenger.wait().await.map(|block| block.0),
                Ok(Bytes::from_static(b"x"))
            );
            passenger.until_over().await;
        }
        assert!(matches!(
            flights.board(KEY, &urgent, || true),
            Boarding::Here
        ));
    }

    #[tokio::test]
    async fn a_dropped_fetch_owner_fails_its_waiters() {
        let flights = Flights::default();
        let Boarding::Started(mut passenger, pilot) =
            flights.board(KEY, &Urgency::new(false), || false)
        else {
            panic!("nobody flies yet")
        };
        drop(pilot);
        assert_eq!(
            passenger.wait().await.map_err(|e| e.code),
            Err(ErrorCode::ServerFault)
        );
        assert!(matches!(
            flights.board(KEY, &Urgency::new(false), || false),
            Boarding::Started(..)
        ));
    }
}
