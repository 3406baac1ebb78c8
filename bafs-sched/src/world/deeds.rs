//! What simulated agents report of the volumes of a job.

use bafs_proto::message::VolumeUse;

use super::World;
use crate::workflow::{JobIndex, Mount};

impl World {
    /// What the agent of a job reports of its volumes.
    pub(super) fn uses(&self, job: JobIndex) -> Vec<VolumeUse> {
        let workflow = self.scheduler.workflow();
        let spec = workflow.job(job);
        let used = |mount: &Mount| {
            let volume = workflow.volume(mount.volume);
            let names = (spec.name.clone(), volume.name.clone());
            let declared = (!mount.writable, mount.writable);
            let (reads, writes) = self.deeds.get(&names).copied().unwrap_or(declared);
            let file = |is_used| if is_used { "file" } else { "" }.to_owned();
            VolumeUse {
                name: names.1,
                read_bytes: 0,
                written_bytes: 0,
                opened: u64::from(reads),
                changes: u64::from(writes),
                first_read: file(reads),
                first_changed: file(writes),
                held_bytes: 0,
                held_files: 0,
                pages: Vec::new(),
                longest_call_ms: 0,
                waited_ms: 0,
            }
        };
        spec.mounts.iter().map(used).collect()
    }
}
