//! `bench core`: the scheduler core with its journal. The events of a simulated run of a million
//! jobs are given to the core in batches, as the driver gives them: once with a journal of events
//! alone, each batch synced before it is decided (as before version 24), and once with the journal
//! that keeps decisions and rows. Then a scheduler takes up the run from it. Each is a process of
//! its own, so that memory of one is none of the others. With `--before PROGRAM`, simulated runs
//! are compared with those of another build.

mod comparison;
mod graphs;
mod measured_parts;

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_proto::time::Time;
use bafs_sched::Event;
use bafs_sched::io::journal::{Journal, JournalHeader};
use bafs_sim::planner::{CanonicalWorkload, Environment, NodeClass};
use bafs_sim::simulated_cluster::{NodeSpec, SimulatedCluster};
use bafs_sim::simulator::{
    LoadModel, Policy, Scenario, Simulation, StepTimer, build_canonical_workflow,
};
use serde_json::Value;

use self::measured_parts::{BEFORE, EVENTS, JOURNAL};
pub(super) use self::measured_parts::{PART_PROCESS, run_part_process};
use super::{BenchmarkReport, Options};

/// Jobs and nodes of a full and of a quick run.
const FULL: (u32, u32) = (1_000_000, 10_000);
const QUICK: (u32, u32) = (100_000, 1_000);

/// Simulated runs that are compared, at least.
const COMPARED_FULL: usize = 10_000;
const COMPARED_QUICK: usize = 200;

/// Events that a batch has, of at most 256.
const BATCH_EVENTS: usize = 64;

/// The start from the journal may take so long, in seconds.
const RESUME_S_MAX: f64 = 10.0;
/// Decisions with both journals per second, the new one over the old one.
const SPEED_MIN: f64 = 0.95;
/// Time limit of 99 of a hundred decisions, in milliseconds.
const DECISION_MS_MAX: f64 = 0.08;
/// The most memory of a process with the core, in GiB.
const PEAK_GIB_MAX: f64 = 4.0;

/// Figures of the last line.
const SUMMARY: &[&str] = &[
    "decisions_per_s",
    "p99_ms",
    "jobs",
    "nodes",
    "peak_gib",
    "resume_s",
    "old_journal_continues",
    "scenarios_compared",
    "makespan_ratio_p99",
    "reruns_ratio",
    "limit_violations",
    "speed_vs_before",
    "simulated_speed_vs_before",
];

/// Writes the events of a run to a file, a batch in a line.
struct EventWriter {
    file: BufWriter<File>,
    batch: Vec<(Time, Event)>,
    count: usize,
    error: Option<anyhow::Error>,
}

impl EventWriter {
    fn write_batch(&mut self) {
        let line = serde_json::to_writer(&mut self.file, &self.batch).map_err(Into::into);
        let line = line.and_then(|()| Ok(self.file.write_all(b"\n")?));
        self.error = self.error.take().or_else(|| line.err());
        self.batch.clear();
    }
}

impl StepTimer for EventWriter {
    fn note_event(&mut self, now: Time, event: &Event) {
        self.batch.push((now, event.clone()));
        self.count += 1;
        if self.batch.len() == BATCH_EVENTS {
            self.write_batch();
        }
    }

    fn time_step(&mut self, step: impl FnOnce()) {
        step();
    }
}

/// Measures both journals, and the start from the new one; then compares programs.
pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    report.set_summary_figures(SUMMARY);
    if options.is_part_selected("size") {
        measure_size(options, report)?;
    }
    if options.is_part_selected("golden") {
        let continued = continue_golden_journals()?;
        report.print_line(&format!(
            "  {continued} journals of earlier forms are continued"
        ));
        report.add_answer("old_journal_continues", continued > 0);
    }
    if options.is_part_selected("scenarios") {
        let count = options.choose(COMPARED_FULL, COMPARED_QUICK);
        match &options.before {
            Some(program) => {
                comparison::compare_programs(program, count, report)?;
                comparison::compare_speed(program, options, report)?;
            }
            None => report.add_missing("scenarios_compared", "name a build: --before PROGRAM"),
        }
    }
    Ok(())
}

fn measure_size(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    let (jobs, nodes) = options.choose(FULL, QUICK);
    let directory = tempfile::tempdir_in(std::env::current_dir()?)?;
    let directory = directory.path();
    let count = write_events(jobs, nodes, directory)? as f64;
    report.add_figure("jobs", f64::from(jobs));
    report.add_figure("nodes", f64::from(nodes));
    report.add_figure("events", count);
    let before = run_part("before", directory)?;
    let now = run_part("now", directory)?;
    let resume = run_part("resume", directory)?;
    let (before_s, total_s) = (figure(&before, "total_s")?, figure(&now, "total_s")?);
    report.add_figure("decisions_per_s", count / total_s);
    report.add_figure_with_target("p99_ms", figure(&now, "p99_ms")?, 0.0..=DECISION_MS_MAX);
    report.add_figure_with_target("speed_vs_before", before_s / total_s, SPEED_MIN..=1e9);
    report.add_figure("before_decisions_per_s", count / before_s);
    for key in ["decided_s", "snapshots_s", "snapshots"] {
        report.add_figure(key, figure(&now, key)?);
    }
    for (prefix, part) in [("before_", &before), ("now_", &now), ("resume_", &resume)] {
        for key in ["total_s", "processor_s", "peak_gib"] {
            report.add_figure(&format!("{prefix}{key}"), figure(part, key)?);
        }
    }
    report.add_figure("journal_mib", file_mib(&directory.join(JOURNAL))?);
    report.add_figure("before_journal_mib", file_mib(&directory.join(BEFORE))?);
    let resume_s = figure(&resume, "total_s")?;
    report.add_figure_with_target("resume_s", resume_s, 0.0..=RESUME_S_MAX);
    let peak_gib = figure(&now, "peak_gib")?.max(figure(&resume, "peak_gib")?);
    report.add_figure_with_target("peak_gib", peak_gib, 0.0..=PEAK_GIB_MAX);
    Ok(())
}

/// Runs a part in a process of its own; answers what it measured.
fn run_part(part: &str, directory: &Path) -> Result<Value> {
    let mut command = Command::new(std::env::current_exe()?);
    let output = command
        .arg(PART_PROCESS)
        .arg(part)
        .arg(directory)
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "part '{part}' failed: {said}");
    serde_json::from_slice(&output.stdout).with_context(|| format!("part '{part}'"))
}

fn figure(part: &Value, key: &str) -> Result<f64> {
    part[key].as_f64().with_context(|| format!("no {key}"))
}

/// Simulates a run, and writes its events, and two journals of which nothing is told yet; answers
/// how many events there are.
fn write_events(jobs: u32, nodes: u32, directory: &Path) -> Result<usize> {
    let clusters = nodes / 100;
    let class = |cluster| NodeClass {
        cluster: format!("c{cluster}"),
        ..NodeClass::new(nodes / clusters, 1, 20_000_000_000)
    };
    let environment = Environment {
        nodes: (0..clusters).map(class).collect(),
        home_bytes_per_s: 100_000_000,
        local_bytes_per_s: 100_000_000,
        // Each node fails once in a month.
        mtbf_s: Some(Duration::from_secs(30 * 86_400).as_secs() / u64::from(nodes) + 1),
        restart_s: 300,
    };
    let width = jobs / 5;
    let text = format!("width={width},depth=5,batch=20GB,private=0.1GB,run=1000s,var=0.2");
    let load = LoadModel::Declared {
        variability_ppm: 200_000,
    };
    let scenario = Scenario::new(environment, Policy::Need, load, 1);
    let workflow = build_canonical_workflow(&CanonicalWorkload::parse(&text)?);
    let simulation = Simulation::new(workflow, scenario);
    let header = simulation.journal_header();
    drop(Journal::open(&directory.join(JOURNAL), || header.clone())?);
    let mut writer = EventWriter {
        file: BufWriter::new(File::create(directory.join(EVENTS))?),
        batch: Vec::new(),
        count: 0,
        error: None,
    };
    let run = simulation.run_timed(&mut writer)?;
    ensure!(run.is_complete(), "{jobs} jobs: {:?}", run.outcome);
    writer.write_batch();
    writer.file.flush()?;
    match writer.error {
        Some(error) => Err(error),
        None => Ok(writer.count),
    }
}

/// Goes on with each journal of an earlier form to its end; answers how many there are.
fn continue_golden_journals() -> Result<usize> {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bafs-sim/tests/golden");
    let mut continued = 0;
    for entry in golden.read_dir()? {
        let path = entry?.path();
        let directory = tempfile::tempdir()?;
        let copy = directory.path().join("journal");
        std::fs::copy(&path, &copy)?;
        let (_journal, tail) = Journal::open(&copy, || -> JournalHeader {
            unreachable!("the journal exists")
        })?;
        let node = NodeSpec {
            capacity: bafs_sched::Space {
                bytes: 400_000_000,
                files: 100_000,
            },
            slots: 2,
        };
        let mut cluster = SimulatedCluster::resume_on_new_nodes(tail, vec![node; 3]);
        let outcome = cluster.run_to_end(cluster.elapsed_ms() + 86_400_000);
        let is_complete = outcome == bafs_sched::Outcome::Complete;
        ensure!(is_complete, "{}: {outcome:?}", path.display());
        continued += 1;
    }
    Ok(continued)
}

fn file_mib(path: &Path) -> Result<f64> {
    Ok(path.metadata()?.len() as f64 / f64::from(1 << 20))
}
