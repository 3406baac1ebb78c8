//! When nothing goes on although jobs are ready: what is tried then and in which order, which
//! pipeline is preempted, and what is told when nothing helps.

use std::collections::BTreeSet;

use bafs_proto::ids::VolumeId;
use bafs_workflow::{JobIndex, VolumeIndex};

use crate::decision::Decision;
use crate::describe::{DELETE_FAULTS_TOLD, LEFT_SHOWN, bytes_only, describe, describe_bytes};
use crate::policy::View;
use crate::space::Space;
use crate::state::planned_volumes::Care;
use crate::state::volumes::{Instance, InstanceState};

/// Jobs of each queue that are tried when nothing goes on, of those that need the same one.
const KINDS_TRIED: usize = 64;

/// A pipeline that waits for jobs of others loses its protection so often, until one ends.
const UNPROTECTED_MAX: u32 = 16;

/// A pipeline is preempted so often, until one ends or more jobs are done than ever before.
const PREEMPTIONS_MAX: u32 = 2;

/// One thing to try when nothing goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeadlockMeasure {
    /// Starts jobs on whatever node can take them.
    Start(DeadlockJobs, Care),
    /// Limits of the strategy give way.
    RelaxLimits,
    /// Copies of volumes go.
    DropCopies,
    /// Gives up all caches but those of the first job.
    EvictUnusedCaches,
    /// Gives up all caches.
    EvictAllCaches,
    /// A pipeline loses its volumes to another one.
    Preempt,
}

/// Which of the waiting jobs are meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeadlockJobs {
    All,
    /// Those that should start first.
    First,
    Others,
}

/// All measures, those that cost least first.
pub(crate) const MEASURES: [DeadlockMeasure; 8] = [
    DeadlockMeasure::Start(DeadlockJobs::All, Care::Safe),
    DeadlockMeasure::RelaxLimits,
    DeadlockMeasure::DropCopies,
    DeadlockMeasure::EvictUnusedCaches,
    DeadlockMeasure::Start(DeadlockJobs::First, Care::None),
    DeadlockMeasure::EvictAllCaches,
    DeadlockMeasure::Preempt,
    DeadlockMeasure::Start(DeadlockJobs::Others, Care::None),
];

/// Jobs that wait while nothing goes on.
#[derive(Debug, Default)]
pub(crate) struct StalledJobs {
    /// All.
    pub(crate) all: Vec<JobIndex>,
    /// Those that should start first: what has begun goes before what has not, which would only
    /// hold more space.
    pub(crate) first: Vec<JobIndex>,
    /// The others.
    pub(crate) others: Vec<JobIndex>,
}

impl StalledJobs {
    pub(crate) fn of(&self, kind: DeadlockJobs) -> &[JobIndex] {
        match kind {
            DeadlockJobs::All => &self.all,
            DeadlockJobs::First => &self.first,
            DeadlockJobs::Others => &self.others,
        }
    }

    /// Those that should start first, then the others.
    pub(crate) fn in_order(&self) -> Vec<JobIndex> {
        self.first.iter().chain(&self.others).copied().collect()
    }
}

impl View<'_> {
    /// Whether jobs are ready, nothing is under way and none of them can start: pipelines block
    /// each other or space is missing.
    pub(crate) fn is_stalled(&self) -> bool {
        self.is_without_progress() && !self.queues.is_empty()
    }

    /// Whether no attempt, and nothing else, is under way that could change what is possible.
    pub(crate) fn is_without_progress(&self) -> bool {
        self.attempts.is_empty() && self.is_quiet()
    }

    /// The first ready jobs of each kind, best first.
    pub(crate) fn heads_of_queues(&self) -> Vec<JobIndex> {
        let mut heads = self.queues.all_heads(KINDS_TRIED);
        heads.sort_unstable();
        heads.iter().map(|key| key.job).collect()
    }

    /// The jobs that are tried when nothing goes on: these, and those that go on with a pipeline,
    /// which may be far behind among many that wait.
    pub(crate) fn stalled_jobs(&self, heads: Vec<JobIndex>) -> StalledJobs {
        let mut all = heads;
        let begun = self.protected.into_iter().chain(self.probes());
        let begun = begun.chain(self.pipelines_at_home());
        let next = begun.filter_map(|pipeline| self.graph.courses.next_of(pipeline));
        all.extend(next.filter(|job| self.queues.contains(*job)));
        if let Some(pipeline) = self.protected {
            all.sort_by_key(|job| self.graph.pipeline(*job) != pipeline);
        }
        let (first, others) = self.first_of(&all);
        StalledJobs { all, first, others }
    }

    /// Of these jobs those that should start first, and the others. What has begun goes before what
    /// has not, which would only hold more space.
    fn first_of(&self, candidates: &[JobIndex]) -> (Vec<JobIndex>, Vec<JobIndex>) {
        let is_begun = |job: &JobIndex| self.is_under_way(self.graph.pipeline(*job));
        let (begun, new): (Vec<JobIndex>, Vec<JobIndex>) =
            candidates.iter().copied().partition(is_begun);
        let is_wanted = |job: &JobIndex| {
            let pipeline = self.graph.pipeline(*job);
            begun.is_empty() || self.graph.cross_dependencies.is_awaited(pipeline)
        };
        let (wanted, other): (Vec<JobIndex>, Vec<JobIndex>) = new.into_iter().partition(is_wanted);
        (begun.into_iter().chain(wanted).collect(), other)
    }

    /// Whether a job reads a cache that is nowhere yet and finds no room in any group: so many
    /// bytes are left where most are.
    pub(crate) fn has_cache_beyond(&self, job: JobIndex, most: u64) -> bool {
        let mounts = &self.graph.workflow.job(job).mounts;
        let mut volumes = mounts.iter().map(|mount| mount.volume);
        !self.settings.caches_nothing()
            && volumes.any(|volume| {
                let is_absent = self.graph.volume(volume).is_cache && !self.volumes.is_live(volume);
                is_absent && self.size_of(volume).bytes > most
            })
    }

    /// Whether a home did not answer when a job needed it last.
    pub(crate) fn is_homeless(&self, job: JobIndex) -> bool {
        self.graph
            .job(job)
            .failure_history
            .environment
            .away
            .is_some()
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

    /// The pipeline to preempt so that this job, or what is protected, goes on: the last one that
    /// holds volumes, other than its own. Where there is no other, and its volumes need several
    /// nodes, its own go: they may lie on the wrong ones. A pipeline with results that home does
    /// not take is never preempted: they are finished, and would be made in vain; nor is one that
    /// was preempted a few times, and more was never done since.
    pub(crate) fn choose_preemption(&self, job: JobIndex) -> Option<Decision> {
        let beneficiary = self.protected.unwrap_or_else(|| self.graph.pipeline(job));
        let of = |volume: VolumeIndex| self.graph.pipeline_of(volume);
        let holders = self.extractions.holders().into_iter();
        let finished = holders.filter_map(|id| of(self.volumes.get(id)?.volume));
        let finished: BTreeSet<u32> = finished.collect();
        let scratch = self.volumes.iter().filter(|(_, i)| self.is_preemptible(i));
        let holders = scratch.filter_map(|(_, i)| of(i.volume));
        let may_go = |other: &u32| {
            let made = self.preemptions.made.get(other).copied().unwrap_or(0);
            let most = match *other == beneficiary {
                true => u32::from(self.is_larger_than_nodes(beneficiary)),
                false => PREEMPTIONS_MAX,
            };
            made < most && !finished.contains(other)
        };
        let victims: BTreeSet<u32> = holders.filter(may_go).collect();
        let others = victims.iter().rev().find(|other| **other != beneficiary);
        let victim = *others.or_else(|| victims.first())?;
        Some(Decision::Preempt {
            victim,
            beneficiary,
        })
    }

    /// The volumes that a pipeline loses when it is preempted.
    pub(crate) fn preempted_volumes(&self, victim: u32) -> Vec<(VolumeId, VolumeIndex)> {
        let of_victim = self.volumes.iter().filter(|(_, i)| {
            self.is_preemptible(i) && self.graph.pipeline_of(i.volume) == Some(victim)
        });
        of_victim.map(|(id, i)| (id, i.volume)).collect()
    }

    /// Whether the end of a volume would give its pipeline's space to others: not where it is being
    /// deleted anyway.
    fn is_preemptible(&self, instance: &Instance) -> bool {
        let is_going = matches!(
            instance.state,
            InstanceState::Deleting | InstanceState::Held
        );
        !is_going && !self.graph.volume(instance.volume).is_cache
    }

    /// The first of the jobs that waits for no measurement of another one.
    pub(crate) fn first_unbound(&self, jobs: &StalledJobs) -> Option<JobIndex> {
        let mut all = jobs.first.iter().chain(&jobs.others).copied();
        all.find(|job| {
            !self.waits_for_probe(self.graph.pipeline(*job)) && !self.waits_for_like(*job)
        })
    }

    /// Nothing goes on: whether the protected pipeline waits for jobs of others, so that all may
    /// start jobs again. So often while no pipeline ends, that it does not help.
    pub(crate) fn is_protection_in_vain(&self) -> bool {
        let Some(pipeline) = self.protected else {
            return false;
        };
        let mut members = self.graph.members(pipeline);
        self.unprotected < UNPROTECTED_MAX && !members.any(|job| self.queues.contains(job))
    }

    /// Whether a pipeline needs more space at once than each node has that its volumes may lie on.
    fn is_larger_than_nodes(&self, pipeline: u32) -> bool {
        let peak = self.graph.courses.peak(pipeline);
        let mut nodes = self.nodes_for_scratch();
        !nodes.any(|server| self.fleet.usable(server).can_hold(peak))
    }

    pub(crate) fn describe_deadlock(&self, job: Option<JobIndex>) -> String {
        let name = job.map_or("", |job| self.graph.workflow.job(job).name.as_str());
        if let Some(job) = job
            && !self.graph.job(job).failure_history.refused_by.is_empty()
        {
            let refused_by = self.graph.job(job).failure_history.refused_by.iter();
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
                self.describe_preemptions()
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

    /// Which pipelines were preempted for each other in vain, if some were.
    fn describe_preemptions(&self) -> String {
        let made = self.preemptions.made.keys().take(LEFT_SHOWN);
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
