//! The simulator's caches against arithmetic: what the thesis checks its own by (its figure A.3).

use bafs_sched::JobStartOrder;
use bafs_sim::past_runs::from_csv;
use bafs_sim::planner::{CanonicalWorkload, Environment, NodeClass, Strategy, predict_time};
use bafs_sim::simulated_cluster::parse_workflow_text;
use bafs_sim::simulator::{
    JobLoad, LoadModel, MeasuredLoad, MountLoad, Policy, Scenario, Simulation, SimulationResult,
    build_canonical_workflow,
};
use bafs_workflow::Workflow;

const MB: u64 = 1_000_000;

/// Rates of memory, disk, a node's link and the link to home, in bytes per second.
const RATES: [u64; 4] = [1_000 * MB, 50 * MB, 12 * MB, MB];
/// Memory of a node, and the two nodes' space for the cache together, in bytes.
const MEMORY_BYTES: u64 = 100 * MB;
const CACHE_BYTES: u64 = 400 * MB;

/// Jobs that read data through a cache of this size, `rows` one after the other on each of `nodes`
/// nodes.
fn scan_workflow(nodes: u32, rows: u32, cache_bytes: u64, policy: &str) -> Workflow {
    let mut text = format!("volume b cache bafs://home/b {cache_bytes} B {policy}\n");
    for column in 0..nodes {
        for row in 0..rows {
            text += &format!(
                "job j{column}x{row} {{\nexecutable = x\n}}\n\
                 mount b j{column}x{row} /b\n"
            );
            if row > 0 {
                let before = row - 1;
                text += &format!("parent j{column}x{before} child j{column}x{row}\n");
            }
        }
    }
    parse_workflow_text(&text)
}

/// How long all jobs take when each reads so many bytes.
fn simulate_seconds(
    workflow: Workflow,
    bytes: u64,
    environment: Environment,
    policy: Policy,
) -> f64 {
    let jobs = vec![bytes; workflow.jobs.len()];
    simulate_scans(workflow, &jobs, environment, policy).seconds()
}

/// A run of jobs that each read so many bytes.
fn simulate_scans(
    workflow: Workflow,
    bytes: &[u64],
    environment: Environment,
    policy: Policy,
) -> SimulationResult {
    let job = |read_bytes: &u64| JobLoad {
        compute_us: 0,
        mounts: vec![MountLoad {
            read_bytes: *read_bytes,
            ..MountLoad::default()
        }],
    };
    let load = LoadModel::Measured(MeasuredLoad {
        jobs: bytes.iter().map(job).collect(),
        ..MeasuredLoad::default()
    });
    let scenario = Scenario::new(environment, policy, load, 1);
    let run = Simulation::new(workflow, scenario).run().expect("it ends");
    assert!(run.is_complete(), "{:?}", run.outcome);
    run
}

/// Bytes per second of each warm scan on two nodes.
fn simulated_warm_rate(bytes: u64, policy: &str) -> f64 {
    let [memory, disk, link, home] = RATES;
    let environment = || Environment {
        nodes: vec![NodeClass {
            memory_bytes: MEMORY_BYTES,
            memory_bytes_per_s: Some(memory),
            disk_bytes_per_s: Some(disk),
            ..NodeClass::new(2, 1, CACHE_BYTES / 2)
        }],
        home_bytes_per_s: home,
        local_bytes_per_s: link,
        mtbf_s: None,
        restart_s: 60,
    };
    let time = |rows| {
        let workflow = scan_workflow(2, rows, bytes.min(CACHE_BYTES), policy);
        simulate_seconds(workflow, bytes, environment(), Policy::Need)
    };
    bytes as f64 / ((time(12) - time(2)) / 10.0)
}

/// What passes through several levels takes the sum of their times. Half of what is not in memory
/// comes over the link, as each node has a half.
fn expected_serial_rate(bytes: u64, in_memory: u64, from_home: u64) -> f64 {
    let [memory, disk, link, home] = RATES.map(|rate| rate as f64);
    let [all, rest] = [bytes, bytes - in_memory].map(|bytes| bytes as f64);
    let from_home = from_home as f64;
    let seconds = all / memory + (rest - from_home) / disk + rest / 2.0 / link + from_home / home;
    all / seconds
}

#[test]
fn scan_rates_match_memory_disk_and_home() {
    for (bytes, lru, mru) in [
        (
            MEMORY_BYTES / 2,
            (MEMORY_BYTES / 2, 0),
            (MEMORY_BYTES / 2, 0),
        ),
        (MEMORY_BYTES, (MEMORY_BYTES, 0), (MEMORY_BYTES, 0)),
        (110 * MB, (0, 0), (MEMORY_BYTES, 0)),
        (200 * MB, (0, 0), (MEMORY_BYTES, 0)),
        (CACHE_BYTES, (0, 0), (MEMORY_BYTES, 0)),
        (440 * MB, (0, 440 * MB), (MEMORY_BYTES, 40 * MB)),
        (800 * MB, (0, 800 * MB), (MEMORY_BYTES, 400 * MB)),
    ] {
        for (policy, (in_memory, from_home)) in [("lru", lru), ("mru", mru)] {
            let expected = expected_serial_rate(bytes, in_memory, from_home);
            let ratio = simulated_warm_rate(bytes, policy) / expected;
            assert!((ratio - 1.0).abs() < 0.05, "{policy} {bytes}: {ratio}");
        }
    }
}

#[test]
fn remote_alone_and_cooperative_reads_match_their_links() {
    let (nodes, bytes, rows) = (32, 100 * MB, 3);
    let [_, _, link, home] = RATES;
    let environment = |home_bytes_per_s, is_alone| {
        let class = |at: u32| NodeClass {
            cluster: format!("c{at}"),
            ..NodeClass::new(1, 1, 2 * bytes)
        };
        Environment {
            nodes: match is_alone {
                true => (0..nodes).map(class).collect(),
                false => vec![NodeClass::new(nodes, 1, 2 * bytes)],
            },
            home_bytes_per_s,
            local_bytes_per_s: link,
            mtbf_s: None,
            restart_s: 60,
        }
    };
    let time = |environment, policy| {
        let workflow = scan_workflow(nodes, rows, bytes, "lru");
        simulate_seconds(workflow, bytes, environment, policy)
    };
    let over_home = bytes as f64 / home as f64;
    let remote = time(environment(home, false), Policy::Strategy(Strategy::Remote));
    // All nodes fetch at once, and each gets its part of the link.
    let share = home / u64::from(nodes);
    let alone = time(environment(share, true), Policy::Need);
    let cooperative = time(environment(home, false), Policy::Need);
    let warm = f64::from(rows - 1) * bytes as f64 / link as f64;
    let all = f64::from(nodes) * over_home;
    for (name, found, expected) in [
        ("remote", remote, f64::from(rows) * all),
        ("stand-alone", alone, all + warm),
        ("cooperative", cooperative, over_home + warm),
    ] {
        let ratio = found / expected;
        assert!((ratio - 1.0).abs() < 0.05, "{name}: {ratio}");
    }
}

/// Sixteen pipelines on eight processors: the second half begins when the first has gone on, and
/// must find its batch data there still, though they take nearly all that the nodes have.
#[test]
fn batch_data_nearly_filling_nodes_are_fetched_once() {
    let batch = 60_800_000;
    let mut text = String::new();
    for stage in 0..4 {
        text += &format!("volume b{stage} cache bafs://home/b{stage} {batch} B\n");
    }
    for column in 0..16 {
        text += &format!("volume p{column} scratch 128 KiB files 10\n");
        for stage in 0..4 {
            text += &format!(
                "job j{column}x{stage} {{\nexecutable = x\nruntime = 1 s\n}}\n\
                 mount b{stage} j{column}x{stage} /b\nmount p{column} j{column}x{stage} /p\n"
            );
            if stage > 0 {
                let before = stage - 1;
                text += &format!("parent j{column}x{before} child j{column}x{stage}\n");
            }
        }
    }
    for order in [
        JobStartOrder::Need,
        JobStartOrder::BreadthFirst,
        JobStartOrder::DepthFirst,
    ] {
        // Nine hundredths more than the data, and more.
        for node in [16_900_000, 17_600_000, 18_000_000] {
            let environment = Environment {
                nodes: vec![NodeClass::new(4, 2, node)],
                home_bytes_per_s: 16 * MB,
                local_bytes_per_s: 500 * MB,
                mtbf_s: None,
                restart_s: 60,
            };
            let load = LoadModel::Declared { variability_ppm: 0 };
            let scenario = Scenario {
                slack_permille: 20,
                ..Scenario::new(environment, Policy::Order(order), load, 1)
            };
            let run = Simulation::new(parse_workflow_text(&text), scenario).run();
            let run = run.expect("it ends");
            assert!(run.is_complete(), "{order:?}: {:?}", run.outcome);
            assert_eq!(run.fetched_bytes, 4 * batch, "{order:?}, {node}");
        }
    }
}

/// Two jobs that read the same at once on a node with memory: the second one finds nothing there
/// before the first has read it.
#[test]
fn memory_holds_nothing_before_it_was_read() {
    let environment = Environment {
        nodes: vec![NodeClass {
            memory_bytes: 1_000 * MB,
            ..NodeClass::new(1, 2, 1_000 * MB)
        }],
        home_bytes_per_s: MB,
        local_bytes_per_s: 100 * MB,
        mtbf_s: None,
        restart_s: 60,
    };
    let workflow = scan_workflow(2, 1, 100 * MB, "lru");
    let run = simulate_scans(workflow, &[100 * MB; 2], environment, Policy::Need);
    assert_eq!((run.seconds(), run.busy_us), (100.0, 200_000_000));
}

/// A job reads a megabyte of what another reads 100 GB of, both at once.
#[test]
fn large_reader_fetches_all_after_a_small_one() {
    let text = "job,runtime,shared,shared-bytes\na,10,db,1 MB\nb,10,db,100 GB\n";
    let past = from_csv("jobs", text).expect("jobs");
    for jobs in [[0, 1], [1, 0]] {
        let mut measured = past.measured.clone();
        measured.jobs = jobs.map(|job| past.measured.jobs[job].clone()).to_vec();
        let environment = Environment {
            nodes: vec![NodeClass::new(2, 1, 200_000 * MB)],
            home_bytes_per_s: 100 * MB,
            local_bytes_per_s: 100_000 * MB,
            mtbf_s: None,
            restart_s: 60,
        };
        let load = LoadModel::Measured(measured);
        let scenario = Scenario::new(environment, Policy::Need, load, 1);
        let run = Simulation::new(past.workflow.clone(), scenario).run();
        let run = run.expect("it ends");
        assert_eq!(run.home_bytes, 100_000_000_000);
        assert_eq!(run.seconds(), 1_010.0);
    }
}

/// All scratch volumes lie on one node: what fifty others read and write passes through its link,
/// or its disk where that is slower.
#[test]
fn node_holding_all_volumes_limits_their_users() {
    let text = "width=50,depth=1,batch=0B,private=100MB,run=1s";
    let canonical = CanonicalWorkload::parse(text).expect("a workload");
    let time = |disk_bytes_per_s| {
        let holder = NodeClass {
            disk_bytes_per_s,
            ..NodeClass::new(1, 1, 100_000 * MB)
        };
        let environment = Environment {
            nodes: vec![holder, NodeClass::new(50, 1, 0)],
            home_bytes_per_s: 100_000 * MB,
            local_bytes_per_s: 10 * MB,
            mtbf_s: None,
            restart_s: 60,
        };
        let predicted_s = predict_time(Strategy::All, &canonical.shape(), &environment);
        let load = LoadModel::Declared { variability_ppm: 0 };
        let policy = Policy::Strategy(Strategy::All);
        let scenario = Scenario::new(environment, policy, load, 1);
        let run = Simulation::new(build_canonical_workflow(&canonical), scenario).run();
        let run = run.expect("it ends");
        assert!(run.is_complete(), "{:?}", run.outcome);
        (run.seconds(), predicted_s.expect("it is possible"))
    };
    // 50 times 200 MB at 10 MB/s.
    let (found, predicted) = time(None);
    assert!((found / 1_000.0 - 1.0).abs() < 0.05, "{found} s");
    assert!(
        (found / predicted - 1.0).abs() < 0.05,
        "{found} s, predicted {predicted} s"
    );
    let (behind_disk, _) = time(Some(MB));
    assert!(
        (behind_disk / 10_000.0 - 1.0).abs() < 0.05,
        "{behind_disk} s"
    );
}

/// The link to home is a hundred times as fast as those of the nodes, which what comes from home
/// passes as well.
#[test]
fn node_links_limit_transfers_from_home() {
    let environment = Environment {
        nodes: vec![NodeClass::new(10, 1, 100_000 * MB)],
        home_bytes_per_s: 1_000 * MB,
        local_bytes_per_s: 10 * MB,
        mtbf_s: None,
        restart_s: 60,
    };
    for text in [
        "width=30,depth=2,batch=0B,private=5GB,run=100s",
        "width=10,depth=2,batch=20GB,private=1MB,run=100s",
    ] {
        let canonical = CanonicalWorkload::parse(text).expect("a workload");
        let predicted_s = predict_time(Strategy::All, &canonical.shape(), &environment);
        let predicted_s = predicted_s.expect("it is possible");
        let load = LoadModel::Declared { variability_ppm: 0 };
        let policy = Policy::Strategy(Strategy::All);
        let scenario = Scenario::new(environment.clone(), policy, load, 1);
        let run = Simulation::new(build_canonical_workflow(&canonical), scenario).run();
        let found_s = run.expect("it ends").seconds();
        assert!(
            (found_s / predicted_s - 1.0).abs() < 0.15,
            "{text}: {found_s} s, predicted {predicted_s} s"
        );
    }
}
