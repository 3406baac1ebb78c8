//! `bafs report`: what a run did, as one page or as data, from its journal. It runs nothing.

mod charts;
mod jobs;
mod page;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use bafs_sched::Outcome;
use bafs_sched::goodput::{Goodput, compute_goodput};
use bafs_sched::io::job_logs::read_index;
use bafs_sched::replay::{HistoryLine, replay_history};
use bafs_sched::timeline::{ExecutionRecord, Timeline, build_timeline};
use bafs_sim::strategy_selector::ModelSelector;
use serde::Serialize;

use self::jobs::JobLog;
use crate::args::ReportArgs;
use crate::history;
use crate::logs::logs_directory;
use crate::output::{self, Printer};
use crate::sizes::{MeasuredVolume, measure_volumes};

/// All that a report tells.
#[derive(Debug, Serialize)]
struct ReportData {
    timeline: Timeline,
    goodput: Goodput,
    /// What went wrong with the run as a whole, or is not as it should be.
    warnings: Vec<String>,
    /// Scratch volumes with the most that they held.
    volume_sizes: Vec<MeasuredVolume>,
    /// Where the output of attempts is kept, in the order in which they ended.
    logs: Vec<JobLog>,
    /// Everything that happened, in order.
    history_lines: Vec<HistoryLine>,
}

impl ReportData {
    /// Where the output of a job is kept, attempt by attempt.
    fn logs_of<'r>(&'r self, job: &'r str) -> impl DoubleEndedIterator<Item = &'r JobLog> {
        self.logs.iter().filter(move |log| log.job == job)
    }

    /// Which attempt of its job an execution was, of those that ended, from 1 on.
    fn attempt_of(&self, execution: &ExecutionRecord) -> u32 {
        let executions = self.timeline.executions.iter();
        let before = executions.take_while(|it| !std::ptr::eq(*it, execution));
        let ended = before.filter(|it| it.job == execution.job && it.reported.is_some());
        ended.count() as u32 + 1
    }
}

/// Writes the page, or prints the data.
pub(crate) fn run_report(args: &ReportArgs, output: Printer) -> Result<()> {
    let journal = history::find_journal(&args.run)?;
    let report = read_report(&journal)?;
    if args.output.as_deref().is_some_and(output::is_stdout) {
        return match output.is_json() {
            true => output.print_result("", &report),
            false => output::print_bytes(page::render_page(&report, None)?.as_bytes()),
        };
    }
    if let Some(path) = &args.output {
        write_page(&report, path)?;
    }
    if output.is_json() {
        return output.print_result("", &report);
    }
    let path = match &args.output {
        Some(path) => path.clone(),
        None => {
            let mut name = journal.into_os_string();
            name.push(".html");
            let path = PathBuf::from(name);
            write_page(&report, &path)?;
            path
        }
    };
    output.print_result(&format!("the report is in {}", path.display()), &())
}

fn read_report(journal: &Path) -> Result<ReportData> {
    let history = bafs_sched::io::journal::read_history(journal)?;
    let workflow = history.header.workflow.clone();
    let volume_sizes = measure_volumes(&history);
    let (lines, _) = replay_history(history.clone(), &ModelSelector);
    let timeline = build_timeline(history, &ModelSelector);
    let goodput = compute_goodput(&workflow, &timeline);
    Ok(ReportData {
        warnings: collect_warnings(&timeline),
        goodput,
        timeline,
        volume_sizes,
        logs: find_logs(journal),
        history_lines: lines,
    })
}

/// What is kept of the output of jobs; nothing if the logs cannot be read.
fn find_logs(journal: &Path) -> Vec<JobLog> {
    let directory = logs_directory(journal);
    let directory = std::path::absolute(&directory).unwrap_or(directory);
    let attempts = read_index(&directory).unwrap_or_default();
    let logs = attempts.iter();
    logs.map(|attempt| JobLog::of_attempt(attempt, &directory))
        .collect()
}

fn write_page(report: &ReportData, path: &Path) -> Result<()> {
    let directory = std::path::absolute(path).ok();
    let directory = directory.as_deref().and_then(Path::parent);
    let page = page::render_page(report, directory)?;
    std::fs::write(path, page).with_context(|| format!("cannot write {}", path.display()))
}

fn collect_warnings(timeline: &Timeline) -> Vec<String> {
    let mut warnings = Vec::new();
    match &timeline.outcome {
        Some(Outcome::Failed { jobs, messages }) => {
            let jobs = jobs.iter().map(ToString::to_string);
            warnings.extend(jobs.chain(messages.iter().cloned()));
        }
        Some(Outcome::Cancelled) => warnings.push("the user cancelled the run".to_owned()),
        Some(Outcome::Complete) => {}
        None => warnings.push("the run has not ended".to_owned()),
    }
    warnings.extend(timeline.warnings.iter().cloned());
    for node in &timeline.nodes {
        for at_ms in node.presence.iter().filter_map(|(_, until)| *until) {
            let seconds = at_ms as f64 / 1e3;
            warnings.push(format!("node {} was lost at {seconds:.1} s", node.name));
        }
    }
    let lost = timeline.volumes.iter().filter(|volume| volume.is_lost);
    let lost = lost.count();
    if lost > 0 {
        warnings.push(format!("{lost} volumes were lost or not created"));
    }
    warnings
}

#[cfg(test)]
mod tests {
    use bafs_sched::io::journal::{History, JournalHeader};
    use bafs_sched::{Settings, Space};
    use bafs_sim::simulated_cluster::{Faults, NodeSpec, SimulatedCluster};
    use bafs_workflow::parse_workflow;

    use super::*;

    fn simulate_history(seed: u64) -> History {
        let text = "for i in 1..4\n\
            volume p$(i) scratch 1 MB\n\
            job a$(i) {\nexecutable = /bin/true\nretry = 3\n}\n\
            job b$(i) {\nexecutable = /bin/true\nretry = 3\n}\n\
            parent a$(i) child b$(i)\n\
            mount p$(i) a$(i) /scratch\nmount p$(i) b$(i) /scratch\n\
            extract p$(i) x bafs://home/x.$(i)\nend\n";
        let mut workflow = parse_workflow("w.bafs", text, &|path| Err(path.to_owned()))
            .expect("it parses")
            .workflow;
        workflow.jobs[0].name = "<img src=x onerror=alert(1)>".to_owned();
        workflow.name = "\"><script>alert(1)</script>".to_owned();
        let spec = NodeSpec {
            capacity: Space {
                bytes: 50_000_000,
                files: 100_000,
            },
            slots: 2,
        };
        let faults = Faults {
            node_dies: 100,
            node_wiped: 1_000,
            job_fails: 300,
            until_ms: 30_000,
            ..Faults::default()
        };
        let settings = Settings {
            nodes_timeout_ms: 300_000,
            space_timeout_ms: 300_000,
            ..Settings::default()
        };
        let nodes = vec![spec; 2];
        let mut world =
            SimulatedCluster::new(seed, workflow.clone(), settings.clone(), nodes, faults);
        assert_eq!(world.run_to_end(4 * 3_600_000), Outcome::Complete);
        let header = JournalHeader {
            run: world.scheduler.run(),
            workflow: workflow.into(),
            settings,
        };
        let steps = world.steps;
        History { header, steps }
    }

    #[test]
    fn report_page_is_complete_and_escapes_names() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("run.journal");
        let history = simulate_history(3);
        let header = history.header.clone();
        let opened = bafs_sched::io::journal::Journal::open(&path, || header);
        let (mut journal, _) = opened.expect("it is created");
        journal.append(&history.steps).expect("it is written");
        let report = read_report(&path).expect("it is read");
        let page = page::render_page(&report, None).expect("it is drawn");
        assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n"));
        assert!(page.contains("&lt;img src=x"));
        for bad in ["<script", "<img", "http://", "https://", "url("] {
            let found = page.replace("http://www.w3.org/2000/svg", "");
            assert!(!found.contains(bad), "{bad} is in the page");
        }
        assert_eq!(page.matches("<svg").count(), 4);
        for section in ["Jobs", "Ledger", "Failures", "Copies", "Warnings", "Events"] {
            assert!(page.contains(section), "{section} is missing");
        }
        assert!(report.goodput.total.lost_ms > 0, "nothing was lost");
        let data = serde_json::to_value(&report).expect("it is data");
        assert_eq!(data["timeline"]["jobs"].as_array().map(Vec::len), Some(8));
    }
}
