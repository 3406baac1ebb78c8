//! Jobs and nodes that fail again and again, in virtual time with seeds: whose fault it is decides
//! what happens, and whoever is set aside or held is named.

use bafs_proto::ids::{RunId, ServerId};
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode};
use bafs_sched::{Action, Event, NodeInfo, Outcome, Scheduler, Settings, Space};
use bafs_sim::simulated_cluster::{Faults, NodeSpec, SimulatedCluster};
use bafs_workflow::{JobIndex, Workflow, parse_workflow};

const SEEDS: u64 = 50;

/// So many jobs that depend on nothing, each with a volume of its own.
fn independent_jobs(jobs: u32, retries: u32) -> Workflow {
    let mut text = String::new();
    for job in 0..jobs {
        text += &format!(
            "job j{job} {{\n  executable = x\n  retry = {retries}\n}}\nvolume v{job} scratch 1 MB\n\
             mount v{job} j{job} /v\nextract v{job} out bafs://home/out.{job}\n"
        );
    }
    let none = |path: &str| Err(path.to_owned());
    parse_workflow("w.bafs", &text, &none)
        .expect("it is right")
        .workflow
}

fn faulty_cluster(seed: u64, workflow: Workflow, faults: Faults) -> SimulatedCluster {
    let node = NodeSpec {
        capacity: Space {
            bytes: 1_000_000_000,
            files: 1_000_000,
        },
        slots: 1,
    };
    SimulatedCluster::new(seed, workflow, Settings::default(), vec![node; 4], faults)
}

fn warning_texts(world: &SimulatedCluster) -> String {
    let texts = world
        .scheduler
        .warnings()
        .iter()
        .map(|warning| &*warning.text);
    texts.collect::<Vec<_>>().join("\n")
}

#[test]
fn only_failing_node_is_quarantined() {
    for seed in 0..SEEDS {
        let faults = Faults {
            poison_node: Some(ServerId(2)),
            ..Faults::default()
        };
        let mut world = faulty_cluster(seed, independent_jobs(60, 2), faults);
        assert_eq!(
            world.run_to_end(10_000_000),
            Outcome::Complete,
            "seed {seed}"
        );
        let told = warning_texts(&world);
        assert!(
            told.contains("node n2 fails jobs that succeed on other nodes"),
            "{told}"
        );
        let progress = world.scheduler.progress();
        let again = progress.executions - progress.jobs_total;
        // Without setting it aside, a quarter of all first starts would fail.
        assert!(
            (3..10).contains(&again),
            "seed {seed}: {again} jobs ran again"
        );
    }
}

#[test]
fn job_killing_every_node_is_held_alone() {
    for seed in 0..SEEDS {
        let faults = Faults {
            poison_job: Some(JobIndex(5)),
            ..Faults::default()
        };
        let mut world = faulty_cluster(seed, independent_jobs(30, 0), faults);
        let outcome = world.run_to_end(10_000_000);
        let Outcome::Failed { jobs, .. } = outcome else {
            panic!("seed {seed}: {outcome:?}");
        };
        let names: Vec<&str> = jobs.iter().map(|failure| &*failure.name).collect();
        assert_eq!(names, ["j5"], "seed {seed}");
        assert!(
            jobs[0].reason.starts_with("is held: every node was lost"),
            "{}",
            jobs[0].reason
        );
        assert_eq!(world.scheduler.progress().jobs_done, 29, "seed {seed}");
        assert_eq!(world.extract_arrivals.len(), 29);
    }
}

#[test]
fn faulty_job_runs_exactly_its_declared_retries() {
    for seed in 0..SEEDS {
        // On the only node that there is, so that the node is not blamed.
        let faults = Faults {
            poison_node: Some(ServerId(1)),
            ..Faults::default()
        };
        let node = NodeSpec {
            capacity: Space {
                bytes: 100_000_000,
                files: 100_000,
            },
            slots: 2,
        };
        let nodes = vec![node];
        let mut world = SimulatedCluster::new(
            seed,
            independent_jobs(1, 2),
            Settings::default(),
            nodes,
            faults,
        );
        let Outcome::Failed { jobs, .. } = world.run_to_end(10_000_000) else {
            panic!("seed {seed}: it cannot succeed");
        };
        assert_eq!(jobs[0].reason, "exited with code 1");
        assert_eq!(world.scheduler.progress().executions, 3);
    }
}

#[test]
fn job_with_endless_environment_failures_is_held() {
    const HOUR_MS: u64 = 3_600_000;
    let none = |path: &str| Err(path.to_owned());
    let parsed = parse_workflow("w.bafs", "job a {\nexecutable = x\n}\n", &none);
    let workflow = parsed.expect("it is right").workflow;
    let mut scheduler = Scheduler::new(RunId(1), workflow, Settings::default());
    let capacity = Space {
        bytes: 1_000_000,
        files: 1_000,
    };
    let mut fact = Event::nodes_listed(vec![NodeInfo::single_group(ServerId(1), capacity, 1)]);
    let mut starts = 0;
    for hour in 1.. {
        let mut actions = Vec::new();
        scheduler.step(Time(hour * HOUR_MS), fact, &mut actions);
        assert!(starts < 1_000, "it runs without end");
        fact = Event::Tick;
        for action in actions {
            match action {
                Action::StartJob { execution, .. } => {
                    starts += 1;
                    let error = Error::new(ErrorCode::Unreachable, "no answer");
                    let report = JobReport {
                        outcome: JobOutcome::EnvironmentFailed(error),
                        wall_ms: HOUR_MS,
                        cpu_ms: 1,
                        memory_bytes_max: 0,
                        output_tail: String::new(),
                        volumes: Vec::new(),
                    };
                    fact = Event::JobEnded { execution, report };
                }
                Action::Finish { outcome } => {
                    let Outcome::Failed { jobs, .. } = outcome else {
                        panic!("{outcome:?}");
                    };
                    let reason = &jobs[0].reason;
                    assert!(
                        reason.contains("its environment failed 100 times"),
                        "{reason}"
                    );
                    assert_eq!(starts, 100);
                    return;
                }
                _ => {}
            }
        }
    }
}
