//! When nothing goes on although jobs are ready: what is tried then, what gives way, and what is
//! told when nothing helps.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::VolumeId;
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::describe::{DELETE_FAULTS_TOLD, LEFT_SHOWN, bytes_only, describe, describe_bytes};
use crate::policy::order::node_demand::GivesUp;
use crate::space::Space;
use crate::state::planned_volumes::Care;
use crate::state::scheduler_state::State;
use crate::state::timers::Timer;
use crate::state::volumes::{Instance, InstanceState};

/// Jobs of each queue that are tried when nothing goes on, of those that need the same one.
const KINDS_TRIED: usize = 64;

/// A pipeline that waits for jobs of others loses its protection so often, until one ends.
const UNPROTECTED_MAX: u32 = 16;

/// A pipeline makes way for others so often, until one ends or more jobs are done than ever before.
const WAYS_MAX: u32 = 2;

impl State {
    /// When jobs are ready, nothing is under way and none of them can start, pipelines block each
    /// other or space is missing: jobs may leave their node, then other pipelines give way, then
    /// the workflow fails. It never just waits.
    pub(crate) fn look_for_blockade(&mut self) {
        if !self.attempts.is_empty() || self.queues.is_empty() || !self.is_quiet() {
            return;
        }
        // What has the longest chain may fit nowhere while others do.
        if self.end_urgency() {
            self.place_all();
            if !self.attempts.is_empty() || !self.is_quiet() {
                return;
            }
        }
        let mut heads = self.queues.all_heads(KINDS_TRIED);
        heads.sort_unstable();
        let mut candidates: Vec<JobIndex> = heads.iter().map(|key| key.job).collect();
        if let Some(trouble) = self.describe_full_disks(&candidates) {
            self.messages.push(trouble);
            return self.finish();
        }
        if self.unprotect_if_stuck() || self.pass_stuck_probes_on() {
            return;
        }
        // Nobody of this run reads them, and others may wait for their room.
        if self.fleet.is_shared() && self.free_idle_caches() {
            // No fact need follow that would make anybody look again.
            return self.timers.set(self.now.plus_ms(1), Timer::Patience);
        }
        // Among many that wait, those that go on with a pipeline may be far behind.
        let under_way = self.protected.into_iter().chain(self.probes());
        let under_way = under_way.chain(self.pipelines_at_home());
        let next = under_way.filter_map(|pipeline| self.graph.courses.next_of(pipeline));
        candidates.extend(next.filter(|job| self.queues.contains(*job)));
        if let Some(pipeline) = self.protected {
            candidates.sort_by_key(|job| self.graph.pipeline(*job) != pipeline);
        }
        let (mut ordered, other) = self.first_of(&candidates);
        ordered.extend(other);
        match self.gives_up(&ordered) {
            GivesUp::Nothing => return,
            GivesUp::Caches => {
                let _ = self.free_far_caches() || self.free_unused_caches(&ordered);
                return;
            }
            GivesUp::Work => {}
        }
        let has_nodes = self.fleet.live().any(|(_, node)| node.seen.slots > 0);
        if has_nodes && self.break_blockade(&candidates) {
            if self.attempts.is_empty() && self.is_quiet() {
                // What is deleted nowhere, as with remote I/O, is followed by no fact that would
                // make anybody look again.
                self.timers.set(self.now.plus_ms(1), Timer::Patience);
            }
            return;
        }
        // Who waits for a home may leave room when it is back.
        if self.waits_on() || self.timers.has_job(|job| self.is_homeless(job)) {
            return;
        }
        let until = *self
            .patience
            .get_or_insert_with(|| self.now.plus_ms(self.settings.space_timeout_ms));
        if self.now < until {
            self.timers.set(until, Timer::Patience);
            return;
        }
        let trouble = self.describe_blockade(candidates.first().copied());
        self.messages.push(trouble);
        self.finish();
    }

    /// Of these jobs those that should start first, and the others. What has begun goes before what
    /// has not, which would only hold more space.
    fn first_of(&self, candidates: &[JobIndex]) -> (Vec<JobIndex>, Vec<JobIndex>) {
        let is_begun = |job: &JobIndex| self.is_under_way(self.graph.pipeline(*job));
        let (begun, new): (Vec<JobIndex>, Vec<JobIndex>) =
            candidates.iter().copied().partition(is_begun);
        let is_wanted = |job: &JobIndex| {
            let pipeline = self.graph.pipeline(*job);
            begun.is_empty() || self.graph.crossings.is_awaited(pipeline)
        };
        let (wanted, other): (Vec<JobIndex>, Vec<JobIndex>) = new.into_iter().partition(is_wanted);
        (begun.into_iter().chain(wanted).collect(), other)
    }

    /// Has one of these jobs start, or something deleted for them, what costs least first.
    fn break_blockade(&mut self, candidates: &[JobIndex]) -> bool {
        let (first, other) = self.first_of(candidates);
        if self.try_all(candidates, Care::Safe)
            || self.free_idle_caches()
            || (!self.fleet.is_unanswered() && self.relax_rules())
            || self.drop_all_copies()
            || self.free_far_caches()
            || self.try_all(&first, Care::Fitting)
            || self.free_unused_caches(&first)
            || self.try_all(&first, Care::None)
            || self.free_all_caches()
        {
            return true;
        }
        let mut free = first.iter().chain(&other).copied();
        let free = free.find(|job| {
            !self.waits_for_probe(self.graph.pipeline(*job)) && !self.waits_for_like(*job)
        });
        free.is_some_and(|job| self.make_way(job))
            || self.try_all(&other, Care::Fitting)
            || self.try_all(&other, Care::None)
    }

    /// Has the first of these jobs start that can; of starts that are safe all, or those that wait
    /// at other nodes than have room for them would go on one after the other.
    fn try_all(&mut self, jobs: &[JobIndex], care: Care) -> bool {
        let mut is_any = false;
        let mut most = self.most_left_in_a_group();
        for &job in jobs {
            // Without it each job has each node divide a cache in vain.
            if self.has_cache_beyond(job, most) {
                self.is_space_wanted = true;
            } else if self.try_place_anywhere(job, care) {
                if care != Care::Safe {
                    return true;
                }
                is_any = true;
                most = self.most_left_in_a_group();
            }
        }
        is_any
    }

    /// What the nodes of a group have left together, in bytes, where that is most.
    fn most_left_in_a_group(&self) -> u64 {
        let mut left: BTreeMap<&str, u64> = BTreeMap::new();
        for (server, node) in self.fleet.live() {
            let of_group = left.entry(&node.seen.group).or_default();
            *of_group = of_group.saturating_add(self.fleet.available(server).bytes);
        }
        left.into_values().max().unwrap_or(0)
    }

    /// Whether a job reads a cache that is nowhere yet and finds no room in any group: so many
    /// bytes are left where most are.
    fn has_cache_beyond(&self, job: JobIndex, most: u64) -> bool {
        let mounts = &self.graph.workflow.job(job).mounts;
        let mut volumes = mounts.iter().map(|mount| mount.volume);
        !self.settings.caches_nothing()
            && volumes.any(|volume| {
                let is_absent = self.graph.volume(volume).is_cache && !self.volumes.is_live(volume);
                is_absent && self.size_of(volume).bytes > most
            })
    }

    /// Whether a home did not answer when a job needed it last.
    fn is_homeless(&self, job: JobIndex) -> bool {
        self.graph.job(job).troubles.environment.away.is_some()
    }

    /// Whether nothing is under way that could change what is possible.
    fn is_quiet(&self) -> bool {
        let is_given_up = |id: VolumeId| {
            let instance = self.volumes.get(id);
            instance.is_some_and(|instance| instance.delete_faults >= DELETE_FAULTS_TOLD)
        };
        let mut volumes = self.volumes.iter();
        self.extractions.is_quiet()
            && !self
                .timers
                .has_work(is_given_up, |job| self.is_homeless(job))
            && volumes.all(|(id, instance)| instance.state.is_complete() || is_given_up(id))
    }

    /// Drops the volumes of the last pipeline that is under way, other than the one of `job`, and
    /// lets only that one start jobs until it is through. Where there is no other, and its volumes
    /// need several nodes, its own go: they may lie on the wrong ones. Answers whether there was
    /// one. A pipeline with results that home does not take is none: they are finished, and would
    /// be made in vain; nor is one that made way a few times, and more was never done since.
    fn make_way(&mut self, job: JobIndex) -> bool {
        let done = self.graph.totals.done;
        if done > self.ways.done_most {
            self.ways.done_most = done;
            self.ways.made.clear();
        }
        let pipeline = self.protected.unwrap_or_else(|| self.graph.pipeline(job));
        let of = |volume: VolumeIndex| self.graph.pipeline_of(volume);
        // What is being deleted makes no way.
        let is_there = |i: &Instance| {
            let is_going = matches!(i.state, InstanceState::Deleting | InstanceState::Held);
            !is_going && !self.graph.volume(i.volume).is_cache
        };
        let holders = self.extractions.holders().into_iter();
        let finished = holders.filter_map(|id| of(self.volumes.get(id)?.volume));
        let finished: BTreeSet<u32> = finished.collect();
        let scratch = self.volumes.iter().filter(|(_, i)| is_there(i));
        let holders = scratch.filter_map(|(_, i)| of(i.volume));
        let may_go = |other: &u32| {
            let made = self.ways.made.get(other).copied().unwrap_or(0);
            let most = match *other == pipeline {
                true => u32::from(self.is_larger_than_nodes(pipeline)),
                false => WAYS_MAX,
            };
            made < most && !finished.contains(other)
        };
        let victims: BTreeSet<u32> = holders.filter(may_go).collect();
        let others = victims.iter().rev().find(|other| **other != pipeline);
        let Some(&victim) = others.or_else(|| victims.first()) else {
            return false;
        };
        let dropped: Vec<(VolumeId, VolumeIndex)> = self
            .volumes
            .iter()
            .filter(|(_, i)| is_there(i) && of(i.volume) == Some(victim))
            .map(|(id, instance)| (id, instance.volume))
            .collect();
        *self.ways.made.entry(victim).or_default() += 1;
        self.protected = Some(pipeline);
        self.end_claims(victim);
        for &(id, volume) in &dropped {
            self.retire(id);
            self.take_back_extracts(volume, id);
        }
        self.redo(
            Vec::new(),
            dropped.into_iter().map(|(_, volume)| volume).collect(),
        );
        true
    }

    /// Whether a pipeline needs more space at once than each node has that its volumes may lie on.
    fn is_larger_than_nodes(&self, pipeline: u32) -> bool {
        let peak = self.graph.courses.peak(pipeline);
        let mut nodes = self.nodes_for_scratch();
        !nodes.any(|server| self.fleet.usable(server).can_hold(peak))
    }

    /// Lets all pipelines start jobs again when the protected one is through.
    pub(crate) fn unprotect_if_done(&mut self) {
        if self
            .protected
            .is_some_and(|pipeline| self.graph.is_pipeline_final(pipeline))
        {
            self.protected = None;
            self.queues.wake_all();
        }
    }

    /// Nothing goes on: where the protected pipeline waits for jobs of others, all may start jobs
    /// again. Answers whether they may; so often while no pipeline ends, that it does not help.
    fn unprotect_if_stuck(&mut self) -> bool {
        let Some(pipeline) = self.protected else {
            return false;
        };
        let mut members = self.graph.members(pipeline);
        if self.unprotected >= UNPROTECTED_MAX || members.any(|job| self.queues.contains(job)) {
            return false;
        }
        self.unprotected += 1;
        self.protected = None;
        self.queues.wake_all();
        // No fact need follow that would make anybody look again.
        self.timers.set(self.now.plus_ms(1), Timer::Patience);
        true
    }

    fn describe_blockade(&self, job: Option<JobIndex>) -> String {
        let name = job.map_or("", |job| self.graph.workflow.job(job).name.as_str());
        if let Some(job) = job
            && !self.graph.job(job).troubles.refused_by.is_empty()
        {
            let refused_by = self.graph.job(job).troubles.refused_by.iter();
            let nodes: Vec<String> = refused_by.map(|server| self.fleet.name(*server)).collect();
            return format!(
                "job '{name}' cannot start: {} cannot run it, and no other node has room; add a \
                 node, or see their logs",
                nodes.join(" and ")
            );
        }
        let slots = job.map_or(1, |job| self.slots_of(job));
        let nodes = self.fleet.live().map(|(_, node)| node.seen.slots);
        if let Some(most) = nodes.max().filter(|most| *most < slots) {
            return format!(
                "job '{name}' cannot start: it needs {slots} processors, but no live node has more \
                 than {most}; start a larger node"
            );
        }
        let lacks = match job {
            Some(job) => self.describe_lacking_room(job, slots),
            None => None,
        };
        match lacks {
            None => format!("job '{name}' cannot start: no node is live; start nodes"),
            Some(lacks) => format!(
                "job '{name}' cannot start: {lacks}{}{}; add storage or make volumes smaller",
                self.describe_kept(),
                self.describe_ways()
            ),
        }
    }

    /// What a job finds no room for; nothing where no node has the slots for it.
    fn describe_lacking_room(&self, job: JobIndex, slots: u32) -> Option<String> {
        let workers = self
            .fleet
            .live()
            .filter(|(_, node)| node.seen.slots >= slots);
        let missing = self.graph.mounted(job).into_iter().map(|(v, _)| v);
        let missing = missing.filter(|volume| !self.volumes.is_live(*volume));
        let (caches, scratch): (Vec<VolumeIndex>, Vec<VolumeIndex>) =
            missing.partition(|volume| self.graph.volume(*volume).is_cache);
        let sum = |volumes: &[VolumeIndex]| {
            let sizes = volumes.iter().map(|volume| self.size_of(*volume));
            sizes.fold(Space::ZERO, Space::saturating_add)
        };
        let (need, of_caches) = (sum(&scratch), sum(&caches));
        let left = workers.map(|(id, _)| self.fleet.available(id));
        // The one that lacks least.
        let have = left.min_by_key(|have| need.saturating_sub(*have))?;
        if !have.can_hold(need) {
            let which = match slots {
                1 => "no node".to_owned(),
                slots => format!("no node with {slots} processors"),
            };
            return Some(format!(
                "its volumes need {} more, but {which} has more than {} free",
                describe(need),
                describe(have)
            ));
        }
        let (all, most) = (need.saturating_add(of_caches), self.most_left_in_a_group());
        if all.bytes > most {
            return Some(format!(
                "its volumes and caches need {} more, but the nodes of a group together have at \
                 most {} free",
                describe_bytes(bytes_only(all.bytes)),
                describe_bytes(bytes_only(most))
            ));
        }
        let peaks = self.graph.courses.peaks(self.graph.pipeline(job));
        Some(format!(
            "there is space for it, but started pipelines could then not end; its pipeline needs \
             up to {} at once, and {} for caches",
            describe(peaks.least),
            describe_bytes(peaks.whole.saturating_sub(peaks.least))
        ))
    }

    /// Which pipelines made way for each other in vain, if some did.
    fn describe_ways(&self) -> String {
        let made = self.ways.made.keys().take(LEFT_SHOWN);
        let name = |it: &u32| format!("'{}'", self.graph.workflow.job(JobIndex(*it)).name);
        let names: Vec<String> = made.map(name).collect();
        match names.as_slice() {
            [] => String::new(),
            names => format!(
                ", even after preemption of the pipelines of {}; these wait for each other and \
                 hold their volumes, which must all fit at once",
                names.join(", ")
            ),
        }
    }

    /// What results that could not be sent home take of the nodes, if they take any.
    fn describe_kept(&self) -> String {
        let kept = self.volumes.iter().filter(|(_, i)| i.is_kept);
        let kept: Vec<&Instance> = kept.map(|(_, instance)| instance).collect();
        if kept.is_empty() {
            return String::new();
        }
        let held = kept
            .iter()
            .fold(Space::ZERO, |sum, i| sum.saturating_add(i.size));
        let name = |i: &&Instance| format!("'{}'", self.graph.workflow.volume(i.volume).name);
        let names: Vec<String> = kept.iter().take(LEFT_SHOWN).map(name).collect();
        let more = match kept.len().saturating_sub(LEFT_SHOWN) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        format!(
            ", because unsent results hold {} (volumes {}{more}); correct the reason of the home's \
             refusal",
            describe(held),
            names.join(", ")
        )
    }
}
