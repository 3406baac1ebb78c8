//! The agent's only clock, for durations; nothing is decided by the time of day.

use std::time::Instant;

/// Now, on the clock that never jumps.
#[allow(clippy::disallowed_methods)] // the one place where the agent reads the clock
pub(crate) fn now() -> Instant {
    Instant::now()
}

/// Whole milliseconds since `start`.
pub(crate) fn ms_since(start: Instant) -> u64 {
    u64::try_from(now().saturating_duration_since(start).as_millis()).unwrap_or(u64::MAX)
}
