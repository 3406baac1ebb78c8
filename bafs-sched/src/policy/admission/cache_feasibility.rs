//! Whether a workflow can ever run on the nodes that are there, as far as caches decide it. The
//! rest is `policy/admission/feasibility.rs`.

use std::collections::BTreeMap;

use bafs_workflow::VolumeIndex;

use crate::describe::{bytes_only, describe_bytes};
use crate::policy::View;

impl View<'_> {
    /// A job whose caches together fit into no group.
    pub(crate) fn too_large_caches(&self) -> Option<String> {
        let group = self.largest_group(0);
        let is_cache = |volume: &VolumeIndex| self.graph.volume(*volume).is_cache;
        self.jobs_left().find_map(|job| {
            let mounted = self
                .graph
                .mounted(job)
                .into_iter()
                .map(|(volume, _)| volume);
            let caches: Vec<VolumeIndex> = mounted.filter(is_cache).collect();
            let need = caches.iter().map(|cache| self.size_of(*cache).bytes).sum();
            (caches.len() > 1 && need > group.bytes).then(|| {
                let name = &self.graph.workflow.job(job).name;
                let (need, have) = (bytes_only(need), bytes_only(group.bytes));
                format!(
                    "job '{name}' reads {} at once, which need {}, but all nodes of a group \
                     together offer {}: {} too little; add storage, or split the job",
                    self.names(&caches),
                    describe_bytes(need),
                    describe_bytes(have),
                    describe_bytes(need.saturating_sub(have))
                )
            })
        })
    }

    /// A job whose caches, which the node that runs it has with all of their files, and first
    /// scratch volumes have more files than any node that could run it.
    pub(crate) fn too_many_files(&self) -> Option<String> {
        let first = self.first_needs();
        let mut files_by_slots: BTreeMap<u32, u64> = BTreeMap::new();
        self.jobs_left().find_map(|job| {
            let mounted = self.graph.mounted(job).into_iter();
            let volumes: Vec<VolumeIndex> = mounted.map(|(volume, _)| volume).collect();
            let caches = volumes.iter().filter(|v| self.graph.volume(**v).is_cache);
            let of_caches: u64 = caches.map(|volume| self.size_of(*volume).files).sum();
            if of_caches == 0 {
                return None;
            }
            let need = of_caches.saturating_add(first[job.as_usize()].files);
            let slots = self.slots_of(job);
            let have = *files_by_slots.entry(slots).or_insert_with(|| {
                let nodes = self
                    .fleet
                    .live()
                    .filter(|(_, node)| node.seen.slots >= slots);
                nodes
                    .map(|(id, _)| self.fleet.offered(id).files)
                    .max()
                    .unwrap_or(0)
            });
            (need > have).then(|| {
                format!(
                    "job '{}' has {} files at once on its node ({}), but the largest node with \
                     {slots} slots offers {have}: declare fewer (`files`), or start nodes with a \
                     larger --files",
                    self.graph.workflow.job(job).name,
                    need,
                    self.names(&volumes)
                )
            })
        })
    }
}
