//! The file-transfer plug-in of HTCondor: its words, its results, and the files at home.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use anyhow::{Result, ensure};
use bafs_tests::{TestCluster, bafs_program, printed_text};

/// Calls the plug-in as a starter does: in the directory of a job, with the ad of the job.
fn call(world: &TestCluster, scratch: &Path, requests: &str, more: &[&str]) -> Result<Output> {
    let catalog = world.cluster.catalog_address();
    let identity = world.cluster.identity();
    let ad = format!(
        "BafsCatalog = \"{catalog}\"\nBafsIdentity = \"{}\"\n",
        identity.display()
    );
    fs::write(scratch.join(".job.ad"), ad)?;
    fs::write(scratch.join("requests"), requests)?;
    let mut command = Command::new(bafs_program());
    command
        .args(["-infile", "requests", "-outfile", "results"])
        .args(more);
    command
        .current_dir(scratch)
        .env_remove("BAFS_CATALOG")
        .env_remove("BAFS_IDENTITY");
    Ok(command.env("BAFS_CONFIG", "").output()?)
}

#[test]
fn condor_plugin_brings_files_and_directories() -> Result<()> {
    let world = TestCluster::start(&["20MB"])?;
    world.wait_for_servers(2)?;
    let large: Vec<u8> = (0..3_000_001_u32).map(|at| (at % 251) as u8).collect();
    world.write_home("data/large", &large)?;
    world.write_home("set/a/b", b"deep")?;
    let scratch = tempfile::tempdir()?;
    let local = scratch.path().join("input");
    let requests = format!(
        "[ LocalFileName = \"{}\"; Url = \"bafs://home/data//large\"; Other = {{1, [x=\"]\"]}} ]\n\
         [ Url = \"bafs://home/set\"; LocalFileName = \"set\" ]",
        local.display()
    );
    fs::write(scratch.path().join("results"), " ".repeat(9_000))?;
    let output = call(&world, scratch.path(), &requests, &[])?;
    ensure!(output.status.success(), "{}", printed_text(&output));
    ensure!(fs::read(&local)? == large, "the file differs");
    ensure!(fs::read(scratch.path().join("set/a/b"))? == b"deep");
    let results = fs::read_to_string(scratch.path().join("results"))?;
    ensure!(results.len() == 9_000, "the reserved space is gone");
    ensure!(
        results.matches("TransferSuccess = true").count() == 2,
        "{results}"
    );
    ensure!(results.contains("TransferFileBytes = 3000001"), "{results}");
    Ok(())
}

#[test]
fn condor_plugin_sends_results_home() -> Result<()> {
    let world = TestCluster::start(&["20MB"])?;
    world.wait_for_servers(2)?;
    let scratch = tempfile::tempdir()?;
    fs::write(scratch.path().join("out.txt"), "result\n")?;
    fs::write(scratch.path().join("MANIFEST.0000"), "0 out.txt\n")?;
    // As `checkpoint_destination` and `output_destination` do, with doubled slashes.
    let request = |name: &str| {
        format!("[ LocalFileName = \"{name}\"; Url = \"bafs://home/ckpt/job#1//{name}\" ]\n")
    };
    let requests = request("out.txt") + &request("MANIFEST.0000") + &request("none");
    let output = call(&world, scratch.path(), &requests, &["-upload"])?;
    ensure!(
        output.status.code() == Some(1),
        "a file is missing: {}",
        printed_text(&output)
    );
    ensure!(world.read_home("ckpt/job#1/out.txt")? == b"result\n");
    ensure!(world.read_home("ckpt/job#1/MANIFEST.0000")? == b"0 out.txt\n");
    let results = fs::read_to_string(scratch.path().join("results"))?;
    ensure!(
        results.matches("TransferSuccess = true").count() == 2,
        "{results}"
    );
    ensure!(
        results.contains("TransferError = \"bafs: open ./none"),
        "{results}"
    );
    // Without a cluster each call still reports why.
    fs::write(scratch.path().join(".job.ad"), "")?;
    let mut command = Command::new(bafs_program());
    command.args(["-infile", "requests", "-outfile", "results", "-upload"]);
    let refused = command
        .current_dir(scratch.path())
        .env("BAFS_CONFIG", "")
        .output()?;
    let results = fs::read_to_string(scratch.path().join("results"))?;
    ensure!(
        !refused.status.success() && results.contains("no catalog: add"),
        "{results}"
    );
    Ok(())
}
