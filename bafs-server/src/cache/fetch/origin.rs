//! Requests of this node to one home: urgent ones first, background work while the link has room.
//! Sources that wait get equally many. Stores nothing.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use bafs_proto::hash::Digest;
use bafs_proto::message::{FetchPriority, ReadSource, SourceData};
use bafs_proto::time::{Deadline, Time};
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use tokio::sync::{Notify, oneshot, watch};

use crate::cache::locks::lock;
use crate::clock;
use crate::home_clients::{HomeAddress, HomeClients};

/// Most requests to a home at once: enough to fill a wide-area link.
const REQUESTS_MAX: usize = 32;

/// Most of them in the background: they fill an idle link, and urgent requests wait for few.
const BACKGROUND_MAX: usize = 4;

/// Background requests begin only while so many places are free.
const FREE_MIN: usize = REQUESTS_MAX / 2;

/// How long a fetch waits for its permit to ask home. Readers give up earlier, and find the blocks
/// here when they come back.
const PERMIT_MS_MAX: u64 = 600_000;

/// Longest time of a fetch. It outlives its readers, so that a slow home is not asked twice.
pub(crate) const FETCH_MS_MAX: u64 = 120_000;

/// Whether a reader waits for some blocks. All fetches of these blocks share it.
#[derive(Debug, Clone)]
pub(crate) struct Urgency(Arc<watch::Sender<bool>>);

impl Urgency {
    /// The urgency that a reader asks for.
    pub(crate) fn of(priority: FetchPriority) -> Self {
        let is_urgent = priority == FetchPriority::Urgent;
        Self(Arc::new(watch::Sender::new(is_urgent)))
    }

    /// Whether a reader waits.
    pub(crate) fn is_urgent(&self) -> bool {
        *self.0.borrow()
    }

    /// A reader waits from here on.
    pub(crate) fn raise(&self) {
        self.0
            .send_if_modified(|urgent| !std::mem::replace(urgent, true));
    }

    /// Returns when a reader waits.
    pub(crate) async fn wait_until_urgent(&self) {
        // The sender lives as long as this does.
        let _ = self.0.subscribe().wait_for(|urgent| *urgent).await;
    }
}

/// The requests of this node to one home.
#[derive(Debug)]
pub(crate) struct OriginLimiter {
    places: Mutex<Places>,
    released: Notify,
    /// When the home last sent something, as a [`Time`]; 0 if it never did.
    last_answer_ms: AtomicU64,
}

/// Who has a place, and who waits for one. Each state of a source is a claimant: a user who reads
/// much of one keeps no user of another waiting.
#[derive(Debug)]
struct Places {
    free: usize,
    background_count: usize,
    held: BTreeMap<Digest, usize>,
    waiting: BTreeMap<Digest, VecDeque<oneshot::Sender<()>>>,
}

impl Places {
    /// Takes a free place.
    fn take(&mut self, claimant: Digest) -> bool {
        let is_free = self.free > 0;
        if is_free {
            self.free -= 1;
            *self.held.entry(claimant).or_default() += 1;
        }
        is_free
    }

    /// Gives a place back, or on to the waiting claimant that has the fewest.
    fn give_back(&mut self, claimant: Digest) {
        if let Some(held) = self.held.get_mut(&claimant) {
            *held -= 1;
            if *held == 0 {
                self.held.remove(&claimant);
            }
        }
        let held = &self.held;
        let count = |claimant: &Digest| held.get(claimant).copied().unwrap_or(0);
        while let Some(next) = self.waiting.keys().copied().min_by_key(count) {
            let queue = self.waiting.entry(next).or_default();
            let waiter = queue.pop_front();
            if queue.is_empty() {
                self.waiting.remove(&next);
            }
            // One that gave up has no use for it.
            if waiter.is_some_and(|waiter| waiter.send(()).is_ok()) {
                *self.held.entry(next).or_default() += 1;
                return;
            }
        }
        self.free += 1;
    }
}

/// The permission to ask home, until it is dropped.
#[derive(Debug)]
pub(crate) struct OriginPermit<'a> {
    limiter: &'a OriginLimiter,
    claimant: Digest,
    is_background: bool,
}

/// A place that somebody waits for: what comes after the wait was given up is given back.
struct AwaitedPlace<'a> {
    limiter: &'a OriginLimiter,
    claimant: Digest,
    granted: oneshot::Receiver<()>,
}

impl<'a> AwaitedPlace<'a> {
    async fn wait(mut self) -> OriginPermit<'a> {
        // The limiter outlives those who wait, and grants before it forgets them.
        let _ = (&mut self.granted).await;
        self.granted.close();
        OriginPermit {
            limiter: self.limiter,
            claimant: self.claimant,
            is_background: false,
        }
    }
}

impl Drop for AwaitedPlace<'_> {
    fn drop(&mut self) {
        self.granted.close();
        // Granted, but nobody took it.
        if self.granted.try_recv().is_ok() {
            self.limiter.places().give_back(self.claimant);
            self.limiter.released.notify_waiters();
        }
    }
}

impl OriginLimiter {
    /// Without requests.
    pub(crate) fn new() -> Self {
        Self {
            places: Mutex::new(Places {
                free: REQUESTS_MAX,
                background_count: 0,
                held: BTreeMap::new(),
                waiting: BTreeMap::new(),
            }),
            released: Notify::new(),
            last_answer_ms: AtomicU64::new(0),
        }
    }

    /// Reads a range of a file at home, as soon as there is a permit. Claimants, which are states
    /// of sources, get equally many.
    ///
    /// # Errors
    /// What home answers; `DeadlineExceeded`.
    pub(crate) async fn read(
        &self,
        homes: &HomeClients,
        (home, claimant): (HomeAddress<'_>, Digest),
        token: &Token,
        call: ReadSource,
        urgency: &Urgency,
    ) -> Result<(SourceData, Bytes)> {
        let permit_deadline = Deadline::after_ms(PERMIT_MS_MAX);
        let _permit = self.acquire(claimant, urgency, permit_deadline).await?;
        // Its time begins with the permit: a request that waited long would end too early.
        let deadline = Deadline::after_ms(FETCH_MS_MAX);
        let answer = homes.read(home, token, call, deadline).await?;
        let now = clock::now();
        self.last_answer_ms.store(now.0, Ordering::Relaxed);
        Ok(answer)
    }

    /// When the home last sent something to this node.
    pub(crate) fn last_answer(&self) -> Time {
        Time(self.last_answer_ms.load(Ordering::Relaxed))
    }

    /// Waits for a permit.
    ///
    /// # Errors
    /// `DeadlineExceeded`.
    async fn acquire(
        &self,
        claimant: Digest,
        urgency: &Urgency,
        deadline: Deadline,
    ) -> Result<OriginPermit<'_>> {
        let wait = self.wait_for_place(claimant, urgency);
        tokio::time::timeout_at(deadline.instant().into(), wait)
            .await
            .map_err(|_| {
                let text = "too many requests to home are in progress";
                Error::new(ErrorCode::DeadlineExceeded, text)
            })
    }

    async fn wait_for_place(&self, claimant: Digest, urgency: &Urgency) -> OriginPermit<'_> {
        loop {
            let released = self.released.notified();
            tokio::pin!(released);
            released.as_mut().enable();
            if urgency.is_urgent() {
                return self.take_urgent(claimant).await;
            }
            if let Some(permit) = self.try_background(claimant) {
                return permit;
            }
            tokio::select! {
                () = released => {}
                () = urgency.wait_until_urgent() => {}
            }
        }
    }

    async fn take_urgent(&self, claimant: Digest) -> OriginPermit<'_> {
        let awaited = {
            let mut places = self.places();
            if places.take(claimant) {
                return OriginPermit {
                    limiter: self,
                    claimant,
                    is_background: false,
                };
            }
            let (grant, granted) = oneshot::channel();
            places.waiting.entry(claimant).or_default().push_back(grant);
            AwaitedPlace {
                limiter: self,
                claimant,
                granted,
            }
        };
        awaited.wait().await
    }

    fn try_background(&self, claimant: Digest) -> Option<OriginPermit<'_>> {
        let mut places = self.places();
        if places.background_count >= BACKGROUND_MAX || places.free < FREE_MIN {
            return None;
        }
        places.background_count += 1;
        places.take(claimant).then_some(OriginPermit {
            limiter: self,
            claimant,
            is_background: true,
        })
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        lock(&self.places)
    }
}

impl Drop for OriginPermit<'_> {
    fn drop(&mut self) {
        let mut places = self.limiter.places();
        if self.is_background {
            places.background_count -= 1;
        }
        places.give_back(self.claimant);
        drop(places);
        self.limiter.released.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    const SOURCE: Digest = Digest([1; 32]);
    const OTHER: Digest = Digest([2; 32]);

    fn is_ready<F: Future>(future: std::pin::Pin<&mut F>) -> Option<F::Output> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        }
    }

    #[tokio::test]
    async fn background_requests_wait_for_urgent_requests() {
        let limiter = OriginLimiter::new();
        let (urgent, idle) = (
            Urgency::of(FetchPriority::Urgent),
            Urgency::of(FetchPriority::Background),
        );
        let mut permits = Vec::new();
        for _ in 0..REQUESTS_MAX - FREE_MIN + 1 {
            permits.push(limiter.wait_for_place(SOURCE, &urgent).await);
        }
        let mut waiting = pin!(limiter.wait_for_place(SOURCE, &idle));
        assert!(is_ready(waiting.as_mut()).is_none());
        permits.pop();
        assert!(is_ready(waiting.as_mut()).is_some());
    }

    #[tokio::test]
    async fn a_background_request_proceeds_once_it_becomes_urgent() {
        let limiter = OriginLimiter::new();
        let idle = Urgency::of(FetchPriority::Background);
        let mut permits = Vec::new();
        for _ in 0..BACKGROUND_MAX {
            permits.push(limiter.wait_for_place(SOURCE, &idle).await);
        }
        let late = Urgency::of(FetchPriority::Background);
        let mut waiting = pin!(limiter.wait_for_place(SOURCE, &late));
        assert!(is_ready(waiting.as_mut()).is_none());
        late.raise();
        assert!(is_ready(waiting.as_mut()).is_some());
    }

    #[tokio::test]
    async fn a_late_source_gets_its_half() {
        let limiter = OriginLimiter::new();
        let urgent = Urgency::of(FetchPriority::Urgent);
        let wait = |source| Box::pin(limiter.wait_for_place(source, &urgent));
        let mut first = VecDeque::new();
        for _ in 0..REQUESTS_MAX {
            first.push_back(wait(SOURCE).await);
        }
        // The first source has as many more in its queue before the second one comes.
        let mut waiting: Vec<_> = [SOURCE, OTHER]
            .into_iter()
            .flat_map(|source| (0..REQUESTS_MAX).map(move |_| source))
            .map(|source| (source, wait(source)))
            .collect();
        for (_, place) in &mut waiting {
            assert!(is_ready(place.as_mut()).is_none());
        }
        let mut granted = Vec::new();
        for _ in 0..REQUESTS_MAX {
            drop(first.pop_front());
            for (source, mut place) in std::mem::take(&mut waiting) {
                match is_ready(place.as_mut()) {
                    Some(permit) => granted.push((source, permit)),
                    None => waiting.push((source, place)),
                }
            }
        }
        let others = granted.iter().filter(|(source, _)| *source == OTHER);
        assert_eq!(
            (granted.len(), others.count()),
            (REQUESTS_MAX, REQUESTS_MAX / 2)
        );
        // Whoever gives up loses no place.
        drop(waiting);
        drop(granted);
        assert_eq!(limiter.places().free, REQUESTS_MAX);
        assert!(limiter.places().waiting.values().all(VecDeque::is_empty));
    }
}
