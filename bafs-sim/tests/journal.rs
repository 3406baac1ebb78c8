//! The journal: torn ends, damage, a kill at every byte and at every record; then replay.

use std::path::{Path, PathBuf};

use bafs_proto::ErrorCode;
use bafs_proto::ids::RunId;
use bafs_proto::time::Time;
use bafs_sched::io::journal::{
    History, JOURNAL_MAGIC, Journal, JournalHeader, JournalTail, Snapshot, read_history,
};
use bafs_sched::io::user_commands;
use bafs_sched::replay::verify_decisions;
use bafs_sched::{
    Action, Event, NullSelector, Outcome, RecordedStep, Scheduler, Settings, Space, StateChanges,
    UserCommand,
};
use bafs_sim::simulated_cluster::{Faults, NodeSpec, SimulatedCluster};
use bafs_workflow::{Workflow, parse_workflow};

const JOURNAL_WORKFLOW: &str = "
volume b bafs://home/data 1 MB
volume p scratch 1 MB
job a {
  executable = /bin/true
}
job c {
  executable = /bin/true
}
parent a child c
mount b a /data
mount p a /scratch
mount p c /scratch
extract p x bafs://home/x
";

fn journal_workflow() -> Workflow {
    parse_workflow("w.bafs", JOURNAL_WORKFLOW, &|path| Err(path.to_owned()))
        .expect("it parses")
        .workflow
}

fn journal_header() -> JournalHeader {
    JournalHeader {
        run: RunId(7),
        workflow: journal_workflow().into(),
        settings: Settings::default(),
    }
}

fn journal_steps() -> Vec<RecordedStep> {
    let spec = NodeSpec {
        capacity: Space {
            bytes: 10_000_000,
            files: 10_000,
        },
        slots: 1,
    };
    let nodes = vec![spec.clone(), spec];
    let mut world = SimulatedCluster::new(
        7,
        journal_workflow(),
        Settings::default(),
        nodes,
        Faults::default(),
    );
    assert_eq!(world.run_to_end(100_000), Outcome::Complete);
    world.steps
}

#[test]
fn journals_are_readable_by_their_owners_alone() {
    use std::os::unix::fs::{MetadataExt, PermissionsExt};
    let (_directory, path) = temporary_journal();
    let mode = |path: &Path| std::fs::metadata(path).expect("it is there").mode() & 0o777;
    drop(Journal::open(&path, journal_header).expect("open"));
    assert_eq!(mode(&path), 0o600);
    // One of an earlier version, which is continued.
    let open = std::fs::Permissions::from_mode(0o644);
    std::fs::set_permissions(&path, open).expect("chmod");
    drop(Journal::open(&path, journal_header).expect("open again"));
    assert_eq!(mode(&path), 0o600);
    let job = user_commands::find_job(&journal_header().workflow, "a").expect("a job");
    user_commands::send_command(&path, &journal_header(), UserCommand::Cancel { job })
        .expect("told");
    assert_eq!(mode(&user_commands::command_path(&path)), 0o600);
}

fn temporary_journal() -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("run.journal");
    (directory, path)
}

/// Writes a journal; after so many steps there is a snapshot.
fn write_journal(path: &Path, steps: &[RecordedStep], snapshot_after: Option<usize>) -> Vec<u8> {
    let (mut journal, tail) = Journal::open(path, journal_header).expect("open");
    assert_eq!(tail.header, journal_header());
    for (at, step) in steps.iter().enumerate() {
        if snapshot_after == Some(at) {
            let snapshot = snapshot_of(&steps[..at]);
            journal.append_snapshot(snapshot).expect("append");
        }
        journal.append(std::slice::from_ref(step)).expect("append");
    }
    std::fs::read(path).expect("read")
}

fn snapshot_of(steps: &[RecordedStep]) -> Snapshot {
    Snapshot {
        state: redo_steps(steps).snapshot(),
        ..Snapshot::default()
    }
}

/// The scheduler as these steps left it, without deciding anything.
fn redo_steps(steps: &[RecordedStep]) -> Scheduler {
    let mut scheduler = new_recording_scheduler();
    for step in steps {
        scheduler.redo(&step.changes);
    }
    scheduler.finish_redo();
    scheduler.check();
    scheduler
}

fn new_recording_scheduler() -> Scheduler {
    let mut scheduler = journal_header().new_scheduler(&NullSelector);
    scheduler.start_recording();
    scheduler
}

/// The scheduler that goes on with the end of a journal.
fn redo_tail(tail: &JournalTail) -> Scheduler {
    let mut scheduler = new_recording_scheduler();
    tail.restore(&mut scheduler).expect("it is read");
    scheduler.check();
    scheduler
}

fn read_steps(tail: &JournalTail) -> Vec<RecordedStep> {
    let steps = tail.steps.read().collect::<Result<_, _>>();
    steps.expect("they are read")
}

fn tick(at: u64) -> RecordedStep {
    RecordedStep {
        at: Time(at),
        event: Event::Tick,
        decisions: Vec::new(),
        actions: Vec::new(),
        changes: StateChanges::default(),
    }
}

fn open_error_code(path: &Path) -> ErrorCode {
    Journal::open(path, journal_header)
        .expect_err("must be refused")
        .code
}

#[test]
fn cut_at_any_byte_keeps_every_whole_record() {
    let steps = journal_steps();
    let states: Vec<Scheduler> = (0..=steps.len())
        .map(|kept| redo_steps(&steps[..kept]))
        .collect();
    for snapshot_after in [None, Some(steps.len() / 2)] {
        let (_directory, path) = temporary_journal();
        let whole = write_journal(&path, &steps, snapshot_after);
        let empty = {
            let (_directory, path) = temporary_journal();
            write_journal(&path, &[], None).len()
        };
        let mut seen = 0;
        for length in (empty..=whole.len()).step_by(3).chain([whole.len()]) {
            std::fs::write(&path, &whole[..length]).expect("write");
            let (mut journal, tail) = Journal::open(&path, journal_header).expect("open");
            let kept = read_history(&path).expect("read").steps;
            assert!(kept.len() >= seen, "a longer journal never tells less");
            assert!(kept == steps[..kept.len()], "{length} bytes");
            redo_tail(&tail).check_restored(&states[kept.len()]);
            seen = kept.len();
            // It goes on after the cut as if nothing had been there.
            let next = tick(9);
            journal.append(std::slice::from_ref(&next)).expect("append");
            drop(journal);
            let history = read_history(&path).expect("read");
            assert_eq!(history.steps.last(), Some(&next));
        }
        assert_eq!(seen, steps.len());
    }
}

#[test]
fn wrong_byte_is_damage_unless_in_last_record() {
    let (_directory, path) = temporary_journal();
    let steps = journal_steps();
    let whole = write_journal(&path, &steps, None);
    let last = {
        let (_directory, path) = temporary_journal();
        write_journal(&path, &steps[..steps.len() - 1], None).len()
    };
    // Behind the first line is where the last snapshot and run are: neither is believed unseen.
    for at in (JOURNAL_MAGIC.len() + 16..whole.len()).step_by(7) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x10;
        std::fs::write(&path, &bytes).expect("write");
        if at < last {
            assert_eq!(open_error_code(&path), ErrorCode::Malformed, "byte {at}");
        } else {
            let (_, tail) = Journal::open(&path, journal_header).expect("a torn end is cut off");
            assert!(read_steps(&tail) == steps[..steps.len() - 1]);
        }
    }
}

#[test]
fn snapshot_spares_the_steps_before_it() {
    let (_directory, path) = temporary_journal();
    let steps = journal_steps();
    let half = steps.len() / 2;
    let whole = write_journal(&path, &steps, Some(half));
    let (journal, tail) = Journal::open(&path, journal_header).expect("open");
    drop(journal);
    let kept = read_steps(&tail);
    assert!(kept == steps[half..], "{} steps", kept.len());
    redo_tail(&tail).check_restored(&redo_steps(&steps));
    // An offset that points anywhere else is not believed.
    for wrong in [1, 30, whole.len() as u64 - 9, u64::MAX] {
        let mut bytes = whole.clone();
        bytes[JOURNAL_MAGIC.len()..JOURNAL_MAGIC.len() + 8].copy_from_slice(&wrong.to_le_bytes());
        std::fs::write(&path, &bytes).expect("write");
        let (_, tail) = Journal::open(&path, journal_header).expect("open");
        redo_tail(&tail).check_restored(&redo_steps(&steps));
    }
}

#[test]
fn journal_holds_several_runs() {
    let steps = journal_steps();
    let (_directory, path) = temporary_journal();
    let first = write_journal(&path, &steps, Some(steps.len() / 2));
    let second = || JournalHeader {
        run: RunId(8),
        ..journal_header()
    };
    let panics = || -> JournalHeader { panic!("the journal exists") };
    {
        let (mut journal, _) = Journal::open(&path, panics).expect("open");
        let tail = journal.begin_epoch(second()).expect("another run");
        assert!(tail.header == second() && !tail.has_steps());
        journal.append(&steps[..3]).expect("append");
    }
    let whole = std::fs::read(&path).expect("read");
    let fields = JOURNAL_MAGIC.len()..JOURNAL_MAGIC.len() + 16;
    assert_eq!(
        whole[fields.end..first.len()],
        first[fields.end..],
        "the first run stays"
    );
    let (journal, tail) = Journal::open(&path, panics).expect("open");
    drop(journal);
    assert_eq!(
        (&tail.header, &read_steps(&tail)[..]),
        (&second(), &steps[..3])
    );
    let history = read_history(&path).expect("read");
    assert_eq!(
        (history.header, &history.steps[..]),
        (second(), &steps[..3])
    );
    // A crash before the start says where the second run is: the first is the last one.
    let mut torn = whole;
    torn[fields.clone()].copy_from_slice(&first[fields]);
    std::fs::write(&path, &torn[..torn.len() - 1]).expect("write");
    let (_, tail) = Journal::open(&path, panics).expect("open");
    assert_eq!(tail.header, journal_header());
}

#[test]
fn same_events_lead_to_the_recorded_decisions() {
    let mut history = History {
        header: journal_header(),
        steps: journal_steps(),
    };
    assert_eq!(verify_decisions(&history, &NullSelector), None);
    let deciding = history.steps.iter_mut();
    let mut deciding = deciding.filter(|step| !step.actions.is_empty());
    let changed = deciding.nth(2).expect("a step that decides something");
    changed.actions.clear();
    let event = changed.event.clone();
    let found = verify_decisions(&history, &NullSelector).expect("a difference");
    assert_eq!(found.event, event);
    assert!(found.recorded.is_empty() && !found.decided.is_empty());
}

#[test]
fn other_files_versions_and_schedulers_are_refused() {
    let (_directory, path) = temporary_journal();
    for other in [
        "bafs-journal 1\n",
        "bafs-journal 23\n",
        "bafs-journal 9999\n",
    ] {
        std::fs::write(&path, other).expect("write");
        assert_eq!(
            open_error_code(&path),
            ErrorCode::VersionMismatch,
            "{other}"
        );
    }
    std::fs::write(&path, b"#!/bin/sh\n").expect("write");
    assert_eq!(open_error_code(&path), ErrorCode::Malformed);
    std::fs::remove_file(&path).expect("remove");
    let (_held, _) = Journal::open(&path, journal_header).expect("open");
    assert_eq!(open_error_code(&path), ErrorCode::Conflict);
}

/// A scheduler that is killed between any two facts does the rest as one that was not: what it
/// takes up again is what it had asked for and not heard of.
#[test]
fn a_kill_at_any_record_loses_no_action() {
    let steps = journal_steps();
    for kept in 0..=steps.len() {
        let mut open: Vec<Action> = Vec::new();
        for step in &steps[..kept] {
            // What is not answered is asked after the next reader.
            let is_asked_again = |action: &Action| matches!(action, Action::InspectCache { .. });
            let actions = step.actions.iter().cloned();
            open.extend(actions.filter(|it| !is_asked_again(it)));
            open.retain(|action| !is_answer_to(&step.event, action));
        }
        let outstanding = redo_steps(&steps[..kept]).outstanding_actions();
        for action in &open {
            assert!(
                outstanding.contains(action),
                "after {kept} records: {action:?} is forgotten"
            );
        }
        assert_eq!(
            outstanding.len(),
            open.len(),
            "after {kept} records: {outstanding:?}"
        );
    }
}

fn is_answer_to(event: &Event, action: &Action) -> bool {
    match (event, action) {
        (Event::VolumeCreated { volume }, Action::CreateVolume { id, .. })
        | (Event::VolumeDeleted { volume }, Action::DeleteVolume { id, .. }) => volume == id,
        (Event::JobStarted { execution: a }, Action::StartJob { execution: b, .. }) => a == b,
        (Event::FileExtracted { extract: a, .. }, Action::ExtractFile { extract: b, .. }) => a == b,
        _ => false,
    }
}

#[test]
fn missing_directory_starts_no_run_and_drafts_expire() {
    let directory = tempfile::tempdir().expect("a directory");
    let missing = directory.path().join("misspelt");
    let error =
        Journal::open(&missing.join("w.bafs.journal"), journal_header).expect_err("refused");
    assert!(error.detail.contains("does not exist"), "{error}");
    assert!(!missing.exists());
    let draft = |run: u64| {
        directory
            .path()
            .join(format!("w.bafs.draft-{}", RunId(run)))
    };
    let old = std::fs::File::create(draft(1)).expect("a draft");
    let long_ago = std::time::SystemTime::UNIX_EPOCH;
    old.set_modified(long_ago).expect("its time");
    std::fs::File::create(draft(2)).expect("a draft of another scheduler");
    Journal::open(&directory.path().join("w.bafs.journal"), journal_header).expect("a journal");
    assert!(!draft(1).exists(), "it was left for ever");
    assert!(draft(2).exists(), "its scheduler may write it now");
}

#[test]
fn second_scheduler_is_refused_the_same_journal() {
    let (_directory, path) = temporary_journal();
    let mut first = None;
    let second = Journal::open(&path, || {
        // The other begins, and is faster, after this one saw that there is no journal.
        first = Some(Journal::open(&path, journal_header).expect("nobody has it"));
        let run = RunId(8);
        JournalHeader {
            run,
            ..journal_header()
        }
    });
    assert_eq!(second.expect_err("it is taken").code, ErrorCode::Conflict);
    let (mut journal, _) = first.expect("it began");
    journal.append(&journal_steps()[..1]).expect("append");
    drop(journal);
    let (_, tail) = Journal::open(&path, journal_header).expect("open");
    assert_eq!(tail.header.run, RunId(7));
    assert_eq!(read_steps(&tail).len(), 1, "what was noted is in the file");
    let left = std::fs::read_dir(path.parent().expect("a directory")).expect("list");
    assert_eq!(left.count(), 1, "no draft is left");
}
