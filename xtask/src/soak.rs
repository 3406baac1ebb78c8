//! `cargo xtask soak`: the long tests, which are `#[ignore]` so that everyday runs stay short.

use anyhow::{Result, bail};

use crate::programs::{self, Build};
use crate::{setup, shell, suites, test};

/// Runs the ignored tests of the workspace; the arguments go to nextest.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    setup::ensure(setup::Purpose::Test)?;
    if !test::has_nextest() {
        bail!("the long tests need cargo-nextest, whose limits end a test that hangs");
    }
    // Hours of real work: optimised, as users run it.
    let release = programs::build(Build::Release, &["bafs"])?;
    let mut command = shell::cargo(&["nextest", "run", "--workspace", "--release"]);
    command
        .args(["--profile", "soak", "--run-ignored", "only"])
        .args(arguments);
    command.env(suites::VARIABLE, suites::ensure()?);
    command.env("BAFS_BIN", release.join("bafs"));
    shell::run(&mut command)
}
