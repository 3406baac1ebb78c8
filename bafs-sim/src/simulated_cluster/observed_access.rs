//! Data that jobs find in their volumes, and the observed access that simulated agents report.

use std::collections::BTreeSet;

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_proto::job_report::VolumeUse;
use bafs_sched::{Event, MountedVolume, NodeInfo, Space};
use bafs_workflow::{JobIndex, Mount};

use super::{ClusterEvent, ClusterNode, SimulatedCluster, VolumeWrites};

impl SimulatedCluster {
    /// The agent's report of a job's volumes.
    pub(super) fn reported_uses(&self, job: JobIndex, mounted: &[MountedVolume]) -> Vec<VolumeUse> {
        let workflow = self.scheduler.workflow();
        let spec = workflow.job(job);
        let used = |(mount, mounted): (&Mount, &MountedVolume)| {
            let held = self.held_space(mounted);
            let volume = workflow.volume(mount.volume);
            let names = (spec.name.clone(), volume.name.clone());
            let declared = (!mount.writable, mount.writable);
            let (reads, writes) = self
                .observed_access
                .get(&names)
                .copied()
                .unwrap_or(declared);
            let file = |is_used| if is_used { "file" } else { "" }.to_owned();
            VolumeUse {
                name: names.1,
                read_bytes: 0,
                written_bytes: 0,
                read_opens: u64::from(reads),
                changes: u64::from(writes),
                metadata_ops: 0,
                has_no_counts: false,
                first_read_path: file(reads),
                first_changed_path: file(writes),
                used_bytes: held.bytes,
                used_files: held.files,
                disk_free_bytes: Some(u64::MAX),
                disk_free_files: None,
                pages: Vec::new(),
                call_ms_max: 0,
                wait_ms: 0,
                no_space_errors: u64::from(self.is_short(mounted)),
                access_path: String::new(),
                inputs: None,
            }
        };
        spec.mounts.iter().zip(mounted).map(used).collect()
    }

    /// The content of a volume at the end of its job: the needed space, as far as available.
    fn held_space(&self, mounted: &MountedVolume) -> Space {
        let name = &self.scheduler.workflow().volume(mounted.volume).name;
        let need = self.needed_space.get(name).copied().unwrap_or_default();
        need.component_min(self.space_of(mounted).unwrap_or(need))
    }

    /// A part of a cache is looked at: it keeps its share by size, and some more than that.
    pub(super) fn inspect_cache(&mut self, id: VolumeId, server: ServerId) {
        let there = self.nodes[&server].volumes.get(&id);
        let Some((size, ..)) = there.filter(|_| self.is_alive(server)) else {
            return;
        };
        let more = (id.0 % 8) as u64 * size.bytes / 25;
        let event = Event::CacheInspected {
            volume: id,
            primary_bytes: size.bytes + more,
            refetched_bytes: 0,
        };
        self.schedule_due(10, ClusterEvent::ApplyEvent(event));
    }

    /// Whether one of these volumes has less space than it needs.
    pub(super) fn is_too_small(&self, volumes: &[MountedVolume]) -> bool {
        volumes.iter().any(|mounted| self.is_short(mounted))
    }

    fn is_short(&self, mounted: &MountedVolume) -> bool {
        let name = &self.scheduler.workflow().volume(mounted.volume).name;
        let need = self.needed_space.get(name).copied().unwrap_or_default();
        let space = self.space_of(mounted);
        space.is_some_and(|space| !space.can_hold(need))
    }

    fn space_of(&self, mounted: &MountedVolume) -> Option<Space> {
        let node = self.nodes.get(&mounted.server?)?;
        node.volumes.get(&mounted.id).map(|(size, ..)| *size)
    }

    /// The content of a volume, if it is reachable.
    pub(super) fn content(&self, mounted: &MountedVolume) -> Option<&VolumeWrites> {
        let node = self.nodes.get(&mounted.server?)?;
        if node.died_at.is_some() || node.unreachable.is_some() {
            return None;
        }
        node.volumes.get(&mounted.id).map(|(_, _, content)| content)
    }

    /// A job must find the writes of every earlier job in its volumes, and neither the writes of an
    /// earlier attempt nor those of a later job.
    pub(super) fn check_start(&self, job: JobIndex, volumes: &[MountedVolume]) {
        let workflow = self.scheduler.workflow();
        for mounted in volumes {
            let Some(content) = self.content(mounted) else {
                continue;
            };
            let later = self.descendants(job);
            let stray = content.keys().find(|writer| later.contains(writer));

            assert!(
                stray.is_none(),
                "{} starts with what {} left in {}",
                workflow.job(job).name,
                stray.map_or("", |stray| &*workflow.job(*stray).name),
                workflow.volume(mounted.volume).name
            );
            for parent in &workflow.job(job).parents {
                let mounts = &workflow.job(*parent).mounts;
                let writes = mounts
                    .iter()
                    .any(|m| m.volume == mounted.volume && m.writable);
                assert!(
                    !writes || content.contains_key(parent),
                    "{} starts without the output of {}",
                    workflow.job(job).name,
                    workflow.job(*parent).name
                );
            }
        }
    }
}

impl SimulatedCluster {
    /// A job and all that come after it.
    fn descendants(&self, job: JobIndex) -> BTreeSet<JobIndex> {
        let mut later = BTreeSet::new();
        let mut next = vec![job];
        while let Some(job) = next.pop() {
            if later.insert(job) {
                next.extend(&self.scheduler.workflow().job(job).children);
            }
        }
        later
    }
}

/// The catalog's entry of a node.
pub(super) fn node_info(server: ServerId, node: &ClusterNode) -> NodeInfo {
    NodeInfo::single_group(server, node.spec.capacity, node.spec.slots)
}
