//! The page "How to add a policy", executed: its files and changes are made in a copy of the
//! source, and its commands are run there. `file=PATH` after the language of a block names a file.
//! A `diff` block has the lines of that file that go and those that come, beside lines that stay.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// The page.
const PAGE: &str = "docs/contributing/policy.md";

/// Lines of the policy's own file that the page promises at most.
const POLICY_LINES_MAX: usize = 60;

/// Time limit of a command in seconds: the first one compiles everything.
const COMMAND_S_MAX: &str = "1500";

/// One fenced block of the page.
#[derive(Debug, PartialEq)]
struct Block<'a> {
    language: &'a str,
    /// What it makes or changes.
    file: Option<&'a str>,
    text: String,
}

fn read_blocks(page: &str) -> Vec<Block<'_>> {
    let mut blocks = Vec::new();
    let mut open: Option<Block<'_>> = None;
    for line in page.lines() {
        match (line.strip_prefix("```"), &mut open) {
            (Some(info), None) => {
                let (language, rest) = info.split_once(' ').unwrap_or((info, ""));
                open = Some(Block {
                    language,
                    file: rest.strip_prefix("file="),
                    text: String::new(),
                });
            }
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (None, Some(block)) => block.text += &format!("{line}\n"),
            (None, None) => {}
        }
    }
    blocks
}

/// A file after a change, whose parts are divided by lines that begin with `@@`.
fn apply_change(text: &str, change: &str) -> Result<String> {
    let mut changed = text.to_owned();
    let lines: Vec<&str> = change.lines().collect();
    for part in lines.split(|line| line.starts_with("@@")) {
        let side = |other: char| {
            let kept = part.iter().filter(|line| !line.starts_with(other));
            kept.map(|line| format!("{}\n", line.get(1..).unwrap_or("")))
                .collect::<String>()
        };
        let (old, new) = (side('+'), side('-'));
        ensure!(
            !old.is_empty() && changed.contains(&old),
            "the file does not have: {old}"
        );
        changed = changed.replacen(&old, &new, 1);
    }
    Ok(changed)
}

/// Copies the files of the project.
fn copy_source(source: &Path, copy: &Path) -> Result<()> {
    let listed = Command::new("git")
        .args(["ls-files", "-z"])
        .current_dir(source)
        .output()?;
    ensure!(listed.status.success(), "git lists no files here");
    let listed = String::from_utf8(listed.stdout)?;
    for path in listed.split('\0').filter(|path| !path.is_empty()) {
        let target = copy.join(path);
        fs::create_dir_all(target.parent().context("a directory")?)?;
        // One that is deleted, but not yet committed so, is missing.
        if source.join(path).is_file() {
            fs::copy(source.join(path), target)?;
        }
    }
    Ok(())
}

/// Runs a block of commands; what it printed.
fn run_commands(directory: &Path, target: &Path, commands: &str) -> Result<String> {
    let output = Command::new("timeout")
        .args([COMMAND_S_MAX, "sh", "-ec", commands])
        .current_dir(directory)
        .env("CARGO_TARGET_DIR", target)
        .env("CARGO_NET_OFFLINE", "true")
        .output()?;
    let printed =
        [output.stdout, output.stderr].map(|it| String::from_utf8_lossy(&it).into_owned());
    let printed = printed.join("\n");
    ensure!(output.status.success(), "{commands}failed:\n{printed}");
    Ok(printed)
}

#[test]
fn change_replaces_lines_in_order() -> Result<()> {
    let change = " b\n+c\n@@ … @@\n-e\n+f\n";
    assert_eq!(apply_change("a\nb\nd\ne\n", change)?, "a\nb\nc\nd\nf\n");
    apply_change("a\n", change).expect_err("the line is not there");
    Ok(())
}

#[test]
#[ignore = "compiles a changed copy of the program: `cargo xtask soak` runs it"]
fn policy_page_works_as_written() -> Result<()> {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = fs::read_to_string(source.join(PAGE))?;
    let copy = tempfile::tempdir()?;
    copy_source(&source, copy.path())?;
    // Kept, so that only the project's own crates are compiled the next time.
    let target = source.canonicalize()?.join("target/policy-page");
    let mut printed = String::new();
    let mut changed_files = 0;
    for block in read_blocks(&page) {
        match (block.language, block.file) {
            ("rust", Some(file)) => {
                ensure!(
                    block.text.lines().count() <= POLICY_LINES_MAX,
                    "{file} is long"
                );
                fs::write(copy.path().join(file), &block.text)?;
                changed_files += 1;
            }
            ("diff", Some(file)) => {
                let file = copy.path().join(file);
                let changed = apply_change(&fs::read_to_string(&file)?, &block.text)?;
                fs::write(file, changed)?;
                changed_files += 1;
            }
            ("sh", None) => printed = run_commands(copy.path(), &target, &block.text)?,
            ("text", None) => {
                for line in block.text.lines() {
                    ensure!(printed.contains(line), "'{line}' is not in:\n{printed}");
                }
            }
            _ => anyhow::bail!("what is this block for? {block:?}"),
        }
    }
    ensure!(changed_files == 2, "{changed_files} files were changed");
    Ok(())
}
