//! `cargo xtask bench NAME`: builds with optimisation and runs one benchmark of package bafs-tests.
//! `--record` keeps its figures in `docs/measurements`.
//! Knows no benchmark: the program `bafs-bench --list` prints their names, one per line.

use std::process::Command;

use anyhow::{Result, bail};

use crate::programs::{self, BuildProfile};
use crate::{measurements, setup, shell};

const PACKAGE: &str = "bafs-tests";
/// Option that adds the figures to `docs/measurements`.
const RECORD: &str = "--record";
const PROGRAM: &str = "bafs-bench";

/// Runs the benchmark of this name, or lists all names.
pub(crate) fn run_benchmark(name: Option<&str>, arguments: &[String]) -> Result<()> {
    if !has_program(&shell::read_metadata()?) {
        bail!("there are no benchmarks yet: package {PACKAGE} has no program {PROGRAM}");
    }
    setup::ensure_packages(setup::Purpose::Bench)?;
    let release = programs::build_programs(BuildProfile::Release, &["bafs", PROGRAM])?;
    let program = release.join(PROGRAM);
    let listed = shell::run_for_output(Command::new(&program).arg("--list"))?;
    let names: Vec<&str> = listed.split_whitespace().collect();
    let list = names.join("\n  ");
    let Some(name) = name else {
        println!("benchmarks:\n  {list}");
        return Ok(());
    };
    if !names.contains(&name) {
        bail!("there is no benchmark `{name}`; there are:\n  {list}");
    }
    let is_recorded = arguments.iter().any(|argument| argument == RECORD);
    let mut arguments = arguments.to_vec();
    arguments.retain(|argument| argument != RECORD);
    if is_recorded && !arguments.iter().any(|argument| argument == "--json") {
        arguments.push("--json".to_owned());
    }
    let mut command = Command::new(&program);
    command
        .arg(name)
        .args(&arguments)
        .env("BAFS_BIN", release.join("bafs"))
        .current_dir(shell::checkout_root());
    if !is_recorded {
        return shell::run_command(&mut command);
    }
    let (status, lines) = shell::run_and_capture(&mut command, || Box::new(is_json_object))?;
    if !status.success() {
        bail!("benchmark {name} failed: {status}; nothing is recorded");
    }
    measurements::record(name, &arguments, &lines)
}

fn is_json_object(line: &str) -> bool {
    line.starts_with('{')
}

fn has_program(metadata: &serde_json::Value) -> bool {
    let packages = metadata["packages"].as_array();
    let package = packages
        .into_iter()
        .flatten()
        .find(|package| package["name"] == PACKAGE);
    let targets = package.and_then(|package| package["targets"].as_array());
    targets
        .into_iter()
        .flatten()
        .any(|target| target["name"] == PROGRAM)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_program_is_found_in_its_package_only() {
        let with = |package: &str, program: &str| {
            let targets = json!([{"name": program}]);
            json!({"packages": [{"name": package, "targets": targets}]})
        };
        assert!(has_program(&with(PACKAGE, PROGRAM)));
        assert!(!has_program(&with(PACKAGE, "other")));
        assert!(!has_program(&with("other", PROGRAM)));
        assert!(!has_program(&json!({})));
    }
}
