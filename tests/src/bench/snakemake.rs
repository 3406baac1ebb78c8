//! `bench snakemake`: three workflows by Snakemake on a cluster of four nodes, beside Snakemake on
//! this machine alone. `integrations/tests/bench.py` runs them in an environment of its own.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use super::{BenchmarkReport, Options};
use crate::mount_obstacle;

const SUMMARY: &[&str] = &[
    "workflows",
    "identical",
    "home_read_ratio",
    "vs_local_snakemake",
    "overhead_ms_per_job",
    "small_jobs",
];

/// Makes the environment, and runs the comparison in it.
const SCRIPT: &str = "integrations/tests/run.sh";

/// Small jobs of one workflow, of a full and of a quick run.
const SMALL_JOBS: (usize, usize) = (500, 40);

/// Runs it.
pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    report.set_summary_figures(SUMMARY);
    if let Some(reason) = mount_obstacle() {
        report.add_missing("workflows", &reason);
        return Ok(());
    }
    let checkout = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let jobs = options.choose(SMALL_JOBS.0, SMALL_JOBS.1).to_string();
    let output = Command::new("sh")
        .arg(checkout.join(SCRIPT))
        .args(["--bench", "--jobs", &jobs])
        .stderr(Stdio::inherit())
        .output()
        .context("start the comparison")?;
    let text = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        bail!("the comparison failed ({}): {text}", output.status);
    }
    match text.lines().rfind(|line| line.starts_with('{')) {
        Some(line) => add_figures(&serde_json::from_str(line)?, report),
        None => {
            report.add_missing("workflows", "PyPI gives no packages");
            Ok(())
        }
    }
}

fn add_figures(figures: &Value, report: &mut BenchmarkReport) -> Result<()> {
    let figure = |key: &str| {
        let value = figures[key].as_f64();
        value.with_context(|| format!("the comparison has no figure '{key}'"))
    };
    let workflows = figure("workflows")?;
    report.add_figure_with_target("workflows", workflows, 3.0..=f64::INFINITY);
    report.add_figure_with_target("identical", figure("identical")?, workflows..=workflows);
    report.add_figure_with_target("home_read_ratio", figure("home_read_ratio")?, 0.0..=1.01);
    for key in [
        "vs_local_snakemake",
        "overhead_ms_per_job",
        "small_jobs",
        "bare_processes_s",
    ] {
        report.add_figure(key, figure(key)?);
    }
    Ok(())
}
