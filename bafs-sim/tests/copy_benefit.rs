//! What copies of scratch volumes gain where nodes fail, and cost where none does, as the simulator
//! finds it.

use std::ops::RangeInclusive;

use bafs_sched::PolicyNames;
use bafs_sim::planner::{CanonicalWorkload, Environment, NodeClass};
use bafs_sim::simulator::{LoadModel, Policy, Scenario, Simulation, build_canonical_workflow};

const MB: u64 = 1_000_000;
const GB: u64 = 1_000_000_000;

/// 64 pipelines of three jobs on 16 nodes, as in the thesis' figure 3.6; mean seconds over seeds.
fn simulate_policies(
    checkpoint: &'static str,
    run_s: u64,
    mtbf_s: Option<u64>,
    seeds: RangeInclusive<u64>,
) -> f64 {
    let text = format!("width=64,depth=3,batch=0B,private=24MB,run={run_s}s,var=0.1");
    let canonical = CanonicalWorkload::parse(&text).expect("a workload");
    let runs = seeds.clone().map(|seed| {
        let environment = Environment {
            nodes: vec![NodeClass::new(16, 1, 4 * GB)],
            home_bytes_per_s: 400 * MB,
            local_bytes_per_s: 400 * MB,
            mtbf_s,
            restart_s: 16,
        };
        let load = LoadModel::Declared {
            variability_ppm: 100_000,
        };
        let scenario = Scenario {
            policies: PolicyNames::default().with("replication", checkpoint),
            ..Scenario::new(environment, Policy::Need, load, seed)
        };
        let run = Simulation::new(build_canonical_workflow(&canonical), scenario).run();
        let run = run.expect("it ends");
        assert!(run.is_complete(), "{:?}", run.outcome);
        run.seconds()
    });
    runs.sum::<f64>() / seeds.count() as f64
}

#[test]
fn copies_cost_little_where_no_node_fails() {
    let [never, weighed] = ["never", "cost-benefit"]
        .map(|checkpoint| simulate_policies(checkpoint, 600, None, 1..=20));
    assert!(weighed <= never * 1.01, "one copy to learn what it costs");
}

/// Also where the whole run is over in a minute: what was seen of failures counts, not how long ago
/// they began, and before the first one copies that cost next to nothing.
#[test]
fn copies_pay_where_nodes_fail_often() {
    for (run_s, mtbf_s) in [(600, 600), (60, 60), (6, 6)] {
        let [never, always, weighed] = ["never", "always", "cost-benefit"]
            .map(|checkpoint| simulate_policies(checkpoint, run_s, Some(mtbf_s), 1..=40));
        assert!(
            weighed < never * 0.97 && weighed < always * 1.015,
            "jobs of {run_s} s: {weighed} s by cost and benefit, {never} s without copies, \
             {always} s with all"
        );
    }
}

/// Of four nodes one is lost every nine seconds: some job is on the lost one three times in a row.
#[test]
fn job_hit_by_random_node_losses_completes() {
    let text = "width=12,depth=3,batch=0B,private=24MB,run=3s,var=0.02";
    let canonical = CanonicalWorkload::parse(text).expect("a workload");
    for seed in 1..=20 {
        let environment = Environment {
            nodes: vec![NodeClass::new(4, 2, 2 * GB)],
            home_bytes_per_s: 100 * MB,
            local_bytes_per_s: 96 * MB,
            mtbf_s: Some(9),
            restart_s: 16,
        };
        let load = LoadModel::Declared {
            variability_ppm: 20_000,
        };
        let scenario = Scenario::new(environment, Policy::Need, load, seed);
        let run = Simulation::new(build_canonical_workflow(&canonical), scenario).run();
        let run = run.expect("it ends");
        assert!(run.is_complete(), "seed {seed}: {:?}", run.outcome);
    }
}
