//! What a server holds of requests at once: a bound for each connection, and one for all of them
//! in a process. Whoever finds no room is told so and comes again.

use std::sync::{Arc, OnceLock};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// What one call weighs at least on its connection, in KiB.
pub(super) const CALL_KIB_MIN: usize = 128;

/// Calls and request bodies that a server takes at once on one connection, in KiB.
pub(super) const CONNECTION_KIB: usize = 64 << 10;

/// The same over all connections of a process when nobody says otherwise.
const ALL_KIB_DEFAULT: usize = 512 << 10;

/// With less than this some largest requests would never be taken.
const ALL_KIB_MIN: usize = 16 << 10;

static ALL: OnceLock<Arc<Semaphore>> = OnceLock::new();

/// Bounds what the servers of this process hold of requests, in bytes, for as long as it lives.
/// Only the first call counts; without one the default holds. A few megabytes are the least with
/// which anything works.
pub fn bound_requests(bytes_max: u64) {
    let kib = usize::try_from(bytes_max / 1024).unwrap_or(usize::MAX);
    let kib = kib.clamp(ALL_KIB_MIN, Semaphore::MAX_PERMITS);
    let _ = ALL.set(Arc::new(Semaphore::new(kib)));
}

/// The room for all requests of this process.
fn all() -> &'static Arc<Semaphore> {
    ALL.get_or_init(|| Arc::new(Semaphore::new(ALL_KIB_DEFAULT)))
}

/// The room for the requests of one connection.
#[derive(Debug, Clone)]
pub(super) struct Room {
    connection: Arc<Semaphore>,
    all: Arc<Semaphore>,
}

/// The place of a request, until it is dropped.
#[derive(Debug)]
pub(super) struct Place(#[expect(dead_code, reason = "held")] [OwnedSemaphorePermit; 2]);

impl Room {
    /// The room of a new connection.
    pub(super) fn new() -> Self {
        Self {
            connection: Arc::new(Semaphore::new(CONNECTION_KIB)),
            all: all().clone(),
        }
    }

    /// Room for so many KiB on the connection and on all of them.
    #[cfg(test)]
    pub(super) fn of(connection_kib: usize, all: &Arc<Semaphore>) -> Self {
        Self {
            connection: Arc::new(Semaphore::new(connection_kib)),
            all: all.clone(),
        }
    }

    /// A place for a request of so many bytes, if there is room.
    pub(super) fn take(&self, bytes: usize) -> Option<Place> {
        let on_connection = self
            .connection
            .clone()
            .try_acquire_many_owned(weight(bytes));
        // Of small calls there are never so many that they count.
        let among_all = self.all.clone().try_acquire_many_owned(kib(bytes));
        Some(Place([on_connection.ok()?, among_all.ok()?]))
    }
}

/// The place of a request of so many bytes among all, as soon as there is room.
pub(super) async fn place_of(bytes: usize) -> Option<OwnedSemaphorePermit> {
    all().clone().acquire_many_owned(kib(bytes)).await.ok()
}

/// The weight of a call with so many bytes on its connection, in KiB.
pub(super) fn weight(bytes: usize) -> u32 {
    kib(bytes).max(CALL_KIB_MIN as u32)
}

fn kib(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_connections_share_one_bound() {
        let all = Arc::new(Semaphore::new(10 << 10));
        let rooms = [(); 8].map(|()| Room::of(CONNECTION_KIB, &all));
        let places = rooms.each_ref().map(|room| room.take(4 << 20));
        assert_eq!(places.iter().flatten().count(), 2, "4 MiB twice in 10 MiB");
        assert!(rooms[7].take(1000).is_some(), "a small one still fits");
        drop(places);
        assert!(rooms[7].take(4 << 20).is_some());
    }
}
