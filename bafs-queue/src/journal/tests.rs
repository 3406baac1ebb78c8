//! The journal, cut at every byte and damaged.

use super::*;
use crate::control::{Resources, WorkflowId, WorkflowState};
use crate::event::{QueueSettings, RunOutcome, RunUsage, UserQuota};
use crate::recorded_queue::RecordedQueue;

fn test_events() -> Vec<QueueEvent> {
    let wanted = Resources {
        slots: 4,
        bytes: 1_000_000_000,
        home_bytes_per_s: 1_000_000,
    };
    let needed = Resources {
        slots: 1,
        bytes: 400_000_000,
        home_bytes_per_s: 0,
    };
    let submit = |id, user: &str, after: &[u64]| QueueEvent::WorkflowSubmitted {
        id: WorkflowId(id),
        user: user.to_owned(),
        name: format!("w{id}.bafs"),
        priority: 0,
        key: format!("k{id}"),
        wanted,
        needed,
        after: after.iter().copied().map(WorkflowId).collect(),
    };
    let user = |user: &str| QueueEvent::UserAdded {
        user: user.to_owned(),
        homes: vec![String::new()],
        quota: UserQuota::default(),
    };
    let used = |slot_ms| RunUsage {
        slot_ms,
        home_bytes: slot_ms * 7,
    };
    let end = |id, outcome| QueueEvent::RunEnded {
        id: WorkflowId(id),
        outcome,
    };
    vec![
        QueueEvent::SettingsChanged(QueueSettings::default()),
        user("alice"),
        user("bob"),
        QueueEvent::CapacityFound(wanted),
        submit(0, "alice", &[]),
        submit(1, "bob", &[]),
        submit(2, "alice", &[0]),
        submit(3, "bob", &[2]),
        QueueEvent::UsageReported(vec![(WorkflowId(0), used(5_000)), (WorkflowId(1), used(3))]),
        QueueEvent::WorkflowHeld(WorkflowId(2)),
        end(0, RunOutcome::Complete),
        QueueEvent::WorkflowReleased(WorkflowId(2)),
        QueueEvent::RemovalRequested(WorkflowId(1)),
        end(1, RunOutcome::Cancelled),
        end(2, RunOutcome::Failed("job 'a' failed".to_owned())),
        end(3, RunOutcome::Complete),
    ]
}

/// The journal of all events, with the length of the file and the state after each.
fn write_journal(path: &Path) -> Vec<(u64, QueueState)> {
    let mut queue = RecordedQueue::open(path).expect("a new one");
    let mut ends = vec![(file_bytes(path), queue.state().clone())];
    for (event, second) in test_events().into_iter().zip(1u64..) {
        queue.record(Time(second * 1_000), event).expect("recorded");
        ends.push((file_bytes(path), queue.state().clone()));
    }
    ends
}

fn file_bytes(path: &Path) -> u64 {
    fs::metadata(path).expect("a file").len()
}

/// At every cut, the queue is as it was after the last whole step, and goes on from there to the
/// same end: nothing that was confirmed is lost, and nothing happens twice.
#[test]
fn journal_cut_anywhere_loses_and_doubles_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("queue.journal");
    let ends = write_journal(&path);
    let whole = fs::read(&path).expect("a journal");
    let cut_path = directory.path().join("cut.journal");
    let last = &ends.last().expect("a state").1;
    for cut in ends[0].0..=whole.len() as u64 {
        fs::write(&cut_path, &whole[..cut as usize]).expect("a copy");
        let mut queue = RecordedQueue::open(&cut_path).expect("it opens");
        let steps = ends.iter().rposition(|(end, _)| *end <= cut);
        let steps = steps.expect("the first snapshot is whole");
        assert_eq!(queue.state(), &ends[steps].1, "cut at {cut}");
        // Each goes on; to try that at every byte would take a minute of syncs.
        if cut != ends[steps].0 && cut % 29 != 0 {
            continue;
        }
        for (event, second) in test_events().into_iter().zip(1u64..).skip(steps) {
            queue.record(Time(second * 1_000), event).expect("recorded");
        }
        assert_eq!(queue.state(), last, "cut at {cut}");
        assert_eq!(
            fs::read(&cut_path).expect("a journal"),
            whole,
            "cut at {cut}"
        );
    }
    // Workflows 0, 2 and 3 send their results to one place.
    let writers = |state: &QueueState| state.running().filter(|id| id.0 != 1).count();
    assert!(ends.iter().all(|(_, state)| writers(state) <= 1));
    let states: Vec<_> = last.workflows().values().map(|it| it.state).collect();
    let expected = [
        WorkflowState::Complete,
        WorkflowState::Removed,
        WorkflowState::Failed,
        WorkflowState::Complete,
    ];
    assert_eq!(states, expected);
}

#[test]
fn unfinished_new_journal_harms_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("queue.journal");
    let ends = write_journal(&path);
    fs::write(directory.path().join("queue.journal.new"), "half").expect("a draft");
    let queue = RecordedQueue::open(&path).expect("it opens");
    assert_eq!(queue.state(), &ends.last().expect("a state").1);
}

#[test]
fn damage_in_the_middle_is_reported() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("queue.journal");
    let ends = write_journal(&path);
    let mut bytes = fs::read(&path).expect("a journal");
    bytes[ends[2].0 as usize + FRAME_HEAD_BYTES + 3] ^= 1;
    fs::write(&path, &bytes).expect("a copy");
    let refused = QueueJournal::open(&path).expect_err("it is damaged");
    assert_eq!(refused.code, ErrorCode::Malformed);
    fs::write(&path, b"bafs-queue 9\n").expect("a file");
    let refused = QueueJournal::open(&path).expect_err("it is of later");
    assert_eq!(refused.code, ErrorCode::VersionMismatch);
}

/// One bit of a length would otherwise cut off all that follows, or the last confirmed step.
#[test]
fn damaged_length_cuts_nothing_off() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("queue.journal");
    let ends = write_journal(&path);
    let whole = fs::read(&path).expect("a journal");
    let begins = ends[..ends.len() - 1].iter().map(|(end, _)| *end as usize);
    let first = MAGIC.len();
    for begin in std::iter::once(first).chain(begins) {
        for bit in 0..8 * FRAME_HEAD_BYTES {
            let mut bytes = whole.clone();
            bytes[begin + bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, &bytes).expect("a copy");
            let refused = QueueJournal::open(&path).expect_err("it is damaged");
            assert_eq!(refused.code, ErrorCode::Malformed, "{begin} {bit}");
            assert!(
                refused.detail.contains("restore it from a copy"),
                "{refused}"
            );
            assert_eq!(fs::read(&path).expect("a journal"), bytes, "{begin} {bit}");
        }
    }
}

/// A file system may make a file longer before its data is there.
#[test]
fn last_step_without_data_is_dropped() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("queue.journal");
    let ends = write_journal(&path);
    let whole = fs::read(&path).expect("a journal");
    let (begin, state) = &ends[ends.len() - 2];
    let begin = *begin as usize;
    for missing in [
        begin,
        begin + FRAME_HEAD_BYTES,
        begin + FRAME_HEAD_BYTES + 9,
    ] {
        let mut bytes = whole.clone();
        bytes[missing..].fill(0);
        fs::write(&path, &bytes).expect("a copy");
        let (_, found) = QueueJournal::open(&path).expect("it opens");
        assert_eq!(&found, state, "{missing}");
        assert_eq!(fs::read(&path).expect("a journal"), whole[..begin]);
    }
}

#[test]
fn long_journal_is_replaced_by_a_snapshot() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("queue.journal");
    write_journal(&path);
    let mut queue = RecordedQueue::open(&path).expect("it opens");
    let long = "n".repeat(600_000);
    for second in 100..120 {
        let event = QueueEvent::WorkflowSubmitted {
            id: queue.state().next_id(),
            user: "alice".to_owned(),
            name: long.clone(),
            priority: 0,
            key: String::new(),
            wanted: Resources::default(),
            needed: Resources::default(),
            after: Vec::new(),
        };
        queue.record(Time(second * 1_000), event).expect("recorded");
        let id = WorkflowId(queue.state().next_id().0 - 1);
        let event = QueueEvent::RemovalRequested(id);
        queue.record(Time(second * 1_000), event).expect("recorded");
    }
    let state = queue.state().clone();
    drop(queue);
    let again = RecordedQueue::open(&path).expect("it opens");
    assert_eq!(again.state(), &state);
}
