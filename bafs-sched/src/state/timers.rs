//! What is due when. Reads no clock.

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_proto::time::Time;
use bafs_workflow::JobIndex;
use serde::{Deserialize, Serialize};

use crate::state::recorded::kept;
use crate::state::tracked::Keys;

/// What happens at a point in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Timer {
    /// A missing server is given up.
    Missing(ServerId),
    /// A server that was set aside is used again.
    Aside(ServerId),
    /// A server whose disk has been full for long is tried again.
    Full(ServerId),
    /// A job that was held back may run again.
    Job(JobIndex),
    /// An extraction is tried again.
    Extract(u32),
    /// A copy should have been complete long ago.
    Copy(VolumeId),
    /// A deletion is tried again.
    Delete(VolumeId),
    /// Waiting for nodes, or for space, ends.
    #[serde(rename = "Patience")]
    WaitTimeout,
    /// Cleaning up ends.
    Cleanup,
}

/// Timers by time.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Timers {
    due: Keys<(Time, Timer)>,
}

kept! {
    /// What was written of the timers.
    TimerChanges of Timers;
    values {}
    tables { due: Keys<(Time, Timer)> }
    indexed {}
    parts {}
    rebuilt {}
}

impl Timers {
    pub(crate) fn set(&mut self, at: Time, timer: Timer) {
        self.due.insert((at, timer));
    }

    pub(crate) fn next(&self) -> Option<Time> {
        self.due.first().map(|(at, _)| *at)
    }

    pub(crate) fn take_due(&mut self, now: Time) -> Option<Timer> {
        let &(at, timer) = self.due.first()?;
        (at <= now).then(|| {
            self.due.pop_first();
            timer
        })
    }

    /// When this timer is due.
    pub(crate) fn due(&self, timer: Timer) -> Option<Time> {
        let mut set = self.due.iter().filter(|(_, other)| *other == timer);
        set.next().map(|(at, _)| *at)
    }

    /// Makes everything due so much later, in milliseconds.
    pub(crate) fn put_off(&mut self, ms: u64) {
        let timers = self.due.take().into_iter();
        self.due
            .extend(timers.map(|(at, timer)| (at.plus_ms(ms), timer)));
    }

    /// Whether a job is tried again at some time.
    pub(crate) fn has_job(&self, is_it: impl Fn(JobIndex) -> bool) -> bool {
        let mut timers = self.due.iter();
        timers.any(|(_, timer)| matches!(timer, Timer::Job(job) if is_it(*job)))
    }

    /// Whether a timer will make something happen by itself, not only end the waiting. Deletions
    /// of volumes that are `given_up` hardly will, nor will a disk that has been full for long have
    /// space, nor a home be there for whose jobs `is_homeless` is true.
    pub(crate) fn has_work(
        &self,
        given_up: impl Fn(VolumeId) -> bool,
        is_homeless: impl Fn(JobIndex) -> bool,
    ) -> bool {
        let is_work = |timer: &Timer| match timer {
            Timer::WaitTimeout | Timer::Cleanup | Timer::Full(_) | Timer::Copy(_) => false,
            Timer::Delete(id) => !given_up(*id),
            Timer::Job(job) => !is_homeless(*job),
            Timer::Missing(_) | Timer::Aside(_) | Timer::Extract(_) => true,
        };
        self.due.iter().any(|(_, timer)| is_work(timer))
    }
}
