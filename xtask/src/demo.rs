//! `cargo xtask demo`: packages, build, then `bafs demo` with the caller's arguments.

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result};

use crate::programs::{self, Build};
use crate::{setup, shell};

/// Becomes `bafs demo`, so that Ctrl-C, other signals and the exit code are its own.
pub(crate) fn replace_this_process(arguments: &[String]) -> Result<()> {
    let mut demo = prepare(Build::Release, arguments)?;
    shell::announce(&demo);
    Err(demo.exec()).context("start the demo")
}

/// Runs the demo as a step of something larger.
pub(crate) fn run(build: Build, arguments: &[String]) -> Result<()> {
    shell::run(&mut prepare(build, arguments)?)
}

fn prepare(build: Build, arguments: &[String]) -> Result<Command> {
    setup::ensure(setup::Purpose::Demo)?;
    let mut demo = Command::new(programs::build(build, &["bafs"])?.join("bafs"));
    demo.arg("demo").args(arguments).current_dir(shell::root());
    Ok(demo)
}
