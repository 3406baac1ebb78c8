//! The end of a run, in simulated time: who goes first when little is left.

use bafs_sim::planner::{Environment, NodeClass};
use bafs_sim::simulator::{LoadModel, Policy, Scenario, Simulation, SimulationResult};
use bafs_workflow::parse_workflow;

const GB: u64 = 1_000_000_000;

/// Pipelines of three jobs of 100 s on four nodes of two slots.
fn simulate_pipelines(pipelines: u32, node_bytes: u64) -> SimulationResult {
    let mut text = String::new();
    for p in 0..pipelines {
        text += &format!("volume v{p} scratch 1 GB files 9\n");
        for stage in 0..3 {
            text += &format!(
                "job j{p}_{stage} {{\n  executable = x\n  runtime = 100\n}}\n\
                 mount v{p} j{p}_{stage} /v\n"
            );
        }
        text += &format!("parent j{p}_0 child j{p}_1\nparent j{p}_1 child j{p}_2\n");
    }
    let none = |path: &str| Err(path.to_owned());
    let workflow = parse_workflow("w.bafs", &text, &none).expect("it is right");
    let environment = Environment {
        nodes: vec![NodeClass::new(4, 2, node_bytes)],
        home_bytes_per_s: GB,
        local_bytes_per_s: 10 * GB,
        mtbf_s: None,
        restart_s: 60,
    };
    let load = LoadModel::Declared { variability_ppm: 0 };
    let scenario = Scenario::new(environment, Policy::Need, load, 1);
    let run = Simulation::new(workflow.workflow, scenario).run();
    let run = run.expect("it ends");
    assert!(run.is_complete(), "{:?}", run.outcome);
    run
}

fn count_rounds(run: &SimulationResult) -> u64 {
    run.elapsed_us.div_ceil(100_000_000)
}

/// One after the other it would run alone for three rounds after the eight others.
#[test]
fn ninth_pipeline_on_eight_slots_starts_early() {
    let run = simulate_pipelines(9, 10 * GB);
    assert!(
        run.elapsed_us < 405_000_000,
        "{} rounds",
        count_rounds(&run)
    );
}

/// Where nodes hold no more pipelines than they have slots, it must wait until one is through.
#[test]
fn ninth_pipeline_without_room_waits() {
    let run = simulate_pipelines(9, 21 * GB / 10);
    assert!(
        run.elapsed_us < 605_000_000,
        "{} rounds",
        count_rounds(&run)
    );
}

/// While much is left, those that have begun go on, so that no more lies on nodes than must.
#[test]
fn begun_pipelines_finish_before_others_start() {
    let run = simulate_pipelines(24, 10 * GB);
    assert!(
        run.elapsed_us < 905_000_000,
        "{} rounds",
        count_rounds(&run)
    );
    assert!(
        run.scratch_bytes_max < 12 * GB,
        "{} B",
        run.scratch_bytes_max
    );
}
