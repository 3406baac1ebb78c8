//! `cargo xtask test`: packages, build, every test, and an honest account of what did not run.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, thread};

use anyhow::{Context, Result, bail};

use crate::programs::{self, BuildProfile};
use crate::totals::{self, TestTotals};
use crate::{setup, shell, skips, suites};

/// Scripts with tests that are not cargo's; each says what it skips.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scripts {
    /// The tests of the page, in a browser, and of what else uses the HTTP API.
    Page,
    /// Those, and the tests of the Python module and of Snakemake's plug-ins.
    All,
}

impl Scripts {
    fn paths(self) -> &'static [&'static str] {
        const ALL: [&str; 2] = ["integrations/page/run.sh", "integrations/tests/run.sh"];
        match self {
            Self::Page => &ALL[..1],
            Self::All => &ALL,
        }
    }
}

/// What is left to say when the tests have run.
pub(crate) struct TestSummary {
    /// The last lines of the runners, as they printed them.
    closing_lines: Vec<String>,
    totals: TestTotals,
    /// Why the whole is a failure.
    failure: Option<String>,
}

impl TestSummary {
    /// Prints the runners' closing lines and the sum.
    pub(crate) fn print_summary(&self) {
        println!();
        for line in &self.closing_lines {
            println!("{line}");
        }
        println!("{}", self.totals);
    }

    /// Fails if a test failed or was skipped where it must not be.
    pub(crate) fn check_success(&self) -> Result<()> {
        match &self.failure {
            Some(failure) => bail!("{failure}"),
            None => Ok(()),
        }
    }
}

/// The command: runs and shows.
pub(crate) fn run_and_print(arguments: &[String]) -> Result<()> {
    let account = run_tests(arguments, Scripts::All)?;
    // The verdict first: the output ends with the runner's lines and the sum.
    let result = account.check_success();
    if let Err(error) = &result {
        println!("\ntest: FAILED: {error:#}");
    }
    account.print_summary();
    if result.is_err() {
        std::process::exit(1);
    }
    Ok(())
}

/// Runs the tests; the caller shows the account, last.
pub(crate) fn run_tests(arguments: &[String], scripts: Scripts) -> Result<TestSummary> {
    setup::ensure_packages(setup::Purpose::Test)?;
    setup::offer_packages(setup::Purpose::BatchSystems);
    let suites = suites::ensure_programs()?;
    // Tests start the real program, which cargo builds for no test of another package.
    let program = programs::build_programs(BuildProfile::Tests, &["bafs"])?.join("bafs");
    let target = shell::target_directory()?;
    let log = reset_skip_log(&target)?;

    let mut closing_lines = Vec::new();
    let mut fault = None;
    let mut commands = vec![runner_command(arguments)];
    if arguments.is_empty() {
        // Arguments choose among the tests of the runner; doc tests have no say in that.
        commands.push(shell::cargo_command(&["test", "--doc", "--workspace"]));
        let root = shell::checkout_root();
        let scripts = scripts.paths().iter();
        commands.extend(scripts.map(|path| Command::new(root.join(path))));
    }
    for mut command in commands {
        command
            .env(skips::SKIP_LOG_VARIABLE, &log)
            .env("BAFS_BIN", &program)
            .env(suites::TOOLS_VARIABLE, &suites);
        let (status, lines) = shell::run_and_capture(&mut command, totals::closing_line_filter)?;
        closing_lines.extend(lines);
        if !status.success() && fault.is_none() {
            fault = Some(format!("a test runner ended with {status}"));
        }
    }

    let skipped = skips::read_log(&log)?;
    skips::print_skips(&skipped);
    let mut totals = TestTotals::from_lines(&closing_lines);
    totals.move_to_skipped(skipped.len() as u64);
    let other = totals.skipped - skipped.len() as u64;
    if other > 0 {
        println!("\nignored or not selected: {other} (`cargo xtask soak` runs the long tests)");
    }
    if let Err(error) = skips::check_skips(&skipped) {
        fault = fault.or_else(|| Some(format!("{error:#}")));
    }
    Ok(TestSummary {
        closing_lines,
        totals,
        failure: fault,
    })
}

/// The best runner of this machine: nextest (limits and groups of `.config/nextest.toml`)
/// or cargo.
fn runner_command(arguments: &[String]) -> Command {
    let mut command = if ensure_nextest() {
        let profile = if std::env::var_os("CI").is_some() {
            "ci"
        } else {
            "default"
        };
        let mut command = shell::cargo_command(&["nextest", "run", "--profile", profile]);
        if shell::is_terminal() {
            command.args(["--color", "always"]);
        }
        if arguments.is_empty() {
            command.args(["--test-threads", &count_test_threads().to_string()]);
        }
        command
    } else {
        println!("test: without cargo-nextest a test that hangs is not stopped");
        shell::cargo_command(&["test", "--lib", "--bins", "--tests", "--no-fail-fast"])
    };
    if !has_package_argument(arguments) {
        command.arg("--workspace");
    }
    command.args(arguments);
    command
}

/// Three more than there are processors: of the two clusters and two waiting tests that run beside
/// other tests (`.config/nextest.toml`), three or more wait.
fn count_test_threads() -> usize {
    thread::available_parallelism().map_or(2, NonZero::get) + 3
}

/// Whether the caller asks for certain crates; `--workspace` would overrule that.
fn has_package_argument(arguments: &[String]) -> bool {
    let own = arguments.iter().take_while(|argument| *argument != "--");
    own.into_iter()
        .any(|argument| argument.starts_with("-p") || argument.starts_with("--package"))
}

/// Whether nextest is there, after an attempt to install it.
pub(crate) fn ensure_nextest() -> bool {
    let is_there = || shell::has_succeeded(&mut shell::cargo_command(&["nextest", "--version"]));
    if is_there() {
        return true;
    }
    println!("test: cargo-nextest is missing; building it takes some minutes, once");
    if let Err(error) = shell::run_command(&mut shell::cargo_command(&[
        "install",
        "cargo-nextest",
        "--locked",
    ])) {
        println!("test: {error:#}");
    }
    is_there()
}

fn reset_skip_log(target: &Path) -> Result<PathBuf> {
    let directory = target.join("xtask");
    fs::create_dir_all(&directory).with_context(|| format!("create {}", directory.display()))?;
    let log = directory.join("skipped.log");
    fs::write(&log, "").with_context(|| format!("empty {}", log.display()))?;
    Ok(log)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn package_selection_is_recognised() {
        let check = |line: &str| {
            has_package_argument(
                &line
                    .split_whitespace()
                    .map(str::to_owned)
                    .collect::<Vec<_>>(),
            )
        };
        assert!(check("-p bafs-sched") && check("--package=bafs-sched") && check("-pbafs"));
        assert!(!check("rename --no-capture") && !check("rename -- -p"));
    }
}
