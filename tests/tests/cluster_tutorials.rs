//! The tutorials of the book, executed: a reader's files, commands and outputs are those of the
//! page. Blocks marked `file=NAME` are files, `sh` blocks run one after the other in one shell
//! (`sh,fails` where a command is meant to fail), and a `text` block is what the block before it
//! prints. Numbers and times differ from run to run, so lines are compared without them.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use bafs_tests::batch_systems::{SlurmCluster, SlurmOptions, slurm_obstacle};
use bafs_tests::{bafs_program, find_tool, mount_obstacle, report_skip};

/// Time limit of a tutorial, in seconds; the book promises a minute of a quiet machine.
const TUTORIAL_S_MAX: u32 = 180;

/// Printed after each block, with its exit status.
const MARK: &str = "=== end of block";

/// One fenced block of a page.
struct Block<'a> {
    /// Line of the page where it begins, from 1.
    line: usize,
    info: &'a str,
    text: String,
}

fn read_blocks(page: &str) -> Vec<Block<'_>> {
    let mut blocks = Vec::new();
    let mut open: Option<Block<'_>> = None;
    for (at, line) in page.lines().enumerate() {
        match (line.strip_prefix("```"), &mut open) {
            (Some(info), None) => {
                let text = String::new();
                open = Some(Block {
                    line: at + 1,
                    info,
                    text,
                });
            }
            (Some(_), Some(_)) => blocks.extend(open.take()),
            (None, Some(block)) => {
                block.text.push_str(line);
                block.text.push('\n');
            }
            (None, None) => {}
        }
    }
    blocks
}

/// One script of all blocks: files are written where the page has them.
fn build_script(blocks: &[Block<'_>]) -> String {
    let mut script = String::from("exec 2>&1\n");
    for block in blocks {
        if let Some(name) = block.info.strip_prefix("file=") {
            let _ = writeln!(
                script,
                "mkdir -p \"$(dirname '{name}')\"\ncat > '{name}' <<'END_OF_FILE'\n{}END_OF_FILE",
                block.text
            );
        } else if block.info.starts_with("sh") {
            let _ = writeln!(script, "{}echo \"{MARK} {} $?\"", block.text, block.line);
        }
    }
    script
}

/// A line without what differs between runs: numbers, identifiers and blanks.
fn shape(line: &str) -> String {
    let is_id = |word: &str| word.len() >= 16 && word.chars().all(|c| c.is_ascii_hexdigit());
    let words = line.split(|c: char| c.is_whitespace() || "()".contains(c));
    let mut shape = String::new();
    for c in words.filter(|word| !is_id(word)).flat_map(str::chars) {
        let continues_number = c == '.' && shape.ends_with('0');
        let c = if c.is_ascii_digit() || continues_number {
            '0'
        } else {
            c
        };
        if !(c == '0' && shape.ends_with('0')) {
            shape.push(c);
        }
    }
    shape
}

/// Expected lines that were not printed.
fn missing_lines<'a>(expected: &'a str, printed: &str) -> Vec<&'a str> {
    let printed: Vec<String> = printed.lines().map(shape).collect();
    let is_missing = |line: &&str| !line.trim().is_empty() && !printed.contains(&shape(line));
    expected.lines().filter(is_missing).collect()
}

/// Runs a page in an empty directory. Of the expected lines at most `differing` may be missing:
/// those that depend on the order of events.
fn run_tutorial(test: &str, page: &str, differing: usize) -> Result<()> {
    run_tutorial_in(&Surroundings::Own, test, page, differing)
}

/// Where a tutorial is run.
enum Surroundings {
    /// In a network and process name space of its own, where this is root.
    Own,
    /// On this machine, with a variable that leads to other servers.
    Shared(&'static str, std::path::PathBuf),
}

fn run_tutorial_in(
    surroundings: &Surroundings,
    test: &str,
    page: &str,
    differing: usize,
) -> Result<()> {
    if let Some(reason) = mount_obstacle() {
        report_skip(test, &reason);
        return Ok(());
    }
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/tutorial");
    let page = fs::read_to_string(docs.join(page))?;
    let blocks = read_blocks(&page);
    let printed = run_script(&build_script(&blocks), surroundings)?;
    let mut missing = Vec::new();
    let mut expected_count = 0;
    for (at, block) in blocks.iter().enumerate() {
        if !block.info.starts_with("sh") {
            continue;
        }
        let mark = format!("{MARK} {} ", block.line);
        let (before, after) = printed
            .split_once(&mark)
            .with_context(|| format!("the block of line {} did not end:\n{printed}", block.line))?;
        let own = before.rsplit_once(MARK).map_or(before, |(_, own)| own);
        let has_failed = !after.starts_with('0');
        ensure!(
            has_failed == block.info.contains("fails"),
            "the block of line {} ended otherwise than the page says:\n{own}",
            block.line
        );
        if let Some(next) = blocks.get(at + 1).filter(|next| next.info == "text") {
            expected_count += next.text.lines().count();
            missing.extend(missing_lines(&next.text, own));
        }
    }
    ensure!(expected_count > 0, "the page shows no output");
    let missing_count = missing.len();
    ensure!(
        missing_count <= differing,
        "{missing_count} of {expected_count} lines are not as the page shows: {missing:#?}\n\
         printed:\n{printed}"
    );
    Ok(())
}

fn run_script(script: &str, surroundings: &Surroundings) -> Result<String> {
    let directory = tempfile::tempdir()?;
    let program = bafs_program();
    let programs = program.parent().context("a program is in a directory")?;
    let path = std::env::var("PATH").unwrap_or_default();
    let mut command = Command::new("timeout");
    command.args(["--kill-after=5", &TUTORIAL_S_MAX.to_string()]);
    if let Surroundings::Shared(name, value) = surroundings {
        command.env(name, value).env_remove("XDG_STATE_HOME");
    }
    if matches!(surroundings, Surroundings::Own) && nix::unistd::geteuid().is_root() {
        // The ports of the page are the tutorial's own there.
        let inner = format!("ip link set lo up\nexec bash <<'END_OF_PAGE'\n{script}\nEND_OF_PAGE");
        command.args([
            "unshare",
            "--net",
            "--pid",
            "--fork",
            "--kill-child",
            "bash",
            "-c",
            &inner,
        ]);
    } else {
        command.args(["bash", "-c", script]);
    }
    let output = command
        .current_dir(directory.path())
        .env("PATH", format!("{}:{path}", programs.display()))
        .env("HOME", directory.path())
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .context("run the tutorial")?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn first_run_tutorial_works_as_written() -> Result<()> {
    run_tutorial("first_run_tutorial_works_as_written", "first-run.md", 2)
}

#[test]
fn failed_job_guide_works_as_written() -> Result<()> {
    let page = "../guide/job-failed.md";
    run_tutorial("failed_job_guide_works_as_written", page, 2)
}

#[test]
fn containers_guide_works_as_written() -> Result<()> {
    let page = "../guide/containers.md";
    run_tutorial("containers_guide_works_as_written", page, 0)
}

#[test]
fn profile_guide_works_as_written() -> Result<()> {
    let page = "../guide/profile.md";
    run_tutorial("profile_guide_works_as_written", page, 2)
}

#[test]
fn own_workflow_tutorial_works_as_written() -> Result<()> {
    run_tutorial(
        "own_workflow_tutorial_works_as_written",
        "your-workflow.md",
        2,
    )
}

#[test]
fn alignment_tutorial_works_as_written() -> Result<()> {
    let test = "alignment_tutorial_works_as_written";
    let mut missing = ["bwa", "samtools", "python3"].into_iter();
    let missing = missing.find(|tool| find_tool(tool).is_none());
    if let Some(tool) = missing {
        report_skip(test, &format!("there is no {tool}"));
        return Ok(());
    }
    run_tutorial(test, "alignment.md", 0)
}

#[test]
fn several_machines_tutorial_works_as_written() -> Result<()> {
    let test = "several_machines_tutorial_works_as_written";
    run_tutorial(test, "several-machines.md", 2)
}

#[test]
fn service_guide_works_as_written() -> Result<()> {
    let page = "../guide/service.md";
    run_tutorial("service_guide_works_as_written", page, 2)
}

#[test]
fn slurm_tutorial_works_as_written() -> Result<()> {
    let test = "cluster_tutorials::slurm_tutorial_works_as_written";
    if let Some(reason) = slurm_obstacle() {
        report_skip(test, &reason);
        return Ok(());
    }
    let slurm = SlurmCluster::start(&SlurmOptions {
        nodes: 2,
        ..SlurmOptions::default()
    })?;
    let (name, value) = slurm.environment();
    run_tutorial_in(&Surroundings::Shared(name, value), test, "slurm.md", 0)
}

#[test]
fn tutorial_lines_are_compared_without_numbers() {
    assert_eq!(shape("  3 jobs, 12.5 s"), shape("41 jobs,  7 s"));
    assert_eq!(
        missing_lines("done in 3 s\nfailed\n", "done in 12.25 s\n"),
        ["failed"]
    );
}
