//! What the planner's model counts once: a database that several stages read, and pipelines that
//! fail again and again. Simulates nothing.

#![expect(
    clippy::unwrap_used,
    reason = "a test stops at the unexpected, in functions beside tests too"
)]

use bafs_sim::planner::{
    CanonicalWorkload, Environment, NodeClass, Shape, Strategy, StrategyAllocation, predict_time,
};

fn thesis_nodes() -> Environment {
    Environment::parse(include_str!("../../examples/environments/thesis.toml")).unwrap()
}

/// A pipeline that fails more often than not is repeated until it does not.
#[test]
fn often_failing_pipeline_is_predicted_to_finish() {
    let text = "width=1,depth=1,batch=0B,private=0B,run=5000s";
    let shape = CanonicalWorkload::parse(text).unwrap().shape();
    let seconds = |mtbf_s| {
        let environment = Environment {
            nodes: vec![NodeClass::new(1, 1, 1_000_000)],
            mtbf_s: Some(mtbf_s),
            ..thesis_nodes()
        };
        predict_time(Strategy::All, &shape, &environment)
    };
    assert_eq!(seconds(20_000), Some(5_000.0));
    // Five of nine times again.
    assert!((seconds(9_000).unwrap() - 11_250.0).abs() < 1.0);
    assert!((seconds(5_050).unwrap() - 505_000.0).abs() < 1.0);
    assert_eq!(seconds(5_000), None, "it fails each time");
    for mtbf_s in 5_001..10_000 {
        assert!(seconds(mtbf_s) >= seconds(mtbf_s + 1), "{mtbf_s}");
    }
}

/// Of one database that every stage reads there is one, which no stage has to fetch again or to
/// wait for.
#[test]
fn batch_volume_of_all_levels_counts_once() {
    let mut text = "volume db cache bafs://home/db 100 GB\nfor i in 1..350\n".to_owned();
    for at in 0..6 {
        text += &format!("volume v{at}_$(i) scratch 500 MB\n");
    }
    for at in 0..5 {
        text += &format!("job j{at}_$(i) {{\nexecutable = x\nruntime = 5000 s\n}}\n");
        text += &format!("mount db j{at}_$(i) /db\nmount v{at}_$(i) j{at}_$(i) /in\n");
        text += &format!("mount v{}_$(i) j{at}_$(i) /out\n", at + 1);
        if at > 0 {
            text += &format!("parent j{}_$(i) child j{at}_$(i)\n", at - 1);
        }
    }
    let none = |_: &str| Err("no files".to_owned());
    let parsed = bafs_workflow::parse_workflow("w.bafs", &(text + "end\n"), &none);
    let shape = Shape::from_workflow(&parsed.unwrap().workflow, 0.1);
    assert_eq!(shape.batch_total_bytes, shape.batch_bytes);
    let minimal = Strategy::Minimal.plan_allocation(&shape, &thesis_nodes());
    let parts = (minimal.concurrency, minimal.cycles);
    assert_eq!(parts, (150, 3));
    assert_eq!((minimal.refetches, minimal.barriers), (0, 2));
}
