//! What no strategy can do: a plan refuses it with the reason, and a run of it is given up.

use bafs_sim::planner::{
    CanonicalWorkload, Environment, NodeClass, Shape, Strategy, plan_workload,
};
use bafs_sim::simulator::{
    LoadModel, Policy, Scenario, Simulation, TrialScope, TrialsOutcome, build_canonical_workflow,
    decide_by_simulation,
};
use bafs_workflow::parse_workflow;

fn thesis_nodes() -> Environment {
    Environment::parse(include_str!("../../examples/environments/thesis.toml"))
        .expect("the example is right")
}

/// Somewhere a node fails every ten seconds, and each job takes five thousand.
const HOPELESS_WORKLOAD: &str = "width=10,depth=2,batch=1GB,private=0.1GB,run=5000s";

fn failing_environment() -> Environment {
    Environment {
        nodes: vec![NodeClass::new(5, 1, 5_000_000_000)],
        mtbf_s: Some(10),
        ..thesis_nodes()
    }
}

#[test]
fn endless_run_is_abandoned_with_a_reason() {
    for policy in [Policy::Need, Policy::Strategy(Strategy::Slice)] {
        let canonical = CanonicalWorkload::parse(HOPELESS_WORKLOAD).expect("a workload");
        let load = LoadModel::Declared { variability_ppm: 0 };
        let scenario = Scenario::new(failing_environment(), policy, load, 1);
        let run = Simulation::new(build_canonical_workflow(&canonical), scenario).run();
        let run = run.expect("the run ends");
        let why = run.failure().expect("it cannot be done");
        assert!(why.contains("nodes fail faster"), "{policy}: {why}");
    }
}

/// No server is asked for anything any more, so that no fact follows.
#[test]
fn remote_run_fails_when_all_nodes_leave() {
    let mut environment = thesis_nodes();
    environment.nodes[0].departure_s = Some(1_000);
    let canonical = CanonicalWorkload::parse("width=3,depth=2,batch=1MB,private=1MB,run=5000s");
    let workflow = build_canonical_workflow(&canonical.expect("a workload"));
    let load = LoadModel::Declared { variability_ppm: 0 };
    let scenario = Scenario::new(environment, Policy::Strategy(Strategy::Remote), load, 1);
    let run = Simulation::new(workflow, scenario).run();
    let why = run
        .expect("the run ends")
        .failure()
        .expect("it cannot be done");
    assert!(why.contains("no node is live"), "{why}");
}

fn decide_failures(text: &str, environment: &Environment) -> (Vec<Option<String>>, Option<String>) {
    let canonical = CanonicalWorkload::parse(text).expect("a workload");
    let mut plan = plan_workload(canonical.shape(), environment);
    let load = LoadModel::Declared { variability_ppm: 0 };
    let work = (canonical.jobs(), || build_canonical_workflow(&canonical));
    let doubts = decide_by_simulation(&mut plan, TrialScope::All, work, environment, &load);
    let TrialsOutcome::Completed(tried) = doubts.expect("they end") else {
        panic!("nothing was simulated");
    };
    assert_eq!(plan.choice, None);
    let failed = tried.into_iter().map(|tried| tried.failure);
    (failed.collect(), plan.refusal)
}

#[test]
fn plan_is_refused_when_failures_come_too_fast() {
    let (failed, refusal) = decide_failures(HOPELESS_WORKLOAD, &failing_environment());
    assert!(failed.iter().all(Option::is_some), "{failed:?}");
    let refusal = refusal.expect("no choice has a reason");
    assert!(refusal.contains("nodes fail faster"), "{refusal}");
}

/// The only nodes leave before a job can be done.
#[test]
fn impossible_run_is_refused_with_the_reason() {
    let mut environment = thesis_nodes();
    environment.nodes[0].departure_s = Some(1_000);
    let text = "width=2,depth=1,batch=1MB,private=1MB,run=5000s";
    let (failed, refusal) = decide_failures(text, &environment);
    assert!(failed.iter().all(Option::is_some), "{failed:?}");
    let (refusal, why) = (refusal.expect("a reason"), failed[0].clone());
    assert!(refusal.contains(&why.expect("it failed")), "{refusal}");
    for strategy in ["All", "Minimal", "need"] {
        assert!(refusal.contains(strategy), "{strategy}: {refusal}");
    }
}

/// A job that no node is large enough for.
#[test]
fn job_too_wide_for_every_node_is_refused() {
    let text = "job wide {\nexecutable = x\nruntime = 60 s\nrequest_cpus = 8\n}\n";
    let none = |_: &str| Err("no files".to_owned());
    let parsed = parse_workflow("w.bafs", text, &none);
    let workflow = parsed.expect("a workflow").workflow;
    let (shape, _) = Shape::from_largest_levels(&workflow, 0.0);
    let mut plan = plan_workload(shape, &thesis_nodes());
    let load = LoadModel::Declared { variability_ppm: 0 };
    let doubts = decide_by_simulation(
        &mut plan,
        TrialScope::All,
        (1, || workflow),
        &thesis_nodes(),
        &load,
    );
    assert!(
        matches!(doubts, Ok(TrialsOutcome::Completed(_))),
        "{doubts:?}"
    );
    assert_eq!(plan.choice, None);
    let refusal = plan.refusal.expect("no choice has a reason");
    assert!(refusal.contains("needs 8 CPUs"), "{refusal}");
}
