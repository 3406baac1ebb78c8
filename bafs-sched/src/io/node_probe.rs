//! Whether servers are there: asks them, and notes who answered a call. What follows is for
//! `connectivity.rs`.

use std::sync::{MutexGuard, PoisonError};

use bafs_proto::Result;
use bafs_proto::message::RenewVolumes;
use bafs_proto::time::{Deadline, Time};

use super::calls::is_unanswered;
use super::connectivity::Connectivity;
use super::servers::{RETRY_PAUSE, Servers};
use crate::driver::monotonic_now;

/// A node says within so long that it is there, in milliseconds.
const PROBE_TIMEOUT_MS: u64 = 2_000;

impl Servers {
    /// Asks a node whether it is there.
    pub(crate) async fn probe_node(&self, address: &str) {
        let call = RenewVolumes {
            volumes: Vec::new(),
            lifetime_ms: 0,
        };
        // Any answer tells it, a refusal too.
        let _ = self
            .call_once(address, call, Deadline::after_ms(PROBE_TIMEOUT_MS))
            .await;
    }

    /// Takes note of whether a call that was made at this time was answered.
    pub(super) fn note_call_result<R>(&self, address: &str, since: Time, answer: &Result<R>) {
        let mut contact = self.connectivity();
        match answer {
            Err(error) if is_unanswered(error) => {
                contact.note_silence(address, since, monotonic_now())
            }
            _ => contact.note_answer(address, monotonic_now()),
        }
    }

    pub(crate) fn connectivity(&self) -> MutexGuard<'_, Connectivity> {
        self.connectivity
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits as long as the scheduler is cut off; answers whether it was, so that a call which was
    /// made at this time, and which nobody answered, is to be made again.
    pub(super) async fn wait_out_cut_off(&self, since: Time) -> bool {
        let is_in_doubt = self.connectivity().is_every_node_silent_since(since);
        let mut was_cut_off = false;
        while self.connectivity().is_cut_off() {
            was_cut_off = true;
            tokio::time::sleep(RETRY_PAUSE).await;
        }
        was_cut_off || is_in_doubt
    }
}
