//! Admission of a whole workflow: whether it fits into the nodes that are there, before
//! anything starts. What cannot fit is refused with what is missing; what is not known to fit may
//! try.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::ServerId;
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::describe::{bytes_of, describe, describe_bytes, describe_lack};
use crate::policy::View;
use crate::policy::admission::pipeline_trial::{NodeCapacity, Prefer, Trial};
use crate::space::Space;
use crate::state::planned_volumes::{Care, Create};

/// Kinds of pipelines that are judged: those with the same sizes count as one kind.
const KINDS_MAX: usize = 256;

/// Jobs of a pipeline for which every order and every place are tried.
const TRIED_JOBS_MAX: usize = 12;

/// Of a pipeline with more jobs, but no more than so many, only a few ways along its course are
/// tried: all would cost too much, and as much stack.
const FOLLOWED_JOBS_MAX: usize = 400;

/// Nor is one tried with more jobs than this, times the nodes that matter.
const FOLLOWED_STEPS_MAX: usize = 40_000;

/// Volumes that are named one by one; of more the first are, and the rest is counted.
const NAMES_SHOWN: usize = 5;

/// Said of what does not fit without a plan: only plans let jobs' volumes lie on other nodes.
const PLAN_HINT: &str = "; without a plan, all volumes of a job are on its node; `bafs \
    run --plan` may use several nodes";

/// What became of trying whether a pipeline fits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fit {
    Fits,
    Never,
    Unknown,
}

impl View<'_> {
    /// Why the workflow can never run on the nodes that are there, if so.
    pub(crate) fn misfit(&self) -> Option<String> {
        let too_wide = self.too_wide();
        if too_wide.is_some() || self.settings.has_private_data_at_home() {
            return too_wide;
        }
        if let Some(demanding) = self.too_demanding() {
            return Some(demanding);
        }
        let too_large = self.too_large_volume().or_else(|| self.too_large_caches());
        let too_large = too_large.or_else(|| self.too_large_together());
        if too_large.is_some() || self.may_pack_volumes() {
            return too_large;
        }
        let too_large = self
            .too_large_job()
            .or_else(|| self.too_many_files())
            .or_else(|| self.too_large_pipeline())
            .or_else(|| self.too_large_near())?;
        let nodes = self.fleet.live();
        let storing = nodes.filter(|(id, _)| self.fleet.offered(*id).bytes > 0);
        match self.settings.suggests_plan && storing.count() > 1 {
            true => Some(too_large + PLAN_HINT),
            false => Some(too_large),
        }
    }

    fn too_wide(&self) -> Option<String> {
        let slots = self.fleet.live().map(|(_, node)| node.seen.slots).max();
        let slots = slots.unwrap_or(0);
        let mut jobs = self.jobs_left();
        let wide = jobs.find(|job| self.slots_of(*job) > slots)?;
        let (name, cpus) = (&self.graph.workflow.job(wide).name, self.slots_of(wide));
        Some(format!(
            "job '{name}' needs {cpus} CPUs, but no node has more than {slots} slots; add a larger \
             node, or request fewer CPUs"
        ))
    }

    /// Jobs that are neither done nor given up.
    pub(crate) fn jobs_left(&self) -> impl Iterator<Item = JobIndex> {
        let jobs = self.graph.job_indexes();
        jobs.filter(|job| !self.graph.state(*job).is_final())
    }

    /// What each node that may hold scratch volumes offers, the largest first.
    fn sizes(&self) -> Vec<Space> {
        self.offers().iter().map(|offer| offer.space).collect()
    }

    /// The same with their slots.
    fn offers(&self) -> Vec<NodeCapacity> {
        let offer = |id| NodeCapacity {
            space: self.fleet.offered(id),
            slots: self.fleet.get(id).map_or(0, |node| node.seen.slots),
        };
        let mut offers: Vec<NodeCapacity> = self.nodes_for_scratch().map(offer).collect();
        offers.sort_unstable_by(|a, b| b.cmp(a));
        offers
    }

    /// Whether these volumes take no room that a job of the pipeline may need which asks for more
    /// slots than another: it cannot run on their nodes anyway, or all can.
    fn spares_wide_jobs(&self, course: &[JobIndex], creates: &[Create]) -> bool {
        if self.cpus_max <= 1 {
            return true;
        }
        let left = course
            .iter()
            .filter(|job| !self.graph.state(**job).has_begun());
        let widths: BTreeSet<u32> = left.map(|job| self.slots_of(*job)).collect();
        let targets = creates.iter().filter_map(|(_, target, _)| *target);
        let mut slots = targets.map(|id| self.fleet.get(id).map_or(0, |node| node.seen.slots));
        slots.all(|slots| {
            let able = widths.range(..=slots).count();
            able <= 1 || able == widths.len()
        })
    }

    /// The most slots that a job of a pipeline asks for.
    fn widest(&self, pipeline: u32) -> u32 {
        let course = self.graph.courses.of(pipeline);
        let slots = course.iter().map(|job| self.slots_of(*job));
        slots.max().unwrap_or(1)
    }

    /// Of nodes, those with most room first, the ones that matter to a pipeline: for each number of
    /// slots that its jobs ask for as many as it has jobs, as none makes volumes on more than one.
    fn that_matter<T>(
        &self,
        course: &[JobIndex],
        mut nodes: Vec<T>,
        slots: impl Fn(&T) -> u32,
    ) -> Vec<T> {
        // What no node has is not waited for here.
        let most = nodes.iter().map(&slots).max().unwrap_or(0);
        let width = |job: &JobIndex| self.slots_of(*job).min(most);
        let widths: BTreeSet<u32> = course.iter().map(width).collect();
        let mut wanted: Vec<(u32, usize)> = widths.iter().map(|it| (*it, course.len())).collect();
        nodes.retain(|node| {
            let mut matters = false;
            for (width, left) in &mut wanted {
                if *left > 0 && slots(node) >= *width {
                    (*left, matters) = (*left - 1, true);
                }
            }
            matters
        });
        nodes
    }

    fn too_large_volume(&self) -> Option<String> {
        let sizes = self.sizes();
        let mut groups: BTreeMap<u64, Space> = BTreeMap::new();
        for volume in self.graph.volume_indexes() {
            let (need, spec) = (self.size_of(volume), self.graph.workflow.volume(volume));
            let (fits, have, place) = if self.graph.volume(volume).is_cache {
                let group = groups.entry(need.files);
                let group = *group.or_insert_with(|| self.largest_group(need.files));
                let place = "all nodes of a group together offer";
                (group.can_hold(need), group, place)
            } else {
                let fits = sizes.iter().any(|size| size.can_hold(need));
                (fits, largest(&sizes), "the largest node offers")
            };
            if fits || self.graph.volume(volume).users_left == 0 {
                continue;
            }
            return Some(format!(
                "volume '{}' needs {}, but {place} {}: {} too little; add storage, or make the \
                 volume smaller (nodes: {})",
                spec.name,
                describe(need),
                describe(have),
                describe_lack(need.saturating_sub(have)),
                describe_sizes(&sizes, self.settings.slack_permille)
            ));
        }
        None
    }

    fn too_large_job(&self) -> Option<String> {
        let sizes = self.sizes();
        let needs = self.first_needs().into_iter().enumerate();
        let is_left = |job: usize| {
            let job = JobIndex(u32::try_from(job).unwrap_or(u32::MAX));
            !self.graph.state(job).is_final()
        };
        let mut large = needs
            .filter(|(job, need)| !sizes.iter().any(|size| size.can_hold(*need)) && is_left(*job));
        let (job, need) = large.next()?;
        let have = largest(&sizes);
        Some(format!(
            "the scratch volumes of job '{}' need {} on one node, but the largest node offers {}: \
             {} too little; add a larger node, or make the volumes smaller (nodes: {})",
            self.graph.workflow.jobs[job].name,
            describe(need),
            describe(have),
            describe_lack(need.saturating_sub(have)),
            describe_sizes(&sizes, self.settings.slack_permille)
        ))
    }

    /// A pipeline that does not fit even when nothing else runs.
    fn too_large_pipeline(&self) -> Option<String> {
        let offers = self.offers();
        let mut able: BTreeMap<u32, Vec<NodeCapacity>> = BTreeMap::new();
        let mut seen = BTreeSet::new();
        for job in self.graph.job_indexes() {
            let pipeline = self.graph.pipeline(job);
            if self.graph.courses.of(pipeline).first() != Some(&job) {
                continue;
            }
            let widest = self.widest(pipeline);
            let with_slots = || offers.iter().filter(|offer| offer.slots >= widest);
            let able = able
                .entry(widest)
                .or_insert_with(|| with_slots().copied().collect());
            if self.fits_one_of(pipeline, able) {
                continue;
            }
            if self.graph.is_pipeline_final(pipeline) {
                continue;
            }
            let course = self.graph.courses.of(pipeline).iter();
            let needs = |job: &JobIndex| (self.slots_of(*job), self.caches_of(*job));
            let needs: Vec<_> = course.map(needs).collect();
            if seen.len() >= KINDS_MAX || !seen.insert((self.kind(pipeline), needs)) {
                continue;
            }
            if self.fits_alone(pipeline, &offers) == Fit::Never {
                return Some(self.describe_pipeline(pipeline));
            }
        }
        None
    }

    fn describe_pipeline(&self, pipeline: u32) -> String {
        let offers = self.offers();
        let sizes: &Vec<Space> = &offers.iter().map(|offer| offer.space).collect();
        let course = self.graph.courses.of(pipeline);
        let sum = |job: &JobIndex| {
            let scratch = self.scratch_of(*job).into_iter();
            scratch.fold(Space::ZERO, |sum, volume| {
                sum.saturating_add(self.size_of(volume))
            })
        };
        let peak = self.graph.courses.peak(pipeline);
        let demanding = course.iter().max_by_key(|job| sum(job));
        let demanding = demanding.copied().unwrap_or(JobIndex(pipeline));
        let name = |job: JobIndex| &self.graph.workflow.job(job).name;
        let have = largest(sizes);
        let widest = self.widest(pipeline);
        let mut roomy = offers.iter().filter(|offer| offer.space.can_hold(peak));
        if have.can_hold(peak) && roomy.all(|offer| offer.slots < widest) {
            return format!(
                "the pipeline of job '{}' can never fit, in any order, even alone: nodes with \
                 enough slots for its jobs (up to {widest} CPUs) lack space for its volumes; add \
                 storage to such a node, or request fewer CPUs",
                name(JobIndex(pipeline)),
            );
        }
        format!(
            "the pipeline of job '{}' can never fit, in any order, even alone: it needs up to {} \
             at once, most of it at job '{}' with {}, but the largest node offers {}: {} too \
             little; add a node of that size, add more nodes, or make the volumes smaller (nodes: \
             {})",
            name(JobIndex(pipeline)),
            describe(peak),
            name(demanding),
            self.names(&self.scratch_of(demanding)),
            describe(have),
            describe_lack(peak.saturating_sub(have)),
            describe_sizes(sizes, self.settings.slack_permille)
        )
    }

    pub(crate) fn names(&self, volumes: &[VolumeIndex]) -> String {
        let named = volumes.iter().map(|volume| {
            let name = &self.graph.workflow.volume(*volume).name;
            format!("'{name}' ({})", describe_bytes(self.size_of(*volume)))
        });
        let named: Vec<String> = named.take(NAMES_SHOWN + 1).collect();
        if volumes.len() > NAMES_SHOWN {
            let more = volumes.len() + 1 - NAMES_SHOWN;
            let shown = named[..NAMES_SHOWN - 1].join(", ");
            return format!("volumes {shown} and {more} more");
        }
        match named.split_last() {
            Some((last, [])) => format!("volume {last}"),
            Some((last, others)) => format!("volumes {} and {last}", others.join(", ")),
            None => "no volume".to_owned(),
        }
    }

    /// Whether it is known that a pipeline never fits, even alone.
    pub(crate) fn can_never_fit(&self, pipeline: u32) -> bool {
        let offers = self.offers();
        let is_easy = self.may_pack_volumes() || self.settings.has_private_data_at_home();
        let widest = self.widest(pipeline);
        let able = offers.iter().filter(|offer| offer.slots >= widest);
        let able: Vec<NodeCapacity> = able.copied().collect();
        !is_easy
            && !self.fits_one_of(pipeline, &able)
            && self.fits_alone(pipeline, &offers) == Fit::Never
    }

    /// Whether all scratch volumes of a pipeline fit on one of these nodes, which have the slots
    /// for its jobs, and its caches beside them on all nodes.
    fn fits_one_of(&self, pipeline: u32, offers: &[NodeCapacity]) -> bool {
        let peaks = self.graph.courses.peaks(pipeline);
        let holds = |need: Space| offers.iter().any(|offer| offer.space.can_hold(need));
        holds(peaks.whole)
            || holds(peaks.least) && self.is_offered(peaks.whole.bytes, |id| self.fleet.offered(id))
    }

    /// Whether nodes have so many bytes together.
    fn is_offered(&self, bytes: u64, of: impl Fn(ServerId) -> Space) -> bool {
        let mut sum = 0u64;
        let mut nodes = self.fleet.live();
        bytes == 0
            || nodes.any(|(id, _)| {
                sum = sum.saturating_add(of(id).bytes);
                sum >= bytes
            })
    }

    /// Whether a pipeline fits when nothing else runs: its volumes may lie on several nodes, those
    /// that a job makes on one.
    fn fits_alone(&self, pipeline: u32, offers: &[NodeCapacity]) -> Fit {
        let course = self.graph.courses.of(pipeline);
        if course.len() > TRIED_JOBS_MAX {
            return Fit::Unknown;
        }
        let nodes = self.that_matter(course, offers.to_vec(), |offer| offer.slots);
        let all = self.fleet.live().map(|(id, _)| self.fleet.offered(id));
        let beside = bytes_of(all).saturating_sub(bytes_of(nodes.iter().map(|node| node.space)));
        let mut trial = Trial::new(self, course, nodes, beside);
        match trial.go_on() {
            true => Fit::Fits,
            false if trial.tries_left > 0 => Fit::Never,
            false => Fit::Unknown,
        }
    }

    /// Whether the pipeline of `job` can still end, if only when nothing else runs, once the job
    /// has made these volumes. A pipeline that needs several nodes must not lie on the wrong ones.
    /// Where no way is known, but not all were tried, a short one may do so, and a long one only
    /// without any `care`; one that is too long to be tried may, too.
    pub(crate) fn can_end_from(
        &self,
        job: JobIndex,
        server: ServerId,
        creates: &[Create],
        care: Care,
    ) -> bool {
        let pipeline = self.graph.pipeline(job);
        let (peaks, usable) = (
            self.graph.courses.peaks(pipeline),
            self.fleet.usable(server),
        );
        let course = self.graph.courses.of(pipeline);
        let nodes = usize::try_from(self.fleet.alive).unwrap_or(usize::MAX);
        let nodes = nodes.min(course.len());
        if creates.is_empty()
            || course.len() > FOLLOWED_JOBS_MAX
            || course.len() * nodes > FOLLOWED_STEPS_MAX
            || self.packs_volumes()
            || self.settings.has_private_data_at_home()
        {
            return true;
        }
        let is_enough = || {
            let bytes = peaks.whole.bytes;
            usable.can_hold(peaks.whole)
                || usable.can_hold(peaks.least)
                    && self.is_offered(bytes, |id| self.fleet.usable(id))
        };
        if self.spares_wide_jobs(course, creates) && is_enough() {
            return true;
        }
        let place = self.places(course, creates);
        let workers = self.fleet.live().filter(|(_, node)| node.seen.slots > 0);
        let mut nodes: Vec<ServerId> = workers.map(|(id, _)| id).collect();
        nodes.sort_by_cached_key(|id| std::cmp::Reverse(self.fleet.usable(*id)));
        let slots = |id: &ServerId| self.fleet.get(*id).map_or(0, |node| node.seen.slots);
        let mut nodes = self.that_matter(course, nodes, slots);
        for node in place.values() {
            if !nodes.contains(node) {
                nodes.push(*node);
            }
        }
        if course.len() * nodes.len() > FOLLOWED_STEPS_MAX {
            return true;
        }
        let offer = |id: &ServerId| NodeCapacity {
            space: self.fleet.usable(*id),
            slots: slots(id),
        };
        let mut offers: Vec<NodeCapacity> = nodes.iter().map(offer).collect();
        let all = self.fleet.live().map(|(id, _)| self.fleet.usable(id));
        let beside = bytes_of(all).saturating_sub(bytes_of(offers.iter().map(|offer| offer.space)));
        let mut at = BTreeMap::new();
        for (volume, server) in place {
            let Some(node) = nodes.iter().position(|id| *id == server) else {
                continue;
            };
            offers[node].space = offers[node].space.saturating_sub(self.size_of(volume));
            at.insert(volume, node);
        }
        let has_begun = |other: &&JobIndex| **other != job && self.graph.state(**other).has_begun();
        let mut trial = Trial::new(self, course, offers, beside);
        trial.place = at;
        let begun = course.iter().filter(has_begun);
        begun.for_each(|job| trial.note_begun(*job));
        // Its volumes are made already.
        trial.end_made(job);
        if course.len() > TRIED_JOBS_MAX {
            let mut preemptions = [Prefer::Roomiest, Prefer::Tightest].into_iter();
            return care == Care::None || preemptions.any(|prefer| trial.clone().follow(prefer));
        }
        trial.go_on() || trial.tries_left == 0
    }

    /// Where the scratch volumes of these jobs are, or will be.
    fn places(&self, course: &[JobIndex], creates: &[Create]) -> BTreeMap<VolumeIndex, ServerId> {
        let mut place: BTreeMap<VolumeIndex, ServerId> = BTreeMap::new();
        for job in course {
            for volume in self.scratch_of(*job) {
                let there = self.volumes.scratch(volume).and_then(|(_, server)| server);
                place.extend(there.map(|server| (volume, server)));
            }
        }
        let made = creates
            .iter()
            .filter_map(|(v, server, _)| Some((*v, (*server)?)));
        place.extend(made.filter(|(volume, _)| !self.graph.volume(*volume).is_cache));
        place
    }

    /// What the nodes of a group together offer to a cache of so many files.
    pub(crate) fn largest_group(&self, files: u64) -> Space {
        let mut groups: BTreeMap<&str, Space> = BTreeMap::new();
        for (id, node) in self.fleet.live() {
            let sum = groups.entry(&node.seen.group).or_default();
            let offered = self.fleet.offered(id);
            // A node that has a part of a cache has all of its files.
            let bytes = if offered.files < files {
                0
            } else {
                offered.bytes
            };
            *sum = Space {
                bytes: sum.bytes.saturating_add(bytes),
                files: sum.files.max(offered.files),
            };
        }
        groups.into_values().max().unwrap_or_default()
    }
}

fn largest(sizes: &[Space]) -> Space {
    sizes.first().copied().unwrap_or_default()
}

/// Sizes of nodes for people, equal ones together, the largest first; so many thousandths of each
/// node are not in them.
fn describe_sizes(sizes: &[Space], slack_permille: u32) -> String {
    /// More kinds than that are left out.
    const KINDS_SHOWN: usize = 4;
    let mut kinds: Vec<(Space, u64)> = Vec::new();
    for size in sizes {
        match kinds.last_mut() {
            Some((kind, count)) if kind == size => *count += 1,
            _ => kinds.push((*size, 1)),
        }
    }
    let shown = kinds.iter().take(KINDS_SHOWN);
    let shown = shown.map(|(size, count)| format!("{count} with {}", describe(*size)));
    let mut text = shown.collect::<Vec<_>>().join(", ");
    if kinds.len() > KINDS_SHOWN {
        text += ", and smaller ones";
    }
    if slack_permille > 0 {
        let percent = f64::from(slack_permille) / 10.0;
        text += &format!("; beside that {percent} % of each stay free");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_sizes_are_described_with_their_slack() {
        let sizes = [98, 98, 49].map(|mb| crate::describe::bytes_only(mb * 1_000_000));
        let told = describe_sizes(&sizes, 25);
        let kinds = "2 with 98.0 MB and 0 files, 1 with 49.0 MB and 0 files";
        assert_eq!(
            told,
            format!("{kinds}; beside that 2.5 % of each stay free")
        );
        assert_eq!(describe_sizes(&sizes, 0), kinds);
    }

    #[test]
    fn space_is_described_in_readable_units() {
        assert_eq!(
            describe(Space {
                bytes: 1_250_000_000,
                files: 3
            }),
            "1.2 GB and 3 files"
        );
        assert_eq!(
            describe(Space {
                bytes: 999,
                files: 0
            }),
            "999 bytes and 0 files"
        );
    }
}
