//! Blocks that are on their way: whoever wants one that is already coming waits for it instead of
//! fetching it again. Fetches nothing itself.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bafs_proto::hash::Digest;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use tokio::sync::watch;

use crate::logic::blocks::BlockKey;

/// A block with the digest of its origin.
pub(crate) type Block = (Bytes, Digest);

type Landing = Option<Result<Block>>;

/// Blocks that are on their way from one kind of place.
#[derive(Default, Clone)]
pub(crate) struct Flights(Arc<Mutex<BTreeMap<BlockKey, Flight>>>);

struct Flight {
    landing: watch::Receiver<Landing>,
    from_home: Arc<AtomicBool>,
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
    from_home: Arc<AtomicBool>,
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
        let mut flights = self.lock();
        if let Some(flight) = flights.get(&key) {
            return Boarding::Joined(flight.take(urgency));
        }
        if is_here() {
            return Boarding::Here;
        }
        let (sender, receiver) = watch::channel(None);
        let from_home = Arc::new(AtomicBool::new(false));
        let flight = Flight {
            landing: receiver.clone(),
            from_home: from_home.clone(),
            urgency: urgency.clone(),
        };
        flights.insert(key, flight);
        let pilot = Pilot {
            flights: self.clone(),
            key,
            landing: sender,
            from_home,
        };
        Boarding::Started(Passenger(receiver), pilot)
    }

    /// Joins the flight of a block, if there is one.
    pub(crate) fn join(&self, key: BlockKey, urgency: &Urgency) -> Option<Passenger> {
        self.lock().get(&key).map(|flight| flight.take(urgency))
    }

    /// Joins the flight of a block if it waits for home and for nobody else.
    pub(crate) fn join_from_home(&self, key: BlockKey) -> Option<Passenger> {
        let flights = self.lock();
        let flight = flights
            .get(&key)
            .filter(|flight| flight.from_home.load(Ordering::Acquire));
        flight.map(|flight| flight.take(&Urgency::new(true)))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<BlockKey, Flight>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Flight {
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
            let text = "the fetch of a cached block was given up; ask again";
            Err(Error::new(ErrorCode::ServerFault, text))
        })
    }

    /// Returns when the flight is over: its block is on disk then, if it will ever be.
    pub(crate) async fn until_over(&mut self) {
        while self.0.changed().await.is_ok() {}
    }
}

impl Pilot {
    /// From here on the flight waits for home and for nobody else.
    pub(crate) fn turn_home(&self) {
        self.from_home.store(true, Ordering::Release);
    }

    /// Gives the block, or why there is none, to everyone who waits. The flight can still be
    /// joined until the pilot is dropped.
    pub(crate) fn land(&self, result: Result<Block>) {
        self.landing.send_replace(Some(result));
    }
}

impl Drop for Pilot {
    fn drop(&mut self) {
        self.flights.lock().remove(&self.key);
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

    #[tokio::test]
    async fn one_flies_and_all_arrive() {
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
            flights.lock()[&KEY].urgency.is_urgent(),
            "the second one waits"
        );
        assert!(flights.join_from_home(KEY).is_none());
        pilot.turn_home();
        let third = flights.join_from_home(KEY).expect("it waits for home");
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
    async fn a_lost_pilot_is_an_error_and_the_next_reader_tries_anew() {
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
