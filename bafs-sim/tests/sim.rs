//! The simulator with the real scheduler core: what must come out, whatever the machine.

use bafs_sim::planner::{
    CanonicalWorkload, Environment, NodeClass, Strategy, StrategyAllocation, predict_time,
};
use bafs_sim::seeded_rng::SeededRng;
use bafs_sim::simulator::{
    JobLoad, LoadModel, MeasuredLoad, MountLoad, Policy, Scenario, Simulation, SimulationResult,
    build_canonical_workflow,
};
use bafs_workflow::{Workflow, parse_workflow};

const GB: u64 = 1_000_000_000;
const MB: u64 = 1_000_000;

/// The thesis' environment: 50 nodes of 5 GB, 1 and 12 MB/s.
fn thesis_nodes() -> Environment {
    Environment::parse(include_str!("../../examples/environments/thesis.toml"))
        .expect("the example is right")
}

fn simulate_policy(
    text: &str,
    environment: &Environment,
    policy: Policy,
    seed: u64,
) -> SimulationResult {
    let canonical = CanonicalWorkload::parse(text).expect("a workload");
    let load = LoadModel::Declared {
        variability_ppm: (canonical.variability * 1e6) as u64,
    };
    let scenario = Scenario::new(environment.clone(), policy, load, seed);
    Simulation::new(build_canonical_workflow(&canonical), scenario)
        .run()
        .expect("the run ends")
}

fn simulate_strategy(text: &str, strategy: Strategy) -> SimulationResult {
    let run = simulate_policy(text, &thesis_nodes(), Policy::Strategy(strategy), 1);
    assert!(run.is_complete(), "{strategy}: {:?}", run.outcome);
    run
}

const MIXED_WORKLOAD: &str = "width=350,depth=5,batch=45GB,private=0.5GB,run=5000s,var=0.1";

/// One job on one node: every second can be counted by hand.
#[test]
fn job_time_is_its_transfers_plus_computing() {
    let environment = Environment {
        nodes: vec![NodeClass::new(1, 1, 10 * GB)],
        home_bytes_per_s: MB,
        local_bytes_per_s: 10 * MB,
        mtbf_s: None,
        restart_s: 60,
    };
    let text = "width=1,depth=1,batch=2GB,private=1GB,run=500s";
    let run = simulate_policy(text, &environment, Policy::Strategy(Strategy::All), 1);
    // From home 1,000 s of private and 2,000 s of batch data; 100 s to read the one, 500 to
    // compute, 100 to write, 1,000 s home.
    assert_eq!(
        run.elapsed_us / 1_000_000,
        1_000 + 2_000 + 100 + 500 + 100 + 1_000
    );
    assert_eq!(run.home_bytes, u128::from(4 * GB));
}

/// Each batch byte crosses the link once under Slice and AllBatch, twice under Minimal, whose two
/// parts are 205 and 145 pipelines.
#[test]
fn strategy_determines_how_often_batch_data_cross() {
    let endpoint = u128::from(350 * GB);
    let batch = u128::from(5 * 45 * GB);
    for (name, times) in [
        (Strategy::Slice, 1),
        (Strategy::AllBatch, 1),
        (Strategy::Minimal, 2),
    ] {
        let run = simulate_strategy(MIXED_WORKLOAD, name);
        assert_eq!(run.fetched_bytes, times * batch, "{name}");
        assert_eq!(run.home_bytes, endpoint + times * batch, "{name}");
        assert_eq!(run.executions, 1_750, "{name}");
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let text = "width=60,depth=3,batch=20GB,private=0.5GB,run=500s,var=0.3";
    let environment = Environment {
        mtbf_s: Some(3_000),
        ..thesis_nodes()
    };
    let run = |seed| simulate_policy(text, &environment, Policy::Strategy(Strategy::Slice), seed);
    let (one, other) = (run(1), run(2));
    assert_eq!(one, run(1));
    assert_ne!(one.elapsed_us, other.elapsed_us);
    assert!(one.failures > 0 && one.is_complete(), "{one:?}");
}

/// On another machine, with another compiler, the same numbers: failures, skew and run times that
/// vary are all drawn. A change of the simulator or of the scheduler changes them, and these too.
#[test]
fn same_seed_gives_equal_runs_on_every_machine() {
    let mut environment = thesis_nodes();
    environment.mtbf_s = Some(10_000);
    environment.nodes[0].count = 10;
    environment.nodes[0].has_hash_imbalance = true;
    let text = "width=40,depth=3,batch=5GB,private=0.5GB,run=5000s,var=0.3";
    let run = simulate_policy(text, &environment, Policy::Strategy(Strategy::Slice), 7);
    let found = (run.elapsed_us, run.home_bytes, run.peer_bytes);
    let counts = (run.executions, run.failures, run.events);
    let expected = (121_459_659_158, 82_346_976_339, 964_603_174_653);
    assert_eq!((found, counts), (expected, (171, 10, 1_172)));
}

/// Seconds that each possible strategy takes on a baseline, with what the planner predicts.
fn compare_strategies_on(text: &str) -> Vec<(Strategy, f64, f64)> {
    let (shape, environment) = (
        CanonicalWorkload::parse(text).expect("a workload").shape(),
        thesis_nodes(),
    );
    let possible = Strategy::THESIS_STRATEGIES.into_iter().filter(|name| {
        *name != Strategy::Remote && name.plan_allocation(&shape, &environment).is_possible()
    });
    let timed = possible.map(|name| {
        let predicted = predict_time(name, &shape, &environment).expect("it is possible");
        (name, simulate_strategy(text, name).seconds(), predicted)
    });
    timed.collect()
}

fn find_seconds(found: &[(Strategy, f64, f64)], wanted: Strategy) -> f64 {
    found
        .iter()
        .find(|(name, ..)| *name == wanted)
        .expect("it ran")
        .1
}

/// The thesis' baselines (its figures 4.17 to 4.19): the same winners, by about as much, and each
/// is the one that the planner chooses.
#[test]
fn simulated_baselines_match_the_thesis_and_the_plan() {
    let batch = "width=350,depth=5,batch=176.6GB,private=203.6MB,run=5000s,var=0.1";
    let private = "width=350,depth=5,batch=30GB,private=2.5GB,run=5000s,var=0.1";
    for (text, best) in [
        (MIXED_WORKLOAD, Strategy::Slice),
        (private, Strategy::AllBatch),
        (batch, Strategy::Minimal),
    ] {
        let found = compare_strategies_on(text);
        let first = found.iter().min_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
        let planned = found.iter().min_by(|a, b| a.2.total_cmp(&b.2)).unwrap();
        assert_eq!((first.0, planned.0), (best, best), "{text}: {found:?}");
        let off = first.2 / first.1 - 1.0;
        assert!(off.abs() < 0.08, "{text}: the prediction is off by {off}");
    }
    let mixed = compare_strategies_on(MIXED_WORKLOAD);
    let saved = |slower| 1.0 - find_seconds(&mixed, Strategy::Slice) / find_seconds(&mixed, slower);
    let intensive = compare_strategies_on(batch);
    let minimal_s = find_seconds(&intensive, Strategy::Minimal);
    let saved_there = 1.0 - minimal_s / find_seconds(&intensive, Strategy::Slice);
    assert!(
        (0.10..0.30).contains(&saved_there),
        "thesis: 20 %: {intensive:?}"
    );
    assert!(
        (0.05..0.25).contains(&saved(Strategy::AllBatch)),
        "thesis: 15 %: {mixed:?}"
    );
    assert!(
        (0.10..0.35).contains(&saved(Strategy::Minimal)),
        "thesis: 25 %: {mixed:?}"
    );
}

/// Computing really takes so many seconds, whatever is declared; data are as declared in a chain.
fn measured_load(workflow: &Workflow, seconds: u64) -> LoadModel {
    let jobs = workflow.jobs.iter().map(|job| JobLoad {
        compute_us: seconds * 1_000_000,
        mounts: job
            .mounts
            .iter()
            .map(|mount| {
                let bytes = workflow.volume(mount.volume).size_bytes;
                MountLoad {
                    read_bytes: if mount.writable { 0 } else { bytes },
                    written_bytes: if mount.writable { bytes } else { 0 },
                    is_bind_mount: false,
                }
            })
            .collect(),
    });
    LoadModel::Measured(MeasuredLoad {
        jobs: jobs.collect(),
        ..MeasuredLoad::default()
    })
}

fn simulate_measured(
    text: &str,
    seconds: u64,
    environment: &Environment,
    policy: Policy,
) -> SimulationResult {
    let workflow = build_canonical_workflow(&CanonicalWorkload::parse(text).expect("a workload"));
    let load = measured_load(&workflow, seconds);
    let scenario = Scenario::new(environment.clone(), policy, load, 1);
    let run = Simulation::new(workflow, scenario).run().expect("it ends");
    assert!(run.is_complete(), "{policy}: {:?}", run.outcome);
    run
}

fn followed_strategies(run: &SimulationResult) -> Vec<Option<Strategy>> {
    run.strategy_changes
        .iter()
        .map(|last| last.strategy)
        .collect()
}

/// Jobs compute 400 times as long as declared: fetching once is not worth ten processors any more.
#[test]
fn the_strategy_changes_when_measurements_contradict_the_plan() {
    let text = "width=350,depth=5,batch=176.6GB,private=203.6MB,run=100s,var=0.1";
    let mut environment = thesis_nodes();
    environment.local_bytes_per_s *= 10;
    let run = |policy| simulate_measured(text, 40_000, &environment, policy);
    let (kept, guided) = (
        run(Policy::Strategy(Strategy::Slice)),
        run(Policy::Adaptive),
    );
    let expected = [Some(Strategy::Slice), Some(Strategy::Minimal)];
    assert_eq!(
        followed_strategies(&guided)[..2],
        expected,
        "{:?}",
        guided.strategy_changes
    );
    // When only a part is left, Slice has room for all of it.
    assert!(
        guided.strategy_changes.len() <= 3,
        "to and fro: {:?}",
        guided.strategy_changes
    );
    assert!(
        guided.seconds() < 0.85 * kept.seconds(),
        "{} s instead of {} s",
        guided.seconds(),
        kept.seconds()
    );
}

/// A measurement that contradicts the plan, but no other strategy is better by it.
#[test]
fn the_strategy_stays_when_a_change_gains_nothing() {
    let run = |policy| simulate_measured(MIXED_WORKLOAD, 8_000, &thesis_nodes(), policy);
    let (kept, guided) = (
        run(Policy::Strategy(Strategy::Slice)),
        run(Policy::Adaptive),
    );
    assert_eq!(
        followed_strategies(&guided),
        [Some(Strategy::Slice)],
        "{:?}",
        guided.strategy_changes
    );
    let longer = guided.seconds() / kept.seconds();
    assert!((0.98..1.02).contains(&longer), "{longer}");
}

/// Storage doubles while a first part runs: what follows needs fewer parts, each of which would
/// fetch everything again.
#[test]
fn arriving_nodes_change_the_plan() {
    let mut environment = thesis_nodes();
    environment.nodes[0].count = 30;
    let later = NodeClass {
        arrival_s: 100_000,
        ..environment.nodes[0].clone()
    };
    environment.nodes.push(later);
    let run = |policy| simulate_measured(MIXED_WORKLOAD, 5_000, &environment, policy);
    let (kept, guided) = (
        run(Policy::Strategy(Strategy::Minimal)),
        run(Policy::Adaptive),
    );
    assert_eq!(guided.strategy_changes[0].strategy, Some(Strategy::Minimal));
    assert!(
        guided.seconds() < 0.9 * kept.seconds() && guided.fetched_bytes < kept.fetched_bytes,
        "{} s instead of {} s: {:?}",
        guided.seconds(),
        kept.seconds(),
        guided.strategy_changes
    );
}

/// Nodes that leave take their volumes with them, and the rest is done on those that stay.
#[test]
fn leaving_nodes_change_the_plan() {
    let mut environment = thesis_nodes();
    environment.nodes[0].count = 30;
    let leaving = NodeClass {
        count: 20,
        departure_s: Some(300_000),
        ..environment.nodes[0].clone()
    };
    environment.nodes.push(leaving);
    let run = |policy| simulate_measured(MIXED_WORKLOAD, 5_000, &environment, policy);
    let (kept, guided) = (
        run(Policy::Strategy(Strategy::Slice)),
        run(Policy::Adaptive),
    );
    // 150 GB do not hold a private volume of every pipeline beside a batch volume.
    let expected = [Some(Strategy::Slice), Some(Strategy::Minimal)];
    assert_eq!(
        followed_strategies(&guided)[..2],
        expected,
        "{:?}",
        guided.strategy_changes
    );
    assert!(
        guided.strategy_changes.len() <= 3,
        "to and fro: {:?}",
        guided.strategy_changes
    );
    assert!(
        guided.seconds() < 1.02 * kept.seconds(),
        "{} s instead of {} s",
        guided.seconds(),
        kept.seconds()
    );
}

/// Ten jobs for each of four databases, and a processor and space for all of it.
#[test]
fn strategy_all_uses_all_databases_at_once() {
    let mut text = String::new();
    for database in 0..4 {
        text += &format!("volume db{database} cache bafs://home/db{database} 1 GB\n");
        for job in 0..10 {
            let name = format!("j{database}x{job}");
            text += &format!(
                "job {name} {{\nexecutable = x\nruntime = 1000 s\n}}\n\
                 mount db{database} {name} /db\n"
            );
        }
    }
    let none = |_: &str| Err("no files".to_owned());
    let parsed = parse_workflow("w.bafs", &text, &none);
    let workflow = parsed.expect("a workflow").workflow;
    let environment = Environment {
        nodes: vec![NodeClass::new(40, 1, 10 * GB)],
        home_bytes_per_s: 1_000 * MB,
        local_bytes_per_s: 1_000 * MB,
        mtbf_s: None,
        restart_s: 60,
    };
    let time = |policy| {
        let load = LoadModel::Declared { variability_ppm: 0 };
        let scenario = Scenario::new(environment.clone(), policy, load, 1);
        let run = Simulation::new(workflow.clone(), scenario).run();
        let run = run.expect("it ends");
        assert!(run.is_complete(), "{policy}: {:?}", run.outcome);
        run.seconds()
    };
    let need = time(Policy::Need);
    for strategy in [Strategy::All, Strategy::AllBatch, Strategy::Minimal] {
        let taken = time(Policy::Strategy(strategy));
        assert!(
            taken < 1.1 * need,
            "{strategy}: {taken} s, by need {need} s"
        );
    }
}

/// The size that the simulator is meant for: `JOBS=1000000 NODES=10000`.
#[test]
#[ignore = "long, and prints what it took"]
fn large_workload_completes_on_many_failing_clusters() {
    let number = |name: &str, usual: u32| {
        std::env::var(name).map_or(usual, |text| text.parse().expect("a number"))
    };
    let (jobs, nodes) = (number("JOBS", 10_000), number("NODES", 100));
    let clusters = (nodes / 100).max(1);
    let class = |cluster| NodeClass {
        cluster: format!("c{cluster}"),
        ..NodeClass::new(nodes / clusters, 1, 20 * GB)
    };
    let environment = Environment {
        nodes: (0..clusters).map(class).collect(),
        home_bytes_per_s: 100 * MB,
        local_bytes_per_s: 100 * MB,
        mtbf_s: Some(30 * 86_400 / u64::from(nodes) + 1),
        restart_s: 300,
    };
    let width = jobs / 5;
    let text = format!("width={width},depth=5,batch=20GB,private=0.1GB,run=1000s,var=0.2");
    let policy = match std::env::var("POLICY").as_deref() {
        Ok("need") => Policy::Need,
        Ok("slice") => Policy::Strategy(Strategy::Slice),
        Ok("minimal") => Policy::Strategy(Strategy::Minimal),
        Ok("allbatch") => Policy::Strategy(Strategy::AllBatch),
        _ => Policy::Strategy(Strategy::All),
    };
    let run = simulate_policy(&text, &environment, policy, 1);
    assert!(run.is_complete(), "{:?}", run.outcome);
    assert!(run.failures > 0 && run.executions > u64::from(jobs));
    eprintln!(
        "{} jobs, {nodes} nodes: {} steps, {} failures, {} executions, {:.0} simulated s",
        jobs,
        run.events,
        run.failures,
        run.executions,
        run.seconds()
    );
}

/// What a cache takes beyond its size must not be what another one needs: five of 45 GB and one
/// pipeline's volumes nearly fill 250 GB.
#[test]
fn exactly_fitting_batch_volumes_all_find_room() {
    let run = simulate_strategy(
        "width=350,depth=5,batch=45GB,private=2.75GB,run=5000s,var=0.1",
        Strategy::AllBatch,
    );
    assert_eq!(run.fetched_bytes, u128::from(5 * 45 * GB));
}

#[test]
fn run_beyond_the_simulated_clock_fails_cleanly() {
    let canonical =
        CanonicalWorkload::parse("width=1,depth=2,batch=0B,private=0B,run=1s").expect("it is");
    let workflow = build_canonical_workflow(&canonical);
    for seconds in [
        u64::MAX / 3_000_000,
        u64::MAX / 1_500_000,
        u64::MAX / 1_000_000,
    ] {
        let load = measured_load(&workflow, seconds);
        let scenario = Scenario::new(thesis_nodes(), Policy::Need, load, 1);
        let run = Simulation::new(workflow.clone(), scenario).run();
        let why = run.expect("it ends").failure();
        let why = why.expect("two such jobs take more than the clock has");
        assert!(
            why.contains("the limit of the simulator"),
            "{seconds}: {why}"
        );
    }
}

#[test]
fn transfer_beyond_the_simulated_clock_fails_cleanly() {
    let canonical = CanonicalWorkload::parse("width=1,depth=1,batch=8000TB,private=8000TB,run=1s");
    let workflow = build_canonical_workflow(&canonical.expect("it is"));
    let mut environment = thesis_nodes();
    environment.home_bytes_per_s = 1;
    environment.nodes[0].storage_bytes = 100_000_000_000_000_000;
    let load = LoadModel::Declared { variability_ppm: 0 };
    let scenario = Scenario::new(environment, Policy::Need, load, 1);
    let run = Simulation::new(workflow, scenario).run().expect("it ends");
    let why = run.failure().expect("16 PB at a byte a second");
    assert!(
        why.contains("more than 292471 years after the start"),
        "{why}"
    );
}

/// One pipeline after the other with data of its own: what is not there any more, and how evenly it
/// lay, must not be looked at one by one whenever the next comes. Else this takes hours.
#[test]
fn ten_thousand_successive_batch_volumes_are_simulated() {
    let canonical = CanonicalWorkload::parse("width=1,depth=10000,batch=1MB,private=1MB,run=5s");
    let workflow = build_canonical_workflow(&canonical.expect("it is"));
    let load = LoadModel::Declared { variability_ppm: 0 };
    let scenario = Scenario::new(thesis_nodes(), Policy::Strategy(Strategy::Slice), load, 1);
    let run = Simulation::new(workflow, scenario).run().expect("it ends");
    assert!(run.is_complete(), "{run:?}");
    assert_eq!(run.fetched_bytes, 10_000_000_000);
}

/// Thirty parts of ten jobs (a first one, eight beside each other, a last one that reads all), each
/// of which reads one of three caches at random.
fn random_reader_workflow() -> Workflow {
    let mut rng = SeededRng::new(1);
    let mut text = String::new();
    for (cache, size) in [4, 1, 3].into_iter().enumerate() {
        text += &format!("volume db{cache} cache bafs://home/db{cache} {size} GB\n");
    }
    for part in 0..30 {
        for job in 0..10 {
            let (runtime, size) = (1_000 + rng.next_below(2_000), 100 + rng.next_below(400));
            let cache = rng.next_below(3);
            text += &format!(
                "job j{part}x{job} {{\nexecutable = x\nruntime = {runtime} s\n}}\n\
                 volume v{part}x{job} scratch {size} MB exact\n\
                 mount v{part}x{job} j{part}x{job} /out\n\
                 mount db{cache} j{part}x{job} /db\n"
            );
            let inputs = match job {
                0 => 0..0,
                1..9 => 0..1,
                _ => 1..9,
            };
            for input in inputs {
                text += &format!(
                    "parent j{part}x{input} child j{part}x{job}\n\
                     mount v{part}x{input} j{part}x{job} /in{input} ro\n"
                );
            }
        }
        text += &format!("extract v{part}x9 out bafs://home/out{part}\n");
    }
    let none = |_: &str| Err("no files".to_owned());
    let parsed = parse_workflow("parts.bafs", &text, &none);
    parsed.expect("it parses").workflow
}

/// Caches of 8 GB in all on nodes of 50 GB: pipelines that filled the nodes, and caches that were
/// whole on each of them, left no room for the others: 4.9 times as long as with a plan.
#[test]
fn simultaneous_batch_data_find_room_without_a_plan() {
    let environment = Environment {
        nodes: vec![NodeClass::new(10, 1, 5 * GB)],
        home_bytes_per_s: 10 * MB,
        local_bytes_per_s: 100 * MB,
        mtbf_s: None,
        restart_s: 60,
    };
    let of = |policy| {
        let load = LoadModel::Declared { variability_ppm: 0 };
        let scenario = Scenario::new(environment.clone(), policy, load, 1);
        let run = Simulation::new(random_reader_workflow(), scenario).run();
        run.expect("the run ends")
    };
    let (need, planned) = (of(Policy::Need), of(Policy::Strategy(Strategy::AllBatch)));
    assert!(need.is_complete() && planned.is_complete());
    assert_eq!(need.fetched_bytes, planned.fetched_bytes, "all of it, once");
    let ratio = need.seconds() / planned.seconds();
    assert!(ratio < 1.1, "{ratio:.2} times as long as with a plan");
}
