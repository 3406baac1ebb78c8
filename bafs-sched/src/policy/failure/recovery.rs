//! Lost servers and volumes, and volumes that failed attempts leave half-written: the smallest set
//! of jobs that must run again. Whose fault a failure is says `policy/failure/attribution.rs`.

use std::collections::BTreeSet;

use bafs_proto::ErrorCode;
use bafs_proto::ids::{ServerId, VolumeId};
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::event::NodeInfo;
use crate::state::attempts::AttemptState;
use crate::state::jobs::JobState;
use crate::state::observed_access::has_written;
use crate::state::scheduler_state::{Phase, State};
use crate::state::timers::Timer;
use crate::state::volumes::InstanceState;

impl State {
    /// Takes what a list of the catalog says that was not known.
    pub(crate) fn servers_seen(&mut self, nodes: Vec<NodeInfo>, missed: &[ServerId]) {
        let told: BTreeSet<ServerId> = nodes.iter().map(|node| node.id).collect();
        let mut returned = Vec::new();
        for node in nodes {
            let server = node.id;
            if self.fleet.is_as_seen(&node) {
                continue;
            }
            // Of two that are told together nobody knows who came later, or has moved: the catalog
            // misses one soon.
            let other = self.fleet.at_address_of(&node);
            if let Some(other) = other.filter(|other| !told.contains(other)) {
                // The catalog lists who was there before for a while yet.
                if self.fleet.get(server).is_some_and(|known| known.is_lost) {
                    continue;
                }
                self.lose_server(other);
            }
            let is_moved = self.fleet.group_name(server) != Some(node.group.as_str());
            if is_moved {
                self.leaving.move_to(server, &node.group);
            }
            let is_back = self.fleet.see(node);
            self.warming.look_again();
            self.queues.wake(server);
            if is_back {
                self.complete_caches(server);
                returned.push(server);
            }
        }
        // What one of them has may be of use only with what another has.
        for server in returned {
            self.take_back(server);
        }
        for &server in missed {
            if !self.is_listed(server) {
                continue;
            }
            let now = self.now;
            self.fleet
                .update(server, |node| node.missing_since = Some(now));
            let at = now.plus_ms(self.settings.node_timeout_ms);
            self.timers.set(at, Timer::Missing(server));
        }
    }

    /// Gives a server up if it has been missing for too long.
    pub(crate) fn give_up_missing(&mut self, server: ServerId) {
        let since = self.fleet.get(server).and_then(|node| node.missing_since);
        if since.is_some_and(|since| self.now.ms_since(since) >= self.settings.node_timeout_ms) {
            self.lose_server(server);
        }
    }

    /// A server is lost with all that was on it.
    pub(crate) fn lose_server(&mut self, server: ServerId) {
        let there = self.volumes.on_server(server);
        let is_first = self.fleet.update(server, |node| {
            let is_first = !node.is_lost;
            node.is_lost = true;
            is_first
        });
        if is_first != Some(true) {
            return;
        }
        self.checkpoints.overdue.forget(server);
        self.fleet.lost += 1;
        self.fleet.alive -= 1;
        self.note_lost_node(server);
        let mut gone = Vec::new();
        for (id, volume) in there {
            self.note_left(id);
            self.stale.insert(id, server);
            gone.extend(self.forget(id).then_some((volume, id)));
        }
        let jobs = self.under_way.on(server);
        self.graph.tally.add(jobs.len() as u64);
        let here = jobs.iter().filter_map(|job| self.attempts.get(job));
        let begun = here.filter(|attempt| attempt.stage != AttemptState::Preparing);
        self.strays
            .extend(begun.map(|attempt| (attempt.execution, server)));
        for job in jobs {
            let stage = self.attempts.get(&job).map(|attempt| attempt.stage);
            match stage {
                Some(AttemptState::Preparing) => self.end_stopped(job),
                _ => self.node_went(job, "its node was lost"),
            }
        }
        self.lose_volumes(gone);
        self.note_loss();
        self.drop_claims(server);
        self.forget_found(server);
        self.end_cut_off_without_nodes();
        // Whose unfulfilled needs changed is queued anew, awake. Space of others is as before, but
        // for batch volumes of which a part is gone.
        self.queues.wake(server);
    }

    /// A server is lost, and what was on it with its store: it need not be deleted there.
    pub(crate) fn lose_store(&mut self, server: ServerId) {
        self.lose_server(server);
        self.unanswered.retain(|_, at| *at != server);
        self.stale.retain(|_, at| *at != server);
        let stale = &self.stale;
        self.left.retain(|id, _| stale.contains_key(id));
    }

    /// Takes the answer of a server about volumes that it should have.
    pub(crate) fn volumes_probed(&mut self, server: ServerId, lost: &[VolumeId]) {
        let mut gone = Vec::new();
        for &id in lost {
            let Some(instance) = self.volumes.get(id) else {
                continue;
            };
            // A volume that is being created need not be there yet.
            if instance.server == Some(server) && !instance.state.is_being_made() {
                let volume = instance.volume;
                gone.extend(self.forget(id).then_some((volume, id)));
                self.queues.wake(server);
            }
        }
        let is_loss = !gone.is_empty();
        self.lose_volumes(gone);
        if is_loss {
            self.note_loss();
        }
    }

    /// Forgets a volume and its reservation; answers whether it was in use.
    pub(crate) fn forget(&mut self, id: VolumeId) -> bool {
        let Some(instance) = self.volumes.remove(id) else {
            return false;
        };
        if let Some(server) = instance.server {
            if instance.state.is_being_made() {
                self.unanswered.insert(id, server);
            }
            self.fleet.update(server, |node| {
                node.reserved = node.reserved.saturating_sub(instance.size)
            });
        }
        self.forget_copy(id, instance.volume);
        self.extractions.logs.drop_volume(id);
        self.has_left(id);
        !matches!(
            instance.state,
            InstanceState::Deleting | InstanceState::Held
        )
    }

    /// Stops who uses these volumes; where somebody still needs them, a copy takes their place, or
    /// their writers run again.
    fn lose_volumes(&mut self, gone: Vec<(VolumeIndex, VolumeId)>) {
        for &(volume, id) in &gone {
            self.take_back_extracts(volume, id);
            self.stop_users(id, volume);
        }
        for &(volume, _) in &gone {
            // Needs count what exists somewhere; a million readers need not be told of a part.
            if !self.volumes.is_live(volume) {
                self.warming.forget(volume);
                self.requeue_users(volume);
            }
        }
        let scratch = gone.iter().map(|(volume, _)| *volume);
        let scratch = scratch
            .filter(|volume| !self.graph.volume(*volume).is_cache)
            .collect();
        self.redo(Vec::new(), scratch);
    }

    /// Attempts that use a volume.
    pub(crate) fn users_of(&self, id: VolumeId, volume: VolumeIndex) -> Vec<JobIndex> {
        if self.graph.volume(volume).is_cache {
            // It may have as many readers as there are jobs.
            let readers = self.under_way.readers(id);
            self.graph.tally.add(readers.len() as u64);
            return readers;
        }
        let users = &self.graph.workflow.volume(volume).users;
        let uses = |job: &JobIndex| {
            self.attempts
                .get(job)
                .is_some_and(|attempt| attempt.uses(id))
        };
        self.graph
            .tally
            .add(users.len().min(self.attempts.len()) as u64);
        if users.len() <= self.attempts.len() {
            return users.iter().copied().filter(uses).collect();
        }
        let attempts = self.attempts.iter().filter(|(_, attempt)| attempt.uses(id));
        attempts.map(|(job, _)| *job).collect()
    }

    fn stop_users(&mut self, id: VolumeId, volume: VolumeIndex) {
        for job in self.users_of(id, volume) {
            self.stop(job, None);
        }
    }

    /// Ends an attempt that did not succeed. What it may have changed goes, also if finished jobs
    /// wrote there before: the next attempt must not find half of this one's work.
    pub(crate) fn abandon_attempt(&mut self, job: JobIndex) {
        let Some(attempt) = self.end_attempt(job) else {
            return;
        };
        self.leave_if_untouched(job);
        if attempt.stage == AttemptState::Preparing {
            return;
        }
        for (volume, writable) in self.graph.mounted(job) {
            if !writable || attempt.unchanged.contains(&volume) {
                continue;
            }
            let Some((id, _)) = self.volumes.scratch(volume) else {
                continue;
            };
            let is_used = !self.users_of(id, volume).is_empty();
            // A later volume of that name was never touched by this attempt.
            if !is_used && attempt.uses(id) {
                self.retire(id);
            }
        }
    }

    /// Takes note of the volumes that an attempt left as they were, as far as its report tells.
    pub(crate) fn note_unchanged(&mut self, job: JobIndex, report: &JobReport) {
        let has_run = may_have_run(report);
        let is_unchanged = |volume: &VolumeIndex| {
            let spec = self.graph.workflow.volume(*volume);
            let mut used = report.volumes.iter().filter(|used| used.name == spec.name);
            let is_told = used.clone().next().is_some();
            !has_run || is_told && used.all(|used| !has_written(used))
        };
        let mounted = self
            .graph
            .mounted(job)
            .into_iter()
            .map(|(volume, _)| volume);
        let unchanged = mounted.filter(is_unchanged).collect();
        if let Some(attempt) = self.attempts.get_mut(&job) {
            attempt.unchanged = unchanged;
        }
    }

    /// Before a job runs again: what finished jobs had written for it, and went with an attempt
    /// that failed, comes back from a copy or is written again.
    pub(crate) fn make_inputs_again(&mut self, job: JobIndex) {
        let is_done = |writer: &JobIndex| self.graph.state(*writer) == JobState::Done;
        let is_gone = |volume: &VolumeIndex| {
            let node = self.graph.volume(*volume);
            !node.is_cache && !self.volumes.is_live(*volume) && node.writers.iter().any(is_done)
        };
        let mounted = self
            .graph
            .mounted(job)
            .into_iter()
            .map(|(volume, _)| volume);
        let gone: Vec<VolumeIndex> = mounted.filter(is_gone).collect();
        if !gone.is_empty() {
            self.redo(Vec::new(), gone);
        }
    }

    /// Rolls finished jobs back: `jobs` themselves, and the writers of `gone` volumes that are
    /// still needed; then, again and again, the writers of what those read and is gone too. A job
    /// that runs again gets fresh volumes to write, so what it wrote before is dropped.
    pub(crate) fn redo(&mut self, jobs: Vec<JobIndex>, gone: Vec<VolumeIndex>) {
        let mut volumes = gone;
        let mut undone = Vec::new();
        for job in jobs {
            self.undo(job, &mut volumes, &mut undone);
        }
        while let Some(volume) = volumes.pop() {
            let is_here = self.volumes.is_live(volume);
            let is_needed = self.graph.volume(volume).is_needed();
            if is_here || !is_needed || self.restore(volume) {
                continue;
            }
            // Of what an older copy has nothing needs to run again: it takes the volume's place
            // once the others are undone.
            let copied = self.copied_writers(volume).to_vec();
            let writers = self.graph.volume(volume).writers.clone();
            for writer in writers.iter().filter(|writer| !copied.contains(writer)) {
                self.undo(*writer, &mut volumes, &mut undone);
            }
        }
        let mut pipelines: Vec<u32> = undone.iter().map(|job| self.graph.pipeline(*job)).collect();
        pipelines.sort_unstable();
        pipelines.dedup();
        for pipeline in pipelines {
            self.roll_back_pipeline(pipeline);
        }
        for job in undone {
            if self.graph.state(job) == JobState::Waiting {
                self.settle(job, 0);
            }
        }
    }

    /// Whether a job that comes after this one wrote the volume, or does so now.
    fn is_changed_since(&self, volume: VolumeIndex, job: JobIndex) -> bool {
        let is_later = |writer: &JobIndex| self.graph.rank(*writer) > self.graph.rank(job);
        let has_written = |writer: &JobIndex| {
            self.graph.state(*writer) == JobState::Done || self.attempts.contains_key(writer)
        };
        let mut writers = self.graph.volume(volume).writers.iter();
        writers.any(|writer| is_later(writer) && has_written(writer))
    }

    fn undo(&mut self, job: JobIndex, volumes: &mut Vec<VolumeIndex>, undone: &mut Vec<JobIndex>) {
        if self.graph.state(job) != JobState::Done || self.phase == Phase::Finishing {
            return;
        }
        self.note_undone(job);
        self.graph.set_state(job, JobState::Waiting);
        undone.push(job);
        for child in self.graph.waiting_for(job).collect::<Vec<_>>() {
            if matches!(
                self.graph.state(child),
                JobState::Ready | JobState::HeldBack
            ) {
                self.queues.take(child);
                self.graph.set_state(child, JobState::Waiting);
            }
        }
        for (volume, writable) in self.graph.mounted(job) {
            if self.graph.volume(volume).is_cache {
                continue;
            }
            // What a later job made of it is not what this one read.
            let is_outdated = writable || self.is_changed_since(volume, job);
            if is_outdated {
                self.drop_copies_since(volume, job);
            }
            if is_outdated && let Some((id, _)) = self.volumes.scratch(volume) {
                self.retire(id);
                self.take_back_extracts(volume, id);
                self.stop_users(id, volume);
            }
            if !self.volumes.is_live(volume) {
                volumes.push(volume);
            }
        }
    }
}

/// Whether the program of an execution may have run. An agent that could not mount its volumes
/// says so before; of one that died (`ServerFault`) nothing is known.
fn may_have_run(report: &JobReport) -> bool {
    match &report.outcome {
        JobOutcome::NotStarted(_) => false,
        JobOutcome::EnvironmentFailed(error) => {
            !report.volumes.is_empty() || report.wall_ms > 0 || error.code == ErrorCode::ServerFault
        }
        JobOutcome::Exited(_) | JobOutcome::Signaled(_) | JobOutcome::Killed => true,
    }
}
