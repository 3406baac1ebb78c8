//! What the scheduler learns of how unevenly nodes keep the blocks of caches.

use std::collections::VecDeque;

use bafs_proto::ids::{RunId, ServerId, VolumeId};
use bafs_proto::time::Time;
use bafs_sched::logic::{Action, Event, NodeSeen, Scheduler, Settings, Space};
use bafs_sched::workflow::Workflow;
use bafs_sched::world::{success, workflow};

const MB: u64 = 1_000_000;

/// Jobs that read one cache of 40 MB, and after them as many that read another.
fn two_caches() -> Workflow {
    let mut text = String::new();
    for cache in ["a", "b"] {
        text += &format!("volume {cache} cache bafs://home/{cache} 40 MB files 10\n");
        for job in 0..4 {
            text += &format!(
                "job {cache}{job} {{\n  executable = x\n}}\nmount {cache} {cache}{job} /c\n"
            );
        }
    }
    text += "parent a0 a1 a2 a3 child b0 b1 b2 b3\n";
    workflow(&text)
}

/// The bytes that each cache gets on four nodes, in the order in which they are made, if of the
/// first one a node keeps so many thousandths more than its share; `None`: no node says.
fn made(more: Option<u64>) -> Vec<u64> {
    sums(&parts(25 * MB, more, false))
}

fn sums(parts: &[Vec<u64>]) -> Vec<u64> {
    parts.iter().map(|parts| parts.iter().sum()).collect()
}

/// The same, part by part, on nodes that have so many bytes each; one of them may join when the
/// first reader has begun.
fn parts(bytes: u64, more: Option<u64>, joins: bool) -> Vec<Vec<u64>> {
    parts_of(two_caches(), bytes, more, joins)
}

fn parts_of(workflow: Workflow, bytes: u64, more: Option<u64>, joins: bool) -> Vec<Vec<u64>> {
    let mut scheduler = Scheduler::new(RunId(1), workflow, Settings::default());
    let capacity = Space {
        bytes,
        files: 1_000,
    };
    let node = |id| NodeSeen::alone(ServerId(id), capacity, 1);
    let all: Vec<NodeSeen> = (1..=4).map(node).collect();
    let mut joining = joins.then(|| all.clone());
    let first = all[..if joins { 3 } else { 4 }].to_vec();
    let mut facts = VecDeque::from([Event::seen(first)]);
    let (mut now, mut made) = (0, vec![Vec::new(); 2]);
    while let Some(fact) = facts.pop_front() {
        now += 1;
        let mut actions = Vec::new();
        scheduler.step(Time(now), fact, &mut actions);
        scheduler.check();
        for action in actions {
            match action {
                Action::CreateVolume {
                    id, volume, size, ..
                } => {
                    if let Some(parts) = made.get_mut(volume.as_usize()) {
                        parts.push(size.bytes);
                    }
                    facts.push_back(Event::VolumeCreated { volume: id });
                }
                Action::LookAtCache { id, server } => {
                    // Before the next reader ends.
                    if let Some(more) = more {
                        facts.push_front(keeps(id, server, more));
                    }
                }
                Action::StartJob { execution, .. } => {
                    let report = success();
                    facts.push_back(Event::JobStarted { execution });
                    facts.extend(joining.take().map(Event::seen));
                    facts.push_back(Event::JobEnded { execution, report });
                }
                Action::DeleteVolume { id, .. } => {
                    facts.push_back(Event::VolumeDeleted { volume: id });
                }
                _ => {}
            }
        }
    }
    assert!(scheduler.outcome().is_some(), "the run ends");
    made
}

/// The first node keeps more than a quarter of the cache, the others share the rest.
fn keeps(volume: VolumeId, server: ServerId, more: u64) -> Event {
    let first = 10 * MB * (1000 + more) / 1000;
    let kept_bytes = match server.0 {
        1 => first,
        _ => (40 * MB - first) / 3,
    };
    Event::CacheSeen {
        volume,
        kept_bytes,
        again_bytes: 0,
    }
}

#[test]
fn a_cache_gets_room_for_blocks_as_unevenly_spread_as_those_of_the_one_before() {
    assert_eq!(made(Some(200)), [44 * MB, 48 * MB]);
}

#[test]
fn evenly_spread_blocks_give_room_back() {
    assert_eq!(made(Some(0)), [44 * MB, 408 * MB / 10]);
    assert_eq!(made(Some(62)), [44 * MB, 42_480_000]);
}

/// The first cache must go before the second can be made, and goes node by node.
#[test]
fn a_cache_is_divided_evenly_when_all_nodes_have_given_up_the_one_before() {
    let parts = parts(15 * MB, None, false);
    assert_eq!(parts[0], [11 * MB; 4]);
    assert_eq!(parts[1], [11 * MB; 4]);
}

#[test]
fn a_node_that_does_not_say_what_it_keeps_changes_nothing() {
    assert_eq!(made(None), [44 * MB, 44 * MB]);
}

/// What earlier parts keep of blocks that are the newcomer's now is not theirs.
#[test]
fn a_cache_to_which_a_part_was_added_tells_nothing() {
    let parts = parts(25 * MB, Some(200), true);
    assert_eq!(parts[0].len(), 4, "the node that joined has a part");
    assert_eq!(sums(&parts)[1], 44 * MB);
}

/// Of sixteen pipelines each reads one cache, and when all have, another one.
#[test]
fn a_cache_takes_the_room_that_its_readers_have_taken_theirs_of() {
    let mut text = String::new();
    for cache in ["a", "b"] {
        text += &format!("volume {cache} cache bafs://home/{cache} 40 MB files 10\n");
    }
    for pipeline in 0..16 {
        text += &format!("volume s{pipeline} scratch 1 MB files 10\n");
        for cache in ["a", "b"] {
            let job = format!("{cache}{pipeline}");
            text += &format!(
                "job {job} {{\n  executable = x\n}}\nmount {cache} {job} /c\n\
                 mount s{pipeline} {job} /s\n"
            );
        }
    }
    let all = |cache: &str| {
        (0..16)
            .map(|at| format!(" {cache}{at}"))
            .collect::<String>()
    };
    text += &format!("parent{} child{}\n", all("a"), all("b"));
    // Beside four scratch volumes a node has room for what the second cache takes beyond its size,
    // but not for four more.
    let made = sums(&parts_of(workflow(&text), 16 * MB, None, false));
    assert!(made[0] > 43 * MB && made[1] > 42 * MB, "{made:?}");
}
