//! Content of simulated volumes, and the bytes that cross the network for a copy.

use std::collections::BTreeMap;

use bafs_proto::ids::VolumeId;

/// Content of scratch volumes and their copies.
#[derive(Debug, Default)]
pub(super) struct VolumeContents(BTreeMap<VolumeId, VolumeContent>);

/// Content of a volume.
#[derive(Debug, Clone, Copy)]
struct VolumeContent {
    /// Bytes ever written into it, or into the source of the copy.
    written_bytes: u64,
    /// Bytes that travelled to make this copy, if it is one.
    copied_bytes: u64,
    /// It holds no more.
    size_bytes: u64,
}

impl VolumeContent {
    fn held_bytes(self) -> u64 {
        self.written_bytes.min(self.size_bytes)
    }
}

impl VolumeContents {
    /// A volume is created with so many bytes in it.
    pub(super) fn note_created(&mut self, id: VolumeId, written: u64, size: u64) {
        let content = VolumeContent {
            written_bytes: written,
            copied_bytes: 0,
            size_bytes: size,
        };
        self.0.insert(id, content);
    }

    /// A job writes into a volume.
    pub(super) fn note_written(&mut self, id: VolumeId, bytes: u64) {
        if let Some(content) = self.0.get_mut(&id) {
            content.written_bytes = content.written_bytes.saturating_add(bytes);
        }
    }

    /// Bytes that a volume holds.
    pub(super) fn held_bytes(&self, id: VolumeId) -> u64 {
        self.0.get(&id).map_or(0, |content| content.held_bytes())
    }

    /// Bytes to transfer for a copy: the whole content, or the bytes written since the older copy.
    pub(super) fn begin_copy(
        &mut self,
        id: VolumeId,
        source: VolumeId,
        base: Option<VolumeId>,
    ) -> u64 {
        let Some(content) = self.0.get(&source).copied() else {
            return 1;
        };
        let older = base.and_then(|base| self.0.get(&base));
        let before = older.map_or(0, |older| older.written_bytes);
        let moved = content
            .held_bytes()
            .min(content.written_bytes.saturating_sub(before));
        let moved = moved.max(1);
        self.0.insert(
            id,
            VolumeContent {
                copied_bytes: moved,
                ..content
            },
        );
        moved
    }

    /// Bytes that travelled to make a volume, if it is a copy.
    pub(super) fn copied_bytes(&self, id: VolumeId) -> u64 {
        self.0.get(&id).map_or(0, |content| content.copied_bytes)
    }

    pub(super) fn forget(&mut self, id: VolumeId) {
        self.0.remove(&id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn further_copy_moves_only_later_writes() {
        let [volume, copy, newer] = [1, 2, 3].map(VolumeId);
        let mut copying = VolumeContents::default();
        copying.note_created(volume, 0, 100);
        copying.note_written(volume, 30);
        assert_eq!(
            copying.begin_copy(copy, volume, None),
            30,
            "of the 100 declared"
        );
        copying.note_written(volume, 5);
        assert_eq!(copying.begin_copy(newer, volume, Some(copy)), 5);
        // The volume is lost, and the copy in its place written over and over.
        copying.forget(volume);
        copying.note_written(copy, 200);
        assert_eq!(copying.held_bytes(copy), 100, "no more than it may");
        assert_eq!(copying.held_bytes(volume), 0);
    }
}
