//! Nodes whose disks had no space: their jobs go elsewhere, and they are tried again later. What
//! tells that says `policy/failure/full_disk.rs`.

use std::collections::BTreeSet;

use bafs_proto::ids::ServerId;
use bafs_workflow::JobIndex;

use crate::decision::Decision;
use crate::policy::View;
use crate::policy::failure::attribution::judge_retry;
use crate::policy::failure::full_disk::{
    find_leaving, may_pass, quarantine_reason, remedy, written_nodes,
};
use crate::state::disk_fullness::{DiskLack, Finder, Fullness};
use crate::state::observed_access::RunWarning;
use crate::state::scheduler_state::State;

impl State {
    /// The disk of a node was full for a job that wrote there, as it seems. It runs again, on
    /// another node if one can run it, and is not blamed.
    pub(crate) fn pass_by_full_disk(&mut self, job: JobIndex, server: ServerId, lack: &DiskLack) {
        let Some(ran_on) = self.attempts.get(&job).map(|attempt| attempt.server) else {
            return;
        };
        self.abandon_attempt(job);
        let times = self.note_full(server, lack, Finder::Writer);
        let stays = self.leave_full_disk(job, server);
        let node = self.graph.job_mut(job);
        node.failure_history.environment.full_disks += 1;
        if ran_on == server && !stays {
            node.failure_history.full_on.insert(server);
        }
        if may_pass(times) {
            let name = &self.graph.workflow.job(job).name;
            let why = &lack.why;
            let remedy = remedy(View::new(self), lack.lacks);
            let text = format!("job '{name}' failed and runs again: {why}; {remedy}");
            self.tell(RunWarning {
                job: Some(job),
                volume: None,
                node: Some(server),
                text,
            });
        }
        self.tell_full(server, lack);
        if ran_on == server || !stays {
            return self.commit(Decision::Retry { job, pause_ms: 0 });
        }
        // It does not wait for the full disk where it runs: nothing else would end that.
        let faults = self.count_environment_fault(job);
        let pause_ms = self.settings.pause_ms(faults);
        let fault = format!("{}; {}", lack.why, remedy(View::new(self), lack.lacks));
        let decision = judge_retry(View::new(self), job, faults, pause_ms, &fault);
        self.commit(decision);
    }

    /// A node had no space for a volume of a job that fits into what it offers. The job runs on
    /// another node if one can run it, and else waits, however long.
    pub(crate) fn lacks_room(&mut self, job: JobIndex, server: ServerId, lack: &DiskLack) {
        self.abandon_attempt(job);
        if !self.leave_full_disk(job, server) {
            self.graph
                .job_mut(job)
                .failure_history
                .no_room_on
                .insert(server);
        }
        self.tell_full(server, lack);
        self.commit(Decision::Retry { job, pause_ms: 0 });
    }

    /// Volumes on a full disk that hold nobody's work go, so that they are made elsewhere. Answers
    /// whether others stay, which hold the job there.
    fn leave_full_disk(&mut self, job: JobIndex, server: ServerId) -> bool {
        let found = find_leaving(View::new(self), job, server);
        for (volume, id) in found.leaving {
            self.retire(id);
            self.take_back_extracts(volume, id);
            self.drop_copies(volume);
        }
        found.has_staying
    }

    /// A node had no space where it should have: it gets no new work for a moment, and then one job
    /// at a time of those that tell whether that is over. Answers how often it was so in a row.
    pub(crate) fn note_full(&mut self, server: ServerId, lack: &DiskLack, finder: Finder) -> u32 {
        let now = self.now;
        let times = self.fleet.update(server, |node| {
            let is_another = node.aside_until.is_none();
            node.full.note(finder, lack, is_another, now);
            node.full.times()
        });
        let times = times.unwrap_or(0);
        self.commit(Decision::Quarantine {
            node: server,
            duration_ms: self.settings.retry_pause_ms_max,
            reason: quarantine_reason(View::new(self), times),
        });
        times
    }

    /// Names a node whose disk seems to be full, once.
    fn tell_full(&mut self, server: ServerId, lack: &DiskLack) {
        let is_news = self.fleet.update(server, |node| {
            let is_full = !may_pass(node.full.times());
            is_full && !std::mem::replace(&mut node.full.is_told, true)
        });
        if is_news == Some(true) {
            let name = self.fleet.name(server);
            let text = format!(
                "the disk of node {name} seems to be full: {}; {}; the scheduler retries the node \
                 later",
                lack.why,
                remedy(View::new(self), lack.lacks)
            );
            self.tell(RunWarning {
                job: None,
                volume: None,
                node: Some(server),
                text,
            });
        }
    }

    /// All volumes of a job were made on these nodes, which it asked for that when it began: they
    /// have the room that they refused before. What more it tells it tells when it ends.
    pub(crate) fn prove_room(&mut self, job: JobIndex, made_on: &BTreeSet<ServerId>) {
        let asked_at = self.attempts[&job].since;
        for &server in made_on {
            let node = self.fleet.get(server);
            if node.is_none_or(|node| node.full.for_volumes == 0) {
                continue;
            }
            let is_writer = written_nodes(View::new(self), job).contains(&server);
            self.fleet.update(server, |node| {
                node.full.note_made(asked_at);
                let is_over = !is_writer || node.full.for_writers == 0;
                node.probe.take_if(|probe| *probe == job && is_over);
            });
            self.queues.wake(server);
        }
    }

    /// A job succeeded: disks that it wrote to have space.
    pub(crate) fn prove_space(&mut self, job: JobIndex) {
        for server in written_nodes(View::new(self), job) {
            let node = self.fleet.get(server);
            if node.is_some_and(|node| node.full.times() > 0) {
                self.fleet.update(server, |node| {
                    node.full = Fullness::default();
                    node.probe = None;
                });
                self.queues.wake(server);
            }
        }
    }
}
