//! Wishes of users while a run goes on: which pipelines go first, which are given up, and that a
//! replay knows of them.

use bafs_sched::{Event, Outcome, Scheduler, Settings, Space, UserCommand};
use bafs_sim::simulated_cluster::{Faults, NodeSpec, SimulatedCluster};
use bafs_workflow::{JobIndex, Workflow, parse_workflow};

const SEEDS: u64 = 30;
const WIDTH: u32 = 12;

/// Pipelines of two jobs; `a0` is job 0, `b0` job 1, `a1` job 2.
fn pair_workflow() -> Workflow {
    let mut text = String::new();
    for p in 0..WIDTH {
        text += &format!(
            "job a{p} JOB\njob b{p} JOB\nparent a{p} child b{p}\nvolume v{p} scratch 1 MB\n\
             mount v{p} a{p} /v\nmount v{p} b{p} /v\nextract v{p} out bafs://home/out.{p}\n"
        );
    }
    let text = text.replace("JOB", "{\n  executable = x\n}");
    let none = |path: &str| Err(path.to_owned());
    parse_workflow("w.bafs", &text, &none)
        .expect("it is right")
        .workflow
}

fn cluster_for_seed(seed: u64, nodes: usize) -> SimulatedCluster {
    cluster_for_workflow(seed, nodes, pair_workflow())
}

fn cluster_for_workflow(seed: u64, nodes: usize, workflow: Workflow) -> SimulatedCluster {
    let node = NodeSpec {
        capacity: Space {
            bytes: 100_000_000,
            files: 100_000,
        },
        slots: 1,
    };
    let (settings, faults) = (Settings::default(), Faults::default());
    SimulatedCluster::new(seed, workflow, settings, vec![node; nodes], faults)
}

fn command_event(count: u64, stop_request: UserCommand) -> Event {
    Event::CommandReceived {
        count,
        command: Some(stop_request),
    }
}

/// Jobs in the order in which they ended.
fn ended_jobs(world: &SimulatedCluster) -> Vec<String> {
    ended_jobs_of(world, &pair_workflow())
}

fn ended_jobs_of(world: &SimulatedCluster, workflow: &Workflow) -> Vec<String> {
    let (run, settings) = (world.scheduler.run(), world.scheduler.settings());
    let mut scheduler = Scheduler::new(run, workflow.clone(), settings.clone());
    // Records of finished jobs are made for a journal alone.
    scheduler.start_recording();
    let mut ended = Vec::new();
    for (now, event) in &world.records {
        if let Event::JobEnded { execution, .. } = event
            && let Some((job, _)) = scheduler.execution(*execution)
        {
            ended.push(scheduler.workflow().job(job).name.clone());
        }
        scheduler.step(*now, event.clone(), &mut Vec::new());
    }
    assert!(scheduler == world.scheduler, "a replay comes to the same");
    ended
}

#[test]
fn preferred_pipeline_runs_first() {
    for seed in 0..SEEDS {
        let mut world = cluster_for_seed(seed, 1);
        let stop_request = UserCommand::SetPriority {
            job: JobIndex(2 * (WIDTH - 1)),
            priority: 5,
        };
        world.schedule_event(3_000, command_event(1, stop_request));
        assert_eq!(
            world.run_to_end(10_000_000),
            Outcome::Complete,
            "seed {seed}"
        );
        let ended = ended_jobs(&world);
        let place = |name: &str| ended.iter().position(|job| job == name);
        assert!(place("b11") < Some(10), "seed {seed}: {ended:?}");
        assert!(place("b11") < place("b10"), "seed {seed}: {ended:?}");
    }
}

#[test]
fn workflow_priorities_order_the_pipelines() {
    for seed in 0..SEEDS {
        let mut preferred = pair_workflow();
        preferred.jobs[2 * (WIDTH as usize - 1) + 1].priority = 5;
        preferred.jobs[0].priority = -1;
        preferred.jobs[1].priority = -2;
        let mut world = cluster_for_workflow(seed, 1, preferred);
        assert_eq!(
            world.run_to_end(10_000_000),
            Outcome::Complete,
            "seed {seed}"
        );
        let ended = ended_jobs_of(&world, &world.scheduler.workflow().clone());
        assert_eq!(&ended[..2], ["a11", "b11"], "seed {seed}: {ended:?}");
        assert_eq!(ended[22..], ["a0", "b0"], "seed {seed}: {ended:?}");
    }
}

#[test]
fn cancelling_a_pipeline_lets_the_others_finish() {
    for seed in 0..SEEDS {
        let mut world = cluster_for_seed(seed, 3);
        // One that runs, and one that waits.
        let cancel = |job| UserCommand::Cancel { job: JobIndex(job) };
        world.schedule_event(2_000, command_event(1, cancel(0)));
        world.schedule_event(2_000, command_event(2, cancel(2 * (WIDTH - 1) + 1)));
        let Outcome::Failed { jobs, messages } = world.run_to_end(10_000_000) else {
            panic!("seed {seed}: it is not complete");
        };
        assert_eq!(
            (jobs.len(), messages.len()),
            (0, 2),
            "seed {seed}: {messages:?}"
        );
        assert!(messages[0].contains("'a0'"), "{messages:?}");
        assert!(messages[1].contains("'a11'"), "{messages:?}");
        assert_eq!(
            world.extract_arrivals.len(),
            WIDTH as usize - 2,
            "seed {seed}"
        );
        assert_eq!(world.scheduler.commands_received(), 2);
        ended_jobs(&world);
    }
}

#[test]
fn command_for_a_missing_job_does_nothing() {
    let mut world = cluster_for_seed(1, 2);
    let job = JobIndex(10_000);
    world.schedule_event(1_000, command_event(1, UserCommand::Cancel { job }));
    assert_eq!(world.run_to_end(10_000_000), Outcome::Complete);
}
