//! `bench faults`: every kind of fault that users met, as small reproductions through the public
//! command line (`files`); chaos from outside (`chaos`); a scheduler that is cut off for fourteen
//! seconds (`cut`); MPI jobs at once on one node (`mpi`); an agent's memory by volumes (`memory`).

mod bounds;
mod messages;
mod reproductions;
mod results;
mod runs;
mod user_directory;

use anyhow::Result;

pub(in crate::bench) use self::bounds::{HOLD_PROCESS, run_hold_process};
use self::reproductions::ReproductionCheck;
use self::user_directory::last_lines;
use super::{BenchmarkReport, Options};
use crate::fault_injection::{self, SeedResult};

/// The figures that the last line has, in this order.
const SUMMARY_FIGURES: &[&str] = &[
    "files",
    "mended",
    "chaos_runs",
    "chaos_wrong",
    "chaos_failed",
    "jobs_again_without_cause",
    "agent_mib_100_volumes",
    "agent_mib_1000_volumes",
    "mpi_at_once",
    "cut_14s_jobs_again",
];

/// Seeds of a full run and of a quick one.
const SEEDS: (u64, u64) = (40, 2);

/// The scheduler is cut off for so long.
const CUT_OFF_S: u64 = 14;

/// Volumes of the jobs whose agents' memory is measured.
const MANY_VOLUMES: [(u32, &str); 2] = [
    (100, "agent_mib_100_volumes"),
    (1_000, "agent_mib_1000_volumes"),
];

/// Jobs of a seed that ran again without cause and are listed in full.
const RERUNS_SHOWN: usize = 4;

/// Runs all parts.
pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    report.set_summary_figures(SUMMARY_FIGURES);
    // The reproductions can be chosen one by one.
    let needs_cut = options.is_part_selected("files") && options.points.is_empty();
    let cut = match needs_cut || options.is_part_selected("cut") {
        true => run_cut_off(report),
        false => None,
    };
    if options.is_part_selected("files") {
        run_reproductions(options, cut, report);
    }
    if options.is_part_selected("mpi") {
        match results::count_mpi_jobs_that_succeed() {
            Ok(jobs) => report.add_figure("mpi_at_once", f64::from(jobs)),
            Err(error) => report.add_missing("mpi_at_once", &format!("{error:#}")),
        }
    }
    if options.is_part_selected("memory") {
        for (volumes, key) in MANY_VOLUMES {
            match bounds::measure_agent_mib(volumes) {
                Ok(mib) => report.add_figure(key, mib as f64),
                Err(error) => report.add_missing(key, &format!("{error:#}")),
            }
        }
    }
    if options.is_part_selected("chaos") {
        run_chaos(options, report);
    }
    Ok(())
}

/// Says of each kind of fault whether the right value came.
fn run_reproductions(options: &Options, cut: Option<bool>, report: &mut BenchmarkReport) {
    report.print_section("kinds of faults that were found from outside");
    let mut rows = vec![
        ["kind", "mended", "what is wrong"]
            .map(str::to_owned)
            .to_vec(),
    ];
    let mut mended = 0;
    for (at, kind) in reproductions::REPRODUCTIONS.iter().enumerate() {
        if !options.points.is_empty() && !options.points.contains(&(at as u64 + 1)) {
            continue;
        }
        let (verdict, why) = match &kind.check {
            ReproductionCheck::Function(check) => match check() {
                Ok(()) => ("yes", String::new()),
                Err(error) => ("no", last_lines(&format!("{error:#}"))),
            },
            ReproductionCheck::CutOff => match cut {
                Some(true) => ("yes", String::new()),
                Some(false) => ("no", "see the run that was cut off".to_owned()),
                None => ("no", "the scheduler was not cut off".to_owned()),
            },
            ReproductionCheck::Pending(why) => ("left out", (*why).to_owned()),
        };
        mended += u32::from(verdict == "yes");
        report.print_line(&format!("  {:2} {verdict:9} {} {why}", at + 1, kind.name));
        rows.push(vec![kind.name.to_owned(), verdict.to_owned(), why]);
    }
    report.add_figure("files", reproductions::REPRODUCTIONS.len() as f64);
    report.add_figure("mended", f64::from(mended));
}

/// Whether nothing ran again, and all ended well, though the scheduler was cut off.
fn run_cut_off(report: &mut BenchmarkReport) -> Option<bool> {
    report.print_section("a run of 73 jobs whose scheduler is cut off for 14 s");
    let key = "cut_14s_jobs_again";
    let verdict = match fault_injection::injection_obstacle() {
        Some(why) => Err(why),
        None => fault_injection::run_with_scheduler_cut_off(CUT_OFF_S)
            .map_err(|error| format!("{error:#}")),
    };
    match verdict {
        Ok(verdict) => {
            print_result(&verdict, report);
            report.add_figure(key, verdict.reruns.len() as f64);
            Some(verdict.has_passed())
        }
        Err(why) => {
            report.add_missing(key, &why);
            None
        }
    }
}

/// Runs all seeds, some beside each other.
fn run_chaos(options: &Options, report: &mut BenchmarkReport) {
    report.print_section("chaos from outside: two users, each server in a network of its own");
    if let Some(why) = fault_injection::injection_obstacle() {
        for key in &SUMMARY_FIGURES[2..6] {
            report.add_missing(key, &why);
        }
        return;
    }
    let all: Vec<u64> = match options.points.is_empty() {
        true => (1..=options.choose(SEEDS.0, SEEDS.1)).collect(),
        false => options.points.clone(),
    };
    let verdicts = fault_injection::run_seeds(all, &|verdict| print_result(verdict, report));
    let count = |is: fn(&SeedResult) -> bool| verdicts.iter().filter(|it| is(it)).count() as f64;
    report.add_figure("chaos_runs", verdicts.len() as f64);
    report.add_figure("chaos_wrong", count(|it| !it.wrong_files.is_empty()));
    report.add_figure("chaos_failed", count(|it| !it.problems.is_empty()));
    let sum = |of: fn(&SeedResult) -> usize| verdicts.iter().map(of).sum::<usize>() as f64;
    report.add_figure("chaos_faults", sum(|it| it.faults.len()));
    report.add_figure("chaos_executions", sum(|it| it.executions));
    report.add_figure("chaos_jobs_again", sum(|it| it.reruns.len()));
    let without = sum(|it| it.reruns_without_cause().count());
    report.add_figure("jobs_again_without_cause", without);
}

/// Tells what came of a seed.
fn print_result(verdict: &SeedResult, report: &BenchmarkReport) {
    let SeedResult {
        seed,
        faults,
        reruns,
        executions,
        seconds,
        ..
    } = verdict;
    let without = verdict.reruns_without_cause().count();
    let state = if verdict.has_passed() {
        "fine"
    } else {
        "NOT FINE"
    };
    report.print_line(&format!(
        "  seed {seed}: {state} in {seconds:.0} s, {executions} executions, {} again, {without} \
         without cause: {}",
        reruns.len(),
        faults.join(" ")
    ));
    for text in verdict.wrong_files.iter().chain(&verdict.problems) {
        report.print_line(&format!("    {text}"));
    }
    for rerun in verdict.reruns_without_cause().take(RERUNS_SHOWN) {
        let told = rerun.journal_lines.join("\n      ");
        report.print_line(&format!(
            "    again without cause: {}\n      {told}",
            rerun.job
        ));
    }
    if let Some(kept) = &verdict.evidence_path {
        report.print_line(&format!("    kept: {}", kept.display()));
    }
}
