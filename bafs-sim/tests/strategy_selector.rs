//! The strategy selector in a scheduler: what a run followed, it follows again when it is
//! recovered.

use bafs_proto::ids::{RunId, ServerId};
use bafs_proto::time::Time;
use bafs_sched::{
    Action, Event, NodeInfo, NullSelector, Scheduler, Settings, Space, StrategySelector,
    StrategySelectorConfig,
};
use bafs_sim::simulated_cluster::parse_workflow_text;
use bafs_sim::strategy_selector::ModelSelector;

const MB: u64 = 1_000_000;

/// Twenty pipelines of two jobs, whose data do not fit on one node all at once.
fn pipelines() -> String {
    let mut text = "volume b bafs://home/b 50 MB\n".to_owned();
    for i in 0..20 {
        text += &format!(
            "volume p{i} scratch 10 MB\njob a{i} {{\nexecutable = x\nruntime = 60 s\n}}\n\
             job c{i} {{\nexecutable = x\nruntime = 60 s\n}}\nparent a{i} child c{i}\n\
             mount b a{i} /b\nmount p{i} a{i} /p\nmount p{i} c{i} /p\n\
             extract p{i} out bafs://home/out{i}\n"
        );
    }
    text
}

/// The actions of a scheduler that sees one node, then two, and what it is then.
fn replay(selector: &dyn StrategySelector) -> (Vec<Action>, Scheduler) {
    let settings = Settings {
        strategy_selector: Some(StrategySelectorConfig {
            home_bytes_per_s: MB,
            local_bytes_per_s: 10 * MB,
            mtbf_s: None,
            restart_s: 60,
            variability_ppm: 0,
            simulated_plan: None,
        }),
        ..Settings::default()
    };
    let workflow = parse_workflow_text(&pipelines());
    let mut scheduler = Scheduler::with_strategy_selector(RunId(1), workflow, settings, selector);
    let node = |id| {
        let space = Space {
            bytes: 150 * MB,
            files: 1_000_000,
        };
        NodeInfo::single_group(ServerId(id), space, 4)
    };
    let mut actions = Vec::new();
    for (at, nodes) in [(0, vec![node(1)]), (10_000, vec![node(1), node(2)])] {
        scheduler.step(Time(at), Event::nodes_listed(nodes), &mut actions);
    }
    (actions, scheduler)
}

#[test]
fn recovery_with_its_selector_decides_alike() {
    let (actions, scheduler) = replay(&ModelSelector);
    let first = scheduler.strategy_changes().first().expect("a strategy");
    assert!(first.strategy.is_some(), "{}", first.reason);
    let (again, recovered) = replay(&ModelSelector);
    assert_eq!(again, actions);
    assert!(recovered == scheduler, "the replay differs");
}

#[test]
fn null_selector_follows_no_strategy() {
    let (_, scheduler) = replay(&NullSelector);
    assert!(scheduler.strategy_changes().is_empty());
}
