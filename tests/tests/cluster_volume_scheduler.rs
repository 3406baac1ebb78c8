//! The scheduler of the page "Write a scheduler", as the page has it.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use bafs_tests::{TestCluster, bafs_program, mount_obstacle, printed_text, report_skip};

/// The program of the page.
fn read_program() -> Result<String> {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/guide/schedulers.md");
    let page = fs::read_to_string(page)?;
    let (_, program) = page
        .split_once("```python file=scheduler.py\n")
        .context("the page has a program")?;
    let (program, _) = program.split_once("\n```\n").context("the program ends")?;
    Ok(program.to_owned())
}

#[test]
fn cluster_runs_the_scheduler_of_the_guide() -> Result<()> {
    let has_python = Command::new("python3").arg("-V").output().is_ok();
    let obstacle = mount_obstacle();
    if let Some(reason) = obstacle.or_else(|| (!has_python).then(|| "no python3".to_owned())) {
        report_skip("cluster_runs_the_scheduler_of_the_guide", &reason);
        return Ok(());
    }
    let world = TestCluster::start(&["60MB", "60MB"])?;
    world.wait_for_servers(3)?;
    let names: Vec<_> = (1..=8).map(|number| format!("{number}.txt")).collect();
    for (lines, name) in (1..).zip(&names) {
        world.write_home(&format!("in/{name}"), "x\n".repeat(lines).as_bytes())?;
    }
    let directory = tempfile::tempdir()?;
    let program = directory.path().join("scheduler.py");
    fs::write(&program, read_program()?)?;
    let places = [bafs_program().parent().context("a directory")?.to_owned()];
    let path = std::env::var_os("PATH").unwrap_or_default();
    let places = places.into_iter().chain(std::env::split_paths(&path));
    let output = Command::new("python3")
        .arg(&program)
        .arg("run1")
        .current_dir(directory.path())
        .args(&names)
        .env("PATH", std::env::join_paths(places)?)
        .env("BAFS_IDENTITY", world.cluster.identity())
        .env("BAFS_CATALOG", world.cluster.catalog_address())
        .output()?;
    ensure!(output.status.success(), "{}", printed_text(&output));
    for (lines, name) in (1..).zip(&names) {
        let counted = String::from_utf8(world.read_home(&format!("results/{name}/lines"))?)?;
        ensure!(counted.trim().parse() == Ok(lines), "{name}: {counted}");
        let manifest = world.read_home(&format!("results/{name}/bafs-manifest.json"))?;
        let manifest: serde_json::Value = serde_json::from_slice(&manifest)?;
        ensure!(manifest["complete"] == true, "{manifest}");
    }
    let left = world.run_json(&["volume", "list"])?;
    ensure!(left.as_array().is_some_and(Vec::is_empty), "{left}");
    Ok(())
}
