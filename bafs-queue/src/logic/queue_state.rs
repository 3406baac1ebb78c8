//! The queue as a state machine: `step(now, event)` applies a fact, and decides until nothing is
//! left to decide. The only writer of its state.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::time::Time;
use serde::{Deserialize, Serialize};

use super::division::divide_cluster;
use super::order::{FairShare, find_order_policy};
use super::records::{QueueView, UserRecord, WorkflowRecord, add, can_hold};
use super::refusal::{QueueRefusal, WaitReason};
use crate::control::{Resources, WorkflowId, WorkflowState};
use crate::event::{QueueDecision, QueueEvent, QueueSettings, RunOutcome, RunUsage};

/// Parts are looked at again after so long, in milliseconds, as what users had decays. Far below
/// any half-life, and rare enough for the journal.
const DIVISION_INTERVAL_MS: u64 = 60_000;

/// The queue.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueState {
    settings: QueueSettings,
    next_id: WorkflowId,
    users: BTreeMap<String, UserRecord>,
    workflows: BTreeMap<WorkflowId, WorkflowRecord>,
    capacity: Resources,
    /// Until when users were charged for space.
    charged_until: Time,
    /// When the cluster was divided last.
    divided: Time,
    /// Whether something happened since that changes parts.
    is_division_due: bool,
    /// Follows from the workflows, by state.
    #[serde(skip)]
    index: StateIndex,
}

/// Workflows by what may happen to them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct StateIndex {
    waiting: BTreeSet<WorkflowId>,
    running: BTreeSet<WorkflowId>,
    over: BTreeSet<(Time, WorkflowId)>,
    by_key: BTreeMap<(String, String), WorkflowId>,
}

impl QueueState {
    /// Takes a fact, and returns what was decided because of it. Both belong into one record of the
    /// journal. A [`QueueEvent::Ticked`] without decisions changes nothing and needs no record.
    pub fn step(&mut self, now: Time, event: &QueueEvent) -> Vec<QueueDecision> {
        if *event == QueueEvent::Ticked && self.next_decision(now).is_none() {
            return Vec::new();
        }
        self.apply(now, event);
        let mut decisions = Vec::new();
        while let Some(decision) = self.next_decision(now) {
            self.commit(now, &decision);
            decisions.push(decision);
        }
        decisions
    }

    /// Applies a fact of the journal, with what was decided then.
    pub fn replay(&mut self, now: Time, event: &QueueEvent, decisions: &[QueueDecision]) {
        self.apply(now, event);
        for decision in decisions {
            self.commit(now, decision);
        }
    }

    /// Builds what is not kept in a snapshot.
    pub fn rebuild_index(&mut self) {
        self.index = StateIndex::default();
        let ids: Vec<WorkflowId> = self.workflows.keys().copied().collect();
        ids.into_iter().for_each(|id| self.index_workflow(id));
    }

    /// The number of the next workflow.
    pub fn next_id(&self) -> WorkflowId {
        self.next_id
    }

    /// How the queue works.
    pub fn settings(&self) -> &QueueSettings {
        &self.settings
    }

    /// What the cluster has.
    pub fn capacity(&self) -> Resources {
        self.capacity
    }

    /// All users, the removed ones too.
    pub fn users(&self) -> &BTreeMap<String, UserRecord> {
        &self.users
    }

    /// All workflows.
    pub fn workflows(&self) -> &BTreeMap<WorkflowId, WorkflowRecord> {
        &self.workflows
    }

    /// Workflows whose runs have not ended.
    pub fn running(&self) -> impl Iterator<Item = WorkflowId> {
        self.index.running.iter().copied()
    }

    /// The workflow that a user handed in with a key.
    pub fn find_by_key(&self, user: &str, key: &str) -> Option<WorkflowId> {
        let key = (user.to_owned(), key.to_owned());
        self.index.by_key.get(&key).copied()
    }

    /// What a policy sees.
    pub fn view(&self, now: Time) -> QueueView<'_> {
        QueueView {
            users: &self.users,
            workflows: &self.workflows,
            capacity: self.capacity,
            half_life_ms: self.settings.half_life_ms,
            now,
        }
    }

    /// Why a workflow of a user cannot be handed in.
    ///
    /// # Errors
    /// The user is unknown, has less than it needs, or the queue is full.
    pub fn check_submission(&self, user: &str, needed: Resources) -> Result<(), QueueRefusal> {
        let record = self.users.get(user).filter(|record| record.is_active);
        let unknown = || QueueRefusal::UnknownUser(user.to_owned());
        let quota = record.ok_or_else(unknown)?.quota;
        if self.index.waiting.len() + self.index.running.len() >= self.settings.workflows_max {
            return Err(QueueRefusal::QueueFull(self.settings.workflows_max));
        }
        let is_above = |quota: Option<u64>, needed| quota.is_some_and(|quota| needed > quota);
        if is_above(quota.slots, needed.slots) || is_above(quota.bytes, needed.bytes) {
            return Err(QueueRefusal::AboveQuota(needed));
        }
        Ok(())
    }

    /// Whether a fact about a workflow is possible in its state.
    ///
    /// # Errors
    /// The workflow is unknown, or its state does not allow it.
    pub fn check_change(&self, id: WorkflowId, event: &QueueEvent) -> Result<(), QueueRefusal> {
        let record = self.workflows.get(&id);
        let record = record.ok_or(QueueRefusal::UnknownWorkflow(id))?;
        let is_removal = matches!(event, QueueEvent::RemovalRequested(_));
        if record.is_being_removed() && !is_removal {
            return Err(QueueRefusal::BeingRemoved(id));
        }
        let is_possible = match event {
            QueueEvent::WorkflowHeld(_) => !record.state.is_over(),
            QueueEvent::WorkflowReleased(_) => {
                matches!(record.state, WorkflowState::Held | WorkflowState::Queued)
            }
            QueueEvent::RemovalRequested(_) => !record.state.is_over(),
            QueueEvent::PriorityChanged { .. } => !record.state.is_over(),
            _ => true,
        };
        match is_possible {
            true => Ok(()),
            false => Err(QueueRefusal::WrongState(id, record.state)),
        }
    }

    /// Why a workflow waits; nothing if it does not.
    pub fn wait_reason(&self, id: WorkflowId) -> Option<WaitReason> {
        let record = self.workflows.get(&id)?;
        if record.is_being_removed() {
            return Some(WaitReason::BeingRemoved);
        }
        match record.state {
            WorkflowState::Held => return Some(WaitReason::Held),
            WorkflowState::Queued => {}
            _ => return None,
        }
        if self.capacity == Resources::default() {
            return Some(WaitReason::NoNodes);
        }
        if !can_hold(self.capacity, record.needed) {
            return Some(WaitReason::AboveCapacity);
        }
        if let Some(earlier) = self.find_predecessor(record) {
            return Some(WaitReason::SameResults(earlier));
        }
        if self.is_above_quota(record) {
            return Some(WaitReason::QuotaReached);
        }
        if self.index.running.len() >= self.settings.runs_max {
            return Some(WaitReason::RunsReached);
        }
        Some(match self.fits_beside_runs(record.needed) {
            true => WaitReason::BehindOthers,
            false => WaitReason::NoRoom,
        })
    }

    // ------------------------------------------------------------------------ facts

    fn apply(&mut self, now: Time, event: &QueueEvent) {
        self.charge_space(now);
        match event {
            QueueEvent::SettingsChanged(settings) => self.settings = settings.clone(),
            QueueEvent::UserAdded { user, homes, quota } => {
                let record = self.users.entry(user.clone()).or_default();
                record.generation += 1;
                record.is_active = true;
                record.homes.clone_from(homes);
                record.quota = *quota;
                self.is_division_due = true;
            }
            QueueEvent::UserRemoved { user } => {
                if let Some(record) = self.users.get_mut(user) {
                    record.is_active = false;
                }
            }
            QueueEvent::WorkflowSubmitted { .. } => self.add_workflow(now, event),
            QueueEvent::WorkflowHeld(id) => {
                self.change(*id, |record| record.state = WorkflowState::Held);
            }
            QueueEvent::WorkflowReleased(id) => self.change(*id, |record| {
                record.state = match record.has_run {
                    true => WorkflowState::Running,
                    false => WorkflowState::Queued,
                }
            }),
            QueueEvent::RemovalRequested(id) => {
                self.change(*id, |record| {
                    record.is_unwanted = true;
                    if !record.has_run {
                        record.state = WorkflowState::Removed;
                        record.ended = Some(now);
                    }
                });
                self.bequeath_predecessors(*id);
            }
            QueueEvent::PriorityChanged { id, priority } => {
                self.change(*id, |record| record.priority = *priority);
            }
            QueueEvent::CapacityFound(capacity) => {
                self.is_division_due |= self.capacity != *capacity;
                self.capacity = *capacity;
            }
            QueueEvent::UsageReported(usages) => {
                for (id, used) in usages {
                    self.charge_run(*id, *used);
                }
            }
            QueueEvent::RunEnded { id, outcome } => self.end_run(now, *id, outcome),
            QueueEvent::Ticked => {}
        }
    }

    fn add_workflow(&mut self, now: Time, event: &QueueEvent) {
        let QueueEvent::WorkflowSubmitted {
            id,
            user,
            name,
            priority,
            key,
            wanted,
            needed,
            after,
        } = event
        else {
            return;
        };
        let record = WorkflowRecord {
            user: user.clone(),
            name: name.clone(),
            priority: *priority,
            key: key.clone(),
            state: WorkflowState::Queued,
            has_run: false,
            is_unwanted: false,
            is_cancelled: false,
            submitted: now,
            started: None,
            ended: None,
            wanted: *wanted,
            needed: *needed,
            after: after.clone(),
            share: Resources::default(),
            used: RunUsage::default(),
            failure: None,
        };
        self.workflows.insert(*id, record);
        self.next_id = WorkflowId(self.next_id.0.max(id.0 + 1));
        self.index_workflow(*id);
    }

    /// Who waits for a workflow that leaves without a run waits for those that it waited for.
    fn bequeath_predecessors(&mut self, id: WorkflowId) {
        let Some(gone) = self.workflows.get(&id).filter(|it| it.state.is_over()) else {
            return;
        };
        let left = gone.after.clone();
        for later in self.index.waiting.range(id..) {
            let record = self.workflows.get_mut(later);
            let Some(record) = record.filter(|record| record.after.contains(&id)) else {
                continue;
            };
            record.after.retain(|earlier| *earlier != id);
            record.after.extend(&left);
            record.after.sort_unstable();
            record.after.dedup();
        }
    }

    /// Users are charged for the space that was kept for their runs.
    fn charge_space(&mut self, now: Time) {
        let elapsed_ms = now.ms_since(self.charged_until);
        let half_life_ms = self.settings.half_life_ms;
        if elapsed_ms == 0 {
            return;
        }
        for id in &self.index.running {
            let record = &self.workflows[id];
            if let Some(user) = self.users.get_mut(&record.user) {
                user.usage = user.usage.decayed(now, half_life_ms);
                // What is left over costs nobody anything.
                let asked = record.wanted.bytes.max(record.needed.bytes);
                user.usage
                    .charge_space(record.share.bytes.min(asked), elapsed_ms);
            }
        }
        self.charged_until = now;
    }

    /// Runs report sums, so nothing is charged twice.
    fn charge_run(&mut self, id: WorkflowId, used: RunUsage) {
        let (now, half_life_ms) = (self.charged_until, self.settings.half_life_ms);
        let Some(record) = self.workflows.get_mut(&id) else {
            return;
        };
        let slot_ms = used.slot_ms.saturating_sub(record.used.slot_ms);
        let home_bytes = used.home_bytes.saturating_sub(record.used.home_bytes);
        record.used = RunUsage {
            slot_ms: record.used.slot_ms.max(used.slot_ms),
            home_bytes: record.used.home_bytes.max(used.home_bytes),
        };
        if let Some(user) = self.users.get_mut(&record.user) {
            user.usage = user.usage.decayed(now, half_life_ms);
            user.usage.charge(slot_ms, home_bytes);
        }
    }

    fn end_run(&mut self, now: Time, id: WorkflowId, outcome: &RunOutcome) {
        self.change(id, |record| {
            record.has_run = false;
            record.ended = Some(now);
            record.share = Resources::default();
            record.state = match outcome {
                RunOutcome::Complete => WorkflowState::Complete,
                RunOutcome::Cancelled => WorkflowState::Removed,
                RunOutcome::Failed(_) if record.is_unwanted => WorkflowState::Removed,
                RunOutcome::Failed(_) => WorkflowState::Failed,
            };
            if let RunOutcome::Failed(why) = outcome {
                record.failure = Some(why.clone());
            }
        });
    }

    fn change(&mut self, id: WorkflowId, change: impl FnOnce(&mut WorkflowRecord)) {
        let Some(record) = self.workflows.get_mut(&id) else {
            return;
        };
        let before = record.ended;
        change(record);
        self.index.waiting.remove(&id);
        self.index.running.remove(&id);
        if let Some(ended) = before {
            self.index.over.remove(&(ended, id));
        }
        self.index_workflow(id);
        self.is_division_due = true;
    }

    fn index_workflow(&mut self, id: WorkflowId) {
        let record = &self.workflows[&id];
        if !record.key.is_empty() {
            let key = (record.user.clone(), record.key.clone());
            self.index.by_key.insert(key, id);
        }
        if record.has_run {
            self.index.running.insert(id);
        } else if let (true, Some(ended)) = (record.state.is_over(), record.ended) {
            self.index.over.insert((ended, id));
        } else {
            self.index.waiting.insert(id);
        }
    }

    // -------------------------------------------------------------------- decisions

    fn next_decision(&self, now: Time) -> Option<QueueDecision> {
        self.find_unwanted()
            .or_else(|| self.find_forgotten(now))
            .or_else(|| self.find_start(now))
            .or_else(|| self.find_division(now))
    }

    fn find_unwanted(&self) -> Option<QueueDecision> {
        let is_due = |id: &&WorkflowId| {
            let record = &self.workflows[*id];
            record.is_unwanted && !record.is_cancelled
        };
        let found = self.index.running.iter().find(is_due)?;
        Some(QueueDecision::Cancel(*found))
    }

    fn find_forgotten(&self, now: Time) -> Option<QueueDecision> {
        let (ended, id) = self.index.over.first()?;
        let is_old = now.ms_since(*ended) > self.settings.history_ms;
        let is_too_many = self.index.over.len() > self.settings.history_max;
        (is_old || is_too_many).then_some(QueueDecision::Forget(*id))
    }

    /// The first workflow in the order of the policy that may start. If there is no room for it
    /// now, nobody overtakes it: its turn comes when others end.
    fn find_start(&self, now: Time) -> Option<QueueDecision> {
        let has_room = self.index.running.len() < self.settings.runs_max;
        if !has_room || self.capacity == Resources::default() {
            return None;
        }
        let is_candidate = |id: &&WorkflowId| {
            let record = &self.workflows[*id];
            record.state == WorkflowState::Queued
                && can_hold(self.capacity, record.needed)
                && self.find_predecessor(record).is_none()
                && !self.is_above_quota(record)
        };
        let candidates = self.index.waiting.iter().filter(is_candidate);
        let candidates: Vec<WorkflowId> = candidates.copied().collect();
        let policy = find_order_policy(&self.settings.order).unwrap_or(&FairShare);
        let first = *policy.order(self.view(now), &candidates).first()?;
        let needed = self.workflows[&first].needed;
        self.fits_beside_runs(needed)
            .then_some(QueueDecision::Start(first))
    }

    fn find_division(&self, now: Time) -> Option<QueueDecision> {
        let interval_ms = DIVISION_INTERVAL_MS.min(self.settings.turn_ms);
        let is_late = now.ms_since(self.divided) >= interval_ms;
        if self.index.running.is_empty() || !(self.is_division_due || is_late) {
            return None;
        }
        let parts = divide_cluster(self.view(now), self.settings.turn_ms);
        let changed: Vec<(WorkflowId, Resources)> = parts
            .into_iter()
            .filter(|(id, part)| self.workflows[id].share != *part)
            .collect();
        (!changed.is_empty()).then_some(QueueDecision::ChangeShares(changed))
    }

    fn fits_beside_runs(&self, needed: Resources) -> bool {
        let runs = self.index.running.iter();
        let sum = runs.fold(needed, |sum, id| add(sum, self.workflows[id].needed));
        can_hold(self.capacity, sum)
    }

    /// A workflow that must end before another one starts.
    fn find_predecessor(&self, record: &WorkflowRecord) -> Option<WorkflowId> {
        let is_open = |id: &WorkflowId| {
            let earlier = self.workflows.get(id);
            earlier.is_some_and(|earlier| !earlier.state.is_over())
        };
        record.after.iter().copied().find(is_open)
    }

    fn is_above_quota(&self, record: &WorkflowRecord) -> bool {
        let Some(user) = self.users.get(&record.user) else {
            return false;
        };
        let runs = self.index.running.iter().map(|id| &self.workflows[id]);
        let own = runs.filter(|run| run.user == record.user);
        let sum = own.fold(record.needed, |sum, run| add(sum, run.needed));
        let is_above = |quota: Option<u64>, sum| quota.is_some_and(|quota| sum > quota);
        is_above(user.quota.slots, sum.slots) || is_above(user.quota.bytes, sum.bytes)
    }

    fn commit(&mut self, now: Time, decision: &QueueDecision) {
        match decision {
            QueueDecision::Start(id) => self.change(*id, |record| {
                record.has_run = true;
                record.state = WorkflowState::Running;
                record.started.get_or_insert(now);
                record.share = record.needed;
            }),
            QueueDecision::ChangeShares(parts) => {
                for (id, part) in parts {
                    if let Some(record) = self.workflows.get_mut(id) {
                        record.share = *part;
                    }
                }
                self.divided = now;
                self.is_division_due = false;
            }
            QueueDecision::Cancel(id) => self.change(*id, |record| record.is_cancelled = true),
            QueueDecision::Forget(id) => {
                if let Some(record) = self.workflows.remove(id)
                    && let Some(ended) = record.ended
                {
                    self.index.over.remove(&(ended, *id));
                    self.index.by_key.remove(&(record.user, record.key));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
