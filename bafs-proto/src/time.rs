//! Time as a number: milliseconds since the Unix epoch. Reads no clock; `now` is an argument.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A point in time, in milliseconds since the Unix epoch (or since the start of a simulation).
#[derive(
    Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Time(pub u64);

impl Time {
    /// This time plus `ms` milliseconds; stops at the end of the range instead of wrapping.
    pub fn plus_ms(self, ms: u64) -> Self {
        Self(self.0.saturating_add(ms))
    }

    /// Milliseconds from `earlier` to this time, 0 if `earlier` is later.
    pub fn ms_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// The moment at which a call must have answered. Local to one machine: on the wire travels the
/// time that is left, because clocks differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Deadline(std::time::Instant);

impl Deadline {
    /// A deadline `left` from now.
    #[expect(
        clippy::disallowed_methods,
        reason = "the one place where a deadline meets the clock"
    )]
    pub fn after(left: Duration) -> Self {
        Self(std::time::Instant::now() + left)
    }

    /// A deadline `ms` milliseconds from now.
    pub fn after_ms(ms: u64) -> Self {
        Self::after(Duration::from_millis(ms))
    }

    /// The time that is left, zero when the deadline has passed.
    #[expect(clippy::disallowed_methods, reason = "see `after`")]
    pub fn left(self) -> Duration {
        self.0.saturating_duration_since(std::time::Instant::now())
    }

    /// The time that is left in whole milliseconds, as the wire carries it.
    pub fn left_ms(self) -> u32 {
        u32::try_from(self.left().as_millis()).unwrap_or(u32::MAX)
    }

    /// The earlier of two deadlines.
    pub fn earlier(self, other: Self) -> Self {
        Self(self.0.min(other.0))
    }

    /// The deadline as the standard library's clock knows it.
    pub fn instant(self) -> std::time::Instant {
        self.0
    }
}
