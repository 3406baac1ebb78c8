//! `cargo xtask demo`: packages, build, then `bafs demo` with the caller's arguments.
//!
//! The demo runs the program as the tests do: an optimised build takes twice the processor time,
//! the demo waits for its link and for BLAST, and `cargo xtask test` uses the same build again.

use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result};

use crate::programs::{self, BuildProfile};
use crate::{setup, shell};

/// Becomes `bafs demo`, so that Ctrl-C, other signals and the exit code are its own.
pub(crate) fn replace_this_process(arguments: &[String]) -> Result<()> {
    let mut demo = prepare(arguments)?;
    shell::print_command(&demo);
    Err(demo.exec()).context("start the demo")
}

/// Runs the demo as a step of something larger.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    shell::run_command(&mut prepare(arguments)?)
}

fn prepare(arguments: &[String]) -> Result<Command> {
    setup::ensure_packages(setup::Purpose::Demo)?;
    let mut demo =
        Command::new(programs::build_programs(BuildProfile::Tests, &["bafs"])?.join("bafs"));
    demo.arg("demo")
        .args(arguments)
        .current_dir(shell::checkout_root());
    Ok(demo)
}
