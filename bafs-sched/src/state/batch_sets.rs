//! Which batch volumes one level of a pipeline reads at once.

use std::collections::BTreeSet;

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
        let mut reads: Vec<(u32, u32, VolumeIndex)> = Vec::new();
        for job in order.iter().filter(|_| !batch.is_empty()) {
            let (pipeline, level) = (pipeline_of(job), levels[job.as_usize()]);
            let mounted = workflow.job(*job).mounts.iter().map(|mount| mount.volume);
            let mounted = mounted.filter(|volume| batch.contains(volume));
            reads.extend(mounted.map(|volume| (pipeline, level, volume)));
        }
        let unlike = find_unlike_sets(reads);
        let sets = unlike.into_iter().map(BTreeSet::from_iter);
        let mut sets: Vec<BTreeSet<VolumeIndex>> = sets.collect();
        let bytes = |set: &BTreeSet<VolumeIndex>| {
            let sizes = set.iter().map(|volume| workflow.volume(*volume).size_bytes);
            sizes.fold(0, u64::saturating_add)
        };
        sets.sort_by_key(|set| std::cmp::Reverse(bytes(set)));
        sets.truncate(SETS_MAX);
        let all = sets.iter().flatten().copied().collect();
        Self { sets, all }
    }
}

/// The volumes of each pipeline's level, ascending; each set once. A million levels read few sets:
/// none is made anew that is known.
fn find_unlike_sets(mut reads: Vec<(u32, u32, VolumeIndex)>) -> BTreeSet<Vec<VolumeIndex>> {
    reads.sort_unstable();
    reads.dedup();
    let (mut unlike, mut set) = (BTreeSet::new(), Vec::new());
    for level in reads.chunk_by(|one, other| (one.0, one.1) == (other.0, other.1)) {
        set.clear();
        set.extend(level.iter().map(|read| read.2));
        if !unlike.contains(set.as_slice()) {
            unlike.insert(set.clone());
        }
    }
    unlike
}

#[cfg(test)]
mod tests {
    use bafs_workflow::parse_workflow;

    use super::*;

    /// What the sets of this workflow read, by name.
    fn sets(text: &str) -> Vec<String> {
        let none = |_: &str| Err("no files".to_owned());
        let workflow = parse_workflow("w.bafs", text, &none)
            .expect("it parses")
            .workflow;
        let graph = crate::state::jobs::Graph::new(workflow.into());
        let name = |volume: &VolumeIndex| graph.workflow.volume(*volume).name.clone();
        let join = |set: &BTreeSet<VolumeIndex>| set.iter().map(name).collect::<Vec<_>>().join(" ");
        graph.batch.sets.iter().map(join).collect()
    }

    #[test]
    fn caches_read_in_one_level_form_one_set() {
        let mut text = String::from(
            "volume a cache bafs://h/a 3 GB\nvolume b cache bafs://h/b 2 GB\n\
             volume c cache bafs://h/c 4 GB\n",
        );
        for pipeline in 0..2 {
            text += &format!("volume own{pipeline} cache bafs://h/own{pipeline} 1 GB\n");
            for (job, cache) in [("x", "a"), ("y", "b"), ("z", "c")] {
                text += &format!(
                    "job {job}{pipeline} {{\nexecutable = x\n}}\n\
                     volume {job}out{pipeline} scratch 1 MB\n\
                     mount {job}out{pipeline} {job}{pipeline} /out\n\
                     mount own{pipeline} {job}{pipeline} /own\n\
                     mount {cache} {job}{pipeline} /db\n"
                );
                if job != "x" {
                    text += &format!(
                        "parent x{pipeline} child {job}{pipeline}\n\
                         mount xout{pipeline} {job}{pipeline} /in ro\n"
                    );
                }
            }
        }
        assert_eq!(
            sets(&text),
            ["b c", "a"],
            "the largest first, none that one pipeline has"
        );
    }
}
