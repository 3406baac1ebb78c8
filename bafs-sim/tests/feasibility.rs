//! What the planner calls possible, against every way to place the volumes and against the
//! simulator, in which the real scheduler runs the workload on nodes that are filled to the last
//! byte.

use std::collections::BTreeMap;

use bafs_sim::planner::{
    Allocation, CanonicalWorkload, Environment, NodeClass, PrivateLayout, Shape, Shortage,
    Strategy, StrategyAllocation, plan_workload,
};
use bafs_sim::simulator::{
    LoadModel, Policy, Scenario, Simulation, SimulationResult, build_canonical_workflow,
};
use bafs_workflow::parse_workflow;
use proptest::prelude::*;
use proptest::strategy::Strategy as Generate;

const MB: u64 = 1_000_000;

fn environment(nodes: Vec<NodeClass>) -> Environment {
    Environment {
        nodes,
        home_bytes_per_s: 10 * MB,
        local_bytes_per_s: 10 * MB,
        mtbf_s: None,
        restart_s: 60,
    }
}

fn canonical_workload(width: u32, depth: u32, batch_mb: u64, private_mb: u64) -> CanonicalWorkload {
    CanonicalWorkload {
        width,
        depth,
        batch_bytes: batch_mb * MB,
        private_bytes: private_mb * MB,
        batch_files: 1,
        private_files: 1,
        run_s: 60.0,
        variability: 0.2,
        layout: PrivateLayout::Chain,
    }
}

fn simulate_strategy(
    canonical: &CanonicalWorkload,
    environment: &Environment,
    strategy: Strategy,
) -> SimulationResult {
    let load = LoadModel::Declared {
        variability_ppm: 200_000,
    };
    let policy = Policy::Strategy(strategy);
    let scenario = Scenario::new(environment.clone(), policy, load, 1);
    let simulation = Simulation::new(build_canonical_workflow(canonical), scenario);
    simulation.run().expect("it comes to an end")
}

/// Two nodes of 5 GB have room for two volumes of 3 GB, not for three, although that is 9 of 10 GB.
#[test]
fn volumes_fitting_only_in_sum_are_not_possible() {
    let environment = environment(vec![NodeClass::new(2, 1, 5_000 * MB)]);
    let shape = canonical_workload(1, 2, 500, 3_000).shape();
    let all = Strategy::All.plan_allocation(&shape, &environment);
    let missing_volumes = 1;
    assert_eq!(all.shortage, Some(Shortage::Placement { missing_volumes }));
    let choice = plan_workload(shape, &environment).choice;
    assert_eq!(
        choice.map(|choice| choice.strategy),
        Some(Strategy::Slice),
        "two at once are enough for a job"
    );
}

/// Jobs with a scratch volume of their own each, all of which read one database.
fn unequal_volumes(volumes_mb: &[u64], batch_mb: u64) -> Shape {
    let mut text = format!("volume db cache bafs://home/db {batch_mb} MB\n");
    for (at, size) in volumes_mb.iter().enumerate() {
        text += &format!(
            "job j{at} {{\nexecutable = x\nruntime = 60 s\n}}\n\
             volume v{at} scratch {size} MB exact\nmount v{at} j{at} /v\nmount db j{at} /db\n"
        );
    }
    let none = |_: &str| Err("no files".to_owned());
    let parsed = parse_workflow("w.bafs", &text, &none);
    Shape::from_largest_levels(&parsed.expect("a workflow").workflow, 0.1).0
}

#[test]
fn unlike_volumes_are_placed_one_by_one() {
    let environment = environment(vec![NodeClass::new(2, 1, 5_000 * MB)]);
    let all = |volumes_mb: &[u64], batch_mb| {
        let allocation =
            Strategy::All.plan_allocation(&unequal_volumes(volumes_mb, batch_mb), &environment);
        assert!(allocation.is_exact, "{allocation:?}");
        allocation.shortage
    };
    let missing_volumes = 1;
    let no_place = Some(Shortage::Placement { missing_volumes });
    assert_eq!(all(&[3_000, 2_900, 2_800], 500), no_place, "9.2 of 10 GB");
    assert_eq!(all(&[3_000, 2_900, 2_000], 2_100), None, "to the last byte");
    let missing_bytes = u128::from(100 * MB);
    let total = Some(Shortage::Total { missing_bytes });
    assert_eq!(all(&[3_000, 2_900, 2_000], 2_200), total);
}

/// How All would run a workflow on nodes with room for so many files.
fn allocate_with_files(text: &str, class: NodeClass, files: u64) -> Allocation {
    let none = |_: &str| Err("no files".to_owned());
    let parsed = parse_workflow("w.bafs", text, &none);
    let shape = Shape::from_workflow(&parsed.expect("a workflow").workflow, 0.1);
    let nodes = vec![NodeClass { files, ..class }];
    Strategy::All.plan_allocation(&shape, &environment(nodes))
}

/// Volumes of one size that have room for unlike numbers of files are unlike volumes.
#[test]
fn volume_placement_respects_file_counts() {
    let text = "volume a scratch 1 GB files 10\nvolume b scratch 1 GB files 1000\n\
                job a {\nexecutable = x\nruntime = 9 s\n}\nmount a a /v\n\
                job b {\nexecutable = x\nruntime = 9 s\n}\nmount b b /v\n";
    let all = |files| {
        let allocation = allocate_with_files(text, NodeClass::new(1, 1, 10_000 * MB), files);
        (allocation.is_possible(), allocation.is_exact)
    };
    assert_eq!(all(1_010), (true, true));
    assert_eq!(all(1_009), (false, true));
}

/// The scheduler divides batch data by bytes, and each part counts all their files: where these are
/// short it may leave a volume without a place that exists.
#[test]
fn batch_data_with_many_files_are_not_certain() {
    let text = "volume c cache bafs://home/c 1 GB files 60000\nvolume v scratch 1 GB exact files 50000\n\
                job a {\nexecutable = x\nruntime = 100 s\n}\nmount c a /c\nmount v a /v\n\
                volume w scratch 1 MB files 1000\n\
                job b {\nexecutable = x\nruntime = 100 s\n}\nmount c b /c\nmount w b /v\n";
    let all = |files| allocate_with_files(text, NodeClass::new(2, 1, 3_000 * MB), files);
    assert!(all(111_000).is_exact, "all on one node");
    let doubtful = all(110_999);
    assert!(doubtful.is_possible() && !doubtful.is_exact);
    let batch_files = 60_000;
    assert_eq!(all(10_000).shortage, Some(Shortage::Files { batch_files }));
}

/// There are too many ways to place these, and the obvious one fails.
#[test]
fn sums_without_a_placement_are_not_certain() {
    let environment = environment(vec![NodeClass::new(40, 1, 1_000 * MB)]);
    // Each two of these fill a node but for 2 MB, and three do not fit.
    let volumes_mb: Vec<u64> = (0..81).map(|at| 480 + at % 3).collect();
    let all = Strategy::All.plan_allocation(&unequal_volumes(&volumes_mb, 1), &environment);
    assert!(all.is_possible() && !all.is_exact, "{all:?}");
    let minimal =
        Strategy::Minimal.plan_allocation(&unequal_volumes(&[1_000, 500], 1), &environment);
    assert!(minimal.is_possible() && !minimal.is_exact, "{minimal:?}");
}

/// Whether these volumes fit beside so much batch data, by trying every node for each.
fn can_fit_by_search(nodes: &mut [u64], volumes: &[u64], batch: u64) -> bool {
    let Some((volume, others)) = volumes.split_first() else {
        return nodes.iter().sum::<u64>() >= batch;
    };
    (0..nodes.len()).any(|at| {
        if nodes[at] < *volume {
            return false;
        }
        nodes[at] -= volume;
        let fits = can_fit_by_search(nodes, others, batch);
        nodes[at] += volume;
        fits
    })
}

#[test]
fn node_without_free_files_holds_no_further_volume() {
    let with_files = |files| {
        let class = NodeClass {
            files,
            ..NodeClass::new(1, 1, 10_000 * MB)
        };
        let work = CanonicalWorkload {
            batch_files: 5,
            private_files: 10,
            ..canonical_workload(1, 1, 100, 100)
        };
        let minimal = Strategy::Minimal.plan_allocation(&work.shape(), &environment(vec![class]));
        minimal.is_possible()
    };
    assert!(with_files(25) && !with_files(24));
}

/// Nodes of one cluster share batch data; what other clusters have is of no use for these.
#[test]
fn batch_data_exceeding_every_cluster_are_not_possible() {
    let class = |cluster: &str| NodeClass {
        cluster: cluster.to_owned(),
        ..NodeClass::new(1, 1, 1_000 * MB)
    };
    let environment = environment(vec![class("a"), class("b")]);
    let allocate = |batch_mb, private_mb| {
        let shape = canonical_workload(1, 1, batch_mb, private_mb).shape();
        Strategy::Minimal
            .plan_allocation(&shape, &environment)
            .shortage
    };
    let missing_bytes = u128::from(200 * MB);
    assert_eq!(
        allocate(1_200, 100),
        Some(Shortage::Cluster { missing_bytes })
    );
    assert_eq!(
        allocate(1_000, 400),
        None,
        "scratch volumes lie in the other one"
    );
}

/// Two of three batch volumes fit at once, and one of three pipelines falls two stages behind.
#[test]
fn batch_volume_waits_for_a_slow_pipeline() {
    let (wide, storing) = (
        NodeClass::new(2, 2, 800 * MB),
        NodeClass::new(2, 0, 200 * MB),
    );
    let environment = environment(vec![wide, storing]);
    let work = canonical_workload(3, 3, 200, 400);
    let slice = Strategy::Slice.plan_allocation(&work.shape(), &environment);
    assert_eq!((slice.batch_volumes, slice.refetches), (2, 0));
    let run = simulate_strategy(&work, &environment, Strategy::Slice);
    assert!(run.is_complete(), "{:?}", run.failure());
    assert_eq!(run.fetched_bytes, u128::from(3 * 200 * MB));
}

/// Batch data must lie in the one cluster that has room for them, and nearly fill it.
#[test]
fn scratch_volumes_move_to_clusters_without_batch_data() {
    let class = |count, storage_mb, cluster: &str| NodeClass {
        cluster: cluster.to_owned(),
        ..NodeClass::new(count, 1, storage_mb * MB)
    };
    let nodes = vec![class(30, 5_000, "c0"), class(1, 20_000, "c1")];
    let environment = environment(nodes);
    let work = canonical_workload(5, 5, 28_000, 4_000);
    let all_batch = Strategy::AllBatch.plan_allocation(&work.shape(), &environment);
    assert_eq!((all_batch.shortage, all_batch.concurrency), (None, 3));
    assert!(!all_batch.is_exact, "there are two clusters");
    let run = simulate_strategy(&work, &environment, Strategy::AllBatch);
    assert!(run.is_complete(), "{:?}", run.failure());
    assert_eq!(run.rule_relaxations, 0);
    assert_eq!(run.fetched_bytes, u128::from(5 * 28_000 * MB));
    // Without a plan two volumes of a job must lie together where the batch data are.
    let missing_bytes = u128::from(3_000 * MB);
    let need = Strategy::Need.plan_allocation(&work.shape(), &environment);
    assert_eq!(need.shortage, Some(Shortage::Node { missing_bytes }));
}

/// The first job's batch data fill the larger nodes, which had most room before.
#[test]
fn scratch_volume_and_batch_data_use_different_clusters() {
    let class = |storage_mb, cluster: &str| NodeClass {
        cluster: cluster.to_owned(),
        ..NodeClass::new(2, 1, storage_mb * MB)
    };
    let environment = environment(vec![class(500, "a"), class(300, "b")]);
    let work = canonical_workload(2, 2, 800, 300);
    let minimal = Strategy::Minimal.plan_allocation(&work.shape(), &environment);
    assert_eq!(minimal.shortage, None);
    let run = simulate_strategy(&work, &environment, Strategy::Minimal);
    assert!(run.is_complete(), "{:?}", run.failure());
}

/// Whether so many volumes fit on the nodes beside so much batch data, by trying every place.
fn can_fit_anywhere(
    environment: &Environment,
    shape: &Shape,
    volumes: u64,
    batch: (u64, u64),
) -> bool {
    let mut nodes = Vec::new();
    for class in &environment.nodes {
        let node = (class.storage_bytes, class.files);
        nodes.extend(std::iter::repeat_n(node, class.count as usize));
    }
    let size = shape.largest_volume_bytes;
    // For each number of volumes placed so far the most room for batch data that is left.
    let mut best: BTreeMap<u64, u64> = BTreeMap::from([(0, 0)]);
    for (bytes, files) in nodes {
        let mut next = BTreeMap::new();
        for (&placed, &left) in &best {
            for more in 0..=volumes - placed {
                if more * size > bytes || more * shape.volume_files > files {
                    break;
                }
                let is_roomy = files - more * shape.volume_files >= batch.1;
                let room = if is_roomy { bytes - more * size } else { 0 };
                let entry = next.entry(placed + more).or_insert(0);
                *entry = (*entry).max(left + room);
            }
        }
        best = next;
    }
    best.get(&volumes).is_some_and(|left| *left >= batch.0)
}

/// Small workloads on few nodes, some of which only store or only compute.
fn generate_cases() -> impl Generate<Value = (CanonicalWorkload, Environment)> {
    let workload = (1u32..5, 1u32..4, 0u64..12, 0u64..5, any::<bool>());
    let node = (1u32..4, 0u32..3, 0u64..12);
    let nodes = proptest::collection::vec(node, 1..3);
    (workload, nodes).prop_map(|((width, depth, batch, private, is_chain), nodes)| {
        let work = CanonicalWorkload {
            layout: if is_chain {
                PrivateLayout::Chain
            } else {
                PrivateLayout::Shared
            },
            ..canonical_workload(width, depth, 100 * batch, 100 * private)
        };
        let class = |(count, cpus, storage)| NodeClass::new(count, cpus, 100 * storage * MB);
        let mut nodes: Vec<NodeClass> = nodes.into_iter().map(class).collect();
        // Something must run jobs.
        nodes[0].cpus = nodes[0].cpus.max(1);
        (work, environment(nodes))
    })
}

/// The same with nodes of two clusters.
fn generate_cluster_cases() -> impl Generate<Value = (CanonicalWorkload, Environment)> {
    let clusters = proptest::collection::vec(any::<bool>(), 1..4);
    (generate_cases(), generate_cases(), clusters).prop_map(
        |((work, mut environment), (_, more), clusters)| {
            environment.nodes.extend(more.nodes);
            for (class, is_other) in environment.nodes.iter_mut().zip(clusters) {
                class.cluster = if is_other { "b" } else { "a" }.to_owned();
            }
            (work, environment)
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 400,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn possible_allocations_are_exactly_the_fitting_ones((work, environment) in generate_cases()) {
        let shape = work.shape();
        let count = |bytes: u128| match work.private_bytes {
            0 => 0,
            size => bytes as u64 / size,
        };
        let width = u64::from(work.width);
        let (all, one) = (u64::from(work.depth) * work.batch_bytes, work.batch_bytes);
        let (kept, running) = (count(shape.retained_bytes), count(shape.running_bytes));
        let waiting = count(shape.waiting_bytes);
        for (strategy, volumes, batch_bytes) in [
            (Strategy::All, kept * width, all),
            (Strategy::AllPrivate, kept * width, one),
            (Strategy::AllBatch, running, all),
            (Strategy::Slice, waiting * width + running - waiting, one),
            (Strategy::Minimal, running, one),
        ] {
            let allocation = strategy.plan_allocation(&shape, &environment);
            let fits = can_fit_anywhere(&environment, &shape, volumes, (batch_bytes, 0));
            prop_assert_eq!(allocation.is_possible(), fits, "{}: {:?}", strategy, allocation);
            let (more, unit) = match strategy {
                Strategy::All | Strategy::AllPrivate => continue,
                Strategy::Slice => (waiting * width, running - waiting),
                _ => (0, running),
            };
            let at_once = allocation.concurrency;
            if fits && unit > 0 && at_once < width {
                let one_more = more + unit * (at_once + 1);
                let fits = can_fit_anywhere(&environment, &shape, one_more, (batch_bytes, 0));
                prop_assert!(!fits, "{}: more than {} fit", strategy, at_once);
            }
        }
    }

    #[test]
    fn unlike_volumes_are_possible_exactly_when_they_fit(
        volumes in proptest::collection::vec(1u64..12, 1..6),
        batch in 1u64..12,
        nodes in proptest::collection::vec(1u64..15, 1..5),
    ) {
        let hundreds = |sizes: &[u64]| sizes.iter().map(|size| 100 * size).collect::<Vec<_>>();
        let shape = unequal_volumes(&hundreds(&volumes), 100 * batch);
        let classes = nodes.iter().map(|size| NodeClass::new(1, 1, 100 * size * MB)).collect();
        let environment = environment(classes);
        let fits = can_fit_by_search(&mut nodes.clone(), &volumes, batch);
        for strategy in [Strategy::All, Strategy::AllPrivate] {
            let allocation = strategy.plan_allocation(&shape, &environment);
            prop_assert!(allocation.is_exact);
            prop_assert_eq!(allocation.is_possible(), fits, "{}: {:?}", strategy, allocation);
        }
    }

    /// The scheduler follows each possible strategy to the end, its rules never have to give way,
    /// and it fetches no batch volume more often than the plan says; what is not possible even with
    /// least data at once never ends.
    #[test]
    fn exactly_the_possible_strategies_run_to_completion((work, environment) in generate_cases()) {
        // A cache with one reader lies on one node: it is no batch volume.
        prop_assume!(work.width > 1);
        let shape = work.shape();
        for strategy in Strategy::THESIS_STRATEGIES {
            let allocation = strategy.plan_allocation(&shape, &environment);
            let is_possible = allocation.is_possible();
            if strategy == Strategy::Remote || !(is_possible || strategy == Strategy::Minimal) {
                continue;
            }
            let run = simulate_strategy(&work, &environment, strategy);
            prop_assert_eq!(run.is_complete(), is_possible, "{}: {:?}", strategy, run.failure());
            if is_possible {
                prop_assert_eq!(run.rule_relaxations, 0, "{}: its rules gave way", strategy);
            }
            if is_possible {
                let volumes = u64::from(work.depth) + allocation.refetches;
                let most = u128::from(work.batch_bytes) * u128::from(volumes);
                prop_assert!(run.fetched_bytes <= most, "{}: fetched again", strategy);
            }
        }
    }

    /// Where nodes are of several clusters what is called certain runs as well.
    #[test]
    fn certain_strategies_complete_on_several_clusters(
        (work, environment) in generate_cluster_cases()
    ) {
        let shape = work.shape();
        for strategy in Strategy::THESIS_STRATEGIES {
            let allocation = strategy.plan_allocation(&shape, &environment);
            if strategy == Strategy::Remote || !allocation.is_possible() || !allocation.is_exact {
                continue;
            }
            let run = simulate_strategy(&work, &environment, strategy);
            prop_assert!(run.is_complete(), "{}: {:?}", strategy, run.failure());
            prop_assert_eq!(run.rule_relaxations, 0, "{}: its rules gave way", strategy);
        }
    }
}
