//! `cargo xtask tidy`: the rules of `docs/contributing/style.md` that neither rustc nor clippy knows, as a
//! command and as a test. Reads files; changes nothing.

mod code_map;
mod documents;
mod files;
mod layers;
mod modules;
mod prose;
mod source;
mod style;
mod words;

use std::fmt;

use anyhow::{Result, bail};

use crate::shell;
use files::File;

/// One breach of a rule.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Finding {
    /// The file, as seen from the root of the checkout.
    path: String,
    /// The line, from 1; 0 when the file as a whole is meant.
    line: usize,
    /// What is wrong and what to do.
    what: String,
}

impl Finding {
    fn new(path: &str, line: usize, what: impl Into<String>) -> Self {
        Self {
            path: path.to_owned(),
            line,
            what: what.into(),
        }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.line == 0 {
            write!(f, "{}: {}", self.path, self.what)
        } else {
            write!(f, "{}:{}: {}", self.path, self.line, self.what)
        }
    }
}

/// The command: prints what it finds and fails if that is anything.
pub(crate) fn run() -> Result<()> {
    let root = shell::root();
    let files = files::read_all(&root)?;
    let findings = findings(&files, &shell::metadata()?, &files::machine_paths(&root));
    for finding in &findings {
        println!("{finding}");
    }
    if !findings.is_empty() {
        bail!(
            "{} breaches of the house rules (docs/contributing/style.md)",
            findings.len()
        );
    }
    reference(Reference::Compared)?;
    println!("tidy: {} files follow the house rules", files.len());
    Ok(())
}

/// The command `prose`: how long the sentences of the documents are.
pub(crate) fn prose(arguments: &[String]) -> Result<()> {
    prose::show(&files::read_all(&shell::root())?, arguments);
    Ok(())
}

/// What is done with the generated pages of `docs/reference`.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reference {
    /// They are written anew.
    Written,
    /// They are compared with the program.
    Compared,
}

/// The command `reference`: a test of the program knows its options, errors and metrics.
pub(crate) fn reference(action: Reference) -> Result<()> {
    let mut cargo = shell::cargo(&["test", "--quiet", "--package", "bafs", "reference::"]);
    if action == Reference::Written {
        cargo.env("BAFS_WRITE_REFERENCE", "1");
    }
    shell::run(&mut cargo)
}

/// Applies every rule. Pure, so that the tests of the rules need no file.
fn findings(
    files: &[File],
    metadata: &serde_json::Value,
    machine_paths: &[String],
) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in files {
        findings.extend(style::check(file));
        findings.extend(files::check_names_of_machines(file, machine_paths));
        findings.extend(layers::check_file(file));
        findings.extend(documents::check_links(file, files));
        findings.extend(prose::check_lengths(file));
        findings.extend(words::check_retired(file));
    }
    findings.extend(layers::check_shares(files));
    findings.extend(layers::check_crates(metadata));
    findings.extend(documents::check_required(files));
    findings.extend(documents::check_decisions(files));
    findings.extend(documents::check_semantics(files));
    findings.extend(code_map::check(files));
    findings.extend(words::check_ambiguous(files));
    findings.extend(modules::check(files, metadata));
    findings.sort();
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workspace_follows_the_house_rules() {
        let root = shell::root();
        let files = files::read_all(&root).expect("files");
        let metadata = shell::metadata().expect("metadata");
        let found = findings(&files, &metadata, &files::machine_paths(&root));
        assert_eq!(found, [], "`cargo xtask tidy` shows the same");
    }

    #[test]
    fn a_finding_names_its_place() {
        assert_eq!(Finding::new("a.rs", 3, "bad").to_string(), "a.rs:3: bad");
        assert_eq!(Finding::new("a.rs", 0, "bad").to_string(), "a.rs: bad");
    }
}
