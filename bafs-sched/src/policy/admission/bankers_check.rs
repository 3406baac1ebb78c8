//! Whether every pipeline that holds space can still come to its end after a job has taken more:
//! Dijkstra's banker, node by node. So pipelines never wait for each other's space, and nothing
//! that is done has to be dropped for others. Where jobs go is `policy/start_search.rs`.
//!
//! A node is *safe* when the pipelines at home there can end there one after the other, each with
//! what is free and what those before it leave. A job may start where all nodes on which it takes
//! space stay safe; `state/node_survey.rs` knows what is on each. A pipeline that is too large for
//! any single node *borrows* of another node: that one has room for the rest of it once its own
//! pipelines have ended.
//!
//! Copies give way when nothing else helps, and of a cache a node needs but a small part where
//! others can have the rest; so both count as free. A node that is alone counts all of the caches
//! that its pipelines still need. A pipeline that waits for jobs of another one gives nothing back
//! before that one has found its space: it takes space only where the largest of all pipelines
//! would still find its own (`state/cross_pipeline.rs` knows who waits).
//!
//! What fails (nodes, volumes) may leave nodes unsafe; then `transition/deadlock.rs` helps.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use bafs_proto::ids::ServerId;
use bafs_workflow::JobIndex;

use crate::policy::View;
use crate::space::Space;
use crate::state::cache_parts::{beyond_least, floor};
use crate::state::job_order::RemainingNeed;
use crate::state::node_surveys::Survey;
use crate::state::planned_volumes::Create;

/// Nodes that are looked at for one to borrow of, those with most room first.
const LENDERS_LOOKED_AT: usize = 64;

/// What a pipeline has on a node, and what it still needs beyond that.
#[derive(Debug, Clone, Copy)]
struct PipelineClaim {
    pipeline: u32,
    held: Space,
    rest: RemainingNeed,
    /// It waits for jobs of another pipeline.
    waits: bool,
}

/// A node with a start that is only considered.
struct SafetyCheck {
    free: Space,
    /// What caches there have beyond the least part, which counts as free.
    beyond: Space,
    /// Whether no other node can have a part of a cache.
    is_sole: bool,
    claims: Vec<PipelineClaim>,
}

/// What becomes of a node when no more jobs start there but of pipelines that have begun.
struct Completion {
    /// What is free when all whose turn can come have ended, but for those that wait for others.
    free: Space,
    /// What those whose turn does not come lack most.
    lack: Option<Space>,
}

impl SafetyCheck {
    /// With all of each cache where no other node can have a part of it, else with the least part.
    fn complete(self) -> Completion {
        if !self.is_sole {
            return self.complete_least();
        }
        let free = self.free.saturating_add(self.beyond);
        complete(free, self.claims, |rest| rest.whole)
    }

    fn complete_least(self) -> Completion {
        complete(self.free, self.claims, |rest| rest.least)
    }
}

/// Lets those that wait for others come last.
fn complete(
    free: Space,
    mut claims: Vec<PipelineClaim>,
    need: fn(RemainingNeed) -> Space,
) -> Completion {
    claims.sort_unstable_by_key(|claim| need(claim.rest));
    let (waiting, own): (Vec<PipelineClaim>, Vec<PipelineClaim>) =
        claims.into_iter().partition(|claim| claim.waits);
    let (free, own) = complete_all(free, own, need);
    let (_, waiting) = complete_all(free, waiting, need);
    let left = own.iter().chain(&waiting).map(|claim| need(claim.rest));
    Completion {
        free,
        lack: left.reduce(Space::component_max),
    }
}

/// What is free when all have ended whose turn can come, and the others.
fn complete_all(
    mut free: Space,
    mut claims: Vec<PipelineClaim>,
    need: fn(RemainingNeed) -> Space,
) -> (Space, Vec<PipelineClaim>) {
    loop {
        let before = claims.len();
        claims.retain(|claim| {
            let can_end = free.can_hold(need(claim.rest));
            free = if can_end {
                free.saturating_add(claim.held)
            } else {
                free
            };
            !can_end
        });
        if claims.is_empty() || claims.len() == before {
            return (free, claims);
        }
    }
}

impl View<'_> {
    /// The nodes that borrow of others once `job` has started on `server` and created these
    /// volumes, each with what it lacks. Nothing if it must not: not all that is under way could
    /// end.
    pub(crate) fn borrows(
        &self,
        job: JobIndex,
        server: ServerId,
        creates: &[Create],
    ) -> Option<Vec<(ServerId, Space)>> {
        let mut taken: BTreeMap<ServerId, Space> = BTreeMap::new();
        for (_, target, size) in creates {
            let Some(target) = target else { continue };
            let there = taken.entry(*target).or_default();
            *there = there.saturating_add(*size);
        }
        // A strategy counts on all storage: its limits say how much may be under way.
        if self.packs_volumes() {
            return Some(Vec::new());
        }
        let pipeline = self.graph.pipeline(job);
        let mut borrows = Vec::new();
        for (&target, &size) in &taken {
            let left = self.fleet.available(target).saturating_sub(size);
            let most = self.graph.courses.most;
            let enough = match self.fleet.is_sole(target) {
                true => most.whole,
                false => most.least,
            };
            if left.can_hold(enough) {
                continue;
            }
            let start = (target == server).then_some((job, creates));
            let survey = match start {
                Some((job, _)) if self.lets_go(job, target) => Arc::new(self.look(target, start)),
                _ => self.survey(target),
            };
            let check = self.safety_check(&survey, target, size, start);
            if let Some(lack) = check.complete().lack {
                // Only a pipeline that is too large for its node may borrow, and only for that one.
                let peak = self.graph.courses.peak(pipeline);
                if target != server || self.fleet.usable(target).can_hold(peak) {
                    return None;
                }
                borrows.push((target, lack));
            }
        }
        if !self.leaves_room_for_awaited(pipeline, &taken) {
            return None;
        }
        if borrows.is_empty() {
            return Some(borrows);
        }
        let lack = borrows.iter().map(|(_, lack)| *lack);
        let lack = lack.chain(self.claims.borrowing.values().copied());
        let lack = lack.reduce(Space::component_max).unwrap_or_default();
        let borrowers: BTreeSet<ServerId> = borrows.iter().map(|(target, _)| *target).collect();
        // What is alone everywhere was tried in thought (`policy/admission/feasibility.rs`).
        let can_borrow = self.is_alone(pipeline) || self.has_lender(lack, &borrowers, &taken);
        can_borrow.then_some(borrows)
    }

    /// Whether no other pipeline has begun.
    fn is_alone(&self, pipeline: u32) -> bool {
        self.claims.home.keys().all(|other| *other == pipeline)
    }

    /// Whether a pipeline that waits for jobs of others may take space: it gives none back before
    /// those have found theirs, and each of them that has not begun finds it if there is room for
    /// the largest pipeline anywhere.
    fn leaves_room_for_awaited(&self, pipeline: u32, taken: &BTreeMap<ServerId, Space>) -> bool {
        let cross_dependencies = &self.graph.cross_dependencies;
        if taken.is_empty() || !cross_dependencies.waits(pipeline) {
            return true;
        }
        let begun = self.claims.home.keys();
        let is_new = !self.claims.home.contains_key(&pipeline);
        let begun = begun.chain(is_new.then_some(&pipeline));
        let begun = begun
            .filter(|other| cross_dependencies.is_awaited(**other))
            .count();
        begun >= cross_dependencies.awaited() || {
            let most = self.graph.courses.most.least;
            self.has_lender(most, &BTreeSet::new(), taken)
        }
    }

    /// Whether a node that borrows of none has so much room when its own pipelines have ended.
    fn has_lender(
        &self,
        need: Space,
        borrowers: &BTreeSet<ServerId>,
        taken: &BTreeMap<ServerId, Space>,
    ) -> bool {
        let is_borrower = |server: &ServerId| {
            borrowers.contains(server) || self.claims.borrowing.contains_key(server)
        };
        let has_slots = |server: &ServerId| {
            let node = self.fleet.get(*server);
            node.is_some_and(|node| node.seen.slots > 0)
        };
        let nodes = self.fleet.roomiest().filter(|server| !is_borrower(server));
        let nodes = nodes.filter(has_slots).take(LENDERS_LOOKED_AT);
        let nodes: Vec<ServerId> = nodes.collect();
        nodes.into_iter().any(|server| {
            let taken = taken.get(&server).copied().unwrap_or_default();
            let survey = self.survey(server);
            let completion = self.safety_check(&survey, server, taken, None).complete();
            completion.lack.is_none() && completion.free.can_hold(need)
        })
    }

    /// What a node has when `taken` of it is taken, by a start there if one is given.
    fn safety_check(
        &self,
        survey: &Survey,
        server: ServerId,
        taken: Space,
        start: Option<(JobIndex, &[Create])>,
    ) -> SafetyCheck {
        let free = self.fleet.available(server).saturating_sub(taken);
        let (mut free, mut beyond) = (free.saturating_add(survey.leaving), survey.beyond);
        let starting = start.map(|(job, _)| self.graph.pipeline(job));
        // What the start adds to what its pipeline has.
        let mut made: Option<Space> = None;
        for (volume, target, size) in start.into_iter().flat_map(|(_, creates)| creates) {
            if *target == Some(server) {
                match self.graph.volume(*volume).is_cache {
                    true => {
                        free = free.saturating_add(floor(*size));
                        beyond = beyond.saturating_add(beyond_least(*size));
                    }
                    false if self.is_leaving(*volume, start.map(|(job, _)| job)) => {
                        free = free.saturating_add(*size);
                    }
                    false => made = Some(made.unwrap_or_default().saturating_add(*size)),
                }
            }
        }
        let is_home = |pipeline: &u32| {
            starting == Some(*pipeline) || self.claims.home.get(pipeline) == Some(&server)
        };
        let claim = |pipeline: u32, held: Space| {
            let rest = match start {
                Some((job, _)) if starting == Some(pipeline) => {
                    let has_begun =
                        |other: JobIndex| other == job || self.graph.state(other).has_begun();
                    self.graph.courses.rest_with(pipeline, job, has_begun)
                }
                _ => self.graph.courses.rest(pipeline),
            };
            PipelineClaim {
                pipeline,
                held,
                rest,
                waits: self.graph.cross_dependencies.waits(pipeline),
            }
        };
        let mut claims = Vec::with_capacity(survey.held.len() + 1);
        for (&pipeline, &held) in survey.held.iter().filter(|(pipeline, _)| is_home(pipeline)) {
            let more = made.take_if(|_| starting == Some(pipeline));
            claims.push(claim(
                pipeline,
                held.saturating_add(more.unwrap_or_default()),
            ));
        }
        if let (Some(made), Some(pipeline)) = (made, starting) {
            let at = claims.partition_point(|claim| claim.pipeline < pipeline);
            claims.insert(at, claim(pipeline, made));
        }
        SafetyCheck {
            free,
            beyond,
            is_sole: self.fleet.is_sole(server),
            claims,
        }
    }

    /// Whether all pipelines at home on a node can end there when so much of it is taken.
    pub(crate) fn can_spare(&self, server: ServerId, taken: Space) -> bool {
        let survey = self.survey(server);
        let completion = self
            .safety_check(&survey, server, taken, None)
            .complete_least();
        completion.lack.is_none()
    }

    /// What a node must keep free so that all pipelines at home there can end there one after the
    /// other, once a job has started there if one is given.
    pub(crate) fn lacking_to_end(
        &self,
        server: ServerId,
        start: Option<(JobIndex, &[Create])>,
    ) -> Space {
        let survey = match start {
            Some((job, _)) if self.lets_go(job, server) => Arc::new(self.look(server, start)),
            _ => self.survey(server),
        };
        let need = match start {
            None => self.needed_to_end(&survey, server),
            Some(_) => least_to_end(
                self.safety_check(&survey, server, Space::ZERO, start)
                    .claims,
            ),
        };
        need.saturating_sub(survey.leaving)
    }

    /// The least free space on a node with which all pipelines at home there can end, beside what
    /// they hold, and whether any of them has a job to start yet. Room is kept, too, for its part
    /// of the caches that are nowhere and that the next job of one of them reads.
    pub(crate) fn least_to_end(&self, server: ServerId) -> (Space, bool) {
        let survey = self.look(server, None);
        let claims = self.safety_check(&survey, server, Space::ZERO, None).claims;
        let next = |claim: &PipelineClaim| self.graph.courses.next_of(claim.pipeline);
        let next: Vec<JobIndex> = claims.iter().filter_map(next).collect();
        let caches = next.iter().map(|job| self.absent_caches(*job));
        let caches = caches.fold(Space::ZERO, Space::component_max);
        let nodes = self.fleet.alive.min(self.fleet.group_size(server) as u64);
        let part = Space {
            bytes: caches.bytes.div_ceil(nodes.max(1)),
            files: caches.files,
        };
        let least = least_to_end(claims);
        // What can never be had here would only keep others away.
        let reserved = self.fleet.get(server).map(|node| node.reserved);
        let left = self.fleet.offered(server);
        let left = left
            .saturating_sub(reserved.unwrap_or_default())
            .saturating_sub(least);
        let part = if left.can_hold(part) {
            part
        } else {
            Space::ZERO
        };
        (least.saturating_add(part), !next.is_empty())
    }

    /// What the caches need that a job reads and that are nowhere.
    fn absent_caches(&self, job: JobIndex) -> Space {
        let mounted = self.graph.mounted(job).into_iter();
        let absent = mounted.filter(|(volume, _)| {
            self.graph.volume(*volume).is_cache && !self.volumes.is_live(*volume)
        });
        absent.fold(Space::ZERO, |sum, (volume, _)| {
            sum.saturating_add(self.size_of(volume))
        })
    }

    /// What must be free on a node for the pipelines at home there to end, none of which starts.
    pub(crate) fn needed_to_end(&self, survey: &Survey, server: ServerId) -> Space {
        let need = || least_to_end(self.safety_check(survey, server, Space::ZERO, None).claims);
        *survey.to_end.get_or_init(need)
    }

    /// What the pipelines at home on a node lack most to end there; nothing where they can.
    pub(crate) fn lack_to_complete(&self, server: ServerId) -> Option<Space> {
        let survey = self.survey(server);
        let check = self.safety_check(&survey, server, Space::ZERO, None);
        check.complete().lack
    }

    /// Asserts that what is remembered is what is found.
    pub(crate) fn check_surveys(&self) {
        let Some(changed) = self.changed_nodes() else {
            return;
        };
        for (server, known) in self.surveys.of.known() {
            if changed.contains(&server) {
                continue;
            }
            let found = self.look(server, None);
            if known.to_end.get().is_some() {
                self.needed_to_end(&found, server);
            }
            assert_eq!(*known, found, "{server}: what is there");
        }
    }
}

/// The least free space with which all of these can end one after the other.
fn least_to_end(mut claims: Vec<PipelineClaim>) -> Space {
    claims.sort_unstable_by_key(|claim| claim.rest.least);
    let (mut need, mut left) = (Space::ZERO, Space::ZERO);
    for claim in claims {
        need = need.component_max(claim.rest.least.saturating_sub(left));
        left = left.saturating_add(claim.held);
    }
    need
}
