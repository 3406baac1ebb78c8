//! What nodes keep for this run beside others, and how long it waits for what the others have. What
//! it wants of nodes is `policy/order/node_demand.rs`.

use bafs_proto::time::Time;
use bafs_workflow::JobIndex;

use crate::event::RunQuota;
use crate::policy::View;
use crate::policy::order::node_demand::Concession;
use crate::state::nodes::Limit;
use crate::state::scheduler_state::State;
use crate::state::timers::Timer;

impl State {
    /// Takes what nodes keep for this run.
    pub(crate) fn quotas_changed(&mut self, quotas: &[RunQuota]) {
        let was_shared = self.fleet.is_shared();
        self.prefetching.look_again();
        for &RunQuota {
            server,
            space,
            slots,
            is_shared,
            is_above_fair_share: is_over,
        } in quotas
        {
            let limit = Limit {
                space,
                slots,
                is_shared,
                is_over,
            };
            self.fleet.update(server, |node| node.limit = Some(limit));
            if is_over && self.is_warmed_on(server) {
                self.evict_prefetched();
            }
            self.queues.wake(server);
            self.queues.feed();
        }
        // It has waited for others. What the last of them held is not free at once.
        if was_shared && !self.fleet.is_shared() {
            self.wait_until = None;
        }
    }

    /// Nothing of this run goes on: asks what it gives up for these jobs, and waits for the rest.
    pub(crate) fn concede(&mut self, candidates: &[JobIndex]) -> Concession {
        let (concession, wait) = View::new(self).concede(candidates);
        if let Some(wait) = wait {
            self.wait_until = Some(wait.until);
            self.lacks_room_since = wait.lacks_room_since;
            if let Some(at) = wait.look_at {
                self.look_again_at(at);
            }
        }
        concession
    }

    /// Looks again at this time, or after a pause where that is past, or before.
    fn look_again_at(&mut self, at: Time) {
        let at = match at > self.now {
            true => at,
            false => self.now.plus_ms(self.settings.retry_pause_ms_max),
        };
        if self
            .timers
            .due(Timer::WaitTimeout)
            .is_none_or(|due| due > at)
        {
            self.timers.set(at, Timer::WaitTimeout);
        }
    }

    /// Nothing helps. Where others have what the run lacks, it waits on, and does not fail.
    pub(crate) fn waits_for_others(&mut self) -> bool {
        let is_shared = self.fleet.is_shared();
        if is_shared {
            self.wait_until = None;
            self.look_again_at(self.now);
        }
        is_shared
    }
}
