//! What one run fetched from home serves the next runs, and the runs of others, until somebody
//! reserves its space.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};
use bafs_tests::cache_cluster::CacheCluster;
use bafs_tests::content::Content;
use bafs_tests::{mount_obstacle, printed_text, report_skip};

const BYTES: usize = 4 << 20;

/// A workflow of two jobs that compare a data set with the one at home.
fn write_workflow(stage: &CacheCluster, directory: &Path, name: &str) -> Result<PathBuf> {
    let script = stage.compare_script("set");
    let mut text = "volume db cache bafs://home/set 20 MB\n".to_owned();
    for job in ["a", "b"] {
        text += &format!("mount db {job} /data\njob {job} {{\nscript = <<END\n{script}\nEND\n}}\n");
    }
    let path = directory.join(name);
    std::fs::write(&path, text)?;
    Ok(path)
}

fn run(stage: &CacheCluster, workflow: &Path) -> Command {
    let path = workflow.to_string_lossy();
    stage.test_cluster.bafs_command(&["run", &path])
}

fn check_run(stage: &CacheCluster, workflow: &Path) -> Result<()> {
    let output = run(stage, workflow).output()?;
    ensure!(output.status.success(), "{}", printed_text(&output));
    Ok(())
}

#[test]
fn cluster_second_run_reads_nothing_from_home() -> Result<()> {
    if let Some(reason) = mount_obstacle() {
        report_skip("cluster_second_run_reads_nothing_from_home", &reason);
        return Ok(());
    }
    let mut stage = CacheCluster::start(2, "60MB", None)?;
    stage.write_data_set("set", &Content::new(1, BYTES))?;
    let directory = tempfile::tempdir()?;
    let first = write_workflow(&stage, directory.path(), "first.bafs")?;
    check_run(&stage, &first)?;
    ensure!(stage.read_home_bytes()? == BYTES as u64);
    let second = write_workflow(&stage, directory.path(), "second.bafs")?;
    check_run(&stage, &second)?;
    ensure!(stage.read_home_bytes()? == BYTES as u64, "a second run");

    // What nobody shows survives its node.
    for node in ["n1", "n2"] {
        stage.test_cluster.cluster.kill(node)?;
        stage.test_cluster.cluster.restart(node)?;
    }
    stage.test_cluster.wait_for_servers(3)?;
    let third = write_workflow(&stage, directory.path(), "third.bafs")?;
    check_run(&stage, &third)?;
    ensure!(stage.read_home_bytes()? == BYTES as u64, "after a restart");

    let list = stage
        .test_cluster
        .bafs_command(&["cache", "list"])
        .output()?;
    let listed = printed_text(&list);
    ensure!(
        listed.contains("set  ") && listed.contains(" on "),
        "{listed}"
    );

    // A job that wants the space gets it, and a changed source is noticed.
    let greedy = directory.path().join("greedy.bafs");
    let text = "volume w scratch 58 MB\nmount w g /w\njob g {\nscript = <<END\n\
                head -c 55000000 /dev/zero > /w/zeros\nEND\n}\n";
    std::fs::write(&greedy, text)?;
    check_run(&stage, &greedy)?;
    stage.write_data_set("set", &Content::new(2, BYTES))?;
    let fourth = write_workflow(&stage, directory.path(), "fourth.bafs")?;
    check_run(&stage, &fourth)?;
    ensure!(stage.read_home_bytes()? == 2 * BYTES as u64, "a new source");
    let drop = stage
        .test_cluster
        .bafs_command(&["cache", "drop", "set"])
        .output()?;
    ensure!(drop.status.success(), "{}", printed_text(&drop));
    let list = stage
        .test_cluster
        .bafs_command(&["cache", "list"])
        .output()?;
    ensure!(printed_text(&list).contains("no data without a volume"));
    Ok(())
}

#[test]
fn cluster_two_runs_at_once_read_home_once() -> Result<()> {
    if let Some(reason) = mount_obstacle() {
        report_skip("cluster_two_runs_at_once_read_home_once", &reason);
        return Ok(());
    }
    // Slow enough that both read at the same time.
    let stage = CacheCluster::start(2, "60MB", Some("2MB/s"))?;
    stage.write_data_set("set", &Content::new(3, BYTES))?;
    let directory = tempfile::tempdir()?;
    let names = ["one.bafs", "other.bafs"];
    let workflows = names.map(|name| write_workflow(&stage, directory.path(), name));
    let mut running = Vec::new();
    for workflow in workflows {
        let mut command = run(&stage, &workflow?);
        command.stdout(std::process::Stdio::piped());
        command.stderr(std::process::Stdio::piped());
        running.push(command.spawn()?);
    }
    for run in running {
        let output = run.wait_with_output()?;
        ensure!(output.status.success(), "{}", printed_text(&output));
    }
    let sent = stage.read_home_bytes()?;
    ensure!(sent == BYTES as u64, "home sent {sent} bytes");
    Ok(())
}

/// A pinned source is there before its first run, and no run gets its space.
#[test]
fn cluster_pinned_sources_keep_their_space() -> Result<()> {
    if let Some(reason) = mount_obstacle() {
        report_skip("cluster_pinned_sources_keep_their_space", &reason);
        return Ok(());
    }
    let stage = CacheCluster::start(2, "60MB", None)?;
    stage.write_data_set("set", &Content::new(4, BYTES))?;
    let cache = |words: &[&str]| -> Result<String> {
        let words = [&["cache"], words].concat();
        let output = stage.test_cluster.bafs_command(&words).output()?;
        ensure!(output.status.success(), "{}", printed_text(&output));
        Ok(printed_text(&output))
    };
    cache(&["pin", "bafs://home/set", "--size", "5MB"])?;
    ensure!(stage.read_home_bytes()? == BYTES as u64, "it is fetched");
    let listed = cache(&["list"])?;
    ensure!(
        listed.contains("set  pinned in 10.000 MB on 2 nodes"),
        "{listed}"
    );
    // Repeating it makes no second reservation.
    cache(&["pin", "bafs://home/set", "--size", "5MB"])?;
    ensure!(cache(&["list"])?.contains("on 2 nodes"));

    // A run that takes all other space does not drive it out.
    let directory = tempfile::tempdir()?;
    let greedy = directory.path().join("greedy.bafs");
    let text = "volume w scratch 50 MB\nmount w g /w\njob g {\nscript = <<END\n\
                head -c 48000000 /dev/zero > /w/zeros\nEND\n}\n";
    std::fs::write(&greedy, text)?;
    check_run(&stage, &greedy)?;
    let reader = write_workflow(&stage, directory.path(), "reader.bafs")?;
    check_run(&stage, &reader)?;
    ensure!(stage.read_home_bytes()? == BYTES as u64, "nothing again");

    cache(&["unpin", "bafs://home/set"])?;
    let listed = cache(&["list"])?;
    ensure!(!listed.contains("pinned"), "{listed}");
    ensure!(listed.contains("set  "), "the data stay: {listed}");
    check_run(&stage, &reader)?;
    ensure!(stage.read_home_bytes()? == BYTES as u64, "after the pin");
    Ok(())
}
