//! Whether servers and volumes are there: asks them, and notes who answered a call. What follows is
//! for `connectivity.rs`.

use std::sync::{MutexGuard, PoisonError};

use bafs_proto::Result;
use bafs_proto::ids::VolumeId;
use bafs_proto::message::RenewVolumes;
use bafs_proto::time::{Deadline, Time};

use super::calls::is_unanswered;
use super::connectivity::Connectivity;
use super::servers::{RETRY_PAUSE, ServerAddress, Servers};
use crate::driver::monotonic_now;

/// A node says within so long that it is there, in milliseconds.
const PROBE_TIMEOUT_MS: u64 = 2_000;

impl Servers {
    /// Asks a node whether it is there.
    pub(crate) async fn probe_node(&self, address: &str) {
        let call = RenewVolumes {
            volumes: Vec::new(),
            lifetime_ms: 0,
            gives_way: false,
        };
        // Any answer tells it, a refusal too.
        let _ = self
            .call_once(address, call, Deadline::after_ms(PROBE_TIMEOUT_MS))
            .await;
    }

    /// Asks for volumes and thereby keeps them alive; from now on, if nobody asks any more, for at
    /// least `lifetime_ms`. Answers those that are gone.
    pub(crate) async fn renew_volumes(
        &self,
        location: &ServerAddress,
        volumes: Vec<VolumeId>,
        lifetime_ms: u64,
    ) -> Result<Vec<VolumeId>> {
        self.call_renew(location, volumes, lifetime_ms, false).await
    }

    /// Leaves volumes to whoever wants their space, for at most `lifetime_ms`.
    pub(crate) async fn give_way(
        &self,
        location: &ServerAddress,
        volumes: Vec<VolumeId>,
        lifetime_ms: u64,
    ) -> Result<Vec<VolumeId>> {
        self.call_renew(location, volumes, lifetime_ms, true).await
    }

    async fn call_renew(
        &self,
        location: &ServerAddress,
        volumes: Vec<VolumeId>,
        lifetime_ms: u64,
        gives_way: bool,
    ) -> Result<Vec<VolumeId>> {
        let call = RenewVolumes {
            volumes,
            lifetime_ms,
            gives_way,
        };
        let renewed = self
            .call_until(&location.address, call, self.call_timeout_ms())
            .await;
        renewed.map(|renewed| renewed.lost_volumes)
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
