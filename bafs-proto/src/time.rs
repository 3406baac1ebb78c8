//! Time as a number: milliseconds since the Unix epoch. Reads no clock; `now` is an argument.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::{Error, ErrorCode};

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

    /// The time as `date -u` shows it, for people: `2026-11-23 21:05:59 UTC`.
    pub fn to_utc_text(self) -> String {
        let (days, second) = (self.0 / DAY_MS, self.0 % DAY_MS / 1_000);
        // Years begin in March here: the day that some have more is their last one.
        let day = days + 719_468;
        let (era, of_era) = (day / 146_097, day % 146_097);
        let year = (of_era - of_era / 1_460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year + year / 4 - year / 100);
        let month = (5 * of_year + 2) / 153;
        let of_month = of_year - (153 * month + 2) / 5 + 1;
        let (month, next) = if month < 10 {
            (month + 3, 0)
        } else {
            (month - 9, 1)
        };
        let year = era * 400 + year + next;
        let (hour, minute) = (second / 3_600, second / 60 % 60);
        let second = second % 60;
        format!("{year:04}-{month:02}-{of_month:02} {hour:02}:{minute:02}:{second:02} UTC")
    }
}

/// Milliseconds of a day.
const DAY_MS: u64 = 24 * 3_600_000;

/// The longest time that an answer is given to come.
const REPLY_MARGIN_MAX: Duration = Duration::from_millis(500);

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
    pub fn remaining(self) -> Duration {
        self.0.saturating_duration_since(std::time::Instant::now())
    }

    /// The time that is left in whole milliseconds, as the wire carries it.
    pub fn remaining_ms(self) -> u32 {
        u32::try_from(self.remaining().as_millis()).unwrap_or(u32::MAX)
    }

    /// The earlier of two deadlines.
    pub fn earlier_of(self, other: Self) -> Self {
        Self(self.0.min(other.0))
    }

    /// By when who is asked should answer: early enough for the answer, which says more than none,
    /// to come in time.
    pub fn with_reply_margin(self) -> Self {
        let left = self.remaining();
        Self::after(left - (left / 20).min(REPLY_MARGIN_MAX))
    }

    /// The deadline as the standard library's clock knows it.
    pub fn instant(self) -> std::time::Instant {
        self.0
    }
}
/// A server that is at it may take so many times as long as one that says nothing.
const KEEPALIVE_EXTENSIONS_MAX: u32 = 20;

/// How long a call waits: until its deadline, and as long once more each time that the server says
/// that it is at it ([`ErrorCode::InProgress`]), up to a limit.
#[derive(Debug, Clone, Copy)]
pub struct KeepaliveDeadline {
    span: Duration,
    deadline: Deadline,
    final_deadline: Deadline,
}

impl KeepaliveDeadline {
    /// How long a call may take at most that each time waits for `ms` milliseconds.
    pub fn total_ms_max(ms: u64) -> u64 {
        ms.saturating_mul(u64::from(KEEPALIVE_EXTENSIONS_MAX))
    }

    /// For a call with this deadline that begins now.
    pub fn new(deadline: Deadline) -> Self {
        Self::starting_at(Deadline::after_ms(0), deadline)
    }

    fn starting_at(now: Deadline, deadline: Deadline) -> Self {
        let span = deadline.0.saturating_duration_since(now.0);
        Self {
            span,
            deadline,
            final_deadline: Deadline(now.0 + span.saturating_mul(KEEPALIVE_EXTENSIONS_MAX)),
        }
    }

    /// Until when the server may be silent.
    pub fn deadline(&self) -> Deadline {
        self.deadline
    }

    /// Whether to ask again because the server is at it; if so, the deadline is a new one.
    pub fn extend_if_in_progress(&mut self, error: &Error) -> bool {
        self.extend_if_in_progress_at(Deadline::after_ms(0), error)
    }

    fn extend_if_in_progress_at(&mut self, now: Deadline, error: &Error) -> bool {
        let goes_on = error.code == ErrorCode::InProgress && now < self.final_deadline;
        if goes_on {
            self.extend_at(now);
        }
        goes_on
    }

    /// When the call is over, however alive the server is.
    pub fn final_deadline(&self) -> Deadline {
        self.final_deadline
    }

    /// The server gave a sign of life `ago`: it may be silent for as long from then on. Tells
    /// whether that gives the call more time than it had.
    pub fn extend_since(&mut self, ago: Duration) -> bool {
        self.extend_since_at(Deadline::after_ms(0), ago)
    }

    fn extend_since_at(&mut self, now: Deadline, ago: Duration) -> bool {
        let heard = now.0.checked_sub(ago).unwrap_or(now.0);
        let later = Deadline(heard + self.span).earlier_of(self.final_deadline);
        let is_longer = later > self.deadline;
        self.deadline = self.deadline.max(later);
        is_longer
    }

    /// The server has given a sign of life: it may be silent for as long once more.
    pub fn extend(&mut self) {
        self.extend_at(Deadline::after_ms(0));
    }

    fn extend_at(&mut self, now: Deadline) {
        self.deadline = Deadline(now.0 + self.span).earlier_of(self.final_deadline);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_formatted_as_utc_dates() {
        for (s, shown) in [
            (0, "1970-01-01 00:00:00 UTC"),
            (951_782_399, "2000-02-28 23:59:59 UTC"),
            (951_782_400, "2000-02-29 00:00:00 UTC"),
            (951_868_800, "2000-03-01 00:00:00 UTC"),
            (1_798_761_599, "2026-12-31 23:59:59 UTC"),
            (4_107_542_400, "2100-03-01 00:00:00 UTC"),
        ] {
            assert_eq!(Time(s * 1_000).to_utc_text(), shown);
        }
    }

    #[test]
    fn keepalive_extends_the_deadline() {
        let error = |code| Error::new(code, "");
        let now = Deadline::after_ms(0);
        let later = |seconds| Deadline(now.0 + Duration::from_secs(seconds));
        let mut keepalive_deadline = KeepaliveDeadline::starting_at(now, later(60));
        assert!(!keepalive_deadline.extend_if_in_progress_at(now, &error(ErrorCode::Busy)));
        assert_eq!(keepalive_deadline.deadline(), later(60));
        // It answers each time when its time is nearly up.
        for spans in 2..=20 {
            assert!(keepalive_deadline.extend_if_in_progress_at(
                keepalive_deadline.deadline(),
                &error(ErrorCode::InProgress)
            ));
            assert_eq!(keepalive_deadline.deadline(), later(60 * spans));
        }
        let end = keepalive_deadline.deadline();
        assert!(!keepalive_deadline.extend_if_in_progress_at(end, &error(ErrorCode::InProgress)));
        assert_eq!(keepalive_deadline.deadline(), end);
        // Near the end there is no whole span left.
        assert!(
            keepalive_deadline
                .extend_if_in_progress_at(later(1_199), &error(ErrorCode::InProgress))
        );
        assert_eq!(keepalive_deadline.deadline(), end);
        let mut keepalive_deadline = KeepaliveDeadline::new(Deadline::after_ms(0));
        assert!(!keepalive_deadline.extend_if_in_progress(&error(ErrorCode::InProgress)));
    }

    #[test]
    fn the_timeout_counts_from_the_last_activity() {
        let now = Deadline::after_ms(0);
        let later = |seconds| Deadline(now.0 + Duration::from_secs(seconds));
        let mut keepalive_deadline = KeepaliveDeadline::starting_at(now, later(60));
        // Nothing was heard since the call began.
        assert!(!keepalive_deadline.extend_since_at(later(60), Duration::from_secs(61)));
        assert_eq!(keepalive_deadline.deadline(), later(60));
        assert!(keepalive_deadline.extend_since_at(later(60), Duration::from_secs(10)));
        assert_eq!(keepalive_deadline.deadline(), later(110));
        assert!(keepalive_deadline.extend_since_at(later(1_199), Duration::ZERO));
        assert_eq!(
            keepalive_deadline.deadline(),
            keepalive_deadline.final_deadline()
        );
        assert!(!keepalive_deadline.extend_since_at(later(1_200), Duration::ZERO));
    }
}
