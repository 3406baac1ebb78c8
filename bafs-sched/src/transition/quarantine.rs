//! Nodes that get no new work for a while. Which do says `policy/failure/`.

use bafs_proto::ids::ServerId;
use bafs_workflow::JobIndex;

use crate::decision::{Decision, QuarantineReason};
use crate::policy::View;
use crate::state::observed_access::RunWarning;
use crate::state::scheduler_state::State;
use crate::state::timers::Timer;

impl State {
    /// A job succeeded: where it failed before, by its own fault as it seemed, the node may be to
    /// blame.
    pub(crate) fn blame_nodes(&mut self, job: JobIndex) {
        let node = self.graph.job_mut(job);
        if node.failure_history.is_empty() {
            return;
        }
        node.failure_history.killed.clear();
        node.failure_history.faulted_on.clear();
        node.failure_history.full_on.clear();
        node.failure_history.no_room_on.clear();
        (
            node.failure_history.environment.last_on,
            node.failure_history.environment.away,
        ) = (None, None);
        let here = self.graph.job(job).last_server;
        for server in std::mem::take(&mut self.graph.job_mut(job).failure_history.failed_on) {
            if Some(server) == here {
                continue;
            }
            self.fleet.count_blame(server);
            let policy = self.policies().failure;
            if policy.blames_for_jobs(View::new(self), server) {
                self.quarantine_for_failures(server, QuarantineReason::JobsFail);
                self.tell_quarantine(server, "fails jobs that succeed on other nodes");
            }
        }
    }

    /// Gives a node no new work for as long as the settings say.
    pub(crate) fn quarantine_for_failures(&mut self, node: ServerId, reason: QuarantineReason) {
        self.commit(Decision::Quarantine {
            node,
            duration_ms: self.settings.quarantine_ms,
            reason,
        });
    }

    pub(crate) fn tell_quarantine(&mut self, server: ServerId, why: &str) {
        let (name, seconds) = (self.fleet.name(server), self.settings.quarantine_ms / 1_000);
        let text =
            format!("node {name} {why}; it is in quarantine and gets no new jobs for {seconds} s");
        self.tell(RunWarning {
            job: None,
            volume: None,
            node: Some(server),
            text,
        });
    }

    /// Puts a node into quarantine, unless it is in a longer one.
    pub(crate) fn begin_quarantine(
        &mut self,
        server: ServerId,
        duration_ms: u64,
        reason: QuarantineReason,
    ) {
        if reason == QuarantineReason::JobsFail {
            self.fleet.update(server, |node| node.is_suspect = true);
        }
        let until = self.now.plus_ms(duration_ms);
        let changed = self.fleet.update(server, |node| {
            let is_longer = node.aside_until.is_none_or(|earlier| earlier < until);
            if is_longer {
                node.aside_until = Some(until);
            }
            is_longer
        });
        if changed == Some(true) {
            let timer = match reason {
                QuarantineReason::DiskLongFull => Timer::Full(server),
                _ => Timer::Aside(server),
            };
            self.timers.set(until, timer);
        }
    }

    /// The quarantine of a node may be over.
    pub(crate) fn end_quarantine(&mut self, server: ServerId) {
        let now = self.now;
        self.fleet.update(server, |node| {
            if node.aside_until.is_some_and(|until| until <= now) {
                node.pardon();
            }
        });
        self.prefetching.look_again();
        self.queues.wake(server);
    }
}
