//! What users are told of caches that are too small for what is read.

use std::collections::VecDeque;

use bafs_proto::ids::{RunId, ServerId};
use bafs_proto::time::Time;
use bafs_sched::{Action, Event, NodeInfo, Scheduler, Settings, Space};
use bafs_sim::simulated_cluster::{parse_workflow_text, successful_report};

const MB: u64 = 1_000_000;

/// Four jobs that read a cache of 40 MB one after the other, on so many nodes with room for half
/// of it, or for all on one; each time a part is looked at it has got so many bytes more once more.
/// How often the nodes were asked, and what the user was told.
fn run_cache_readers(nodes: u64, again_bytes: u64) -> (u64, Vec<String>) {
    let mut text = "volume a cache bafs://home/a 40 MB files 10\n".to_owned();
    for job in 0..4 {
        text += &format!("job j{job} {{\n  executable = x\n}}\nmount a j{job} /c\n");
    }
    text += "parent j0 child j1\nparent j1 child j2\nparent j2 child j3\n";
    let mut scheduler = Scheduler::new(RunId(1), parse_workflow_text(&text), Settings::default());
    let capacity = Space {
        bytes: if nodes == 1 { 60 * MB } else { 25 * MB },
        files: 1_000,
    };
    let node = |id| NodeInfo::single_group(ServerId(id), capacity, 1);
    let mut facts = VecDeque::from([Event::nodes_listed((1..=nodes).map(node).collect())]);
    let (mut now, mut asked) = (0, 0);
    while let Some(fact) = facts.pop_front() {
        now += 1;
        let mut actions = Vec::new();
        scheduler.step(Time(now), fact, &mut actions);
        scheduler.check();
        for action in actions {
            match action {
                Action::CreateVolume { id, .. } => {
                    facts.push_back(Event::VolumeCreated { volume: id });
                }
                Action::InspectCache { id, .. } => {
                    asked += 1;
                    facts.push_front(Event::CacheInspected {
                        volume: id,
                        primary_bytes: 20 * MB,
                        refetched_bytes: again_bytes * asked,
                    });
                }
                Action::StartJob { execution, .. } => {
                    let report = successful_report();
                    facts.push_back(Event::JobStarted { execution });
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
    let warnings = scheduler.warnings().iter();
    (
        asked,
        warnings.map(|warning| warning.text.clone()).collect(),
    )
}

#[test]
fn heavy_refetching_is_reported_once() {
    for nodes in [1, 2] {
        let (asked, told) = run_cache_readers(nodes, 3 * MB);
        assert!(asked > 1, "{asked}");
        assert_eq!(told.len(), 1, "{told:?}");
        let says = ["volume 'a'", "a cache of 40.0 MB", "10 % above"];
        assert!(says.iter().all(|word| told[0].contains(word)), "{told:?}");
    }
}

#[test]
fn light_refetching_is_not_reported() {
    for nodes in [1, 2] {
        assert_eq!(run_cache_readers(nodes, MB / 10).1, Vec::<String>::new());
    }
}
