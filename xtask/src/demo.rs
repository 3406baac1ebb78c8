//! `cargo xtask demo`: packages, build, then `bafs demo` with the caller's arguments.

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result};

use crate::programs::{self, BuildProfile};
use crate::{setup, shell};

/// Becomes `bafs demo`, so that Ctrl-C, other signals and the exit code are its own.
pub(crate) fn replace_this_process(arguments: &[String]) -> Result<()> {
    let mut demo = prepare(BuildProfile::Release, arguments)?;
    shell::print_command(&demo);
    Err(demo.exec()).context("start the demo")
}

/// Runs the demo as a step of something larger.
pub(crate) fn run(build: BuildProfile, arguments: &[String]) -> Result<()> {
    shell::run_command(&mut prepare(build, arguments)?)
}

fn prepare(build: BuildProfile, arguments: &[String]) -> Result<Command> {
    setup::ensure_packages(setup::Purpose::Demo)?;
    let mut demo = Command::new(programs::build_programs(build, &["bafs"])?.join("bafs"));
    demo.arg("demo")
        .args(arguments)
        .current_dir(shell::checkout_root());
    Ok(demo)
}
