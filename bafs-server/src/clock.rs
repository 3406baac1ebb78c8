//! The only clock of the servers, and of commands.

use std::time::{SystemTime, UNIX_EPOCH};

use bafs_proto::time::Time;

/// Milliseconds since the Unix epoch.
#[expect(
    clippy::disallowed_methods,
    reason = "the one place where servers and commands read the clock"
)]
pub fn now() -> Time {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    Time(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

/// Milliseconds of a clock that never goes back, from an arbitrary beginning: to be compared with
/// itself alone.
pub(crate) fn monotonic_ms() -> Time {
    Time(monotonic_us() / 1_000)
}

/// Microseconds of a clock that never goes back, from an arbitrary beginning.
#[expect(clippy::disallowed_methods, reason = "as above")]
pub(crate) fn monotonic_us() -> u64 {
    static BEGINNING: std::sync::LazyLock<std::time::Instant> =
        std::sync::LazyLock::new(std::time::Instant::now);
    u64::try_from(BEGINNING.elapsed().as_micros()).unwrap_or(u64::MAX)
}
