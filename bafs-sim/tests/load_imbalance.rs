//! What the scheduler learns of how unevenly nodes keep the blocks of caches.

use std::collections::VecDeque;

use bafs_proto::ids::{RunId, ServerId, VolumeId};
use bafs_proto::time::Time;
use bafs_sched::{Action, Event, NodeInfo, Scheduler, Settings, Space};
use bafs_sim::simulated_cluster::{parse_workflow_text, successful_report};
use bafs_workflow::Workflow;

const MB: u64 = 1_000_000;

/// Jobs that read one cache of 40 MB, and after them as many that read another.
fn two_cache_workflow() -> Workflow {
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
    parse_workflow_text(&text)
}

/// The bytes that each cache gets on four nodes, in the order in which they are made, if of the
/// first one a node keeps so many thousandths more than its share; `None`: no node says.
fn created_cache_bytes(more: Option<u64>) -> Vec<u64> {
    sum_parts(&cache_parts(25 * MB, more, false))
}

fn sum_parts(parts: &[Vec<u64>]) -> Vec<u64> {
    parts.iter().map(|parts| parts.iter().sum()).collect()
}

/// The same, part by part, on nodes that have so many bytes each; one of them may join when the
/// first reader has begun.
fn cache_parts(bytes: u64, more: Option<u64>, joins: bool) -> Vec<Vec<u64>> {
    cache_parts_of(two_cache_workflow(), bytes, more, joins)
}

fn cache_parts_of(workflow: Workflow, bytes: u64, more: Option<u64>, joins: bool) -> Vec<Vec<u64>> {
    let mut scheduler = Scheduler::new(RunId(1), workflow, Settings::default());
    let capacity = Space {
        bytes,
        files: 1_000,
    };
    let node = |id| NodeInfo::single_group(ServerId(id), capacity, 1);
    let all: Vec<NodeInfo> = (1..=4).map(node).collect();
    let mut joining = joins.then(|| all.clone());
    let first = all[..if joins { 3 } else { 4 }].to_vec();
    let mut facts = VecDeque::from([Event::nodes_listed(first)]);
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
                Action::InspectCache { id, server } => {
                    // Before the next reader ends.
                    if let Some(more) = more {
                        facts.push_front(imbalanced_cache_event(id, server, more));
                    }
                }
                Action::StartJob { execution, .. } => {
                    let report = successful_report();
                    facts.push_back(Event::JobStarted { execution });
                    facts.extend(joining.take().map(Event::nodes_listed));
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
fn imbalanced_cache_event(volume: VolumeId, server: ServerId, more: u64) -> Event {
    let first = 10 * MB * (1000 + more) / 1000;
    let kept_bytes = match server.0 {
        1 => first,
        _ => (40 * MB - first) / 3,
    };
    Event::CacheInspected {
        volume,
        primary_bytes: kept_bytes,
        refetched_bytes: 0,
    }
}

#[test]
fn next_cache_reserves_room_for_measured_imbalance() {
    assert_eq!(created_cache_bytes(Some(200)), [44 * MB, 48 * MB]);
}

#[test]
fn even_blocks_shrink_the_next_cache() {
    assert_eq!(created_cache_bytes(Some(0)), [44 * MB, 408 * MB / 10]);
    assert_eq!(created_cache_bytes(Some(62)), [44 * MB, 42_480_000]);
}

/// The first cache must go before the second can be made, and goes node by node.
#[test]
fn cache_is_divided_evenly_after_its_predecessor_left() {
    let parts = cache_parts(15 * MB, None, false);
    assert_eq!(parts[0], [11 * MB; 4]);
    assert_eq!(parts[1], [11 * MB; 4]);
}

#[test]
fn node_without_a_block_report_changes_nothing() {
    assert_eq!(created_cache_bytes(None), [44 * MB, 44 * MB]);
}

/// What earlier parts keep of blocks that are the newcomer's now is not theirs.
#[test]
fn extended_cache_is_not_used_for_imbalance() {
    let parts = cache_parts(25 * MB, Some(200), true);
    assert_eq!(parts[0].len(), 4, "the node that joined has a part");
    assert_eq!(sum_parts(&parts)[1], 44 * MB);
}

/// Of sixteen pipelines each reads one cache, and when all have, another one.
#[test]
fn cache_reserves_no_room_for_started_readers_twice() {
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
    let made = sum_parts(&cache_parts_of(
        parse_workflow_text(&text),
        16 * MB,
        None,
        false,
    ));
    assert!(made[0] > 43 * MB && made[1] > 42 * MB, "{made:?}");
}
