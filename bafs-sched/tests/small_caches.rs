//! Cooperative caches on nodes that can have only a small part of one each: all of them run jobs.

use std::collections::BTreeSet;

use bafs_proto::ids::{RunId, ServerId};
use bafs_proto::time::Time;
use bafs_sched::{Action, Event, NodeInfo, Scheduler, Settings, Space};
use bafs_workflow::{Workflow, parse_workflow};

const NODES: u64 = 8;

/// Jobs that all read a cache, each with a scratch volume.
fn cache_and_scratch_jobs(jobs: u32, cache: &str, scratch: &str) -> Workflow {
    let mut text = format!("volume c cache bafs://home/data {cache} files 10\n");
    for job in 0..jobs {
        text += &format!(
            "job j{job} {{\n  executable = x\n}}\nvolume v{job} scratch {scratch} files 10\n\
             mount c j{job} /c\nmount v{job} j{job} /v\nextract v{job} out bafs://home/out.{job}\n"
        );
    }
    let none = |path: &str| Err(path.to_owned());
    parse_workflow("w.bafs", &text, &none)
        .expect("it is right")
        .workflow
}

fn test_nodes(count: u64) -> Vec<NodeInfo> {
    let capacity = Space {
        bytes: 2_600_000,
        files: 1_000,
    };
    let node = |id| NodeInfo::single_group(ServerId(id), capacity, 1);
    (1..=count).map(node).collect()
}

/// The node of each job that starts when these nodes are seen, one listing after the other.
fn start_nodes(workflow: Workflow, listings: Vec<Vec<NodeInfo>>) -> Vec<ServerId> {
    let mut scheduler = Scheduler::new(RunId(1), workflow, Settings::default());
    let (mut starts, mut now) = (Vec::new(), 0);
    for nodes in listings {
        let mut due = vec![Event::nodes_listed(nodes)];
        while let Some(event) = due.pop() {
            now += 1;
            let mut actions = Vec::new();
            scheduler.step(Time(now), event, &mut actions);
            for action in actions {
                match action {
                    Action::CreateVolume { id, .. } => {
                        due.push(Event::VolumeCreated { volume: id });
                    }
                    Action::StartJob {
                        execution, server, ..
                    } => {
                        starts.push(server);
                        due.push(Event::JobStarted { execution });
                    }
                    _ => {}
                }
            }
        }
    }
    starts
}

/// How many nodes run jobs when so many are seen, one after the other.
fn count_used_nodes(listings: &[u64]) -> u64 {
    let listings = listings.iter().map(|count| test_nodes(*count)).collect();
    let starts = start_nodes(cache_and_scratch_jobs(32, "4 MB", "100 kB"), listings);
    starts.iter().collect::<BTreeSet<_>>().len() as u64
}

/// Two slots each, and room for a quarter of a cache that all jobs read beside two scratch volumes.
fn two_slot_nodes(ids: std::ops::RangeInclusive<u64>) -> Vec<NodeInfo> {
    let mut nodes = test_nodes(*ids.end());
    nodes.retain(|node| ids.contains(&node.id.0));
    for node in &mut nodes {
        node.slots = 2;
        node.capacity.bytes = 18_000_000;
    }
    nodes
}

/// The batch workload of Fig 3.4: were one of its pipelines left over, it would bring all batch
/// data from home once more.
#[test]
fn later_node_keeps_room_for_every_slot() {
    let listings = vec![two_slot_nodes(1..=3), two_slot_nodes(1..=4)];
    let started = start_nodes(cache_and_scratch_jobs(8, "48 MB", "130 kB"), listings).len();
    assert_eq!(started, 8, "one for each slot");
}

#[test]
fn nodes_with_small_cache_partitions_run_readers() {
    assert_eq!(count_used_nodes(&[NODES]), NODES);
}

#[test]
fn later_nodes_with_small_partitions_run_readers() {
    assert_eq!(count_used_nodes(&[2, NODES]), NODES);
}

/// Room for two jobs in three slots, beside a node that only stores and could have all of a cache.
#[test]
fn cache_lies_on_reader_nodes_beside_storage_nodes() {
    let mut seen = test_nodes(2);
    seen[0].slots = 3;
    seen[1].slots = 0;
    seen[1].capacity.bytes = 100_000_000;
    let started = start_nodes(cache_and_scratch_jobs(3, "4 MB", "1 MB"), vec![seen]);
    assert_eq!(started, [ServerId(1); 2]);
}
