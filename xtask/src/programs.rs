//! Builds the workspace's own programs. Runs none of them.

use std::path::PathBuf;

use anyhow::Result;

use crate::shell;

/// How programs are built.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum BuildProfile {
    /// Optimised, as users have them.
    Release,
    /// As the tests run them.
    Tests,
}

/// Builds the programs of these names, and gives their directory.
pub(crate) fn build_programs(profile: BuildProfile, names: &[&str]) -> Result<PathBuf> {
    // Cargo builds libraries with the features that all chosen packages ask for: chosen one by one,
    // the same libraries would be built again for each choice.
    let mut arguments = vec!["build", "--workspace"];
    arguments.extend(names.iter().flat_map(|name| ["--bin", name]));
    let directory = match profile {
        BuildProfile::Release => {
            arguments.push("--release");
            "release"
        }
        BuildProfile::Tests => "debug",
    };
    shell::run_command(&mut shell::cargo_command(&arguments))?;
    Ok(shell::target_directory()?.join(directory))
}
