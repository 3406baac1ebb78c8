//! Whether the volumes of each job, which all exist while it runs, can ever exist together: bytes,
//! files, and pieces that fit on nodes. It looks at jobs one by one, so that one which gathers from
//! thousands is judged as well as others. The rest is `policy/admission/feasibility.rs`.

use std::collections::BTreeMap;

use bafs_workflow::{JobIndex, VolumeIndex};

use crate::describe::{describe, describe_bytes, describe_lack};
use crate::policy::View;
use crate::space::Space;
use crate::state::cache_parts::floor;

/// Of volumes of so many sizes it is counted how many of them fit on nodes.
const SIZES_COUNTED: usize = 32;

/// What helps where a job has more than fits.
const REMEDY: &str = "add storage, make the volumes smaller, or split the job";

impl View<'_> {
    /// A job whose volumes are more than all nodes offer together.
    pub(crate) fn too_large_together(&self) -> Option<String> {
        let all = self.fleet.live().map(|(id, _)| self.fleet.offered(id));
        let all = all.fold(Space::ZERO, Space::saturating_add);
        let for_scratch: Vec<Space> = self
            .nodes_for_scratch()
            .map(|id| self.fleet.offered(id))
            .collect();
        let largest = for_scratch.iter().copied().max().unwrap_or_default();
        let scratch_all = for_scratch
            .iter()
            .copied()
            .fold(Space::ZERO, Space::saturating_add);
        self.jobs_left().find_map(|job| {
            let mounted = self.graph.mounted(job).into_iter();
            let volumes: Vec<VolumeIndex> = mounted.map(|(volume, _)| volume).collect();
            let is_cache = |volume: &VolumeIndex| self.graph.volume(*volume).is_cache;
            let (caches, scratch): (Vec<VolumeIndex>, Vec<VolumeIndex>) =
                volumes.iter().copied().partition(is_cache);
            let own = self.sum_of(&scratch);
            if scratch.len() > 1 && !scratch_all.can_hold(own) {
                return Some(self.describe_together(job, &scratch, own, scratch_all));
            }
            // Of caches each node has all files, which is judged where they are read.
            let batch = Space {
                files: 0,
                ..self.sum_of(&caches)
            };
            let need = own.saturating_add(batch);
            if !caches.is_empty() && need.bytes > all.bytes {
                return Some(self.describe_together(job, &volumes, need, all));
            }
            if largest.can_hold(own) {
                return None;
            }
            self.too_large_pieces(job, &scratch, &for_scratch)
        })
    }

    fn sum_of(&self, volumes: &[VolumeIndex]) -> Space {
        let sizes = volumes.iter().map(|volume| self.size_of(*volume));
        sizes.fold(Space::ZERO, Space::saturating_add)
    }

    fn describe_together(
        &self,
        job: JobIndex,
        volumes: &[VolumeIndex],
        need: Space,
        have: Space,
    ) -> String {
        let lack = need.saturating_sub(have);
        let amount = |space: Space| match lack.files {
            0 => describe_bytes(space),
            _ => describe(space),
        };
        format!(
            "job '{}' has {} at once, which need {}, but all nodes together offer {}: {} too \
             little; {REMEDY}",
            self.graph.workflow.job(job).name,
            self.names(volumes),
            amount(need),
            amount(have),
            describe_lack(lack)
        )
    }

    /// Volumes are not divided: of those of some size, and larger ones, nodes may have room for
    /// fewer than a job has, though they have enough bytes.
    fn too_large_pieces(
        &self,
        job: JobIndex,
        scratch: &[VolumeIndex],
        nodes: &[Space],
    ) -> Option<String> {
        let mut sizes: Vec<u64> = scratch.iter().map(|v| self.size_of(*v).bytes).collect();
        sizes.sort_unstable_by(|a, b| b.cmp(a));
        let mut counts: Vec<(u64, u64)> = Vec::new();
        for (position, size) in sizes.into_iter().enumerate() {
            let count = position as u64 + 1;
            match counts.last_mut().filter(|(last, _)| *last == size) {
                Some((_, last)) => *last = count,
                None => counts.push((size, count)),
            }
        }
        let counts = counts.into_iter().filter(|(size, _)| *size > 0);
        counts.take(SIZES_COUNTED).find_map(|(size, count)| {
            let places = nodes.iter().map(|node| node.bytes / size);
            let places = places.fold(0, u64::saturating_add);
            (places < count).then(|| {
                format!(
                    "job '{}' has {} at once: {count} of them need {} or more each, but all nodes \
                     together have space for {places} of that size; add larger nodes, make the \
                     volumes smaller, or split the job",
                    self.graph.workflow.job(job).name,
                    self.names(scratch),
                    describe_bytes(Space {
                        bytes: size,
                        files: 0
                    }),
                )
            })
        })
    }

    /// A job whose own node must have more than any has that could run it: the scratch volumes that
    /// it is the first to use, and the least part of each cache.
    pub(crate) fn too_large_near(&self) -> Option<String> {
        let first = self.first_needs();
        let mut by_slots: BTreeMap<u32, Vec<Space>> = BTreeMap::new();
        self.jobs_left().find_map(|job| {
            let caches = self.caches_of(job);
            let floors = caches.iter().map(|cache| floor(self.size_of(*cache)));
            let need = floors.fold(first[job.as_usize()], Space::saturating_add);
            let slots = self.slots_of(job);
            let nodes = by_slots.entry(slots).or_insert_with(|| {
                let able = self.fleet.live().filter(|(_, it)| it.seen.slots >= slots);
                able.map(|(id, _)| self.fleet.offered(id)).collect()
            });
            let have = nodes.iter().copied().max().unwrap_or_default();
            let fits = nodes.iter().any(|node| node.can_hold(need));
            (!fits).then(|| {
                format!(
                    "job '{}' needs {} on its own node (what it is the first to use of {}), but \
                     the largest node with {slots} slots offers {}: {} too little; add a larger \
                     node, or make the volumes smaller",
                    self.graph.workflow.job(job).name,
                    describe(need),
                    self.names(&self.volumes_of(job)),
                    describe(have),
                    describe_lack(need.saturating_sub(have)),
                )
            })
        })
    }

    fn volumes_of(&self, job: JobIndex) -> Vec<VolumeIndex> {
        let mounted = self.graph.mounted(job).into_iter();
        mounted.map(|(volume, _)| volume).collect()
    }
}
