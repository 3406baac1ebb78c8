//! Whether servers are there: asks them, and notes who answered a call. What follows is for
//! `contact.rs`.

use std::sync::{MutexGuard, PoisonError};

use bafs_proto::Result;
use bafs_proto::message::RenewVolumes;
use bafs_proto::time::{Deadline, Time};

use super::contact::Contact;
use super::servers::{PAUSE, Servers, is_silence};
use crate::driver::tick;

/// A node says within so long that it is there, in milliseconds.
const ASK_MS: u64 = 2_000;

impl Servers {
    /// Asks a node whether it is there.
    pub(crate) async fn ask(&self, address: &str) {
        let call = RenewVolumes {
            volumes: Vec::new(),
            lifetime_ms: 0,
        };
        // Any answer tells it, a refusal too.
        let _ = self.once(address, call, Deadline::after_ms(ASK_MS)).await;
    }

    /// Takes note of whether a call that was made at this time was answered.
    pub(super) fn note_contact<R>(&self, address: &str, since: Time, answer: &Result<R>) {
        let mut contact = self.contact();
        match answer {
            Err(error) if is_silence(error) => contact.unanswered(address, since, tick()),
            _ => contact.answered(address, tick()),
        }
    }

    pub(crate) fn contact(&self) -> MutexGuard<'_, Contact> {
        self.contact.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits as long as the scheduler is cut off; answers whether it was, so that a call which was
    /// made at this time, and which nobody answered, is to be made again.
    pub(super) async fn was_cut_off_since(&self, since: Time) -> bool {
        let is_in_doubt = self.contact().is_nobody_heard_since(since);
        let mut was_cut_off = false;
        while self.contact().is_cut_off() {
            was_cut_off = true;
            tokio::time::sleep(PAUSE).await;
        }
        was_cut_off || is_in_doubt
    }
}
