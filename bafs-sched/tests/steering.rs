//! Wishes of users while a run goes on: which pipelines go first, which are given up, and that a
//! replay knows of them.

use bafs_sched::logic::{Event, Outcome, Scheduler, Settings, Space, Wish};
use bafs_sched::workflow::{JobIndex, Workflow, parse_workflow};
use bafs_sched::world::{Faults, NodeSpec, World};

const SEEDS: u64 = 30;
const WIDTH: u32 = 12;

/// Pipelines of two jobs; `a0` is job 0, `b0` job 1, `a1` job 2.
fn workflow() -> Workflow {
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

fn world(seed: u64, nodes: usize) -> World {
    world_of(seed, nodes, workflow())
}

fn world_of(seed: u64, nodes: usize, workflow: Workflow) -> World {
    let node = NodeSpec {
        capacity: Space {
            bytes: 100_000_000,
            files: 100_000,
        },
        slots: 1,
    };
    let (settings, faults) = (Settings::default(), Faults::default());
    World::new(seed, workflow, settings, vec![node; nodes], faults)
}

fn steered(count: u64, wish: Wish) -> Event {
    Event::Steered {
        count,
        wish: Some(wish),
    }
}

/// Jobs in the order in which they ended.
fn ended(world: &World) -> Vec<String> {
    ended_of(world, &workflow())
}

fn ended_of(world: &World, workflow: &Workflow) -> Vec<String> {
    let (run, settings) = (world.scheduler.run(), world.scheduler.settings());
    let mut scheduler = Scheduler::new(run, workflow.clone(), settings.clone());
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
fn a_preferred_pipeline_goes_first() {
    for seed in 0..SEEDS {
        let mut world = world(seed, 1);
        let wish = Wish::Prefer {
            job: JobIndex(2 * (WIDTH - 1)),
            priority: 5,
        };
        world.tell_at(3_000, steered(1, wish));
        assert_eq!(world.run(10_000_000), Outcome::Complete, "seed {seed}");
        let ended = ended(&world);
        let place = |name: &str| ended.iter().position(|job| job == name);
        assert!(place("b11") < Some(10), "seed {seed}: {ended:?}");
        assert!(place("b11") < place("b10"), "seed {seed}: {ended:?}");
    }
}

#[test]
fn the_workflow_says_which_pipelines_go_first() {
    for seed in 0..SEEDS {
        let mut preferred = workflow();
        preferred.jobs[2 * (WIDTH as usize - 1) + 1].priority = 5;
        preferred.jobs[0].priority = -1;
        preferred.jobs[1].priority = -2;
        let mut world = world_of(seed, 1, preferred);
        assert_eq!(world.run(10_000_000), Outcome::Complete, "seed {seed}");
        let ended = ended_of(&world, &world.scheduler.workflow().clone());
        assert_eq!(&ended[..2], ["a11", "b11"], "seed {seed}: {ended:?}");
        assert_eq!(ended[22..], ["a0", "b0"], "seed {seed}: {ended:?}");
    }
}

#[test]
fn a_cancelled_pipeline_is_given_up_and_the_others_finish() {
    for seed in 0..SEEDS {
        let mut world = world(seed, 3);
        // One that runs, and one that waits.
        let cancel = |job| Wish::Cancel { job: JobIndex(job) };
        world.tell_at(2_000, steered(1, cancel(0)));
        world.tell_at(2_000, steered(2, cancel(2 * (WIDTH - 1) + 1)));
        let Outcome::Failed { jobs, messages } = world.run(10_000_000) else {
            panic!("seed {seed}: it is not complete");
        };
        assert_eq!(
            (jobs.len(), messages.len()),
            (0, 2),
            "seed {seed}: {messages:?}"
        );
        assert!(messages[0].contains("'a0'"), "{messages:?}");
        assert!(messages[1].contains("'a11'"), "{messages:?}");
        assert_eq!(world.home.len(), WIDTH as usize - 2, "seed {seed}");
        assert_eq!(world.scheduler.wishes(), 2);
        ended(&world);
    }
}

#[test]
fn a_wish_for_a_job_that_is_not_there_does_nothing() {
    let mut world = world(1, 2);
    let job = JobIndex(10_000);
    world.tell_at(1_000, steered(1, Wish::Cancel { job }));
    assert_eq!(world.run(10_000_000), Outcome::Complete);
}
