//! Room for blocks that are not spread evenly over the nodes.

use std::collections::VecDeque;

use bafs_proto::ids::{RunId, ServerId};
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

/// The bytes that each cache gets on four nodes, in the order in which they are made.
fn created_cache_bytes(workflow: Workflow) -> Vec<u64> {
    let mut scheduler = Scheduler::new(RunId(1), workflow, Settings::default());
    let capacity = Space {
        bytes: 25 * MB,
        files: 1_000,
    };
    let node = |id| NodeInfo::single_group(ServerId(id), capacity, 1);
    let mut facts = VecDeque::from([Event::nodes_listed((1..=4).map(node).collect())]);
    let (mut now, mut made) = (0, vec![0; 2]);
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
                    made[volume.as_usize()] += size.bytes;
                    facts.push_back(Event::VolumeCreated { volume: id });
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
    made
}

#[test]
fn cache_is_made_a_tenth_larger() {
    assert_eq!(
        created_cache_bytes(two_cache_workflow()),
        [44 * MB, 44 * MB]
    );
}
