//! A scheduler that plans by itself begins with what was simulated, keeps to it where nodes fail,
//! and comes to the end of every workflow, whatever happens last.

use bafs_sim::planner::{
    CanonicalWorkload, Environment, NodeClass, Shape, Strategy, StrategyAllocation, StrategyChoice,
    plan_workload, summarise_simulations,
};
use bafs_sim::simulator::study::{StudyVariable, baseline_workloads, compare_strategies};
use bafs_sim::simulator::{
    LoadModel, Policy, Scenario, Simulation, SimulationResult, build_canonical_workflow,
    derive_simulated_plan,
};
use bafs_workflow::{Workflow, parse_workflow};

const GB: u64 = 1_000_000_000;
const MB: u64 = 1_000_000;

fn simulate_adaptive(text: &str, nodes: Vec<NodeClass>) -> SimulationResult {
    let canonical = CanonicalWorkload::parse(text).expect("a workload");
    let environment = Environment {
        nodes,
        home_bytes_per_s: MB,
        local_bytes_per_s: 12 * MB,
        mtbf_s: None,
        restart_s: 60,
    };
    let load = LoadModel::Declared { variability_ppm: 0 };
    let scenario = Scenario::new(environment, Policy::Adaptive, load, 1);
    let run = Simulation::new(build_canonical_workflow(&canonical), scenario).run();
    let run = run.expect("the run ends");
    assert!(run.is_complete(), "{text}: {:?}", run.outcome);
    run
}

/// Of so few jobs each is reason enough to plan again, the last one too.
#[test]
fn small_runs_complete_under_one_strategy() {
    for (width, depth) in [(1, 1), (3, 2), (5, 3), (20, 1)] {
        let text = format!("width={width},depth={depth},batch=1MB,private=1MB,run=10s");
        let run = simulate_adaptive(&text, vec![NodeClass::new(2, 1, 10 * GB)]);
        assert_eq!(run.executions, width * depth, "{text}");
        assert_eq!(
            run.strategy_changes.len(),
            1,
            "{text}: {:?}",
            run.strategy_changes
        );
    }
}

/// One job of a hundred has a volume a hundred times as large as those of the others. All fits at
/// once, also when some are done: nothing is lacking then that was not before.
#[test]
fn one_large_volume_does_not_inflate_remaining_need() {
    let none = |_: &str| Err("no files".to_owned());
    let volume = |at| if at == 0 { 100 } else { 1 };
    let jobs = (0..100).map(|at| {
        format!(
            "volume v{at} scratch {} GB exact\njob j{at} {{\nexecutable = x\nruntime = 1000 s\n}}\n\
             mount v{at} j{at} /v\n",
            volume(at)
        )
    });
    let parsed = parse_workflow("w.bafs", &jobs.collect::<String>(), &none);
    let workflow = parsed.expect("a workflow").workflow;
    let environment = Environment {
        nodes: vec![NodeClass::new(4, 4, 120 * GB)],
        local_bytes_per_s: 100 * GB,
        ..one_node_case().0
    };
    let shape = Shape::from_workflow(&workflow, 0.0);
    let less = |strategy: Strategy, width| {
        let allocation = strategy.plan_allocation(&shape.with_width(width), &environment);
        (allocation.is_possible(), allocation.required_bytes)
    };
    let gb = u128::from(GB);
    assert_eq!(less(Strategy::All, 100), (true, 199 * gb));
    assert_eq!(less(Strategy::All, 93), (true, 199 * gb), "at most");
    assert_eq!(less(Strategy::AllPrivate, 1), (true, 100 * gb));
    assert_eq!(less(Strategy::All, 101), (false, 10_100 * gb), "not known");
    let load = LoadModel::Declared { variability_ppm: 0 };
    let scenario = Scenario::new(environment, Policy::Adaptive, load, 1);
    let run = Simulation::new(workflow, scenario).run();
    let run = run.expect("the run ends");
    assert!(run.is_complete(), "{:?}", run.outcome);
    let followed = run
        .strategy_changes
        .iter()
        .map(|followed| followed.strategy);
    assert_eq!(followed.collect::<Vec<_>>(), [Some(Strategy::All)]);
    assert!(run.elapsed_us < 8_000_000_000, "sixteen at once: {run:?}");
}

/// Half of the processors leave when every job is done and its file on the way home.
#[test]
fn node_leaving_during_the_last_upload_is_ignored() {
    let text = "width=17,depth=1,batch=0B,private=100MB,run=10s";
    let nodes = |until_s| {
        let leaving = NodeClass {
            departure_s: until_s,
            ..NodeClass::new(1, 1, 0)
        };
        vec![NodeClass::new(1, 1, 10 * GB), leaving]
    };
    let calm = simulate_adaptive(text, nodes(None));
    // The last file takes 100 s at least.
    let leaves_s = calm.elapsed_us / 1_000_000 - 50;
    let run = simulate_adaptive(text, nodes(Some(leaves_s)));
    assert_eq!(run.elapsed_us, calm.elapsed_us);
}

/// A fast link to home, where the model is off by six tenths: what was simulated before the run is
/// begun with.
#[test]
fn run_starts_with_the_simulated_plan() {
    let (_, base) = baseline_workloads()
        .into_iter()
        .find(|(name, _)| *name == "private")
        .expect("a baseline");
    let point = StudyVariable::HomeRate.point(&base, 4, 6);
    let compared = compare_strategies(&point, 1).expect("runs that end");
    let of = |strategy| {
        let timed = compared
            .times
            .iter()
            .find(|it| Some(it.strategy) == strategy);
        timed.and_then(|it| it.simulated_s).expect("an end")
    };
    let ends = compared.times.iter().filter_map(|it| it.simulated_s);
    let best_s = ends.min_by(f64::total_cmp).expect("a strategy");
    let guided_s = compared.adaptive_s.expect("an end");
    assert!(of(compared.model_choice) > 1.2 * best_s, "{compared:?}");
    assert!(guided_s < 1.01 * best_s, "{compared:?}");
}

/// A run that is told what was simulated of the workload and follows that to its end; answers what
/// it followed as well.
fn assert_follows_plan(
    text: &str,
    environment: &Environment,
    load: &LoadModel,
) -> (Strategy, SimulationResult) {
    let canonical = CanonicalWorkload::parse(text).expect("a workload");
    let workflow = build_canonical_workflow(&canonical);
    let advice = derive_simulated_plan(&workflow, canonical.variability, environment, load);
    let advice = advice.expect("runs that end").expect("some were simulated");
    let advised = advice.strategy;
    let mut scenario = Scenario::new(environment.clone(), Policy::Adaptive, load.clone(), 1);
    scenario.simulated_plan = Some(advice);
    let run = Simulation::new(workflow, scenario).run();
    let run = run.expect("the run ends");
    assert!(run.is_complete(), "{:?}", run.outcome);
    let followed = run
        .strategy_changes
        .iter()
        .map(|followed| followed.strategy);
    assert_eq!(followed.collect::<Vec<_>>(), [Some(advised)]);
    (advised, run)
}

/// Ten nodes, of which one fails each half an hour: with each the model wanted something else.
#[test]
fn run_keeps_the_simulated_plan_under_failures() {
    let text = "width=40,depth=3,batch=5GB,private=0.1GB,run=500s,var=0.1";
    let environment = Environment {
        nodes: vec![NodeClass::new(10, 1, 2 * GB)],
        home_bytes_per_s: MB,
        local_bytes_per_s: 12 * MB,
        mtbf_s: Some(2_000),
        restart_s: 60,
    };
    let load = LoadModel::Declared {
        variability_ppm: 100_000,
    };
    let (_, run) = assert_follows_plan(text, &environment, &load);
    assert!(run.failures > 10, "{} nodes failed", run.failures);
}

/// The workflow fits only when most nodes are there, of which the model knows nothing, and leaves
/// them before they leave. What was simulated of that is followed.
#[test]
fn run_follows_the_plan_simulated_with_later_nodes() {
    let text = "width=100,depth=2,batch=20GB,private=0.5GB,run=100s";
    let later = |count, gb| NodeClass {
        arrival_s: 7_200,
        departure_s: Some(9 * 3_600),
        ..NodeClass::new(count, 2, gb * GB)
    };
    let environment = Environment {
        nodes: vec![NodeClass::new(5, 2, 3 * GB), later(5, 8), later(20, 3)],
        home_bytes_per_s: 50 * MB,
        local_bytes_per_s: 100 * MB,
        ..one_node_case().0
    };
    let load = LoadModel::Declared { variability_ppm: 0 };
    let (advised, _) = assert_follows_plan(text, &environment, &load);
    assert_eq!(advised, Strategy::Need);
}

/// Ten of twelve nodes leave, one after the other. The model believes that what is left fits no
/// more by the strategy that was simulated with nodes that leave, and was the best.
#[test]
fn run_keeps_the_simulated_plan_while_nodes_leave() {
    let text = "width=100,depth=3,batch=30GB,private=2GB,run=1000s";
    let leaving = |at: u64| NodeClass {
        departure_s: Some(10_800 + 20 * at),
        ..NodeClass::new(1, 2, 30 * GB)
    };
    let mut nodes: Vec<NodeClass> = (0..10).map(leaving).collect();
    nodes.push(NodeClass::new(2, 2, 30 * GB));
    let environment = Environment {
        nodes,
        home_bytes_per_s: 100 * MB,
        local_bytes_per_s: 100 * MB,
        ..one_node_case().0
    };
    let load = LoadModel::Declared { variability_ppm: 0 };
    let (advised, guided) = assert_follows_plan(text, &environment, &load);
    assert_eq!(advised, Strategy::AllBatch);
    let workflow = build_canonical_workflow(&CanonicalWorkload::parse(text).expect("a workload"));
    let scenario = Scenario::new(environment, Policy::Strategy(advised), load, 1);
    let simulated = Simulation::new(workflow, scenario).run();
    let simulated = simulated.expect("the run ends");
    assert_eq!(guided.elapsed_us, simulated.elapsed_us);
}

/// A large volume and a large database, on a node that holds either, and a small volume of its own
/// for the job that needs the database.
fn volume_or_database(small: &str, runtime: &str) -> Workflow {
    let text = format!(
        "volume db cache bafs://home/db 8 GB\nvolume v scratch 8 GB exact\nvolume s scratch {small}\n\
         volume t scratch 1 MB\n\
         job reads {{\nexecutable = x\n{runtime}\n}}\n\
         job writes {{\nexecutable = x\nruntime = 60 s\n}}\n\
         job idles {{\nexecutable = x\nruntime = 6 s\n}}\n\
         job rests {{\nexecutable = x\nruntime = 6 s\n}}\n\
         mount db reads /db\nmount s reads /s\nmount v writes /v\n\
         mount t idles /t\n"
    );
    let none = |_: &str| Err("no files".to_owned());
    parse_workflow("w.bafs", &text, &none)
        .expect("a workflow")
        .workflow
}

fn one_node_case() -> (Environment, LoadModel) {
    let environment = Environment {
        nodes: vec![NodeClass::new(1, 1, 10 * GB)],
        home_bytes_per_s: MB,
        local_bytes_per_s: 12 * MB,
        mtbf_s: None,
        restart_s: 60,
    };
    (environment, LoadModel::Declared { variability_ppm: 0 })
}

/// By the sum of bytes nothing fits, not even no plan; that was simulated, and it does.
#[test]
fn run_follows_need_if_it_was_simulated() {
    let (environment, load) = one_node_case();
    let workflow = volume_or_database("1 MB", "runtime = 60 s");
    let advice = derive_simulated_plan(&workflow, 0.0, &environment, &load).expect("runs that end");
    assert_eq!(advice.as_ref().map(|it| it.strategy), Some(Strategy::Need));
    let mut scenario = Scenario::new(environment, Policy::Adaptive, load, 1);
    scenario.simulated_plan = advice;
    let run = Simulation::new(workflow, scenario).run();
    let run = run.expect("the run ends");
    assert!(run.is_complete(), "{:?}", run.outcome);
    let followed = run
        .strategy_changes
        .iter()
        .map(|followed| followed.strategy);
    assert_eq!(followed.collect::<Vec<_>>(), [Some(Strategy::Need)]);
}

#[test]
fn few_unknown_values_do_not_prevent_a_simulation() {
    let (mut environment, load) = one_node_case();
    environment.nodes[0].storage_bytes = 100 * GB;
    let is_advised = |workflow: &Workflow| {
        let advice = derive_simulated_plan(workflow, 0.0, &environment, &load);
        advice.expect("runs that end").is_some()
    };
    assert!(
        is_advised(&volume_or_database("unknown", "")),
        "one of each"
    );
    let mut workflow = volume_or_database("1 MB", "");
    workflow.jobs[1].runtime_s = None;
    assert!(!is_advised(&workflow), "two of four");
}

/// Ten nodes, of which one fails each ten minutes and is back after one: until then it is planned
/// with as if it were there.
#[test]
fn restarting_nodes_do_not_trigger_replanning() {
    let text = "width=100,depth=2,batch=4GB,private=0.1GB,run=600s,var=0.1";
    let workflow = build_canonical_workflow(&CanonicalWorkload::parse(text).expect("a workload"));
    let environment = Environment {
        nodes: vec![NodeClass::new(10, 1, 2 * GB)],
        home_bytes_per_s: MB,
        local_bytes_per_s: 12 * MB,
        mtbf_s: Some(600),
        restart_s: 60,
    };
    let load = LoadModel::Declared {
        variability_ppm: 100_000,
    };
    let scenario = Scenario::new(environment, Policy::Adaptive, load, 1);
    let run = Simulation::new(workflow, scenario).run();
    let run = run.expect("the run ends");
    assert!(run.is_complete(), "{:?}", run.outcome);
    assert!(run.failures > 20, "{} nodes failed", run.failures);
    assert!(run.strategy_changes.len() < 4, "{:?}", run.strategy_changes);
}

/// Sixteen searches and a job that waits for all of them: order connects them, no data do.
#[test]
fn collecting_job_does_not_serialise_the_others() {
    let mut text = "volume db cache bafs://home/db 100 MB\n".to_owned();
    text += "job report {\nexecutable = x\nruntime = 10 s\n}\n";
    for search in 0..16 {
        text += &format!(
            "volume v{search} scratch 60 MB\n\
             job s{search} {{\nexecutable = x\nruntime = 100 s\n}}\n\
             mount db s{search} /db\nmount v{search} s{search} /v\n\
             parent s{search} child report\n"
        );
    }
    let none = |path: &str| Err(path.to_owned());
    let workflow = parse_workflow("w.bafs", &text, &none).expect("a workflow");
    let workflow = workflow.workflow;
    let environment = Environment {
        nodes: vec![NodeClass::new(16, 1, GB / 4)],
        home_bytes_per_s: 100 * MB,
        local_bytes_per_s: 100 * MB,
        mtbf_s: None,
        restart_s: 60,
    };
    let planned = plan_workload(Shape::from_workflow(&workflow, 0.0), &environment);
    let possible = planned.candidates.iter().map(|it| &it.allocation);
    let possible = possible.filter(|it| it.is_possible() && it.strategy != Strategy::Remote);
    let possible: Vec<Strategy> = possible.map(|it| it.strategy).collect();
    assert!(possible.len() > 4, "{possible:?}");
    let policies = possible.into_iter().map(Policy::from);
    for policy in policies.chain([Policy::Adaptive]) {
        let load = LoadModel::Declared { variability_ppm: 0 };
        let scenario = Scenario::new(environment.clone(), policy, load, 1);
        let run = Simulation::new(workflow.clone(), scenario).run();
        let run = run.expect("the run ends");
        assert!(run.is_complete(), "{policy:?}: {:?}", run.outcome);
        assert!(run.seconds() < 130.0, "{policy:?}: {} s", run.seconds());
    }
}

/// Slice is advised where it just fits, and one node goes for good, which was not simulated.
#[test]
fn simulated_plan_is_dropped_when_it_stops_fitting() {
    let text = "width=155,depth=3,batch=1GB,private=1GB,run=500s";
    let workflow = build_canonical_workflow(&CanonicalWorkload::parse(text).expect("a workload"));
    let leaving = NodeClass {
        departure_s: Some(300),
        ..NodeClass::new(1, 1, 8 * GB)
    };
    let environment = Environment {
        nodes: vec![NodeClass::new(19, 1, 8 * GB), leaving],
        home_bytes_per_s: 10 * MB,
        local_bytes_per_s: 120 * MB,
        mtbf_s: Some(1_000_000),
        restart_s: 60,
    };
    let mut planned = plan_workload(Shape::from_workflow(&workflow, 0.0), &environment);
    planned.choice = planned.choice.map(|choice| StrategyChoice {
        strategy: Strategy::Slice,
        ..choice
    });
    let load = LoadModel::Declared { variability_ppm: 0 };
    let mut scenario = Scenario::new(environment.clone(), Policy::Adaptive, load, 1);
    let mut staying = environment.clone();
    staying.nodes[1].departure_s = None;
    scenario.simulated_plan = summarise_simulations(&planned, &staying, |_| Some(1.0));
    let run = Simulation::new(workflow, scenario).run().expect("an end");
    assert!(run.is_complete(), "{:?}", run.outcome);
    let followed: Vec<_> = run.strategy_changes.iter().map(|it| it.strategy).collect();
    assert_eq!(followed.first(), Some(&Some(Strategy::Slice)));
    assert!(followed.len() > 1, "{:?}", run.strategy_changes);
}

/// What nobody declares counts as empty, however much room the scheduler makes up for it.
#[test]
fn volumes_of_unknown_size_take_no_simulated_time() {
    let text = "volume v scratch unknown\njob a {\nexecutable = x\nruntime = 10 s\n}\n\
                job b {\nexecutable = x\nruntime = 10 s\n}\nparent a child b\n\
                mount v a /v\nmount v b /v ro\n";
    let none = |path: &str| Err(path.to_owned());
    let workflow = parse_workflow("w.bafs", text, &none).expect("a workflow");
    let environment = Environment {
        nodes: vec![NodeClass::new(1, 1, 100 * GB)],
        home_bytes_per_s: MB,
        local_bytes_per_s: MB,
        mtbf_s: None,
        restart_s: 60,
    };
    let load = LoadModel::Declared { variability_ppm: 0 };
    let scenario = Scenario::new(environment, Policy::Need, load, 1);
    let run = Simulation::new(workflow.workflow, scenario).run();
    let run = run.expect("the run ends");
    assert!(run.is_complete(), "{:?}", run.outcome);
    assert!(run.seconds() < 25.0, "{} s", run.seconds());
}
