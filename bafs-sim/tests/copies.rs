//! What the first copies of a run teach about their cost, in virtual time; and what an older copy
//! of a volume is good for while a newer one is made.

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_proto::message::JobOutcome;
use bafs_proto::time::Time;
use bafs_sched::{Action, CopyDecision, CopyOutcome, Event, NodeInfo, Outcome, Settings, Space};
use bafs_sim::simulated_cluster::{Faults, NodeSpec, SimulatedCluster, parse_workflow_text};

use super::copy_scenario::CopyScenario;

const MB: u64 = 1_000_000;

/// 40 pipelines of two jobs that begin together; every other volume is nearly full.
fn pair_copy_decisions(seed: u64) -> Vec<CopyDecision> {
    let mut text = String::new();
    for p in 0..40 {
        text += &format!(
            "job a{p} {{\nexecutable = x\n}}\njob b{p} {{\nexecutable = x\n}}\n\
             parent a{p} child b{p}\nvolume v{p} scratch 100 MB files 9\n\
             mount v{p} a{p} /v\nmount v{p} b{p} /v ro\n"
        );
    }
    let node = NodeSpec {
        capacity: Space {
            bytes: 10_000 * MB,
            files: 100_000,
        },
        slots: 8,
    };
    let (settings, faults) = (Settings::default(), Faults::default());
    let mut world = SimulatedCluster::new(
        seed,
        parse_workflow_text(&text),
        settings,
        vec![node; 5],
        faults,
    );
    for p in 0..40 {
        let bytes = if p % 2 == 0 { MB } else { 90 * MB };
        world
            .needed_space
            .insert(format!("v{p}"), Space { bytes, files: 1 });
    }
    assert_eq!(
        world.run_to_end(10_000_000),
        Outcome::Complete,
        "seed {seed}"
    );
    let receipts = world.scheduler.copy_decisions().map(|(_, receipt)| receipt);
    receipts.cloned().collect()
}

#[test]
fn one_copy_per_run_teaches_the_copy_cost() {
    let mut made = 0;
    for seed in 0..20 {
        let is_made = |receipt: &&CopyDecision| {
            !matches!(
                receipt.outcome,
                CopyOutcome::NotWorthwhile | CopyOutcome::NoRoom
            )
        };
        made += pair_copy_decisions(seed).iter().filter(is_made).count();
    }
    // One that is not of use any more before it ended teaches nothing.
    assert!((20..60).contains(&made), "{made} copies in 20 runs");
}

#[test]
fn copy_estimate_follows_the_held_bytes() {
    for seed in 0..20 {
        let costs: Vec<u64> = pair_copy_decisions(seed)
            .iter()
            .filter_map(|r| r.copy_ms)
            .collect();
        let (least, most) = (costs.iter().min(), costs.iter().max());
        let (least, most) = (least.expect("some"), most.expect("some"));
        assert!(*most > 20 * least, "seed {seed}: {least} ms to {most} ms");
    }
}

#[test]
fn older_copy_stays_until_a_newer_one_completes() {
    let mut chain = CopyScenario::new("always", 100);
    chain.end_job(5 * MB);
    let (first, target, base) = chain.requested_copy();
    assert_eq!(base, None);
    chain.complete_copy(first, 5 * MB);
    chain.end_job(6 * MB);
    let (second, again, base) = chain.requested_copy();
    assert_eq!((again, base), (target, Some(first)), "made from the older");
    assert!(!chain.has_deleted(first), "{:?}", chain.actions);
    let mut lost = chain.scheduler.clone();
    chain.complete_copy(second, MB);
    assert!(chain.has_deleted(first), "{:?}", chain.actions);
    let CopyOutcome::Copied(on, moved) = chain.last_decision().outcome else {
        panic!("{:?}", chain.last_decision());
    };
    assert_eq!((on, moved.received_bytes), (target, MB));
    assert_eq!(moved.held_bytes, 6 * MB);

    // Had the source died before that, only the second job would run again, on the older copy.
    let source = ServerId(3 - target.0);
    let (mut told, server) = (Vec::new(), source);
    lost.step(Time(chain.now), Event::ServerSilent { server }, &mut told);
    lost.check();
    chain.actions = told;
    let (_, job, server, volume) = chain.started_job();
    assert_eq!((job.as_str(), server, volume), ("b", target, first));
    assert!(chain.has_deleted(second), "{:?}", chain.actions);
}

#[test]
fn every_copy_decision_is_recorded_with_its_result() {
    let mut chain = CopyScenario::new("always", 100);
    chain.end_job(5 * MB);
    let (first, target, _) = chain.requested_copy();
    chain.complete_copy(first, 5 * MB);
    chain.end_job(6 * MB);
    let second = chain.requested_copy().0;
    chain.complete_copy(second, MB);
    let server = ServerId(3 - target.0);
    chain.step(Event::ServerSilent { server });
    let receipts = chain.scheduler.copy_decisions();
    let decisions: Vec<_> = receipts.map(|(_, receipt)| receipt.outcome).collect();
    let [
        CopyOutcome::Replaced(moved),
        CopyOutcome::UsedForRecovery(saved_ms),
    ] = decisions[..]
    else {
        panic!("{decisions:?} {:?}", chain.actions);
    };
    assert_eq!((moved.held_bytes, moved.received_bytes), (5 * MB, 5 * MB));
    assert_eq!(saved_ms, 120_000);
}

#[test]
fn outdated_copy_counts_as_unused() {
    let mut chain = CopyScenario::new("always", 15);
    chain.end_job(5 * MB);
    let (first, ..) = chain.requested_copy();
    chain.complete_copy(first, 5 * MB);
    chain.end_job(6 * MB);
    chain.end_job(6 * MB);
    let receipts = chain.scheduler.copy_decisions();
    let decisions: Vec<_> = receipts.map(|(_, receipt)| receipt.outcome).collect();
    let [CopyOutcome::Unused(moved), CopyOutcome::NoRoom] = decisions[..] else {
        panic!("{decisions:?}");
    };
    assert_eq!(moved.received_bytes, 5 * MB);
}

#[test]
fn copy_lost_while_being_replaced_counts_as_unused() {
    let mut chain = CopyScenario::new("always", 100);
    chain.end_job(5 * MB);
    let (first, target, _) = chain.requested_copy();
    chain.complete_copy(first, 5 * MB);
    chain.end_job(6 * MB);
    chain.requested_copy();
    let lost = vec![first];
    chain.step(Event::VolumesProbed {
        server: target,
        lost,
    });
    let receipts = chain.scheduler.copy_decisions();
    let decisions: Vec<_> = receipts.map(|(_, receipt)| receipt.outcome).collect();
    let [CopyOutcome::Unused(moved), CopyOutcome::Copying(_)] = decisions[..] else {
        panic!("{decisions:?}");
    };
    assert_eq!(moved.received_bytes, 5 * MB);
}

/// What the first copy of a run, of which nobody knows what it costs, holds at most.
#[test]
fn first_copy_costs_little_of_the_remaining_run() {
    let first = |held_bytes| {
        let mut chain = CopyScenario::with_volume("cost-benefit", 1_000, 100_000);
        chain.end_job(held_bytes);
        let copies = chain.actions.iter();
        copies
            .filter(|action| matches!(action, Action::CopyVolume { .. }))
            .count()
    };
    // Two jobs of a minute are left: 1.2 s, at half of a gigabit per second.
    assert_eq!(
        [10 * MB, 70 * MB, 80 * MB, 1_000 * MB].map(first),
        [1, 1, 0, 0]
    );
}

#[test]
fn failed_copy_leaves_the_older_one() {
    let mut chain = CopyScenario::new("always", 100);
    chain.end_job(5 * MB);
    let (first, target, _) = chain.requested_copy();
    chain.complete_copy(first, 5 * MB);
    chain.end_job(6 * MB);
    let volume = chain.requested_copy().0;
    let error = bafs_proto::Error::new(bafs_proto::ErrorCode::DigestMismatch, "damaged");
    chain.step(Event::VolumeCreateFailed { volume, error });
    assert_eq!(chain.started_job().1, "c", "it need not wait");
    assert!(!chain.has_deleted(first));
    let server = ServerId(3 - target.0);
    chain.step(Event::ServerSilent { server });
    let (_, job, _, volume) = chain.started_job();
    assert_eq!((job.as_str(), volume), ("b", first));
}

#[test]
fn older_copy_stays_without_room_for_two() {
    let mut chain = CopyScenario::new("always", 15);
    chain.end_job(5 * MB);
    let (first, ..) = chain.requested_copy();
    chain.complete_copy(first, 5 * MB);
    chain.end_job(6 * MB);
    assert_eq!(chain.last_decision().outcome, CopyOutcome::NoRoom);
    assert!(!chain.has_deleted(first), "{:?}", chain.actions);
    assert_eq!(chain.started_job().1, "c");
}

#[test]
fn enlarged_volume_is_not_restored_from_a_copy() {
    let mut chain = CopyScenario::new("always", 100);
    chain.end_job(9 * MB);
    let (first, ..) = chain.requested_copy();
    chain.complete_copy(first, 9 * MB);
    let (execution, ..) = chain.started_job();
    chain.end_execution(execution, JobOutcome::Exited(1), 10 * MB, 1);
    let sizes = chain.actions.iter().filter_map(|action| match action {
        Action::CreateVolume { size, .. } => Some(size.bytes),
        _ => None,
    });
    assert_eq!(sizes.collect::<Vec<_>>(), [20 * MB], "{:?}", chain.actions);
    assert!(chain.has_deleted(first));
}

#[test]
fn further_copy_is_weighed_by_the_work_since() {
    let mut chain = CopyScenario::new("always", 100);
    chain.end_job(5 * MB);
    assert_eq!(chain.last_decision().redo_ms, 60_000);
    let (first, ..) = chain.requested_copy();
    chain.now += 500;
    chain.complete_copy(first, 5 * MB);
    chain.end_job(5 * MB);
    let receipt = chain.last_decision();
    assert_eq!((receipt.redo_ms, receipt.has_base_copy), (60_000, true));
    assert_eq!(receipt.copy_ms, Some(1_500), "as long as a whole one");
    let (second, ..) = chain.requested_copy();
    chain.complete_copy(second, 10);
    let CopyOutcome::Copied(_, moved) = chain.last_decision().outcome else {
        panic!("{:?}", chain.last_decision());
    };
    assert_eq!((moved.duration_ms, moved.received_bytes), (1_000, 10));
}

/// Pipelines of two jobs; what mounts the second one may write.
fn job_pairs(volumes: &[&str], megabytes: u64, second: &str) -> String {
    let text = volumes.iter().map(|v| {
        format!(
            "volume {v} scratch {megabytes} MB files 9\n\
             job {v}0 {{\nexecutable = x\n}}\njob {v}1 {{\nexecutable = x\n}}\n\
             mount {v} {v}0 /v\nmount {v} {v}1 /v{second}\nparent {v}0 child {v}1\n"
        )
    });
    text.collect()
}

/// Else the stage would wait for as long as another pipeline's job takes.
#[test]
fn short_copy_keeps_a_slot_for_its_level() {
    let begins = |megabytes| {
        let text = job_pairs(&["v", "w", "x"], megabytes, "");
        let mut chain = CopyScenario::with_workflow(&text, "always", 10_000);
        let first = chain.run_all_jobs()[0];
        chain.end_execution(first, JobOutcome::Exited(0), megabytes * MB, 0);
        let (copy, ..) = chain.requested_copy();
        let others = chain.created_volumes().len();
        chain.complete_copy(copy, megabytes * MB);
        assert!(others > 0 || chain.started_job().1 == "v1");
        others
    };
    // A job takes a minute; copying at half of a gigabit per second 0.2 s, and 16 s.
    assert_eq!([10, 1_000].map(begins), [0, 1]);
}

#[test]
fn first_copy_cost_reweighs_volumes_without_copies() {
    let text = job_pairs(&["v", "w"], 10, " ro");
    let mut chain = CopyScenario::with_workflow(&text, "cost-benefit", 100);
    let jobs = chain.run_all_jobs();
    chain.end_execution(jobs[0], JobOutcome::Exited(0), 5 * MB, 0);
    let (copy, ..) = chain.requested_copy();
    chain.end_execution(jobs[1], JobOutcome::Exited(0), 5 * MB, 0);
    let copy_ms = chain.last_decision().copy_ms;
    assert_eq!(copy_ms, None, "one copy at a time until then");
    let before = chain.scheduler.copy_decisions().count();
    chain.complete_copy(copy, 5 * MB);
    assert_eq!(chain.scheduler.copy_decisions().count(), before + 1);
    assert!(
        chain.last_decision().copy_ms.is_some(),
        "{:?}",
        chain.last_decision()
    );
}

/// Seconds until a copy that never ends is let go, and the stage that waits for it goes on.
fn seconds_until_abandoned(chain: &mut CopyScenario, copy: VolumeId) -> u64 {
    let since = chain.now;
    while !chain.has_deleted(copy) {
        chain.step(Event::Tick);
        assert!(chain.now < since + 60_000, "it waits without end");
    }
    assert!(matches!(chain.last_decision().outcome, CopyOutcome::Failed));
    (chain.now - since) / 1_000
}

/// Its node is dead, and that is known only seconds later.
#[test]
fn overdue_copy_is_abandoned_when_a_level_waits() {
    let mut chain = CopyScenario::new("always", 100);
    chain.end_job(5 * MB);
    let (copy, ..) = chain.requested_copy();
    assert_eq!(seconds_until_abandoned(&mut chain, copy), 2);
    assert_eq!(chain.started_job().1, "b");
    // What is expected may be wrong: the next one, to the only node there is, has twice as long.
    chain.end_job(5 * MB);
    let (copy, ..) = chain.requested_copy();
    assert_eq!(seconds_until_abandoned(&mut chain, copy), 4);
    assert_eq!(chain.started_job().1, "c");
}

#[test]
fn copy_without_waiters_has_no_time_limit() {
    let text = job_pairs(&["v"], 10, " ro");
    let mut chain = CopyScenario::with_workflow(&text, "always", 100);
    let job = chain.run_all_jobs()[0];
    chain.end_execution(job, JobOutcome::Exited(0), 5 * MB, 0);
    let (copy, ..) = chain.requested_copy();
    for _ in 0..30 {
        let at = chain.scheduler.next_timer().expect("it is looked at");
        chain.now = at.0 - 1_000;
        chain.step(Event::Tick);
        assert!(!chain.has_deleted(copy), "{:?}", chain.actions);
    }
    assert!(chain.now > 86_400_000, "30 looks in {} ms", chain.now);
    chain.complete_copy(copy, 5 * MB);
    assert!(matches!(
        chain.last_decision().outcome,
        CopyOutcome::Copied(..)
    ));
}

/// The first copy is complete, and its node is lost and listed again; the copy, and its node.
fn return_copy_node(chain: &mut CopyScenario) -> (VolumeId, ServerId) {
    chain.end_job(5 * MB);
    let (copy, server, _) = chain.requested_copy();
    chain.complete_copy(copy, 5 * MB);
    chain.step(Event::ServerSilent { server });
    let capacity = Space {
        bytes: 100 * MB,
        files: 1_000,
    };
    let node = NodeInfo::single_group(server, capacity, 1);
    chain.step(Event::nodes_listed(vec![node]));
    (copy, server)
}

#[test]
fn copy_on_a_returned_node_is_used_again() {
    let mut chain = CopyScenario::new("always", 100);
    let (copy, server) = return_copy_node(&mut chain);
    let volumes = vec![copy];
    let find = Action::FindVolumes { server, volumes };
    assert!(chain.actions.contains(&find), "{:?}", chain.actions);
    let found = vec![copy];
    chain.step(Event::VolumesFound { server, found });
    assert!(!chain.has_deleted(copy), "{:?}", chain.actions);
    let source = ServerId(3 - server.0);
    chain.step(Event::ServerSilent { server: source });
    chain.step_after_pause();
    let (_, job, on, volume) = chain.started_job();
    assert_eq!((job.as_str(), on, volume), ("b", server, copy));
    let outcome = chain.last_decision().outcome;
    assert_eq!(outcome, CopyOutcome::UsedForRecovery(60_000));
}

#[test]
fn copy_takes_the_place_of_its_absent_volume() {
    let mut chain = CopyScenario::new("always", 100);
    let (copy, server) = return_copy_node(&mut chain);
    let source = ServerId(3 - server.0);
    chain.step(Event::ServerSilent { server: source });
    let found = vec![copy];
    chain.step(Event::VolumesFound { server, found });
    let (_, job, on, volume) = chain.started_job();
    assert_eq!((job.as_str(), on, volume), ("b", server, copy));
}

#[test]
fn outdated_copy_on_a_returned_node_is_deleted() {
    let mut chain = CopyScenario::new("always", 100);
    chain.end_job(5 * MB);
    let (copy, server, _) = chain.requested_copy();
    chain.complete_copy(copy, 5 * MB);
    chain.step(Event::ServerSilent { server });
    let source = ServerId(3 - server.0);
    // The job that it has runs again, and ends.
    chain.step(Event::ServerSilent { server: source });
    let capacity = Space {
        bytes: 100 * MB,
        files: 1_000,
    };
    let node = NodeInfo::single_group(ServerId(3), capacity, 1);
    chain.step(Event::nodes_listed(vec![node]));
    let volume = chain.created_volumes()[0];
    chain.step(Event::VolumeCreated { volume });
    chain.end_job(5 * MB);
    let node = NodeInfo::single_group(server, capacity, 1);
    chain.step(Event::nodes_listed(vec![node]));
    assert!(chain.has_deleted(copy), "{:?}", chain.actions);
}
