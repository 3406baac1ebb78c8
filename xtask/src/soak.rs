//! `cargo xtask soak`: the long tests, which are `#[ignore]` so that everyday runs stay short.

use anyhow::{Result, bail};

use crate::programs::{self, BuildProfile};
use crate::{setup, shell, suites, test};

/// Runs the ignored tests of the workspace; the arguments go to nextest.
pub(crate) fn run_long_tests(arguments: &[String]) -> Result<()> {
    setup::ensure_packages(setup::Purpose::Test)?;
    if !test::ensure_nextest() {
        bail!("the long tests need cargo-nextest, whose limits end a test that hangs");
    }
    // Hours of real work: optimised, as users run it.
    let release = programs::build_programs(BuildProfile::Release, &["bafs"])?;
    let mut command = shell::cargo_command(&["nextest", "run", "--workspace", "--release"]);
    command
        .args(["--profile", "soak", "--run-ignored", "only"])
        .args(arguments);
    command.env(suites::TOOLS_VARIABLE, suites::ensure_programs()?);
    command.env("BAFS_BIN", release.join("bafs"));
    shell::run_command(&mut command)
}
