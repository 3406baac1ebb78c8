//! Applies the byte limit of a home server: waits as `logic/bucket.rs` says.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};
use tokio::time::Instant;

use crate::logic::bucket::Bucket;

/// Bytes that pass at once: a large transfer must not make small ones wait for all of it.
const SLICE_BYTES: usize = 64 << 10;

/// Lets bytes pass at the limit, or at once when there is none.
#[derive(Debug)]
pub(super) struct Throttle {
    bucket: Option<Mutex<Bucket>>,
    start: Instant,
}

impl Throttle {
    /// A throttle for `bytes_per_s`, both directions together.
    pub(super) fn new(bytes_per_s: Option<u64>) -> Self {
        let bucket = bytes_per_s.map(|rate| Mutex::new(Bucket::new(rate)));
        Self {
            bucket,
            start: Instant::now(),
        }
    }

    /// Waits until `bytes` may pass.
    ///
    /// # Errors
    /// `DeadlineExceeded` at once when they cannot pass in time.
    pub(super) async fn pass(&self, bytes: usize, deadline: Deadline) -> Result<()> {
        let Some(bucket) = &self.bucket else {
            return Ok(());
        };
        let mut left = bytes;
        while left > 0 {
            let slice = left.min(SLICE_BYTES);
            let now_ns = nanoseconds(self.start.elapsed());
            let wait_ns_max = nanoseconds(deadline.left());
            let wait = {
                let mut bucket = bucket.lock().unwrap_or_else(PoisonError::into_inner);
                bucket.take(now_ns, slice as u64, wait_ns_max)
            };
            let Some(wait_ns) = wait else {
                let text = format!("{left} bytes do not pass the home server's limit in time");
                return Err(Error::new(ErrorCode::DeadlineExceeded, text));
            };
            tokio::time::sleep(Duration::from_nanos(wait_ns)).await;
            left -= slice;
        }
        Ok(())
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
