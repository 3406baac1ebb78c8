//! The rules of an order or a strategy, as the core keeps them.

use std::collections::BTreeSet;

use bafs_proto::ids::{RunId, ServerId};
use bafs_proto::time::Time;
use bafs_sched::logic::{
    Action, Event, NodeSeen, NodeShare, Order, Rules, Scheduler, Settings, Space,
};
use bafs_sched::workflow::parse_workflow;

const MB: u64 = 1_000_000;

/// A run that shares its nodes knows them before it knows what they keep for it. The rules must
/// outlive that moment: here that only one batch volume may exist.
#[test]
fn rules_are_kept_until_the_nodes_have_said_what_they_keep() {
    let mut text = String::new();
    for (job, volume) in [("a", "v"), ("b", "v"), ("c", "w"), ("d", "w")] {
        text += &format!("job {job} {{\nexecutable = x\n}}\nmount {volume} {job} /batch\n");
    }
    text += "volume v cache bafs://home/v 10 MB\nvolume w cache bafs://home/w 10 MB\n";
    let none = |_: &str| Err("no files".to_owned());
    let parsed = parse_workflow("rules.bafs", &text, &none).expect("a workflow");
    let settings = Settings {
        user: Some("me".to_owned()),
        rules: Some(Rules {
            order: Order::BreadthFirst,
            pipelines_max: 4,
            is_in_parts: false,
            batch_volumes_max: 1,
        }),
        ..Settings::default()
    };
    let mut scheduler = Scheduler::new(RunId(1), parsed.workflow, settings);
    let mut asked = Vec::new();
    let capacity = Space {
        bytes: 60 * MB,
        files: 100_000,
    };
    let nodes = [1, 2].map(|id| NodeSeen {
        id: ServerId(id),
        name: format!("n{id}"),
        address: String::new(),
        group: "default".to_owned(),
        capacity,
        foreign: Space::ZERO,
        slots: 2,
    });
    let seen = Event::seen(nodes.to_vec());
    scheduler.step(Time(0), seen, &mut asked);
    for now in [1, 10, 100, 900] {
        scheduler.step(Time(now), Event::Tick, &mut asked);
    }
    assert!(asked.is_empty(), "nothing is kept for it yet: {asked:?}");
    let shares = nodes.map(|node| NodeShare {
        server: node.id,
        space: capacity,
        slots: 2,
        is_shared: false,
        is_over: false,
    });
    let answered = Event::SharesSeen {
        shares: shares.to_vec(),
    };
    scheduler.step(Time(1_000), answered, &mut asked);
    let made = asked.iter().filter_map(|action| match action {
        Action::CreateVolume { volume, .. } => Some(*volume),
        _ => None,
    });
    let made: BTreeSet<_> = made.collect();
    assert_eq!(made.len(), 1, "{asked:?}");
}
