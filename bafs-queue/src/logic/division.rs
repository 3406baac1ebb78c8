//! How the cluster is divided between the runs that are under way. A part is never smaller than
//! what its run needs: where that is not possible, runs take turns of the whole cluster, as in
//! Bent's thesis, §6.3.3.

use std::collections::BTreeMap;

use super::accountant::dominant_part;
use super::records::{QueueView, WorkflowRecord, add, can_hold};
use crate::control::{Resources, WorkflowId};

/// The remainder is given away in so many steps for each run: parts are exact to half a percent.
const STEPS: u64 = 200;

/// A user who had less than this many slots on average counts as having had it, as in HTCondor's
/// user priorities: or the first second of use would decide.
const PAST_SLOTS_MIN: f64 = 0.5;

/// The parts of the runs that are under way; runs that are held get nothing.
pub fn divide_cluster(view: QueueView<'_>, turn_ms: u64) -> BTreeMap<WorkflowId, Resources> {
    let runs = view.workflows.iter().filter(|(_, it)| it.has_run);
    let runs: Vec<(WorkflowId, &WorkflowRecord)> = runs.map(|(id, it)| (*id, it)).collect();
    let mut parts: BTreeMap<_, _> = runs
        .iter()
        .map(|(id, _)| (*id, Resources::default()))
        .collect();
    let active: Vec<(WorkflowId, &WorkflowRecord)> = runs
        .into_iter()
        .filter(|(_, it)| it.is_under_way())
        .collect();
    let sum = active
        .iter()
        .fold(Resources::default(), |sum, (_, run)| add(sum, run.needed));
    if !can_hold(view.capacity, sum) {
        if let Some(id) = whose_turn(&active, view, turn_ms) {
            parts.insert(id, view.capacity);
        }
        return parts;
    }
    for (id, run) in &active {
        parts.insert(*id, run.needed);
    }
    give_remainder(view, &active, &mut parts);
    parts
}

/// Runs take turns in the order of their numbers.
fn whose_turn(
    active: &[(WorkflowId, &WorkflowRecord)],
    view: QueueView<'_>,
    turn_ms: u64,
) -> Option<WorkflowId> {
    let count = u64::try_from(active.len())
        .ok()
        .filter(|count| *count > 0)?;
    let turn = view.now.0 / turn_ms.max(1) % count;
    active.get(usize::try_from(turn).ok()?).map(|(id, _)| *id)
}

/// Gives away what nobody needs, step by step, to the user who has the least for what the past
/// allows.
fn give_remainder(
    view: QueueView<'_>,
    active: &[(WorkflowId, &WorkflowRecord)],
    parts: &mut BTreeMap<WorkflowId, Resources>,
) {
    let weight = |user: &str| {
        let past_slots = view.past_share(user) * view.capacity.slots as f64;
        1.0 / past_slots.max(PAST_SLOTS_MIN)
    };
    let weights: BTreeMap<&str, f64> = active
        .iter()
        .map(|(_, run)| (run.user.as_str(), weight(&run.user)))
        .collect();
    let mut left = parts
        .values()
        .fold(view.capacity, |left, part| subtract(left, *part));
    let mut open: Vec<(WorkflowId, &WorkflowRecord)> = active.to_vec();
    while !open.is_empty() {
        let mut held: BTreeMap<&str, Resources> = BTreeMap::new();
        for (id, run) in active {
            let sum = held.entry(&run.user).or_default();
            *sum = add(*sum, parts[id]);
        }
        let level = |run: &WorkflowRecord| {
            dominant_part(held[run.user.as_str()], view.capacity) / weights[run.user.as_str()]
        };
        let own = |id: &WorkflowId| dominant_part(parts[id], view.capacity);
        let next = (0..open.len()).min_by(|a, b| {
            let ((id_a, run_a), (id_b, run_b)) = (&open[*a], &open[*b]);
            let by_user = level(run_a).total_cmp(&level(run_b));
            by_user
                .then(own(id_a).total_cmp(&own(id_b)))
                .then(id_a.cmp(id_b))
        });
        let Some(next) = next else { return };
        let (id, run) = open[next];
        let quota_left = quota_left(view, run, held[run.user.as_str()]);
        let step = next_step(run, parts[&id], left, quota_left);
        if step == Resources::default() {
            open.swap_remove(next);
            open.sort_unstable_by_key(|(id, _)| *id);
            continue;
        }
        left = subtract(left, step);
        parts.insert(id, add(parts[&id], step));
    }
    give_surplus(view, active, left, parts);
}

/// What nobody asked for makes room for copies and for caches that are whole on each node.
fn give_surplus(
    view: QueueView<'_>,
    active: &[(WorkflowId, &WorkflowRecord)],
    left: Resources,
    parts: &mut BTreeMap<WorkflowId, Resources>,
) {
    let count = active.len().max(1) as u64;
    for (id, run) in active {
        let own = active.iter().filter(|(_, other)| other.user == run.user);
        let held = own.fold(Resources::default(), |sum, (id, _)| add(sum, parts[id]));
        let quota_left = quota_left(view, run, held);
        let surplus = Resources {
            slots: (left.slots / count).min(quota_left.slots),
            bytes: (left.bytes / count).min(quota_left.bytes),
            home_bytes_per_s: left.home_bytes_per_s / count,
        };
        parts.insert(*id, add(parts[id], surplus));
    }
}

/// What the quota of its user leaves a run.
fn quota_left(view: QueueView<'_>, run: &WorkflowRecord, held: Resources) -> Resources {
    let quota = view.users.get(&run.user).map(|user| user.quota);
    let quota = quota.unwrap_or_default();
    Resources {
        slots: quota
            .slots
            .map_or(u64::MAX, |it| it.saturating_sub(held.slots)),
        bytes: quota
            .bytes
            .map_or(u64::MAX, |it| it.saturating_sub(held.bytes)),
        home_bytes_per_s: u64::MAX,
    }
}

fn next_step(
    run: &WorkflowRecord,
    part: Resources,
    left: Resources,
    quota_left: Resources,
) -> Resources {
    let one = |wanted: u64, has: u64, left: u64, quota: u64| {
        let lack = wanted.saturating_sub(has);
        wanted.div_ceil(STEPS).min(lack).min(left).min(quota)
    };
    Resources {
        slots: one(run.wanted.slots, part.slots, left.slots, quota_left.slots),
        bytes: one(run.wanted.bytes, part.bytes, left.bytes, quota_left.bytes),
        home_bytes_per_s: one(
            run.wanted.home_bytes_per_s,
            part.home_bytes_per_s,
            left.home_bytes_per_s,
            quota_left.home_bytes_per_s,
        ),
    }
}

fn subtract(one: Resources, other: Resources) -> Resources {
    Resources {
        slots: one.slots.saturating_sub(other.slots),
        bytes: one.bytes.saturating_sub(other.bytes),
        home_bytes_per_s: one.home_bytes_per_s.saturating_sub(other.home_bytes_per_s),
    }
}
