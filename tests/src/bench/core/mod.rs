//! `bench core`: the scheduler core with its journal. The events of a simulated run of a million
//! jobs are given to the core in batches, as the driver gives them: once with a journal of events
//! alone, each batch synced before it is decided (as before version 24), and once with the journal
//! that keeps decisions and rows. Then a scheduler takes up the run from it.

use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bafs_proto::hash::Digest;
use bafs_proto::time::Time;
use bafs_sched::io::journal::{Journal, JournalHeader, PipelinedJournal, Snapshot};
use bafs_sched::{Event, NullSelector};
use bafs_sim::planner::{CanonicalWorkload, Environment, NodeClass};
use bafs_sim::simulator::{
    LoadModel, Policy, Scenario, Simulation, StepTimer, build_canonical_workflow,
};

use super::measure::Stopwatch;
use super::{BenchmarkReport, Options};

/// Jobs and nodes of a full and of a quick run.
const FULL: (u32, u32) = (1_000_000, 10_000);
const QUICK: (u32, u32) = (100_000, 1_000);

/// Events that a batch has, of at most 256.
const BATCH_EVENTS: usize = 64;

/// The start from the journal may take so long, in seconds.
const RESUME_S_MAX: f64 = 10.0;
/// Decisions with both journals per second, the new one over the old one.
const SPEED_MIN: f64 = 0.95;
/// Time limit of 99 of a hundred decisions, in milliseconds.
const DECISION_MS_MAX: f64 = 0.08;

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

/// Measures both journals, and the start from the new one.
pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    ensure!(options.only.is_empty(), "this benchmark has no parts");
    let (jobs, nodes) = options.choose(FULL, QUICK);
    let directory = tempfile::tempdir_in(std::env::current_dir()?)?;
    let events = directory.path().join("events");
    let (header, count) = write_events(jobs, nodes, &events)?;
    report.add_figure("jobs", f64::from(jobs));
    report.add_figure("nodes", f64::from(nodes));
    report.add_figure("events", count as f64);
    let before_s = time_events_alone(&header, &events, &directory.path().join("before"))?;
    reset_peak_memory();
    let path = directory.path().join("journal");
    let now = time_recorded_steps(&header, &events, &path)?;
    let per_s = count as f64 / now.total_s;
    report.add_figure("decisions_per_s", per_s);
    report.add_figure_with_target("p99_ms", now.p99_ms, 0.0..=DECISION_MS_MAX);
    report.add_figure_with_target("speed_vs_before", before_s / now.total_s, SPEED_MIN..=1e9);
    report.add_figure("before_decisions_per_s", count as f64 / before_s);
    report.add_figure("total_s", now.total_s);
    report.add_figure("decided_s", now.decided_s);
    report.add_figure("snapshots_s", now.snapshots_s);
    report.add_figure("before_total_s", before_s);
    report.add_figure("journal_mib", file_mib(&path)?);
    report.add_figure(
        "before_journal_mib",
        file_mib(&directory.path().join("before"))?,
    );
    report.add_figure("snapshots", f64::from(now.snapshots));
    let resume_s = time_resume(&path)?;
    report.add_figure_with_target("resume_s", resume_s, 0.0..=RESUME_S_MAX);
    let peak_gib = super::sim::read_peak_mib() / 1_024.0;
    report.add_figure_with_target("peak_gib", peak_gib, 0.0..=4.0);
    Ok(())
}

/// Simulates a run, and writes its events; answers what it is and how many they are.
fn write_events(jobs: u32, nodes: u32, path: &Path) -> Result<(JournalHeader, usize)> {
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
    let mut writer = EventWriter {
        file: BufWriter::new(File::create(path)?),
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
        None => Ok((header, writer.count)),
    }
}

fn read_batches(path: &Path) -> Result<impl Iterator<Item = Result<Vec<(Time, Event)>>>> {
    let lines = BufReader::with_capacity(1 << 20, File::open(path)?).lines();
    Ok(lines.map(|line| Ok(serde_json::from_str(&line?)?)))
}

/// Seconds for all batches when events alone are kept, as JSON, and synced before they are decided.
fn time_events_alone(header: &JournalHeader, events: &Path, path: &Path) -> Result<f64> {
    let mut scheduler = header.new_scheduler(&NullSelector);
    let mut file = File::create(path)?;
    let mut actions = Vec::new();
    let mut total_s = 0.0;
    for batch in read_batches(events)? {
        let batch = batch?;
        let watch = Stopwatch::start();
        let payload = serde_json::to_vec(&batch)?;
        let length = u32::try_from(payload.len()).context("a batch is small")?;
        let mut frame = length.to_le_bytes().to_vec();
        frame.extend_from_slice(&Digest::of(&payload).0[..16]);
        frame.extend(payload);
        file.write_all(&frame)?;
        file.sync_data()?;
        for (now, event) in batch {
            scheduler.step(now, event, &mut actions);
        }
        actions.clear();
        total_s += watch.elapsed().as_secs_f64();
    }
    ensure!(scheduler.outcome().is_some(), "the run is not over");
    Ok(total_s)
}

/// How long the core took with its journal.
struct RecordedRun {
    total_s: f64,
    /// Of it: the core with the rows that it wrote, and the snapshots. The rest wrote the steps.
    decided_s: f64,
    snapshots_s: f64,
    /// Of one decision with the rows that it wrote.
    p99_ms: f64,
    snapshots: u32,
}

/// Gives the core all batches, as the driver does: while one is written, the next is decided.
fn time_recorded_steps(header: &JournalHeader, events: &Path, path: &Path) -> Result<RecordedRun> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let (journal, _) = Journal::open(path, || header.clone())?;
    let mut journal = PipelinedJournal::new(journal);
    let mut scheduler = header.new_scheduler(&NullSelector);
    scheduler.start_recording();
    let mut times: Vec<u32> = Vec::new();
    let (mut total_s, mut decided_s, mut snapshots_s, mut snapshots) = (0.0, 0.0, 0.0, 0);
    let mut is_first_half = true;
    for batch in read_batches(events)? {
        let batch = batch?;
        let watch = Stopwatch::start();
        if journal.is_snapshot_due() {
            runtime.block_on(finish_write(&mut journal))?;
            let snapshot_watch = Stopwatch::start();
            let snapshot = Snapshot {
                state: scheduler.snapshot(),
                ..Snapshot::default()
            };
            journal.append_snapshot(&snapshot)?;
            snapshots += 1;
            snapshots_s += snapshot_watch.elapsed().as_secs_f64();
        }
        let decision_watch = Stopwatch::start();
        let mut steps = Vec::with_capacity(batch.len());
        for (now, event) in batch {
            let step = Stopwatch::start();
            steps.push(scheduler.record_step(now, event));
            times.push(step.elapsed().as_nanos().min(u128::from(u32::MAX)) as u32);
        }
        decided_s += decision_watch.elapsed().as_secs_f64();
        runtime.block_on(async {
            finish_write(&mut journal).await?;
            journal.begin_append(steps)
        })?;
        total_s += watch.elapsed().as_secs_f64();
        if is_first_half && scheduler.jobs_done() * 2 > header.workflow.jobs.len() as u64 {
            is_first_half = false;
            let half = path.with_extension("half");
            runtime.block_on(finish_write(&mut journal))?;
            std::fs::copy(path, half)?;
        }
    }
    let watch = Stopwatch::start();
    runtime.block_on(finish_write(&mut journal))?;
    total_s += watch.elapsed().as_secs_f64();
    ensure!(scheduler.outcome().is_some(), "the run is not over");
    times.sort_unstable();
    let p99 = times.get(times.len() * 99 / 100).copied().unwrap_or(0);
    Ok(RecordedRun {
        total_s,
        decided_s,
        snapshots_s,
        p99_ms: f64::from(p99) / 1e6,
        snapshots,
    })
}

async fn finish_write(journal: &mut PipelinedJournal) -> bafs_proto::Result<()> {
    if journal.is_writing() {
        journal.wait_written().await?;
    }
    Ok(())
}

/// Seconds until a scheduler has the state of a run of which half is done.
fn time_resume(path: &Path) -> Result<f64> {
    let watch = Stopwatch::start();
    let header = || -> JournalHeader { unreachable!("the journal exists") };
    let (_journal, tail) = Journal::open(&path.with_extension("half"), header)?;
    let mut scheduler = tail.header.new_scheduler(&NullSelector);
    scheduler.start_recording();
    scheduler.redo(&tail.snapshot.unwrap_or_default().state);
    for step in tail.steps {
        scheduler.redo(&step.changes);
    }
    scheduler.finish_redo();
    let resume_s = watch.elapsed().as_secs_f64();
    let all = scheduler.workflow().jobs.len() as u64;
    ensure!(scheduler.jobs_done() * 2 > all, "half of it is done");
    Ok(resume_s)
}

fn file_mib(path: &Path) -> Result<f64> {
    Ok(path.metadata()?.len() as f64 / f64::from(1 << 20))
}

/// The most memory is counted anew: the simulator is no part of the core.
fn reset_peak_memory() {
    // Where it cannot be reset, the figure is only higher.
    let _ = std::fs::write("/proc/self/clear_refs", "5");
}
