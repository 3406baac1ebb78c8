//! Applies the byte limit of a home server: waits as `logic/token_bucket.rs` says, and lets users
//! have turns as `logic/turn_queue.rs` says.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bafs_proto::net::Cancellation;
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};
use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::logic::token_bucket::TokenBucket;
use crate::logic::turn_queue::{TurnQueue, TurnTicket};

/// Bytes that pass at once: a large transfer must not make small ones wait for all of it.
const SLICE_BYTES: usize = 64 << 10;

/// Large transfers that pass at once; those who come later wait until one is through. The fewer go
/// on together, the sooner each is through, and the less often somebody hears nothing for long.
const TRANSFERS_MAX: usize = 2;

/// Who calls, how long the caller waits at most, and whether it waits still.
#[derive(Debug, Clone, Copy)]
pub(super) struct CallWait<'a> {
    /// Large transfers of each user get the same bytes; empty for those who name none.
    pub(super) user: &'a str,
    pub(super) deadline: Deadline,
    pub(super) awaited: &'a Cancellation,
}

/// Lets bytes pass at the limit, or at once when there is none.
#[derive(Debug)]
pub(super) struct Throttle {
    bucket: Option<Mutex<TokenBucket>>,
    transfers: Mutex<Transfers>,
    start: Instant,
}

/// Large transfers, and who is told when it is their turn.
#[derive(Debug)]
struct Transfers {
    queue: TurnQueue,
    waiters: BTreeMap<TurnTicket, oneshot::Sender<()>>,
}

impl Transfers {
    /// Lets those go on whose turn it is.
    fn start_next(&mut self) {
        while let Some(ticket) = self.queue.take_next() {
            // Who is not there any more leaves at once.
            let told = self.waiters.remove(&ticket);
            let _ = told.map(|told| told.send(()));
        }
    }
}

impl Throttle {
    /// A throttle for `bytes_per_s`, both directions together.
    pub(super) fn new(bytes_per_s: Option<u64>) -> Self {
        let bucket = bytes_per_s.map(|rate| Mutex::new(TokenBucket::new(rate)));
        Self {
            bucket,
            transfers: Mutex::new(Transfers {
                queue: TurnQueue::new(TRANSFERS_MAX),
                waiters: BTreeMap::new(),
            }),
            start: Instant::now(),
        }
    }

    /// Whether there is a limit, and so turns of users.
    pub(super) fn is_limited(&self) -> bool {
        self.bucket.is_some()
    }

    /// Waits until `bytes` may pass.
    ///
    /// # Errors
    /// `DeadlineExceeded` when they cannot pass in time, as soon as that is known, or when nobody
    /// waits for them any more: what killed programs asked for must not hold up others.
    pub(super) async fn pass(&self, bytes: usize, wait: CallWait<'_>) -> Result<()> {
        self.turn(bytes, wait).await?.pass(bytes, wait).await
    }

    /// Waits until it is the turn of a transfer of about so many `bytes`. Who reads them only then
    /// holds no memory while it waits for others.
    ///
    /// # Errors
    /// As [`Throttle::pass`].
    pub(super) async fn turn(&self, bytes: usize, wait: CallWait<'_>) -> Result<Turn<'_>> {
        if self.bucket.is_none() || bytes <= SLICE_BYTES {
            return Ok(Turn {
                throttle: self,
                place: None,
            });
        }
        let (told, mut is_told) = oneshot::channel();
        let place = {
            let mut transfers = self.transfers();
            let ticket = transfers.queue.enter(wait.user, bytes as u64);
            transfers.waiters.insert(ticket, told);
            transfers.start_next();
            Place {
                throttle: self,
                ticket,
            }
        };
        let turn = tokio::time::timeout_at(wait.deadline.instant().into(), &mut is_told);
        let turn = async { turn.await.map_err(|_| late(bytes)).map(drop) };
        unless_over(wait.awaited, turn).await?;
        Ok(Turn {
            throttle: self,
            place: Some(place),
        })
    }

    fn transfers(&self) -> MutexGuard<'_, Transfers> {
        self.transfers
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// A transfer that waits or goes on, until it is dropped.
#[derive(Debug)]
struct Place<'a> {
    throttle: &'a Throttle,
    ticket: TurnTicket,
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut transfers = self.throttle.transfers();
        transfers.waiters.remove(&self.ticket);
        transfers.queue.leave(self.ticket);
        transfers.start_next();
    }
}

/// The turn of a transfer; while a large one has it, few others go on.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    throttle: &'a Throttle,
    #[expect(dead_code, reason = "held")]
    place: Option<Place<'a>>,
}

impl Turn<'_> {
    /// Waits until `bytes` may pass.
    ///
    /// # Errors
    /// As [`Throttle::pass`].
    pub(super) async fn pass(&self, bytes: usize, wait: CallWait<'_>) -> Result<()> {
        let Some(bucket) = &self.throttle.bucket else {
            return Ok(());
        };
        let slices = async {
            let mut left = bytes;
            while left > 0 {
                let slice = left.min(SLICE_BYTES);
                let now_ns = nanoseconds(self.throttle.start.elapsed());
                let wait_ns_max = nanoseconds(wait.deadline.remaining());
                let taken = {
                    let mut bucket = bucket.lock().unwrap_or_else(PoisonError::into_inner);
                    bucket.take(now_ns, slice as u64, wait_ns_max)
                };
                let wait_ns = taken.ok_or_else(|| late(left))?;
                tokio::time::sleep(Duration::from_nanos(wait_ns)).await;
                left -= slice;
            }
            Ok(())
        };
        unless_over(wait.awaited, slices).await
    }
}

/// Does what may take for ever only as long as somebody waits for it.
///
/// # Errors
/// `DeadlineExceeded` when nobody does any more; its own.
pub(super) async fn while_awaited<T>(
    wait: CallWait<'_>,
    going: impl Future<Output = Result<T>>,
) -> Result<T> {
    let going = tokio::time::timeout_at(wait.deadline.instant().into(), going);
    let late = || {
        Error::new(
            ErrorCode::DeadlineExceeded,
            "the disk does not answer in time",
        )
    };
    unless_over(wait.awaited, async { going.await.map_err(|_| late())? }).await
}

async fn unless_over<T>(
    awaited: &Cancellation,
    going: impl Future<Output = Result<T>>,
) -> Result<T> {
    tokio::select! {
        gone = going => gone,
        () = awaited.clone().cancelled() => {
            Err(Error::new(ErrorCode::DeadlineExceeded, "nobody waits for the bytes"))
        }
    }
}

fn late(left: usize) -> Error {
    let text = format!("{left} bytes exceed the home server's rate limit within the timeout");
    Error::new(ErrorCode::DeadlineExceeded, text)
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const LARGE: usize = 1 << 20;

    fn wait_of<'a>(user: &'a str, ms: u64, awaited: &'a Cancellation) -> CallWait<'a> {
        let deadline = Deadline::after_ms(ms);
        CallWait {
            user,
            deadline,
            awaited,
        }
    }

    #[tokio::test]
    async fn abandoned_calls_do_not_delay_others() {
        // All of the dead would take half a minute.
        let throttle = Throttle::new(Some(4 << 20));
        let (gone, left) = Cancellation::new();
        let dead = (0..120).map(|_| throttle.pass(LARGE, wait_of("", 600_000, &left)));
        let (_waiting, awaited) = Cancellation::new();
        let living = async {
            drop(gone);
            throttle.pass(LARGE, wait_of("", 10_000, &awaited)).await
        };
        let (dead, living) = tokio::join!(futures_util::future::join_all(dead), living);
        assert!(dead.iter().all(Result::is_err));
        assert_eq!(living, Ok(()));
    }

    /// By time and not by the order of coming: one user has ten times as many transfers under way.
    #[tokio::test]
    async fn users_share_the_limit_alike() {
        let throttle = Throttle::new(Some(32 << 20));
        let (_waiting, awaited) = Cancellation::new();
        let passed = [const { AtomicUsize::new(0) }; 2];
        let one = |user: usize| {
            let (throttle, awaited, passed) = (&throttle, &awaited, &passed);
            async move {
                let name = ["alice", "bob"][user];
                // Nothing passes any more when the time is over.
                let end = Deadline::after_ms(3_000);
                while !end.remaining().is_zero() {
                    let wait = wait_of(name, 60_000, awaited);
                    if throttle.pass(LARGE / 4, wait).await.is_ok() && !end.remaining().is_zero() {
                        passed[user].fetch_add(LARGE / 4, Ordering::Relaxed);
                    }
                }
            }
        };
        let all = (0..22).map(|n| one(usize::from(n >= 20)));
        futures_util::future::join_all(all).await;
        let [alice, bob] = passed.map(|bytes| bytes.into_inner() as f64);
        let share = bob / (alice + bob);
        assert!((0.45..0.55).contains(&share), "{share} of {}", alice + bob);
        let rate = (alice + bob) / 3.0 / f64::from(32 << 20);
        assert!((0.8..1.15).contains(&rate), "{rate}");
    }
}
