//! Batch volumes that are declared `warm`, in simulated time: what comes before its readers while
//! others compute.

use bafs_sim::planner::{Environment, NodeClass};
use bafs_sim::simulator::{LoadModel, Policy, Scenario, Simulation, SimulationResult};
use bafs_workflow::{Workflow, parse_workflow};

const GB: u64 = 1_000_000_000;
const MB: u64 = 1_000_000;

/// Four jobs of 1000 s that read 1 GB, then four that read 2 GB and that end at once.
fn two_level_workflow(option: &str, scratch: &str) -> Workflow {
    let mut text = format!(
        "volume x cache bafs://home/x 1 GB files 1\n\
         volume y cache bafs://home/y 2 GB {option} files 1\n"
    );
    for at in 0..4 {
        text += &format!(
            "job a{at} {{\n  executable = x\n  runtime = 1000\n}}\n\
             job c{at} {{\n  executable = x\n}}\nmount x a{at} /x\nmount y c{at} /y\n\
             volume v{at} scratch {scratch} files 1\nmount v{at} a{at} /v\n"
        );
    }
    text += "parent a0 a1 a2 a3 child c0 c1 c2 c3\n";
    let none = |path: &str| Err(path.to_owned());
    let checked = parse_workflow("w.bafs", &text, &none);
    checked.unwrap_or_else(|e| panic!("{e}")).workflow
}

/// Four nodes of one slot behind 1 MB/s.
fn simulate_warming(option: &str, scratch: &str, node_bytes: u64) -> SimulationResult {
    let environment = Environment {
        nodes: vec![NodeClass::new(4, 1, node_bytes)],
        home_bytes_per_s: MB,
        local_bytes_per_s: 1_000 * MB,
        mtbf_s: None,
        restart_s: 60,
    };
    let load = LoadModel::Declared { variability_ppm: 0 };
    let mut scenario = Scenario::new(environment, Policy::Need, load, 1);
    scenario.is_recorded = true;
    let run = Simulation::new(two_level_workflow(option, scratch), scenario).run();
    let run = run.expect("it ends");
    assert!(run.is_complete(), "{:?}", run.outcome);
    run
}

/// 1000 s pass until the first volume is there, 1000 s while its readers compute: the half of the
/// second volume comes meanwhile.
#[test]
fn next_level_is_warmed_while_this_one_computes() {
    let (usual, warmed) = (
        simulate_warming("", "1 MB", 10 * GB),
        simulate_warming("warm", "1 MB", 10 * GB),
    );
    let seconds = |run: &SimulationResult| run.elapsed_us / 1_000_000;
    assert!(
        (4_000..4_020).contains(&seconds(&usual)),
        "{}",
        seconds(&usual)
    );
    assert!(
        (3_000..3_020).contains(&seconds(&warmed)),
        "{}",
        seconds(&warmed)
    );
    for run in [usual, warmed] {
        assert_eq!(run.home_bytes, u128::from(3 * GB));
        assert_eq!(run.fetched_bytes, u128::from(3 * GB));
    }
}

/// While the first volume comes, the second takes nothing of the link.
#[test]
fn warming_delays_no_reader() {
    let ends = |run: &SimulationResult| {
        let spells = run.execution_spans.iter();
        spells
            .map(|s| (s.job, s.end_us))
            .take(4)
            .collect::<Vec<_>>()
    };
    let (usual, warmed) = (
        simulate_warming("", "1 MB", 10 * GB),
        simulate_warming("warm", "1 MB", 10 * GB),
    );
    assert_eq!(ends(&usual), ends(&warmed));
}

/// Scratch volumes of all slots fill the nodes.
#[test]
fn warming_takes_no_room_from_the_current_level() {
    let (usual, warmed) = (
        simulate_warming("", "0.7 GB", 2 * GB),
        simulate_warming("warm", "0.7 GB", 2 * GB),
    );
    assert_eq!(usual.elapsed_us, warmed.elapsed_us);
    assert_eq!(warmed.home_bytes, u128::from(3 * GB));
}
