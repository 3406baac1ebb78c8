//! `cargo xtask tidy`: the rules of `docs/contributing/style.md` that neither rustc nor clippy
//! knows, as a command and as a test. Reads files; changes nothing.

mod code_map;
mod documents;
pub(crate) mod files;
mod layers;
mod modules;
mod prose;
pub(crate) mod source;
mod style;
mod violation;
mod words;

use anyhow::{Result, bail};

use crate::{house, measurements, shell};
use files::SourceFile;
use violation::RuleViolation;

/// The command: the rules, and whether the generated reference is what the program says.
pub(crate) fn run_tidy() -> Result<()> {
    check_rules()?;
    reference(Reference::Compared)
}

/// Prints every breach of the rules and fails if there is one. Compiles nothing.
pub(crate) fn check_rules() -> Result<()> {
    let root = shell::checkout_root();
    let files = files::read_all(&root)?;
    let violations = find_violations(
        &files,
        &shell::read_metadata()?,
        &files::find_machine_paths(&root),
    );
    for finding in &violations {
        println!("{finding}");
    }
    if !violations.is_empty() {
        bail!(
            "{} breaches of the house rules (docs/contributing/style.md)",
            violations.len()
        );
    }
    measurements::check_page()?;
    println!("tidy: {} files follow the house rules", files.len());
    Ok(())
}

/// The command `prose`: how long the sentences of the documents are.
pub(crate) fn run_prose(arguments: &[String]) -> Result<()> {
    prose::print_sentence_lengths(&files::read_all(&shell::checkout_root())?, arguments);
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
    let mut cargo = shell::cargo_command(&["test", "--quiet", "--package", "bafs", "reference::"]);
    if action == Reference::Written {
        cargo.env("BAFS_WRITE_REFERENCE", "1");
    }
    shell::run_command(&mut cargo)
}

/// Applies every rule. Pure, so that the tests of the rules need no file.
fn find_violations(
    files: &[SourceFile],
    metadata: &serde_json::Value,
    machine_paths: &[String],
) -> Vec<RuleViolation> {
    let mut findings = Vec::new();
    for file in files {
        findings.extend(style::check_style(file));
        findings.extend(files::check_machine_names(file, machine_paths));
        findings.extend(layers::check_file(file));
        findings.extend(documents::check_links(file, files));
        findings.extend(prose::check_lengths(file));
        findings.extend(words::check_retired(file));
    }
    findings.extend(layers::check_file_counts(files));
    findings.extend(layers::check_crate_dependencies(metadata));
    findings.extend(documents::check_required(files));
    findings.extend(documents::check_decisions(files));
    findings.extend(documents::check_semantics(files));
    findings.extend(code_map::check_code_map(files));
    findings.extend(check_circles(files));
    findings.extend(words::check_ambiguous(files));
    findings.extend(modules::check_modules(files, metadata));
    findings.sort();
    findings
}

/// Import circles, which may only become fewer and smaller.
fn check_circles(files: &[SourceFile]) -> Vec<RuleViolation> {
    let found = house::check_circles(files).into_iter();
    found
        .map(|what| RuleViolation::new("xtask/src/house.rs", 0, what))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_workspace_follows_the_house_rules() {
        let root = shell::checkout_root();
        let files = files::read_all(&root).expect("files");
        let metadata = shell::read_metadata().expect("metadata");
        let found = find_violations(&files, &metadata, &files::find_machine_paths(&root));
        assert_eq!(found, [], "`cargo xtask tidy` shows the same");
    }
}
