//! Runs of workflows on throw-away clusters of one node.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result};
use bafs_tests::{bafs_program, mount_obstacle, report_skip};

/// Runs a workflow in a directory.
pub(crate) fn run_workflow(directory: &Path, text: &str) -> Result<Output> {
    let workflow = directory.join("w.bafs");
    std::fs::write(&workflow, text)?;
    let mut run = Command::new(bafs_program());
    run.arg("run").arg(&workflow).args(["--local", "1"]);
    run.stdin(Stdio::null()).output().context("bafs run")
}

/// Whether a test cannot run here, which is reported.
pub(crate) fn is_skipped(test: &str) -> bool {
    mount_obstacle().is_some_and(|reason| {
        report_skip(test, &reason);
        true
    })
}
