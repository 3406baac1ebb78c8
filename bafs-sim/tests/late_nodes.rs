//! Simulated nodes that are not there from the beginning.

use bafs_sim::planner::{Environment, NodeClass};
use bafs_sim::simulator::{LoadModel, Policy, Scenario, Simulation, SimulationResult};
use bafs_workflow::parse_workflow;

const WIDE_JOB: &str = "job wide {\nexecutable = x\nruntime = 60 s\nrequest_cpus = 2\n}\n";

/// A job of two processors, where a node that has them comes after `from_s` seconds; one with a
/// single processor is there at once, or comes at the same time.
fn simulate_arrival(from_s: u64, is_one_there: bool) -> SimulationResult {
    let none = |_: &str| Err("no files".to_owned());
    let parsed = parse_workflow("w.bafs", WIDE_JOB, &none);
    let mut nodes = vec![NodeClass::new(1, 1, 1_000), NodeClass::new(1, 2, 1_000)];
    nodes[0].arrival_s = if is_one_there { 0 } else { from_s };
    nodes[1].arrival_s = from_s;
    let environment = Environment {
        nodes,
        home_bytes_per_s: 1_000,
        local_bytes_per_s: 1_000,
        mtbf_s: None,
        restart_s: 60,
    };
    let load = LoadModel::Declared { variability_ppm: 0 };
    let scenario = Scenario::new(environment, Policy::Need, load, 1);
    let simulation = Simulation::new(parsed.expect("a workflow").workflow, scenario);
    simulation.run().expect("it ends")
}

/// Later than a run waits in vain otherwise.
#[test]
fn job_waits_for_a_large_later_node() {
    for (from_s, is_one_there) in [(7_200, true), (7_200, false), (1_000_000, true)] {
        let run = simulate_arrival(from_s, is_one_there);
        assert!(run.is_complete(), "{from_s}: {:?}", run.outcome);
        let seconds = run.elapsed_us / 1_000_000;
        let expected = from_s + 60..from_s + 70;
        assert!(expected.contains(&seconds), "{seconds} s, not {expected:?}");
    }
}
