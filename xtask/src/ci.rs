//! `cargo xtask ci`: every check of the project in order, cheap ones first, ending at the first
//! that fails.

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Result;

use crate::programs::Build;
use crate::{demo, shell, test, tidy};

/// The sizes at which the demo is a check rather than a show.
const SMALL_DEMO: &[&str] = &["--small"];
/// How long to try for the database of advisories, which lies outside the registry.
const ADVISORY_SECONDS_MAX: &str = "60";

/// How a step that did not fail went.
enum Outcome {
    Passed,
    /// Passed, but for a part that this machine could not do.
    Incomplete(String),
}

struct Record {
    name: &'static str,
    result: String,
    took: Duration,
}

/// Steps that have run, for the table at the end.
#[derive(Default)]
struct Log {
    records: Vec<Record>,
}

impl Log {
    #[expect(
        clippy::disallowed_methods,
        reason = "how long a step takes is measured, not decided"
    )]
    fn step(&mut self, name: &'static str, run: impl FnOnce() -> Result<Outcome>) -> Result<()> {
        println!("\n==== {name} ====");
        let start = Instant::now();
        let outcome = run();
        let took = start.elapsed();
        let result = match &outcome {
            Ok(Outcome::Passed) => "ok".to_owned(),
            Ok(Outcome::Incomplete(what)) => format!("ok, but INCOMPLETE: {what}"),
            Err(_) => "FAILED".to_owned(),
        };
        println!("==== {name}: {result} ({:.1} s) ====", took.as_secs_f64());
        self.records.push(Record { name, result, took });
        outcome.map(|_| ())
    }

    fn show(&self) {
        println!("\n{:<8} {:>9}  result", "step", "seconds");
        for record in &self.records {
            let seconds = record.took.as_secs_f64();
            println!("{:<8} {seconds:>9.1}  {}", record.name, record.result);
        }
        let total: Duration = self.records.iter().map(|record| record.took).sum();
        println!("{:<8} {:>9.1}", "total", total.as_secs_f64());
    }
}

/// Runs all steps, prints the table, and after it how the tests ended.
pub(crate) fn run() -> Result<()> {
    let mut log = Log::default();
    let mut account = None;
    let result = steps(&mut log, &mut account);
    log.show();
    if let Some(account) = account {
        account.show();
    }
    result
}

fn steps(log: &mut Log, account: &mut Option<test::Account>) -> Result<()> {
    log.step("fmt", || cargo(&["fmt", "--all", "--check"]))?;
    log.step("tidy", || tidy::run().map(|()| Outcome::Passed))?;
    log.step("deny", deny)?;
    log.step("clippy", || {
        // The first step that compiles also says whether Cargo.lock is what it should be.
        let check = ["clippy", "--locked", "--workspace", "--all-targets"];
        cargo(&[&check[..], &["--", "--deny", "warnings"]].concat())
    })?;
    log.step("doc", doc)?;
    log.step("test", || {
        let done = account.insert(test::run(&[])?);
        done.show();
        done.check().map(|()| Outcome::Passed)
    })?;
    log.step("demo", || {
        let arguments: Vec<String> = SMALL_DEMO.iter().map(|&argument| argument.into()).collect();
        // From nothing, an optimised build takes as long as all tests.
        demo::run(Build::Tests, &arguments).map(|()| Outcome::Passed)
    })
}

fn cargo(arguments: &[&str]) -> Result<Outcome> {
    shell::run(&mut shell::cargo(arguments)).map(|()| Outcome::Passed)
}

fn doc() -> Result<Outcome> {
    let mut command = shell::cargo(&[
        "doc",
        "--workspace",
        "--no-deps",
        "--document-private-items",
    ]);
    shell::run(command.env("RUSTDOCFLAGS", "--deny warnings")).map(|()| Outcome::Passed)
}

fn deny() -> Result<Outcome> {
    if !shell::succeeds(&mut shell::cargo(&["deny", "--version"])) {
        println!("deny: cargo-deny is missing; building it takes some minutes, once");
        shell::run(&mut shell::cargo(&[
            "install",
            "cargo-deny",
            "--locked",
            "--debug",
        ]))?;
    }
    shell::run(&mut shell::cargo(&[
        "deny", "check", "bans", "licenses", "sources",
    ]))?;
    if fetch_advisories() {
        return cargo(&["deny", "check", "advisories"]);
    }
    println!(
        "deny: !!! ADVISORIES WERE NOT CHECKED: their database cannot be fetched from here !!!"
    );
    Ok(Outcome::Incomplete(
        "advisories not checked, no database".into(),
    ))
}

/// Brings the database up to date; a machine without the wide network cannot.
fn fetch_advisories() -> bool {
    let fetch = shell::cargo(&["deny", "fetch", "db"]);
    let mut limited = Command::new("timeout");
    limited
        .arg(ADVISORY_SECONDS_MAX)
        .arg(fetch.get_program())
        .args(fetch.get_args());
    shell::succeeds(
        limited
            .current_dir(shell::root())
            .env("GIT_TERMINAL_PROMPT", "0"),
    )
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    #[test]
    fn a_failed_step_is_recorded_and_reported() {
        let mut log = Log::default();
        log.step("good", || Ok(Outcome::Passed)).unwrap();
        log.step("partial", || Ok(Outcome::Incomplete("no network".into())))
            .unwrap();
        assert!(log.step("bad", || bail!("no")).is_err());
        let results: Vec<&str> = log
            .records
            .iter()
            .map(|record| record.result.as_str())
            .collect();
        assert_eq!(results, ["ok", "ok, but INCOMPLETE: no network", "FAILED"]);
    }
}
