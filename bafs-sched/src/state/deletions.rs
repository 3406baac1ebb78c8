//! Parts of caches that are being deleted: what they leave is free in a moment. Deletes nothing.

use bafs_proto::ids::{ServerId, VolumeId};

use crate::state::recorded::{kept, whole_rows};
use crate::state::tracked::Table;

/// The parts, with the node of each and its group.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Leaving {
    parts: Table<VolumeId, (ServerId, String)>,
}

whole_rows!((ServerId, String));

kept! {
    /// What was written of parts that go.
    LeavingChanges of Leaving;
    values {}
    tables { parts: Table<VolumeId, (ServerId, String)> }
    indexed {}
    parts {}
    rebuilt {}
}

impl Leaving {
    pub(crate) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// A part goes from a node of this group.
    pub(crate) fn insert(&mut self, id: VolumeId, server: ServerId, group: &str) {
        self.parts.insert(id, (server, group.to_owned()));
    }

    /// It is gone, or will not go soon; answers whether it was to go.
    pub(crate) fn remove(&mut self, id: VolumeId) -> bool {
        self.parts.remove(&id).is_some()
    }
}
