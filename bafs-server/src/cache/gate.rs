//! Who may ask a home now: those for whom somebody waits first, background work when the link has
//! room. Asks nobody.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use bafs_proto::time::{Deadline, Time};
use bafs_proto::{Error, ErrorCode, Result};
use tokio::sync::{Notify, Semaphore, SemaphorePermit};

use super::flights::Urgency;

/// Most requests to a home under way at once: enough to fill a wide-area link.
const REQUESTS_MAX: usize = 32;

/// Most of them in the background: they fill an idle link, and what is urgent waits for little.
const BACKGROUND_MAX: usize = 4;

/// Background requests begin only while so many places are free.
const FREE_MIN: usize = REQUESTS_MAX / 2;

/// The way to a home.
#[derive(Debug)]
pub(crate) struct Gate {
    places: Semaphore,
    background: Mutex<usize>,
    left: Notify,
    /// When the home last sent something, as a [`Time`]; 0 if it never did.
    answered_ms: AtomicU64,
}

/// The right to ask home, until it is dropped.
#[derive(Debug)]
pub(crate) struct Pass<'a> {
    gate: &'a Gate,
    place: Option<SemaphorePermit<'a>>,
    in_background: bool,
}

impl Gate {
    /// Nobody asks yet.
    pub(crate) fn new() -> Self {
        Self {
            places: Semaphore::new(REQUESTS_MAX),
            background: Mutex::default(),
            left: Notify::new(),
            answered_ms: AtomicU64::new(0),
        }
    }

    /// The home sent something.
    pub(crate) fn note_answer(&self, now: Time) {
        self.answered_ms.store(now.0, Ordering::Relaxed);
    }

    /// When the home last sent something to anybody here.
    pub(crate) fn answered(&self) -> Time {
        Time(self.answered_ms.load(Ordering::Relaxed))
    }

    /// Waits for a turn.
    ///
    /// # Errors
    /// `DeadlineExceeded`.
    pub(crate) async fn enter(&self, urgency: &Urgency, deadline: Deadline) -> Result<Pass<'_>> {
        tokio::time::timeout_at(deadline.instant().into(), self.turn(urgency))
            .await
            .unwrap_or_else(|_| {
                let text = "too many requests to home are in progress";
                Err(Error::new(ErrorCode::DeadlineExceeded, text))
            })
    }

    async fn turn(&self, urgency: &Urgency) -> Result<Pass<'_>> {
        loop {
            let left = self.left.notified();
            tokio::pin!(left);
            left.as_mut().enable();
            if urgency.is_urgent() {
                let place = self.places.acquire().await;
                let place = place.map_err(|_| {
                    Error::new(
                        ErrorCode::ServerFault,
                        "the server is stopping and sends no more \
                        requests to home",
                    )
                })?;
                return Ok(self.pass(place, false));
            }
            if let Some(pass) = self.background_pass() {
                return Ok(pass);
            }
            tokio::select! {
                () = left => {}
                () = urgency.raised() => {}
            }
        }
    }

    fn background_pass(&self) -> Option<Pass<'_>> {
        let mut background = self.background();
        if *background >= BACKGROUND_MAX || self.places.available_permits() < FREE_MIN {
            return None;
        }
        let place = self.places.try_acquire().ok()?;
        *background += 1;
        Some(self.pass(place, true))
    }

    fn pass<'a>(&'a self, place: SemaphorePermit<'a>, in_background: bool) -> Pass<'a> {
        Pass {
            gate: self,
            place: Some(place),
            in_background,
        }
    }

    fn background(&self) -> std::sync::MutexGuard<'_, usize> {
        self.background
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        drop(self.place.take());
        if self.in_background {
            *self.gate.background() -= 1;
        }
        self.gate.left.notify_waiters();
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
        let gate = Gate::new();
        let (urgent, idle) = (Urgency::new(true), Urgency::new(false));
        let mut passes = Vec::new();
        for _ in 0..REQUESTS_MAX - FREE_MIN + 1 {
            passes.push(gate.turn(&urgent).await.expect("pass"));
        }
        let mut waiting = pin!(gate.turn(&idle));
        assert!(is_ready(waiting.as_mut()).is_none());
        passes.pop();
        assert!(is_ready(waiting.as_mut()).expect("a turn").is_ok());
    }

    #[tokio::test]
    async fn a_background_request_proceeds_once_it_becomes_urgent() {
        let gate = Gate::new();
        let idle = Urgency::new(false);
        let mut passes = Vec::new();
        for _ in 0..BACKGROUND_MAX {
            passes.push(gate.turn(&idle).await.expect("pass"));
        }
        let late = Urgency::new(false);
        let mut waiting = pin!(gate.turn(&late));
        assert!(is_ready(waiting.as_mut()).is_none());
        late.raise();
        assert!(is_ready(waiting.as_mut()).expect("a turn").is_ok());
    }
}
