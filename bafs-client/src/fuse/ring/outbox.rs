//! Answers on their way to the thread that has the ring: any thread may give them, only that one
//! may tell the kernel. It is woken only when it sleeps.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::kernel::Buffers;

/// An answer, for the entry with a number.
#[derive(Debug)]
pub(super) struct Answered {
    pub(super) index: usize,
    /// The error; 0 is none.
    pub(super) error: i32,
    /// What is answered.
    pub(super) body: Vec<u8>,
    /// Or bytes that are already in the buffers.
    pub(super) in_place: usize,
    /// The buffers, if they were given away with the request.
    pub(super) buffers: Option<Box<Buffers>>,
}

/// What the thread of a ring shall do.
#[derive(Debug)]
pub(super) enum Order {
    Commit(Vec<Answered>),
    Stop,
}

/// Answers that were given and not yet told.
#[derive(Debug)]
pub(super) struct Outbox {
    waker: OwnedFd,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    answered: Vec<Answered>,
    sleeps: bool,
    stopped: bool,
}

impl Outbox {
    /// Wakes by an event descriptor.
    pub(super) fn new(waker: OwnedFd) -> Self {
        Self {
            waker,
            state: Mutex::default(),
        }
    }

    pub(super) fn put(&self, answered: Answered) {
        let mut state = self.lock();
        state.answered.push(answered);
        self.wake(state);
    }

    /// Has the thread of the ring end.
    pub(super) fn stop(&self) {
        let mut state = self.lock();
        state.stopped = true;
        self.wake(state);
    }

    /// What is to be done now, if anything.
    pub(super) fn next(&self) -> Option<Order> {
        let mut state = self.lock();
        if !state.answered.is_empty() {
            return Some(Order::Commit(std::mem::take(&mut state.answered)));
        }
        state.stopped.then_some(Order::Stop)
    }

    /// Whether the thread may go to sleep; whoever puts something wakes it from now on.
    pub(super) fn may_sleep(&self) -> bool {
        let mut state = self.lock();
        state.sleeps = state.answered.is_empty() && !state.stopped;
        state.sleeps
    }

    /// The thread is awake: nobody needs to wake it.
    pub(super) fn awake(&self) {
        self.lock().sleeps = false;
    }

    fn wake(&self, mut state: MutexGuard<'_, State>) {
        let sleeps = std::mem::take(&mut state.sleeps);
        drop(state);
        if sleeps {
            // Full it would wake as well.
            let _ = rustix::io::write(&self.waker, &1_u64.to_ne_bytes());
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // No holder leaves it half-changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, eventfd};
    use rustix::io::{Errno, read};

    use super::*;

    fn answered(index: usize) -> Answered {
        Answered {
            index,
            error: 0,
            body: Vec::new(),
            in_place: 0,
            buffers: None,
        }
    }

    #[test]
    fn who_puts_an_answer_wakes_only_a_thread_that_sleeps() {
        let waker = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let outbox = Outbox::new(waker.try_clone().unwrap());
        let woken = || read(&waker, &mut [0; 8]);
        outbox.put(answered(0));
        assert_eq!(woken(), Err(Errno::AGAIN), "it was awake");
        assert!(!outbox.may_sleep(), "there is an answer");
        let taken = outbox.next();
        assert!(matches!(taken, Some(Order::Commit(all)) if all[0].index == 0));
        assert!(outbox.next().is_none() && outbox.may_sleep());
        outbox.put(answered(1));
        outbox.put(answered(2));
        assert_eq!(woken(), Ok(8));
        assert_eq!(woken(), Err(Errno::AGAIN), "once is enough");
        outbox.awake();
        outbox.stop();
        let taken = outbox.next();
        assert!(matches!(taken, Some(Order::Commit(all)) if all.len() == 2));
        assert!(!outbox.may_sleep() && matches!(outbox.next(), Some(Order::Stop)));
    }
}
