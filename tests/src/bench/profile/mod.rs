//! `bench profile`: what `bafs profile` says of unmodified programs and of twins, beside what is
//! known of them. Roles of the files of BWA, BLAST and HMMER against lists made by hand; figures of
//! twins against the thesis' Table 2.4; skeleton workflows run, and their results are those of the
//! traced commands. Needs bwa, samtools, blastp, hmmer and python3.

mod applications;
mod twins;

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use self::applications::APPLICATIONS;
use super::{BenchmarkReport, Options};
use crate::{bafs_program, printed_text};

pub(super) use self::twins::{TWIN_PROCESS, run_twin_process};

const SUMMARY: &[&str] = &[
    "roles_right",
    "roles_total",
    "twin_error_max",
    "twin_operations_error_max",
    "skeleton_runs",
];

/// Figures of a twin beside the thesis' tables: the smallest there have two digits.
const TWIN_ERROR_MAX: f64 = 0.01;

/// Runs it.
pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    report.set_summary_figures(SUMMARY);
    if let Some(why) = find_obstacle() {
        report.add_missing("roles_right", &why);
        return Ok(());
    }
    let (mut right, mut total) = (0, 0);
    let mut is_running = true;
    for application in APPLICATIONS {
        report.print_section(application.name);
        let found = applications::check_application(application)?;
        for wrong in &found.wrong {
            report.print_line(wrong);
        }
        report.print_line(&format!("{} of {} roles right", found.right, found.total));
        report.print_line(&format!("the skeleton runs: {}", found.is_skeleton_running));
        right += found.right;
        total += found.total;
        is_running &= found.is_skeleton_running;
    }
    report.add_figure("roles_right", right as f64);
    report.add_figure("roles_total", total as f64);
    report.print_section("twins");
    let (error, operations_error) = twins::compare_twins(options.choose(16, 256), report)?;
    report.add_figure_with_target("twin_error_max", error, 0.0..=TWIN_ERROR_MAX);
    report.add_figure_with_target(
        "twin_operations_error_max",
        operations_error,
        0.0..=TWIN_ERROR_MAX,
    );
    report.add_answer("skeleton_runs", is_running);
    ensure!(right == total, "{} roles are wrong", total - right);
    ensure!(is_running, "a skeleton does not run");
    Ok(())
}

fn find_obstacle() -> Option<String> {
    let tools = ["bwa", "samtools", "blastp", "hmmscan", "python3"];
    let mut missing = tools.iter().filter(|it| crate::find_tool(it).is_none());
    crate::mount_obstacle().or_else(|| missing.next().map(|it| format!("there is no {it}")))
}

/// Traces one command in a directory as the next stage of an instance.
fn trace_command(
    directory: &Path,
    profile: &Path,
    instance: &str,
    words: &[&str],
) -> Result<serde_json::Value> {
    // By name: the directory of a path would be traced, and this program be batch data.
    let own = std::env::current_exe()?;
    let own = own
        .parent()
        .context("this program is in a directory")?
        .display();
    let path = std::env::var("PATH").unwrap_or_default();
    let output = Command::new(bafs_program())
        .current_dir(directory)
        .env("PATH", format!("{own}:{path}"))
        .args(["profile", "--json", "--instance", instance, "--profile"])
        .arg(profile)
        .arg("--")
        .args(words)
        .output()?;
    ensure!(output.status.success(), printed_text(&output));
    serde_json::from_slice(&output.stdout).context("a profile is JSON")
}
