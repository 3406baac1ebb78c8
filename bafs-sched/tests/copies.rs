//! What the first copies of a run teach about their cost, in virtual time.

use bafs_sched::logic::{Decision, Outcome, Receipt, Settings, Space};
use bafs_sched::workflow::parse_workflow;
use bafs_sched::world::{Faults, NodeSpec, World};

const MB: u64 = 1_000_000;

/// 40 pipelines of two jobs that begin together; every other volume is nearly full.
fn receipts(seed: u64) -> Vec<Receipt> {
    let mut text = String::new();
    for p in 0..40 {
        text += &format!(
            "job a{p} {{\nexecutable = x\n}}\njob b{p} {{\nexecutable = x\n}}\n\
             parent a{p} child b{p}\nvolume v{p} scratch 100 MB files 9\n\
             mount v{p} a{p} /v\nmount v{p} b{p} /v ro\n"
        );
    }
    let none = |path: &str| Err(path.to_owned());
    let parsed = parse_workflow("w.bafs", &text, &none).expect("it is right");
    let node = NodeSpec {
        capacity: Space {
            bytes: 10_000 * MB,
            files: 100_000,
        },
        slots: 8,
    };
    let (settings, faults) = (Settings::default(), Faults::default());
    let mut world = World::new(seed, parsed.workflow, settings, vec![node; 5], faults);
    for p in 0..40 {
        let bytes = if p % 2 == 0 { MB } else { 90 * MB };
        world
            .needs
            .insert(format!("v{p}"), Space { bytes, files: 1 });
    }
    assert_eq!(world.run(10_000_000), Outcome::Complete, "seed {seed}");
    let receipts = world.scheduler.receipts().map(|(_, receipt)| receipt);
    receipts.cloned().collect()
}

#[test]
fn one_copy_is_made_to_learn_its_cost_and_not_one_of_each_volume() {
    let mut made = 0;
    for seed in 0..20 {
        let is_made =
            |receipt: &&Receipt| !matches!(receipt.decision, Decision::NotWorth | Decision::NoRoom);
        made += receipts(seed).iter().filter(is_made).count();
    }
    // One that is not of use any more before it ended teaches nothing.
    assert!((20..60).contains(&made), "{made} copies in 20 runs");
}

#[test]
fn a_copy_is_expected_to_take_as_long_as_what_the_volume_holds() {
    for seed in 0..20 {
        let costs: Vec<u64> = receipts(seed).iter().filter_map(|r| r.copy_ms).collect();
        let (least, most) = (costs.iter().min(), costs.iter().max());
        let (least, most) = (least.expect("some"), most.expect("some"));
        assert!(*most > 20 * least, "seed {seed}: {least} ms to {most} ms");
    }
}
