//! What a job waits for, in words.

use bafs_proto::ids::{RunId, ServerId};
use bafs_proto::time::Time;
use bafs_sched::replay::describe_status;
use bafs_sched::{
    Action, Event, JobState, NodeInfo, RunQuota, Scheduler, Settings, Space, UserCommand,
};
use bafs_workflow::{JobIndex, parse_workflow};

#[test]
fn status_names_missing_resources_and_node_usage() {
    let job = |name: &str| format!("job {name} {{\nexecutable = x\n}}\n");
    let text = ["a", "b", "c"].map(job).concat()
        + "parent a child b\nvolume v scratch 60 MB files 9\nvolume w scratch 60 MB files 9\n\
           mount v a /v\nmount v b /v ro\nmount w c /w\n";
    let none = |path: &str| Err(path.to_owned());
    let parsed = parse_workflow("w.bafs", &text, &none).expect("it is right");
    let mut scheduler = Scheduler::new(RunId(0), parsed.workflow, Settings::default());
    let told =
        |scheduler: &Scheduler, name: &str| describe_status(scheduler, name).unwrap_or_default();
    assert!(
        told(&scheduler, "a").contains("no node"),
        "nothing is there"
    );
    let see = |scheduler: &mut Scheduler, now, slots| {
        let capacity = Space {
            bytes: 100_000_000,
            files: 1_000,
        };
        let nodes = vec![NodeInfo::single_group(ServerId(1), capacity, slots)];
        scheduler.step(Time(now), Event::nodes_listed(nodes), &mut Vec::new());
    };
    see(&mut scheduler, 0, 1);
    let expected = "job 'a' does not run: it waits until node n1 has made volume 'v'";
    assert_eq!(told(&scheduler, "a"), expected);
    assert!(told(&scheduler, "b").contains("waits for 'a' to finish"));
    assert!(told(&scheduler, "c").contains("1 free slot on the only node"));
    see(&mut scheduler, 1, 2);
    let c = told(&scheduler, "c");
    assert!(
        c.contains("waits for space") && c.contains("60.0 MB"),
        "{c}"
    );
    let node = told(&scheduler, "n1");
    assert!(node.contains("1 of 2 slots in use"), "{node}");
}

#[test]
fn waiting_job_names_slots_of_other_runs() {
    let text = "job a {\nexecutable = x\nrequest_cpus = 2\n}\n";
    let none = |path: &str| Err(path.to_owned());
    let parsed = parse_workflow("w.bafs", text, &none).expect("it is right");
    let settings = Settings {
        user: Some("me".to_owned()),
        ..Settings::default()
    };
    let mut scheduler = Scheduler::new(RunId(0), parsed.workflow, settings);
    let space = Space {
        bytes: 100_000_000,
        files: 1_000,
    };
    let nodes = [1, 2].map(|id| NodeInfo::single_group(ServerId(id), space, 2));
    scheduler.step(
        Time(0),
        Event::nodes_listed(nodes.to_vec()),
        &mut Vec::new(),
    );
    let told = |scheduler: &Scheduler| describe_status(scheduler, "a").unwrap_or_default();
    let before = told(&scheduler);
    assert!(
        before.contains("2 free slots on one of 2 nodes"),
        "{before}"
    );
    assert!(!before.contains("other runs"), "nobody was asked yet");
    let share = RunQuota {
        server: ServerId(1),
        space,
        slots: 1,
        is_shared: true,
        is_above_fair_share: false,
    };
    let shares = vec![share];
    scheduler.step(
        Time(1),
        Event::QuotasChanged { quotas: shares },
        &mut Vec::new(),
    );
    let after = told(&scheduler);
    assert!(
        after.contains("other runs hold the needed slots of 1 node"),
        "{after}"
    );
}

#[test]
fn unstarted_job_explains_itself_after_the_end() {
    let text = "job a {\nexecutable = x\n}\njob b {\nexecutable = x\n}\nparent a child b\n";
    let none = |path: &str| Err(path.to_owned());
    let parsed = parse_workflow("w.bafs", text, &none).expect("it is right");
    let settings = Settings::default();
    let wait_ms = settings.nodes_timeout_ms;
    let mut scheduler = Scheduler::new(RunId(0), parsed.workflow, settings);
    for now in [0, wait_ms] {
        scheduler.step(Time(now), Event::Tick, &mut Vec::new());
    }
    assert!(scheduler.outcome().is_some(), "no node came");
    let told = |name: &str| describe_status(&scheduler, name).unwrap_or_default();
    assert!(
        told("a").contains("the catalog lists no node"),
        "{}",
        told("a")
    );
    let b = told("b");
    assert!(
        b.contains("waits for 'a'") && b.contains("the catalog lists no node"),
        "{b}"
    );
}

/// Two jobs that write a volume one after the other: each is among the users of what the other has.
#[test]
fn cancelled_pipeline_names_only_the_cancelled_job() {
    let text = "job a {\nexecutable = x\n}\njob b {\nexecutable = x\n}\nparent a child b\n\
                volume v scratch 1 MB\nmount v a /v\nmount v b /v\n";
    let none = |path: &str| Err(path.to_owned());
    let parsed = parse_workflow("w.bafs", text, &none).expect("it is right");
    let mut scheduler = Scheduler::new(RunId(0), parsed.workflow, Settings::default());
    scheduler.step(Time(0), Event::Tick, &mut Vec::new());
    let cancel = Event::CommandReceived {
        count: 1,
        command: Some(UserCommand::Cancel { job: JobIndex(0) }),
    };
    scheduler.step(Time(1), cancel, &mut Vec::new());
    let told = |name: &str| describe_status(&scheduler, name).unwrap_or_default();
    assert!(told("a").ends_with(": it was cancelled"), "{}", told("a"));
    let b = told("b");
    assert!(b.ends_with("'a', which was cancelled"), "{b}");
}

#[test]
fn unfinished_jobs_report_the_cancelled_run() {
    let text = "job a {\nexecutable = x\n}\n";
    let none = |path: &str| Err(path.to_owned());
    let parsed = parse_workflow("w.bafs", text, &none).expect("it is right");
    let mut scheduler = Scheduler::new(RunId(0), parsed.workflow, Settings::default());
    for (now, event) in [(0, Event::Tick), (1, Event::CancelRequested)] {
        scheduler.step(Time(now), event, &mut Vec::new());
    }
    let told = describe_status(&scheduler, "a").unwrap_or_default();
    assert!(told.contains("the run was cancelled"), "{told}");
}

fn one_node_scheduler(text: &str, slots: u32) -> Scheduler {
    let none = |path: &str| Err(path.to_owned());
    let parsed = parse_workflow("w.bafs", text, &none).expect("it is right");
    let mut scheduler = Scheduler::new(RunId(0), parsed.workflow, Settings::default());
    scheduler.start_recording();
    let capacity = Space {
        bytes: 100_000_000,
        files: 1_000,
    };
    let nodes = vec![NodeInfo::single_group(ServerId(1), capacity, slots)];
    command(
        &mut scheduler,
        0,
        1,
        UserCommand::Hold {
            job: Some(JobIndex(0)),
        },
    );
    scheduler.step(Time(1), Event::nodes_listed(nodes), &mut Vec::new());
    scheduler
}

fn command(scheduler: &mut Scheduler, at: u64, count: u64, command: UserCommand) -> usize {
    let command = Some(command);
    let mut actions = Vec::new();
    scheduler.step(
        Time(at),
        Event::CommandReceived { count, command },
        &mut actions,
    );
    let is_start = |action: &&Action| matches!(action, Action::StartJob { .. });
    actions.iter().filter(is_start).count()
}

#[test]
fn held_pipeline_starts_after_its_release() {
    let text = "job a {\nexecutable = x\n}\njob b {\nexecutable = x\n}\n";
    let mut scheduler = one_node_scheduler(text, 2);
    let states = |scheduler: &Scheduler| [0, 1].map(|job| scheduler.job_state(JobIndex(job)));
    assert_eq!(states(&scheduler), [JobState::Ready, JobState::Active]);
    let told = describe_status(&scheduler, "a").unwrap_or_default();
    assert!(told.contains("the user holds its pipeline"), "{told}");
    // It waits for the user, for however long.
    let day_ms = 24 * 3_600_000;
    scheduler.step(Time(day_ms), Event::Tick, &mut Vec::new());
    assert_eq!(scheduler.outcome(), None);
    assert_eq!(states(&scheduler)[0], JobState::Ready);
    let release = UserCommand::Release {
        job: Some(JobIndex(0)),
    };
    assert_eq!(command(&mut scheduler, day_ms + 1, 2, release), 1);
    assert_eq!(states(&scheduler)[0], JobState::Active);
}

#[test]
fn held_run_starts_no_job_after_recovery() {
    let text =
        "job a {\nexecutable = x\n}\njob b {\nexecutable = x\n}\njob c {\nexecutable = x\n}\n";
    let mut scheduler = one_node_scheduler(text, 1);
    assert_eq!(
        command(&mut scheduler, 2, 2, UserCommand::Hold { job: None }),
        0
    );
    let mut restored = one_node_scheduler(text, 1);
    restored.redo(&scheduler.snapshot());
    restored.finish_redo();
    scheduler.check_restored(&restored);
    assert!(restored.is_run_held());
    let told = describe_status(&restored, "c").unwrap_or_default();
    assert!(told.contains("the user holds the run"), "{told}");
    // The release of all is one of pipelines that were held one by one, too.
    command(&mut restored, 3, 3, UserCommand::Release { job: None });
    assert!(!restored.is_held(JobIndex(0)) && !restored.is_held(JobIndex(2)));
}
