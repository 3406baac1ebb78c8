//! The servers' only clock.

use std::time::{SystemTime, UNIX_EPOCH};

use bafs_proto::time::Time;

/// Milliseconds since the Unix epoch.
#[allow(clippy::disallowed_methods)] // the one place where servers read the clock
pub fn now() -> Time {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    Time(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
