//! Nodes that refuse room for volumes for a moment, and what placing large pipelines costs: the
//! core with one that answers at once, and a clock that jumps. No time is taken.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::{RunId, ServerId};
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode};
use bafs_sched::logic::{Action, Event, NodeSeen, Outcome, Scheduler, Settings, Space};
use bafs_sched::workflow::{Workflow, parse_workflow};

const MB: u64 = 1_000_000;
const HOUR_MS: u64 = 3_600_000;
const STEPS_MAX: u32 = 10_000;

fn workflow(text: &str) -> Workflow {
    let none = |_: &str| Err("no files".to_owned());
    let parsed = parse_workflow("w.bafs", text, &none);
    parsed.expect("it is right").workflow
}

fn node(id: u64, slots: u32) -> NodeSeen {
    let capacity = Space {
        bytes: 100 * MB,
        files: 100_000,
    };
    NodeSeen::alone(ServerId(id), capacity, slots)
}

fn success() -> JobReport {
    JobReport {
        outcome: JobOutcome::Exited(0),
        wall_ms: 1,
        cpu_ms: 1,
        output_tail: String::new(),
        volumes: Vec::new(),
    }
}

/// Runs a workflow on one node whose jobs take an hour each, and which refuses to make volumes when
/// `refuses` says so. Answers how it ended and when.
fn run(text: &str, slots: u32, mut refuses: impl FnMut(&str) -> bool) -> (Outcome, u64) {
    let mut scheduler = Scheduler::new(RunId(0), workflow(text), Settings::default());
    let mut due = BTreeMap::from([((0, 0), Event::seen(vec![node(1, slots)]))]);
    let mut number = 0;
    let mut last = 0;
    for _ in 0..STEPS_MAX {
        let timer = scheduler.next_timer().map(|at| at.0.max(last));
        let fact = due.first_key_value().map(|((at, _), _)| *at);
        let (now, event) = match (timer, fact) {
            (Some(timer), fact) if fact.is_none_or(|fact| timer < fact) => (timer, Event::Tick),
            _ => {
                let ((at, _), event) = due.pop_first().expect("something is due");
                (at, event)
            }
        };
        last = now;
        let mut actions = Vec::new();
        scheduler.step(Time(now), event, &mut actions);
        scheduler.check();
        for action in actions {
            let mut at = |later_ms, event| {
                number += 1;
                due.insert((now + later_ms, number), event);
            };
            match action {
                Action::CreateVolume { id, volume, .. } => {
                    let name = &scheduler.workflow().volume(volume).name;
                    let error = Error::new(ErrorCode::NoSpaceBytes, "no room");
                    let answer = match refuses(name) {
                        true => Event::VolumeCreateFailed { volume: id, error },
                        false => Event::VolumeCreated { volume: id },
                    };
                    at(5, answer);
                }
                Action::DeleteVolume { id, .. } => at(5, Event::VolumeDeleted { volume: id }),
                Action::StartJob { execution, .. } => {
                    at(5, Event::JobStarted { execution });
                    let report = success();
                    at(HOUR_MS, Event::JobEnded { execution, report });
                }
                Action::Finish { outcome } => return (outcome, now),
                _ => {}
            }
        }
    }
    panic!("it does not end");
}

#[test]
fn refusals_that_are_followed_by_successes_are_not_in_a_row() {
    let mut text = String::new();
    for k in 0..12 {
        text += &format!("volume y{k} cache bafs://home/y{k} 60 MB\njob j{k} {{\n");
        text += &format!("executable = /bin/true\n}}\nmount y{k} j{k} /y\n");
    }
    let mut refused = BTreeSet::new();
    let (outcome, _) = run(&text, 1, |name| refused.insert(name.to_owned()));
    assert_eq!(outcome, Outcome::Complete);
    assert_eq!(refused.len(), 12, "each was refused once");
}

/// Sixteen slots, and sixteen refusals at once: as soon as the volumes of one job are made, the
/// others go on beside it, and not after it.
#[test]
fn room_that_is_there_again_is_used_by_all() {
    let mut text = String::new();
    for k in 0..64 {
        text += &format!("volume v{k} scratch 1 MB\njob j{k} {{\nexecutable = /bin/true\n}}\n");
        text += &format!("mount v{k} j{k} /y\n");
    }
    let mut left = 16;
    let refuses = |_: &str| {
        left -= i32::from(left > 0);
        left > 0
    };
    let (outcome, at) = run(&text, 16, refuses);
    assert_eq!(outcome, Outcome::Complete);
    assert!(at < 4 * HOUR_MS + HOUR_MS / 10, "{at} ms for four hours");
}

/// A job that gathers what as many others made as there are nodes: on each node fit three of them.
#[test]
fn placing_a_pipeline_on_many_nodes_looks_at_each_a_few_times() {
    let looked_at = [25u64, 50, 100].map(|size| {
        let mut text = "job z {\nexecutable = /bin/true\n}\n".to_owned();
        for k in 0..size {
            text += &format!("volume v{k} scratch 30 MB files 5\njob j{k} {{\n");
            text += &format!("executable = /bin/true\n}}\nmount v{k} j{k} /y\n");
            text += &format!("parent j{k} child z\nmount v{k} z /i{k} ro\n");
        }
        let mut scheduler = Scheduler::new(RunId(0), workflow(&text), Settings::default());
        let nodes = (1..=size).map(|id| node(id, 1)).collect();
        let mut actions = Vec::new();
        scheduler.step(Time(0), Event::seen(nodes), &mut actions);
        assert_eq!(actions.len() as u64, size, "a volume on each node");
        scheduler.looked_at()
    });
    // Jobs times nodes for each of as many jobs.
    for pair in looked_at.windows(2) {
        assert!(pair[1] < 10 * pair[0], "{looked_at:?}");
    }
}
