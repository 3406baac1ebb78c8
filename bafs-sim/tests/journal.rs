//! The journal: torn ends, damage, a kill at every byte and at every record; then replay.

use std::path::{Path, PathBuf};

use bafs_proto::ErrorCode;
use bafs_proto::ids::RunId;
use bafs_proto::time::Time;
use bafs_sched::io::journal::{JOURNAL_MAGIC, Journal, JournalHeader, JournalRecord, read_history};
use bafs_sched::io::user_commands;
use bafs_sched::{Action, Event, Outcome, Scheduler, Settings, Space, UserCommand};
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
        workflow: journal_workflow(),
        settings: Settings::default(),
    }
}

fn journal_records() -> Vec<JournalRecord> {
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
    world.records
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

fn write_journal(path: &Path, records: &[JournalRecord]) -> Vec<u8> {
    let (mut journal, history) = Journal::open(path, journal_header).expect("open");
    assert_eq!(history.header, journal_header());
    for record in records {
        journal
            .append(std::slice::from_ref(record))
            .expect("append");
    }
    std::fs::read(path).expect("read")
}

fn replay_records(records: &[JournalRecord]) -> Scheduler {
    let mut scheduler = Scheduler::new(RunId(7), journal_workflow(), Settings::default());
    for (now, event) in records {
        scheduler.step(*now, event.clone(), &mut Vec::new());
        scheduler.check();
    }
    scheduler
}

fn open_error_code(path: &Path) -> ErrorCode {
    Journal::open(path, journal_header)
        .expect_err("must be refused")
        .code
}

#[test]
fn cut_at_any_byte_keeps_every_whole_record() {
    let (_directory, path) = temporary_journal();
    let records = journal_records();
    let whole = write_journal(&path, &records);
    let empty = {
        let (_directory, path) = temporary_journal();
        write_journal(&path, &[]).len()
    };
    let mut seen = 0;
    for length in empty..=whole.len() {
        std::fs::write(&path, &whole[..length]).expect("write");
        let (mut journal, history) = Journal::open(&path, journal_header).expect("open");
        let kept = history.records.len();
        assert!(kept >= seen, "a longer journal never tells less");
        assert_eq!(history.records, records[..kept]);
        seen = kept;
        // It goes on after the cut as if nothing had been there.
        let next = (Time(9), Event::Tick);
        journal.append(std::slice::from_ref(&next)).expect("append");
        drop(journal);
        assert_eq!(
            read_history(&path).expect("read").records.last(),
            Some(&next)
        );
    }
    assert_eq!(seen, records.len());
}

#[test]
fn wrong_byte_is_damage_unless_in_last_record() {
    let (_directory, path) = temporary_journal();
    let records = journal_records();
    let whole = write_journal(&path, &records);
    let header_end = {
        let (_directory, path) = temporary_journal();
        write_journal(&path, &[]).len()
    };
    let last = {
        let (_directory, path) = temporary_journal();
        write_journal(&path, &records[..records.len() - 1]).len()
    };
    for at in (JOURNAL_MAGIC.len()..whole.len()).step_by(7) {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x10;
        std::fs::write(&path, &bytes).expect("write");
        if at < last {
            assert_eq!(
                open_error_code(&path),
                ErrorCode::Malformed,
                "byte {at}, header ends {header_end}"
            );
        } else {
            let (_, history) = Journal::open(&path, journal_header).expect("a torn end is cut off");
            assert_eq!(history.records, records[..records.len() - 1]);
        }
    }
}

#[test]
fn other_files_versions_and_schedulers_are_refused() {
    let (_directory, path) = temporary_journal();
    std::fs::write(&path, b"bafs-journal 1\n").expect("write");
    assert_eq!(open_error_code(&path), ErrorCode::VersionMismatch);
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
    let records = journal_records();
    for kept in 0..=records.len() {
        let mut open: Vec<Action> = Vec::new();
        let mut scheduler = Scheduler::new(RunId(7), journal_workflow(), Settings::default());
        for (now, event) in &records[..kept] {
            let mut actions = Vec::new();
            scheduler.step(*now, event.clone(), &mut actions);
            // What is not answered is asked after the next reader.
            let is_asked_again = |action: &Action| matches!(action, Action::InspectCache { .. });
            open.extend(actions.into_iter().filter(|it| !is_asked_again(it)));
            open.retain(|action| !is_answer_to(event, action));
        }
        let again = replay_records(&records[..kept]);
        assert!(again == scheduler, "after {kept} records");
        let outstanding = again.outstanding_actions();
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
    journal.append(&journal_records()[..1]).expect("append");
    drop(journal);
    let (_, history) = Journal::open(&path, journal_header).expect("open");
    assert_eq!(history.header.run, RunId(7));
    assert_eq!(history.records.len(), 1, "what was noted is in the file");
    let left = std::fs::read_dir(path.parent().expect("a directory")).expect("list");
    assert_eq!(left.count(), 1, "no draft is left");
}
