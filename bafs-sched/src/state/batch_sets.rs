//! Which batch volumes one level of a pipeline reads at once.

use std::collections::{BTreeMap, BTreeSet};

use bafs_workflow::{JobIndex, VolumeIndex, VolumeKind, Workflow};

/// Sets of batch volumes that are kept, the largest.
pub(crate) const SETS_MAX: usize = 64;

/// Which of the caches that jobs of several pipelines read one stage of a pipeline reads at once.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct BatchSets {
    pub(crate) sets: Vec<BTreeSet<VolumeIndex>>,
    /// Those of all sets.
    pub(crate) all: BTreeSet<VolumeIndex>,
}

impl BatchSets {
    /// Of a workflow; `pipeline` and `levels` have those of each job, `order` all jobs, parents
    /// first.
    pub(crate) fn new(
        workflow: &Workflow,
        pipeline: &[u32],
        levels: &[u32],
        order: &[JobIndex],
    ) -> Self {
        let pipeline_of = |job: &JobIndex| pipeline[job.as_usize()];
        let volumes = workflow.volumes.iter().enumerate();
        let batch = volumes.filter(|(_, volume)| {
            let first = volume.users.first().map(pipeline_of);
            let is_cache = matches!(volume.kind, VolumeKind::Cache { .. });
            is_cache
                && volume
                    .users
                    .iter()
                    .any(|user| Some(pipeline_of(user)) != first)
        });
        let index = |at: usize| u32::try_from(at).expect("the workflow's own indexes have 32 bits");
        let batch: BTreeSet<VolumeIndex> = batch.map(|(at, _)| VolumeIndex(index(at))).collect();
        let mut stages: BTreeMap<(u32, u32), BTreeSet<VolumeIndex>> = BTreeMap::new();
        for job in order.iter().filter(|_| !batch.is_empty()) {
            let stage = (pipeline_of(job), levels[job.as_usize()]);
            let mounted = workflow.job(*job).mounts.iter().map(|mount| mount.volume);
            for volume in mounted.filter(|volume| batch.contains(volume)) {
                stages.entry(stage).or_default().insert(volume);
            }
        }
        let unlike: BTreeSet<BTreeSet<VolumeIndex>> = stages.into_values().collect();
        let mut sets: Vec<BTreeSet<VolumeIndex>> = unlike.into_iter().collect();
        let bytes = |set: &BTreeSet<VolumeIndex>| {
            let sizes = set.iter().map(|volume| workflow.volume(*volume).size_bytes);
            sizes.fold(0, u64::saturating_add)
        };
        sets.sort_by_key(|set| std::cmp::Reverse(bytes(set)));
        sets.truncate(SETS_MAX);
        let all = sets.iter().flatten().copied().collect();
        Self { sets, all }
    }

    /// Those of all sets.
    pub(crate) fn volumes(&self) -> impl Iterator<Item = VolumeIndex> {
        self.all.iter().copied()
    }

    /// Whether one stage reads both volumes, as far as is known.
    pub(crate) fn is_read_with(&self, volume: VolumeIndex, other: VolumeIndex) -> bool {
        let mut sets = self.sets.iter();
        sets.any(|set| set.contains(&volume) && set.contains(&other))
    }
}
