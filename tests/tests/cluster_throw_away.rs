//! Throw-away clusters: what they leave to others, and what they tell that only they can know.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use bafs_proto::ids::ServerId;
use bafs_tests::{
    TestCluster, bafs_program, is_gone_or_empty, mount_obstacle, printed_text, processes_matching,
    report_skip,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

#[test]
fn cluster_leaves_another_homes_directory_untouched() -> Result<()> {
    for has_other in [false, true] {
        let world = TestCluster::start(&["20MB"])?;
        let own = world.home.path().join(".bafs-put");
        let id = || -> Result<ServerId> {
            let text = std::fs::read_to_string(own.join("server-id"))?;
            text.trim().parse().context("the id of a server")
        };
        let before = id()?;
        let mut other = world.bafs_command(&["home", "--name", "other", "--until-stdin-closes"]);
        other.arg("--export").arg(world.home.path());
        other.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut other = has_other.then(|| other.spawn()).transpose()?;
        if let Some(other) = &mut other {
            let stdout = other.stdout.take().context("it is piped")?;
            let mut line = String::new();
            BufReader::new(stdout).read_line(&mut line)?;
            ensure!(line.contains("listening"), "the other home says {line:?}");
        }
        let TestCluster { cluster, home } = world;
        drop(cluster);
        if has_other {
            ensure!(id()? == before, "it is another server");
        } else {
            ensure!(!own.exists(), "{} is left", own.display());
        }
        if let Some(mut other) = other {
            drop(other.stdin.take());
            other.wait()?;
        }
        drop(home);
    }
    Ok(())
}

/// A run of a workflow in `directory`, whose cluster's files are in `temporary` of it.
fn run_command(directory: &Path, text: &str, options: &[&str]) -> Result<Command> {
    let workflow = directory.join("test.bafs");
    std::fs::write(&workflow, text)?;
    let temporary = directory.join("temporary");
    std::fs::create_dir(&temporary)?;
    let mut run = Command::new(bafs_program());
    run.arg("run").arg(&workflow).args(["--local", "1"]);
    run.args(options).env("TMPDIR", &temporary);
    run.stdin(Stdio::null());
    Ok(run)
}

/// As above, of a workflow whose result home cannot take: since the run looked, the job has put a
/// file where a directory should be.
fn run_with_refused_result(directory: &Path, options: &[&str]) -> Result<Command> {
    let text = format!(
        "volume w scratch 1 MB\njob j {{\nexecutable = /bin/sh\n\
         arguments = -c \"echo fine > /w/out; echo in the way > {}\"\n}}\nmount w j /w\n\
         share /tmp j\nextract w out bafs://home/results/out\n",
        directory.join("results").display()
    );
    run_command(directory, &text, options)
}

/// That a run told where its result is, and that it is there.
fn check_result_path(told: &str) -> Result<()> {
    let mut rest = told.split("it is in ");
    let place = rest.nth(1).and_then(|it| it.lines().next());
    let place = place.with_context(|| format!("no place is told: {told}"))?;
    let result = std::fs::read(Path::new(place).join("out"))?;
    ensure!(result == b"fine\n", "another result is there: {result:?}");
    Ok(())
}

#[test]
fn cluster_reports_result_locations_and_missing_disk_space() -> Result<()> {
    let name = "cluster_reports_result_locations_and_missing_disk_space";
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let options = ["--resource-timeout", "2s", "--node-size", "1000 TB"];
    let output = run_with_refused_result(directory.path(), &options)?.output()?;
    let told = printed_text(&output);
    ensure!(output.status.code() == Some(1), told);
    ensure!(!told.contains("volume extract"), told);
    check_result_path(&told)?;
    let warning = told
        .lines()
        .find(|line| line.starts_with("warning: the nodes together offer"));
    let warning = warning.with_context(|| format!("no warning of the disk: {told}"))?;
    ensure!(warning.contains("--node-size"), "{warning}");
    Ok(())
}

/// Also a run whose terminal has gone, where nobody reads what it says.
#[test]
fn cluster_keeps_refused_results_after_an_interrupt() -> Result<()> {
    let name = "cluster_keeps_refused_results_after_an_interrupt";
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(());
    }
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let directory = tempfile::tempdir()?;
        let mut run = run_with_refused_result(directory.path(), &[])?;
        let mut run = run.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let mut said = BufReader::new(run.stderr.take().context("it is piped")?);
        let mut line = String::new();
        while !line.contains("cannot be sent") {
            line.clear();
            ensure!(said.read_line(&mut line)? > 0, "it ends without a refusal");
        }
        kill(Pid::from_raw(i32::try_from(run.id())?), signal)?;
        let mut told = String::new();
        if signal == Signal::SIGHUP {
            drop(said);
        } else {
            said.read_to_string(&mut told)?;
        }
        let output = run.wait_with_output()?;
        told += &String::from_utf8_lossy(&output.stdout);
        ensure!(output.status.code() == Some(1), "{signal}: {told}");
        ensure!(told.contains("cancelled"), "{signal}: {told}");
        check_result_path(&told).with_context(|| signal.to_string())?;
        let left = processes_matching(&directory.path().to_string_lossy());
        ensure!(left.is_empty(), "{signal}: {left:?}");
    }
    Ok(())
}

#[test]
fn cluster_without_results_is_removed_after_failure() -> Result<()> {
    let name = "cluster_without_results_is_removed_after_failure";
    if let Some(reason) = mount_obstacle() {
        report_skip(name, &reason);
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let text = "volume w scratch 1 MB\njob j {\nexecutable = /bin/false\n}\nmount w j /w\n\
                extract w out bafs://home/out\n";
    let output = run_command(directory.path(), text, &[])?.output()?;
    let told = printed_text(&output);
    ensure!(output.status.code() == Some(1), told);
    ensure!(!told.contains("unsent results remain"), told);
    ensure!(is_gone_or_empty(&directory.path().join("temporary")), told);
    Ok(())
}

#[test]
fn cluster_names_a_full_temporary_disk() -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        report_skip("cluster_names_a_full_temporary_disk", "it mounts as root");
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let workflow = directory.path().join("test.bafs");
    std::fs::write(&workflow, "job j {\nexecutable = /bin/true\n}\n")?;
    let small = directory.path().join("small");
    std::fs::create_dir(&small)?;
    // Four pages: fewer than a cluster has identities.
    let script = "mount -t tmpfs -o size=16k none \"$TMPDIR\" && exec \"$0\" run \"$1\" --local 1";
    let output = Command::new("unshare")
        .args(["-m", "sh", "-c", script])
        .arg(bafs_program())
        .arg(&workflow)
        .env("TMPDIR", &small)
        .output()?;
    let text = printed_text(&output);
    ensure!(output.status.code() == Some(1), text);
    let full = format!("the disk of {} is full: ", small.display());
    ensure!(text.contains(&full), text);
    ensure!(text.contains("; make room there, or set TMPDIR to"), text);
    Ok(())
}
