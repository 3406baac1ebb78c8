//! Tables of the queue: who starts, with how much, and who waits.

use super::*;
use crate::event::UserQuota;

const GB: u64 = 1_000_000_000;

fn resources(slots: u64, gb: u64) -> Resources {
    Resources {
        slots,
        bytes: gb * GB,
        home_bytes_per_s: 0,
    }
}

struct TestQueue {
    state: QueueState,
    now: Time,
}

impl TestQueue {
    fn new(settings: QueueSettings, users: &[&str], capacity: Resources) -> Self {
        let (state, now) = (QueueState::default(), Time(1_000_000));
        let mut queue = Self { state, now };
        queue.tell(QueueEvent::SettingsChanged(settings));
        for user in users {
            queue.add_user(user, UserQuota::default());
        }
        queue.tell(QueueEvent::CapacityFound(capacity));
        queue
    }

    fn add_user(&mut self, user: &str, quota: UserQuota) {
        self.tell(QueueEvent::UserAdded {
            user: user.to_owned(),
            homes: vec![String::new()],
            quota,
        });
    }

    fn tell(&mut self, event: QueueEvent) -> Vec<QueueDecision> {
        self.state.step(self.now, &event)
    }

    fn submit(&mut self, user: &str, wanted: Resources, needed: Resources) -> WorkflowId {
        self.submit_after(user, (wanted, needed), &[])
    }

    fn submit_after(
        &mut self,
        user: &str,
        (wanted, needed): (Resources, Resources),
        after: &[WorkflowId],
    ) -> WorkflowId {
        let id = self.state.next_id();
        self.tell(QueueEvent::WorkflowSubmitted {
            id,
            user: user.to_owned(),
            name: "w.bafs".to_owned(),
            priority: 0,
            key: format!("k{}", id.0),
            wanted,
            needed,
            after: after.to_vec(),
        });
        id
    }

    fn end(&mut self, id: WorkflowId) {
        let outcome = RunOutcome::Complete;
        self.tell(QueueEvent::RunEnded { id, outcome });
    }

    fn first_running(&self) -> Option<WorkflowId> {
        self.state.running().next()
    }

    fn running(&self) -> Vec<u64> {
        self.state.running().map(|id| id.0).collect()
    }

    fn share(&self, id: WorkflowId) -> (u64, u64) {
        let share = self.state.workflows()[&id].share;
        (share.slots, share.bytes / GB)
    }
}

fn one_at_a_time(order: &str) -> QueueSettings {
    QueueSettings {
        runs_max: 1,
        order: order.to_owned(),
        ..QueueSettings::default()
    }
}

#[test]
fn policies_order_the_same_queue_differently() {
    for (order, expected) in [
        ("fair-share", ["alice", "bob", "alice", "bob", "alice"]),
        ("first-come", ["alice", "alice", "alice", "bob", "bob"]),
    ] {
        let capacity = resources(4, 100);
        let mut queue = TestQueue::new(one_at_a_time(order), &["alice", "bob"], capacity);
        for user in ["alice", "alice", "alice", "bob", "bob"] {
            queue.submit(user, capacity, resources(1, 1));
        }
        let mut order = Vec::new();
        while let Some(id) = queue.first_running() {
            let user = queue.state.workflows()[&id].user.clone();
            queue.now = queue.now.plus_ms(60_000);
            let used = RunUsage {
                slot_ms: 4 * 60_000,
                home_bytes: 0,
            };
            queue.tell(QueueEvent::UsageReported(vec![(id, used)]));
            order.push(user);
            queue.end(id);
        }
        assert_eq!(order, expected);
    }
}

#[test]
fn higher_priority_of_one_user_starts_first() {
    let capacity = resources(4, 100);
    let mut queue = TestQueue::new(one_at_a_time("fair-share"), &["alice"], capacity);
    let ids: Vec<_> = (0..3)
        .map(|_| queue.submit("alice", capacity, resources(1, 1)))
        .collect();
    let (id, priority) = (ids[2], 5);
    queue.tell(QueueEvent::PriorityChanged { id, priority });
    queue.end(ids[0]);
    assert_eq!(queue.running(), [ids[2].0]);
}

#[test]
fn users_with_equal_past_get_equal_parts() {
    let capacity = resources(12, 120);
    let users = ["alice", "bob"];
    let mut queue = TestQueue::new(QueueSettings::default(), &users, capacity);
    let first = queue.submit("alice", capacity, resources(1, 10));
    assert_eq!(queue.share(first), (12, 120));
    let second = queue.submit("alice", capacity, resources(1, 10));
    let third = queue.submit("bob", capacity, resources(1, 10));
    assert_eq!(queue.share(third).0, 6);
    assert_eq!(queue.share(first).0 + queue.share(second).0, 6);
    let sum = [first, second, third].map(|id| queue.share(id).1);
    assert!(sum.iter().sum::<u64>() <= 120, "{sum:?}");
    queue.end(third);
    assert_eq!(queue.share(first).0 + queue.share(second).0, 12);
}

#[test]
fn surplus_is_divided_between_runs() {
    let capacity = resources(8, 100);
    let users = ["alice", "bob"];
    let mut queue = TestQueue::new(QueueSettings::default(), &users, capacity);
    let alice = queue.submit("alice", resources(8, 20), resources(1, 10));
    let bob = queue.submit("bob", resources(8, 40), resources(1, 10));
    assert_eq!(queue.share(alice).1, 40);
    assert_eq!(queue.share(bob).1, 60);
    queue.now = queue.now.plus_ms(1_000);
    queue.end(alice);
    let mib_s = queue.state.users()["alice"].usage.mib_s;
    assert_eq!(
        mib_s,
        (20 * GB) >> 20,
        "she is charged for what she asked for"
    );
}

#[test]
fn part_is_never_below_what_is_needed() {
    let capacity = resources(8, 100);
    let users = ["alice", "bob", "carol"];
    let mut queue = TestQueue::new(QueueSettings::default(), &users, capacity);
    let alice = queue.submit("alice", capacity, resources(2, 70));
    let bob = queue.submit("bob", capacity, resources(1, 60));
    let carol = queue.submit("carol", capacity, resources(1, 10));
    // Bob's turn is next; nobody overtakes him.
    assert_eq!(queue.running(), [alice.0]);
    assert_eq!(queue.state.wait_reason(bob), Some(WaitReason::NoRoom));
    assert!(queue.share(alice).1 >= 70);
    queue.end(alice);
    assert_eq!(queue.running(), [bob.0, carol.0]);
    assert!(queue.share(bob).1 >= 60 && queue.share(carol).1 >= 10);
}

#[test]
fn shrunken_cluster_is_used_in_turns() {
    let settings = QueueSettings::default();
    let turn_ms = settings.turn_ms;
    let mut queue = TestQueue::new(settings, &["alice", "bob"], resources(8, 100));
    let alice = queue.submit("alice", resources(8, 100), resources(1, 50));
    let bob = queue.submit("bob", resources(8, 100), resources(1, 50));
    queue.tell(QueueEvent::CapacityFound(resources(4, 60)));
    let mut shares = Vec::new();
    for _ in 0..2 {
        queue.tell(QueueEvent::Ticked);
        shares.push((queue.share(alice), queue.share(bob)));
        queue.now = queue.now.plus_ms(turn_ms);
    }
    shares.sort_unstable();
    assert_eq!(shares, [((0, 0), (4, 60)), ((4, 60), (0, 0))]);
}

#[test]
fn removed_workflow_says_that_its_run_ends() {
    let capacity = resources(8, 100);
    let mut queue = TestQueue::new(QueueSettings::default(), &["alice"], capacity);
    let id = queue.submit("alice", capacity, resources(1, 10));
    queue.tell(QueueEvent::RemovalRequested(id));
    assert_eq!(queue.state.wait_reason(id), Some(WaitReason::BeingRemoved));
    let held = queue.state.check_change(id, &QueueEvent::WorkflowHeld(id));
    assert_eq!(held, Err(QueueRefusal::BeingRemoved(id)));
    queue.end(id);
    assert_eq!(queue.state.wait_reason(id), None);
}

#[test]
fn quota_limits_starts_and_parts() {
    let capacity = resources(8, 100);
    let mut queue = TestQueue::new(QueueSettings::default(), &["bob"], capacity);
    let quota = UserQuota {
        slots: Some(3),
        bytes: Some(20 * GB),
    };
    queue.add_user("alice", quota);
    let first = queue.submit("alice", capacity, resources(2, 10));
    let second = queue.submit("alice", capacity, resources(2, 5));
    let bob = queue.submit("bob", capacity, resources(1, 10));
    assert_eq!(queue.share(first), (3, 20));
    assert_eq!(queue.share(bob), (5, 80));
    let waits = queue.state.wait_reason(second);
    assert_eq!(waits, Some(WaitReason::QuotaReached));
    let large = queue.state.check_submission("alice", resources(4, 1));
    assert!(matches!(large, Err(QueueRefusal::AboveQuota(_))));
}

/// In the order of their submission, whatever the priority says; others overtake them.
#[test]
fn writers_of_one_place_run_in_turn() {
    let capacity = resources(8, 100);
    let demand = (capacity, resources(1, 1));
    let users = ["alice", "bob"];
    let mut queue = TestQueue::new(QueueSettings::default(), &users, capacity);
    let first = queue.submit_after("alice", demand, &[]);
    let second = queue.submit_after("alice", demand, &[first]);
    let third = queue.submit_after("bob", demand, &[second]);
    let (id, priority) = (third, 9);
    queue.tell(QueueEvent::PriorityChanged { id, priority });
    let other = queue.submit("bob", demand.0, demand.1);
    assert_eq!(queue.running(), [first.0, other.0]);
    let waits = |queue: &TestQueue, id| queue.state.wait_reason(id);
    assert_eq!(waits(&queue, second), Some(WaitReason::SameResults(first)));
    assert_eq!(waits(&queue, third), Some(WaitReason::SameResults(second)));
    queue.tell(QueueEvent::RemovalRequested(first));
    assert_eq!(queue.running(), [first.0, other.0], "its run has not ended");
    queue.end(first);
    assert_eq!(queue.running(), [second.0, other.0]);
    queue.end(second);
    assert_eq!(queue.running(), [third.0, other.0]);
}

#[test]
fn removed_workflow_leaves_its_turn_to_others() {
    let capacity = resources(8, 100);
    let demand = (capacity, resources(1, 1));
    let settings = QueueSettings {
        history_max: 0,
        ..QueueSettings::default()
    };
    let mut queue = TestQueue::new(settings, &["alice"], capacity);
    let first = queue.submit_after("alice", demand, &[]);
    let second = queue.submit_after("alice", demand, &[first]);
    let third = queue.submit_after("alice", demand, &[second]);
    let decisions = queue.tell(QueueEvent::RemovalRequested(second));
    assert!(decisions.contains(&QueueDecision::Forget(second)));
    assert_eq!(queue.running(), [first.0]);
    let waits = queue.state.wait_reason(third);
    assert_eq!(waits, Some(WaitReason::SameResults(first)));
    queue.end(first);
    assert_eq!(queue.running(), [third.0]);
}

#[test]
fn held_workflow_starts_nothing_until_released() {
    let capacity = resources(8, 100);
    let mut queue = TestQueue::new(one_at_a_time("fair-share"), &["alice"], capacity);
    let first = queue.submit("alice", capacity, resources(1, 1));
    let second = queue.submit("alice", capacity, resources(1, 1));
    queue.tell(QueueEvent::WorkflowHeld(second));
    queue.tell(QueueEvent::WorkflowHeld(first));
    assert_eq!(
        queue.share(first),
        (0, 0),
        "it runs, and starts no further job"
    );
    queue.tell(QueueEvent::WorkflowReleased(first));
    assert_eq!(queue.share(first), (8, 100));
    queue.end(first);
    assert!(queue.running().is_empty());
    queue.tell(QueueEvent::WorkflowReleased(second));
    assert_eq!(queue.running(), [second.0]);
}

#[test]
fn removed_run_is_cancelled_once() {
    let capacity = resources(8, 100);
    let mut queue = TestQueue::new(QueueSettings::default(), &["alice"], capacity);
    let id = queue.submit("alice", capacity, resources(1, 1));
    let decisions = queue.tell(QueueEvent::RemovalRequested(id));
    assert!(
        decisions.contains(&QueueDecision::Cancel(id)),
        "{decisions:?}"
    );
    let again = queue.tell(QueueEvent::RemovalRequested(id));
    assert!(!again.contains(&QueueDecision::Cancel(id)), "{again:?}");
    let outcome = RunOutcome::Cancelled;
    queue.tell(QueueEvent::RunEnded { id, outcome });
    let state = queue.state.workflows()[&id].state;
    assert_eq!(state, WorkflowState::Removed);
}

#[test]
fn history_has_a_retention() {
    let settings = QueueSettings {
        history_max: 3,
        history_ms: 1_000,
        ..QueueSettings::default()
    };
    let capacity = resources(8, 100);
    let mut queue = TestQueue::new(settings, &["alice"], capacity);
    for _ in 0..5 {
        let id = queue.submit("alice", capacity, resources(1, 1));
        queue.end(id);
    }
    assert_eq!(queue.state.workflows().len(), 3);
    let last = queue.state.find_by_key("alice", "k4");
    assert_eq!(last, Some(WorkflowId(4)));
    assert_eq!(queue.state.find_by_key("bob", "k4"), None);
    assert_eq!(
        queue.state.find_by_key("alice", "k0"),
        None,
        "it is forgotten"
    );
    queue.now = queue.now.plus_ms(2_000);
    let decisions = queue.tell(QueueEvent::Ticked);
    assert_eq!(decisions.len(), 3);
    assert!(queue.state.workflows().is_empty());
    assert_eq!(
        queue.state.next_id(),
        WorkflowId(5),
        "numbers are not used again"
    );
}

#[test]
fn repeated_usage_report_charges_nothing() {
    let capacity = resources(8, 100);
    let mut queue = TestQueue::new(QueueSettings::default(), &["alice"], capacity);
    let id = queue.submit("alice", capacity, resources(1, 1));
    let used = RunUsage {
        slot_ms: 5_000,
        home_bytes: 700,
    };
    for _ in 0..2 {
        queue.tell(QueueEvent::UsageReported(vec![(id, used)]));
    }
    let usage = queue.state.users()["alice"].usage;
    assert_eq!((usage.slot_ms, usage.home_bytes), (5_000, 700));
}
