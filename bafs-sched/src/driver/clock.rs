//! The time of a run: that of the machine's clock, but never less than what has passed. Only
//! `now` and `tick` read clocks.

use std::sync::OnceLock;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use bafs_proto::time::Time;

/// Makes one time of two: what the machine takes it to be, and how long this process lives.
#[derive(Debug)]
pub(super) struct RunClock {
    wall_time: Time,
    monotonic_time: Time,
}

impl RunClock {
    /// A clock that goes on from this time, at this tick.
    pub(super) fn new(time: Time, tick: Time) -> Self {
        Self {
            wall_time: time,
            monotonic_time: tick,
        }
    }

    /// The time now. Where the machine's clock was set back, timers of the run go on as if it had
    /// not been.
    pub(super) fn adjusted_time(&mut self, machine: Time, tick: Time) -> Time {
        let passed = self.wall_time.plus_ms(tick.ms_since(self.monotonic_time));
        *self = Self::new(passed.max(machine), tick);
        self.wall_time
    }
}

/// Milliseconds since 1970 as the machine takes it to be.
#[expect(
    clippy::disallowed_methods,
    reason = "the driver is where the scheduler meets the clock"
)]
pub(crate) fn wall_time_now() -> Time {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    Time(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

/// Milliseconds of this process's life: unlike `now` never set back.
#[expect(
    clippy::disallowed_methods,
    reason = "the driver is where the scheduler meets the clock"
)]
pub(crate) fn monotonic_now() -> Time {
    static PROCESS_START: OnceLock<Instant> = OnceLock::new();
    let since = PROCESS_START.get_or_init(Instant::now).elapsed();
    Time(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_continue_when_the_clock_is_set_back() {
        let mut clock = RunClock::new(Time(5_000), Time(0));
        assert_eq!(clock.adjusted_time(Time(9_000), Time(10)), Time(9_000));
        assert_eq!(clock.adjusted_time(Time(9_100), Time(110)), Time(9_100));
        assert_eq!(
            clock.adjusted_time(Time(2_000), Time(310)),
            Time(9_300),
            "set back"
        );
        assert_eq!(clock.adjusted_time(Time(2_400), Time(710)), Time(9_700));
        assert_eq!(
            clock.adjusted_time(Time(20_000), Time(720)),
            Time(20_000),
            "set on"
        );
    }
}
