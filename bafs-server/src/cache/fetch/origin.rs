//! Requests of this node to one home: urgent ones first, background work while the link has room.
//! Stores nothing.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use bafs_proto::message::{FetchPriority, ReadSource, SourceData};
use bafs_proto::time::{Deadline, Time};
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use tokio::sync::{Notify, Semaphore, SemaphorePermit, watch};

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
    places: Semaphore,
    background_count: Mutex<usize>,
    released: Notify,
    /// When the home last sent something, as a [`Time`]; 0 if it never did.
    last_answer_ms: AtomicU64,
}

/// The permission to ask home, until it is dropped.
#[derive(Debug)]
pub(crate) struct OriginPermit<'a> {
    limiter: &'a OriginLimiter,
    place: Option<SemaphorePermit<'a>>,
    is_background: bool,
}

impl OriginLimiter {
    /// Without requests.
    pub(crate) fn new() -> Self {
        Self {
            places: Semaphore::new(REQUESTS_MAX),
            background_count: Mutex::default(),
            released: Notify::new(),
            last_answer_ms: AtomicU64::new(0),
        }
    }

    /// Reads a range of a file at home, as soon as there is a permit.
    ///
    /// # Errors
    /// What home answers; `DeadlineExceeded`.
    pub(crate) async fn read(
        &self,
        homes: &HomeClients,
        home: HomeAddress<'_>,
        token: &Token,
        call: ReadSource,
        urgency: &Urgency,
    ) -> Result<(SourceData, Bytes)> {
        let permit_deadline = Deadline::after_ms(PERMIT_MS_MAX);
        let _permit = self.acquire(urgency, permit_deadline).await?;
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
    async fn acquire(&self, urgency: &Urgency, deadline: Deadline) -> Result<OriginPermit<'_>> {
        tokio::time::timeout_at(deadline.instant().into(), self.wait_for_place(urgency))
            .await
            .unwrap_or_else(|_| {
                let text = "too many requests to home are in progress";
                Err(Error::new(ErrorCode::DeadlineExceeded, text))
            })
    }

    async fn wait_for_place(&self, urgency: &Urgency) -> Result<OriginPermit<'_>> {
        loop {
            let released = self.released.notified();
            tokio::pin!(released);
            released.as_mut().enable();
            if urgency.is_urgent() {
                let place = self.places.acquire().await;
                let place = place.map_err(|_| {
                    let text = "the server is stopping and sends no more requests to home";
                    Error::new(ErrorCode::ServerFault, text)
                })?;
                return Ok(self.permit(place, false));
            }
            if let Some(permit) = self.try_background() {
                return Ok(permit);
            }
            tokio::select! {
                () = released => {}
                () = urgency.wait_until_urgent() => {}
            }
        }
    }

    fn try_background(&self) -> Option<OriginPermit<'_>> {
        let mut background = self.background_count();
        if *background >= BACKGROUND_MAX || self.places.available_permits() < FREE_MIN {
            return None;
        }
        let place = self.places.try_acquire().ok()?;
        *background += 1;
        Some(self.permit(place, true))
    }

    fn permit<'a>(&'a self, place: SemaphorePermit<'a>, is_background: bool) -> OriginPermit<'a> {
        OriginPermit {
            limiter: self,
            place: Some(place),
            is_background,
        }
    }

    fn background_count(&self) -> MutexGuard<'_, usize> {
        lock(&self.background_count)
    }
}

impl Drop for OriginPermit<'_> {
    fn drop(&mut self) {
        drop(self.place.take());
        if self.is_background {
            *self.limiter.background_count() -= 1;
        }
        self.limiter.released.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

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
            permits.push(limiter.wait_for_place(&urgent).await.expect("permit"));
        }
        let mut waiting = pin!(limiter.wait_for_place(&idle));
        assert!(is_ready(waiting.as_mut()).is_none());
        permits.pop();
        assert!(is_ready(waiting.as_mut()).expect("a permit").is_ok());
    }

    #[tokio::test]
    async fn a_background_request_proceeds_once_it_becomes_urgent() {
        let limiter = OriginLimiter::new();
        let idle = Urgency::of(FetchPriority::Background);
        let mut permits = Vec::new();
        for _ in 0..BACKGROUND_MAX {
            permits.push(limiter.wait_for_place(&idle).await.expect("permit"));
        }
        let late = Urgency::of(FetchPriority::Background);
        let mut waiting = pin!(limiter.wait_for_place(&late));
        assert!(is_ready(waiting.as_mut()).is_none());
        late.raise();
        assert!(is_ready(waiting.as_mut()).expect("a permit").is_ok());
    }
}
