//! What the first copies of a run teach about their cost, in virtual time; and what an older copy
//! of a volume is good for while a newer one is made. What copies gain where nodes fail, as the
//! simulator finds it.

use std::ops::RangeInclusive;

use bafs_proto::ids::{ExecutionId, RunId, ServerId, VolumeId};
use bafs_proto::message::{JobOutcome, JobReport};
use bafs_proto::report::VolumeUse;
use bafs_proto::time::Time;
use bafs_sched::logic::{
    Action, CheckpointPolicy, Decision, Event, NodeSeen, Outcome, Receipt, Scheduler, Settings,
    Space,
};
use bafs_sched::planner::{Canonical, Environment, NodeClass};
use bafs_sched::sim::{Load, Policy, Scenario, Simulation, workflow_of};
use bafs_sched::world::{Faults, NodeSpec, World, workflow};

const MB: u64 = 1_000_000;
const GB: u64 = 1_000_000_000;

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
    let node = NodeSpec {
        capacity: Space {
            bytes: 10_000 * MB,
            files: 100_000,
        },
        slots: 8,
    };
    let (settings, faults) = (Settings::default(), Faults::default());
    let mut world = World::new(seed, workflow(&text), settings, vec![node; 5], faults);
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

/// Three jobs that write one volume one after the other, on two nodes with one slot each, told by
/// hand: after each fact the actions that follow are in `told`.
struct Chain {
    scheduler: Scheduler,
    now: u64,
    told: Vec<Action>,
}

impl Chain {
    fn new(checkpoint: CheckpointPolicy, node_megabytes: u64) -> Self {
        Self::of(checkpoint, 10, node_megabytes)
    }

    fn of(checkpoint: CheckpointPolicy, megabytes: u64, node_megabytes: u64) -> Self {
        let mut text = format!("volume v scratch {megabytes} MB files 9\n");
        for job in ["a", "b", "c"] {
            text += &format!("job {job} {{\nexecutable = x\n}}\nmount v {job} /v\n");
        }
        text += "parent a child b\nparent b child c\n";
        let mut chain = Self::begin(&text, checkpoint, node_megabytes);
        let volume = chain.created()[0];
        chain.step(Event::VolumeCreated { volume });
        chain
    }

    /// Any workflow, from when the nodes are seen.
    fn begin(text: &str, checkpoint: CheckpointPolicy, node_megabytes: u64) -> Self {
        let settings = Settings {
            checkpoint,
            ..Settings::default()
        };
        let mut chain = Self {
            scheduler: Scheduler::new(RunId(0), workflow(text), settings),
            now: 0,
            told: Vec::new(),
        };
        let capacity = Space {
            bytes: node_megabytes * MB,
            files: 1_000,
        };
        let nodes = [1, 2].map(|id| NodeSeen::alone(ServerId(id), capacity, 1));
        chain.step(Event::seen(nodes.to_vec()));
        chain
    }

    /// The same until a job runs on each node; these jobs, in the order of their names.
    fn running(&mut self) -> Vec<ExecutionId> {
        let mut jobs = Vec::new();
        for volume in self.created() {
            self.step(Event::VolumeCreated { volume });
            let (execution, name, ..) = self.started();
            jobs.push((name, execution));
        }
        jobs.sort();
        jobs.into_iter().map(|(_, execution)| execution).collect()
    }

    fn step(&mut self, event: Event) {
        self.now += 1_000;
        self.told.clear();
        let now = Time(self.now);
        self.scheduler.step(now, event, &mut self.told);
        self.scheduler.check();
    }

    /// The volumes that are to be made.
    fn created(&self) -> Vec<VolumeId> {
        let ids = self.told.iter().filter_map(|action| match action {
            Action::CreateVolume { id, .. } => Some(*id),
            _ => None,
        });
        ids.collect()
    }

    /// The job that starts, where and with which volume.
    fn started(&self) -> (ExecutionId, String, ServerId, VolumeId) {
        let mut started = self.told.iter().filter_map(|action| match action {
            Action::StartJob {
                execution,
                job,
                server,
                volumes,
                ..
            } => {
                let name = self.scheduler.workflow().job(*job).name.clone();
                Some((*execution, name, *server, volumes[0].id))
            }
            _ => None,
        });
        started.next().expect("a job starts")
    }

    /// The copy that is asked for, where, and the older one it is made from.
    fn copied(&self) -> (VolumeId, ServerId, Option<VolumeId>) {
        let mut copied = self.told.iter().filter_map(|action| match action {
            Action::CopyVolume {
                id, server, base, ..
            } => Some((*id, *server, *base)),
            _ => None,
        });
        copied.next().expect("a copy is made")
    }

    fn deletes(&self, volume: VolumeId) -> bool {
        let mut told = self.told.iter();
        told.any(|action| matches!(action, Action::DeleteVolume { id, .. } if *id == volume))
    }

    /// The job that starts ends well, after a minute, and leaves so much.
    fn ends(&mut self, held_bytes: u64) {
        let execution = self.started().0;
        self.reports(execution, JobOutcome::Exited(0), held_bytes, 0);
    }

    fn reports(
        &mut self,
        execution: ExecutionId,
        outcome: JobOutcome,
        held_bytes: u64,
        refused_for_space: u64,
    ) {
        let used = VolumeUse {
            name: "v".to_owned(),
            used_bytes: held_bytes,
            no_space_errors: refused_for_space,
            changes: 1,
            ..VolumeUse::default()
        };
        let report = JobReport {
            outcome,
            wall_ms: 60_000,
            cpu_ms: 1,
            output_tail: String::new(),
            volumes: vec![used],
        };
        self.step(Event::JobEnded { execution, report });
    }

    fn is_copied(&mut self, volume: VolumeId, received_bytes: u64) {
        self.step(Event::VolumeCopied {
            volume,
            received_bytes,
        });
    }

    fn receipt(&self) -> Receipt {
        let receipt = self.scheduler.receipts().last();
        receipt.expect("a decision").1.clone()
    }
}

#[test]
fn an_older_copy_stays_until_the_newer_is_complete() {
    let mut chain = Chain::new(CheckpointPolicy::Always, 100);
    chain.ends(5 * MB);
    let (first, target, base) = chain.copied();
    assert_eq!(base, None);
    chain.is_copied(first, 5 * MB);
    chain.ends(6 * MB);
    let (second, again, base) = chain.copied();
    assert_eq!((again, base), (target, Some(first)), "made from the older");
    assert!(!chain.deletes(first), "{:?}", chain.told);
    let mut lost = chain.scheduler.clone();
    chain.is_copied(second, MB);
    assert!(chain.deletes(first), "{:?}", chain.told);
    let Decision::Copied(on, moved) = chain.receipt().decision else {
        panic!("{:?}", chain.receipt());
    };
    assert_eq!((on, moved.received_bytes), (target, MB));
    assert_eq!(moved.held_bytes, 6 * MB);

    // Had the source died before that, only the second job would run again, on the older copy.
    let source = ServerId(3 - target.0);
    let (mut told, server) = (Vec::new(), source);
    lost.step(Time(chain.now), Event::ServerSilent { server }, &mut told);
    lost.check();
    chain.told = told;
    let (_, job, server, volume) = chain.started();
    assert_eq!((job.as_str(), server, volume), ("b", target, first));
    assert!(chain.deletes(second), "{:?}", chain.told);
}

#[test]
fn all_decisions_about_a_volume_are_known_with_what_became_of_each() {
    let mut chain = Chain::new(CheckpointPolicy::Always, 100);
    chain.ends(5 * MB);
    let (first, target, _) = chain.copied();
    chain.is_copied(first, 5 * MB);
    chain.ends(6 * MB);
    let second = chain.copied().0;
    chain.is_copied(second, MB);
    let server = ServerId(3 - target.0);
    chain.step(Event::ServerSilent { server });
    let receipts = chain.scheduler.receipts();
    let decisions: Vec<_> = receipts.map(|(_, receipt)| receipt.decision).collect();
    let [Decision::Replaced(moved), Decision::Saved(saved_ms)] = decisions[..] else {
        panic!("{decisions:?} {:?}", chain.told);
    };
    assert_eq!((moved.held_bytes, moved.received_bytes), (5 * MB, 5 * MB));
    assert_eq!(saved_ms, 120_000);
}

#[test]
fn a_copy_that_goes_after_a_newer_one_was_decided_against_was_in_vain() {
    let mut chain = Chain::new(CheckpointPolicy::Always, 15);
    chain.ends(5 * MB);
    let (first, ..) = chain.copied();
    chain.is_copied(first, 5 * MB);
    chain.ends(6 * MB);
    chain.ends(6 * MB);
    let receipts = chain.scheduler.receipts();
    let decisions: Vec<_> = receipts.map(|(_, receipt)| receipt.decision).collect();
    let [Decision::Unused(moved), Decision::NoRoom] = decisions[..] else {
        panic!("{decisions:?}");
    };
    assert_eq!(moved.received_bytes, 5 * MB);
}

#[test]
fn a_copy_that_is_lost_while_a_newer_one_is_made_was_in_vain() {
    let mut chain = Chain::new(CheckpointPolicy::Always, 100);
    chain.ends(5 * MB);
    let (first, target, _) = chain.copied();
    chain.is_copied(first, 5 * MB);
    chain.ends(6 * MB);
    chain.copied();
    let lost = vec![first];
    chain.step(Event::VolumesProbed {
        server: target,
        lost,
    });
    let receipts = chain.scheduler.receipts();
    let decisions: Vec<_> = receipts.map(|(_, receipt)| receipt.decision).collect();
    let [Decision::Unused(moved), Decision::Copying(_)] = decisions[..] else {
        panic!("{decisions:?}");
    };
    assert_eq!(moved.received_bytes, 5 * MB);
}

/// What the first copy of a run, of which nobody knows what it costs, holds at most.
#[test]
fn the_first_copy_takes_a_small_part_of_what_is_left_of_the_run() {
    let first = |held_bytes| {
        let mut chain = Chain::of(CheckpointPolicy::CostBenefit, 1_000, 100_000);
        chain.ends(held_bytes);
        let copies = chain.told.iter();
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
fn a_copy_that_cannot_be_made_leaves_the_older_one() {
    let mut chain = Chain::new(CheckpointPolicy::Always, 100);
    chain.ends(5 * MB);
    let (first, target, _) = chain.copied();
    chain.is_copied(first, 5 * MB);
    chain.ends(6 * MB);
    let volume = chain.copied().0;
    let error = bafs_proto::Error::new(bafs_proto::ErrorCode::DigestMismatch, "damaged");
    chain.step(Event::VolumeCreateFailed { volume, error });
    assert_eq!(chain.started().1, "c", "it need not wait");
    assert!(!chain.deletes(first));
    let server = ServerId(3 - target.0);
    chain.step(Event::ServerSilent { server });
    let (_, job, _, volume) = chain.started();
    assert_eq!((job.as_str(), volume), ("b", first));
}

#[test]
fn where_there_is_no_room_for_two_copies_the_older_one_stays() {
    let mut chain = Chain::new(CheckpointPolicy::Always, 15);
    chain.ends(5 * MB);
    let (first, ..) = chain.copied();
    chain.is_copied(first, 5 * MB);
    chain.ends(6 * MB);
    assert_eq!(chain.receipt().decision, Decision::NoRoom);
    assert!(!chain.deletes(first), "{:?}", chain.told);
    assert_eq!(chain.started().1, "c");
}

#[test]
fn a_volume_that_was_too_small_does_not_come_back_from_a_copy_of_that_size() {
    let mut chain = Chain::new(CheckpointPolicy::Always, 100);
    chain.ends(9 * MB);
    let (first, ..) = chain.copied();
    chain.is_copied(first, 9 * MB);
    let (execution, ..) = chain.started();
    chain.reports(execution, JobOutcome::Exited(1), 10 * MB, 1);
    let sizes = chain.told.iter().filter_map(|action| match action {
        Action::CreateVolume { size, .. } => Some(size.bytes),
        _ => None,
    });
    assert_eq!(sizes.collect::<Vec<_>>(), [20 * MB], "{:?}", chain.told);
    assert!(chain.deletes(first));
}

#[test]
fn a_further_copy_is_weighed_by_what_was_done_since() {
    let mut chain = Chain::new(CheckpointPolicy::Always, 100);
    chain.ends(5 * MB);
    assert_eq!(chain.receipt().redo_ms, 60_000);
    let (first, ..) = chain.copied();
    chain.now += 500;
    chain.is_copied(first, 5 * MB);
    chain.ends(5 * MB);
    let receipt = chain.receipt();
    assert_eq!((receipt.redo_ms, receipt.is_further), (60_000, true));
    assert_eq!(receipt.copy_ms, Some(1_500), "as long as a whole one");
    let (second, ..) = chain.copied();
    chain.is_copied(second, 10);
    let Decision::Copied(_, moved) = chain.receipt().decision else {
        panic!("{:?}", chain.receipt());
    };
    assert_eq!((moved.ms, moved.received_bytes), (1_000, 10));
}

/// Pipelines of two jobs; what mounts the second one may write.
fn pairs(volumes: &[&str], megabytes: u64, second: &str) -> String {
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
fn a_slot_is_kept_for_the_stage_that_waits_for_a_short_copy() {
    let begins = |megabytes| {
        let text = pairs(&["v", "w", "x"], megabytes, "");
        let mut chain = Chain::begin(&text, CheckpointPolicy::Always, 10_000);
        let first = chain.running()[0];
        chain.reports(first, JobOutcome::Exited(0), megabytes * MB, 0);
        let (copy, ..) = chain.copied();
        let others = chain.created().len();
        chain.is_copied(copy, megabytes * MB);
        assert!(others > 0 || chain.started().1 == "v1");
        others
    };
    // A job takes a minute; copying at half of a gigabit per second 0.2 s, and 16 s.
    assert_eq!([10, 1_000].map(begins), [0, 1]);
}

#[test]
fn when_the_first_copy_tells_its_cost_volumes_without_one_are_weighed_again() {
    let text = pairs(&["v", "w"], 10, " ro");
    let mut chain = Chain::begin(&text, CheckpointPolicy::CostBenefit, 100);
    let jobs = chain.running();
    chain.reports(jobs[0], JobOutcome::Exited(0), 5 * MB, 0);
    let (copy, ..) = chain.copied();
    chain.reports(jobs[1], JobOutcome::Exited(0), 5 * MB, 0);
    let copy_ms = chain.receipt().copy_ms;
    assert_eq!(copy_ms, None, "one copy at a time until then");
    let before = chain.scheduler.receipts().count();
    chain.is_copied(copy, 5 * MB);
    assert_eq!(chain.scheduler.receipts().count(), before + 1);
    assert!(chain.receipt().copy_ms.is_some(), "{:?}", chain.receipt());
}

/// Seconds until a copy that never ends is let go, and the stage that waits for it goes on.
fn waits_for(chain: &mut Chain, copy: VolumeId) -> u64 {
    let since = chain.now;
    while !chain.deletes(copy) {
        chain.step(Event::Tick);
        assert!(chain.now < since + 60_000, "it waits without end");
    }
    assert!(matches!(chain.receipt().decision, Decision::Failed));
    (chain.now - since) / 1_000
}

/// Its node is dead, and that is known only seconds later.
#[test]
fn a_copy_that_takes_far_too_long_is_let_go_where_a_stage_waits_for_it() {
    let mut chain = Chain::new(CheckpointPolicy::Always, 100);
    chain.ends(5 * MB);
    let (copy, ..) = chain.copied();
    assert_eq!(waits_for(&mut chain, copy), 2);
    assert_eq!(chain.started().1, "b");
    // What is expected may be wrong: the next one, to the only node there is, has twice as long.
    chain.ends(5 * MB);
    let (copy, ..) = chain.copied();
    assert_eq!(waits_for(&mut chain, copy), 4);
    assert_eq!(chain.started().1, "c");
}

#[test]
fn a_copy_that_nobody_waits_for_takes_as_long_as_it_will() {
    let text = pairs(&["v"], 10, " ro");
    let mut chain = Chain::begin(&text, CheckpointPolicy::Always, 100);
    let job = chain.running()[0];
    chain.reports(job, JobOutcome::Exited(0), 5 * MB, 0);
    let (copy, ..) = chain.copied();
    for _ in 0..30 {
        let at = chain.scheduler.next_timer().expect("it is looked at");
        chain.now = at.0 - 1_000;
        chain.step(Event::Tick);
        assert!(!chain.deletes(copy), "{:?}", chain.told);
    }
    assert!(chain.now > 86_400_000, "30 looks in {} ms", chain.now);
    chain.is_copied(copy, 5 * MB);
    assert!(matches!(chain.receipt().decision, Decision::Copied(..)));
}

/// 64 pipelines of three jobs on 16 nodes, as in the thesis' figure 3.6; mean seconds over seeds.
fn copied(
    checkpoint: CheckpointPolicy,
    run_s: u64,
    mtbf_s: Option<u64>,
    seeds: RangeInclusive<u64>,
) -> f64 {
    let text = format!("width=64,depth=3,batch=0B,private=24MB,run={run_s}s,var=0.1");
    let canonical = Canonical::parse(&text).expect("a workload");
    let runs = seeds.clone().map(|seed| {
        let environment = Environment {
            nodes: vec![NodeClass::new(16, 1, 4 * GB)],
            home_bytes_per_s: 400 * MB,
            local_bytes_per_s: 400 * MB,
            mtbf_s,
            restart_s: 16,
        };
        let load = Load::Declared {
            variability_ppm: 100_000,
        };
        let scenario = Scenario {
            checkpoint,
            ..Scenario::new(environment, Policy::Need, load, seed)
        };
        let run = Simulation::new(workflow_of(&canonical), scenario).run();
        let run = run.expect("it ends");
        assert!(run.is_complete(), "{:?}", run.outcome);
        run.seconds()
    });
    runs.sum::<f64>() / seeds.count() as f64
}

#[test]
fn copies_cost_little_where_no_node_fails() {
    let [never, weighed] = [CheckpointPolicy::Never, CheckpointPolicy::CostBenefit]
        .map(|checkpoint| copied(checkpoint, 600, None, 1..=20));
    assert!(weighed <= never * 1.01, "one copy to learn what it costs");
}

/// Also where the whole run is over in a minute: what was seen of failures counts, not how long ago
/// they began, and before the first one copies that cost next to nothing.
#[test]
fn copies_pay_where_nodes_fail_as_often_as_jobs_end() {
    for (run_s, mtbf_s) in [(600, 600), (60, 60), (6, 6)] {
        let [never, always, weighed] = [
            CheckpointPolicy::Never,
            CheckpointPolicy::Always,
            CheckpointPolicy::CostBenefit,
        ]
        .map(|checkpoint| copied(checkpoint, run_s, Some(mtbf_s), 1..=40));
        assert!(
            weighed < never * 0.97 && weighed < always * 1.015,
            "jobs of {run_s} s: {weighed} s by cost and benefit, {never} s without copies, \
             {always} s with all"
        );
    }
}

/// Of four nodes one is lost every nine seconds: some job is on the lost one three times in a row.
#[test]
fn who_is_on_lost_nodes_by_chance_is_not_held() {
    let text = "width=12,depth=3,batch=0B,private=24MB,run=3s,var=0.02";
    let canonical = Canonical::parse(text).expect("a workload");
    for seed in 1..=20 {
        let environment = Environment {
            nodes: vec![NodeClass::new(4, 2, 2 * GB)],
            home_bytes_per_s: 100 * MB,
            local_bytes_per_s: 96 * MB,
            mtbf_s: Some(9),
            restart_s: 16,
        };
        let load = Load::Declared {
            variability_ppm: 20_000,
        };
        let scenario = Scenario::new(environment, Policy::Need, load, seed);
        let run = Simulation::new(workflow_of(&canonical), scenario).run();
        let run = run.expect("it ends");
        assert!(run.is_complete(), "seed {seed}: {:?}", run.outcome);
    }
}
