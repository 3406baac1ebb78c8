//! What is due when. Reads no clock.

use std::collections::BTreeSet;

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_proto::time::Time;
use bafs_workflow::JobIndex;

/// What happens at a point in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
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
    Patience,
    /// Cleaning up ends.
    Cleanup,
}

/// Timers by time.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Timers(BTreeSet<(Time, Timer)>);

impl Timers {
    pub(crate) fn set(&mut self, at: Time, timer: Timer) {
        self.0.insert((at, timer));
    }

    pub(crate) fn next(&self) -> Option<Time> {
        self.0.first().map(|(at, _)| *at)
    }

    pub(crate) fn take_due(&mut self, now: Time) -> Option<Timer> {
        let &(at, timer) = self.0.first()?;
        (at <= now).then(|| {
            self.0.pop_first();
            timer
        })
    }

    /// When this timer is due.
    pub(crate) fn due(&self, timer: Timer) -> Option<Time> {
        let mut set = self.0.iter().filter(|(_, other)| *other == timer);
        set.next().map(|(at, _)| *at)
    }

    /// Makes everything due so much later, in milliseconds.
    pub(crate) fn put_off(&mut self, ms: u64) {
        let timers = std::mem::take(&mut self.0).into_iter();
        self.0 = timers.map(|(at, timer)| (at.plus_ms(ms), timer)).collect();
    }

    /// Whether a job is tried again at some time.
    pub(crate) fn has_job(&self, is_it: impl Fn(JobIndex) -> bool) -> bool {
        let mut timers = self.0.iter();
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
            Timer::Patience | Timer::Cleanup | Timer::Full(_) | Timer::Copy(_) => false,
            Timer::Delete(id) => !given_up(*id),
            Timer::Job(job) => !is_homeless(*job),
            Timer::Missing(_) | Timer::Aside(_) | Timer::Extract(_) => true,
        };
        self.0.iter().any(|(_, timer)| is_work(timer))
    }
}
