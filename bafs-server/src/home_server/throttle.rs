//! Applies the byte limit of a home server: waits as `logic/token_bucket.rs` says.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bafs_proto::net::Cancellation;
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::Instant;

use crate::logic::token_bucket::TokenBucket;

/// Bytes that pass at once: a large transfer must not make small ones wait for all of it.
const SLICE_BYTES: usize = 64 << 10;

/// Large transfers that pass at once; those who come later wait until one is through. The fewer go
/// on together, the sooner each is through, and the less often somebody hears nothing for long.
const TRANSFERS_MAX: usize = 2;

/// How long a caller waits at most, and whether it waits still.
pub(super) type CallWait<'a> = (Deadline, &'a Cancellation);

/// Lets bytes pass at the limit, or at once when there is none.
#[derive(Debug)]
pub(super) struct Throttle {
    bucket: Option<Mutex<TokenBucket>>,
    transfers: Semaphore,
    start: Instant,
}

impl Throttle {
    /// A throttle for `bytes_per_s`, both directions together.
    pub(super) fn new(bytes_per_s: Option<u64>) -> Self {
        let bucket = bytes_per_s.map(|rate| Mutex::new(TokenBucket::new(rate)));
        Self {
            bucket,
            transfers: Semaphore::new(TRANSFERS_MAX),
            start: Instant::now(),
        }
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
    pub(super) async fn turn(
        &self,
        bytes: usize,
        (deadline, awaited): CallWait<'_>,
    ) -> Result<Turn<'_>> {
        if self.bucket.is_none() || bytes <= SLICE_BYTES {
            return Ok(Turn {
                throttle: self,
                permit: None,
            });
        }
        let permit = tokio::time::timeout_at(deadline.instant().into(), self.transfers.acquire());
        let permit = unless_over(awaited, async { permit.await.map_err(|_| late(bytes)) });
        Ok(Turn {
            throttle: self,
            permit: permit.await?.ok(),
        })
    }
}

/// The turn of a transfer; while a large one has it, few others go on.
#[derive(Debug)]
pub(super) struct Turn<'a> {
    throttle: &'a Throttle,
    #[expect(dead_code, reason = "held")]
    permit: Option<SemaphorePermit<'a>>,
}

impl Turn<'_> {
    /// Waits until `bytes` may pass.
    ///
    /// # Errors
    /// As [`Throttle::pass`].
    pub(super) async fn pass(&self, bytes: usize, (deadline, awaited): CallWait<'_>) -> Result<()> {
        let Some(bucket) = &self.throttle.bucket else {
            return Ok(());
        };
        let slices = async {
            let mut left = bytes;
            while left > 0 {
                let slice = left.min(SLICE_BYTES);
                let now_ns = nanoseconds(self.throttle.start.elapsed());
                let wait_ns_max = nanoseconds(deadline.remaining());
                let wait = {
                    let mut bucket = bucket.lock().unwrap_or_else(PoisonError::into_inner);
                    bucket.take(now_ns, slice as u64, wait_ns_max)
                };
                let wait_ns = wait.ok_or_else(|| late(left))?;
                tokio::time::sleep(Duration::from_nanos(wait_ns)).await;
                left -= slice;
            }
            Ok(())
        };
        unless_over(awaited, slices).await
    }
}

/// Does what may take for ever only as long as somebody waits for it.
///
/// # Errors
/// `DeadlineExceeded` when nobody does any more; its own.
pub(super) async fn while_awaited<T>(
    (deadline, awaited): CallWait<'_>,
    going: impl Future<Output = Result<T>>,
) -> Result<T> {
    let going = tokio::time::timeout_at(deadline.instant().into(), going);
    let late = || {
        Error::new(
            ErrorCode::DeadlineExceeded,
            "the disk does not answer in time",
        )
    };
    unless_over(awaited, async { going.await.map_err(|_| late())? }).await
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
    use bafs_proto::time::Deadline;

    use super::*;

    #[tokio::test]
    async fn abandoned_calls_do_not_delay_others() {
        const LARGE: usize = 1 << 20;
        // All of the dead would take half a minute.
        let throttle = Throttle::new(Some(4 << 20));
        let (gone, left) = Cancellation::new();
        let dead = (0..120).map(|_| throttle.pass(LARGE, (Deadline::after_ms(600_000), &left)));
        let (_waiting, awaited) = Cancellation::new();
        let living = async {
            drop(gone);
            let wait = (Deadline::after_ms(10_000), &awaited);
            throttle.pass(LARGE, wait).await
        };
        let (dead, living) = tokio::join!(futures_util::future::join_all(dead), living);
        assert!(dead.iter().all(Result::is_err));
        assert_eq!(living, Ok(()));
    }
}
