//! Sizes of volumes that are not declared, or were too small.

use std::collections::{BTreeMap, BTreeSet};

use bafs_workflow::{JobIndex, VolumeIndex, Workflow};
use serde::{Deserialize, Serialize};

use crate::space::Space;
use crate::state::job_order::RemainingNeed;
use crate::state::jobs::Graph;
use crate::state::recorded::kept;
use crate::state::tracked::{Keys, Table};

/// Pipelines of equally many jobs that mount volumes of unknown size alike, as a number.
pub(crate) type PipelineShapeId = usize;

/// Volumes that are expected to need alike: those of pipelines of one shape that are made by the
/// job of the same position, in the same place among its volumes. Alike ones of one pipeline count
/// as the first of them.
pub(crate) type SizeClass = (PipelineShapeId, usize, usize);

/// Sizes of volumes for which the workflow gives none.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Sizes {
    pub(crate) kinds: BTreeMap<SizeClass, Vec<VolumeIndex>>,
    pub(crate) kind_of: BTreeMap<VolumeIndex, SizeClass>,
    /// Of how many volumes of one pipeline a kind is, if of several.
    pub(crate) crowds: BTreeMap<SizeClass, u64>,
    /// The most that a volume of each kind held that was measured.
    pub(crate) held: Table<SizeClass, Space>,
    /// What is reserved for each kind that was measured.
    pub(crate) learned: Table<SizeClass, Space>,
    /// Shapes of pipelines that have volumes of unknown size.
    pub(crate) shape_of: BTreeMap<u32, PipelineShapeId>,
    /// Pipelines that are measured: all others of their shapes wait.
    pub(crate) probes: Table<PipelineShapeId, u32>,
    /// Pipelines of each shape that have not yet run.
    pub(crate) unknown: BTreeMap<PipelineShapeId, BTreeSet<u32>>,
    /// What pipelines of each shape need at once for volumes of known size.
    pub(crate) declared: BTreeMap<PipelineShapeId, RemainingNeed>,
    /// Volumes that were made larger because a job found no space.
    pub(crate) grown: Keys<VolumeIndex>,
    /// Kinds of volumes whose like were made larger with one of them.
    pub(crate) taught: Keys<Taught>,
    /// What nodes offered when sizes were last made up.
    pub(crate) made_for: Option<Offered>,
}

/// What nodes offer to volumes whose size is made up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Offered {
    /// The largest of those that may hold them.
    pub(crate) largest: Space,
    /// All together: caches are divided among them.
    pub(crate) all: Space,
}

impl Offered {
    /// Whether another offer is the same but for an eighth.
    pub(crate) fn is_alike(self, other: Self) -> bool {
        let is_alike = |one: Space, other: Space| {
            let (less, more) = (one.component_min(other), one.component_max(other));
            less.saturating_add(eighth(more)).can_hold(more)
        };
        is_alike(self.largest, other.largest) && is_alike(self.all, other.all)
    }
}

kept! {
    /// What was written of sizes that are not declared.
    SizeChanges of Sizes;
    values { made_for: Option<Offered> }
    tables {
        held: Table<SizeClass, Space>,
        learned: Table<SizeClass, Space>,
        probes: Table<PipelineShapeId, u32>,
        grown: Keys<VolumeIndex>,
        taught: Keys<Taught>,
    }
    indexed {}
    parts {}
    rebuilt { kinds, kind_of, crowds, shape_of, unknown, declared }
}

impl Sizes {
    pub(crate) fn new(graph: &Graph) -> Self {
        let mut sizes = Self::default();
        let mut shapes = BTreeMap::new();
        if graph.workflow.volumes.iter().all(|it| it.size_bytes != 0) {
            return sizes;
        }
        for job in graph.job_indexes() {
            let pipeline = graph.pipeline(job);
            let course = graph.courses.of(pipeline);
            if course.first() != Some(&job) {
                continue;
            }
            let mut seen = BTreeSet::new();
            let mut unknown = Vec::new();
            for (position, job) in course.iter().enumerate() {
                for (place, (volume, _)) in graph.mounted(*job).into_iter().enumerate() {
                    if graph.workflow.volume(volume).size_bytes == 0 && seen.insert(volume) {
                        unknown.push((position, place, volume));
                    }
                }
            }
            if unknown.is_empty() {
                continue;
            }
            let places = unknown
                .iter()
                .map(|(position, place, _)| (*position, *place));
            let places: Vec<(usize, usize)> = places.collect();
            let count = shapes.len();
            let shape = *shapes.entry((course.len(), places)).or_insert(count);
            sizes.shape_of.insert(pipeline, shape);
            let declared = sizes.declared.entry(shape).or_default();
            *declared = declared.most(graph.courses.peaks(pipeline));
            sizes.unknown.entry(shape).or_default().insert(pipeline);
            let mut alike = BTreeMap::new();
            let mut counts: BTreeMap<SizeClass, u64> = BTreeMap::new();
            for (position, place, volume) in unknown {
                let maker = course[position];
                let likeness = Likeness::of(graph, maker, place, volume);
                let kind = *alike.entry(likeness).or_insert((shape, position, place));
                sizes.kinds.entry(kind).or_default().push(volume);
                sizes.kind_of.insert(volume, kind);
                *counts.entry(kind).or_default() += 1;
            }
            for (kind, count) in counts.into_iter().filter(|(_, count)| *count > 1) {
                let crowd = sizes.crowds.entry(kind).or_default();
                *crowd = count.max(*crowd);
            }
        }
        sizes
    }

    /// The kinds of volumes of a shape.
    pub(crate) fn kinds_of(&self, shape: PipelineShapeId) -> impl Iterator<Item = &SizeClass> {
        let kinds = self.kinds.range((shape, 0, 0)..(shape + 1, 0, 0));
        kinds.map(|(kind, _)| kind)
    }

    /// The workflow with volumes empty whose size is only made up, as simulations count them.
    pub(crate) fn measured(&self, workflow: &Workflow) -> Workflow {
        let mut workflow = workflow.clone();
        for (volume, kind) in &self.kind_of {
            if !self.learned.contains_key(kind) && !self.grown.contains(volume) {
                let spec = &mut workflow.volumes[volume.as_usize()];
                (spec.size_bytes, spec.size_files) = (0, 0);
            }
        }
        workflow
    }

    /// Kinds of a shape of which pipelines have several volumes, and how many.
    pub(crate) fn crowds_of(
        &self,
        shape: PipelineShapeId,
    ) -> impl Iterator<Item = (&SizeClass, &u64)> {
        self.crowds.range((shape, 0, 0)..(shape + 1, 0, 0))
    }

    /// Whether nobody declared the size of a volume.
    pub(crate) fn is_undeclared(&self, volume: VolumeIndex) -> bool {
        self.kind_of.contains_key(&volume)
    }

    pub(crate) fn is_known(&self, shape: PipelineShapeId) -> bool {
        self.kinds_of(shape)
            .all(|kind| self.learned.contains_key(kind))
    }
}

pub(crate) fn eighth(space: Space) -> Space {
    Space {
        bytes: space.bytes / 8,
        files: space.files / 8,
    }
}

/// What makes volumes of one pipeline alike: the jobs that make them are at the same depth of the
/// graph, run the same program, and mount the like; so are those that use them later.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Likeness {
    pub(crate) level: u32,
    pub(crate) program: String,
    pub(crate) cpus: u32,
    pub(crate) place: usize,
    /// Of all that the maker mounts: size, whether it may be written, and which cache it is, if
    /// jobs of its level share one. A cache of its own holds its own input.
    pub(crate) mounts: Vec<(u64, bool, Option<VolumeIndex>)>,
    pub(crate) users: Vec<u32>,
}

impl Likeness {
    pub(crate) fn of(graph: &Graph, maker: JobIndex, place: usize, volume: VolumeIndex) -> Self {
        let job = graph.workflow.job(maker);
        let level = graph.level(maker);
        let is_shared = |volume: VolumeIndex| {
            let users = graph.workflow.volume(volume).users.iter();
            let mut others = users.filter(|user| **user != maker);
            others.any(|user| graph.level(*user) == level)
        };
        let mount = |(volume, writable): (VolumeIndex, bool)| {
            let is_named = graph.volume(volume).is_cache && is_shared(volume);
            let cache = is_named.then_some(volume);
            (graph.workflow.volume(volume).size_bytes, writable, cache)
        };
        let users = graph.workflow.volume(volume).users.iter();
        let mut users: Vec<u32> = users.map(|user| graph.level(*user)).collect();
        users.sort_unstable();
        users.dedup();
        let program = job.command.executable.chars();
        Self {
            level,
            // Loops number programs too.
            program: program.filter(|sign| !sign.is_ascii_digit()).collect(),
            cpus: job.cpus,
            place,
            mounts: graph.mounted(maker).into_iter().map(mount).collect(),
            users,
        }
    }
}

/// A volume with its size and a larger one.
pub(crate) type Growth = (VolumeIndex, Space, Space);

/// Volumes of pipelines of so many jobs, made by the job of this position, in this place among its
/// scratch volumes, of this size.
pub(crate) type Taught = (usize, usize, usize, Space);

#[cfg(test)]
mod tests {
    use bafs_proto::ids::RunId;

    use crate::{Scheduler, Settings};

    /// The largest number of alike volumes that one pipeline has.
    fn count_alike(text: &str) -> u64 {
        let none = |path: &str| Err(path.to_owned());
        let checked = bafs_workflow::parse_workflow("w.bafs", text, &none);
        let workflow = checked.expect("it is right").workflow;
        let scheduler = Scheduler::new(RunId(0), workflow, Settings::default());
        let counts = scheduler.sizes.crowds.values().copied();
        counts.max().unwrap_or(0)
    }

    #[test]
    fn joined_pipelines_with_own_inputs_are_alike() {
        let text = "for i in 1..5\nvolume reads$(i) cache bafs://home/$(i) 1 MB\n\
            volume w$(i) scratch unknown\nvolume v$(i) scratch unknown\n\
            job s$(i) {\nexecutable = x\n}\njob t$(i) {\nexecutable = y\n}\n\
            mount reads$(i) s$(i) /in\nmount reads$(i) t$(i) /in\nmount w$(i) s$(i) /w\n\
            mount w$(i) t$(i) /w ro\nmount v$(i) t$(i) /v\nmount v$(i) all /v/$(i) ro\n\
            parent s$(i) child t$(i)\nparent t$(i) child all\nend\n\
            job all {\nexecutable = x\n}\n";
        assert_eq!(count_alike(text), 5);
    }

    #[test]
    fn volumes_from_different_batch_data_are_unlike() {
        let text = "for d in 1..2\nvolume db$(d) cache bafs://home/$(d) 1 MB\nfor i in 1..3\n\
            volume w$(d)_$(i) scratch unknown\njob s$(d)_$(i) {\nexecutable = x\n}\n\
            mount db$(d) s$(d)_$(i) /in\nmount w$(d)_$(i) s$(d)_$(i) /w\n\
            mount w$(d)_$(i) all /v/$(d)_$(i) ro\nparent s$(d)_$(i) child all\nend\nend\n\
            job all {\nexecutable = x\n}\n";
        assert_eq!(count_alike(text), 3);
    }
}
