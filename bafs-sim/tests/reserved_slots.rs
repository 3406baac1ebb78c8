//! Who may have a slot that is kept for a stage that waits for a short copy.

use bafs_proto::ids::{ExecutionId, RunId, ServerId, VolumeId};
use bafs_proto::job_report::VolumeUse;
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_proto::time::Time;
use bafs_sched::{Action, Event, NodeInfo, Scheduler, Settings, Space};
use bafs_sim::simulated_cluster::parse_workflow_text;

const MB: u64 = 1_000_000;

/// Pipelines of two jobs on one node with two slots: all first jobs read one cache, all second ones
/// another. Beside the node is one that takes copies.
struct TwoLevelPipelines {
    scheduler: Scheduler,
    now: u64,
    /// Copies that were asked for, in their order.
    copies: Vec<VolumeId>,
    /// Jobs that began, in their order.
    started_jobs: Vec<(String, ExecutionId)>,
    /// Volumes that were asked for, in their order.
    created_volumes: Vec<String>,
}

impl TwoLevelPipelines {
    fn start_run() -> Self {
        let mut text = String::new();
        for stage in 0..2 {
            text += &format!("volume c{stage} cache bafs://home/c{stage} 40 MB files 9\n");
        }
        for v in ["u", "w", "x", "y"] {
            text += &format!("volume {v} scratch 10 MB files 9\n");
            for stage in 0..2 {
                text += &format!(
                    "job {v}{stage} {{\nexecutable = x\n}}\n\
                     mount {v} {v}{stage} /v\nmount c{stage} {v}{stage} /c\n"
                );
            }
            text += &format!("parent {v}0 child {v}1\n");
        }
        let mut pipelines = Self {
            scheduler: Scheduler::new(RunId(0), parse_workflow_text(&text), Settings::default()),
            now: 0,
            copies: Vec::new(),
            started_jobs: Vec::new(),
            created_volumes: Vec::new(),
        };
        let node = |id, megabytes, slots| {
            let capacity = Space {
                bytes: megabytes * MB,
                files: 1_000,
            };
            let group = format!("g{id}");
            NodeInfo {
                group,
                ..NodeInfo::single_group(ServerId(id), capacity, slots)
            }
        };
        pipelines.apply_event(Event::nodes_listed(vec![node(1, 130, 2), node(2, 100, 0)]));
        pipelines
    }

    /// Tells a fact, and that whatever follows is made; copies stay under way.
    fn apply_event(&mut self, event: Event) {
        let mut due = vec![event];
        while let Some(event) = due.pop() {
            self.now += 1;
            let mut told = Vec::new();
            self.scheduler.step(Time(self.now), event, &mut told);
            self.scheduler.check();
            for action in told {
                match action {
                    Action::CreateVolume { id, volume, .. } => {
                        let name = &self.scheduler.workflow().volume(volume).name;
                        self.created_volumes.push(name.clone());
                        due.push(Event::VolumeCreated { volume: id });
                    }
                    Action::CopyVolume { id, .. } => self.copies.push(id),
                    Action::StartJob { execution, job, .. } => {
                        let name = self.scheduler.workflow().job(job).name.clone();
                        self.started_jobs.push((name, execution));
                        due.push(Event::JobStarted { execution });
                    }
                    _ => {}
                }
            }
        }
    }

    fn end_job(&mut self, job: &str) {
        let mut begun = self.started_jobs.iter();
        let execution = begun.find(|(name, _)| name == job).expect("it began").1;
        let used = VolumeUse {
            name: job[..1].to_owned(),
            used_bytes: MB,
            changes: 1,
            ..VolumeUse::default()
        };
        let report = JobReport {
            outcome: JobOutcome::Exited(0),
            wall_ms: 60_000,
            cpu_ms: 1,
            memory_bytes_max: 0,
            output_tail: String::new(),
            volumes: vec![used],
        };
        self.now += 60_000;
        self.apply_event(Event::JobEnded { execution, report });
    }
}

/// A cache that is made for a job in a slot that is kept for another one would take the room of
/// those that need less and may not have the slot; and the cache that they read would go unread.
#[test]
fn no_cache_is_created_for_a_reserved_slot() {
    let mut pipelines = TwoLevelPipelines::start_run();
    assert_eq!(pipelines.created_volumes, ["u", "c0", "w"]);
    pipelines.end_job("u0");
    assert_eq!(
        pipelines.copies.len(),
        1,
        "the first tells what copies cost"
    );
    pipelines.end_job("w0");
    assert_eq!(
        pipelines.created_volumes,
        ["u", "c0", "w", "x"],
        "one slot is kept"
    );
    // The first copy tells that others are worth it.
    while let Some(volume) = pipelines.copies.pop() {
        pipelines.apply_event(Event::VolumeCopied {
            volume,
            received_bytes: MB,
        });
    }
    let names: Vec<_> = pipelines
        .started_jobs
        .iter()
        .map(|(name, _)| &**name)
        .collect();
    assert_eq!(names[2..], ["x0", "y0"]);
}
