//! A job whose outputs lie on two nodes that are lost and come back, told by hand.

use bafs_proto::ids::{ExecutionId, RunId, ServerId, VolumeId};
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_proto::time::Time;
use bafs_sched::{
    Action, AllocationRules, Event, JobStartOrder, NodeInfo, Scheduler, Settings, Space,
};
use bafs_sim::simulated_cluster::parse_workflow_text;

const MB: u64 = 1_000_000;

/// Job `a` has written two volumes, one on each node, for job `b`, whose node is lost.
struct TwoNodeScenario {
    scheduler: Scheduler,
    now: u64,
    actions: Vec<Action>,
    /// Where the volumes are.
    volumes: Vec<(VolumeId, ServerId)>,
}

impl TwoNodeScenario {
    fn new() -> Self {
        let text = "volume v scratch 60 MB files 9\nvolume w scratch 60 MB files 9\n\
            job a {\nexecutable = x\n}\njob b {\nexecutable = x\n}\nparent a child b\n\
            mount v a /v\nmount w a /w\nmount v b /v ro\nmount w b /w ro\n";
        let settings = Settings {
            allocation_rules: AllocationRules::with_order(JobStartOrder::BreadthFirst),
            fleet_settle_ms: 0,
            ..Settings::default()
        };
        let mut scenario = Self {
            scheduler: Scheduler::new(RunId(0), parse_workflow_text(text), settings),
            now: 0,
            actions: Vec::new(),
            volumes: Vec::new(),
        };
        scenario.list_nodes(&[1, 2]);
        let created = scenario.actions.iter().filter_map(|action| match action {
            Action::CreateVolume { id, server, .. } => Some((*id, *server)),
            _ => None,
        });
        scenario.volumes = created.collect();
        assert_eq!(scenario.volumes.len(), 2, "{:?}", scenario.actions);
        assert_ne!(scenario.volumes[0].1, scenario.volumes[1].1);
        for (volume, _) in scenario.volumes.clone() {
            scenario.step(Event::VolumeCreated { volume });
        }
        let (execution, job, _) = scenario.started_job().expect("it starts");
        assert_eq!(job, "a");
        let report = JobReport {
            outcome: JobOutcome::Exited(0),
            wall_ms: 1,
            cpu_ms: 1,
            memory_bytes_max: 0,
            output_tail: String::new(),
            volumes: Vec::new(),
        };
        scenario.step(Event::JobEnded { execution, report });
        for server in [1, 2].map(ServerId) {
            scenario.step(Event::ServerSilent { server });
        }
        scenario
    }

    fn step(&mut self, event: Event) {
        self.now += 10;
        self.actions.clear();
        self.scheduler
            .step(Time(self.now), event, &mut self.actions);
        self.scheduler.check();
    }

    fn list_nodes(&mut self, ids: &[u64]) {
        let capacity = Space {
            bytes: 100 * MB,
            files: 1_000,
        };
        let node = |id: &u64| NodeInfo::single_group(ServerId(*id), capacity, 1);
        self.step(Event::nodes_listed(ids.iter().map(node).collect()));
    }

    /// The node of this volume has it.
    fn find(&mut self, at: usize) {
        let (volume, server) = self.volumes[at];
        let found = vec![volume];
        self.step(Event::VolumesFound { server, found });
    }

    fn started_job(&self) -> Option<(ExecutionId, String, Vec<VolumeId>)> {
        self.actions.iter().find_map(|action| match action {
            Action::StartJob {
                execution,
                job,
                volumes,
                ..
            } => {
                let name = self.scheduler.workflow().job(*job).name.clone();
                Some((*execution, name, volumes.iter().map(|it| it.id).collect()))
            }
            _ => None,
        })
    }

    fn deleted_volumes(&self) -> Vec<VolumeId> {
        let deleted = self.actions.iter().filter_map(|action| match action {
            Action::DeleteVolume { id, .. } => Some(*id),
            _ => None,
        });
        deleted.collect()
    }
}

#[test]
fn outputs_on_two_returned_nodes_count_together() {
    let mut scenario = TwoNodeScenario::new();
    scenario.list_nodes(&[1, 2]);
    assert_eq!(scenario.deleted_volumes(), []);
    scenario.find(0);
    assert_eq!(
        (scenario.deleted_volumes(), scenario.started_job()),
        (vec![], None)
    );
    scenario.find(1);
    assert_eq!(scenario.deleted_volumes(), []);
    // Its attempt on the lost node is tried again after a pause.
    let mut started = scenario.started_job();
    if started.is_none() {
        scenario.now += 60_000;
        scenario.step(Event::Tick);
        started = scenario.started_job();
    }
    let (_, job, volumes) = started.expect("it starts");
    let kept: Vec<VolumeId> = scenario.volumes.iter().map(|(id, _)| *id).collect();
    assert_eq!((job.as_str(), volumes), ("b", kept));
}

#[test]
fn output_without_its_counterpart_is_deleted() {
    let mut scenario = TwoNodeScenario::new();
    scenario.list_nodes(&[1, 2]);
    scenario.find(0);
    let (kept, server) = (scenario.volumes[0].0, scenario.volumes[1].1);
    scenario.step(Event::ServerSilent { server });
    assert_eq!(scenario.deleted_volumes(), [kept]);
}
