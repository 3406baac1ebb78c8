//! Where the scratch volumes of a job lie that starts on a node. Sizes and space are those declared
//! and learned; nothing is measured here.

use std::collections::BTreeMap;

use bafs_proto::ids::ServerId;
use bafs_workflow::VolumeIndex;

use crate::policy::View;
use crate::space::Space;
use crate::state::planned_volumes::Create;

/// Nodes that are tried for a scratch volume that does not fit where its job runs.
const SPILL_LOOKED_AT: usize = 2;

/// Whether a scratch volume may lie on another node than the job that needs it first. It is read
/// and written over the network then, but the storage of all nodes counts as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Spill {
    Never,
    Allowed,
}

impl View<'_> {
    /// Adds what must be made of a scratch volume so that a job can run on `server`. Nothing if it
    /// fits nowhere.
    pub(crate) fn plan_scratch(
        &self,
        volume: VolumeIndex,
        server: ServerId,
        spill: Spill,
        taken: &mut BTreeMap<ServerId, Space>,
        creates: &mut Vec<Create>,
    ) -> Option<()> {
        if self.volumes.is_live(volume) {
            return Some(());
        }
        let size = self.size_of(volume);
        if self.settings.has_private_data_at_home() {
            creates.push((volume, None, size));
            return Some(());
        }
        let has_room = |server: &ServerId| {
            let taken = taken.get(server).copied().unwrap_or_default();
            self.fleet
                .available(*server)
                .saturating_sub(taken)
                .can_hold(size)
        };
        let keeps_room =
            |server: &ServerId| self.leaves_room_to_come(*server, size, taken, creates);
        let has_own = keeps_room(&server);
        let outside = match has_own {
            true => None,
            false => self.roomiest_outside(server).find(has_room),
        };
        let target = match (has_room(&server), spill) {
            (true, Spill::Never) if outside.is_some() => return None,
            (true, _) => outside.unwrap_or(server),
            (false, Spill::Allowed) => {
                let places = || self.places_beside(server, taken).filter(has_room);
                // It is the same for all peers, of which there may be many.
                let is_good = |place: &ServerId| match self.fleet.is_together(*place, server) {
                    true => has_own,
                    false => keeps_room(place),
                };
                places().find(is_good).or_else(|| places().next())?
            }
            (false, Spill::Never) => return None,
        };
        let there = taken.entry(target).or_default();
        *there = there.saturating_add(size);
        creates.push((volume, Some(target), size));
        Some(())
    }

    /// Where a scratch volume may lie that finds no room on `server`, best first: the nodes with
    /// most room, then, as these may be those that a new cache fills first, the peers of `server`,
    /// then, as the cache may fill all of these, other groups.
    fn places_beside(
        &self,
        server: ServerId,
        taken: &BTreeMap<ServerId, Space>,
    ) -> impl Iterator<Item = ServerId> {
        let is_divided = !taken.is_empty();
        let peers = move || {
            let peers = is_divided.then(|| self.fleet.group_of(server));
            let usable = peers.into_iter().flatten();
            let usable = usable.filter(|(_, node)| node.takes_work());
            usable.map(|(id, _)| id)
        };
        let roomiest = self.fleet.roomiest().take(SPILL_LOOKED_AT);
        let peers = std::iter::once_with(peers).flatten();
        let outside = std::iter::once_with(move || self.roomiest_outside(server)).flatten();
        roomiest.chain(peers).chain(outside)
    }

    /// Whether a scratch volume of this size leaves the group of `server` so much that the batch
    /// volumes which the rules let come yet find room. They must lie in that group, the scratch
    /// volume may lie elsewhere; where there is no other group that makes no difference.
    fn leaves_room_to_come(
        &self,
        server: ServerId,
        size: Space,
        taken: &BTreeMap<ServerId, Space>,
        creates: &[Create],
    ) -> bool {
        if !self.fleet.has_groups() {
            return true;
        }
        let to_come = self.batch_bytes_to_come(creates);
        if to_come == 0 {
            return true;
        }
        let wanted = size.bytes.saturating_add(to_come);
        let mut left = 0u64;
        let peers = self.fleet.group_of(server);
        let is_enough = peers.filter(|(_, node)| node.takes_work()).any(|(id, _)| {
            let taken = taken.get(&id).copied().unwrap_or_default();
            left = left.saturating_add(self.fleet.available(id).saturating_sub(taken).bytes);
            left >= wanted
        });
        // What finds no room there anyway keeps none.
        is_enough || left < to_come
    }

    /// Nodes of other groups with most room.
    fn roomiest_outside(&self, server: ServerId) -> impl Iterator<Item = ServerId> {
        let all = self.fleet.roomiest();
        all.filter(move |other| !self.fleet.is_together(*other, server))
            .take(SPILL_LOOKED_AT)
    }
}
