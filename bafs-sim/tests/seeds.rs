//! Whole runs in virtual time with injected faults, one for each seed. `SEED=n` runs only that one.

#![expect(
    clippy::print_stdout,
    reason = "the seed is printed before it can fail"
)]

use bafs_proto::ids::RunId;
use bafs_sched::{
    CopyDecision, CopyOutcome, Event, Outcome, PolicyNames, Scheduler, Settings, Space,
};
use bafs_sim::seeded_rng::SeededRng;
use bafs_sim::simulated_cluster::{Faults, NodeSpec, SimulatedCluster, parse_workflow_text};

const SEEDS: u64 = 300;
pub(crate) const LIMIT_MS: u64 = 4 * 3_600_000;

fn declare_job(name: &str) -> String {
    format!("job {name} {{\n  executable = /bin/true\n  retry = 3\n}}\n")
}

/// `width` pipelines of `depth` jobs; job i reads volume i and writes volume i + 1, all read a
/// batch volume, all but the first of each another one, which may come before them; sometimes a
/// last job reads what all pipelines wrote.
fn generate_workflow(rng: &mut SeededRng) -> String {
    let (width, depth) = (1 + rng.next_below(6), 1 + rng.next_below(4));
    // What is joined must exist at once, so it has to fit into the smallest fleet.
    let is_joined = width <= 2 && rng.next_bool(700);
    let batch = 1 + rng.next_below(if is_joined { 20 } else { 60 });
    let mut text = format!("volume batch bafs://home/data {batch} MB\n");
    text += "volume next bafs://home/next 1 MB warm\n";
    for pipeline in 0..width {
        for at in 0..=depth {
            let size = 1 + rng.next_below(10);
            text += &format!("volume v{pipeline}_{at} scratch {size} MB files 10\n");
        }
        for at in 0..depth {
            let name = format!("j{pipeline}_{at}");
            text += &declare_job(&name);
            text += &format!("mount batch {name} /data\n");
            if at > 0 {
                text += &format!("parent j{pipeline}_{} child {name}\n", at - 1);
                text += &format!("mount v{pipeline}_{at} {name} /in ro\nmount next {name} /next\n");
            }
            text += &format!("mount v{pipeline}_{} {name} /out\n", at + 1);
        }
        text += &format!("extract v{pipeline}_{depth} out bafs://home/out.{pipeline}\n");
    }
    if is_joined {
        text += &declare_job("last");
        for pipeline in 0..width {
            text += &format!("parent j{pipeline}_{} child last\n", depth - 1);
            text += &format!("mount v{pipeline}_{depth} last /in{pipeline} ro\n");
        }
        text += "volume sum scratch 5 MB files 10\nmount sum last /out\n";
        text += "extract sum all bafs://home/all\n";
    }
    text
}

pub(crate) fn cluster_for_seed(seed: u64) -> SimulatedCluster {
    let mut rng = SeededRng::new(seed ^ 0x5eed);
    let workflow = parse_workflow_text(&generate_workflow(&mut rng));
    let nodes = (0..1 + rng.next_below(4)).map(|_| NodeSpec {
        capacity: Space {
            bytes: (85 + rng.next_below(60)) * 1_000_000,
            files: 100_000,
        },
        slots: 1 + u32::try_from(rng.next_below(3)).expect("it is small"),
    });
    let nodes = nodes.collect();
    let faults = Faults {
        node_dies: rng.next_below(40),
        node_wiped: 500,
        reply_lost: rng.next_below(50),
        job_fails: rng.next_below(200),
        environment_fails: rng.next_below(100),
        volume_vanishes: rng.next_below(10),
        until_ms: 120_000,
        ..Faults::default()
    };
    let settings = Settings {
        environment_faults_max: 1_000,
        killed_nodes_max: 1_000,
        nodes_timeout_ms: 300_000,
        space_timeout_ms: 300_000,
        cleanup_timeout_ms: 600_000,
        policies: PolicyNames::default().with(
            "replication",
            match rng.next_below(3) {
                0 => "never",
                1 => "always",
                _ => "cost-benefit",
            },
        ),
        ..Settings::default()
    };
    SimulatedCluster::new(seed, workflow, settings, nodes, faults)
}

/// What happened in runs.
#[derive(Debug, Default)]
struct RunTotals {
    /// Executions that were re-runs.
    reruns: u64,
    /// Nodes that were lost.
    lost_nodes: u64,
    /// Copies that took the place of lost volumes.
    copies_used: u64,
    /// Parts of caches that were fetched before their readers.
    warmed_caches: u64,
}

/// Runs one seed.
fn run_seed(seed: u64) -> RunTotals {
    println!("SEED={seed}");
    let mut world = cluster_for_seed(seed);
    let outcome = world.run_to_end(LIMIT_MS);
    assert_eq!(outcome, Outcome::Complete, "seed {seed}");
    let extracts = world.scheduler.workflow().extracts.len();
    assert_eq!(
        world.extract_arrivals.len(),
        extracts,
        "seed {seed}: every output is at home"
    );
    // A restart anywhere comes to the same state.
    let fresh = Scheduler::new(
        RunId(seed),
        world.scheduler.workflow().clone(),
        world.scheduler.settings().clone(),
    );
    let mut replayed = fresh;
    // Records of finished jobs are made for a journal alone.
    replayed.start_recording();
    for (now, event) in &world.records {
        replayed.step(*now, event.clone(), &mut Vec::new());
    }
    assert!(
        replayed == world.scheduler,
        "seed {seed}: the replay differs"
    );
    let progress = replayed.progress();
    let saved = |(_, receipt): &(_, &CopyDecision)| {
        matches!(receipt.outcome, CopyOutcome::UsedForRecovery(_))
    };
    RunTotals {
        reruns: progress.executions - progress.jobs_total,
        lost_nodes: progress.nodes_lost,
        copies_used: replayed.copy_decisions().filter(saved).count() as u64,
        warmed_caches: world.warmed_caches.len() as u64,
    }
}

#[test]
fn every_seed_completes() {
    if let Ok(seed) = std::env::var("SEED") {
        run_seed(seed.parse().expect("SEED is a number"));
        return;
    }
    let seeds = std::env::var("SEEDS").map_or(SEEDS, |text| text.parse().expect("a number"));
    let total = (0..seeds)
        .map(run_seed)
        .fold(RunTotals::default(), |sum, run| RunTotals {
            reruns: sum.reruns + run.reruns,
            lost_nodes: sum.lost_nodes + run.lost_nodes,
            copies_used: sum.copies_used + run.copies_used,
            warmed_caches: sum.warmed_caches + run.warmed_caches,
        });
    println!("{seeds} seeds: {total:?}");
    assert!(
        total.warmed_caches > seeds / 2,
        "caches come before their readers: {total:?}"
    );
    assert!(
        total.reruns > seeds && total.lost_nodes > seeds / 4 && total.copies_used > seeds / 30,
        "the faults must happen, and copies must help: {total:?}"
    );
}

#[test]
fn the_same_seed_gives_the_same_facts() {
    let facts = |seed| -> Vec<(bafs_proto::time::Time, Event)> {
        let mut world = cluster_for_seed(seed);
        world.run_to_end(LIMIT_MS);
        world.records
    };
    assert_eq!(facts(7), facts(7));
    assert_ne!(facts(7), facts(8));
}

/// Only one node has both the slots and the space, and it is first in neither order.
#[test]
fn job_finds_the_only_suitable_node() {
    let text = "volume v scratch 50 MB files 10\njob wide {\n  executable = /bin/true\n}\n\
                mount v wide /v\n";
    let node = |megabytes: u64, slots| NodeSpec {
        capacity: Space {
            bytes: megabytes * 1_000_000,
            files: 100,
        },
        slots,
    };
    let mut nodes = vec![node(10, 4); 9];
    nodes.extend(vec![node(500, 1); 9]);
    nodes.push(node(100, 2));
    let settings = Settings::default();
    let mut wide = parse_workflow_text(text);
    wide.jobs[0].cpus = 2;
    let mut world = SimulatedCluster::new(1, wide, settings, nodes, Faults::default());
    assert_eq!(world.run_to_end(60_000), Outcome::Complete);
}

/// Runs 12 pipelines of four stages of 30 s on four nodes; answers virtual seconds and re-runs.
fn run_policy(seed: u64, checkpoint: &'static str, node_dies: u64) -> (u64, u64) {
    let mut text = String::new();
    for p in 0..12 {
        for at in 0..4 {
            text += &declare_job(&format!("j{p}_{at}"));
            text += &format!("volume v{p}_{at} scratch 5 MB files 10\n");
            text += &format!("mount v{p}_{at} j{p}_{at} /out\n");
            if at > 0 {
                text += &format!("parent j{p}_{} child j{p}_{at}\n", at - 1);
                text += &format!("mount v{p}_{} j{p}_{at} /in ro\n", at - 1);
            }
        }
        text += &format!("extract v{p}_3 out bafs://home/out.{p}\n");
    }
    let node = NodeSpec {
        capacity: Space {
            bytes: 1_000_000_000,
            files: 100_000,
        },
        slots: 2,
    };
    let faults = Faults {
        node_dies,
        node_wiped: 1_000,
        until_ms: 100_000,
        ..Faults::default()
    };
    let settings = Settings {
        policies: PolicyNames::default().with("replication", checkpoint),
        environment_faults_max: 1_000,
        killed_nodes_max: 1_000,
        ..Settings::default()
    };
    let mut world = SimulatedCluster::new(
        seed,
        parse_workflow_text(&text),
        settings,
        vec![node; 4],
        faults,
    );
    assert_eq!(world.run_to_end(LIMIT_MS), Outcome::Complete);
    let progress = world.scheduler.progress();
    (
        world.elapsed_ms() / 1_000,
        progress.executions - progress.jobs_total,
    )
}

/// Sums of [`run_policy`] over so many seeds that those of two policies differ by more than chance.
fn run_policy_seeds(checkpoint: &'static str, node_dies: u64) -> (u64, u64) {
    let runs = (0..150).map(|seed| run_policy(seed, checkpoint, node_dies));
    let sum = runs.fold((0, 0), |(a, b), (c, d)| (a + c, b + d));
    println!("{node_dies} of 1000 nodes die in a second, {checkpoint:?}: {sum:?}");
    sum
}

#[test]
fn copies_cost_little_and_save_work_under_failures() {
    let never = run_policy_seeds("never", 0);
    let sometimes = run_policy_seeds("cost-benefit", 0);
    assert!(
        sometimes.0 * 100 <= never.0 * 103,
        "{sometimes:?} {never:?}"
    );
    let never = run_policy_seeds("never", 15);
    let always = run_policy_seeds("always", 15);
    let sometimes = run_policy_seeds("cost-benefit", 15);
    assert!(sometimes.1 < never.1 && always.1 < never.1);
}
