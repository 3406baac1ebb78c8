//! The one place where decisions take effect.

use bafs_workflow::VolumeIndex;

use crate::decision::Decision;
use crate::space::Space;
use crate::state::critical_path::Urgency;
use crate::state::scheduler_state::State;
use crate::strategy_selector::Selection;

impl State {
    /// Carries a decision out, and notes it.
    pub(crate) fn commit(&mut self, decision: Decision) {
        self.decisions.push(decision.clone());
        match decision {
            // Placement.
            Decision::Start {
                job,
                server,
                creates,
                borrows,
            } => self.begin_start(job, server, creates, borrows),

            // Admission.
            Decision::BeginRunning => self.begin_running(),
            Decision::RelaxLimits(relaxation) => self.apply_relaxation(relaxation),
            Decision::Preempt {
                victim,
                beneficiary,
            } => self.preempt(victim, beneficiary),
            Decision::Unprotect => self.unprotect(),
            Decision::GiveUp { reason } => self.give_run_up(reason),

            // Cache space.
            Decision::EvictCache { volume } => self.retire_all(volume),
            Decision::Prefetch { volume, parts } => self.begin_prefetch(volume, &parts),
            Decision::CompleteCache {
                volume,
                server,
                part,
            } => self.create(volume, Some(server), part),

            // Order.
            Decision::PrioritiseChains { from, is_final } => self.prioritise_chains(from, is_final),

            // Strategy.
            Decision::FollowStrategy {
                strategy,
                reason,
                rules,
                has_simulated_rules,
            } => self.follow_selection(Selection {
                strategy,
                reason,
                rules,
                has_simulated_rules,
            }),

            // Failure.
            Decision::Retry { job, pause_ms } => self.settle(job, pause_ms),
            Decision::Fail {
                job,
                reason,
                output_tail,
            } => self.fail_job(job, reason, output_tail),
            Decision::Quarantine {
                node,
                duration_ms,
                reason,
            } => self.begin_quarantine(node, duration_ms, reason),
            Decision::GiveUpNode { node } => self.lose_server(node),
            Decision::Redo { job } => self.undo(job),
            Decision::Resize { pipeline, sizes } => self.resize_volumes(pipeline, &sizes),
            Decision::ReserveUnmade { volumes, size } => self.resize_all(&volumes, size),
            Decision::ReuseVolume {
                volume,
                node,
                is_copy,
            } => self.reuse_volume(volume, node, is_copy),
            Decision::SkipRedo { jobs } => self.skip_redo(&jobs),

            // Replication.
            Decision::CopyVolume {
                source,
                server,
                base_copy,
            } => self.begin_copy(source, server, base_copy),
            Decision::DropCopies { volume, copies } => self.delete_copies(volume, &copies),
            Decision::RestoreVolume { volume, copy } => self.restore_volume(volume, copy),
            Decision::Withdraw { job } => self.end_stopped(job),
            Decision::DropVolume { id } => self.retire(id),
            Decision::SwitchToCopy { volume, id, copy } => self.switch_to_copy(volume, id, copy),
        }
    }

    fn resize_all(&mut self, volumes: &[VolumeIndex], size: Space) {
        volumes.iter().for_each(|volume| self.resize(*volume, size));
    }

    /// Ends the run, since nothing helps.
    fn give_run_up(&mut self, reason: String) {
        self.messages.push(reason);
        self.finish();
    }

    /// Jobs whose chain is at least so long, in seconds, go first from now on.
    fn prioritise_chains(&mut self, from: u32, is_final: bool) {
        let is_over = is_final || self.urgency.is_over;
        self.urgency = Urgency { from, is_over };
        self.requeue_all();
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::{RunId, ServerId};
    use bafs_proto::message::{JobOutcome, JobReport};
    use bafs_proto::time::Time;
    use bafs_workflow::{JobIndex, parse_workflow};

    use crate::{Action, Decision, Event, NodeInfo, Scheduler, Settings, Space};

    /// The execution that these actions start ends with an exit code.
    fn fail_execution(scheduler: &mut Scheduler, at_ms: u64, actions: &mut Vec<Action>) {
        let started = actions.drain(..).find_map(|action| match action {
            Action::StartJob { execution, .. } => Some(execution),
            _ => None,
        });
        let execution = started.expect("a job starts");
        let report = JobReport {
            outcome: JobOutcome::Exited(3),
            wall_ms: 1,
            cpu_ms: 1,
            memory_bytes_max: 0,
            output_tail: "no".to_owned(),
            volumes: Vec::new(),
        };
        let ended = Event::JobEnded { execution, report };
        scheduler.step(Time(at_ms), ended, actions);
    }

    #[test]
    fn failures_become_decisions_to_retry_or_fail() {
        let text = "job a {\nexecutable = x\nretry = 1\n}\n";
        let none = |_: &str| Err("no files".to_owned());
        let workflow = parse_workflow("w.bafs", text, &none).unwrap().workflow;
        let mut scheduler = Scheduler::new(RunId(1), workflow, Settings::default());
        let space = Space {
            bytes: 1_000_000,
            files: 100,
        };
        let node = NodeInfo::single_group(ServerId(1), space, 1);
        let mut actions = Vec::new();
        scheduler.step(Time(1), Event::nodes_listed(vec![node]), &mut actions);
        fail_execution(&mut scheduler, 2, &mut actions);
        let (job, pause_ms) = (JobIndex(0), Settings::default().pause_ms(1));
        let retry = Decision::Retry { job, pause_ms };
        assert_eq!(scheduler.last_decisions()[..1], [retry]);
        scheduler.step(Time(2 + pause_ms), Event::Tick, &mut actions);
        fail_execution(&mut scheduler, 3 + pause_ms, &mut actions);
        let fail = Decision::Fail {
            job,
            reason: "exited with code 3".to_owned(),
            output_tail: "no".to_owned(),
        };
        assert_eq!(scheduler.last_decisions()[..1], [fail]);
    }
}
