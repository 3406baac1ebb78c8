//! Jobs that may start, in the order in which they should. Knows neither space nor servers' state.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Bound;

use bafs_proto::ids::ServerId;
use bafs_workflow::JobIndex;

use crate::space::Space;
use crate::state::work_counter::WorkCounter;

/// So few awake queues are looked at one by one.
const AWAKE_FEW: usize = 32;

/// Servers that look for space again when a volume is gone.
const FED_AT_ONCE: usize = 4;

/// Order among ready jobs: those that wait for a measurement last, then what the user prefers, then
/// their turn under a strategy (all alike without one), then the longest chain of what is urgent
/// (`policy/order/urgency.rs`), then least unfulfilled need first (bytes, then files; a little more
/// for readers of what came early, `policy/cache_space/prefetch.rs`), then jobs that go on with a
/// pipeline, then those of one kind together, then the order of declaration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ReadyKey {
    /// It may not start before another pipeline was measured.
    pub(crate) waits: bool,
    /// The higher the user wants it, the lower.
    pub(crate) behind: i32,
    pub(crate) turn: (u32, u32),
    pub(crate) chain: Reverse<u32>,
    pub(crate) need: Space,
    pub(crate) starts_pipeline: bool,
    /// Jobs of one kind ask for as many processors and read the same caches.
    pub(crate) kind: u32,
    pub(crate) job: JobIndex,
}

impl ReadyKey {
    /// The last of all jobs for which a place must have the same: what fails for one of them fails
    /// for each.
    pub(crate) fn last_alike(self) -> Self {
        let job = JobIndex(u32::MAX);
        Self { job, ..self }
    }
}

/// The node that a job is bound to because its data are there; `None` for a job that may run
/// anywhere.
pub(crate) type Binding = Option<ServerId>;

/// Ready jobs, one queue for each binding. A queue is *awake* when something changed that may let
/// one of its jobs start; only awake queues are looked at.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Queues {
    queues: BTreeMap<Binding, BTreeSet<ReadyKey>>,
    place: BTreeMap<JobIndex, (Binding, ReadyKey)>,
    awake: BTreeSet<Binding>,
    /// Jobs that are bound to a server, in the order of all.
    bound: BTreeSet<(ReadyKey, ServerId)>,
    /// Servers with a free slot whose jobs wait for space anywhere, the first to wait first.
    hungry: VecDeque<ServerId>,
    /// Jobs and queues that were looked at.
    pub(crate) tally: WorkCounter,
}

impl Queues {
    /// Puts a job in, or at another place; its queue wakes.
    pub(crate) fn put(&mut self, binding: Binding, key: ReadyKey) {
        self.take(key.job);
        self.tally.one();
        self.place.insert(key.job, (binding, key));
        self.queues.entry(binding).or_default().insert(key);
        if let Some(server) = binding {
            self.bound.insert((key, server));
        }
        self.awake.insert(binding);
    }

    /// Takes a job out.
    pub(crate) fn take(&mut self, job: JobIndex) {
        self.tally.one();
        if let Some((binding, key)) = self.place.remove(&job)
            && let Some(queue) = self.queues.get_mut(&binding)
        {
            queue.remove(&key);
            if let Some(server) = binding {
                self.bound.remove(&(key, server));
            }
            if queue.is_empty() {
                self.queues.remove(&binding);
            }
        }
    }

    /// All, in no order that matters.
    pub(crate) fn jobs(&self) -> Vec<JobIndex> {
        self.tally.add(self.place.len() as u64);
        self.place.keys().copied().collect()
    }

    pub(crate) fn contains(&self, job: JobIndex) -> bool {
        self.tally.one();
        self.place.contains_key(&job)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.place.is_empty()
    }

    /// Something changed on this server.
    pub(crate) fn wake(&mut self, server: ServerId) {
        self.awake.insert(Some(server));
        self.awake.insert(None);
    }

    /// Something changed for all.
    pub(crate) fn wake_all(&mut self) {
        self.tally.add(self.queues.len() as u64);
        self.awake.extend(self.queues.keys().copied());
        self.awake.insert(None);
    }

    /// Awake queues in the order of their heads: only the first of few, all of many. Among many,
    /// what comes a little too late costs less than to look for the first again and again.
    pub(crate) fn awake_first(&mut self) -> Vec<Binding> {
        self.tally.add(self.awake.len() as u64);
        let queues = &self.queues;
        self.awake.retain(|binding| queues.contains_key(binding));
        let heads = self
            .awake
            .iter()
            .filter_map(|binding| Some((*queues[binding].first()?, *binding)));
        if self.awake.len() <= AWAKE_FEW {
            return heads
                .min()
                .map(|(_, binding)| binding)
                .into_iter()
                .collect();
        }
        let mut heads: Vec<(ReadyKey, Binding)> = heads.collect();
        heads.sort_unstable();
        heads.into_iter().map(|(_, binding)| binding).collect()
    }

    /// Nothing in this queue can start now.
    pub(crate) fn sleep(&mut self, binding: Binding) {
        self.awake.remove(&binding);
    }

    /// Nothing in this server's queue can start before some space is free, there or elsewhere.
    pub(crate) fn starve(&mut self, server: ServerId) {
        self.tally.add(self.hungry.len() as u64);
        self.awake.remove(&Some(server));
        if !self.hungry.contains(&server) {
            self.hungry.push_back(server);
        }
    }

    /// Some space is free: those who waited longest for it wake.
    pub(crate) fn feed(&mut self) {
        let few = self.hungry.len().min(FED_AT_ONCE);
        self.awake.extend(self.hungry.drain(..few).map(Some));
    }

    /// Jobs that are bound to a server, with it, in the order in which they should start.
    pub(crate) fn bound(&self) -> impl Iterator<Item = (JobIndex, ServerId)> {
        let looked_at = self.bound.iter().inspect(|_| self.tally.one());
        looked_at.map(|(key, server)| (key.job, *server))
    }

    /// Jobs that wait for this server.
    pub(crate) fn length(&self, server: ServerId) -> usize {
        self.queues.get(&Some(server)).map_or(0, BTreeSet::len)
    }

    /// The first job of a queue that comes after this key.
    pub(crate) fn after(&self, binding: Binding, key: Option<ReadyKey>) -> Option<ReadyKey> {
        let from = key.map_or(Bound::Unbounded, Bound::Excluded);
        self.tally.one();
        let queue = self.queues.get(&binding)?;
        queue.range((from, Bound::Unbounded)).next().copied()
    }

    /// Of every queue the first job of those that need the same, so many at most of each.
    pub(crate) fn all_heads(&self, count: usize) -> Vec<ReadyKey> {
        let heads = self.queues.keys().flat_map(|binding| {
            let first = self.after(*binding, None);
            let next = |key: &ReadyKey| self.after(*binding, Some(key.last_alike()));
            std::iter::successors(first, next).take(count)
        });
        heads.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(bytes: u64, starts_pipeline: bool, job: u32) -> ReadyKey {
        ReadyKey {
            waits: false,
            behind: 0,
            turn: (0, 0),
            chain: Reverse(0),
            need: Space { bytes, files: 0 },
            starts_pipeline,
            kind: 0,
            job: JobIndex(job),
        }
    }

    #[test]
    fn queue_orders_by_need_then_progress_then_declaration() {
        let mut queues = Queues::default();
        for key in [
            key(9, false, 1),
            key(5, true, 2),
            key(5, false, 4),
            key(5, false, 3),
        ] {
            queues.put(None, key);
        }
        let next = |key: &ReadyKey| queues.after(None, Some(*key));
        let order = std::iter::successors(queues.after(None, None), next);
        let order: Vec<u32> = order.map(|key| key.job.0).collect();
        assert_eq!(order, [3, 4, 2, 1]);
        let heads: Vec<u32> = queues.all_heads(9).iter().map(|key| key.job.0).collect();
        assert_eq!(heads, [3, 2, 1], "3 and 4 need the same");
    }

    #[test]
    fn sleeping_queues_are_skipped() {
        let mut queues = Queues::default();
        let server = Some(ServerId(1));
        queues.put(None, key(5, true, 1));
        queues.put(server, key(0, false, 2));
        assert_eq!(queues.awake_first(), [server]);
        queues.sleep(server);
        assert_eq!(queues.awake_first(), [None]);
        queues.sleep(None);
        assert_eq!(queues.awake_first(), []);
        queues.wake(ServerId(1));
        assert_eq!(queues.awake_first(), [server]);
        queues.take(JobIndex(2));
        assert!(!queues.contains(JobIndex(2)));
        assert_eq!(queues.awake_first(), [None]);
    }
}
