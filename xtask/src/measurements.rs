//! The page of measurements: `cargo xtask bench NAME --record` adds a record to
//! `docs/measurements/NAME.json`, and `cargo xtask measurements` writes
//! `docs/measurements/README.md` from all records and from the descriptions in `figures.json`.
//!
//! A figure is a number, nearly always a ratio to what ran beside it in the same run. The page
//! shows for each figure its newest record that has it, with the target, the spread and the commit.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{fs, thread};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::shell;

const PAGE: &str = "README.md";
const DESCRIPTIONS: &str = "figures.json";

/// One run of a benchmark.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Record {
    /// Day on which it ran, `YYYY-MM-DD`.
    date: String,
    /// Short commit of the checkout.
    commit: String,
    /// What was typed.
    command: String,
    /// Processor, memory and kernel of the machine.
    machine: String,
    /// What else ran on the machine, if that is known.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    beside: String,
    /// Figures by name; `null` where a figure could not be measured.
    figures: BTreeMap<String, Option<f64>>,
    /// Smallest and largest of a figure's rounds.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    spread: BTreeMap<String, [f64; 2]>,
}

/// What a benchmark measures, in words.
#[derive(Debug, Deserialize)]
struct Benchmark {
    name: String,
    title: String,
    about: String,
    figures: Vec<Description>,
}

/// What a figure is.
#[derive(Debug, Deserialize)]
struct Description {
    name: String,
    what: String,
    /// What ran beside it in the same run, if anything did.
    #[serde(default)]
    peer: String,
    #[serde(default)]
    unit: String,
    /// The least that is aimed at.
    min: Option<f64>,
    /// The most that is aimed at.
    max: Option<f64>,
}

impl Description {
    fn target(&self) -> String {
        match (self.min, self.max) {
            (Some(min), Some(max)) if min.total_cmp(&max).is_eq() => format!("{min}"),
            (Some(min), Some(max)) => format!("{min} to {max}"),
            (Some(min), None) => format!("≥ {min}"),
            (None, Some(max)) => format!("≤ {max}"),
            (None, None) => String::new(),
        }
    }

    fn verdict(&self, figure: f64) -> &'static str {
        let is_met =
            self.min.is_none_or(|min| figure >= min) && self.max.is_none_or(|max| figure <= max);
        match (self.min.is_some() || self.max.is_some(), is_met) {
            (false, _) => "",
            (true, true) => "met",
            (true, false) => "**missed**",
        }
    }
}

fn folder() -> PathBuf {
    shell::checkout_root().join("docs/measurements")
}

/// Adds what a benchmark printed to its records; `lines` are the lines that it printed.
pub(crate) fn record(name: &str, arguments: &[String], lines: &[String]) -> Result<()> {
    let object = lines.iter().rev().find_map(|line| {
        let value: serde_json::Value = serde_json::from_str(line).ok()?;
        value.get("spread").is_some().then_some(value)
    });
    let Some(object) = object else {
        bail!("benchmark {name} printed no figures: nothing is recorded");
    };
    let mut figures = BTreeMap::new();
    for (key, value) in object.as_object().into_iter().flatten() {
        if value.is_number() || value.is_null() {
            figures.insert(key.clone(), value.as_f64());
        }
    }
    let spread = serde_json::from_value(object["spread"].clone())?;
    let record = Record {
        date: output("date", &["--utc", "+%Y-%m-%d"])?,
        commit: output("git", &["rev-parse", "--short", "HEAD"])?,
        command: format!("cargo xtask bench {name} {}", arguments.join(" ")),
        machine: machine()?,
        beside: String::new(),
        figures,
        spread,
    };
    let path = folder().join(format!("{name}.json"));
    let mut records = read_records(&path)?;
    records.push(record);
    write_records(&path, &records)?;
    println!("recorded in {}", path.display());
    Ok(())
}

fn read_records(path: &Path) -> Result<Vec<Record>> {
    if !path.exists() {
        return Ok(Vec::new());
    }
    let text = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    serde_json::from_str(&text).with_context(|| format!("understand {}", path.display()))
}

fn write_records(path: &Path, records: &[Record]) -> Result<()> {
    let text = serde_json::to_string_pretty(records)?;
    fs::write(path, text + "\n").with_context(|| format!("write {}", path.display()))
}

fn output(program: &str, arguments: &[&str]) -> Result<String> {
    let mut command = Command::new(program);
    command.args(arguments).current_dir(shell::checkout_root());
    Ok(shell::run_for_output(&mut command)?.trim().to_owned())
}

/// Processors, memory in GiB and kernel.
fn machine() -> Result<String> {
    let processors = thread::available_parallelism()?;
    let memory = fs::read_to_string("/proc/meminfo")?;
    let total = memory
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"));
    let kib: u64 = total
        .and_then(|total| total.trim().strip_suffix(" kB"))
        .and_then(|kib| kib.parse().ok())
        .context("the memory of this machine")?;
    let kernel = output("uname", &["-sr"])?;
    Ok(format!(
        "{processors} processors, {} GiB, {kernel}",
        kib >> 20
    ))
}

/// Writes the page.
pub(crate) fn write_page() -> Result<()> {
    let path = folder().join(PAGE);
    fs::write(&path, page(&folder())?).with_context(|| format!("write {}", path.display()))
}

/// Fails if the page is not what the records say.
pub(crate) fn check_page() -> Result<()> {
    let found = fs::read_to_string(folder().join(PAGE))?;
    if found != page(&folder())? {
        bail!("docs/measurements/{PAGE} differs from its records: run `cargo xtask measurements`");
    }
    Ok(())
}

fn page(folder: &Path) -> Result<String> {
    let text = fs::read_to_string(folder.join(DESCRIPTIONS))
        .with_context(|| format!("read {DESCRIPTIONS}"))?;
    let benchmarks: Vec<Benchmark> =
        serde_json::from_str(&text).with_context(|| format!("understand {DESCRIPTIONS}"))?;
    let mut page = String::from(
        "<!-- Generated by `cargo xtask measurements`; do not edit. -->\n# Measurements\n\n\
         Each figure is the newest one recorded. A ratio compares BAFS with the peer that ran \
         beside it in the same run.\nThe spread is the smallest and the largest round. One virtual \
         machine runs everything, so times vary; ratios vary less.\n",
    );
    for benchmark in &benchmarks {
        let path = folder.join(format!("{}.json", benchmark.name));
        section(benchmark, &read_records(&path)?, &mut page);
    }
    Ok(page)
}

fn section(benchmark: &Benchmark, records: &[Record], page: &mut String) {
    let _ = writeln!(page, "\n## {}\n\n{}\n", benchmark.title, benchmark.about);
    page.push_str(
        "| What | Peer | Target | Figure | Spread | | Commit |\n|---|---|---|---|---|---|---|\n",
    );
    for figure in &benchmark.figures {
        let newest = records.iter().rev().find_map(|record| {
            let value = record.figures.get(&figure.name).copied().flatten()?;
            Some((record, value))
        });
        let Description {
            what, peer, unit, ..
        } = figure;
        let target = figure.target();
        let Some((record, value)) = newest else {
            let _ = writeln!(page, "| {what} | {peer} | {target} | not measured | | | |");
            continue;
        };
        let spread = record.spread.get(&figure.name);
        let spread = spread.map_or_else(String::new, |[least, most]| format!("{least} … {most}"));
        let unit = if unit.is_empty() {
            String::new()
        } else {
            format!(" {unit}")
        };
        let (verdict, commit) = (figure.verdict(value), &record.commit);
        let _ = writeln!(
            page,
            "| {what} | {peer} | {target} | {value}{unit} | {spread} | {verdict} | {commit} |"
        );
    }
    page.push_str("\nRuns:\n\n");
    for record in records.iter().rev().take(RUNS_SHOWN) {
        let Record {
            date,
            commit,
            command,
            machine,
            beside,
            ..
        } = record;
        let beside = if beside.is_empty() {
            String::new()
        } else {
            format!("; beside: {beside}")
        };
        let _ = writeln!(
            page,
            "* {date}, {commit}: `{}` ({machine}{beside})",
            command.trim()
        );
    }
}

/// How many runs the page names for each benchmark; the records have all.
const RUNS_SHOWN: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;

    fn described(min: Option<f64>, max: Option<f64>) -> Description {
        Description {
            name: "ratio".to_owned(),
            what: "reads".to_owned(),
            peer: "ext4".to_owned(),
            unit: String::new(),
            min,
            max,
        }
    }

    #[test]
    fn targets_are_ranges_with_a_verdict() {
        let at_least = described(Some(0.95), None);
        assert_eq!(at_least.target(), "≥ 0.95");
        assert_eq!(at_least.verdict(0.95), "met");
        assert_eq!(at_least.verdict(0.94), "**missed**");
        assert_eq!(described(Some(0.0), Some(0.0)).target(), "0");
        assert_eq!(described(None, None).verdict(1.0), "");
    }

    #[test]
    fn page_shows_the_newest_record_of_a_figure() {
        let record = |commit: &str, value: Option<f64>| Record {
            date: "2026-11-28".to_owned(),
            commit: commit.to_owned(),
            command: "cargo xtask bench x".to_owned(),
            machine: "2 processors".to_owned(),
            beside: String::new(),
            figures: BTreeMap::from([("ratio".to_owned(), value)]),
            spread: BTreeMap::from([("ratio".to_owned(), [0.9, 1.1])]),
        };
        let benchmark = Benchmark {
            name: "x".to_owned(),
            title: "X".to_owned(),
            about: "About.".to_owned(),
            figures: vec![described(Some(0.95), None)],
        };
        let records = [
            record("old", Some(0.5)),
            record("new", Some(1.0)),
            record("later", None),
        ];
        let mut page = String::new();
        section(&benchmark, &records, &mut page);
        let row = "| reads | ext4 | ≥ 0.95 | 1 | 0.9 … 1.1 | met | new |";
        assert!(page.contains(row), "{page}");
    }
}
