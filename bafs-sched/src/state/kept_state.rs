//! What of the state the journal keeps, and how that is put back: rows as they were written, and
//! from them whatever is rebuilt. No event is interpreted here, and nothing is decided, so that a
//! journal of other rules is continued.

use std::collections::BTreeSet;

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_proto::time::Time;
use bafs_workflow::{JobIndex, VolumeIndex};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

use crate::space::Space;
use crate::state::attempts::Attempt;
use crate::state::cache_statistics::CacheStatistics;
use crate::state::copy_costs::Checkpoints;
use crate::state::critical_path::Urgency;
use crate::state::deletions::Leaving;
use crate::state::extractions::Extractions;
use crate::state::isolation::CutOff;
use crate::state::job_records::JobRecords;
use crate::state::jobs::Graph;
use crate::state::limits::StrategyLimits;
use crate::state::lost_volumes::LostVolume;
use crate::state::nodes::Fleet;
use crate::state::observed_access::ObservedAccess;
use crate::state::pipeline_homes::Claims;
use crate::state::preemptions::Preemptions;
use crate::state::prefetch::PrefetchState;
use crate::state::progress::{JobFailure, Outcome};
use crate::state::recorded::{ChangeSet, Kept, RowChanges, kept, whole_rows};
use crate::state::row_encoding::{read_rows, write_map};
use crate::state::scheduler_state::{Phase, State};
use crate::state::strategy::Guided;
use crate::state::timers::Timers;
use crate::state::tracked::{Keys, Rows, Table};
use crate::state::user_commands::Steering;
use crate::state::volume_sizes::Sizes;
use crate::state::volumes::{Instance, InstanceState, Volumes};
use crate::strategy_selector::SharedModel;

/// Of so many pipelines whose volumes have other sizes each course is found anew, of more all are.
const COURSES_FEW: usize = 64;

whole_rows!(JobFailure);

kept! {
    /// What was written of the state.
    StateRows of State;
    values {
        now: Time,
        phase: Phase,
        is_cancelled: bool,
        cut_off: Option<CutOff>,
        away_rest: usize,
        #[serde(rename = "patience")]
        wait_until: Option<Time>,
        lacks_room_since: Option<Time>,
        is_settling: bool,
        protected: Option<u32>,
        unprotected: u32,
        rules_eased: u64,
        nodes_gone: u64,
        last_gone: Option<(ServerId, Time)>,
        urgency: Urgency,
        is_space_wanted: bool,
        is_held_back: bool,
        scratch_need_max: Space,
        scratch_volume_max: u64,
        cache_need_max: Space,
        cleaned_with: Option<usize>,
        next_id: u64,
        started: u64,
        outcome: Option<Outcome>,
    }
    tables {
        stale: Table<VolumeId, ServerId>,
        left: Table<VolumeId, LostVolume>,
        redone: Table<JobIndex, u64>,
        #[serde(rename = "strays")]
        orphaned_executions: Table<bafs_proto::ids::ExecutionId, ServerId>,
        unanswered: Table<VolumeId, ServerId>,
        late: Keys<VolumeId>,
        idle_caches: Keys<VolumeIndex>,
        wanted_moves: Keys<VolumeIndex>,
        failures: Rows<JobFailure>,
        messages: Rows<String>,
    }
    indexed { attempts: Table<JobIndex, Attempt> }
    parts {
        graph: Graph,
        volumes: Volumes,
        fleet: Fleet,
        extractions: Extractions,
        checkpoints: Checkpoints,
        leaving: Leaving,
        timers: Timers,
        #[serde(rename = "ways")]
        preemptions: Preemptions,
        #[serde(rename = "admission")]
        limits: Option<StrategyLimits>,
        guided: Option<Guided>,
        claims: Claims,
        steering: Steering,
        sizes: Sizes,
        records: JobRecords,
        #[serde(rename = "deeds")]
        observed_access: ObservedAccess,
        #[serde(rename = "skew")]
        cache_statistics: CacheStatistics,
        #[serde(rename = "warming")]
        prefetching: PrefetchState,
    }
    rebuilt {
        run, settings, policies, queues, under_way, executions, surveys, cpus_max, out, decisions,
    }
}

/// What was written of the state of a run by one step, or all that differs from a new one; in the
/// form in which a journal has it, which is small. One of a journal is checked when it is read.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct StateChanges(Bytes);

impl StateChanges {
    /// The rows; else why this version does not read them.
    ///
    /// # Errors
    /// Rows of an unknown form.
    pub(crate) fn decode(&self) -> Result<StateRows, String> {
        match self.0.is_empty() {
            true => Ok(StateRows::default()),
            false => read_rows(&self.0),
        }
    }

    /// The bytes of a journal that has them, which are not copied unless others have them too.
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.0.into()
    }

    /// Whether this version reads them; else why not.
    ///
    /// # Errors
    /// Rows of an unknown form.
    pub(crate) fn check(&self) -> Result<(), String> {
        self.decode().map(drop)
    }
}

impl State {
    /// What was written since the last call, of which `last` has the single values. `buffer` is
    /// only a place to write to.
    pub(crate) fn take_changes(
        &mut self,
        last: &mut StateRows,
        buffer: &mut Vec<u8>,
    ) -> StateChanges {
        buffer.clear();
        write_map(buffer, |to| self.write_changes(last, to));
        StateChanges(Bytes::copy_from_slice(buffer))
    }

    /// All that differs from a new state.
    pub(crate) fn all_changes(&self) -> StateChanges {
        let mut bytes = Vec::new();
        write_map(&mut bytes, |to| self.write_all(to));
        StateChanges(bytes.into())
    }

    /// Puts back what was written by a step, without the step. What is only read by decisions
    /// (queues, surveys) is rebuilt by [`Self::rebuild`].
    pub(crate) fn put_back(&mut self, mut rows: StateRows) {
        self.restore_sizes(std::mem::take(&mut rows.graph.sizes));
        self.fleet.restore(std::mem::take(&mut rows.fleet.nodes));
        let jobs = std::mem::take(&mut rows.graph.jobs);
        self.graph.restore_jobs(jobs);
        let standing = std::mem::take(&mut rows.graph.standing);
        self.graph.restore_standing(standing);
        let of_workflow = std::mem::take(&mut rows.graph.volumes);
        self.graph.restore_volumes(of_workflow);
        self.restore_instances(std::mem::take(&mut rows.volumes.instances));
        self.restore_attempts(std::mem::take(&mut rows.attempts));
        self.make_limits(&rows);
        // Last, as counts of changes grew by all this.
        self.restore_plain(&mut rows);
        debug_assert!(rows.is_nothing(), "all is put back: {rows:?}");
    }

    /// Limits of a strategy that is new, before what was used up of them is put back.
    fn make_limits(&mut self, rows: &StateRows) {
        let limits = &rows.limits;
        let exists = limits.exists.0.unwrap_or_else(|| self.limits.is_some());
        if exists
            && (limits.is_fresh || self.limits.is_none())
            && let Some(rules) = limits.part.rules.0.clone()
        {
            self.limits = Some(StrategyLimits::new(rules, &self.graph));
        }
    }

    fn restore_sizes(&mut self, rows: RowChanges<VolumeIndex, Space>) {
        let mut pipelines = BTreeSet::new();
        for (volume, size) in rows.set {
            self.resize(volume, size);
            pipelines.extend(self.graph.pipeline_of(volume));
            if self.graph.volume(volume).is_cache {
                let users = self.graph.workflow.volume(volume).users.iter();
                pipelines.extend(users.map(|user| self.graph.pipeline(*user)));
            }
        }
        match pipelines.len() <= COURSES_FEW {
            true => pipelines
                .into_iter()
                .for_each(|pipeline| self.graph.measure_course(pipeline)),
            false => self.graph.measure_courses(),
        }
    }

    fn restore_instances(&mut self, rows: RowChanges<VolumeId, Instance>) {
        for (id, before, now) in self.volumes.restore(rows) {
            let place = |instance: &Option<Instance>| {
                let server = instance.as_ref().and_then(|instance| instance.server);
                server.zip(instance.as_ref().map(|instance| instance.size))
            };
            if let Some((server, size)) = place(&before) {
                self.fleet.update(server, |node| {
                    node.reserved = node.reserved.saturating_sub(size);
                });
            }
            if let Some((server, size)) = place(&now) {
                self.fleet.update(server, |node| {
                    node.reserved = node.reserved.saturating_add(size);
                });
            }
            let is_creating =
                |instance: &Instance| matches!(instance.state, InstanceState::Creating);
            if let Some(before) = before
                && !now.as_ref().is_some_and(is_creating)
            {
                for job in before.waiters {
                    if let Some(attempt) = self.attempts.derived_mut(&job) {
                        attempt.missing.remove(&id);
                    }
                }
            }
        }
    }

    fn restore_attempts(&mut self, rows: RowChanges<JobIndex, Attempt>) {
        let mut gone = rows.gone;
        if rows.is_all {
            gone.extend(self.attempts.keys().copied());
        }
        for job in gone {
            self.take_attempt(job);
        }
        for (job, attempt) in rows.set {
            self.take_attempt(job);
            self.put_attempt(job, attempt);
        }
    }

    fn take_attempt(&mut self, job: JobIndex) {
        let Some(attempt) = self.attempts.remove(&job) else {
            return;
        };
        let caches = self.parts_of(&attempt);
        self.under_way.end(job, attempt.server, caches.into_iter());
        self.executions.remove(&attempt.execution);
        self.fleet.update(attempt.server, |node| {
            node.busy = node.busy.saturating_sub(attempt.slots);
            node.busy_memory = node.busy_memory.saturating_sub(attempt.memory_bytes);
        });
        for id in &attempt.missing {
            if let Some(waiters) = self.volumes.restored_waiters(*id) {
                waiters.retain(|waiter| *waiter != job);
            }
        }
    }

    fn put_attempt(&mut self, job: JobIndex, mut attempt: Attempt) {
        let caches = self.parts_of(&attempt);
        let (server, slots, memory) = (attempt.server, attempt.slots, attempt.memory_bytes);
        self.under_way.begin(job, server, caches.into_iter());
        self.executions.insert(attempt.execution, job);
        self.fleet.update(server, |node| {
            node.busy += slots;
            node.busy_memory = node.busy_memory.saturating_add(memory);
        });
        for used in &attempt.uses {
            let instance = self.volumes.get(used.id);
            let is_creating = instance.is_some_and(|it| it.state == InstanceState::Creating);
            if is_creating
                && attempt.missing.insert(used.id)
                && let Some(waiters) = self.volumes.restored_waiters(used.id)
            {
                waiters.push(job);
            }
        }
        self.attempts.insert(job, attempt);
    }

    /// Rebuilds what is only read by decisions, after everything was put back. All is looked at
    /// again: what slept is awake.
    pub(crate) fn rebuild(&mut self) {
        for job in self.queues.jobs() {
            self.queues.take(job);
        }
        if self.phase != Phase::Finishing {
            self.enqueue_ready();
        }
        self.queues.wake_all();
        self.graph.begun.note_all();
        self.volumes.changed.note_all();
        self.surveys = crate::state::node_surveys::Surveys::default();
        self.prefetching.look_again();
        let graph = &self.graph;
        for unknown in self.sizes.unknown.values_mut() {
            unknown.retain(|pipeline| !graph.is_pipeline_final(*pipeline));
        }
        self.rebuild_model();
    }

    /// The model of the workload knows sizes that were measured, once it was asked.
    fn rebuild_model(&mut self) {
        let Some(guided) = &mut self.guided else {
            return;
        };
        if guided.asked.is_some() && !self.sizes.kind_of.is_empty() {
            let workflow = match guided.guide.simulated_plan.is_some() {
                true => std::borrow::Cow::Owned(self.sizes.measured(&self.graph.workflow)),
                false => std::borrow::Cow::Borrowed(self.graph.workflow.as_ref()),
            };
            guided.model = SharedModel(guided.model.0.with_sizes(&workflow));
        }
    }

    /// Names what differs in another state that was put back from what was written of this one:
    /// something is written that is not noted, or not rebuilt.
    #[doc(hidden)]
    pub fn restored_differences(&self, restored: &Self) -> Vec<String> {
        let (one, other) = (self.without_memory(), restored.without_memory());
        let mut found = Vec::new();
        one.note_differences(&other, "", &mut found);
        found
    }

    /// Asserts that nothing differs.
    ///
    /// # Panics
    /// When something does.
    #[doc(hidden)]
    pub fn check_restored(&self, restored: &Self) {
        let found = self.restored_differences(restored);
        assert!(found.is_empty(), "{}", found.join("\n"));
    }

    /// The state without what only says that nothing changed since something was looked at.
    fn without_memory(&self) -> Self {
        let mut state = self.clone();
        state.queues = crate::state::ready_queue::Queues::default();
        state.cache_statistics.refetched.parts.clear();
        state.prefetching.looked_at = None;
        if let Some(ahead) = &mut state.prefetching.ahead {
            ahead.asked.clear();
        }
        state.out.clear();
        for unknown in state.sizes.unknown.values_mut() {
            unknown.clear();
        }
        for id in state.volumes.iter().map(|(id, _)| id).collect::<Vec<_>>() {
            if let Some(waiters) = state.volumes.restored_waiters(id) {
                waiters.sort_unstable();
            }
        }
        state
    }
}
