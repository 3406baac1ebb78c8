//! What follows from failures: attempts end, jobs run again or fail for good, and what depends on
//! them is skipped. What a failure means says `policy/failure/attribution.rs`.

use std::collections::BTreeMap;

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_proto::{Error, ErrorCode};
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::action::{Action, MountedVolume};
use crate::decision::{Decision, QuarantineReason};
use crate::policy::View;
use crate::policy::failure::attribution::{
    self, CreationVerdict, FailureVerdict, FaultCause, UnfitVerdict,
};
use crate::state::attempts::AttemptState;
use crate::state::disk_fullness::{DiskLack, DiskResource, Finder};
use crate::state::jobs::JobState;
use crate::state::progress::JobFailure;
use crate::state::scheduler_state::State;
use crate::state::volumes::InstanceState;

impl State {
    /// An attempt failed, and this is what it means.
    pub(crate) fn end_failed(
        &mut self,
        job: JobIndex,
        verdict: FailureVerdict,
        output_tail: String,
    ) {
        match verdict {
            FailureVerdict::OwnFault(reason) => self.end_by_own_fault(job, reason, output_tail),
            FailureVerdict::Refused { reason, has_output } => {
                let output_tail = if has_output {
                    output_tail
                } else {
                    String::new()
                };
                self.end_refused(job, reason, output_tail);
            }
            FailureVerdict::UnfitNode(error) => self.end_on_unfit_node(job, &error),
            FailureVerdict::Environment { fault, cause } => {
                self.end_by_environment(job, &fault, cause);
            }
            FailureVerdict::NodeLeaves => self.end_with_leaving_node(job),
            FailureVerdict::Final(reason) => {
                self.keep_logs(job);
                self.abandon_attempt(job);
                self.commit(Decision::Fail {
                    job,
                    reason,
                    output_tail,
                });
            }
        }
    }

    /// The node of the attempt is asked to end, which is nobody's fault.
    fn end_with_leaving_node(&mut self, job: JobIndex) {
        if let Some(server) = self.attempts.get(&job).map(|attempt| attempt.server) {
            self.fleet.note_draining(server);
        }
        self.end_stopped(job);
    }

    /// The attempt failed by the job's own fault.
    fn end_by_own_fault(&mut self, job: JobIndex, reason: String, output_tail: String) {
        if let Some(server) = self.attempts.get(&job).map(|attempt| attempt.server) {
            self.graph
                .job_mut(job)
                .failure_history
                .failed_on
                .insert(server);
        }
        self.graph.job_mut(job).failure_history.killed.clear();
        self.count_own_fault(job);
        let decision = attribution::judge_own_fault(View::new(self), job, reason, output_tail);
        if matches!(decision, Decision::Fail { .. }) {
            self.keep_logs(job);
        }
        self.abandon_attempt(job);
        self.commit(decision);
    }

    /// Counts a failure by the job's own fault.
    pub(crate) fn count_own_fault(&mut self, job: JobIndex) {
        let node = self.graph.job_mut(job);
        node.failure_history.own_faults = node.failure_history.own_faults.saturating_add(1);
    }

    /// A node cannot run this job, however often it tries.
    fn end_refused(&mut self, job: JobIndex, reason: String, output_tail: String) {
        let Some(server) = self.attempts.get(&job).map(|attempt| attempt.server) else {
            return;
        };
        self.abandon_attempt(job);
        self.graph
            .job_mut(job)
            .failure_history
            .refused_by
            .insert(server);
        let decision = attribution::judge_refusal(View::new(self), job, reason, output_tail);
        self.commit(decision);
    }

    /// The node of an attempt cannot run jobs.
    fn end_on_unfit_node(&mut self, job: JobIndex, error: &Error) {
        let Some(server) = self.attempts.get(&job).map(|attempt| attempt.server) else {
            return;
        };
        self.fleet.update(server, |node| node.is_unfit = true);
        match attribution::judge_unfit_node(View::new(self), job, server, error) {
            UnfitVerdict::Quarantine => {
                self.end_by_unknown_fault(job, &error.to_string());
                self.quarantine_for_failures(server, QuarantineReason::Unfit);
            }
            UnfitVerdict::TryAgain => self.end_by_unknown_fault(job, &error.to_string()),
            UnfitVerdict::Hopeless(reason) => {
                let faults = self.graph.job(job).failure_history.environment.count;
                self.abandon_attempt(job);
                self.graph.job_mut(job).failure_history.environment.count =
                    faults.saturating_add(1);
                self.commit(Decision::Fail {
                    job,
                    reason,
                    output_tail: String::new(),
                });
            }
        }
    }

    /// The attempt failed by no fault of the job, and nobody knows why.
    fn end_by_unknown_fault(&mut self, job: JobIndex, fault: &str) {
        self.end_by_environment(job, fault, FaultCause::Unknown);
    }

    /// The attempt failed by no fault of the job: volumes are probed, and it is tried again.
    fn end_by_environment(&mut self, job: JobIndex, fault: &str, cause: FaultCause) {
        let Some(attempt) = self.attempts.get(&job) else {
            return;
        };
        let server = attempt.server;
        let uses = attempt.uses.clone();
        if attribution::is_last_environment_fault(View::new(self), job, cause) {
            self.keep_logs(job);
        }
        self.abandon_attempt(job);
        self.probe_volumes(&uses);
        if attribution::may_be_of_node(View::new(self), server, cause) {
            self.note_fault_on(job, server, cause);
            if cause == FaultCause::Unknown {
                self.fleet.count_fault(server);
                let policy = self.policies().failure;
                if policy.blames_for_faults(View::new(self), server) {
                    self.quarantine_for_failures(server, QuarantineReason::JobsFail);
                    let why = format!("fails jobs, but other nodes do not; last reason: {fault}");
                    self.tell_quarantine(server, &why);
                }
            }
        }
        if cause == FaultCause::Home {
            let decision = self.wait_for_home(job, fault);
            return self.commit(decision);
        }
        let faults = self.count_environment_fault(job);
        let pause_ms = attribution::retry_pause_ms(View::new(self), server, faults);
        let decision = attribution::judge_retry(View::new(self), job, faults, pause_ms, fault);
        self.commit(decision);
    }

    /// Asks nodes whether they have these volumes, except those that are being made: an answer from
    /// before a volume was made may arrive after the message about that, and would pass for a loss.
    fn probe_volumes(&mut self, uses: &[MountedVolume]) {
        let mut by_server: BTreeMap<ServerId, Vec<VolumeId>> = BTreeMap::new();
        for used in uses {
            let instance = self.volumes.get(used.id);
            let is_being_made = instance.is_some_and(|instance| instance.state.is_being_made());
            if let Some(server) = used.server.filter(|_| !is_being_made) {
                by_server.entry(server).or_default().push(used.id);
            }
        }
        for (server, volumes) in by_server {
            if !self.is_lost(server) {
                self.out.push(Action::ProbeVolumes { server, volumes });
            }
        }
    }

    /// Takes note that the environment of a job failed on a node.
    fn note_fault_on(&mut self, job: JobIndex, server: ServerId, cause: FaultCause) {
        let is_again = attribution::fails_there_again(View::new(self), job, server);
        let node = self.graph.job_mut(job);
        node.failure_history.environment.last_on = Some(server);
        if !is_again {
            return;
        }
        if cause == FaultCause::Home {
            // All others may reach it no more than this one, for long.
            node.failure_history.faulted_on.clear();
        }
        node.failure_history.faulted_on.insert(server);
    }

    /// A home was away when a job needed it. Answers what becomes of the job.
    fn wait_for_home(&mut self, job: JobIndex, fault: &str) -> Decision {
        let away = attribution::extend_home_absence(View::new(self), job);
        self.graph.job_mut(job).failure_history.environment.away = Some(away);
        self.tell_of_home(job, self.now.ms_since(away.since), fault);
        attribution::judge_home_absence(View::new(self), job, away, fault)
    }

    /// Counts another failure of a job's environment; answers how many count.
    pub(crate) fn count_environment_fault(&mut self, job: JobIndex) -> u32 {
        let (now, count) = (
            self.now,
            attribution::count_with_next_fault(View::new(self), job),
        );
        let faults = &mut self.graph.job_mut(job).failure_history.environment;
        (faults.count, faults.last) = (count, now);
        faults.all = faults.all.saturating_add(1);
        count
    }

    /// The node of an attempt was lost, or restarted.
    pub(crate) fn end_with_node(&mut self, job: JobIndex, fault: &str) {
        let Some(attempt) = self.attempts.get(&job) else {
            return;
        };
        let server = attempt.server;
        if attempt.stage != AttemptState::Running {
            return self.end_by_unknown_fault(job, fault);
        }
        if !attribution::is_known_loss(View::new(self), server) {
            self.nodes_gone += 1;
        }
        self.last_gone = Some((server, self.now));
        self.graph.job_mut(job).failure_history.killed.push(server);
        match attribution::find_deadly_job(View::new(self), job) {
            None => self.end_by_unknown_fault(job, fault),
            Some(reason) => {
                self.abandon_attempt(job);
                self.commit(Decision::Fail {
                    job,
                    reason,
                    output_tail: String::new(),
                });
            }
        }
    }

    /// A job failed for good: what depends on it does not run, all else goes on.
    pub(crate) fn fail_job(&mut self, job: JobIndex, reason: String, output_tail: String) {
        self.queues.take(job);
        self.forget_record(job);
        let last = self.graph.job(job).last_server;
        self.failures.push(JobFailure {
            job,
            name: self.graph.workflow.job(job).name.clone(),
            node: last
                .map(|server| self.fleet.name(server))
                .unwrap_or_default(),
            reason,
            output_tail,
        });
        self.graph.set_state(job, JobState::Failed);
        self.skip_dependents(job);
    }

    /// A job does not run because one that it depends on is dead.
    pub(crate) fn skip(&mut self, job: JobIndex) {
        self.queues.take(job);
        self.graph.set_state(job, JobState::Skipped);
        self.skip_dependents(job);
    }

    /// Draws the consequences of a job's end without success: for its descendants and for the
    /// volumes of all.
    fn skip_dependents(&mut self, job: JobIndex) {
        let mut dead = vec![job];
        let mut next = 0;
        while next < dead.len() {
            // Where a job ran again, those that follow it may have parents that are done.
            for later in self.graph.waiting_for(dead[next]).collect::<Vec<_>>() {
                let state = self.graph.state(later);
                // An attempt under way goes on: its inputs were there when it started.
                if !state.is_final() && state != JobState::Active {
                    self.queues.take(later);
                    self.graph.set_state(later, JobState::Skipped);
                    dead.push(later);
                }
            }
            next += 1;
        }
        for job in dead {
            for (volume, _) in self.graph.mounted(job) {
                self.give_up_extracts(volume);
                self.release_if_unneeded(volume);
            }
            self.release_kept(self.graph.pipeline(job));
            self.end_pipeline_if_final(self.graph.pipeline(job));
        }
        self.wake_for_batch();
        self.unprotect_if_done();
    }

    /// A volume could not be created. It is deleted all the same, as it may exist.
    pub(crate) fn create_failed(&mut self, id: VolumeId, error: &Error) {
        let server = self.volumes.get(id).and_then(|instance| instance.server);
        if let (ErrorCode::StoreLost, Some(server)) = (error.code, server) {
            return self.lose_store(server);
        }
        if self
            .volumes
            .get(id)
            .is_some_and(|i| i.state == InstanceState::Copying)
        {
            self.copy_failed(id);
            return;
        }
        let creating = self
            .volumes
            .get_mut(id)
            .filter(|i| i.state == InstanceState::Creating);
        let Some(instance) = creating else {
            self.delete_late(id);
            return;
        };
        let (volume, server) = (instance.volume, instance.server);
        let waiters = std::mem::take(&mut instance.waiters);
        self.retire(id);
        self.unanswered.remove(&id);
        let Some(server) = server else { return };
        let name = self.graph.workflow.volume(volume).name.clone();
        let node = self.fleet.name(server);
        let fault = format!("volume '{name}' could not be created on node {node}: {error}");
        // What was to come ahead of its readers keeps nobody from working there.
        if waiters.is_empty() {
            return;
        }
        match attribution::judge_creation(error) {
            CreationVerdict::NoSpace => {
                let lacks = match error.code {
                    ErrorCode::NoSpaceFiles => DiskResource::Inodes,
                    _ => DiskResource::Bytes,
                };
                let lack = DiskLack { why: fault, lacks };
                self.note_full(server, &lack, Finder::Volume);
                for job in waiters {
                    self.lacks_room(job, server, &lack);
                }
            }
            CreationVerdict::Environment(cause) => {
                for job in waiters {
                    self.end_by_environment(job, &fault, cause);
                }
            }
            CreationVerdict::Impossible => {
                for job in waiters {
                    self.end_attempt(job);
                }
                self.fail_users(volume, &fault);
            }
        }
    }

    fn fail_users(&mut self, volume: VolumeIndex, reason: &str) {
        for job in self.graph.workflow.volume(volume).users.clone() {
            let is_under_way = self.attempts.contains_key(&job);
            if !self.graph.state(job).is_final() && !is_under_way {
                self.commit(Decision::Fail {
                    job,
                    reason: reason.to_owned(),
                    output_tail: String::new(),
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::{RunId, ServerId, VolumeId};
    use bafs_proto::time::Time;
    use bafs_proto::{Error, ErrorCode};
    use bafs_workflow::parse_workflow;

    use crate::{Action, Event, NodeInfo, Scheduler, Settings, Space};

    #[test]
    fn volumes_being_created_are_not_probed() {
        let text = "volume p scratch 1 MB\nvolume q scratch 1 MB\njob a {\nexecutable = x\n}\n\
            mount p a /p\nmount q a /q\n";
        let parsed = parse_workflow("w", text, &|_| unreachable!()).unwrap();
        let settings = Settings {
            fleet_settle_ms: 0,
            ..Settings::default()
        };
        let mut scheduler = Scheduler::new(RunId(0), parsed.workflow, settings);
        let mut step = |now, event| {
            let mut actions = Vec::new();
            scheduler.step(Time(now), event, &mut actions);
            actions
        };
        let capacity = Space {
            bytes: 100_000_000,
            files: 100_000,
        };
        let node = NodeInfo::single_group(ServerId(1), capacity, 1);
        let actions = step(1, Event::nodes_listed(vec![node]));
        let created = actions.iter().filter_map(|action| match action {
            Action::CreateVolume { id, .. } => Some(*id),
            _ => None,
        });
        let created: Vec<VolumeId> = created.collect();
        let [_, failed] = created[..] else {
            panic!("{actions:?}");
        };
        let error = Error::new(ErrorCode::ServerFault, "Input/output error");
        let volume = failed;
        let actions = step(2, Event::VolumeCreateFailed { volume, error });
        let deleted = Action::DeleteVolume {
            id: failed,
            server: ServerId(1),
        };
        let probed = Action::ProbeVolumes {
            server: ServerId(1),
            volumes: vec![failed],
        };
        assert_eq!(actions, [deleted, probed]);
    }
}
