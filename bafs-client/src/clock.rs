//! The agent's only clock. The time of day is only told, as the time of a change; nothing is
//! decided by it.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use bafs_proto::file_op::FileTime;

/// Now, on the clock that never jumps.
#[expect(
    clippy::disallowed_methods,
    reason = "the one place where the agent reads the clock"
)]
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// The time of day.
#[expect(clippy::disallowed_methods, reason = "as above")]
pub(crate) fn time_of_day() -> FileTime {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    let since = since.unwrap_or_default();
    FileTime {
        seconds: i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        nanoseconds: since.subsec_nanos(),
    }
}
