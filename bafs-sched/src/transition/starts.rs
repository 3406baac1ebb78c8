//! The loop that starts jobs: it asks for the next start and commits it, until none is left.

use bafs_proto::ids::ServerId;
use bafs_workflow::JobIndex;

use crate::policy::View;
use crate::policy::start_search::unlike_nodes;
use crate::space::Space;
use crate::state::planned_volumes::{Care, Create};
use crate::state::ready_queue::{Binding, ReadyKey};
use crate::state::scheduler_state::State;

/// Jobs of a queue that are tried before the queue sleeps, of those that need the same only one:
/// enough to pass jobs that wait for another writer, few enough that a million waiting jobs cost
/// nothing.
const LOOKAHEAD: usize = 16;

/// A job that found no place off its node is tried again after as many steps as there are running
/// jobs, divided by this. Among many, a place that is taken a little later costs less than a look
/// at each step.
const AWAY_REST: usize = 16;

impl State {
    /// Starts every job that can start, best first.
    pub(crate) fn place_all(&mut self) {
        loop {
            let awake = self.queues.awake_first();
            if awake.is_empty() {
                break;
            }
            for binding in awake {
                self.place_from(binding);
            }
        }
        while self.place_away() {}
        // The space that is being freed may be enough.
        if self.leaving.is_empty() && std::mem::take(&mut self.is_space_wanted) {
            self.evict_idle_caches();
        }
        if std::mem::take(&mut self.prefetching.is_in_the_way) {
            self.evict_prefetched();
        }
    }

    /// Starts one job of a queue, or lets the queue sleep.
    fn place_from(&mut self, binding: Binding) {
        if binding.is_some_and(|server| self.fleet.free_slots(server) == 0) {
            self.queues.sleep(binding);
            return;
        }
        let mut tried: Option<ReadyKey> = None;
        self.is_held_back = false;
        for _ in 0..LOOKAHEAD {
            let Some(key) = self.queues.after(binding, tried) else {
                break;
            };
            if self.try_place(key.job, binding) {
                return;
            }
            let is_telling = View::new(self).stands_for_its_kind(key.job);
            tried = Some(if is_telling { key.last_alike() } else { key });
        }
        match binding {
            Some(server) if self.packs_volumes() => self.queues.starve(server),
            _ => self.queues.sleep(binding),
        }
    }

    /// Gives a job a place on the node that it is bound to, or on the best of all.
    fn try_place(&mut self, job: JobIndex, binding: Binding) -> bool {
        if let Some(server) = binding
            && !View::new(self).can_end_in_time(job, server)
        {
            self.want_moved(job, server);
            return false;
        }
        // Before the search for nodes, which costs more: with many pipelines most are not admitted.
        if !View::new(self).may_start(job) || !self.admit(job) {
            return false;
        }
        let candidates = match binding {
            Some(server) => vec![server],
            None => self.policies().placement.candidates(View::new(self), job),
        };
        self.try_place_on(job, &candidates, Care::Safe)
    }

    /// Gives a job a place on any node that can take it, however many must be looked at.
    pub(crate) fn try_place_anywhere(&mut self, job: JobIndex, care: Care) -> bool {
        let all = unlike_nodes(View::new(self), job);
        View::new(self).may_start(job) && self.admit(job) && self.try_place_on(job, &all, care)
    }

    fn try_place_on(&mut self, job: JobIndex, candidates: &[ServerId], care: Care) -> bool {
        self.refresh_surveys();
        let policies = self.policies();
        let search = View::new(self).find_start(&policies, job, candidates, care);
        self.is_space_wanted |= search.is_space_wanted;
        self.is_held_back |= search.is_held_back;
        self.prefetching.is_in_the_way |= search.is_prefetch_in_the_way;
        let is_found = search.start.is_some();
        if let Some(start) = search.start {
            self.commit(start);
        }
        is_found
    }

    /// Gives a job whose data lie on a node without a free slot a place on one that has nothing to
    /// do. Answers whether there was one.
    fn place_away(&mut self) -> bool {
        if self.fleet.idle().next().is_none() {
            return false;
        }
        if let Some(rest) = self.away_rest.checked_sub(1) {
            self.away_rest = rest;
            return false;
        }
        let stuck = View::new(self).jobs_better_away();
        let (was_wanted, was_in_the_way) = (self.is_space_wanted, self.prefetching.is_in_the_way);
        let is_placed = stuck.into_iter().any(|job| self.try_place(job, None));
        if !is_placed {
            self.away_rest = self.attempts.len() / AWAY_REST;
        }
        // Nothing is deleted for a job that only need not wait.
        self.is_space_wanted &= was_wanted || self.packs_volumes();
        self.prefetching.is_in_the_way &= was_in_the_way;
        is_placed
    }

    /// Carries a start out.
    pub(super) fn begin_start(
        &mut self,
        job: JobIndex,
        server: ServerId,
        creates: Vec<Create>,
        borrows: Vec<(ServerId, Space)>,
    ) {
        self.wait_until = None;
        self.note_claims(job, server, &creates, borrows);
        self.assign(job, server, creates);
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::{RunId, ServerId};
    use bafs_proto::time::Time;
    use bafs_workflow::{JobIndex, VolumeIndex, parse_workflow};

    use crate::{Decision, Event, NodeInfo, Scheduler, Settings, Space};

    /// A node with room for the job is there.
    fn node_seen() -> Event {
        let space = Space {
            bytes: 10_000_000,
            files: 100_000,
        };
        Event::nodes_listed(vec![NodeInfo::single_group(ServerId(1), space, 1)])
    }

    fn scheduler() -> Scheduler {
        let text = "volume v scratch 1 MB\njob a {\nexecutable = x\n}\nmount v a /v\n";
        let none = |_: &str| Err("no files".to_owned());
        let workflow = parse_workflow("w.bafs", text, &none).unwrap().workflow;
        Scheduler::new(RunId(1), workflow, Settings::default())
    }

    #[test]
    fn starts_are_decisions_with_their_volumes() {
        let mut scheduler = scheduler();
        let mut actions = Vec::new();
        scheduler.step(Time(1), node_seen(), &mut actions);
        assert!(!actions.is_empty(), "it starts a job");
        let size = scheduler.size_of(VolumeIndex(0));
        let start = Decision::Start {
            job: JobIndex(0),
            server: ServerId(1),
            creates: vec![(VolumeIndex(0), Some(ServerId(1)), size)],
            borrows: Vec::new(),
        };
        let decisions = scheduler.last_decisions().to_vec();
        assert_eq!(decisions, [Decision::BeginRunning, start]);
        let text = serde_json::to_string(&decisions).expect("it is plain data");
        let read: Vec<Decision> = serde_json::from_str(&text).expect("it was written so");
        assert_eq!(read, decisions);
    }

    #[test]
    fn recorded_step_keeps_its_decisions() {
        let mut scheduler = scheduler();
        let step = scheduler.record_step(Time(1), node_seen());
        assert!(matches!(
            step.decisions[..],
            [Decision::BeginRunning, Decision::Start { .. }]
        ));
        assert_eq!(scheduler.last_decisions(), []);
    }
}
