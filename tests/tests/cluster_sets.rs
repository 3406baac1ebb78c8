//! Directories and patterns of files go home as sets.

use anyhow::{Context, Result, ensure};
use bafs_tests::printed_text;

use crate::throw_away_runs::{is_skipped, run_workflow};

#[test]
fn cluster_extracts_directories_and_patterns() -> Result<()> {
    if is_skipped("cluster_extracts_directories_and_patterns") {
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let text = "volume w scratch 10 MB\njob a {\n script = <<END\n  mkdir -p res/deep\n  \
                echo one > res/one\n  echo two > res/deep/two\n  echo A > a.bam\n  \
                echo B > b.bam\n  echo I > a.bai\n END\n}\nmount w a /w\n\
                extract w res/ bafs://home/out/res/\nextract w *.bam *.bai bafs://home/out/maps/\n";
    let output = run_workflow(directory.path(), text)?;
    ensure!(output.status.success(), "{}", printed_text(&output));
    let at_home = |path: &str| std::fs::read_to_string(directory.path().join("out").join(path));
    ensure!(at_home("res/one")? == "one\n" && at_home("res/deep/two")? == "two\n");
    ensure!(at_home("maps/a.bam")? == "A\n" && at_home("maps/a.bai")? == "I\n");
    let manifest: serde_json::Value = serde_json::from_str(&at_home("maps/bafs-manifest.json")?)?;
    ensure!(manifest["complete"] == true, "{manifest}");
    let files = manifest["files"].as_array().context("files")?;
    let names: Vec<_> = files
        .iter()
        .filter_map(|file| file["path"].as_str())
        .collect();
    ensure!(names == ["a.bai", "a.bam", "b.bam"], "{manifest}");
    Ok(())
}

#[test]
fn cluster_blames_jobs_for_empty_sets() -> Result<()> {
    if is_skipped("cluster_blames_jobs_for_empty_sets") {
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let text = "volume w scratch 10 MB\njob a {\n executable = touch\n arguments = a.txt\n}\n\
                mount w a /w\nextract w *.txt *.bam bafs://home/out/\n";
    let output = run_workflow(directory.path(), text)?;
    let said = printed_text(&output);
    ensure!(!output.status.success(), "{said}");
    for part in [
        "job a failed",
        "did not write '*.txt *.bam'",
        "no file is at '*.bam'",
    ] {
        ensure!(said.contains(part), "no {part:?} in: {said}");
    }
    ensure!(
        !directory.path().join("out").exists(),
        "half a set is at home"
    );
    Ok(())
}
