//! The parts of `bench core` that are measured, each in a process of its own: a journal of events
//! alone, the journal of decisions and rows, and the start from that.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use bafs_proto::hash::Digest;
use bafs_proto::time::Time;
use bafs_sched::io::journal::{Journal, JournalHeader, PipelinedJournal, Snapshot, read_header};
use bafs_sched::{Event, NullSelector};
use nix::sys::resource::UsageWho;
use serde_json::{Value, json};

use crate::bench::measure::Stopwatch;
use crate::bench::sim::read_peak_mib;

/// The first argument of such a process; the part and the directory follow.
pub(in crate::bench) const PART_PROCESS: &str = "--core-part";

/// Files of the directory: the events, the journals, and the journal as it was when half of the
/// jobs were done.
pub(super) const EVENTS: &str = "events";
pub(super) const BEFORE: &str = "before";
pub(super) const JOURNAL: &str = "journal";
const HALF: &str = "half";

/// Measures a part, and prints its figures.
///
/// # Errors
/// The part fails, or is unknown.
pub(in crate::bench) fn run_part_process(arguments: &[String]) -> Result<()> {
    let [part, directory] = arguments else {
        bail!("a part and a directory are needed");
    };
    let directory = Path::new(directory);
    let mut figures = match part.as_str() {
        "before" => measure_events_alone(directory)?,
        "now" => measure_recorded_steps(directory)?,
        "resume" => measure_resume(directory)?,
        _ => bail!("part '{part}' is unknown"),
    };
    figures["peak_gib"] = json!(read_peak_mib() / 1_024.0);
    figures["processor_s"] = json!(read_processor_s(UsageWho::RUSAGE_SELF));
    println!("{figures}");
    Ok(())
}

fn read_batches(directory: &Path) -> Result<impl Iterator<Item = Result<Vec<(Time, Event)>>>> {
    let events = File::open(directory.join(EVENTS))?;
    let lines = BufReader::with_capacity(1 << 20, events).lines();
    Ok(lines.map(|line| Ok(serde_json::from_str(&line?)?)))
}

/// All batches when events alone are kept, as JSON, and synced before they are decided.
fn measure_events_alone(directory: &Path) -> Result<Value> {
    let header = read_header(&directory.join(JOURNAL))?;
    let mut scheduler = header.new_scheduler(&NullSelector);
    let mut file = File::create(directory.join(BEFORE))?;
    let mut actions = Vec::new();
    let mut total_s = 0.0;
    for batch in read_batches(directory)? {
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
    Ok(json!({ "total_s": total_s }))
}

/// Gives the core all batches, as the driver does: while one is written, the next is decided.
/// `decided_s` is the core with the rows that it wrote, and `snapshots_s` the making of snapshots;
/// the rest waited for steps to be written.
fn measure_recorded_steps(directory: &Path) -> Result<Value> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let path = directory.join(JOURNAL);
    let exists = || -> JournalHeader { unreachable!("the journal exists") };
    let (journal, tail) = Journal::open(&path, exists)?;
    let mut journal = PipelinedJournal::new(journal);
    let mut scheduler = tail.header.new_scheduler(&NullSelector);
    drop(tail);
    scheduler.start_recording();
    let all = scheduler.workflow().jobs.len() as u64;
    let mut times: Vec<u32> = Vec::new();
    let (mut total_s, mut decided_s, mut snapshots_s, mut snapshots) = (0.0, 0.0, 0.0, 0);
    let mut is_first_half = true;
    for batch in read_batches(directory)? {
        let batch = batch?;
        let watch = Stopwatch::start();
        if journal.is_snapshot_due() {
            runtime.block_on(finish_write(&mut journal))?;
            let snapshot_watch = Stopwatch::start();
            let snapshot = Snapshot {
                state: scheduler.snapshot(),
                ..Snapshot::default()
            };
            runtime.block_on(async { journal.begin_snapshot(snapshot) })?;
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
        if is_first_half && scheduler.jobs_done() * 2 > all {
            is_first_half = false;
            runtime.block_on(finish_write(&mut journal))?;
            std::fs::copy(&path, directory.join(HALF))?;
        }
    }
    let watch = Stopwatch::start();
    runtime.block_on(finish_write(&mut journal))?;
    total_s += watch.elapsed().as_secs_f64();
    ensure!(scheduler.outcome().is_some(), "the run is not over");
    times.sort_unstable();
    let p99 = times.get(times.len() * 99 / 100).copied().unwrap_or(0);
    Ok(json!({
        "total_s": total_s,
        "decided_s": decided_s,
        "snapshots_s": snapshots_s,
        "snapshots": snapshots,
        "p99_ms": f64::from(p99) / 1e6,
    }))
}

async fn finish_write(journal: &mut PipelinedJournal) -> bafs_proto::Result<()> {
    if journal.is_writing() {
        journal.wait_written().await?;
    }
    Ok(())
}

/// Until a scheduler has the state of a run of which half is done.
fn measure_resume(directory: &Path) -> Result<Value> {
    let watch = Stopwatch::start();
    let exists = || -> JournalHeader { unreachable!("the journal exists") };
    let (_journal, tail) = Journal::open(&directory.join(HALF), exists)?;
    let mut scheduler = tail.header.new_scheduler(&NullSelector);
    scheduler.start_recording();
    tail.restore(&mut scheduler)?;
    let total_s = watch.elapsed().as_secs_f64();
    let all = scheduler.workflow().jobs.len() as u64;
    ensure!(scheduler.jobs_done() * 2 > all, "half of it is done");
    Ok(json!({ "total_s": total_s }))
}

/// Time of all processors that this process had, in seconds.
pub(super) fn read_processor_s(whose: UsageWho) -> f64 {
    let usage = nix::sys::resource::getrusage(whose);
    usage.map_or(f64::NAN, |usage| {
        let times = [usage.user_time(), usage.system_time()];
        let seconds = times.map(|time| time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6);
        seconds.into_iter().sum()
    })
}
