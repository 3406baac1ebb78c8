//! A pipeline that is tried in thought, alone on all nodes: whether it can come to its end from
//! where it is. What follows from that says `policy/admission/feasibility.rs`.

use std::collections::{BTreeMap, BTreeSet};

use bafs_workflow::{JobIndex, VolumeIndex};

use crate::describe::bytes_of;
use crate::space::Space;
use crate::state::cache_parts::floor;
use crate::state::scheduler_state::State;

/// How many ways are tried.
const TRIES_MAX: u32 = 50_000;

/// Where volumes go when only one place is tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Prefer {
    Roomiest,
    Tightest,
}

/// What a node has for a pipeline.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct NodeCapacity {
    pub(crate) space: Space,
    pub(crate) slots: u32,
}

/// A pipeline that is tried in thought, alone on all nodes.
#[derive(Clone)]
pub(crate) struct Trial<'s> {
    pub(crate) scheduler: &'s State,
    pub(crate) course: &'s [JobIndex],
    /// What the nodes have free on which jobs run, and their slots.
    pub(crate) free: Vec<Space>,
    slots: Vec<u32>,
    /// Jobs that ask for more are not judged by it: such a node may come again.
    slots_most: u32,
    /// What other nodes have, for parts of caches.
    pub(crate) beside_bytes: u64,
    /// Where the volumes that exist are, as a position in `free`.
    pub(crate) place: BTreeMap<VolumeIndex, usize>,
    pub(crate) done: BTreeSet<JobIndex>,
    /// By scratch volume, how many of its users are done.
    users_done: BTreeMap<VolumeIndex, usize>,
    pub(crate) tries_left: u32,
}

/// A job that is run in thought.
struct Step {
    job: JobIndex,
    /// All of its scratch volumes, those of them that it makes, and what these take.
    scratch: Vec<VolumeIndex>,
    made: Vec<VolumeIndex>,
    need: Space,
    /// With the least part of each of its caches: what its node must have.
    need_there: Space,
    /// Whether all nodes together have room for these and the caches.
    fits_all: bool,
}

impl<'s> Trial<'s> {
    /// Nothing of the pipeline exists yet on these nodes; others have so many bytes.
    pub(crate) fn new(
        scheduler: &'s State,
        course: &'s [JobIndex],
        nodes: Vec<NodeCapacity>,
        beside_bytes: u64,
    ) -> Self {
        Self {
            scheduler,
            course,
            slots: nodes.iter().map(|node| node.slots).collect(),
            slots_most: nodes.iter().map(|node| node.slots).max().unwrap_or(0),
            free: nodes.into_iter().map(|node| node.space).collect(),
            beside_bytes,
            place: BTreeMap::new(),
            done: BTreeSet::new(),
            users_done: BTreeMap::new(),
            tries_left: TRIES_MAX,
        }
    }

    /// Whether the rest can be run from here, in some order. Tries the course first.
    pub(crate) fn go_on(&mut self) -> bool {
        if self.done.len() == self.course.len() {
            return true;
        }
        let workflow = &self.scheduler.graph.workflow;
        let is_ready = |job: &JobIndex| {
            let mut parents = workflow.job(*job).parents.iter();
            let pipeline = |job: JobIndex| self.scheduler.graph.pipeline(job);
            !self.done.contains(job)
                && parents
                    .all(|parent| pipeline(*parent) != pipeline(*job) || self.done.contains(parent))
        };
        let ready: Vec<JobIndex> = self.course.iter().copied().filter(is_ready).collect();
        for job in ready {
            let step = self.step(job);
            for node in 0..self.free.len() {
                // Empty nodes of one size and as many slots are the same.
                let is_same = |other: usize| {
                    let holds = |at: usize| self.place.values().any(|place| *place == at);
                    let looks_same = self.free[other] == self.free[node]
                        && self.slots[other] == self.slots[node];
                    looks_same && !holds(other) && !holds(node)
                };
                let is_new = !(0..node).any(is_same);
                if !is_new || !self.has_room(&step, node) {
                    continue;
                }
                if self.tries_left == 0 {
                    return false;
                }
                self.tries_left -= 1;
                if self.run(&step, node) {
                    return true;
                }
                if step.made.is_empty() {
                    break;
                }
            }
        }
        false
    }

    /// Whether the rest can be run from here by its course, each volume in the place that is
    /// preferred.
    pub(crate) fn follow(mut self, prefer: Prefer) -> bool {
        for job in self.course {
            if self.done.contains(job) {
                continue;
            }
            let step = self.step(*job);
            let nodes = 0..self.free.len();
            let able = nodes.filter(|node| self.has_room(&step, *node));
            let best = match prefer {
                Prefer::Roomiest => able.max_by_key(|node| self.free[*node]),
                Prefer::Tightest => able.min_by_key(|node| self.free[*node]),
            };
            let Some(node) = best else {
                return false;
            };
            self.end(&step, node);
        }
        true
    }

    /// What a job that runs now makes.
    fn step(&self, job: JobIndex) -> Step {
        let scratch = self.scheduler.scratch_of(job);
        let mut made = scratch.clone();
        made.retain(|volume| !self.place.contains_key(volume));
        let need = self.sum(&made);
        let caches = self.scheduler.caches_of(job);
        let sizes = caches.iter().map(|cache| self.scheduler.size_of(*cache));
        let nodes = self.free.iter().copied();
        let free = bytes_of(nodes.inspect(|_| self.scheduler.fleet.tally.one()));
        let all = self.beside_bytes.saturating_add(free);
        Step {
            job,
            scratch,
            made,
            need,
            need_there: sizes.clone().map(floor).fold(need, Space::saturating_add),
            fits_all: all >= sizes.fold(need, Space::saturating_add).bytes,
        }
    }

    fn sum(&self, volumes: &[VolumeIndex]) -> Space {
        let sizes = volumes.iter().map(|volume| self.scheduler.size_of(*volume));
        sizes.fold(Space::ZERO, Space::saturating_add)
    }

    /// Whether a job finds slots on a node, room for what it makes and the least part of its caches
    /// there, and for these on all nodes together.
    fn has_room(&self, step: &Step, node: usize) -> bool {
        self.scheduler.fleet.tally.one();
        let slots = self.scheduler.slots_of(step.job).min(self.slots_most);
        let has_slots = self.slots[node] >= slots;
        has_slots && step.fits_all && self.free[node].can_hold(step.need_there)
    }

    fn run(&mut self, step: &Step, node: usize) -> bool {
        let before = (
            self.free.clone(),
            self.place.clone(),
            self.users_done.clone(),
        );
        self.end(step, node);
        if self.go_on() {
            return true;
        }
        self.done.remove(&step.job);
        (self.free, self.place, self.users_done) = before;
        false
    }

    /// A job has begun: what it made, and only it uses, may stay for long.
    pub(crate) fn note_begun(&mut self, job: JobIndex) {
        self.done.insert(job);
        for volume in self.scheduler.scratch_of(job) {
            self.count_user(volume);
        }
    }

    /// What there is once a job is done whose volumes are there already.
    pub(crate) fn end_made(&mut self, job: JobIndex) {
        self.done.insert(job);
        self.leave(&self.scheduler.scratch_of(job));
    }

    /// What there is once a job has made its volumes on a node, and is done.
    fn end(&mut self, step: &Step, node: usize) {
        self.free[node] = self.free[node].saturating_sub(step.need);
        self.place
            .extend(step.made.iter().map(|volume| (*volume, node)));
        self.done.insert(step.job);
        self.leave(&step.scratch);
    }

    /// One more of the users of these volumes is done. They go with their last one.
    fn leave(&mut self, scratch: &[VolumeIndex]) {
        for volume in scratch {
            if self.count_user(*volume)
                && let Some(node) = self.place.remove(volume)
            {
                self.free[node] = self.free[node].saturating_add(self.scheduler.size_of(*volume));
            }
        }
    }

    /// One more of the users of a volume is done; answers whether that was the last one.
    fn count_user(&mut self, volume: VolumeIndex) -> bool {
        self.scheduler.fleet.tally.one();
        let done = self.users_done.entry(volume).or_default();
        *done += 1;
        *done == self.scheduler.graph.workflow.volume(volume).users.len()
    }
}
