//! Programs for tests that come as crates, suites and servers: builds them below `target/`.
//! Runs none of them.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::shell;

/// Where the tests look for what is built here: the programs' directory.
pub(crate) const TOOLS_VARIABLE: &str = "BAFS_TOOLS";

/// Crate, version and features; each gives a program of its own name.
const SUITES: [(&str, &str, &str); 3] = [
    ("pjdfstest", "0.2.2", ""),
    ("fsx", "0.3.2", ""),
    ("s3s-fs", "0.14.1", "binary"),
];

/// Builds what is missing, and gives the directory of the programs. Without a registry the tests
/// that need them say that they are skipped.
pub(crate) fn ensure_programs() -> Result<PathBuf> {
    let root = shell::target_directory()?.join("tools");
    for (name, version, features) in SUITES {
        if is_installed(&root, name, version) {
            continue;
        }
        println!("setup: building {name} for tests, takes a minute or two, once");
        let mut install =
            shell::cargo_command(&["install", name, "--version", version, "--locked"]);
        install
            .args(["--debug", "--features", features])
            .arg("--root")
            .arg(&root)
            // Nobody looks into them with a debugger, and what nobody reads takes time to write.
            .env("CARGO_PROFILE_DEV_DEBUG", "false");
        if let Err(error) = shell::run_command(&mut install) {
            println!("setup: {error:#}");
        }
    }
    Ok(root.join("bin"))
}

fn is_installed(root: &Path, name: &str, version: &str) -> bool {
    let list = fs::read_to_string(root.join(".crates.toml")).unwrap_or_default();
    has_entry(&list, name, version) && root.join("bin").join(name).is_file()
}

/// Cargo's own list of what it installed, for `cargo install` itself would ask the
/// registry.
fn has_entry(list: &str, name: &str, version: &str) -> bool {
    list.contains(&format!("\"{name} {version} "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_requested_version_counts() {
        let list = "[v1]\n\"fsx 0.3.2 (registry+https://example.org)\" = [\"fsx\"]\n";
        assert!(has_entry(list, "fsx", "0.3.2"));
        assert!(!has_entry(list, "fsx", "0.3.1") && !has_entry(list, "sx", "0.3.2"));
        assert!(!has_entry("", "fsx", "0.3.2"));
    }
}
