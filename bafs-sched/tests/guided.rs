//! A scheduler that plans by itself comes to the end of every workflow, whatever happens last.

use bafs_sched::planner::{Canonical, Environment, NodeClass};
use bafs_sched::sim::{Load, Policy, Run, Scenario, Simulation, workflow_of};

const GB: u64 = 1_000_000_000;
const MB: u64 = 1_000_000;

fn guided(text: &str, nodes: Vec<NodeClass>) -> Run {
    let canonical = Canonical::parse(text).expect("a workload");
    let environment = Environment {
        nodes,
        home_bytes_per_s: MB,
        local_bytes_per_s: 12 * MB,
        mtbf_s: None,
        restart_s: 60,
    };
    let load = Load::Declared { variability_ppm: 0 };
    let scenario = Scenario::new(environment, Policy::Guided, load, 1);
    let run = Simulation::new(workflow_of(&canonical), scenario).run();
    let run = run.expect("the run ends");
    assert!(run.is_complete(), "{text}: {:?}", run.outcome);
    run
}

/// Of so few jobs each is reason enough to plan again, the last one too.
#[test]
fn few_jobs_are_planned_to_their_end() {
    for (width, depth) in [(1, 1), (3, 2), (5, 3), (20, 1)] {
        let text = format!("width={width},depth={depth},batch=1MB,private=1MB,run=10s");
        let run = guided(&text, vec![NodeClass::new(2, 1, 10 * GB)]);
        assert_eq!(run.executions, width * depth, "{text}");
        assert_eq!(run.followed.len(), 1, "{text}: {:?}", run.followed);
    }
}

/// Half of the processors leave when every job is done and its file on the way home.
#[test]
fn a_node_that_leaves_while_the_last_file_is_sent_is_not_planned_for() {
    let text = "width=17,depth=1,batch=0B,private=100MB,run=10s";
    let nodes = |until_s| {
        let leaving = NodeClass {
            until_s,
            ..NodeClass::new(1, 1, 0)
        };
        vec![NodeClass::new(1, 1, 10 * GB), leaving]
    };
    let calm = guided(text, nodes(None));
    // The last file takes 100 s at least.
    let leaves_s = calm.elapsed_us / 1_000_000 - 50;
    let run = guided(text, nodes(Some(leaves_s)));
    assert_eq!(run.elapsed_us, calm.elapsed_us);
}
