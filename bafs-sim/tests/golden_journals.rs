//! Journals of earlier forms are continued to their end, and every reading command reads them.

use std::path::{Path, PathBuf};

use bafs_proto::ids::RunId;
use bafs_sched::goodput::compute_goodput;
use bafs_sched::io::journal::{
    History, JOURNAL_VERSION, Journal, JournalHeader, Snapshot, read_header, read_history,
};
use bafs_sched::replay::{describe_status, replay_history, verify_decisions};
use bafs_sched::report::RunReportBuilder;
use bafs_sched::timeline::build_timeline;
use bafs_sched::{NullSelector, Outcome, Scheduler, Space};
use bafs_sim::past_runs::from_journal;
use bafs_sim::simulated_cluster::{NodeSpec, SimulatedCluster};

use crate::seeds::{LIMIT_MS, cluster_for_seed};

/// A run that loses nodes, copies volumes and has joined pipelines.
const SEED: u64 = 11;

fn golden_directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

fn golden_journals() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(golden_directory()).expect("a directory");
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.expect("a file").path()).collect();
    paths.retain(|path| path.extension().is_some_and(|it| it == "journal"));
    paths.sort();
    paths
}

/// A copy that may be written.
fn copy_of(golden: &Path) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("run.journal");
    std::fs::copy(golden, &path).expect("a copy");
    (directory, path)
}

/// With `BAFS_WRITE_GOLDEN`: writes the journal of the present form, of a run that is cut off in
/// the middle, with a snapshot.
#[test]
fn golden_journal_is_written() {
    if std::env::var_os("BAFS_WRITE_GOLDEN").is_none() {
        return;
    }
    let mut world = cluster_for_seed(SEED);
    let header = JournalHeader {
        run: RunId(SEED),
        workflow: world.scheduler.workflow().clone(),
        settings: world.scheduler.settings().clone(),
    };
    world.run_to_end(LIMIT_MS);
    let number = golden_journals().len() + 1;
    let name = format!("journal-{JOURNAL_VERSION}-{number}.journal");
    let path = golden_directory().join(name);
    let (mut journal, _) = Journal::open(&path, || header.clone()).expect("a new file");
    // The second run of its workflow.
    journal.begin_epoch(header.clone()).expect("another run");
    let kept = world.steps.len() * 2 / 3;
    let mut scheduler = header.new_scheduler(&NullSelector);
    scheduler.start_recording();
    for (at, step) in world.steps[..kept].iter().enumerate() {
        if at == kept / 2 {
            let snapshot = Snapshot {
                state: scheduler.snapshot(),
                ..Snapshot::default()
            };
            journal.append_snapshot(snapshot).expect("written");
        }
        scheduler.redo(&step.changes);
        journal.append(std::slice::from_ref(step)).expect("written");
    }
}

#[test]
fn golden_journals_are_continued() {
    let golden = golden_journals();
    assert!(!golden.is_empty());
    for golden in golden {
        let (_directory, path) = copy_of(&golden);
        let header = || -> JournalHeader { panic!("the journal exists") };
        let (journal, tail) = Journal::open(&path, header).expect("it is read");
        drop(journal);
        let began = read_history(&path).expect("it is read");
        let node = NodeSpec {
            capacity: Space {
                bytes: 400_000_000,
                files: 100_000,
            },
            slots: 2,
        };
        let mut world = SimulatedCluster::resume_on_new_nodes(tail, vec![node; 3]);
        let outcome = world.run_to_end(world.elapsed_ms() + LIMIT_MS);
        assert_eq!(outcome, Outcome::Complete, "{}", golden.display());
        // What the whole run did is read from both parts.
        let steps = began.steps.into_iter().chain(world.steps).collect();
        let header = began.header;
        let past = from_journal(History { header, steps });
        past.expect("a complete run is simulated again");
    }
}

#[test]
fn golden_journals_take_another_run() {
    for golden in golden_journals() {
        let (_directory, path) = copy_of(&golden);
        let panics = || -> JournalHeader { panic!("the journal exists") };
        let (mut journal, tail) = Journal::open(&path, panics).expect("it is read");
        let header = JournalHeader {
            run: RunId(99),
            ..tail.header
        };
        journal.begin_epoch(header.clone()).expect("another run");
        drop(journal);
        let (_, tail) = Journal::open(&path, panics).expect("it is read");
        assert!(tail.header == header && !tail.has_steps());
    }
}

#[test]
fn golden_journals_are_read_by_all_commands() {
    for path in golden_journals() {
        let history = read_history(&path).expect("it is read");
        assert_eq!(read_header(&path).expect("it is read"), history.header);
        let (lines, scheduler) = replay_history(history.clone(), &NullSelector);
        assert!(lines.len() > 20, "{} lines", lines.len());
        assert!(scheduler.outcome().is_none(), "it goes on");
        scheduler.check();
        let waiting = scheduler.workflow().jobs.iter();
        let waiting = waiting.filter_map(|job| describe_status(&scheduler, &job.name));
        assert!(waiting.count() > 0, "jobs that wait say why");
        let timeline = build_timeline(history.clone(), &NullSelector);
        assert!(!timeline.executions.is_empty() && !timeline.nodes.is_empty());
        let goodput = compute_goodput(&history.header.workflow, &timeline);
        assert!(goodput.total.sum_ms() > 0);
        let (report, scheduler): (_, Scheduler) =
            RunReportBuilder::from_history(&history, &NullSelector);
        let report = report.build_report(&scheduler, Outcome::Cancelled);
        assert_eq!(report.totals, timeline.progress);
        assert!(!report.jobs.is_empty());
        // Rules may have changed since; that it is decided again without harm is enough.
        let _ = verify_decisions(&history, &NullSelector);
    }
}
