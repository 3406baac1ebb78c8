//! Links of clusters, their latency and the skew of hashing in simulations, against arithmetic.

use bafs_sched::JobStartOrder;
use bafs_sim::planner::{Environment, NodeClass, Strategy};
use bafs_sim::simulator::{
    JobLoad, LoadModel, MeasuredLoad, MountLoad, Policy, Scenario, Simulation, SimulationResult,
};
use bafs_workflow::parse_workflow;

const MB: u64 = 1_000_000;

/// So many jobs of one processor each, after each other or not, that scan one cache of this size.
fn simulate_scans(
    jobs: usize,
    is_chain: bool,
    bytes: u64,
    environment: Environment,
    seed: u64,
) -> SimulationResult {
    let scenario = Scenario::new(
        environment,
        Policy::Need,
        LoadModel::Declared { variability_ppm: 0 },
        seed,
    );
    simulate_scans_in(jobs, is_chain, bytes, scenario)
}

fn simulate_scans_in(
    jobs: usize,
    is_chain: bool,
    bytes: u64,
    scenario: Scenario,
) -> SimulationResult {
    let mut text = format!("volume b cache bafs://home/b {bytes} B\n");
    for at in 0..jobs {
        text += &format!("job j{at} {{\nexecutable = x\n}}\nmount b j{at} /b\n");
        if is_chain && at > 0 {
            text += &format!("parent j{} child j{at}\n", at - 1);
        }
    }
    let none = |_: &str| Err("no files".to_owned());
    let workflow = parse_workflow("scans.bafs", &text, &none).expect("a workflow");
    let mount = MountLoad {
        read_bytes: bytes,
        ..MountLoad::default()
    };
    let job = JobLoad {
        compute_us: 0,
        mounts: vec![mount],
    };
    let load = LoadModel::Measured(MeasuredLoad {
        jobs: vec![job; jobs],
        ..MeasuredLoad::default()
    });
    let scenario = Scenario { load, ..scenario };
    let run = Simulation::new(workflow.workflow, scenario).run();
    let run = run.expect("it ends");
    assert!(run.is_complete(), "{:?}", run.outcome);
    run
}

fn environment(nodes: Vec<NodeClass>) -> Environment {
    Environment {
        nodes,
        home_bytes_per_s: 10 * MB,
        local_bytes_per_s: 1_000 * MB,
        mtbf_s: None,
        restart_s: 60,
    }
}

#[test]
fn clusters_fetch_over_their_own_home_links() {
    let class = |cluster: &str, home_bytes_per_s| NodeClass {
        cluster: cluster.to_owned(),
        home_bytes_per_s,
        ..NodeClass::new(1, 1, 1_000 * MB)
    };
    let time = |far| {
        let nodes = vec![class("near", None), class("far", far)];
        let run = simulate_scans(2, false, 100 * MB, environment(nodes), 1);
        assert_eq!(run.home_bytes, u128::from(200 * MB));
        run.seconds()
    };
    // The slower of two links of 10 MB/s, then of one of 10 and one of 2.
    assert_eq!(time(None), 10.0);
    assert_eq!(time(Some(2 * MB)), 50.0);
    assert_eq!(time(Some(100 * MB)), 10.0);
}

#[test]
fn transfers_arrive_later_by_the_links_latency() {
    let class = NodeClass {
        home_latency_us: 1_500_000,
        local_latency_us: 20_000,
        ..NodeClass::new(1, 1, 1_000 * MB)
    };
    // 100 MB at 10 MB/s, then the latency once: jobs read ahead. The second finds all here.
    let run = simulate_scans(1, false, 100 * MB, environment(vec![class.clone()]), 1);
    assert_eq!(run.seconds(), 11.5);
    let run = simulate_scans(2, true, 100 * MB, environment(vec![class.clone()]), 1);
    assert_eq!(run.seconds(), 11.6);
    // Half of it at the other node: 50 MB at 1,000 MB/s and 20 ms.
    let two = NodeClass {
        storage_bytes: 60 * MB,
        count: 2,
        ..class
    };
    let run = simulate_scans(2, true, 100 * MB, environment(vec![two]), 1);
    assert_eq!(run.seconds(), 11.57);
}

/// Four nodes that have just room for the cache, five scans one after the other.
#[test]
fn exactly_sized_cache_refetches_blocks_lost_to_hashing() {
    let fetched = |has_hash_imbalance, part, seed| {
        let class = NodeClass {
            has_hash_imbalance,
            ..NodeClass::new(4, 1, part)
        };
        simulate_scans(5, true, 64 * MB, environment(vec![class]), seed).fetched_bytes as f64 / 64e6
    };
    assert_eq!(fetched(false, 16 * MB, 1), 1.0);
    assert_eq!(fetched(true, 18 * MB, 1), 1.0);
    let skewed: Vec<f64> = (1..20).map(|seed| fetched(true, 16 * MB, seed)).collect();
    // A block too many costs the nodes that have one up to a sixth of each later scan.
    assert!(
        skewed.iter().all(|all| (1.02..2.2).contains(all)),
        "{skewed:?}"
    );
    assert_eq!(
        fetched(true, 16 * MB, 3),
        skewed[2],
        "the same seed, the same bytes"
    );
    assert!(skewed.iter().any(|all| *all != skewed[0]), "{skewed:?}");
}

#[test]
fn rested_home_limit_passes_its_burst_at_once() {
    let time = |home_burst_us| {
        let nodes = vec![NodeClass {
            home_burst_us,
            ..NodeClass::new(1, 1, 1_000 * MB)
        }];
        simulate_scans(1, false, 100 * MB, environment(nodes), 1).seconds()
    };
    let saved = time(0) - time(200_000);
    assert!((saved - 0.2).abs() < 1e-3, "{saved}");
}

/// Nobody counted how long a job waited for a directory of its own node: that is in its computing.
#[test]
fn bind_mounted_volume_adds_no_time_to_computing() {
    let text = "volume v scratch 200 MB\njob j {\nexecutable = x\n}\nmount v j /v\n";
    let none = |_: &str| Err("no files".to_owned());
    let workflow = parse_workflow("bound.bafs", text, &none).expect("a workflow");
    let time = |is_bound| {
        let mount = MountLoad {
            written_bytes: 100 * MB,
            is_bind_mount: is_bound,
            ..MountLoad::default()
        };
        let job = JobLoad {
            compute_us: 3_000_000,
            mounts: vec![mount],
        };
        let load = LoadModel::Measured(MeasuredLoad {
            jobs: vec![job],
            ..MeasuredLoad::default()
        });
        let nodes = vec![NodeClass::new(1, 1, 1_000 * MB)];
        let mut site = environment(nodes);
        site.local_bytes_per_s = 100 * MB;
        let scenario = Scenario::new(site, Policy::Need, load, 1);
        let run = Simulation::new(workflow.workflow.clone(), scenario).run();
        run.expect("it ends").seconds()
    };
    assert_eq!([true, false].map(time), [3.0, 4.0]);
}

/// A cache of just its size, in which blocks are driven out before they are read again: those who
/// begin one after the other, within milliseconds, bring them once for all, although what home
/// saved brings them to the first one at once.
#[test]
fn close_readers_refetch_evicted_blocks_only_once() {
    let mut text = "volume c cache bafs://home/c 16 MB\n".to_owned();
    for job in 0..8 {
        text += &format!("job j{job} {{\nexecutable = x\n}}\nmount c j{job} /c\n");
    }
    let parsed = parse_workflow("w.bafs", &text, &|path| Err(path.to_owned()));
    let mut workflow = parsed.expect("it parses").workflow;
    for job in &mut workflow.jobs {
        job.runtime_s = Some(1);
    }
    let class = NodeClass {
        has_hash_imbalance: true,
        home_burst_us: 200_000,
        ..NodeClass::new(4, 1, 4 * MB)
    };
    let environment = Environment {
        nodes: vec![class],
        home_bytes_per_s: 16 * MB,
        local_bytes_per_s: 20 * MB,
        mtbf_s: None,
        restart_s: 60,
    };
    for seed in 0..5 {
        let load = LoadModel::Declared {
            variability_ppm: 20_000,
        };
        let policy = Policy::Order(JobStartOrder::BreadthFirst);
        let scenario = Scenario {
            slack_permille: 0,
            ..Scenario::new(environment.clone(), policy, load, seed)
        };
        let run = Simulation::new(workflow.clone(), scenario).run();
        let run = run.expect("it ends");
        assert!(run.is_complete(), "{:?}", run.outcome);
        let again = run.fetched_bytes as u64 - 16 * MB;
        // One or two blocks of each mebibyte and a half, once.
        assert!((MB..3 * MB).contains(&again), "seed {seed}: {again}");
    }
}

/// Four nodes keep a cache and many slow ones read it: each gets it no faster than over its own
/// link, and two readers on one node share that.
#[test]
fn reader_is_limited_by_its_own_slow_link() {
    let keeping = NodeClass::new(4, 0, 1_000 * MB);
    let slow = |count, cpus| NodeClass {
        local_bytes_per_s: Some(10 * MB),
        ..NodeClass::new(count, cpus, 0)
    };
    let seconds = |class: NodeClass, jobs| {
        let mut environment = environment(vec![keeping.clone(), class]);
        environment.home_bytes_per_s = 1_000 * MB;
        let policy = Policy::Strategy(Strategy::All);
        let load = LoadModel::Declared { variability_ppm: 0 };
        let scenario = Scenario::new(environment, policy, load, 1);
        simulate_scans_in(jobs, false, 100 * MB, scenario).seconds()
    };
    let one = seconds(slow(6, 1), 1);
    assert!((10.0..10.3).contains(&one), "{one}");
    let side_by_side = seconds(slow(6, 1), 6);
    assert!((10.0..11.5).contains(&side_by_side), "{side_by_side}");
    let together = seconds(slow(1, 2), 2);
    assert!((20.0..20.3).contains(&together), "{together}");
}

/// A node's own link carries what is filled, taken home and accessed there.
#[test]
fn slow_node_link_limits_transfers_to_home() {
    let text = "volume v scratch 50 MB from bafs://home/v\nvolume w scratch 50 MB\n\
                job a {\nexecutable = x\n}\nmount v a /v ro\nmount w a /w\n\
                extract w f bafs://home/f\n";
    let seconds = |storage_bytes, policy| {
        let fast = NodeClass::new(1, 0, 0);
        let slow = NodeClass {
            local_bytes_per_s: Some(10 * MB),
            disk_bytes_per_s: Some(1_000 * MB),
            ..NodeClass::new(1, 1, storage_bytes)
        };
        let mut environment = environment(vec![fast, slow]);
        environment.home_bytes_per_s = 1_000 * MB;
        let none = |_: &str| Err("no files".to_owned());
        let workflow = parse_workflow("w.bafs", text, &none).expect("a workflow");
        let load = LoadModel::Declared { variability_ppm: 0 };
        let scenario = Scenario::new(environment, policy, load, 1);
        let run = Simulation::new(workflow.workflow, scenario).run();
        let run = run.expect("it ends");
        assert_eq!(run.home_bytes, u128::from(100 * MB));
        run.seconds()
    };
    let filled = seconds(1_000 * MB, Policy::Need);
    assert!((10.0..10.3).contains(&filled), "{filled}");
    let remote = seconds(0, Policy::Strategy(Strategy::Remote));
    assert!((10.0..10.3).contains(&remote), "{remote}");
}

/// What passes no level takes no time, although what crosses a link is late.
#[test]
fn one_node_alone_waits_for_no_peers() {
    let alone = NodeClass {
        memory_bytes_per_s: Some(1_000 * MB),
        local_latency_us: 5_000_000,
        ..NodeClass::new(1, 1, 1_000 * MB)
    };
    let run = simulate_scans(1, false, 100 * MB, environment(vec![alone]), 1);
    assert!((10.0..10.3).contains(&run.seconds()), "{}", run.seconds());
}
