//! The ledger of where time went, over simulated runs with and without faults.

use bafs_sched::goodput::compute_goodput;
use bafs_sched::io::journal::{History, JournalHeader};
use bafs_sched::timeline::{ExecutionOutcome, Timeline, build_timeline};
use bafs_sched::{JobState, NullSelector, Outcome, PolicyNames, Settings, Space};
use bafs_sim::seeded_rng::SeededRng;
use bafs_sim::simulated_cluster::{Faults, NodeSpec, SimulatedCluster};
use bafs_workflow::{Workflow, parse_workflow};

fn chain_workflow(width: u32, depth: u32) -> Workflow {
    let mut text = "volume batch bafs://home/data 5 MB\n".to_owned();
    for i in 0..width {
        for at in 0..=depth {
            text += &format!("volume v{i}_{at} scratch 1 MB files 10\n");
        }
        for at in 0..depth {
            let job = format!("j{i}_{at}");
            text += &format!("job {job} {{\n  executable = /bin/true\n  retry = 3\n}}\n");
            text += &format!(
                "mount batch {job} /data\nmount v{i}_{} {job} /out\n",
                at + 1
            );
            if at > 0 {
                text += &format!("parent j{i}_{} child {job}\n", at - 1);
                text += &format!("mount v{i}_{at} {job} /in ro\n");
            }
        }
        text += &format!("extract v{i}_{depth} out bafs://home/out.{i}\n");
    }
    parse_workflow("w.bafs", &text, &|path| Err(path.to_owned()))
        .expect("it parses")
        .workflow
}

fn run_with_faults(seed: u64, faults: Faults) -> (Workflow, Timeline) {
    let mut rng = SeededRng::new(seed);
    let workflow = chain_workflow(1 + rng.next_below(5) as u32, 1 + rng.next_below(4) as u32);
    let settings = Settings {
        environment_faults_max: 1_000,
        killed_nodes_max: 1_000,
        nodes_timeout_ms: 300_000,
        space_timeout_ms: 300_000,
        policies: PolicyNames::default().with("replication", "always"),
        ..Settings::default()
    };
    let node = NodeSpec {
        capacity: Space {
            bytes: 40_000_000,
            files: 10_000,
        },
        slots: 2,
    };
    let nodes = vec![node; 3];
    let mut world = SimulatedCluster::new(seed, workflow.clone(), settings.clone(), nodes, faults);
    assert_eq!(world.run_to_end(4 * 3_600_000), Outcome::Complete);
    let run = world.scheduler.run();
    let header = JournalHeader {
        run,
        workflow: workflow.clone().into(),
        settings,
    };
    let records = world.records;
    (
        workflow,
        build_timeline(
            History::decide(header, records, &NullSelector),
            &NullSelector,
        ),
    )
}

#[test]
fn goodput_columns_sum_to_each_jobs_time() {
    let (mut lost, mut copied) = (0, 0);
    for seed in 0..100 {
        let faults = Faults {
            node_dies: 20,
            node_wiped: 500,
            reply_lost: 20,
            job_fails: 100,
            environment_fails: 50,
            volume_vanishes: 5,
            until_ms: 60_000,
            ..Faults::default()
        };
        let (workflow, timeline) = run_with_faults(seed, faults);
        let ledger = compute_goodput(&workflow, &timeline);
        for job in &ledger.jobs {
            assert_eq!(job.account.sum_ms(), job.wall_ms, "seed {seed}: {job:?}");
        }
        let done = timeline
            .executions
            .iter()
            .filter(|e| e.outcome == ExecutionOutcome::Done);
        assert_eq!(done.count(), timeline.jobs.len(), "seed {seed}");
        assert!(timeline.jobs.iter().all(|job| job.state == JobState::Done));
        assert_eq!(
            timeline.progress.executions,
            timeline.executions.len() as u64
        );
        let was_again = timeline.executions.len() > timeline.jobs.len();
        assert_eq!(ledger.total.lost_ms > 0, was_again, "seed {seed}");
        lost += ledger.total.lost_ms;
        copied += timeline.copy_decisions.len();
    }
    assert!(
        lost > 0 && copied > 0,
        "nothing failed, so nothing was tested"
    );
}

#[test]
fn faultless_run_only_computes_and_loses_nothing() {
    let (workflow, timeline) = run_with_faults(7, Faults::default());
    let ledger = compute_goodput(&workflow, &timeline);
    let ran: u64 = timeline.executions.iter().map(|e| e.wall_ms).sum();
    assert_eq!(ledger.total.computing_ms, ran);
    assert_eq!(ledger.total.lost_ms, 0);
    assert!(ledger.total.copying_ms > 0, "files were sent home");
    assert!(ledger.slot_ms >= ran && ledger.goodput_permille > 0);
    let sent = timeline.extract_attempts.iter().all(|s| s.bytes.is_some());
    assert!(sent && !timeline.extract_attempts.is_empty());
}

#[test]
fn job_with_all_slots_counts_as_full_use() {
    let mut text = String::new();
    for job in 0..20 {
        text += &format!("job j{job} {{\nexecutable = x\nrequest_cpus = 4\n}}\n");
    }
    let parsed = parse_workflow("w.bafs", &text, &|path| Err(path.to_owned()));
    let workflow = parsed.expect("it parses").workflow;
    let (settings, capacity) = (Settings::default(), Space::ZERO);
    let nodes = vec![NodeSpec { capacity, slots: 4 }];
    let faults = Faults::default();
    let mut world = SimulatedCluster::new(1, workflow.clone(), settings.clone(), nodes, faults);
    assert_eq!(world.run_to_end(1_000_000), Outcome::Complete);
    let header = JournalHeader {
        run: world.scheduler.run(),
        workflow: workflow.clone().into(),
        settings,
    };
    let records = world.records;
    let timeline = build_timeline(
        History::decide(header, records, &NullSelector),
        &NullSelector,
    );
    let used = compute_goodput(&workflow, &timeline).goodput_permille;
    assert!((700..=1_000).contains(&used), "{used} permille");
    assert!(
        timeline
            .executions
            .iter()
            .all(|execution| execution.slots == 4)
    );
}
