//! One attempt to run a job: from its place on a node to its end. Where it goes is decided by
//! `policy/start_search.rs`, what a failure means by `policy/failure/attribution.rs`.

use std::collections::BTreeSet;
use std::sync::Arc;

use bafs_proto::Error;
use bafs_proto::ids::{ExecutionId, ServerId, VolumeId};
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::action::{Action, MountedVolume};
use crate::policy::View;
use crate::policy::failure::attribution::{FailureVerdict, judge_environment, judge_outcome};
use crate::policy::failure::full_disk::{describe_full, find_full_disk, is_probe};
use crate::policy::failure::space_refusals::found_no_space;
use crate::space::Space;
use crate::state::attempts::{Attempt, AttemptState};
use crate::state::jobs::JobState;
use crate::state::nodes::FleetNode;
use crate::state::scheduler_state::{Phase, State};
use crate::state::timers::Timer;
use crate::state::volumes::{Instance, InstanceState};

impl State {
    /// Gives a job its place: reserves, asks for volumes, and starts it when all are there.
    pub(crate) fn assign(
        &mut self,
        job: JobIndex,
        server: ServerId,
        creates: Vec<(VolumeIndex, Option<ServerId>, Space)>,
    ) {
        self.queues.take(job);
        self.begin_pipeline(self.graph.pipeline(job));
        self.graph.set_state(job, JobState::Active);
        let execution = ExecutionId(self.next_id());
        for (volume, target, size) in creates {
            self.create(volume, target, size);
        }
        let mut uses = Vec::new();
        let (mut missing, mut made_on) = (BTreeSet::new(), BTreeSet::new());
        let workflow = Arc::clone(&self.graph.workflow);
        for mount in &workflow.job(job).mounts {
            self.prefetching.give_up(mount.volume);
            let (id, home) = self.mountable(mount.volume, server, job);
            uses.push(MountedVolume {
                volume: mount.volume,
                id,
                server: home,
            });
            let instance = self.volumes.waiters_mut(id).expect("what is live exists");
            if instance.state == InstanceState::Creating && missing.insert(id) {
                instance.waiters.push(job);
                made_on.extend(instance.server);
            }
            if mount.writable {
                self.graph.volume_mut(mount.volume).writer = Some(job);
            }
        }
        let (slots, memory_bytes) = (self.slots_of(job), self.memory_of(job));
        let is_probe = is_probe(View::new(self), job, server, &made_on);
        self.fleet.update(server, |node| {
            node.busy += slots;
            node.busy_memory = node.busy_memory.saturating_add(memory_bytes);
            if is_probe {
                node.probe = Some(job);
            }
        });
        let stage = AttemptState::Preparing;
        let attempt = Attempt {
            since: self.now,
            execution,
            server,
            slots,
            memory_bytes,
            stage,
            uses,
            missing,
            made_on,
            fault: None,
            unchanged: BTreeSet::new(),
        };
        self.executions.insert(execution, job);
        self.graph.job_mut(job).last_server = Some(server);
        let caches = self.parts_of(&attempt);
        self.under_way.begin(job, server, caches.into_iter());
        self.attempts.insert(job, attempt);
        self.start_if_prepared(job);
    }

    /// The parts of caches that an attempt reads.
    pub(crate) fn parts_of(&self, attempt: &Attempt) -> Vec<VolumeId> {
        let used = attempt.uses.iter();
        let caches = used.filter(|used| self.graph.volume(used.volume).is_cache);
        caches.map(|used| used.id).collect()
    }

    fn mountable(
        &self,
        volume: VolumeIndex,
        server: ServerId,
        job: JobIndex,
    ) -> (VolumeId, Option<ServerId>) {
        let found = if self.graph.volume(volume).is_cache && !self.settings.caches_nothing() {
            self.part_for(volume, server, job)
                .map(|(id, peer)| (id, Some(peer)))
        } else {
            self.volumes.scratch(volume)
        };
        found.expect("a place has all volumes of its job")
    }

    pub(crate) fn create(&mut self, volume: VolumeIndex, server: Option<ServerId>, size: Space) {
        let id = VolumeId(self.next_id());
        let state = match server {
            Some(server) => {
                self.fleet.update(server, |node| {
                    node.reserved = node.reserved.saturating_add(size)
                });
                self.out.push(Action::CreateVolume {
                    id,
                    volume,
                    server,
                    size,
                });
                InstanceState::Creating
            }
            None => InstanceState::Ready,
        };
        let was_live = self.volumes.is_live(volume);
        let waiters = Vec::new();
        let instance = Instance {
            volume,
            server,
            size,
            state,
            waiters,
            delete_faults: 0,
            is_kept: false,
        };
        self.volumes.add(id, instance);
        if !was_live {
            self.note_batch(volume);
            self.requeue_users(volume);
        }
    }

    fn start_if_prepared(&mut self, job: JobIndex) {
        let Some(attempt) = self.attempts.derived_mut(&job) else {
            return;
        };
        if attempt.stage == AttemptState::Preparing && attempt.missing.is_empty() {
            attempt.stage = AttemptState::Starting;
            let made_on = std::mem::take(&mut attempt.made_on);
            self.attempts.note(&job);
            self.started += 1;
            let action = self.start_action(job, &self.attempts[&job]);
            self.out.push(action);
            self.prove_room(job, &made_on);
        }
    }

    pub(crate) fn start_action(&self, job: JobIndex, attempt: &Attempt) -> Action {
        let mounted = self.graph.mounted(job).into_iter();
        let holds_results = |volume: &VolumeIndex| {
            let node = self.graph.volume(*volume);
            node.extracts_left > 0 && node.writers_left == 1
        };
        let written = mounted.filter(|(_, writable)| *writable);
        Action::StartJob {
            execution: attempt.execution,
            job,
            server: attempt.server,
            volumes: attempt.uses.clone(),
            results: written.map(|(v, _)| v).filter(holds_results).collect(),
            memory_bytes: attempt.memory_bytes,
        }
    }

    pub(crate) fn volume_created(&mut self, id: VolumeId) {
        let creating = self
            .volumes
            .get_mut(id)
            .filter(|i| i.state == InstanceState::Creating);
        let Some(instance) = creating else {
            self.delete_late(id);
            return;
        };
        instance.state = InstanceState::Ready;
        for job in std::mem::take(&mut instance.waiters) {
            if let Some(attempt) = self.attempts.derived_mut(&job) {
                attempt.missing.remove(&id);
            }
            self.start_if_prepared(job);
        }
    }

    pub(crate) fn job_started(&mut self, execution: ExecutionId) {
        if let Some(job) = self.executions.get(&execution)
            && let Some(attempt) = self.attempts.get_mut(job)
            && attempt.stage == AttemptState::Starting
        {
            attempt.stage = AttemptState::Running;
        }
    }

    /// The node may run it all the same, when its answer was lost: it is killed to be sure.
    pub(crate) fn start_failed(&mut self, execution: ExecutionId, error: &Error) {
        let Some(&job) = self.executions.get(&execution) else {
            return;
        };
        let server = self.attempts[&job].server;
        let doing = format!("node {} did not start it", self.fleet.name(server));
        self.stop(job, Some(error.clone().context(doing)));
    }

    pub(crate) fn job_unknown(&mut self, execution: ExecutionId) {
        self.orphaned_executions.remove(&execution);
        let Some(&job) = self.executions.get(&execution) else {
            return;
        };
        let attempt = &self.attempts[&job];
        match (
            attempt.stage == AttemptState::Stopping,
            attempt.fault.clone(),
        ) {
            (true, fault) => self.stopped(job, fault),
            (false, _) => self.end_with_node(job, "its node restarted and no longer knows it"),
        }
    }

    pub(crate) fn job_ended(&mut self, execution: ExecutionId, report: &JobReport) {
        self.orphaned_executions.remove(&execution);
        let Some(&job) = self.executions.get(&execution) else {
            return;
        };
        self.graph.job_mut(job).ended += 1;
        self.note_unchanged(job, report);
        if self.attempts[&job].stage == AttemptState::Stopping {
            let fault = self.attempts[&job].fault.clone();
            self.stopped(job, fault);
            return;
        }
        if report.outcome == JobOutcome::Exited(0) {
            self.compare_with_declared(job, report);
            self.learn_sizes(job, report);
            self.learn_computing(job, report);
            self.learn_held(job, report);
            self.learn_took(job, report);
            self.record_job(job, execution, report);
            self.succeed(job);
        } else if let Some((server, lack)) = find_full_disk(View::new(self), job, report) {
            self.pass_by_full_disk(job, server, &lack);
        } else if self.retry_with_more_memory(job, report) {
        } else if !(found_no_space(View::new(self), job, report) && self.grow(job, report)) {
            self.look_for_refused_writes(job, report);
            self.end_unsuccessful(job, report);
        }
    }

    /// The attempt failed, and no lack of space was mended.
    fn end_unsuccessful(&mut self, job: JobIndex, report: &JobReport) {
        let space = describe_full(View::new(self), job, report);
        let verdict = judge_outcome(View::new(self), job, &report.outcome, &space);
        let is_reported = matches!(report.outcome, JobOutcome::EnvironmentFailed(_));
        if is_reported && !matches!(verdict, FailureVerdict::NodeLeaves) {
            // Its node is there to report it.
            self.graph.job_mut(job).failure_history.killed.clear();
        }
        self.end_failed(job, verdict, report.output_tail.clone());
    }

    /// Takes note of how long a job kept its slots.
    fn learn_took(&mut self, job: JobIndex, report: &JobReport) {
        let since = self.attempts[&job].since;
        let took_ms = self.now.ms_since(since).max(report.wall_ms);
        self.graph.job_mut(job).took_ms = took_ms;
        self.checkpoints.learn_job(took_ms, report);
    }

    fn succeed(&mut self, job: JobIndex) {
        let server = self.attempts[&job].server;
        self.fleet.update(server, FleetNode::prove);
        self.prove_space(job);
        self.end_attempt(job);
        self.blame_nodes(job);
        self.graph.set_state(job, JobState::Done);
        self.note_redone(job);
        self.reopen_extracts(job);
        for child in self.graph.waiting_for(job).collect::<Vec<_>>() {
            if self.graph.state(child) == JobState::Waiting {
                self.settle(child, 0);
            }
        }
        for (volume, writable) in self.graph.mounted(job) {
            if writable {
                self.send_files(volume);
            }
            self.inspect_cache(volume);
            self.release_if_unneeded(volume);
            if writable {
                self.consider_copy(volume);
            }
        }
        self.release_kept(self.graph.pipeline(job));
        self.end_pipeline_if_final(self.graph.pipeline(job));
        self.wake_for_batch();
        self.unprotect_if_done();
    }

    /// Asks for the end of an attempt. `fault` counts against job and node; without one the
    /// attempt is simply repeated.
    pub(crate) fn stop(&mut self, job: JobIndex, fault: Option<Error>) {
        let Some(attempt) = self.attempts.get_mut(&job) else {
            return;
        };
        match attempt.stage {
            AttemptState::Preparing => self.stopped(job, fault),
            AttemptState::Starting | AttemptState::Running => {
                attempt.stage = AttemptState::Stopping;
                attempt.fault = fault;
                let (execution, server) = (attempt.execution, attempt.server);
                self.out.push(Action::KillJob { execution, server });
            }
            AttemptState::Stopping => {}
        }
    }

    fn stopped(&mut self, job: JobIndex, fault: Option<Error>) {
        match fault {
            None => self.end_stopped(job),
            Some(error) => self.end_failed(job, judge_environment(&error), String::new()),
        }
    }

    pub(crate) fn end_stopped(&mut self, job: JobIndex) {
        self.abandon_attempt(job);
        self.settle(job, 0);
    }

    /// Frees what an attempt occupied; the caller says what becomes of the job.
    pub(crate) fn end_attempt(&mut self, job: JobIndex) -> Option<Attempt> {
        let attempt = self.attempts.remove(&job)?;
        let caches = self.parts_of(&attempt);
        self.under_way.end(job, attempt.server, caches.into_iter());
        self.executions.remove(&attempt.execution);
        self.fleet.update(attempt.server, |node| {
            node.busy = node.busy.saturating_sub(attempt.slots);
            node.busy_memory = node.busy_memory.saturating_sub(attempt.memory_bytes);
            node.probe.take_if(|probe| *probe == job);
        });
        for id in &attempt.missing {
            if let Some(instance) = self.volumes.waiters_mut(*id) {
                instance.waiters.retain(|waiter| *waiter != job);
            }
        }
        for (volume, writable) in self.graph.mounted(job) {
            if writable && self.graph.volume(volume).writer == Some(job) {
                self.graph.volume_mut(volume).writer = None;
                self.requeue_users(volume);
            }
        }
        self.queues.wake(attempt.server);
        self.pass_measurement_on(job);
        Some(attempt)
    }

    /// Puts a job that has no attempt where it belongs, after a pause if one is given.
    pub(crate) fn settle(&mut self, job: JobIndex, pause_ms: u64) {
        self.queues.take(job);
        if self.graph.has_dead_parent(job) || self.is_given_up(job) {
            self.skip(job);
            return;
        }
        self.make_inputs_again(job);
        let state = if self.graph.job(job).parents_left > 0 {
            JobState::Waiting
        } else if pause_ms > 0 {
            self.timers.set(self.now.plus_ms(pause_ms), Timer::Job(job));
            JobState::HeldBack
        } else {
            JobState::Ready
        };
        self.graph.set_state(job, state);
        if state == JobState::Ready && self.phase != Phase::Finishing {
            self.enqueue(job);
        }
    }
}
