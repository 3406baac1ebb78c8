//! `bench chaos`: runs in which nodes, links, disks, the catalog and the scheduler fail by a seed.
//! A hundred in virtual time (`virtual`), five with real processes (`real`). What counts: every
//! run complete, every file that of a run without faults, nothing left.

use std::time::Duration;

use anyhow::{Result, ensure};
use bafs_sched::world::World;

use super::{Options, Report};
use crate::chaos;

/// Runs in virtual time, and with real processes.
const VIRTUAL: (u64, u64) = (100, 10);
const REAL: (u64, u64) = (5, 1);
/// Real faults go on for so long: less than a run takes, as a node that is away at its end keeps
/// volumes until their lifetime ends.
const FAULTS: Duration = Duration::from_secs(20);

/// What runs came to.
#[derive(Debug, Default)]
struct Sum {
    runs: u64,
    complete: u64,
    identical: u64,
    leaks: u64,
}

/// Runs all seeds.
pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    let mut sum = Sum::default();
    if options.wants("virtual") {
        in_virtual_time(options.pick(VIRTUAL.0, VIRTUAL.1), &mut sum, report);
    }
    if options.wants("real") {
        match crate::mount_obstacle() {
            Some(why) => report.not_measured("real_runs", &why),
            None => with_processes(options.pick(REAL.0, REAL.1), &mut sum, report)?,
        }
    }
    let figures = [
        ("runs", sum.runs),
        ("complete", sum.complete),
        ("identical", sum.identical),
        ("leaks", sum.leaks),
    ];
    for (key, value) in figures {
        report.figure(key, value as f64);
    }
    let is_fine = sum.complete == sum.runs && sum.identical == sum.runs && sum.leaks == 0;
    ensure!(is_fine, "not every run came to a good end: {sum:?}");
    Ok(())
}

fn in_virtual_time(seeds: u64, sum: &mut Sum, report: &mut Report) {
    report.section("in virtual time: 40 pipelines of 4 stages on 6 nodes");
    let calm = World::calm();
    let (mut lost, mut again, mut restarts) = (0, 0, 0);
    for seed in 0..seeds {
        let verdict = World::chaos(seed, &calm);
        sum.runs += 1;
        sum.complete += u64::from(verdict.is_complete);
        sum.identical += u64::from(verdict.is_identical);
        sum.leaks += verdict.leaks;
        lost += verdict.lost;
        again += verdict.again;
        restarts += verdict.restarts;
        if !(verdict.is_complete && verdict.is_identical && verdict.leaks == 0) {
            report.say(&format!("seed {seed}: {verdict:?}"));
        }
    }
    report.figure("virtual_runs", seeds as f64);
    report.figure("virtual_nodes_lost", lost as f64);
    report.figure("virtual_executions_again", again as f64);
    report.figure("virtual_scheduler_restarts", restarts as f64);
}

fn with_processes(seeds: u64, sum: &mut Sum, report: &mut Report) -> Result<()> {
    report.section("with real processes: 40 pipelines of 4 stages on 6 nodes");
    let mut rows = vec![vec!["seed".to_owned(), "s".to_owned(), "faults".to_owned()]];
    for seed in 0..seeds {
        let ended = chaos::run_chaos(seed, FAULTS)?;
        if let Some(why) = ended.isolation_obstacle.as_ref().filter(|_| seed == 0) {
            report.not_measured("real_runs_with_cut_links_and_full_disks", why);
        }
        sum.runs += 1;
        sum.complete += u64::from(ended.is_complete);
        sum.identical += u64::from(ended.is_identical);
        sum.leaks += ended.leftovers.len() as u64;
        rows.push(vec![
            seed.to_string(),
            format!("{:.1}", ended.seconds),
            ended.faults.join(" "),
        ]);
        if !(ended.is_complete && ended.is_identical && ended.leftovers.is_empty()) {
            report.say(&format!("seed {seed}: {ended:?}"));
        }
    }
    report.table(&rows);
    report.figure("real_runs", seeds as f64);
    Ok(())
}
