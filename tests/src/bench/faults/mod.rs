//! `bench faults`: every kind of fault that users met, by small reproductions through the public
//! command line (`files`); chaos from outside (`chaos`); a scheduler that is cut off for fourteen
//! seconds (`cut`); MPI jobs at once on one node (`mpi`); an agent's memory by volumes (`memory`).

mod bounds;
mod reproductions;
mod results;
mod runs;
mod user_directory;
mod words;

use anyhow::Result;

pub(in crate::bench) use self::bounds::{HOLD_PROCESS, hold_process};
use self::reproductions::Check;
use self::user_directory::last_lines;
use super::{Options, Report};
use crate::injection::{self, Verdict};

/// The figures that the last line has, in this order.
const PROMISED: &[&str] = &[
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
const CUT_S: u64 = 14;

/// Volumes of the jobs whose agents' memory is measured.
const MANY_VOLUMES: [(u32, &str); 2] = [
    (100, "agent_mib_100_volumes"),
    (1_000, "agent_mib_1000_volumes"),
];

/// So many jobs of a seed are told in full that ran again without cause.
const RERUNS_SHOWN: usize = 4;

/// Runs all parts.
pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    report.promise(PROMISED);
    // The reproductions can be chosen one by one.
    let needs_cut = options.wants("files") && options.points.is_empty();
    let cut = match needs_cut || options.wants("cut") {
        true => cut_off(report),
        false => None,
    };
    if options.wants("files") {
        files(options, cut, report);
    }
    if options.wants("mpi") {
        match results::mpi_jobs_at_once() {
            Ok(jobs) => report.figure("mpi_at_once", f64::from(jobs)),
            Err(error) => report.not_measured("mpi_at_once", &format!("{error:#}")),
        }
    }
    if options.wants("memory") {
        for (volumes, key) in MANY_VOLUMES {
            match bounds::agent_mib(volumes) {
                Ok(mib) => report.figure(key, mib as f64),
                Err(error) => report.not_measured(key, &format!("{error:#}")),
            }
        }
    }
    if options.wants("chaos") {
        chaos(options, report);
    }
    Ok(())
}

/// Says of each kind of fault whether the right value came.
fn files(options: &Options, cut: Option<bool>, report: &mut Report) {
    report.section("kinds of faults that were found from outside");
    let mut rows = vec![
        ["kind", "mended", "what is wrong"]
            .map(str::to_owned)
            .to_vec(),
    ];
    let mut mended = 0;
    for (at, kind) in reproductions::ALL.iter().enumerate() {
        if !options.points.is_empty() && !options.points.contains(&(at as u64 + 1)) {
            continue;
        }
        let (verdict, why) = match &kind.check {
            Check::Here(check) => match check() {
                Ok(()) => ("yes", String::new()),
                Err(error) => ("no", last_lines(&format!("{error:#}"))),
            },
            Check::CutOff => match cut {
                Some(true) => ("yes", String::new()),
                Some(false) => ("no", "see the run that was cut off".to_owned()),
                None => ("no", "the scheduler was not cut off".to_owned()),
            },
            Check::Later(why) => ("left out", (*why).to_owned()),
        };
        mended += u32::from(verdict == "yes");
        report.say(&format!("  {:2} {verdict:9} {} {why}", at + 1, kind.name));
        rows.push(vec![kind.name.to_owned(), verdict.to_owned(), why]);
    }
    report.figure("files", reproductions::ALL.len() as f64);
    report.figure("mended", f64::from(mended));
}

/// Whether nothing ran again, and all ended well, though the scheduler was cut off.
fn cut_off(report: &mut Report) -> Option<bool> {
    report.section("a run of 73 jobs whose scheduler is cut off for 14 s");
    let key = "cut_14s_jobs_again";
    let verdict = match injection::cannot() {
        Some(why) => Err(why),
        None => injection::cut_off(CUT_S).map_err(|error| format!("{error:#}")),
    };
    match verdict {
        Ok(verdict) => {
            say(&verdict, report);
            report.figure(key, verdict.reruns.len() as f64);
            Some(verdict.is_fine())
        }
        Err(why) => {
            report.not_measured(key, &why);
            None
        }
    }
}

/// Runs all seeds, some beside each other.
fn chaos(options: &Options, report: &mut Report) {
    report.section("chaos from outside: two users, each server in a network of its own");
    if let Some(why) = injection::cannot() {
        for key in &PROMISED[2..6] {
            report.not_measured(key, &why);
        }
        return;
    }
    let all: Vec<u64> = match options.points.is_empty() {
        true => (1..=options.pick(SEEDS.0, SEEDS.1)).collect(),
        false => options.points.clone(),
    };
    let verdicts = injection::run_all(all, &|verdict| say(verdict, report));
    let count = |is: fn(&Verdict) -> bool| verdicts.iter().filter(|it| is(it)).count() as f64;
    report.figure("chaos_runs", verdicts.len() as f64);
    report.figure("chaos_wrong", count(|it| !it.wrong.is_empty()));
    report.figure("chaos_failed", count(|it| !it.failed.is_empty()));
    let sum = |of: fn(&Verdict) -> usize| verdicts.iter().map(of).sum::<usize>() as f64;
    report.figure("chaos_faults", sum(|it| it.faults.len()));
    report.figure("chaos_executions", sum(|it| it.executions));
    report.figure("chaos_jobs_again", sum(|it| it.reruns.len()));
    let without = sum(|it| it.without_cause().count());
    report.figure("jobs_again_without_cause", without);
}

/// Tells what came of a seed.
fn say(verdict: &Verdict, report: &Report) {
    let Verdict {
        seed,
        faults,
        reruns,
        executions,
        seconds,
        ..
    } = verdict;
    let without = verdict.without_cause().count();
    let state = if verdict.is_fine() {
        "fine"
    } else {
        "NOT FINE"
    };
    report.say(&format!(
        "  seed {seed}: {state} in {seconds:.0} s, {executions} executions, {} again, {without} \
         without cause: {}",
        reruns.len(),
        faults.join(" ")
    ));
    for text in verdict.wrong.iter().chain(&verdict.failed) {
        report.say(&format!("    {text}"));
    }
    for rerun in verdict.without_cause().take(RERUNS_SHOWN) {
        let told = rerun.told.join("\n      ");
        report.say(&format!(
            "    again without cause: {}\n      {told}",
            rerun.job
        ));
    }
    if let Some(kept) = &verdict.kept {
        report.say(&format!("    kept: {}", kept.display()));
    }
}
