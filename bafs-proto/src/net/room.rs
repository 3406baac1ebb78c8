//! What a server holds of requests at once: a bound for each connection, and one for all of them
//! in a process. Whoever finds no room is told so and comes again; over QUIC requests wait a moment
//! for it, in the window of their connection.

use std::sync::{Arc, OnceLock};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// What is said to who finds no room.
pub(super) const TOO_MANY: &str = "too many calls are under way";

/// What one call weighs at least on its connection, in KiB.
pub(super) const CALL_KIB_MIN: usize = 128;

/// Calls and request bodies that a server takes at once on one connection, in KiB.
pub(super) const CONNECTION_KIB: usize = 64 << 10;

/// The same over all connections of a process when nobody says otherwise.
const ALL_KIB_DEFAULT: usize = 512 << 10;

/// With less than this some largest requests would never be taken.
const ALL_KIB_MIN: usize = 16 << 10;

/// An eighth of all is kept for requests of at most so many bytes: large ones, of which some come
/// slowly, never keep them out.
const SMALL_BYTES: usize = 64 << 10;
const SMALL_PART: usize = 8;

static ALL: OnceLock<Rooms> = OnceLock::new();

/// The room for all requests of a process.
#[derive(Debug, Clone)]
pub(super) struct Rooms {
    /// For all requests.
    shared: Arc<Semaphore>,
    /// For small ones.
    kept: Arc<Semaphore>,
}

impl Rooms {
    /// Room for so many KiB in all.
    pub(super) fn new(kib: usize) -> Self {
        let kept = kib / SMALL_PART;
        Self {
            shared: Arc::new(Semaphore::new(kib - kept)),
            kept: Arc::new(Semaphore::new(kept)),
        }
    }

    fn try_take(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let take = |room: &Arc<Semaphore>| room.clone().try_acquire_many_owned(kib(bytes)).ok();
        let is_small = bytes <= SMALL_BYTES;
        take(&self.shared).or_else(|| is_small.then(|| take(&self.kept)).flatten())
    }

    async fn take(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let take = |room: &Arc<Semaphore>| room.clone().acquire_many_owned(kib(bytes));
        if bytes > SMALL_BYTES {
            return take(&self.shared).await.ok();
        }
        let place = tokio::select! {
            biased;
            place = take(&self.shared) => place,
            place = take(&self.kept) => place,
        };
        place.ok()
    }
}

/// Bounds what the servers of this process hold of requests, in bytes, for as long as it lives.
/// Only the first call counts; without one the default holds. A few megabytes are the least with
/// which anything works.
pub fn bound_requests(bytes_max: u64) {
    let kib = usize::try_from(bytes_max / 1024).unwrap_or(usize::MAX);
    let kib = kib.clamp(ALL_KIB_MIN, Semaphore::MAX_PERMITS);
    let _ = ALL.set(Rooms::new(kib));
}

/// The room for all requests of this process.
fn all() -> &'static Rooms {
    ALL.get_or_init(|| Rooms::new(ALL_KIB_DEFAULT))
}

/// The room for the requests of one connection.
#[derive(Debug, Clone)]
pub(super) struct Room {
    connection: Arc<Semaphore>,
    all: Rooms,
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
    pub(super) fn of(connection_kib: usize, all: &Rooms) -> Self {
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
        Some(Place([on_connection.ok()?, self.all.try_take(bytes)?]))
    }

    /// A place for a request of so many bytes, as soon as there is room.
    pub(super) async fn wait(&self, bytes: usize) -> Option<Place> {
        let on_connection = self.connection.clone().acquire_many_owned(kib(bytes));
        Some(Place([
            on_connection.await.ok()?,
            self.all.take(bytes).await?,
        ]))
    }
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
    use std::pin::Pin;
    use std::task::{Context, Waker};

    use super::*;

    #[test]
    fn many_connections_share_one_bound() {
        let all = Rooms::new(10 << 10);
        let rooms = [(); 8].map(|()| Room::of(CONNECTION_KIB, &all));
        let places = rooms.each_ref().map(|room| room.take(4 << 20));
        assert_eq!(places.iter().flatten().count(), 2, "4 MiB twice in 10 MiB");
        let rest = rooms[6].take(768 << 10);
        assert!(
            rest.is_some(),
            "nothing is left but what is kept for small ones"
        );
        assert!(rooms[7].take(SMALL_BYTES + 1).is_none());
        let small: Vec<_> = rooms.iter().cycle().take(30).collect();
        let small: Vec<_> = small.iter().map(|room| room.take(SMALL_BYTES)).collect();
        assert_eq!(small.iter().flatten().count(), 20, "64 KiB in 1.25 MiB");
        drop((places, rest, small));
        assert!(rooms[7].take(4 << 20).is_some());
    }

    fn waits(place: Pin<&mut impl Future<Output = Option<Place>>>) -> bool {
        place
            .poll(&mut Context::from_waker(Waker::noop()))
            .is_pending()
    }

    #[tokio::test]
    async fn what_waits_for_room_keeps_no_small_request_out() {
        let all = Rooms::new(10 << 10);
        let rooms = [(); 4].map(|()| Room::of(CONNECTION_KIB, &all));
        let mut places = Vec::new();
        for room in &rooms[..2] {
            places.push(room.wait(4 << 20).await.expect("open"));
        }
        let mut third = std::pin::pin!(rooms[2].wait(4 << 20));
        assert!(waits(third.as_mut()));
        assert!(rooms[3].wait(64 << 10).await.is_some());
        places.pop();
        assert!(third.await.is_some());
    }

    #[tokio::test]
    async fn one_connection_takes_no_more_than_its_part() {
        let all = Rooms::new(10 << 10);
        let room = Room::of(1 << 10, &all);
        let place = room.wait(1 << 20).await;
        assert!(waits(std::pin::pin!(room.wait(1))));
        drop(place);
        assert!(room.wait(1).await.is_some());
    }
}
