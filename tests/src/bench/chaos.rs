//! `bench chaos`: runs in which nodes, links, disks, the catalog and the scheduler fail by a seed.
//! A hundred in virtual time (`virtual`), five with real processes (`real`). Criteria: every run is
//! complete, every file equals that of a run without faults, no leftovers.

use std::time::Duration;

use anyhow::{Result, ensure};
use bafs_sim::simulated_cluster::SimulatedCluster;

use super::{BenchmarkReport, Options};
use crate::chaos;

/// Runs in virtual time, and with real processes.
const VIRTUAL_RUNS: (u64, u64) = (100, 10);
const REAL_RUNS: (u64, u64) = (5, 1);
/// Duration of real faults: less than a run takes, because a node that is absent at its end keeps
/// volumes until their lifetime ends.
const FAULT_PERIOD: Duration = Duration::from_secs(20);

/// The results of runs.
#[derive(Debug, Default)]
struct ChaosTotals {
    runs: u64,
    runs_complete: u64,
    runs_identical: u64,
    leftovers: u64,
}

/// Runs all seeds.
pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    let mut sum = ChaosTotals::default();
    if options.is_part_selected("virtual") {
        run_in_virtual_time(
            options.choose(VIRTUAL_RUNS.0, VIRTUAL_RUNS.1),
            &mut sum,
            report,
        );
    }
    if options.is_part_selected("real") {
        match crate::mount_obstacle() {
            Some(why) => report.add_missing("real_runs", &why),
            None => run_with_processes(options.choose(REAL_RUNS.0, REAL_RUNS.1), &mut sum, report)?,
        }
    }
    let figures = [
        ("runs", sum.runs),
        ("complete", sum.runs_complete),
        ("identical", sum.runs_identical),
        ("leaks", sum.leftovers),
    ];
    for (key, value) in figures {
        report.add_figure(key, value as f64);
    }
    let is_fine =
        sum.runs_complete == sum.runs && sum.runs_identical == sum.runs && sum.leftovers == 0;
    ensure!(is_fine, "not every run came to a good end: {sum:?}");
    Ok(())
}

fn run_in_virtual_time(seeds: u64, sum: &mut ChaosTotals, report: &mut BenchmarkReport) {
    report.print_section("in virtual time: 40 pipelines of 4 stages on 6 nodes");
    let calm = SimulatedCluster::run_without_faults();
    let (mut lost, mut again, mut restarts) = (0, 0, 0);
    for seed in 0..seeds {
        let verdict = SimulatedCluster::run_chaos(seed, &calm);
        sum.runs += 1;
        sum.runs_complete += u64::from(verdict.is_complete);
        sum.runs_identical += u64::from(verdict.is_identical);
        sum.leftovers += verdict.leaks;
        lost += verdict.faults;
        again += verdict.reruns;
        restarts += verdict.restarts;
        if !(verdict.is_complete && verdict.is_identical && verdict.leaks == 0) {
            report.print_line(&format!("seed {seed}: {verdict:?}"));
        }
    }
    report.add_figure("virtual_runs", seeds as f64);
    report.add_figure("virtual_nodes_lost", lost as f64);
    report.add_figure("virtual_executions_again", again as f64);
    report.add_figure("virtual_scheduler_restarts", restarts as f64);
}

fn run_with_processes(
    seeds: u64,
    sum: &mut ChaosTotals,
    report: &mut BenchmarkReport,
) -> Result<()> {
    report.print_section("with real processes: 40 pipelines of 4 stages on 6 nodes");
    let mut rows = vec![vec!["seed".to_owned(), "s".to_owned(), "faults".to_owned()]];
    for seed in 0..seeds {
        let ended = chaos::run_chaos(seed, FAULT_PERIOD)?;
        if let Some(why) = ended.isolation_obstacle.as_ref().filter(|_| seed == 0) {
            report.add_missing("real_runs_with_cut_links_and_full_disks", why);
        }
        sum.runs += 1;
        sum.runs_complete += u64::from(ended.is_complete);
        sum.runs_identical += u64::from(ended.is_identical);
        sum.leftovers += ended.leftovers.len() as u64;
        rows.push(vec![
            seed.to_string(),
            format!("{:.1}", ended.seconds),
            ended.faults.join(" "),
        ]);
        if !(ended.is_complete && ended.is_identical && ended.leftovers.is_empty()) {
            report.print_line(&format!("seed {seed}: {ended:?}"));
        }
    }
    report.print_table(&rows);
    report.add_figure("real_runs", seeds as f64);
    Ok(())
}
