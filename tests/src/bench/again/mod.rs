//! `bench again`: a pipeline of 26 jobs is run again after a failure, an edit, a new sample, a
//! changed input, a changed program, and nothing. The same changes are made to an equal Snakefile,
//! with `temp()` for each intermediate. Criteria: both run the same jobs, and no result is stale.
//! Needs bwa, samtools, and Snakemake 9 from PyPI.

mod pipeline;
mod snakemake;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use self::pipeline::{Change, Pipeline};
use self::snakemake::Snakemake;
use super::measure::Stopwatch;
use super::{BenchmarkReport, Options};
use crate::{TestCluster, printed_text};

const SUMMARY: &[&str] = &[
    "after_failure_rerun",
    "after_edit_rerun",
    "after_added_sample_rerun",
    "after_changed_input_rerun",
    "nothing_changed_rerun",
    "nothing_changed_s",
    "stale_results",
    "expected_by_snakemake_equal",
    "after_changed_program_rerun",
    "after_changed_program_rerun_snakemake",
];

/// What is done before a run, the figure that counts its jobs, and whether Snakemake sees it.
const STEPS: &[(Change, &str, bool)] = &[
    (Change::Mend, "after_failure_rerun", true),
    (Change::Nothing, "nothing_changed_rerun", true),
    (Change::Argument, "after_edit_rerun", true),
    (Change::Input, "after_changed_input_rerun", true),
    (Change::Sample, "after_added_sample_rerun", true),
    (Change::Program, "after_changed_program_rerun", false),
];

/// Runs it.
pub(super) fn run(_: &Options, report: &mut BenchmarkReport) -> Result<()> {
    report.set_summary_figures(SUMMARY);
    if let Some(why) = find_obstacle() {
        report.add_missing("after_failure_rerun", &why);
        return Ok(());
    }
    let snakemake = match Snakemake::install() {
        Ok(snakemake) => snakemake,
        Err(error) => {
            report.add_missing("expected_by_snakemake_equal", &format!("{error:#}"));
            return Ok(());
        }
    };
    let world = TestCluster::start(&["300MB", "300MB"])?;
    world.wait_for_servers(3)?;
    let other = tempfile::tempdir()?;
    let homes = [world.home.path(), other.path()];
    let mut pipeline = Pipeline::default();
    pipeline.write_inputs(&homes)?;

    report.print_section("one sample fails");
    pipeline.apply(Change::Break, &homes)?;
    pipeline.write(&homes)?;
    let (first, _) = run_bafs(&world, false)?;
    let first_other = snakemake.run(other.path(), false)?;
    let mut is_equal = first == first_other;
    report.print_line(&format!("{} of 26 jobs ended well in each", first.len()));

    let mut stale = 0;
    for (change, figure, is_seen) in STEPS {
        report.print_section(figure);
        pipeline.apply(*change, &homes)?;
        pipeline.write(&homes)?;
        let (ran, took_s) = run_bafs(&world, true)?;
        let expected = snakemake.run(other.path(), true)?;
        report.print_line(&format!("bafs:      {}", list(&ran)));
        report.print_line(&format!("snakemake: {}", list(&expected)));
        report.add_figure(figure, ran.len() as f64);
        match is_seen {
            true => is_equal &= ran == expected,
            false => report.add_figure(&format!("{figure}_snakemake"), expected.len() as f64),
        }
        if *change == Change::Nothing {
            report.add_figure("nothing_changed_s", took_s);
        }
        // What Snakemake does not see is not in its results.
        if *is_seen {
            stale += count_different(&pipeline, &homes)?;
        }
    }
    report.add_figure("stale_results", stale as f64);
    report.add_answer("expected_by_snakemake_equal", is_equal);
    ensure!(is_equal, "Snakemake runs other jobs");
    ensure!(stale == 0, "{stale} results differ from those of Snakemake");
    Ok(())
}

fn find_obstacle() -> Option<String> {
    let missing = ["bwa", "samtools"];
    let mut missing = missing.iter().filter(|it| crate::find_tool(it).is_none());
    crate::mount_obstacle().or_else(|| missing.next().map(|it| format!("there is no {it}")))
}

fn list(names: &BTreeSet<String>) -> String {
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    format!("{} jobs: {}", names.len(), names.join(" "))
}

/// Runs the pipeline; the jobs that ended well, and how long all took.
fn run_bafs(world: &TestCluster, is_fine: bool) -> Result<(BTreeSet<String>, f64)> {
    let path = world.home.path().join("test.bafs");
    let args = ["run", &path.to_string_lossy(), "--json"];
    let began = Stopwatch::start();
    let output = world.bafs_command(&args).output()?;
    let took_s = began.elapsed().as_secs_f64();
    ensure!(output.status.success() == is_fine, printed_text(&output));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let jobs = report["jobs"].as_array().context("a report has jobs")?;
    let is_done = |job: &&serde_json::Value| job["outcome"]["Exited"] == 0;
    let names = jobs.iter().filter(is_done);
    let names = names.filter_map(|job| job["name"].as_str().map(str::to_owned));
    Ok((names.collect(), took_s))
}

/// Results that are not the same in both homes.
fn count_different(pipeline: &Pipeline, homes: &[&Path; 2]) -> Result<usize> {
    let mut different = 0;
    for result in pipeline.results() {
        let [one, other] = homes.map(|home| content_of(&home.join("out").join(&result)));
        different += usize::from(one? != other?);
    }
    Ok(different)
}

/// The content of a result; of alignments without the header, which names paths and commands.
fn content_of(path: &Path) -> Result<Vec<u8>> {
    if path.extension().is_some_and(|it| it == "bam") {
        let output = Command::new("samtools").arg("view").arg(path).output()?;
        ensure!(output.status.success(), printed_text(&output));
        return Ok(output.stdout);
    }
    let text = fs::read_to_string(path).with_context(|| path.display().to_string())?;
    // The dictionary of a genome has its path.
    let lines = text
        .lines()
        .map(|line| line.split("\tUR:").next().unwrap_or(line));
    Ok(lines.collect::<Vec<_>>().join("\n").into_bytes())
}
