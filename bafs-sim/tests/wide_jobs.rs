//! Jobs of several processors: which nodes the planner's predictions count. Nothing is simulated.

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at the unexpected, in functions beside tests too"
)]

use bafs_sim::planner::{Environment, NodeClass, Shape, Strategy, plan_workload, predict_time};
use bafs_workflow::parse_workflow;

/// One node of two processors, and 99 of one.
fn mostly_narrow_nodes() -> Environment {
    let mut environment = Environment::parse(
        "home-rate = \"100 MB/s\"\nlocal-rate = \"100 MB/s\"\n\n\
         [[nodes]]\ncount = 1\ncpus = 2\nstorage = \"5 GB\"\n",
    )
    .unwrap();
    let narrow = NodeClass::new(99, 1, 5_000_000_000);
    environment.nodes.push(narrow);
    environment
}

/// Ten jobs for each number of processors, of 100 s each.
fn shape_of_widths(cpus: &[u32]) -> Shape {
    let mut text = String::new();
    for cpus in cpus {
        for job in 0..10 {
            let own = format!("executable = x\nruntime = 100 s\nrequest_cpus = {cpus}");
            text += &format!("job j{cpus}_{job} {{\n{own}\n}}\n");
        }
    }
    let none = |path: &str| Err(path.to_owned());
    let parsed = parse_workflow("w.bafs", &text, &none).unwrap();
    Shape::from_workflow(&parsed.workflow, 0.0)
}

#[test]
fn nodes_too_small_for_jobs_shorten_no_prediction() {
    let environment = mostly_narrow_nodes();
    let predicted =
        |cpus: &[u32]| predict_time(Strategy::All, &shape_of_widths(cpus), &environment).unwrap();
    assert_eq!(predicted(&[1]), 100.0);
    // One after the other, on the only node that is large enough.
    assert_eq!(predicted(&[2]), 1_000.0);
    // Those of one processor go to the others.
    assert_eq!(predicted(&[1, 2]), 1_000.0);
}

#[test]
fn no_time_is_predicted_without_a_suitable_node() {
    let mut environment = mostly_narrow_nodes();
    environment.nodes[0].arrival_s = 7_200;
    for cpus in [&[2][..], &[1, 2]] {
        let plan = plan_workload(shape_of_widths(cpus), &environment);
        let times = plan.candidates.iter().map(|c| c.predicted_s);
        assert_eq!(times.flatten().next(), None);
        let refusal = plan.refusal.unwrap();
        assert!(
            refusal.starts_with("a job needs 2 processors, more than any node"),
            "{refusal}"
        );
    }
}

#[test]
fn four_processor_jobs_run_only_two_at_once() {
    let environment = Environment::parse(
        "home-rate = \"100 MB/s\"\nlocal-rate = \"100 MB/s\"\n\n\
         [[nodes]]\ncount = 2\ncpus = 6\nstorage = \"5 GB\"\n",
    );
    let environment = environment.unwrap();
    let plan = plan_workload(shape_of_widths(&[4]), &environment);
    let all = plan.candidates.iter();
    let all = all.map(|it| it.running_pipelines).collect::<Vec<_>>();
    assert!(all.iter().all(|running| *running == 2), "{all:?}");
}
