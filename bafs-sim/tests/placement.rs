//! Which node a job gets when several could run it, in virtual time.

use bafs_sched::{Outcome, PolicyNames, Settings, Space};
use bafs_sim::simulated_cluster::{Faults, NodeSpec, SimulatedCluster};
use bafs_workflow::{Workflow, parse_workflow};

fn parse_text(text: &str) -> Workflow {
    let none = |path: &str| Err(path.to_owned());
    parse_workflow("w.bafs", text, &none)
        .expect("it is right")
        .workflow
}

fn node_spec(slots: u32) -> NodeSpec {
    NodeSpec {
        capacity: Space {
            bytes: 100_000_000_000,
            files: 1_000_000,
        },
        slots,
    }
}

/// One job makes a volume that 60 others read.
fn reader_workflow(size: &str) -> Workflow {
    let mut text =
        format!("volume p scratch {size}\njob split {{\nexecutable = x\n}}\nmount p split /p\n");
    for job in 0..60 {
        text += &format!(
            "job r{job} {{\nexecutable = x\n}}\nparent split child r{job}\n\
             mount p r{job} /p ro\n"
        );
    }
    parse_text(&text)
}

fn simulate_elapsed_ms(seed: u64, workflow: Workflow, nodes: Vec<NodeSpec>) -> u64 {
    // Copies take no longer for more bytes in this world, and would teach just that.
    let settings = Settings {
        policies: PolicyNames::default().with("replication", "never"),
        ..Settings::default()
    };
    let mut world = SimulatedCluster::new(seed, workflow, settings, nodes, Faults::default());
    assert_eq!(
        world.run_to_end(10_000_000),
        Outcome::Complete,
        "seed {seed}"
    );
    world.elapsed_ms()
}

/// Each takes 2.5 s on average: 60 of them on two slots 75 s.
#[test]
fn readers_of_a_small_volume_use_all_nodes() {
    for seed in 0..20 {
        let took = simulate_elapsed_ms(seed, reader_workflow("1 MB"), vec![node_spec(2); 6]);
        assert!(took < 40_000, "seed {seed}: {took} ms");
    }
}

#[test]
fn readers_of_a_large_volume_stay_with_it() {
    for seed in 0..20 {
        let took = simulate_elapsed_ms(
            seed,
            reader_workflow("90 GB files 10"),
            vec![node_spec(2); 6],
        );
        assert!(took > 50_000, "seed {seed}: {took} ms");
    }
}

/// 40 jobs that only the large node can run, and that need less than 60 others.
#[test]
fn jobs_awaiting_a_large_node_block_no_others() {
    let mut text = String::new();
    for job in 0..40 {
        text += &format!(
            "job wide{job} {{\nexecutable = x\nrequest_cpus = 32\n}}\n\
             volume w{job} scratch 1 MB\nmount w{job} wide{job} /w\n"
        );
    }
    for job in 0..60 {
        text += &format!(
            "job narrow{job} {{\nexecutable = x\n}}\n\
             volume n{job} scratch 10 MB\nmount n{job} narrow{job} /n\n"
        );
    }
    let workflow = parse_text(&text);
    for seed in 0..20 {
        let mut nodes = vec![node_spec(4); 3];
        nodes.push(node_spec(32));
        // The wide ones take 100 s, one after the other; the narrow ones 13 s beside them.
        let took = simulate_elapsed_ms(seed, workflow.clone(), nodes);
        assert!(took < 125_000, "seed {seed}: {took} ms");
    }
}

/// The only node with slots for one job has room for its volume or for that of another, whose slots
/// others have as well.
#[test]
fn only_fitting_node_keeps_room_for_wide_jobs() {
    let job = |name: &str, cpus: u32, volume: &str, megabytes: u32| {
        format!(
            "volume {volume} scratch {megabytes} MB exact\n\
             job {name} {{\nexecutable = x\nrequest_cpus = {cpus}\n}}\n\
             mount {volume} {name} /{volume}\nmount {volume} last /{volume}\n\
             parent {name} child last\n"
        )
    };
    let small = |megabytes: u64, slots| NodeSpec {
        capacity: Space {
            bytes: megabytes * 1_000_000,
            files: 1_000_000,
        },
        slots,
    };
    let last = "job last {\nexecutable = x\n}\n";
    for jobs in [
        [job("slim", 1, "s", 500), job("wide", 16, "w", 900)],
        [job("wide", 16, "w", 900), job("slim", 1, "s", 500)],
    ] {
        let workflow = parse_text(&format!("{last}{}", jobs.concat()));
        for seed in 0..10 {
            simulate_elapsed_ms(
                seed,
                workflow.clone(),
                vec![small(10_000, 1), small(1_000, 16)],
            );
        }
        // It is told at once when there is no such room.
        let nodes = vec![small(10_000, 1), small(800, 16)];
        let mut world =
            SimulatedCluster::new(0, workflow, Settings::default(), nodes, Faults::default());
        let Outcome::Failed { messages, .. } = world.run_to_end(10_000_000) else {
            panic!("it cannot end");
        };
        let told = ["can never fit", "up to 16 CPUs"];
        assert!(
            told.iter().all(|it| messages[0].contains(it)),
            "{messages:?}"
        );
    }
}
