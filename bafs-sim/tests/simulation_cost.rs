//! How much work simulations are, counted in the records that are looked at: it is bounded, and
//! grows with the jobs. No time is taken.

use bafs_sim::planner::{CanonicalWorkload, Environment, NodeClass, Strategy};
use bafs_sim::simulator::study::{baseline_workloads, thesis_environment};
use bafs_sim::simulator::{LoadModel, Policy, Scenario, Simulation, build_canonical_workflow};

const MB: u64 = 1_000_000;
const GB: u64 = 1_000 * MB;

/// The only node fails as soon as it is there, and is away for years: what happens is only that it
/// fails again while it is away.
#[test]
fn run_without_progress_is_abandoned() {
    let canonical = CanonicalWorkload::parse("width=1,depth=1,batch=0B,private=1MB,run=1d");
    let environment = Environment {
        nodes: vec![NodeClass::new(1, 1, GB)],
        home_bytes_per_s: MB,
        local_bytes_per_s: MB,
        mtbf_s: Some(1),
        restart_s: 1_000_000_000,
    };
    let load = LoadModel::Declared { variability_ppm: 0 };
    let scenario = Scenario {
        wasted_records_max: 50_000,
        ..Scenario::new(environment, Policy::Need, load, 1)
    };
    let workflow = build_canonical_workflow(&canonical.expect("it is"));
    let run = Simulation::new(workflow, scenario).run().expect("it ends");
    let why = run.failure().expect("it cannot be done");
    assert!(why.contains("no job finished"), "{why}");
    assert!(run.records_examined < 100_000, "{}", run.records_examined);
}

/// With ten times as many jobs on ten times as many nodes each job costs no more looks at records:
/// so work grows as jobs do, times the depth of the maps in which the records are.
#[test]
fn simulation_work_grows_linearly_with_jobs() {
    for policy in [Policy::Need, Policy::Strategy(Strategy::All)] {
        let each = [1_000u32, 10_000].map(|jobs| {
            let clusters = jobs / 1_000;
            let class = |cluster| NodeClass {
                cluster: format!("c{cluster}"),
                ..NodeClass::new(10, 1, 20 * GB)
            };
            let environment = Environment {
                nodes: (0..clusters).map(class).collect(),
                home_bytes_per_s: 100 * MB,
                local_bytes_per_s: 100 * MB,
                mtbf_s: Some(30 * 86_400 / (10 * u64::from(clusters))),
                restart_s: 300,
            };
            let width = jobs / 5;
            let text = format!("width={width},depth=5,batch=20GB,private=0.1GB,run=1000s,var=0.2");
            let canonical = CanonicalWorkload::parse(&text).expect("a workload");
            let load = LoadModel::Declared {
                variability_ppm: 200_000,
            };
            let scenario = Scenario::new(environment, policy, load, 1);
            let run = Simulation::new(build_canonical_workflow(&canonical), scenario).run();
            let run = run.expect("it ends");
            assert!(run.is_complete() && run.failures > 0, "{:?}", run.outcome);
            run.records_examined as f64 / f64::from(jobs)
        });
        assert!(each[1] < 1.15 * each[0], "{policy}: {each:?}");
    }
}

/// Caches are shared by ten nodes, so that many go at once, in many clusters, and nodes fail often:
/// what one of them costs grows with no other cluster.
#[test]
fn failures_and_deletions_cost_no_more_across_clusters() {
    let each = [100u32, 1_000].map(|nodes| {
        let class = |cluster| NodeClass {
            cluster: format!("c{cluster}"),
            ..NodeClass::new(10, 1, 20 * GB)
        };
        let environment = Environment {
            nodes: (0..nodes / 10).map(class).collect(),
            home_bytes_per_s: 100 * MB,
            local_bytes_per_s: 100 * MB,
            mtbf_s: Some(200_000 / u64::from(nodes)),
            restart_s: 300,
        };
        let text = format!("width={nodes},depth=5,batch=20GB,private=0.1GB,run=1000s,var=0.2");
        let canonical = CanonicalWorkload::parse(&text).expect("a workload");
        let load = LoadModel::Declared {
            variability_ppm: 200_000,
        };
        let scenario = Scenario::new(environment, Policy::Strategy(Strategy::All), load, 1);
        let run = Simulation::new(build_canonical_workflow(&canonical), scenario).run();
        let run = run.expect("it ends");
        assert!(run.is_complete() && run.failures > 0, "{:?}", run.outcome);
        run.records_examined as f64 / f64::from(5 * nodes)
    });
    assert!(each[1] < 1.15 * each[0], "{each:?}");
}

/// The next cache fits only when the one before has gone, and each time all pipelines wait for it:
/// that it fits nowhere is seen at once, and not by each job at each node.
#[test]
fn cache_without_room_is_rejected_cheaply() {
    let environment = Environment {
        nodes: vec![NodeClass::new(50, 1, 5 * GB)],
        home_bytes_per_s: MB,
        local_bytes_per_s: 12 * MB,
        mtbf_s: Some(102_600),
        restart_s: 60,
    };
    let text = "width=350,depth=3,batch=176.6GB,private=0.2036GB,run=5000s,var=0.1";
    let canonical = CanonicalWorkload::parse(text).expect("a workload");
    let load = LoadModel::Declared {
        variability_ppm: 100_000,
    };
    let scenario = Scenario::new(environment, Policy::Need, load, 1);
    let run = Simulation::new(build_canonical_workflow(&canonical), scenario).run();
    let run = run.expect("it ends");
    assert!(run.is_complete() && run.failures > 0, "{:?}", run.outcome);
    let each = run.records_examined / 1_050;
    assert!(each < 20_000, "{each} records for each job");
}

/// The thesis' mixed baseline. With this seed eighty pipelines have not begun when the others come
/// to a volume that leaves no room for the last one: those went on one after the other, for as long
/// as all else takes, beside a cache that only the eighty needed.
#[test]
fn caches_for_later_jobs_yield_to_begun_pipelines() {
    let (_, mixed) = baseline_workloads().into_iter().next_back().expect("three");
    let load = LoadModel::Declared {
        variability_ppm: 100_000,
    };
    let scenario = Scenario::new(thesis_environment(), Policy::Need, load, 24);
    let run = Simulation::new(build_canonical_workflow(&mixed), scenario).run();
    let run = run.expect("it ends");
    assert!(run.is_complete());
    assert!(run.seconds() < 900_000.0, "{} s", run.seconds());
}
