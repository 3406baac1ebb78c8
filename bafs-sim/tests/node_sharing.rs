//! A run that shares a small node with others: what it keeps, and what it gives up when it stands.

use std::collections::BTreeMap;

use bafs_proto::ids::{ExecutionId, RunId, ServerId, VolumeId};
use bafs_proto::job_report::VolumeUse;
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_proto::time::Time;
use bafs_sched::{Action, Event, NodeInfo, RunQuota, Scheduler, Settings, Space};
use bafs_sim::simulated_cluster::parse_workflow_text;
use bafs_workflow::VolumeIndex;

const MB: u64 = 1_000_000;
const NODE: ServerId = ServerId(1);

/// A pipeline of two jobs that read a cache each, and another job that reads the first one and
/// needs more; each job makes a volume of its own.
const TURNS_WORKFLOW: &str = "volume c0 cache bafs://home/c0 3 MB files 9
volume c1 cache bafs://home/c1 3 MB files 9
volume pv0 scratch 3 MB files 9
volume pv1 scratch 3 MB files 9
volume qv0 scratch 7500 KB files 9
job p0 {\nexecutable = x\n}
job p1 {\nexecutable = x\n}
job q0 {\nexecutable = x\n}
mount c0 p0 /c
mount pv0 p0 /v
mount pv0 p1 /in ro
mount c1 p1 /c
mount pv1 p1 /v
mount c0 q0 /c
mount qv0 q0 /v
parent p0 child p1
";

/// The run on one node with one slot.
struct SharedNodeRun {
    scheduler: Scheduler,
    now: u64,
    execution: Option<ExecutionId>,
    /// The job that runs.
    running_job: String,
    names: BTreeMap<VolumeId, String>,
    /// What was asked for, in words, since the last look.
    requests: Vec<String>,
}

impl SharedNodeRun {
    fn start_run(text: &str, megabytes: u64) -> Self {
        let settings = Settings {
            user: Some("u".to_owned()),
            ..Settings::default()
        };
        let mut run = Self {
            scheduler: Scheduler::new(RunId(0), parse_workflow_text(text), settings),
            now: 0,
            execution: None,
            running_job: String::new(),
            names: BTreeMap::new(),
            requests: Vec::new(),
        };
        let node = NodeInfo::single_group(NODE, space_of_megabytes(megabytes), 1);
        run.apply_event(Event::nodes_listed(vec![node]));
        run
    }

    fn set_quota(&mut self, megabytes: u64) {
        self.set_quota_with_slots(megabytes, 1);
    }

    fn set_quota_with_slots(&mut self, megabytes: u64, slots: u32) {
        let share = RunQuota {
            server: NODE,
            space: space_of_megabytes(megabytes),
            slots,
            is_shared: true,
            is_above_fair_share: false,
        };
        let shares = vec![share];
        self.apply_event(Event::QuotasChanged { quotas: shares });
    }

    /// Tells a fact, and that whatever follows is made and gone.
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
                        self.note_request("make", id, volume);
                        due.push(Event::VolumeCreated { volume: id });
                    }
                    Action::DeleteVolume { id, .. } => {
                        self.requests.push(format!("delete {}", self.names[&id]));
                        due.push(Event::VolumeDeleted { volume: id });
                    }
                    Action::StartJob { execution, job, .. } => {
                        let name = self.scheduler.workflow().job(job).name.clone();
                        self.requests.push(format!("start {name}"));
                        self.running_job = name;
                        self.execution = Some(execution);
                        due.push(Event::JobStarted { execution });
                    }
                    _ => {}
                }
            }
        }
    }
}

impl SharedNodeRun {
    fn note_request(&mut self, verb: &str, id: VolumeId, volume: VolumeIndex) {
        let name = self.scheduler.workflow().volume(volume).name.clone();
        self.requests.push(format!("{verb} {name}"));
        self.names.insert(id, name);
    }

    /// The job that runs ends; what was asked for thereupon, in the order of names.
    fn end_job(&mut self) -> Vec<String> {
        self.requests.clear();
        let name = self.running_job.clone();
        let written = VolumeUse {
            name: format!("{}v{}", &name[..1], &name[1..]),
            used_bytes: MB,
            changes: 1,
            ..VolumeUse::default()
        };
        let report = JobReport {
            outcome: JobOutcome::Exited(0),
            wall_ms: 1_000,
            cpu_ms: 1,
            memory_bytes_max: 0,
            output_tail: String::new(),
            volumes: vec![written],
        };
        self.now += 1_000;
        let execution = self.execution.take().expect("one runs");
        self.apply_event(Event::JobEnded { execution, report });
        self.take_requests()
    }

    /// Lets timers go off until something is asked for; how long that takes.
    fn wait_for_request(&mut self) -> (u64, Vec<String>) {
        let since = self.now;
        while self.requests.is_empty() {
            let next = self.scheduler.next_timer().expect("it never just waits");
            self.now = next.0.max(self.now);
            self.apply_event(Event::Tick);
            assert!(self.now < since + 100_000, "nothing happens");
        }
        (self.now - since, self.take_requests())
    }

    fn take_requests(&mut self) -> Vec<String> {
        let mut asked = std::mem::take(&mut self.requests);
        asked.sort_unstable();
        asked
    }
}

fn space_of_megabytes(megabytes: u64) -> Space {
    Space {
        bytes: megabytes * MB,
        files: 1_000,
    }
}

/// The first job is done, and the next one needs what the first cache holds, which the other
/// pipeline reads yet.
fn blocked_run(node_megabytes: u64, share_megabytes: u64) -> SharedNodeRun {
    blocked_run_of(TURNS_WORKFLOW, node_megabytes, share_megabytes)
}

fn blocked_run_of(text: &str, node_megabytes: u64, share_megabytes: u64) -> SharedNodeRun {
    let mut run = SharedNodeRun::start_run(text, node_megabytes);
    run.set_quota(share_megabytes);
    assert_eq!(run.take_requests(), ["make c0", "make pv0", "start p0"]);
    run
}

const NEXT_REQUESTS: [&str; 4] = ["delete c0", "make c1", "make pv1", "start p1"];

#[test]
fn run_frees_its_own_volumes_at_once() {
    let mut run = blocked_run(11, 11);
    assert_eq!(
        run.end_job(),
        NEXT_REQUESTS,
        "others have nothing that it lacks"
    );
}

#[test]
fn cache_is_dropped_after_waiting_its_refetch_time() {
    let mut run = blocked_run(30, 11);
    assert_eq!(run.end_job(), [""; 0], "others may leave some");
    let (waited, asked) = run.wait_for_request();
    assert_eq!(asked, NEXT_REQUESTS);
    assert!(
        (2_200..2_500).contains(&waited),
        "{waited} ms for 3 MB at 10 MB/s"
    );
}

#[test]
fn costly_cache_is_kept_no_longer_than_scratch() {
    let text = TURNS_WORKFLOW
        .replace("3 MB", "300 MB")
        .replace("7500 KB", "750 MB");
    let mut run = blocked_run_of(&text, 3_000, 1_100);
    assert_eq!(run.end_job(), [""; 0]);
    let (waited, asked) = run.wait_for_request();
    assert_eq!(asked, NEXT_REQUESTS);
    assert!((25_000..25_500).contains(&waited), "{waited} ms");
}

#[test]
fn run_frees_nothing_while_others_hold_the_slots() {
    let mut run = blocked_run(30, 11);
    run.set_quota_with_slots(11, 0);
    assert_eq!(run.end_job(), [""; 0]);
    let since = run.now;
    while run.now < since + 60_000 {
        let next = run.scheduler.next_timer().expect("it looks again");
        run.now = next.0.max(run.now);
        run.apply_event(Event::Tick);
    }
    assert_eq!(run.take_requests(), [""; 0]);
    run.set_quota_with_slots(11, 1);
    let (_, asked) = run.wait_for_request();
    assert_eq!(asked, NEXT_REQUESTS);
}

#[test]
fn space_freed_by_other_runs_is_used() {
    let mut run = blocked_run(30, 11);
    assert_eq!(run.end_job(), [""; 0]);
    run.set_quota(13);
    assert_eq!(run.take_requests(), ["make c1", "make pv1", "start p1"]);
}

/// With less, another run would get the rest, and neither could go on.
#[test]
fn pipeline_keeps_room_for_its_next_cache() {
    let run = blocked_run(30, 30);
    let keep = run
        .scheduler
        .node_demand(NODE)
        .expect("it is there")
        .committed;
    let megabytes = keep.bytes / MB;
    assert_eq!(
        megabytes, 12,
        "two volumes and caches, each with its blocks"
    );
}
