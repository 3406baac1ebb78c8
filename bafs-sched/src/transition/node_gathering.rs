//! The beginning of a run: it asks whether running can begin, and waits for nodes until then.

use crate::decision::Decision;
use crate::policy::View;
use crate::state::observed_access::RunWarning;
use crate::state::scheduler_state::{Phase, State};
use crate::state::timers::Timer;

/// Who waits for further nodes for longer than this, in milliseconds, is told so.
const TOLD_MS: u64 = 10_000;

impl State {
    /// Starts the run as soon as the workflow fits into the nodes seen; gives up when it does not
    /// for too long, counted from the first node.
    pub(crate) fn gather_nodes(&mut self) {
        if self.has_workers() {
            self.begin_probes();
        }
        match View::new(self).why_not_begin() {
            Some(reason) => self.wait_for_nodes(reason),
            None => self.commit(Decision::BeginRunning),
        }
    }

    /// Running jobs begins.
    pub(super) fn begin_running(&mut self) {
        self.phase = Phase::Running;
        self.wait_until = None;
    }

    fn wait_for_nodes(&mut self, reason: String) {
        let has_nodes = self.has_workers();
        let wait_ms = self.settings.nodes_timeout_ms;
        let wait_ms = match has_nodes {
            true => self.settings.fleet_settle_ms.min(wait_ms),
            false => wait_ms,
        };
        if self.is_settling != has_nodes {
            self.is_settling = has_nodes;
            self.wait_until = None;
            if has_nodes && wait_ms > TOLD_MS {
                self.tell_waiting(&reason, wait_ms);
            }
        }
        let mut until = self.now.plus_ms(wait_ms);
        if let Some(earlier) = self.wait_until {
            until = until.min(earlier);
        }
        if self.wait_until != Some(until) {
            self.wait_until = Some(until);
            self.timers.set(until, Timer::WaitTimeout);
        }
        if self.now >= until {
            self.commit(Decision::GiveUp { reason });
        }
    }

    fn tell_waiting(&mut self, reason: &str, wait_ms: u64) {
        let seconds = wait_ms / 1_000;
        self.tell(RunWarning {
            job: None,
            volume: None,
            node: None,
            text: format!("waits up to {seconds} s for nodes on which it fits: {reason}"),
        });
    }
}
