//! Copies of scratch volumes that exist or are being made.

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_proto::time::Time;
use bafs_workflow::{JobIndex, VolumeIndex};
use serde::{Deserialize, Serialize};

use crate::action::MountedVolume;
use crate::state::recorded::{kept, whole_rows};
use crate::state::tracked::{Keys, Table};

/// A copy that exists or is being made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Copy {
    pub(crate) id: VolumeId,
    pub(crate) source: MountedVolume,
    pub(crate) since: Time,
    /// Writers whose output it has.
    pub(crate) writers: Vec<JobIndex>,
    /// The older copy on the same node that it is made from.
    pub(crate) base: Option<VolumeId>,
}

/// All copies.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Copies {
    /// Of each volume: one that is complete, then perhaps a newer one that is being made.
    pub(crate) by_volume: Table<VolumeIndex, Vec<Copy>>,
    /// Volumes that have copies, by pipeline.
    pub(crate) by_pipeline: Keys<(u32, VolumeIndex)>,
    /// Copies that are being made, by the server that they come from.
    pub(crate) under_way: Keys<(ServerId, VolumeId)>,
}

whole_rows!(Vec<Copy>);

kept! {
    /// What was written of copies.
    CopyChanges of Copies;
    values {}
    tables {
        by_volume: Table<VolumeIndex, Vec<Copy>>,
        by_pipeline: Keys<(u32, VolumeIndex)>,
        under_way: Keys<(ServerId, VolumeId)>,
    }
    indexed {}
    parts {}
    rebuilt {}
}

impl Copies {
    pub(crate) fn is_empty(&self) -> bool {
        self.by_volume.is_empty()
    }

    pub(crate) fn of(&self, volume: VolumeIndex) -> &[Copy] {
        self.by_volume.get(&volume).map_or(&[], Vec::as_slice)
    }

    pub(crate) fn get(&self, volume: VolumeIndex, id: VolumeId) -> Option<&Copy> {
        self.of(volume).iter().find(|copy| copy.id == id)
    }

    pub(crate) fn add(&mut self, volume: VolumeIndex, pipeline: Option<u32>, copy: Copy) {
        let from = copy.source.server.map(|server| (server, copy.id));
        self.under_way.extend(from);
        self.by_volume.entry(volume).or_default().push(copy);
        self.by_pipeline.extend(pipeline.map(|p| (p, volume)));
    }

    /// Adds a copy that exists; one that is being made is newer.
    pub(crate) fn add_complete(&mut self, volume: VolumeIndex, pipeline: Option<u32>, copy: Copy) {
        self.by_volume.entry(volume).or_default().insert(0, copy);
        self.by_pipeline.extend(pipeline.map(|p| (p, volume)));
    }

    /// Takes a copy out of the books; answers whether it was the newest, if it was there.
    pub(crate) fn remove(
        &mut self,
        volume: VolumeIndex,
        pipeline: Option<u32>,
        id: VolumeId,
    ) -> Option<bool> {
        let copies = self.by_volume.get_mut(&volume)?;
        let at = copies.iter().position(|copy| copy.id == id)?;
        copies.remove(at);
        let was_newest = at == copies.len();
        if copies.is_empty() {
            self.by_volume.remove(&volume);
            if let Some(pipeline) = pipeline {
                self.by_pipeline.remove(&(pipeline, volume));
            }
        }
        Some(was_newest)
    }

    /// A copy is not being made any more, if it was; answers where it came from.
    pub(crate) fn end(&mut self, volume: VolumeIndex, id: VolumeId) -> Option<ServerId> {
        let server = self.get(volume, id)?.source.server?;
        self.under_way.remove(&(server, id)).then_some(server)
    }

    /// Copies that are being made from this server.
    pub(crate) fn made_from(&self, server: ServerId) -> impl Iterator<Item = VolumeId> {
        let all = (server, VolumeId(0))..=(server, VolumeId(u128::MAX));
        self.under_way.range(all).map(|(_, id)| *id)
    }

    pub(crate) fn of_pipeline(&self, pipeline: u32) -> Vec<VolumeIndex> {
        let of_pipeline = (pipeline, VolumeIndex(0))..=(pipeline, VolumeIndex(u32::MAX));
        let copied = self.by_pipeline.range(of_pipeline);
        copied.map(|(_, volume)| *volume).collect()
    }

    /// Time in which nothing went on, in milliseconds, does not count.
    pub(crate) fn put_off(&mut self, ms: u64) {
        for copy in self.by_volume.values_mut().flatten() {
            copy.since = copy.since.plus_ms(ms);
        }
    }
}
