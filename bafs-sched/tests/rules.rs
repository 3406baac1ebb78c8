//! The rules of an order or a strategy, as the core keeps them.

use bafs_proto::ids::{RunId, ServerId};
use bafs_proto::time::Time;
use bafs_sched::logic::{
    Action, Event, NodeSeen, NodeShare, Order, Rules, Scheduler, Settings, Space,
};
use bafs_sched::workflow::parse_workflow;

const MB: u64 = 1_000_000;

/// A run that shares its nodes knows them before it knows what they keep for it. The rules must
/// outlive that moment: under them a cache takes no more than its size.
#[test]
fn rules_are_kept_until_the_nodes_have_said_what_they_keep() {
    let text = "volume b cache bafs://home/b 90 MB\n\
                job a {\nexecutable = x\n}\nmount b a /b\nvolume p scratch 1 MB\nmount p a /p\n\
                job c {\nexecutable = x\n}\nmount b c /b\nvolume q scratch 1 MB\nmount q c /q\n";
    let none = |_: &str| Err("no files".to_owned());
    let parsed = parse_workflow("rules.bafs", text, &none).expect("a workflow");
    let settings = Settings {
        user: Some("me".to_owned()),
        rules: Rules::in_order(Order::BreadthFirst),
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
        slots: 1,
    });
    let seen = Event::ServersSeen {
        nodes: nodes.to_vec(),
    };
    scheduler.step(Time(0), seen, &mut asked);
    for now in [1, 10, 100, 900] {
        scheduler.step(Time(now), Event::Tick, &mut asked);
    }
    assert!(asked.is_empty(), "nothing is kept for it yet: {asked:?}");
    let shares = nodes.map(|node| NodeShare {
        server: node.id,
        space: capacity,
        slots: 1,
        is_shared: false,
        is_over: false,
    });
    let answered = Event::SharesSeen {
        shares: shares.to_vec(),
    };
    scheduler.step(Time(1_000), answered, &mut asked);
    let taken = asked.iter().map(|action| match action {
        Action::CreateVolume { size, .. } if size.bytes > MB => size.bytes,
        _ => 0,
    });
    let taken: u64 = taken.sum();
    assert!((90 * MB..91 * MB).contains(&taken), "{taken}: {asked:?}");
}
