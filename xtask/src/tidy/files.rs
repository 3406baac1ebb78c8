//! The text files of the checkout, and the names that must not be in any of them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, Result};

use super::violation::RuleViolation;
use crate::shell;

/// One text file.
pub(crate) struct SourceFile {
    /// As seen from the root of the checkout, with `/`.
    pub(crate) path: String,
    /// All of it.
    pub(crate) text: String,
}

impl SourceFile {
    /// Whether the name ends in this, without the dot.
    pub(crate) fn has_extension(&self, extension: &str) -> bool {
        self.path
            .rsplit_once('.')
            .is_some_and(|(_, found)| found == extension)
    }
}

/// Reads what belongs to the project: what git tracks and what it would track.
pub(crate) fn read_all(root: &Path) -> Result<Vec<SourceFile>> {
    let mut git = Command::new("git");
    // Root may well build in a user's checkout; listing names is safe there.
    git.current_dir(root).args([
        "-c",
        "safe.directory=*",
        "ls-files",
        "-z",
        "--cached",
        "--others",
        "--exclude-standard",
    ]);
    let listed = shell::run_for_output(&mut git).context("list the files of the checkout")?;
    let mut paths: Vec<&str> = listed.split('\0').filter(|path| !path.is_empty()).collect();
    paths.sort_unstable();
    paths.dedup();
    let mut files = Vec::new();
    for path in paths {
        // A deleted file is still listed, and a file that is not text has no style.
        if let Ok(bytes) = fs::read(root.join(path)) {
            files.push(SourceFile {
                path: path.to_owned(),
                // Of a picture only the path counts.
                text: String::from_utf8(bytes).unwrap_or_default(),
            });
        }
    }
    Ok(files)
}

/// Registries are an affair of each machine's settings. In two pieces, as this file is checked too.
const REGISTRY_HOSTS: [&str; 5] = [
    concat!("crates", ".io"),
    concat!("static.rust-lang", ".org"),
    concat!("deb.debian", ".org"),
    concat!("pypi", ".org"),
    concat!("registry.npmjs", ".org"),
];

/// Directories of the machine that we run on: this checkout, its neighbours, and home.
pub(super) fn find_machine_paths(root: &Path) -> Vec<String> {
    let mut paths = vec![root.to_path_buf()];
    if let Some(parent) = root.parent() {
        let entries = fs::read_dir(parent).into_iter().flatten().flatten();
        paths.extend(
            entries
                .map(|entry| entry.path())
                .filter(|path| path.is_dir()),
        );
    }
    // `/usr` beside a checkout in `/src`, or any name in /tmp, is no one machine's secret.
    paths.retain(|path| path.components().count() > 2 && !path.starts_with("/tmp"));
    let home = env::var_os("HOME").map(PathBuf::from);
    paths.extend(home.filter(|home| home.parent().is_some()));
    paths
        .iter()
        .map(|path| path.to_string_lossy().into_owned())
        .collect()
}

/// Finds names that mean something on one machine only.
pub(super) fn check_machine_names(
    file: &SourceFile,
    machine_paths: &[String],
) -> Vec<RuleViolation> {
    let mut findings = Vec::new();
    // Cargo writes the lock file, and its index has the name that it has.
    if file.path == "Cargo.lock" {
        return findings;
    }
    for (index, line) in file.text.lines().enumerate() {
        if let Some(path) = machine_paths.iter().find(|path| has_path(line, path)) {
            let what = format!("`{path}` is a path of one machine");
            findings.push(RuleViolation::new(&file.path, index + 1, what));
        }
        if let Some(host) = REGISTRY_HOSTS.iter().find(|host| line.contains(**host)) {
            let what = format!("`{host}` names a registry; say `the registry`");
            findings.push(RuleViolation::new(&file.path, index + 1, what));
        }
    }
    findings
}

/// Whether the line has this path or one below it.
fn has_path(line: &str, path: &str) -> bool {
    line.match_indices(path).any(|(start, _)| {
        let after = line[start + path.len()..].chars().next();
        let before = line[..start].chars().next_back();
        let in_name = |c: char| c.is_alphanumeric() || c == '_' || c == '-';
        !after.is_some_and(in_name) && !before.is_some_and(|c| in_name(c) || c == '.')
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(path: &str, text: &str, expected: usize) {
        let file = SourceFile {
            path: path.to_owned(),
            text: text.to_owned(),
        };
        let found = check_machine_names(&file, &["/build/here".to_owned()]);
        assert_eq!(found.len(), expected, "{text}: {found:?}");
    }

    #[test]
    fn machine_paths_are_found_but_lookalikes_are_not() {
        check("a.md", "see /build/here/target", 1);
        check("a.md", "see `/build/here`", 1);
        check("a.md", "see /build/hereafter", 0);
        check("a.md", "see ./build/here", 0);
        check("a.md", "see /data and /scratch", 0);
    }

    #[test]
    fn registries_are_found_outside_the_lock_file() {
        check("a.md", concat!("get it from crates", ".io"), 1);
        check("Cargo.lock", concat!("crates", ".io-index"), 0);
    }
}
