//! The rules of an order or a strategy, as the core keeps them.

use std::collections::BTreeSet;

use bafs_proto::ids::{RunId, ServerId};
use bafs_proto::time::Time;
use bafs_sched::{
    Action, AllocationRules, Event, JobStartOrder, NodeDeparture, NodeInfo, RunQuota, Scheduler,
    Settings, Space,
};
use bafs_workflow::parse_workflow;

const MB: u64 = 1_000_000;

/// A run that shares its nodes knows them before it knows what they keep for it. The rules must
/// outlive that moment: here that only one batch volume may exist.
#[test]
fn strategy_rules_hold_before_node_quotas_are_known() {
    let mut text = String::new();
    for (job, volume) in [("a", "v"), ("b", "v"), ("c", "w"), ("d", "w")] {
        text += &format!("job {job} {{\nexecutable = x\n}}\nmount {volume} {job} /batch\n");
    }
    text += "volume v cache bafs://home/v 10 MB\nvolume w cache bafs://home/w 10 MB\n";
    let none = |_: &str| Err("no files".to_owned());
    let parsed = parse_workflow("rules.bafs", &text, &none).expect("a workflow");
    let settings = Settings {
        user: Some("me".to_owned()),
        allocation_rules: Some(AllocationRules {
            order: JobStartOrder::BreadthFirst,
            pipelines_max: 4,
            has_sequential_parts: false,
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
    let nodes = [1, 2].map(|id| NodeInfo {
        id: ServerId(id),
        name: format!("n{id}"),
        address: String::new(),
        group: "default".to_owned(),
        capacity,
        foreign_space: Space::ZERO,
        slots: 2,
        departure: NodeDeparture::default(),
        memory_bytes: 0,
        temporary_bytes: 0,
        cached: Vec::new(),
    });
    let seen = Event::nodes_listed(nodes.to_vec());
    scheduler.step(Time(0), seen, &mut asked);
    for now in [1, 10, 100, 900] {
        scheduler.step(Time(now), Event::Tick, &mut asked);
    }
    assert!(asked.is_empty(), "nothing is kept for it yet: {asked:?}");
    let shares = nodes.map(|node| RunQuota {
        server: node.id,
        space: capacity,
        slots: 2,
        is_shared: false,
        is_above_fair_share: false,
    });
    let answered = Event::QuotasChanged {
        quotas: shares.to_vec(),
    };
    scheduler.step(Time(1_000), answered, &mut asked);
    let made = asked.iter().filter_map(|action| match action {
        Action::CreateVolume { volume, .. } => Some(*volume),
        _ => None,
    });
    let made: BTreeSet<_> = made.collect();
    assert_eq!(made.len(), 1, "{asked:?}");
}

/// The last of the others has ended, but its volumes still fill the node. Nobody else has anything
/// any more, and this run has waited for as long as it would wait alone.
#[test]
fn run_waits_for_space_released_by_ended_runs() {
    let text = "job a {\nexecutable = x\n}\nvolume v scratch 5 MB\nmount v a /v\n";
    let none = |_: &str| Err("no files".to_owned());
    let parsed = parse_workflow("late.bafs", text, &none).expect("a workflow");
    let settings = Settings {
        user: Some("me".to_owned()),
        ..Settings::default()
    };
    let mut scheduler = Scheduler::new(RunId(1), parsed.workflow, settings);
    let capacity = |bytes| Space {
        bytes,
        files: 100_000,
    };
    let server = ServerId(1);
    let mut asked = Vec::new();
    let mut now = 0;
    let mut after = |ms: u64, bytes, is_shared, asked: &mut Vec<Action>| {
        let share = RunQuota {
            server,
            space: capacity(bytes),
            slots: 1,
            is_shared,
            is_above_fair_share: false,
        };
        let node = NodeInfo {
            id: server,
            name: "n1".to_owned(),
            address: String::new(),
            group: "default".to_owned(),
            capacity: capacity(20 * MB),
            foreign_space: Space::ZERO,
            slots: 1,
            departure: NodeDeparture::default(),
            memory_bytes: 0,
            temporary_bytes: 0,
            cached: Vec::new(),
        };
        let shares = Event::QuotasChanged {
            quotas: vec![share],
        };
        for event in [Event::nodes_listed(vec![node]), shares] {
            scheduler.step(Time(now), event, asked);
        }
        for _ in 0..ms / 100 {
            now += 100;
            scheduler.step(Time(now), Event::Tick, asked);
        }
        scheduler.outcome().is_some()
    };
    // Just short of what it waits before it would give up anything of its own.
    for _ in 0..24 {
        assert!(!after(1_000, 4 * MB, true, &mut asked), "it waits its turn");
    }
    for _ in 0..20 {
        assert!(!after(1_000, 4 * MB, false, &mut asked), "they are gone");
    }
    after(1_000, 20 * MB, false, &mut asked);
    let is_made = |action: &Action| matches!(action, Action::CreateVolume { .. });
    assert!(asked.iter().any(is_made), "{asked:?}");
}
