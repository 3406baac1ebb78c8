//! Answers on their way to the thread that has the ring: any thread may give them, only that one
//! may tell the kernel. It is woken only when it sleeps.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::kernel::RingBuffers;

/// An answer, for the entry with a number.
#[derive(Debug)]
pub(super) struct ReadyReply {
    pub(super) index: usize,
    /// The error; 0 is none.
    pub(super) error: i32,
    /// What is answered.
    pub(super) body: Vec<u8>,
    /// Or bytes that are already in the buffers.
    pub(super) in_place: usize,
    /// The buffers, if they were given away with the request.
    pub(super) buffers: Option<Box<RingBuffers>>,
}

/// What the thread of a ring shall do.
#[derive(Debug)]
pub(super) enum OutboxCommand {
    Commit(Vec<ReadyReply>),
    Stop,
}

/// Answers that were given and not yet told.
#[derive(Debug)]
pub(super) struct Outbox {
    waker: OwnedFd,
    state: Mutex<OutboxState>,
}

#[derive(Debug, Default)]
struct OutboxState {
    replies: Vec<ReadyReply>,
    is_sleeping: bool,
    is_stopped: bool,
}

impl Outbox {
    /// Wakes by an event descriptor.
    pub(super) fn new(waker: OwnedFd) -> Self {
        Self {
            waker,
            state: Mutex::default(),
        }
    }

    pub(super) fn push(&self, answered: ReadyReply) {
        let mut state = self.lock();
        state.replies.push(answered);
        self.wake(state);
    }

    /// Has the thread of the ring end.
    pub(super) fn request_stop(&self) {
        let mut state = self.lock();
        state.is_stopped = true;
        self.wake(state);
    }

    /// What is to be done now, if anything.
    pub(super) fn take_command(&self) -> Option<OutboxCommand> {
        let mut state = self.lock();
        if !state.replies.is_empty() {
            return Some(OutboxCommand::Commit(std::mem::take(&mut state.replies)));
        }
        state.is_stopped.then_some(OutboxCommand::Stop)
    }

    /// Whether the thread may go to sleep; whoever puts something wakes it from now on.
    pub(super) fn try_sleep(&self) -> bool {
        let mut state = self.lock();
        state.is_sleeping = state.replies.is_empty() && !state.is_stopped;
        state.is_sleeping
    }

    /// The thread is awake: nobody needs to wake it.
    pub(super) fn mark_awake(&self) {
        self.lock().is_sleeping = false;
    }

    fn wake(&self, mut state: MutexGuard<'_, OutboxState>) {
        let sleeps = std::mem::take(&mut state.is_sleeping);
        drop(state);
        if sleeps {
            // Full it would wake as well.
            let _ = rustix::io::write(&self.waker, &1_u64.to_ne_bytes());
        }
    }

    fn lock(&self) -> MutexGuard<'_, OutboxState> {
        // No holder leaves it half-changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::{Errno, read};

    use super::*;

    fn answered(index: usize) -> ReadyReply {
        ReadyReply {
            index,
            error: 0,
            body: Vec::new(),
            in_place: 0,
            buffers: None,
        }
    }

    #[test]
    fn an_answer_wakes_only_a_sleeping_thread() {
        let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let outbox = Outbox::new(waker.try_clone().unwrap());
        let woken = || read(&waker, &mut [0; 8]);
        outbox.push(answered(0));
        assert_eq!(woken(), Err(Errno::AGAIN), "it was awake");
        assert!(!outbox.try_sleep(), "there is an answer");
        let taken = outbox.take_command();
        assert!(matches!(taken, Some(OutboxCommand::Commit(all)) if all[0].index == 0));
        assert!(outbox.take_command().is_none() && outbox.try_sleep());
        outbox.push(answered(1));
        outbox.push(answered(2));
        assert_eq!(woken(), Ok(8));
        assert_eq!(woken(), Err(Errno::AGAIN), "once is enough");
        outbox.mark_awake();
        outbox.request_stop();
        let taken = outbox.take_command();
        assert!(matches!(taken, Some(OutboxCommand::Commit(all)) if all.len() == 2));
        assert!(!outbox.try_sleep() && matches!(outbox.take_command(), Some(OutboxCommand::Stop)));
    }
}
