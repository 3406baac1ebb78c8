//! What jobs may use of their nodes: memory, run time, and room for temporary files.

use std::path::Path;
use std::process::Output;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use bafs_tests::printed_text;

use crate::throw_away_runs::{is_skipped, run_workflow};

/// A program that has 300 MB for as long as nobody ends it, but a second at most.
const LARGE_PROGRAM: &str = "executable = python3\n arguments = -c 'import time; print(\"begun\", \
    flush=True); x = b\"x\" * 300_000_000; time.sleep(1)'\n";

/// Runs a workflow of one job on a throw-away cluster.
fn run_job(directory: &Path, description: &str) -> Result<Output> {
    run_workflow(directory, &format!("job a {{\n {description}}}\n"))
}

#[test]
fn cluster_repeats_jobs_with_more_memory() -> Result<()> {
    if is_skipped("cluster_repeats_jobs_with_more_memory") {
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let description = format!("request_memory = 100 MB, 1 GB\n {LARGE_PROGRAM}");
    let output = run_job(directory.path(), &description)?;
    let said = printed_text(&output);
    ensure!(output.status.success(), "{said}");
    for part in ["its request_memory is 100 MB", "it runs again with 1"] {
        ensure!(said.contains(part), "no {part:?} in: {said}");
    }
    Ok(())
}

#[test]
fn cluster_ends_jobs_that_exceed_their_memory() -> Result<()> {
    if is_skipped("cluster_ends_jobs_that_exceed_their_memory") {
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let description = format!("request_memory = 100 MB\n {LARGE_PROGRAM}");
    let output = run_job(directory.path(), &description)?;
    let said = printed_text(&output);
    ensure!(!output.status.success(), "{said}");
    for part in ["its request_memory is 100 MB", "ask for more", "    begun"] {
        ensure!(said.contains(part), "no {part:?} in: {said}");
    }
    Ok(())
}

#[test]
#[expect(clippy::disallowed_methods, reason = "a test waits for real processes")]
fn cluster_ends_jobs_after_their_run_time() -> Result<()> {
    if is_skipped("cluster_ends_jobs_after_their_run_time") {
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let began = Instant::now();
    let description =
        "max_runtime = 1 s\n executable = sh\n arguments = -c 'echo begun; sleep 60'\n";
    let output = run_job(directory.path(), description)?;
    let said = printed_text(&output);
    ensure!(!output.status.success(), "{said}");
    ensure!(
        began.elapsed() < Duration::from_secs(50),
        "it was not ended"
    );
    for part in ["ran longer than its max_runtime of 1 s", "    begun"] {
        ensure!(said.contains(part), "no {part:?} in: {said}");
    }
    Ok(())
}

#[test]
fn cluster_gives_jobs_the_disk_they_request() -> Result<()> {
    if is_skipped("cluster_gives_jobs_the_disk_they_request") {
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let program =
        "executable = sh\n arguments = -c 'head -c 30000000 /dev/zero > /tmp/x; sleep 5'\n";
    let small = run_job(
        directory.path(),
        &format!("request_disk = 10 MB\n {program}"),
    )?;
    let said = printed_text(&small);
    ensure!(!small.status.success(), "{said}");
    ensure!(said.contains("and may have 10 MB"), "{said}");
    let large = run_job(
        directory.path(),
        &format!("request_disk = 60 MB\n {program}"),
    )?;
    ensure!(large.status.success(), "{}", printed_text(&large));
    // What a job may use is no part of what it does: the same workflow would be up to date.
    let another = tempfile::tempdir()?;
    let huge = run_job(
        another.path(),
        &format!("request_disk = 900 PB\n {program}"),
    )?;
    let said = printed_text(&huge);
    ensure!(
        !huge.status.success() && said.contains("than any node has"),
        "{said}"
    );
    Ok(())
}
