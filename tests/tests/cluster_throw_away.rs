//! Throw-away clusters: what they leave to others, and what they tell that only they can know.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, ensure};
use bafs_proto::ids::ServerId;
use bafs_tests::{World, cannot_mount, program, said, skip};

#[test]
fn cluster_leaves_the_directory_of_another_home_of_its_export() -> Result<()> {
    for has_other in [false, true] {
        let world = World::start(&["20MB"])?;
        let own = world.home.path().join(".bafs-put");
        let id = || -> Result<ServerId> {
            let text = std::fs::read_to_string(own.join("server-id"))?;
            text.trim().parse().context("the id of a server")
        };
        let before = id()?;
        let mut other = world.bafs(&["home", "--name", "other", "--until-stdin-closes"]);
        other.arg("--export").arg(world.home.path());
        other.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut other = has_other.then(|| other.spawn()).transpose()?;
        if let Some(other) = &mut other {
            let stdout = other.stdout.take().context("it is piped")?;
            let mut line = String::new();
            BufReader::new(stdout).read_line(&mut line)?;
            ensure!(line.contains("listening"), "the other home says {line:?}");
        }
        let World { cluster, home } = world;
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

/// Runs a workflow whose result home cannot take, as there is a file where a directory should be.
fn run_refused(directory: &Path, node_size: &str) -> Result<Output> {
    let workflow = directory.join("test.bafs");
    let text = "volume w scratch 1 MB\njob j {\nexecutable = /bin/sh\n\
                arguments = -c \"echo fine > /w/out\"\n}\nmount w j /w\n\
                extract w out bafs://home/results/out\n";
    std::fs::write(&workflow, text)?;
    std::fs::write(directory.join("results"), b"in the way")?;
    let temporary = directory.join("temporary");
    std::fs::create_dir(&temporary)?;
    let mut run = Command::new(program());
    run.arg("run").arg(&workflow);
    run.args(["--local", "1", "--patience", "2s", "--node-size", node_size]);
    let run = run.env("TMPDIR", &temporary).stdin(Stdio::null());
    Ok(run.output()?)
}

#[test]
fn cluster_that_goes_says_where_its_results_are_and_what_its_disk_lacks() -> Result<()> {
    let name = "cluster_that_goes_says_where_its_results_are_and_what_its_disk_lacks";
    if let Some(reason) = cannot_mount() {
        skip(name, &reason);
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let output = run_refused(directory.path(), "1000 TB")?;
    let told = said(&output);
    ensure!(output.status.code() == Some(1), told);
    ensure!(!told.contains("volume extract"), told);
    let place = told
        .split("it is in ")
        .nth(1)
        .and_then(|it| it.lines().next());
    let place = place.with_context(|| format!("no place is told: {told}"))?;
    let result = std::fs::read(Path::new(place).join("out"))?;
    ensure!(result == b"fine\n", "another result is there: {result:?}");
    let warning = told
        .lines()
        .find(|line| line.starts_with("warning: the nodes offer"));
    let warning = warning.with_context(|| format!("no warning of the disk: {told}"))?;
    ensure!(warning.contains("--node-size"), "{warning}");
    Ok(())
}
