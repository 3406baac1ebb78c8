//! `cargo xtask ci`: every check of the project in order, cheap ones first, ending at the first
//! that fails.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::{demo, shell, test, tidy};

/// The sizes at which the demo is a check rather than a show.
const SMALL_DEMO_ARGUMENTS: &[&str] = &["--small"];
/// How long to try for the database of advisories, which lies outside the registry.
const ADVISORY_TIMEOUT_S: &str = "60";

/// How a step that did not fail went.
enum StepOutcome {
    Passed,
    /// Passed, but for a part that this machine could not do.
    Incomplete(String),
}

struct StepRecord {
    name: &'static str,
    result: String,
    duration: Duration,
}

/// Steps that have run, for the table at the end.
#[derive(Default)]
struct StepLog {
    records: Vec<StepRecord>,
}

impl StepLog {
    #[expect(
        clippy::disallowed_methods,
        reason = "how long a step takes is measured, not decided"
    )]
    fn run_step(
        &mut self,
        name: &'static str,
        run: impl FnOnce() -> Result<StepOutcome>,
    ) -> Result<()> {
        println!("\n==== {name} ====");
        let start = Instant::now();
        let outcome = run();
        let duration = start.elapsed();
        let result = match &outcome {
            Ok(StepOutcome::Passed) => "ok".to_owned(),
            Ok(StepOutcome::Incomplete(what)) => format!("ok, but INCOMPLETE: {what}"),
            Err(_) => "FAILED".to_owned(),
        };
        println!(
            "==== {name}: {result} ({:.1} s) ====",
            duration.as_secs_f64()
        );
        self.records.push(StepRecord {
            name,
            result,
            duration,
        });
        outcome.map(|_| ())
    }

    fn print_table(&self) {
        println!("\n{:<8} {:>9}  result", "step", "seconds");
        for record in &self.records {
            let seconds = record.duration.as_secs_f64();
            println!("{:<8} {seconds:>9.1}  {}", record.name, record.result);
        }
        let total: Duration = self.records.iter().map(|record| record.duration).sum();
        println!("{:<8} {:>9.1}", "total", total.as_secs_f64());
    }
}

/// Runs all steps, prints the table, and after it how the tests ended.
pub(crate) fn run_ci() -> Result<()> {
    let mut log = StepLog::default();
    let mut account = None;
    let result = run_steps(&mut log, &mut account);
    log.print_table();
    if let Some(account) = account {
        account.print_summary();
    }
    result
}

fn run_steps(log: &mut StepLog, account: &mut Option<test::TestSummary>) -> Result<()> {
    log.run_step("fmt", || run_cargo(&["fmt", "--all", "--check"]))?;
    // The tests compare the reference with the program; to do it here would compile twice.
    log.run_step("tidy", || tidy::check_rules().map(|()| StepOutcome::Passed))?;
    log.run_step("deny", check_dependencies)?;
    log.run_step("clippy", || {
        // The first step that compiles also says whether Cargo.lock is what it should be.
        let check = ["clippy", "--locked", "--workspace", "--all-targets"];
        run_cargo(&[&check[..], &["--", "--deny", "warnings"]].concat())
    })?;
    log.run_step("doc", build_documents)?;
    log.run_step("test", || {
        let done = account.insert(test::run_tests(&[], test::Scripts::Page)?);
        done.print_summary();
        done.check_success().map(|()| StepOutcome::Passed)
    })?;
    log.run_step("demo", || {
        let arguments: Vec<String> = SMALL_DEMO_ARGUMENTS
            .iter()
            .map(|&argument| argument.into())
            .collect();
        // From nothing, an optimised build takes as long as all tests.
        demo::run(&arguments).map(|()| StepOutcome::Passed)
    })
}

fn run_cargo(arguments: &[&str]) -> Result<StepOutcome> {
    shell::run_command(&mut shell::cargo_command(arguments)).map(|()| StepOutcome::Passed)
}

fn build_documents() -> Result<StepOutcome> {
    let mut command = shell::cargo_command(&[
        "doc",
        "--workspace",
        "--no-deps",
        "--document-private-items",
    ]);
    shell::run_command(command.env("RUSTDOCFLAGS", "--deny warnings")).map(|()| StepOutcome::Passed)
}

fn check_dependencies() -> Result<StepOutcome> {
    if !shell::has_succeeded(&mut shell::cargo_command(&["deny", "--version"])) {
        println!("deny: cargo-deny is missing; building it takes some minutes, once");
        shell::run_command(&mut shell::cargo_command(&[
            "install",
            "cargo-deny",
            "--locked",
            "--debug",
        ]))?;
    }
    shell::run_command(&mut shell::cargo_command(&[
        "deny", "check", "bans", "licenses", "sources",
    ]))?;
    if fetch_advisories() {
        return run_cargo(&["deny", "check", "advisories"]);
    }
    println!(
        "deny: !!! ADVISORIES WERE NOT CHECKED: their database cannot be fetched from here !!!"
    );
    Ok(StepOutcome::Incomplete(
        "advisories not checked, no database".into(),
    ))
}

/// Brings the database up to date; a machine without the wide network cannot.
fn fetch_advisories() -> bool {
    let fetch = shell::cargo_command(&["deny", "fetch", "db"]);
    let mut limited = Command::new("timeout");
    limited
        .arg(ADVISORY_TIMEOUT_S)
        .arg(fetch.get_program())
        .args(fetch.get_args());
    shell::has_succeeded(
        limited
            .current_dir(shell::checkout_root())
            .env("GIT_TERMINAL_PROMPT", "0"),
    )
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    #[test]
    fn a_failed_step_is_recorded_and_reported() {
        let mut log = StepLog::default();
        log.run_step("good", || Ok(StepOutcome::Passed)).unwrap();
        log.run_step("partial", || {
            Ok(StepOutcome::Incomplete("no network".into()))
        })
        .unwrap();
        assert!(log.run_step("bad", || bail!("no")).is_err());
        let results: Vec<&str> = log
            .records
            .iter()
            .map(|record| record.result.as_str())
            .collect();
        assert_eq!(results, ["ok", "ok, but INCOMPLETE: no network", "FAILED"]);
    }
}
