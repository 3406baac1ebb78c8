//! Jobs that write one volume one after the other and copies of it, told by hand.

use bafs_proto::ids::{ExecutionId, RunId, ServerId, VolumeId};
use bafs_proto::job_report::VolumeUse;
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_proto::time::Time;
use bafs_sched::{Action, CopyDecision, Event, NodeInfo, PolicyNames, Scheduler, Settings, Space};
use bafs_sim::simulated_cluster::parse_workflow_text;

const MB: u64 = 1_000_000;

/// Three jobs that write one volume one after the other, on two nodes with one slot each, told by
/// hand: after each fact the actions that follow are in `told`.
pub(crate) struct CopyScenario {
    pub(crate) scheduler: Scheduler,
    pub(crate) now: u64,
    pub(crate) actions: Vec<Action>,
}

impl CopyScenario {
    pub(crate) fn new(checkpoint: &'static str, node_megabytes: u64) -> Self {
        Self::with_volume(checkpoint, 10, node_megabytes)
    }

    pub(crate) fn with_volume(
        checkpoint: &'static str,
        megabytes: u64,
        node_megabytes: u64,
    ) -> Self {
        let mut text = format!("volume v scratch {megabytes} MB files 9\n");
        for job in ["a", "b", "c"] {
            text += &format!("job {job} {{\nexecutable = x\n}}\nmount v {job} /v\n");
        }
        text += "parent a child b\nparent b child c\n";
        let mut chain = Self::with_workflow(&text, checkpoint, node_megabytes);
        let volume = chain.created_volumes()[0];
        chain.step(Event::VolumeCreated { volume });
        chain
    }

    /// Any workflow, from when the nodes are seen.
    pub(crate) fn with_workflow(text: &str, checkpoint: &'static str, node_megabytes: u64) -> Self {
        let settings = Settings {
            policies: PolicyNames::default().with("replication", checkpoint),
            ..Settings::default()
        };
        let mut chain = Self {
            scheduler: Scheduler::new(RunId(0), parse_workflow_text(text), settings),
            now: 0,
            actions: Vec::new(),
        };
        let capacity = Space {
            bytes: node_megabytes * MB,
            files: 1_000,
        };
        let nodes = [1, 2].map(|id| NodeInfo::single_group(ServerId(id), capacity, 1));
        chain.step(Event::nodes_listed(nodes.to_vec()));
        chain
    }

    /// The same until a job runs on each node; these jobs, in the order of their names.
    pub(crate) fn run_all_jobs(&mut self) -> Vec<ExecutionId> {
        let mut jobs = Vec::new();
        for volume in self.created_volumes() {
            self.step(Event::VolumeCreated { volume });
            let (execution, name, ..) = self.started_job();
            jobs.push((name, execution));
        }
        jobs.sort();
        jobs.into_iter().map(|(_, execution)| execution).collect()
    }

    pub(crate) fn step(&mut self, event: Event) {
        self.now += 1_000;
        self.actions.clear();
        let now = Time(self.now);
        self.scheduler.step(now, event, &mut self.actions);
        self.scheduler.check();
    }

    /// A job whose node was lost runs again after a pause.
    pub(crate) fn step_after_pause(&mut self) {
        self.now += 60_000;
        self.step(Event::Tick);
    }

    /// The volumes that are to be made.
    pub(crate) fn created_volumes(&self) -> Vec<VolumeId> {
        let ids = self.actions.iter().filter_map(|action| match action {
            Action::CreateVolume { id, .. } => Some(*id),
            _ => None,
        });
        ids.collect()
    }

    /// The job that starts, where and with which volume.
    pub(crate) fn started_job(&self) -> (ExecutionId, String, ServerId, VolumeId) {
        let mut started = self.actions.iter().filter_map(|action| match action {
            Action::StartJob {
                execution,
                job,
                server,
                volumes,
                ..
            } => {
                let name = self.scheduler.workflow().job(*job).name.clone();
                Some((*execution, name, *server, volumes[0].id))
            }
            _ => None,
        });
        started.next().expect("a job starts")
    }

    /// The copy that is asked for, where, and the older one it is made from.
    pub(crate) fn requested_copy(&self) -> (VolumeId, ServerId, Option<VolumeId>) {
        let mut copied = self.actions.iter().filter_map(|action| match action {
            Action::CopyVolume {
                id,
                server,
                base_copy: base,
                ..
            } => Some((*id, *server, *base)),
            _ => None,
        });
        copied.next().expect("a copy is made")
    }

    pub(crate) fn has_deleted(&self, volume: VolumeId) -> bool {
        let mut told = self.actions.iter();
        told.any(|action| matches!(action, Action::DeleteVolume { id, .. } if *id == volume))
    }

    /// The job that starts ends well, after a minute, and leaves so much.
    pub(crate) fn end_job(&mut self, held_bytes: u64) {
        let execution = self.started_job().0;
        self.end_execution(execution, JobOutcome::Exited(0), held_bytes, 0);
    }

    pub(crate) fn end_execution(
        &mut self,
        execution: ExecutionId,
        outcome: JobOutcome,
        held_bytes: u64,
        refused_for_space: u64,
    ) {
        let used = VolumeUse {
            name: "v".to_owned(),
            used_bytes: held_bytes,
            no_space_errors: refused_for_space,
            changes: 1,
            ..VolumeUse::default()
        };
        let report = JobReport {
            outcome,
            wall_ms: 60_000,
            cpu_ms: 1,
            memory_bytes_max: 0,
            output_tail: String::new(),
            volumes: vec![used],
        };
        self.step(Event::JobEnded { execution, report });
    }

    pub(crate) fn complete_copy(&mut self, volume: VolumeId, received_bytes: u64) {
        self.step(Event::VolumeCopied {
            volume,
            received_bytes,
        });
    }

    pub(crate) fn last_decision(&self) -> CopyDecision {
        let receipt = self.scheduler.copy_decisions().last();
        receipt.expect("a decision").1.clone()
    }
}
