//! How large a volume is assumed to be whose size nobody declared: as space on nodes allows.

use bafs_proto::ids::{RunId, ServerId};
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode};
use bafs_sched::{Action, Event, NodeInfo, Outcome, RunQuota, Scheduler, Settings, Space};
use bafs_sim::simulated_cluster::{Faults, NodeSpec, SimulatedCluster};

use crate::volume_sizes::{parse_text, space_of_megabytes};

fn test_node(id: u64, megabytes_: u64) -> NodeInfo {
    let capacity = Space {
        files: 1_000,
        ..space_of_megabytes(megabytes_)
    };
    NodeInfo::single_group(ServerId(id), capacity, 1)
}

#[test]
fn assumed_sizes_follow_the_largest_node() {
    let text = "job a JOB\njob b JOB\nvolume x scratch unknown\nvolume y scratch unknown\n\
                mount x a /v\nmount y b /v\n";
    let mut scheduler = Scheduler::new(RunId(1), parse_text(text), Settings::default());
    let mut actions = Vec::new();
    let small = vec![test_node(1, 20)];
    scheduler.step(Time(0), Event::nodes_listed(small), &mut actions);
    let Some(Action::CreateVolume { id, size, .. }) = actions.pop() else {
        panic!("the first is measured");
    };
    assert!(size.bytes <= 10_000_000, "two fit: {size:?}");
    let nodes = vec![test_node(1, 20), test_node(2, 200)];
    scheduler.step(Time(1), Event::nodes_listed(nodes), &mut actions);
    let assumed_bytes = scheduler.workflow().volumes[1].size_bytes;
    assert!(
        assumed_bytes > 80_000_000,
        "the large node counts: {assumed_bytes}"
    );

    scheduler.step(Time(2), Event::VolumeCreated { volume: id }, &mut actions);
    let Some(Action::StartJob { execution, .. }) = actions.pop() else {
        panic!("it starts");
    };
    let full = Error::new(ErrorCode::NoSpaceBytes, "a volume is full");
    let report = JobReport {
        outcome: JobOutcome::EnvironmentFailed(full),
        wall_ms: 1,
        cpu_ms: 1,
        memory_bytes_max: 0,
        output_tail: String::new(),
        volumes: Vec::new(),
    };
    actions.clear();
    scheduler.step(Time(3), Event::JobEnded { execution, report }, &mut actions);
    let size = |action: &Action| match action {
        Action::CreateVolume { size, .. } => Some(size.bytes),
        _ => None,
    };
    let sizes: Vec<u64> = actions.iter().filter_map(size).collect();
    assert!(sizes.iter().any(|bytes| *bytes > 80_000_000), "{actions:?}");
}

/// What nobody declared is made as large as space allows: beside the cache of a later job, too.
#[test]
fn assumed_sizes_leave_room_for_later_caches() {
    let text = "volume first cache bafs://home/a 3450 kB files 9\n\
                volume last cache bafs://home/b 4800 kB files 9\nvolume x scratch unknown\n\
                job a JOB\njob b JOB\nparent a child b\nmount x a /x\nmount x b /x\n\
                mount first a /c\nmount last b /c\nextract x out bafs://home/out\n";
    let node = NodeSpec {
        capacity: Space {
            bytes: 7_795_000,
            files: 1_000_000,
        },
        slots: 3,
    };
    let (settings, faults) = (Settings::default(), Faults::default());
    let mut world = SimulatedCluster::new(1, parse_text(text), settings, vec![node], faults);
    world
        .needed_space
        .insert("x".to_owned(), space_of_megabytes(1));
    assert_eq!(world.run_to_end(10_000_000), Outcome::Complete);
}

/// What other runs hold at the moment says nothing of the node.
#[test]
fn assumed_sizes_ignore_space_held_by_other_runs() {
    let text = "job a JOB\nvolume x scratch unknown\nmount x a /v\n";
    let settings = Settings {
        user: Some("alice".to_owned()),
        ..Settings::default()
    };
    let mut scheduler = Scheduler::new(RunId(1), parse_text(text), settings);
    let mut actions = Vec::new();
    let mut seen = test_node(1, 700);
    seen.foreign_space = Space {
        files: 10,
        ..space_of_megabytes(685)
    };
    scheduler.step(
        Time(0),
        Event::nodes_listed(vec![seen.clone()]),
        &mut actions,
    );
    let shares = |space| Event::QuotasChanged {
        quotas: vec![RunQuota {
            server: ServerId(1),
            space,
            slots: 1,
            is_shared: true,
            is_above_fair_share: false,
        }],
    };
    let few = Space {
        files: 900,
        ..space_of_megabytes(15)
    };
    scheduler.step(Time(10), shares(few), &mut actions);
    for now in [20, 10_000, 60_000] {
        scheduler.step(
            Time(now),
            Event::nodes_listed(vec![seen.clone()]),
            &mut actions,
        );
        scheduler.step(Time(now + 1), Event::Tick, &mut actions);
    }
    let made = |actions: &[Action]| {
        let sizes = actions.iter().filter_map(|action| match action {
            Action::CreateVolume { size, .. } => Some(size.bytes),
            _ => None,
        });
        sizes.collect::<Vec<u64>>()
    };
    let none = Vec::<u64>::new();
    assert_eq!(
        made(&actions),
        none,
        "it waits for a part that is worth a measurement"
    );
    assert_eq!(scheduler.outcome(), None);
    let all = Space {
        files: 1_000,
        ..space_of_megabytes(700)
    };
    scheduler.step(Time(70_000), shares(all), &mut actions);
    assert_eq!(made(&actions).len(), 1);
    assert!(made(&actions)[0] > 300_000_000, "{actions:?}");
}
