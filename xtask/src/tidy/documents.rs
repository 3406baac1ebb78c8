//! Documents stay true: they exist, their links lead somewhere, their tests are real.

use std::collections::BTreeSet;

use super::files::SourceFile;
use super::source::blank_non_code;
use super::violation::RuleViolation;

const REQUIRED: [&str; 13] = [
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "LICENSE-MIT",
    "LICENSE-APACHE",
    "docs/reference/semantics.md",
    "docs/reference/protocol.md",
    "docs/reference/workflow.md",
    "docs/guide/cluster.md",
    "docs/contributing/testing.md",
    "docs/contributing/style.md",
    DECISIONS,
];
const DECISIONS: &str = "docs/decisions/README.md";
const SEMANTICS: &str = "docs/reference/semantics.md";

/// The documents that every reader may expect are there.
pub(super) fn check_required(files: &[SourceFile]) -> Vec<RuleViolation> {
    let missing = REQUIRED
        .iter()
        .filter(|path| find_file(files, path).is_none());
    missing
        .map(|path| RuleViolation::new(path, 0, "this document is missing"))
        .collect()
}

/// Links to files of the project lead to files of the project.
pub(super) fn check_links(file: &SourceFile, files: &[SourceFile]) -> Vec<RuleViolation> {
    let mut findings = Vec::new();
    if !file.has_extension("md") {
        return findings;
    }
    let directory = file
        .path
        .rsplit_once('/')
        .map_or("", |(directory, _)| directory);
    for (number, line) in lines_outside_code(&file.text) {
        for target in link_targets(line) {
            let path = target.split('#').next().unwrap_or_default();
            if path.is_empty() || path.contains("://") || path.starts_with("mailto:") {
                continue;
            }
            if !resolve_path(directory, path).is_some_and(|path| exists(files, &path)) {
                let what = format!("the link to `{target}` leads nowhere");
                findings.push(RuleViolation::new(&file.path, number, what));
            }
        }
    }
    findings
}

/// Lines outside fenced code, numbered from 1.
fn lines_outside_code(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_fence = false;
    text.lines().enumerate().filter_map(move |(index, line)| {
        if line.trim_start().starts_with("```") {
            in_fence = !in_fence;
            return None;
        }
        (!in_fence).then_some((index + 1, line))
    })
}

fn link_targets(line: &str) -> Vec<&str> {
    let mut targets = Vec::new();
    let without_code: Vec<&str> = line.split('`').step_by(2).collect();
    // A link whose text is code is split by that code; what counts is where it leads.
    for part in without_code {
        targets.extend(
            part.split("](")
                .skip(1)
                .filter_map(|rest| rest.split(')').next()),
        );
    }
    if let Some((_, target)) = line
        .strip_prefix('[')
        .and_then(|rest| rest.split_once("]: "))
    {
        targets.push(target);
    }
    targets
        .iter()
        .filter_map(|target| target.split_whitespace().next())
        .collect()
}

/// The path seen from the root, or nothing if it leaves the project.
fn resolve_path(directory: &str, path: &str) -> Option<String> {
    let mut parts: Vec<&str> = directory
        .split('/')
        .filter(|part| !part.is_empty())
        .collect();
    if path.starts_with('/') {
        return None;
    }
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            _ => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// Whether the path is a file of the project or a directory with one.
fn exists(files: &[SourceFile], path: &str) -> bool {
    let below = format!("{path}/");
    path.is_empty()
        || files
            .iter()
            .any(|file| file.path == path || file.path.starts_with(&below))
}

/// Every decision record is in the list of decisions.
pub(super) fn check_decisions(files: &[SourceFile]) -> Vec<RuleViolation> {
    let list = find_file(files, DECISIONS).map_or("", |file| &file.text);
    let records = files
        .iter()
        .filter_map(|file| file.path.strip_prefix("docs/decisions/"));
    let forgotten =
        records.filter(|name| name.starts_with(char::is_numeric) && !list.contains(name));
    forgotten
        .map(|name| RuleViolation::new(DECISIONS, 0, format!("does not list the record {name}")))
        .collect()
}

/// Every promise, which is an item that begins with `*`, names a test, and every test that is named
/// exists: `… [test: name]`, or `[test: one, another]`.
pub(super) fn check_semantics(files: &[SourceFile]) -> Vec<RuleViolation> {
    let Some(semantics) = find_file(files, SEMANTICS) else {
        return Vec::new();
    };
    let mut functions = BTreeSet::new();
    for file in files.iter().filter(|file| file.has_extension("rs")) {
        functions.extend(function_names(&blank_non_code(&file.text)));
    }
    let mut findings = find_items_without_test(&semantics.text);
    for (index, line) in semantics.text.lines().enumerate() {
        for name in named_tests(line) {
            // `mount::rename` names a function in a module.
            let function = name.rsplit("::").next().unwrap_or(name);
            if !functions.contains(function) {
                let what = format!("promises by a test that does not exist: `{name}`");
                findings.push(RuleViolation::new(SEMANTICS, index + 1, what));
            }
        }
    }
    findings
}

/// Items that name no test.
fn find_items_without_test(text: &str) -> Vec<RuleViolation> {
    let mut findings = Vec::new();
    let mut open = None;
    for (index, line) in text.lines().chain([""]).enumerate() {
        let begins = line.starts_with("* ");
        if begins || line.trim().is_empty() || line.starts_with(['#', '-']) {
            let unnamed = open.take();
            findings.extend(unnamed.map(|at| {
                RuleViolation::new(
                    SEMANTICS,
                    at,
                    "promises without naming a test: `[test: name]`",
                )
            }));
        }
        if begins {
            open = Some(index + 1);
        }
        if line.contains("[test: ") {
            open = None;
        }
    }
    findings
}

fn function_names(code: &str) -> Vec<String> {
    let starts = code
        .match_indices("fn ")
        .map(|(start, found)| &code[start + found.len()..]);
    let end = |rest: &str| rest.find(|c: char| !c.is_alphanumeric() && c != '_');
    starts
        .filter_map(|rest| end(rest).map(|end| rest[..end].to_owned()))
        .collect()
}

fn named_tests(line: &str) -> Vec<&str> {
    let lists = line
        .split("[test: ")
        .skip(1)
        .filter_map(|rest| rest.split(']').next());
    let names = lists.flat_map(|list| list.split(','));
    names.map(|name| name.trim_matches([' ', '`'])).collect()
}

fn find_file<'a>(files: &'a [SourceFile], path: &str) -> Option<&'a SourceFile> {
    files.iter().find(|file| file.path == path)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> SourceFile {
        SourceFile {
            path: path.to_owned(),
            text: text.to_owned(),
        }
    }

    fn check_link(text: &str, expected: usize) {
        let files = [
            file("docs/A.md", text),
            file("README.md", ""),
            file("docs/b/c.md", ""),
        ];
        let found = check_links(&files[0], &files);
        assert_eq!(found.len(), expected, "{text}: {found:?}");
    }

    #[test]
    fn links_lead_to_files_and_directories() {
        check_link("see [r](../README.md) and [c](b/c.md#part) and [b](b/)", 0);
        check_link(
            "see [`code`](b/c.md), [here](#here), [w](https://example.org)",
            0,
        );
        check_link("see [r](README.md) and [`x`](nowhere.md)", 2);
        check_link("see [out](../../else.md)", 1);
        check_link("[r]: ../README.md\n[s]: no.md\n", 1);
        check_link("```\n[a](nowhere.md)\n```\n`[a](nowhere.md)`", 0);
    }

    #[test]
    fn decision_records_must_be_listed() {
        let record = || file("docs/decisions/0007-a.md", "");
        assert_eq!(check_decisions(&[record(), file(DECISIONS, "")]).len(), 1);
        assert!(check_decisions(&[record(), file(DECISIONS, "[a](0007-a.md)")]).is_empty());
    }

    #[test]
    fn promises_name_existing_tests() {
        let code = || {
            file(
                "tests/mount.rs",
                "fn rename() {}\nasync fn fsync<T>() {} // fn gone()",
            )
        };
        let check = |text: &str| check_semantics(&[code(), file(SEMANTICS, text)]).len();
        assert_eq!(check("Rename is atomic. [test: mount::rename, `fsync`]"), 0);
        assert_eq!(check("Nothing is promised here."), 0);
        assert_eq!(check("Lost. [test: gone]\nKept. [test: rename]"), 1);
        assert_eq!(
            check("* One.\n* Two,\n  twice. [test: rename]\n* Three.\n"),
            2
        );
        assert_eq!(check("* One,\n  [test: fsync]\n\n- Not ours.\n"), 0);
    }

    #[test]
    fn missing_documents_are_named() {
        let all: Vec<SourceFile> = REQUIRED.iter().map(|path| file(path, "")).collect();
        assert!(check_required(&all).is_empty());
        assert_eq!(check_required(&all[1..])[0].path, "README.md");
    }
}
