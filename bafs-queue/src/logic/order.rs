//! Who goes next: two policies with names. Each sees the queue and changes nothing.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::accountant::dominant_part;
use super::records::{QueueView, add};
use crate::control::{Resources, WorkflowId};

/// An order of workflows that wait.
pub trait OrderPolicy: Send + Sync {
    /// Its name on the command line.
    fn name(&self) -> &'static str;

    /// What it does, in a line.
    fn description(&self) -> &'static str;

    /// The workflows of `waiting` in the order in which they are to start.
    fn order(&self, view: QueueView<'_>, waiting: &[WorkflowId]) -> Vec<WorkflowId>;
}

/// Every policy, the default first.
pub const ORDER_POLICIES: [&dyn OrderPolicy; 2] = [&FairShare, &FirstCome];

/// The policy of a name.
pub fn find_order_policy(name: &str) -> Option<&'static dyn OrderPolicy> {
    ORDER_POLICIES
        .into_iter()
        .find(|policy| policy.name() == name)
}

/// The user who had and has the least goes first; among the workflows of one user, the priority
/// decides, then who came first.
#[derive(Debug)]
pub struct FairShare;

impl OrderPolicy for FairShare {
    fn name(&self) -> &'static str {
        "fair-share"
    }

    fn description(&self) -> &'static str {
        "the user with the smallest dominant share of slots, space and home link goes first"
    }

    fn order(&self, view: QueueView<'_>, waiting: &[WorkflowId]) -> Vec<WorkflowId> {
        let mut held: BTreeMap<&str, Resources> = BTreeMap::new();
        for workflow in view.workflows.values().filter(|it| it.has_run) {
            let sum = held.entry(&workflow.user).or_default();
            // What a run may have moves with each arrival; what it needs does not.
            *sum = add(*sum, workflow.needed);
        }
        let mut by_user: BTreeMap<&str, Vec<(Reverse<i32>, WorkflowId)>> = BTreeMap::new();
        for id in waiting {
            let record = &view.workflows[id];
            let place = (Reverse(record.priority), *id);
            by_user.entry(&record.user).or_default().push(place);
        }
        let share = |user: &str| {
            let now = held.get(user).copied().unwrap_or_default();
            view.past_share(user) + dominant_part(now, view.capacity)
        };
        let mut users: Vec<(f64, &str, Vec<_>)> = by_user
            .into_iter()
            .map(|(user, mut own)| {
                own.sort_unstable();
                (share(user), user, own)
            })
            .collect();
        users.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(b.1)));
        let own = users.into_iter().flat_map(|(_, _, own)| own);
        own.map(|(_, id)| id).collect()
    }
}

/// In the order of coming, whoever's they are.
#[derive(Debug)]
pub struct FirstCome;

impl OrderPolicy for FirstCome {
    fn name(&self) -> &'static str {
        "first-come"
    }

    fn description(&self) -> &'static str {
        "workflows start in the order in which they were submitted"
    }

    fn order(&self, _: QueueView<'_>, waiting: &[WorkflowId]) -> Vec<WorkflowId> {
        let mut order = waiting.to_vec();
        order.sort_unstable();
        order
    }
}
