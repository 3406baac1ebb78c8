//! What every policy of every family must do, whatever it prefers: a run under it comes to its end,
//! with faults too, and the same seed gives the same run.

use bafs_sched::{Outcome, PolicyNames, Settings, Space, list_policies};
use bafs_sim::simulated_cluster::{Faults, NodeSpec, SimulatedCluster};
use bafs_workflow::{Workflow, parse_workflow};

const SEEDS: u64 = 5;

/// Six pipelines of three jobs, all of which read one cache.
fn pipelines_with_a_cache() -> Workflow {
    let text = "volume db cache bafs://home/db 200 MB\n\
        for i in 1..6\n\
        volume a$(i) scratch 100 MB\nvolume b$(i) scratch 100 MB\n\
        job make$(i) {\nexecutable = x\nretry = 3\n}\n\
        job sort$(i) {\nexecutable = x\nretry = 3\n}\n\
        job send$(i) {\nexecutable = x\nretry = 3\n}\n\
        parent make$(i) child sort$(i)\nparent sort$(i) child send$(i)\n\
        mount db make$(i) /db\nmount db sort$(i) /db\n\
        mount a$(i) make$(i) /a\nmount a$(i) sort$(i) /a ro\n\
        mount b$(i) sort$(i) /b\nmount b$(i) send$(i) /b\n\
        extract b$(i) out bafs://home/out.$(i)\n\
        end\n";
    let none = |path: &str| Err(path.to_owned());
    let parsed = parse_workflow("w.bafs", text, &none);
    parsed.expect("it is right").workflow
}

/// The time of a run under one named policy, in milliseconds.
fn run_under(choice: &str, seed: u64, faults: Faults) -> u64 {
    let mut policies = PolicyNames::default();
    policies.choose(choice).expect("it is in the list");
    let settings = Settings {
        policies,
        ..Settings::default()
    };
    let node = NodeSpec {
        capacity: Space {
            bytes: 1_000_000_000,
            files: 1_000_000,
        },
        slots: 2,
    };
    let nodes = vec![node; 4];
    let workflow = pipelines_with_a_cache();
    let mut run = SimulatedCluster::new(seed, workflow, settings, nodes, faults);
    let outcome = run.run_to_end(10_000_000);
    assert_eq!(outcome, Outcome::Complete, "{choice}, seed {seed}");
    run.elapsed_ms()
}

#[test]
fn every_policy_completes_a_workflow() {
    let losses = Faults {
        node_dies: 10,
        node_wiped: 500,
        reply_lost: 20,
        volume_vanishes: 5,
        until_ms: 60_000,
        ..Faults::default()
    };
    for policy in list_policies() {
        let choice = format!("{}={}", policy.family, policy.name);
        for seed in 0..SEEDS {
            for faults in [&Faults::default(), &losses] {
                let elapsed_ms = run_under(&choice, seed, faults.clone());
                assert_eq!(
                    run_under(&choice, seed, faults.clone()),
                    elapsed_ms,
                    "{choice}"
                );
            }
        }
        println!("{choice} completes");
    }
}
