//! What a workflow can use of a cluster, and the least with which it can end. It asks no node.

use std::collections::{BTreeMap, BTreeSet};

use bafs_queue::Resources;
use bafs_workflow::{VolumeKind, Workflow};

/// What a workflow wants and needs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct WorkflowDemand {
    /// The most that it can use at once.
    pub(super) wanted: Resources,
    /// The least with which it can end: one pipeline at a time, and of it one job at a time.
    pub(super) needed: Resources,
}

/// Estimates the demand of a workflow. A pipeline with a volume of unknown size is measured on one
/// node, which may have so many bytes.
pub(super) fn estimate_demand(workflow: &Workflow, node_bytes: u64) -> WorkflowDemand {
    let pipelines = workflow.connected_pipelines();
    let levels = workflow.levels();
    let mut slots_at: BTreeMap<(u32, u32), u64> = BTreeMap::new();
    let mut needed_bytes: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
    let mut unmeasured: BTreeSet<u32> = BTreeSet::new();
    let mut slots_needed = 1;
    for (index, job) in workflow.jobs.iter().enumerate() {
        let (pipeline, level) = (pipelines[index], levels[index]);
        *slots_at.entry((pipeline, level)).or_default() += u64::from(job.cpus);
        slots_needed = slots_needed.max(u64::from(job.cpus));
        let caches = job.mounts.iter().map(|mount| workflow.volume(mount.volume));
        let caches = caches.filter(|volume| matches!(volume.kind, VolumeKind::Cache { .. }));
        let cached = caches.fold(0u64, |sum, volume| sum.saturating_add(volume.size_bytes));
        let needed = needed_bytes.entry(pipeline).or_default();
        needed.1 = needed.1.max(cached);
        let mut volumes = job.mounts.iter().map(|mount| workflow.volume(mount.volume));
        if volumes.any(|volume| volume.size_bytes == 0) {
            unmeasured.insert(pipeline);
        }
    }
    let mut wanted_bytes = 0u64;
    for volume in &workflow.volumes {
        wanted_bytes = wanted_bytes.saturating_add(volume.size_bytes);
        let is_scratch = matches!(volume.kind, VolumeKind::Scratch { .. });
        if let (true, Some(user)) = (is_scratch, volume.users.first()) {
            let needed = needed_bytes.entry(pipelines[user.as_usize()]).or_default();
            needed.0 = needed.0.saturating_add(volume.size_bytes);
        }
    }
    let mut widest: BTreeMap<u32, u64> = BTreeMap::new();
    for ((pipeline, _), slots) in slots_at {
        let most = widest.entry(pipeline).or_default();
        *most = slots.max(*most);
    }
    let bytes = needed_bytes.iter().map(|(pipeline, (scratch, cached))| {
        let sum = scratch.saturating_add(*cached);
        match unmeasured.contains(pipeline) {
            true => sum.max(node_bytes),
            false => sum,
        }
    });
    let unmeasured_bytes = match node_bytes {
        // Nothing is known: it takes what others leave.
        0 => u64::MAX / 4,
        bytes => bytes,
    };
    let unmeasured_bytes = unmeasured_bytes.saturating_mul(unmeasured.len() as u64);
    let wanted_bytes = wanted_bytes.saturating_add(unmeasured_bytes);
    WorkflowDemand {
        wanted: Resources {
            slots: widest.values().sum::<u64>().max(1),
            bytes: wanted_bytes,
            home_bytes_per_s: 0,
        },
        needed: Resources {
            slots: slots_needed,
            bytes: bytes.max().unwrap_or(0),
            home_bytes_per_s: 0,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn least_demand_is_one_pipeline() {
        let text = "volume ref cache bafs://home/ref 5 MB\n\
            for i in 1..4\nvolume x$(i) scratch 3 MB\n\
            job a$(i) {\nexecutable = x\nrequest_cpus = 2\n}\njob b$(i) {\nexecutable = x\n}\n\
            parent a$(i) child b$(i)\nmount x$(i) a$(i) /x\nmount x$(i) b$(i) /x ro\n\
            mount ref b$(i) /ref\nend\n";
        let none = |path: &str| Err(path.to_owned());
        let parsed = bafs_workflow::parse_workflow("w", text, &none);
        let workflow = parsed
            .unwrap_or_else(|refused| panic!("{refused:?}"))
            .workflow;
        let demand = estimate_demand(&workflow, 0);
        assert_eq!((demand.needed.slots, demand.wanted.slots), (2, 8));
        let scratch = workflow.volumes.iter().find(|volume| volume.name == "x1");
        let scratch = scratch.expect("a volume").size_bytes;
        let cache = workflow.volumes.iter().find(|volume| volume.name == "ref");
        let cache = cache.expect("a volume").size_bytes;
        assert_eq!(demand.needed.bytes, scratch + cache);
        assert_eq!(demand.wanted.bytes, 4 * scratch + cache);
        let mut unknown = workflow.clone();
        for volume in &mut unknown.volumes {
            volume.size_bytes = 0;
        }
        let demand = estimate_demand(&unknown, 70);
        assert_eq!((demand.needed.bytes, demand.wanted.bytes), (70, 4 * 70));
    }
}
