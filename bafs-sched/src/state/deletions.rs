//! Parts of caches that are being deleted: what they leave is free in a moment. Deletes nothing.

use std::collections::BTreeMap;

use bafs_proto::ids::{ServerId, VolumeId};

use crate::state::recorded::{RowChanges, kept, whole_rows};
use crate::state::tracked::Table;

/// The parts, also by the group of their nodes: where thousands go at once, in a hundred groups,
/// who looked for those of one group among all of them would take the square of their number.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Leaving {
    parts: Table<VolumeId, (ServerId, String)>,
    /// No group without parts.
    groups: BTreeMap<String, BTreeMap<VolumeId, ServerId>>,
}

whole_rows!((ServerId, String));

kept! {
    /// What was written of parts that go.
    LeavingChanges of Leaving;
    values {}
    tables {}
    indexed { parts: Table<VolumeId, (ServerId, String)> }
    parts {}
    rebuilt { groups }
}

impl Leaving {
    /// Puts back what goes.
    pub(crate) fn restore(&mut self, rows: RowChanges<VolumeId, (ServerId, String)>) {
        if rows.is_all {
            *self = Self::default();
        }
        for id in rows.gone {
            self.remove(id);
        }
        for (id, (server, group)) in rows.set {
            self.insert(id, server, &group);
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    /// A part goes from a node of this group.
    pub(crate) fn insert(&mut self, id: VolumeId, server: ServerId, group: &str) {
        self.remove(id);
        self.parts.insert(id, (server, group.to_owned()));
        self.of_group(group).insert(id, server);
    }

    /// It is gone, or will not go soon; answers where it was.
    pub(crate) fn remove(&mut self, id: VolumeId) -> Option<ServerId> {
        let (server, group) = self.parts.remove(&id)?;
        let there = self.of_group(&group);
        there.remove(&id);
        if there.is_empty() {
            self.groups.remove(&group);
        }
        Some(server)
    }

    /// A node is in another group from now on.
    pub(crate) fn move_to(&mut self, server: ServerId, group: &str) {
        let parts = self.parts.iter();
        let moved = parts.filter(|(_, (at, _))| *at == server);
        let moved: Vec<VolumeId> = moved.map(|(id, _)| *id).collect();
        for id in moved {
            self.insert(id, server, group);
        }
    }

    /// Those that go from nodes of a group.
    pub(crate) fn in_group(&self, group: &str) -> impl Iterator<Item = (VolumeId, ServerId)> {
        let there = self.groups.get(group).into_iter().flatten();
        there.map(|(id, server)| (*id, *server))
    }

    fn of_group(&mut self, group: &str) -> &mut BTreeMap<VolumeId, ServerId> {
        self.groups.entry(group.to_owned()).or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deletions_in_progress_are_found_by_group() {
        let mut leaving = Leaving::default();
        let (one, other) = (ServerId(1), ServerId(2));
        leaving.insert(VolumeId(1), one, "a");
        leaving.insert(VolumeId(2), other, "b");
        leaving.insert(VolumeId(3), one, "a");
        let found = |leaving: &Leaving, group| {
            let found = leaving.in_group(group);
            found.map(|(id, _)| id.0).collect::<Vec<_>>()
        };
        assert_eq!(found(&leaving, "a"), [1, 3]);
        leaving.move_to(one, "b");
        assert_eq!(found(&leaving, "a"), [0; 0]);
        assert_eq!(found(&leaving, "b"), [1, 2, 3]);
        assert_eq!(leaving.remove(VolumeId(2)), Some(other));
        assert_eq!(leaving.remove(VolumeId(2)), None);
        for id in [1, 3] {
            leaving.remove(VolumeId(id));
        }
        assert_eq!(leaving, Leaving::default(), "nothing is left of them");
    }
}
