//! What jobs may use of their nodes: memory, run time, and room for temporary files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use bafs_tests::batch_systems::wait_until;
use bafs_tests::{TestCluster, bafs_program, printed_text, report_skip};

use crate::throw_away_runs::{is_skipped, run_workflow};

/// A program that has 300 MB for as long as nobody ends it, but a second at most.
const LARGE_PROGRAM: &str = "executable = python3\n arguments = -c 'import time; print(\"begun\", \
    flush=True); x = b\"x\" * 300_000_000; time.sleep(1)'\n";

/// A program that takes 500 MB as fast as it can, and says how much it has after each 10 MB.
const FAST_PROGRAM: &str = "script = <<'END'\nall = []\nfor k in range(1, 51):\n    \
    all.append(b\"x\" * 10_000_000)\n    print(k * 10, \"MB\", flush=True)\nEND\n \
    interpreter = python3\n";

/// Where groups go once they are left.
const GROUP_TIMEOUT: Duration = Duration::from_secs(10);

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

/// Whether nodes cannot make control groups here, which is reported.
fn is_skipped_without_groups(test: &str) -> Result<bool> {
    let doctor = Command::new(bafs_program())
        .args(["doctor", "--json"])
        .output()?;
    let checks: serde_json::Value = serde_json::from_slice(&doctor.stdout)?;
    let mut checks = checks.as_array().context("a list")?.iter();
    let check = checks.find(|check| check["subject"] == "memory of jobs");
    let check = check.context("doctor tells how memory is held")?;
    if check["status"] != "Fine" {
        report_skip(test, &check["found"].to_string());
        return Ok(true);
    }
    Ok(is_skipped(test))
}

#[test]
fn groups_stop_fast_allocators_at_their_limit() -> Result<()> {
    if is_skipped_without_groups("groups_stop_fast_allocators_at_their_limit")? {
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let one = run_job(
        directory.path(),
        &format!("request_memory = 100 MB\n {FAST_PROGRAM}"),
    )?;
    let said = printed_text(&one);
    ensure!(!one.status.success(), "{said}");
    let reason = "wanted more memory than it asked for, and its request_memory is 100 MB";
    ensure!(said.contains(reason), "{said}");
    let sizes = said.lines().filter_map(|line| {
        let size = line.trim().strip_suffix(" MB")?;
        size.parse::<u64>().ok()
    });
    let most = sizes.max().context("its last lines")?;
    ensure!((50..100).contains(&most), "it had {most} MB: {said}");

    let another = tempfile::tempdir()?;
    let two = run_job(
        another.path(),
        &format!("request_memory = 100 MB, 1 GB\n {FAST_PROGRAM}"),
    )?;
    let said = printed_text(&two);
    ensure!(two.status.success(), "{said}");
    for part in [reason, "it runs again with 1"] {
        ensure!(said.contains(part), "no {part:?} in: {said}");
    }
    Ok(())
}

#[test]
fn files_do_not_count_as_memory() -> Result<()> {
    if is_skipped("files_do_not_count_as_memory") {
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let text = "volume v scratch 400 MB\njob a {\n request_memory = 50 MB\n \
                request_disk = 400 MB\n script = <<END\n\
                head -c 300000000 /dev/zero > /v/x\n\
                head -c 300000000 /dev/zero > /tmp/x\n\
                cat /v/x /tmp/x | wc -c > /v/size\n\
                grep -q 600000000 /v/size\nEND\n}\nmount v a /v\n";
    let output = run_workflow(directory.path(), text)?;
    ensure!(output.status.success(), "{}", printed_text(&output));
    Ok(())
}

/// A success would hide that a part of the job is missing.
#[test]
fn jobs_fail_without_an_ended_process() -> Result<()> {
    if is_skipped_without_groups("jobs_fail_without_an_ended_process")? {
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let output = run_job(
        directory.path(),
        "request_memory = 100 MB\n script = <<'END'\n\
         python3 -c 'x = b\"x\" * 300_000_000' || echo went on\nEND\n",
    )?;
    let said = printed_text(&output);
    ensure!(!output.status.success(), "{said}");
    ensure!(said.contains("its request_memory is 100 MB"), "{said}");
    Ok(())
}

/// The directory of a job's control group, from what its `/proc/self/cgroup` said.
fn group_directory(listed: &str) -> Result<PathBuf> {
    let line = listed.lines().find(|line| line.contains("/bafs-job-"));
    let line = line.with_context(|| format!("the job is in no group: {listed}"))?;
    let mut parts = line.splitn(3, ':').skip(1);
    let (controllers, path) = (parts.next(), parts.next().context("a path")?);
    let hierarchies = Path::new("/sys/fs/cgroup");
    let hierarchy = match controllers {
        Some("") | None => hierarchies.to_owned(),
        Some(names) => hierarchies.join(names),
    };
    Ok(hierarchy.join(path.trim_start_matches('/')))
}

#[test]
fn groups_end_with_their_jobs() -> Result<()> {
    if is_skipped_without_groups("groups_end_with_their_jobs")? {
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let listed = directory.path().join("groups");
    let description = format!(
        "request_memory = 100 MB\n executable = sh\n arguments = -c 'cat /proc/self/cgroup > {}'\n",
        listed.display()
    );
    let output = run_job(directory.path(), &description)?;
    ensure!(output.status.success(), "{}", printed_text(&output));
    let group = group_directory(&fs::read_to_string(&listed)?)?;
    wait_until(GROUP_TIMEOUT, || Ok(!group.exists()))?;
    ensure!(group.parent().is_some_and(Path::exists), "{group:?}");
    Ok(())
}

#[test]
fn groups_of_killed_nodes_vanish() -> Result<()> {
    if is_skipped_without_groups("groups_of_killed_nodes_vanish")? {
        return Ok(());
    }
    let mut cluster = TestCluster::start(&["100MB"])?;
    cluster.wait_for_servers(2)?;
    let listed = cluster.home.path().join("groups");
    let workflow = cluster.write_workflow(&format!(
        "job a {{\n request_memory = 100 MB\n executable = sh\n \
         arguments = -c 'cat /proc/self/cgroup > {}; sleep 60'\n}}\n",
        listed.display()
    ))?;
    let mut command = cluster.bafs_command(&["run", &workflow.display().to_string()]);
    let mut run = command
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let killed = (|| {
        let read = || fs::read_to_string(&listed).unwrap_or_default();
        wait_until(GROUP_TIMEOUT, || Ok(read().ends_with('\n')))?;
        let group = group_directory(&read())?;
        ensure!(group.exists(), "{group:?} holds the job");
        cluster.cluster.kill("n1")?;
        wait_until(GROUP_TIMEOUT, || Ok(!group.exists()))
    })();
    run.kill()?;
    run.wait()?;
    killed
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
