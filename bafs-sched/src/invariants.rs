//! What must hold after every step, asserted. Slow: it counts everything anew, for tests.

use std::collections::BTreeMap;

use bafs_proto::ids::ServerId;

use crate::policy::View;
use crate::space::Space;
use crate::state::attempt_index::UnderWay;
use crate::state::critical_path::Chains;
use crate::state::jobs::JobState;
use crate::state::scheduler_state::State;
use crate::state::volumes::InstanceState;

impl State {
    /// Asserts every invariant of the core.
    ///
    /// # Panics
    /// When one does not hold, which is a bug of the core.
    pub fn check(&self) {
        self.check_jobs();
        self.check_volumes();
        self.check_absent();
        self.check_nodes();
        self.check_under_way();
        self.check_copies();
        self.check_sizes();
        View::new(self).check_surveys();
        self.check_chains();
    }

    /// What is left is what jobs that are not final count.
    fn check_chains(&self) {
        let (chains, workflow) = (&self.graph.chains, &self.graph.workflow);
        let mut counted = Chains {
            lengths: BTreeMap::new(),
            left: 0,
            ..chains.clone()
        };
        let jobs = self.graph.job_indexes();
        let left = jobs.filter(|job| !self.graph.state(*job).is_final());
        left.for_each(|job| counted.count(workflow, job, true));
        assert_eq!(*chains, counted, "what is left to do");
        let live = self.fleet.live();
        let slots: u64 = live.map(|(_, node)| u64::from(node.slots())).sum();
        assert_eq!(self.fleet.slots, slots, "slots of live nodes");
    }

    /// What is derived from sizes may count more than there is, never less.
    fn check_sizes(&self) {
        let need = self.largest_scratch_need();
        assert!(
            self.scratch_need_max.can_hold(need),
            "most that a job needs"
        );
        let largest = self.largest_scratch_volume();
        assert!(self.scratch_volume_max >= largest, "largest volume");
    }

    fn check_jobs(&self) {
        let mut waits_for = vec![0; self.graph.workflow.jobs.len()];
        for job in self.graph.job_indexes() {
            let state = self.graph.state(job);
            if state == JobState::Done {
                continue;
            }
            for later in self.graph.waiting_for(job) {
                waits_for[later.as_usize()] += 1;
                let is_awaited = state.is_dead() && self.graph.state(later) == JobState::Waiting;
                let name = &self.graph.workflow.job(later).name;
                assert!(!is_awaited, "{name} waits for what is never done");
            }
        }
        for job in self.graph.job_indexes() {
            let (node, spec) = (self.graph.job(job), self.graph.workflow.job(job));
            let name = &spec.name;
            let left = waits_for[job.as_usize()];
            assert_eq!(node.parents_left, left, "{name}: parents left");
            let is_active = node.state == JobState::Active;
            assert_eq!(
                is_active,
                self.attempts.contains_key(&job),
                "{name}: attempt"
            );
            assert!(
                node.state != JobState::Ready || node.parents_left == 0,
                "{name} is ready before its parents are done"
            );
            assert!(
                !self.queues.contains(job) || node.state == JobState::Ready,
                "{name} is queued but {:?}",
                node.state
            );
        }
        for (job, attempt) in &self.attempts {
            assert_eq!(self.executions.get(&attempt.execution), Some(job));
        }
        assert_eq!(
            self.executions.len(),
            self.attempts.len(),
            "one execution for each attempt"
        );
    }

    fn check_absent(&self) {
        let caches = self.graph.volume_indexes();
        let caches = caches.filter(|volume| self.graph.volume(*volume).is_cache);
        let absent = caches.filter(|volume| !self.volumes.is_live(*volume));
        let mut expected: BTreeMap<u64, u64> = BTreeMap::new();
        for volume in absent {
            *expected.entry(self.size_of(volume).bytes).or_default() += 1;
        }
        assert_eq!(
            *self.volumes.absent(),
            expected,
            "caches that are not there"
        );
    }

    fn check_volumes(&self) {
        for volume in self.graph.volume_indexes() {
            let (node, spec) = (
                self.graph.volume(volume),
                self.graph.workflow.volume(volume),
            );
            let name = &spec.name;
            let left = spec
                .users
                .iter()
                .filter(|job| !self.graph.state(**job).is_final());
            assert_eq!(
                node.users_left as usize,
                left.clone().count(),
                "{name}: users left"
            );
            let steady = left.filter(|job| self.graph.is_steady(**job));
            assert_eq!(
                node.users_steady as usize,
                steady.count(),
                "{name}: users of pipelines that were never rolled back"
            );
            let left = node
                .writers
                .iter()
                .filter(|j| self.graph.state(**j) != JobState::Done);
            assert_eq!(
                node.writers_left as usize,
                left.count(),
                "{name}: writers left"
            );
            let live = self.volumes.live(volume).len();
            assert!(
                node.is_cache || live <= 1,
                "{name}: a scratch volume exists once"
            );
            assert!(
                node.is_needed() || live == 0,
                "{name} exists although nobody needs it"
            );
            let active = node
                .writers
                .iter()
                .filter(|job| self.attempts.contains_key(job));
            assert!(active.count() <= 1, "{name}: one writer at a time");
            if let Some(writer) = node.writer {
                assert!(
                    self.attempts.contains_key(&writer),
                    "{name}: its writer is under way"
                );
            }
        }
    }

    /// What is known of attempts by node and by cache is what there is.
    fn check_under_way(&self) {
        let mut known = UnderWay::default();
        for (job, attempt) in &self.attempts {
            let caches = self.parts_of(attempt);
            known.begin(*job, attempt.server, caches.into_iter());
        }
        assert_eq!(self.under_way, known, "attempts by node and by cache");
    }

    fn check_nodes(&self) {
        let mut reserved: BTreeMap<ServerId, Space> = BTreeMap::new();
        for (id, instance) in self.volumes.iter() {
            let Some(server) = instance.server else {
                continue;
            };
            let sum = reserved.entry(server).or_default();
            *sum = sum.saturating_add(instance.size);
            assert!(!self.is_lost(server), "volume {id} exists on a lost server");
            assert!(
                instance.state == InstanceState::Creating || instance.waiters.is_empty(),
                "somebody waits for volume {id}, which is not being created"
            );
        }
        for (server, node) in self.fleet.iter() {
            let name = &node.seen.name;
            assert_eq!(
                node.reserved,
                reserved.remove(&server).unwrap_or_default(),
                "{name}"
            );
            assert!(
                node.seen.capacity.can_hold(node.reserved),
                "{name} is over-committed"
            );
            let here = self.attempts.values();
            let here = here.filter(|attempt| attempt.server == server);
            let used = here.map(|attempt| (attempt.slots, attempt.memory_bytes));
            let (slots, memory) = used.fold((0, 0), |(a, b), (c, d)| (a + c, b + d));
            assert_eq!((node.busy, node.busy_memory), (slots, memory), "{name}");
        }
    }
}
