//! Chaos in virtual time: nodes, links, disks, the catalog and the scheduler fail by a seed, and
//! every run ends complete, with the files of a run without faults, and with nothing left. `SEED=n`
//! runs the one seed, `SEEDS=n` so many.

#![allow(clippy::print_stdout, reason = "a seed that fails must be known")]

use bafs_sim::simulated_cluster::SimulatedCluster;

const SEEDS: u64 = 100;
const SOAK_SEEDS: u64 = 1_000;

fn run_seeds(seeds: std::ops::Range<u64>) {
    let (mut lost, mut again, mut restarts) = (0, 0, 0);
    let count = seeds.end - seeds.start;
    let calm = SimulatedCluster::run_without_faults();
    for seed in seeds {
        println!("SEED={seed}");
        let verdict = SimulatedCluster::run_chaos(seed, &calm);
        assert!(verdict.is_complete, "seed {seed}: {verdict:?}");
        assert!(verdict.is_identical, "seed {seed}: {verdict:?}");
        assert_eq!(verdict.leaks, 0, "seed {seed}: {verdict:?}");
        lost += verdict.faults;
        again += verdict.reruns;
        restarts += verdict.restarts;
    }
    println!("{lost} nodes lost, {again} executions again, {restarts} restarts");
    assert!(count == 1 || (lost >= count && again > count && restarts > count));
}

fn number_from_env(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().expect("a number"))
}

#[test]
fn first_half_of_seeds_completes_with_identical_files() {
    match number_from_env("SEED") {
        Some(seed) => run_seeds(seed..seed + 1),
        None => run_seeds(0..number_from_env("SEEDS").unwrap_or(SEEDS) / 2),
    }
}

/// The second half of the seeds, on another processor.
#[test]
fn second_half_of_seeds_completes_with_identical_files() {
    let seeds = number_from_env("SEEDS").unwrap_or(SEEDS);
    if number_from_env("SEED").is_none() {
        run_seeds(seeds / 2..seeds);
    }
}

/// Nobody is lost, so nothing that was finished is done once more, and nothing that was begun.
#[test]
fn cut_off_scheduler_repeats_no_job() {
    let calm = SimulatedCluster::run_without_faults();
    let mut cuts = 0;
    for seed in 0..SEEDS / 2 {
        println!("SEED={seed}");
        let verdict = SimulatedCluster::run_link_cuts(seed, &calm, 0);
        assert!(
            verdict.is_complete && verdict.is_identical,
            "seed {seed}: {verdict:?}"
        );
        assert_eq!(verdict.leaks, 0, "seed {seed}: {verdict:?}");
        assert_eq!(verdict.faults, 0, "seed {seed}: {verdict:?}");
        assert_eq!(verdict.repeated_completions, 0, "seed {seed}: {verdict:?}");
        cuts += verdict.cut_offs;
    }
    assert!(cuts > SEEDS / 4, "{cuts}");
}

#[test]
fn runs_with_cut_links_complete() {
    let calm = SimulatedCluster::run_without_faults();
    let mut again = 0;
    for seed in 0..SEEDS / 2 {
        println!("SEED={seed}");
        let verdict = SimulatedCluster::run_link_cuts(seed, &calm, 20);
        assert!(
            verdict.is_complete && verdict.is_identical,
            "seed {seed}: {verdict:?}"
        );
        assert_eq!(verdict.leaks, 0, "seed {seed}: {verdict:?}");
        again += verdict.repeated_completions;
    }
    println!("{again} jobs completed again");
}

#[test]
#[ignore = "takes minutes; runs in soak"]
fn soak_seeds_complete_with_identical_files() {
    run_seeds(SEEDS..SEEDS + SOAK_SEEDS);
}
