//! What a job's report says of volumes where nobody counts operations, and of those that a job only
//! looked at: zeros there are no facts.

use bafs_proto::ids::{ExecutionId, RunId, ServerId};
use bafs_proto::job_report::VolumeUse;
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_proto::time::Time;
use bafs_sched::{Action, Event, NodeInfo, Scheduler, Settings, Space};
use bafs_workflow::parse_workflow;

const MB: u64 = 1_000_000;

/// Jobs a and b write a volume one after the other.
const CHAIN_WORKFLOW: &str = "volume w scratch 16 MB watched\njob a {\nexecutable = x\n}\n\
    job b {\nexecutable = x\nretry = 1\n}\nparent a child b\nmount w a /w\nmount w b /w\n";

struct UncountedRun {
    scheduler: Scheduler,
    now: u64,
    /// What was asked for since the last look.
    requested_actions: Vec<Action>,
}

impl UncountedRun {
    fn new(text: &str) -> Self {
        let none = |path: &str| Err(path.to_owned());
        let parsed = parse_workflow("w.bafs", text, &none).expect("it is right");
        let scheduler = Scheduler::new(RunId(1), parsed.workflow, Settings::default());
        let mut run = Self {
            scheduler,
            now: 0,
            requested_actions: Vec::new(),
        };
        let space = Space {
            bytes: 1_000 * MB,
            files: 100_000,
        };
        run.apply_event(Event::nodes_listed(vec![NodeInfo::single_group(
            ServerId(1),
            space,
            1,
        )]));
        run
    }

    /// Tells a fact; volumes are made and deleted as soon as that is asked for.
    fn apply_event(&mut self, event: Event) {
        self.now += 10;
        let mut actions = Vec::new();
        self.scheduler.step(Time(self.now), event, &mut actions);
        for action in actions {
            let done = match &action {
                Action::CreateVolume { id, .. } => Some(Event::VolumeCreated { volume: *id }),
                Action::DeleteVolume { id, .. } => Some(Event::VolumeDeleted { volume: *id }),
                _ => None,
            };
            self.requested_actions.push(action);
            done.into_iter().for_each(|event| self.apply_event(event));
        }
    }

    /// The job that was started last, by name.
    fn take_started(&mut self) -> Option<(String, ExecutionId)> {
        let asked = std::mem::take(&mut self.requested_actions);
        let started = asked.iter().rev().find_map(|action| match action {
            Action::StartJob { execution, job, .. } => Some((*execution, *job)),
            _ => None,
        });
        let (execution, job) = started?;
        let name = self.scheduler.workflow().job(job).name.clone();
        self.apply_event(Event::JobStarted { execution });
        Some((name, execution))
    }

    /// The job of this name runs and ends so.
    fn end_job(&mut self, job: &str, code: i32, tail: &str, used: &VolumeUse) {
        let (name, execution) = self.take_started().expect("a job starts");
        assert_eq!(name, job);
        let report = JobReport {
            outcome: JobOutcome::Exited(code),
            wall_ms: 1,
            cpu_ms: 1,
            memory_bytes_max: 0,
            output_tail: tail.to_owned(),
            volumes: vec![used.clone()],
        };
        self.apply_event(Event::JobEnded { execution, report });
    }

    fn pass_time(&mut self, ms: u64) {
        self.now += ms;
        self.apply_event(Event::Tick);
    }

    fn warning_texts(&self) -> String {
        let warnings = self.scheduler.warnings().iter();
        warnings
            .map(|warning| format!("{}\n", warning.text))
            .collect()
    }
}

fn uncounted_use(changes: u64) -> VolumeUse {
    VolumeUse {
        name: "w".to_owned(),
        has_no_counts: true,
        changes,
        used_bytes: MB,
        used_files: 1,
        disk_free_bytes: Some(10_000 * MB),
        ..VolumeUse::default()
    }
}

#[test]
fn looked_at_volume_counts_as_used() {
    let text = CHAIN_WORKFLOW.replace(" watched", "");
    for (looked, is_warned) in [(0, true), (1, false)] {
        let mut run = UncountedRun::new(&text);
        let used = VolumeUse {
            metadata_ops: looked,
            name: "w".to_owned(),
            ..VolumeUse::default()
        };
        run.end_job("a", 0, "", &used);
        assert_eq!(
            run.warning_texts().contains("did not use volume 'w'"),
            is_warned
        );
    }
}

#[test]
fn uncounted_volume_is_never_called_unused() {
    let mut run = UncountedRun::new(CHAIN_WORKFLOW);
    run.end_job("a", 0, "", &uncounted_use(0));
    run.end_job("b", 0, "", &uncounted_use(0));
    assert_eq!(run.warning_texts(), "");
}

#[test]
fn own_failure_keeps_an_untouched_watched_volume() {
    for (changes, next) in [(0, "b"), (1, "a")] {
        let mut run = UncountedRun::new(CHAIN_WORKFLOW);
        run.end_job("a", 0, "", &uncounted_use(1));
        run.end_job("b", 3, "", &uncounted_use(changes));
        run.pass_time(1_000);
        let (name, _) = run.take_started().expect("it is tried again");
        assert_eq!(name, next, "changes: {changes}");
    }
}

#[test]
fn full_disk_under_watched_volumes_blames_no_job() {
    let full = |free: u64| VolumeUse {
        disk_free_bytes: Some(free),
        ..uncounted_use(1)
    };
    let said = "head: error writing 'standard output': No space left on device";
    for (used, tail) in [(full(0), ""), (full(50 * MB), said)] {
        let mut run = UncountedRun::new(&CHAIN_WORKFLOW.replace("\nretry = 1", ""));
        run.end_job("a", 1, tail, &used);
        let told = run.warning_texts();
        for part in [
            "'a' failed and runs again",
            "limit of 16.0 MB",
            "the disk of node",
        ] {
            assert!(told.contains(part), "{part} is not in: {told}");
        }
        run.pass_time(10_000);
        run.end_job("a", 0, "", &uncounted_use(1));
        assert_eq!(run.scheduler.outcome(), None);
    }
    // With room on the disk it is its own, whatever it says.
    for tail in ["", said] {
        let mut run = UncountedRun::new(CHAIN_WORKFLOW);
        run.end_job("a", 1, tail, &uncounted_use(1));
        assert!(run.scheduler.outcome().is_some(), "{}", run.warning_texts());
    }
}
