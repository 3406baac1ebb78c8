//! The life of volumes: create, ready, failed, renew, expire, delete, removed. Pure: makes no
//! directory and writes no table; the driver persists and acts on what is decided here.
//!
//! Space stays reserved until the bytes are really gone ([`VolumeTable::release_deleted`]), so that
//! a full server is impossible by construction.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;

use bafs_proto::Error;
use bafs_proto::hash::Digest;
use bafs_proto::ids::VolumeId;
use bafs_proto::node_quota::{NodeQuota, NodeQuotaList, SetNodeQuota};
use bafs_proto::source_warning::SourceWarnings;
use bafs_proto::time::Time;
use bafs_proto::volume::{VolumeSpec, VolumeState};

use super::node_quota::QuotaLedger;
use super::space::{Amount, SpaceLedger, SpaceShortage};

/// Most volumes of one server.
pub const VOLUMES_MAX: usize = 16_384;

/// Most ids of former volumes that are remembered; beyond it the oldest is forgotten.
pub const TOMBSTONES_MAX: usize = 200_000;

/// A volume as the table knows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VolumeRow {
    /// As it was asked for.
    pub spec: VolumeSpec,
    /// Where it is in its life.
    pub state: VolumeState,
    /// Why it failed, if it did.
    pub failure: Option<Error>,
    /// Bytes of files that came over the network to fill it.
    pub received_bytes: u64,
    /// What a filled volume does not have as its source has it, since the server started.
    pub warnings: SourceWarnings,
    /// For a cache volume that is ready: digest of its manifest.
    pub manifest: Option<Digest>,
    /// When its life ends unless someone shows interest.
    pub expires: Time,
}

/// Verdict on a request to create.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Creation {
    /// Space is reserved; the driver must make the volume now.
    Start,
    /// The volume is there already, in whatever state.
    AlreadyPresent,
}

/// Why a volume is not created.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CreationRefusal {
    /// The id names another volume.
    Conflict,
    /// The id was deleted or has expired, and is never used again.
    Deleted,
    /// Too little space. With `soon` some of it is about to become free: asking again may help.
    NoSpace {
        /// How much is free.
        shortage: SpaceShortage,
        /// Whether the bytes of a deleted volume are still being removed.
        is_space_coming: bool,
    },
    /// The server has [`VOLUMES_MAX`] volumes.
    TooMany,
}

/// Why a volume keeps its size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResizeRefusal {
    /// There is no such volume.
    Absent,
    /// It is being made, or making it failed.
    NotReady,
    /// Too little space for it.
    NoSpace(SpaceShortage),
}

/// All volumes of a server, those that were, and the ledger of their space.
#[derive(Debug)]
pub struct VolumeTable {
    space: SpaceLedger,
    rows: BTreeMap<VolumeId, VolumeRow>,
    /// Owners of volumes whose bytes are being removed, with what these reserve.
    deletions_in_progress: BTreeMap<VolumeId, (String, Amount)>,
    /// What the volumes of each owner reserve.
    reserved_by_owner: BTreeMap<String, Amount>,
    quotas: QuotaLedger,
    /// Volumes whose space goes to whoever wants it, each with the time since when.
    giving_way: BTreeMap<VolumeId, Time>,
    tombstones: BTreeMap<VolumeId, Time>,
    tombstone_order: BTreeSet<(Time, VolumeId)>,
}

impl VolumeTable {
    /// An empty table over `capacity`.
    pub fn new(capacity: Amount) -> Self {
        Self {
            space: SpaceLedger::new(capacity),
            rows: BTreeMap::new(),
            deletions_in_progress: BTreeMap::new(),
            reserved_by_owner: BTreeMap::new(),
            quotas: QuotaLedger::default(),
            giving_way: BTreeMap::new(),
            tombstones: BTreeMap::new(),
            tombstone_order: BTreeSet::new(),
        }
    }

    /// Takes up a ready volume of an earlier life of the server. Its lifetime starts anew: nobody
    /// could show interest while the server was away.
    pub fn restore(&mut self, now: Time, spec: VolumeSpec, manifest: Option<Digest>) {
        self.space.restore_reservation(reserved_amount(&spec));
        add_reservation(
            &mut self.reserved_by_owner,
            &spec.owner,
            reserved_amount(&spec),
        );
        let expires = now.plus_ms(spec.lifetime_ms);
        let (state, fault) = (VolumeState::Ready, None);
        let id = spec.id;
        let before = self.rows.insert(
            id,
            VolumeRow {
                spec,
                state,
                failure: fault,
                received_bytes: 0,
                warnings: SourceWarnings::default(),
                manifest,
                expires,
            },
        );
        assert!(before.is_none(), "volume {id} restored twice");
    }

    /// Takes up the id of a former volume; returns the id that is forgotten for it, if any.
    pub fn add_tombstone(&mut self, when: Time, id: VolumeId) -> Option<VolumeId> {
        if let Some(before) = self.tombstones.insert(id, when) {
            self.tombstone_order.remove(&(before, id));
        }
        self.tombstone_order.insert((when, id));
        if self.tombstones.len() <= TOMBSTONES_MAX {
            return None;
        }
        let (_, oldest) = self.tombstone_order.pop_first()?;
        self.tombstones.remove(&oldest);
        Some(oldest)
    }

    /// Decides on a new volume and reserves its space.
    ///
    /// # Errors
    /// [`CreationRefusal`]; nothing is changed then.
    pub fn create(&mut self, now: Time, spec: &VolumeSpec) -> Result<Creation, CreationRefusal> {
        if let Some(row) = self.rows.get_mut(&spec.id) {
            // The lifetime may have become longer since.
            let lifetime_ms = spec.lifetime_ms.max(row.spec.lifetime_ms);
            let asked = VolumeSpec {
                lifetime_ms,
                ..spec.clone()
            };
            if row.spec != asked {
                return Err(CreationRefusal::Conflict);
            }
            row.expires = now.plus_ms(lifetime_ms);
            return Ok(Creation::AlreadyPresent);
        }
        if self.tombstones.contains_key(&spec.id) {
            return Err(CreationRefusal::Deleted);
        }
        if self.rows.len() >= VOLUMES_MAX {
            return Err(CreationRefusal::TooMany);
        }
        let reserved = self.reserve(now, &spec.owner, reserved_amount(spec));
        reserved.map_err(|(shortage, is_space_coming)| CreationRefusal::NoSpace {
            shortage,
            is_space_coming,
        })?;
        let row = VolumeRow {
            spec: spec.clone(),
            state: VolumeState::Creating,
            failure: None,
            received_bytes: 0,
            warnings: SourceWarnings::default(),
            manifest: None,
            expires: now.plus_ms(spec.lifetime_ms),
        };
        self.rows.insert(spec.id, row);
        Ok(Creation::Start)
    }

    /// Reserves space for an owner, all or nothing. A shortage says whether space is coming.
    fn reserve(
        &mut self,
        now: Time,
        owner: &str,
        need: Amount,
    ) -> Result<(), (SpaceShortage, bool)> {
        let is_leaving = !self.deletions_in_progress.is_empty();
        self.quotas.expire(now);
        let left = self.available_to(owner);
        if need.bytes > left.bytes {
            return Err((SpaceShortage::Bytes(left.bytes), is_leaving));
        }
        if need.files > left.files {
            return Err((SpaceShortage::Files(left.files), is_leaving));
        }
        // What lacks then gives way.
        self.space.reserve(need).map_err(|short| (short, true))?;
        add_reservation(&mut self.reserved_by_owner, owner, need);
        Ok(())
    }

    /// Decides on another size of a volume, and reserves what it takes more. Answers the new
    /// specification. [`Self::end_resize`] must follow before anything else of this volume.
    ///
    /// # Errors
    /// [`ResizeRefusal`]; nothing is changed then.
    pub fn begin_resize(
        &mut self,
        now: Time,
        id: VolumeId,
        size_bytes: u64,
        size_files: Option<u64>,
    ) -> Result<VolumeSpec, ResizeRefusal> {
        let row = self.rows.get(&id).ok_or(ResizeRefusal::Absent)?;
        if row.state != VolumeState::Ready {
            return Err(ResizeRefusal::NotReady);
        }
        let spec = VolumeSpec {
            size_bytes,
            size_files: size_files.unwrap_or(row.spec.size_files),
            ..row.spec.clone()
        };
        let growth = reserved_amount(&spec).excess_over(reserved_amount(&row.spec));
        self.reserve(now, &spec.owner, growth)
            .map_err(|(shortage, _)| ResizeRefusal::NoSpace(shortage))?;
        Ok(spec)
    }

    /// The volume has the new size, or keeps its old one: what that does not need is free again.
    pub fn end_resize(&mut self, now: Time, resized: &VolumeSpec, is_done: bool) {
        let Some(row) = self.rows.get_mut(&resized.id) else {
            return;
        };
        let (old, new) = (reserved_amount(&row.spec), reserved_amount(resized));
        let unused = if is_done {
            row.spec.size_bytes = resized.size_bytes;
            row.spec.size_files = resized.size_files;
            row.expires = row.expires.max(now.plus_ms(row.spec.lifetime_ms));
            old.excess_over(new)
        } else {
            new.excess_over(old)
        };
        self.release(&resized.owner, unused);
    }

    /// What nobody reserved.
    pub fn free(&self) -> Amount {
        self.space.free()
    }

    /// What a new volume can have: what nobody reserved, and what gives way.
    pub fn offered(&self) -> Amount {
        let rows = self.giving_way.keys().filter_map(|id| self.rows.get(id));
        let amounts = rows.map(|row| reserved_amount(&row.spec));
        amounts.fold(self.space.free(), Amount::saturating_add)
    }

    /// Volumes whose space goes to whoever wants it.
    pub fn giving_way(&self) -> impl Iterator<Item = VolumeId> {
        self.giving_way.keys().copied()
    }

    /// Whether the space of a ready volume goes to whoever wants it. True when that is new, and is
    /// to be written down.
    pub fn set_giving_way(&mut self, now: Time, id: VolumeId, gives_way: bool) -> bool {
        let row = self.rows.get(&id);
        let is_ready = row.is_some_and(|row| row.state == VolumeState::Ready);
        match gives_way {
            true if is_ready && !self.giving_way.contains_key(&id) => {
                self.giving_way.insert(id, now);
                true
            }
            true => false,
            false => self.giving_way.remove(&id).is_some(),
        }
    }

    /// Volumes that are to be deleted so that this one has room: those that gave way first. None if
    /// that is no help, or enough is on its way.
    pub fn choose_evictions(&self, spec: &VolumeSpec) -> Vec<VolumeId> {
        let (need, left) = (reserved_amount(spec), self.available_to(&spec.owner));
        if need.bytes > left.bytes || need.files > left.files {
            return Vec::new();
        }
        let leaving = self.deletions_in_progress.values();
        let coming = leaving.map(|(_, amount)| *amount);
        let mut room = coming.fold(self.space.free(), Amount::saturating_add);
        let mut oldest: Vec<(Time, VolumeId)> = self
            .giving_way
            .iter()
            .map(|(id, since)| (*since, *id))
            .collect();
        oldest.sort_unstable();
        let mut evicted = Vec::new();
        for (_, id) in oldest {
            if room.bytes >= need.bytes && room.files >= need.files {
                break;
            }
            if let Some(row) = self.rows.get(&id) {
                room = room.saturating_add(reserved_amount(&row.spec));
                evicted.push(id);
            }
        }
        evicted
    }

    /// So many bytes of files came over the network to fill a volume, which does not have all as
    /// its source has it.
    pub fn note_filled(&mut self, id: VolumeId, received_bytes: u64, warnings: SourceWarnings) {
        if let Some(row) = self.rows.get_mut(&id) {
            row.received_bytes = received_bytes;
            row.warnings = warnings;
        }
    }

    /// The content is in place. False when nobody wants the volume any more.
    #[must_use]
    pub fn mark_ready(&mut self, now: Time, id: VolumeId, manifest: Option<Digest>) -> bool {
        let Some(row) = self.rows.get_mut(&id) else {
            return false;
        };
        assert_eq!(
            row.state,
            VolumeState::Creating,
            "volume {id} is made twice"
        );
        row.state = VolumeState::Ready;
        row.manifest = manifest;
        row.expires = now.plus_ms(row.spec.lifetime_ms);
        true
    }

    /// Making the volume failed. Its space stays reserved until it is deleted or expires.
    pub fn mark_failed(&mut self, now: Time, id: VolumeId, fault: Error) {
        let Some(row) = self.rows.get_mut(&id) else {
            return;
        };
        assert_eq!(
            row.state,
            VolumeState::Creating,
            "volume {id} fails after it was made"
        );
        row.state = VolumeState::Failed;
        row.failure = Some(fault);
        row.expires = now.plus_ms(row.spec.lifetime_ms);
    }

    /// A cache volume shows another state of its source now.
    pub fn set_manifest(&mut self, id: VolumeId, manifest: Digest) {
        if let Some(row) = self.rows.get_mut(&id) {
            row.manifest = Some(manifest);
        }
    }

    /// Someone shows interest. False when the volume does not exist.
    pub fn renew(&mut self, now: Time, id: VolumeId) -> bool {
        let Some(row) = self.rows.get_mut(&id) else {
            return false;
        };
        row.expires = row.expires.max(now.plus_ms(row.spec.lifetime_ms));
        true
    }

    /// What to write down so that the lifetime of a ready volume becomes `lifetime_ms`; nothing
    /// when it is as long already.
    pub fn plan_lifetime_extension(
        &self,
        id: VolumeId,
        lifetime_ms: u64,
    ) -> Option<(VolumeSpec, Option<Digest>)> {
        let row = self.rows.get(&id)?;
        let is_longer = row.state == VolumeState::Ready && lifetime_ms > row.spec.lifetime_ms;
        is_longer.then(|| {
            let spec = VolumeSpec {
                lifetime_ms,
                ..row.spec.clone()
            };
            (spec, row.manifest)
        })
    }

    /// The lifetime of a volume is at least this from now on; that is durable already.
    pub fn extend_lifetime(&mut self, now: Time, id: VolumeId, lifetime_ms: u64) {
        if let Some(row) = self.rows.get_mut(&id) {
            row.spec.lifetime_ms = row.spec.lifetime_ms.max(lifetime_ms);
        }
        self.renew(now, id);
    }

    /// Ends a volume. Its bytes are still there: see [`Self::release_deleted`]. Harmless to repeat,
    /// and an id that never was is dead from now on, so that a delayed create cannot revive it.
    pub fn delete(&mut self, now: Time, id: VolumeId) -> Deletion {
        let row = self.rows.remove(&id);
        self.giving_way.remove(&id);
        let repeated = self.tombstones.contains_key(&id);
        if let Some(row) = &row {
            let leaving = (row.spec.owner.clone(), reserved_amount(&row.spec));
            self.deletions_in_progress.insert(id, leaving);
        }
        let forgotten = if repeated {
            None
        } else {
            self.add_tombstone(now, id)
        };
        Deletion {
            row,
            evicted_tombstone: forgotten,
        }
    }

    /// The bytes of a deleted volume are gone: its space is free again.
    pub fn release_deleted(&mut self, id: VolumeId) {
        let Some((owner, amount)) = self.deletions_in_progress.remove(&id) else {
            return;
        };
        self.release(&owner, amount);
    }

    fn release(&mut self, owner: &str, amount: Amount) {
        self.space.release(amount);
        if let Some(held) = self.reserved_by_owner.get_mut(owner) {
            held.bytes = held.bytes.saturating_sub(amount.bytes);
            held.files = held.files.saturating_sub(amount.files);
            if *held == Amount::default() {
                self.reserved_by_owner.remove(owner);
            }
        }
    }

    /// Gives a run a part of the space, and of `slots`; nothing when too many runs have one.
    pub fn set_quota(
        &mut self,
        now: Time,
        call: SetNodeQuota,
        slots: u32,
    ) -> Option<NodeQuotaList> {
        let capacity = self.space.capacity();
        let capacity = NodeQuota {
            bytes: capacity.bytes,
            files: capacity.files,
            slots,
        };
        let held = &self.reserved_by_owner;
        let held_by = |owner: &str| held.get(owner).copied().unwrap_or_default();
        let free = self.offered();
        self.quotas.set_quota(now, call, capacity, free, held_by)
    }

    /// What volumes of this owner may still take.
    fn available_to(&self, owner: &str) -> Amount {
        let held_by = |owner: &str| {
            self.reserved_by_owner
                .get(owner)
                .copied()
                .unwrap_or_default()
        };
        self.quotas.available_to(owner, self.offered(), held_by)
    }

    /// Volumes whose time is up; the driver deletes them. A volume that is being made is not among
    /// them: making it has its own deadlines.
    pub fn expired_volumes(&self, now: Time) -> Vec<VolumeId> {
        let over = |row: &&VolumeRow| row.expires <= now && row.state != VolumeState::Creating;
        self.rows
            .values()
            .filter(over)
            .map(|row| row.spec.id)
            .collect()
    }

    /// A volume.
    pub fn get(&self, id: VolumeId) -> Option<&VolumeRow> {
        self.rows.get(&id)
    }

    /// All volumes, by id.
    pub fn rows(&self) -> impl Iterator<Item = &VolumeRow> {
        self.rows.values()
    }

    /// The volumes after this id, or all of them, by id.
    pub fn rows_after(&self, after: Option<VolumeId>) -> impl Iterator<Item = &VolumeRow> {
        let from = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.rows
            .range((from, Bound::Unbounded))
            .map(|(_, row)| row)
    }

    /// The ledger.
    pub fn space(&self) -> &SpaceLedger {
        &self.space
    }
}

/// What a deletion found.
#[derive(Debug, PartialEq, Eq)]
pub struct Deletion {
    /// The volume, if it was there.
    pub row: Option<VolumeRow>,
    /// An old id that is forgotten to make room for the memory of this one.
    pub evicted_tombstone: Option<VolumeId>,
}

fn add_reservation(held: &mut BTreeMap<String, Amount>, owner: &str, more: Amount) {
    let there = held.entry(owner.to_owned()).or_default();
    there.bytes = there.bytes.saturating_add(more.bytes);
    there.files = there.files.saturating_add(more.files);
}

fn reserved_amount(spec: &VolumeSpec) -> Amount {
    let (bytes, files) = spec.reservation();
    Amount { bytes, files }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bafs_proto::volume::{LimitKind, VolumeKind};
    use proptest::prelude::*;

    fn spec(id: u128, bytes: u64) -> VolumeSpec {
        VolumeSpec {
            id: VolumeId(id),
            name: "v".to_owned(),
            owner: "o".to_owned(),
            kind: VolumeKind::Scratch { fill: None },
            size_bytes: bytes,
            size_files: 1,
            limit: LimitKind::Exact,
            lifetime_ms: 1_000,
        }
    }

    fn table() -> VolumeTable {
        VolumeTable::new(Amount {
            bytes: 100,
            files: 10,
        })
    }

    #[test]
    fn repeated_creation_succeeds_unless_the_spec_differs() {
        let mut table = table();
        assert_eq!(table.create(Time(0), &spec(1, 60)), Ok(Creation::Start));
        assert_eq!(
            table.create(Time(1), &spec(1, 60)),
            Ok(Creation::AlreadyPresent)
        );
        assert_eq!(
            table.create(Time(1), &spec(1, 61)),
            Err(CreationRefusal::Conflict)
        );
        assert_eq!(table.space().free().bytes, 40);
        assert!(table.mark_ready(Time(2), VolumeId(1), None));
        assert_eq!(
            table.create(Time(3), &spec(1, 60)),
            Ok(Creation::AlreadyPresent)
        );
    }

    #[test]
    fn a_deleted_volume_id_is_never_reused() {
        let mut table = table();
        table.create(Time(0), &spec(1, 1)).expect("room");
        assert!(table.delete(Time(1), VolumeId(1)).row.is_some());
        assert!(table.delete(Time(2), VolumeId(1)).row.is_none());
        assert!(
            !table.mark_ready(Time(3), VolumeId(1), None),
            "the maker comes too late"
        );
        table.release_deleted(VolumeId(1));
        assert_eq!(
            table.create(Time(4), &spec(1, 1)),
            Err(CreationRefusal::Deleted)
        );
        assert!(table.delete(Time(5), VolumeId(2)).row.is_none());
        assert_eq!(
            table.create(Time(6), &spec(2, 1)),
            Err(CreationRefusal::Deleted)
        );
    }

    #[test]
    fn space_is_freed_once_the_bytes_are_removed() {
        let mut table = table();
        table.create(Time(0), &spec(1, 100)).expect("room");
        let short = SpaceShortage::Bytes(0);
        let refusal = |soon| {
            Err(CreationRefusal::NoSpace {
                shortage: short,
                is_space_coming: soon,
            })
        };
        assert_eq!(table.create(Time(0), &spec(2, 1)), refusal(false));
        table.delete(Time(1), VolumeId(1));
        assert_eq!(table.create(Time(1), &spec(2, 1)), refusal(true));
        table.release_deleted(VolumeId(1));
        table.release_deleted(VolumeId(1));
        assert_eq!(table.create(Time(1), &spec(2, 100)), Ok(Creation::Start));
    }

    #[test]
    fn kept_volumes_give_way_oldest_first() {
        let mut table = table();
        for (id, bytes) in [(1, 40), (2, 40), (3, 10)] {
            table.create(Time(0), &spec(id, bytes)).expect("room");
            assert!(table.mark_ready(Time(0), VolumeId(id), None));
        }
        let want = |table: &mut VolumeTable, bytes| {
            let created = table.create(Time(9), &spec(9, bytes));
            (created, table.choose_evictions(&spec(9, bytes)))
        };
        let refusal = |free, soon| {
            Err(CreationRefusal::NoSpace {
                shortage: SpaceShortage::Bytes(free),
                is_space_coming: soon,
            })
        };
        assert_eq!(want(&mut table, 50), (refusal(10, false), vec![]));
        assert!(table.set_giving_way(Time(6), VolumeId(1), true));
        assert!(table.set_giving_way(Time(5), VolumeId(2), true));
        assert!(!table.set_giving_way(Time(7), VolumeId(2), true), "it did");
        let giving_way: Vec<VolumeId> = table.giving_way().collect();
        assert_eq!(giving_way, [VolumeId(1), VolumeId(2)]);
        assert_eq!(table.offered().bytes, 90);
        assert_eq!(want(&mut table, 91), (refusal(90, false), vec![]));
        let both = vec![VolumeId(2), VolumeId(1)];
        assert_eq!(want(&mut table, 60), (refusal(10, true), both));
        assert_eq!(want(&mut table, 50).1, [VolumeId(2)]);
        table.delete(Time(8), VolumeId(2));
        assert_eq!(
            want(&mut table, 50),
            (refusal(10, true), vec![]),
            "it leaves"
        );
        table.release_deleted(VolumeId(2));
        assert_eq!(want(&mut table, 50).0, Ok(Creation::Start));
        // Its run wants the other one again.
        assert!(table.set_giving_way(Time(9), VolumeId(1), false));
        assert_eq!(table.offered().bytes, 0);
    }

    #[test]
    fn volumes_expire_unless_renewed() {
        let mut table = table();
        table.create(Time(0), &spec(1, 1)).expect("room");
        assert!(
            table.expired_volumes(Time(5_000)).is_empty(),
            "it is still being made"
        );
        assert!(table.mark_ready(Time(5_000), VolumeId(1), None));
        assert!(table.expired_volumes(Time(5_999)).is_empty());
        assert!(table.renew(Time(5_999), VolumeId(1)));
        assert!(table.expired_volumes(Time(6_998)).is_empty());
        assert_eq!(table.expired_volumes(Time(6_999)), [VolumeId(1)]);
        assert!(!table.renew(Time(7_000), VolumeId(9)));
        table.create(Time(7_000), &spec(2, 1)).expect("room");
        table.mark_failed(
            Time(7_000),
            VolumeId(2),
            Error::new(bafs_proto::ErrorCode::NotFound, "why"),
        );
        assert_eq!(
            table.expired_volumes(Time(8_000)),
            [VolumeId(1), VolumeId(2)]
        );
    }

    #[test]
    fn a_restored_volume_lives_a_full_lifetime() {
        let mut table = table();
        table.restore(Time(9_000), spec(1, 150), None);
        assert_eq!(table.space().free().bytes, 0);
        assert!(table.expired_volumes(Time(9_999)).is_empty());
        assert_eq!(table.expired_volumes(Time(10_000)), [VolumeId(1)]);
        table.delete(Time(10_000), VolumeId(1));
        table.release_deleted(VolumeId(1));
        assert_eq!(table.space().free().bytes, 100);
    }

    #[test]
    fn the_number_of_tombstones_is_bounded() {
        let mut table = table();
        for id in 0..TOMBSTONES_MAX as u128 {
            assert_eq!(
                table
                    .delete(Time(id as u64), VolumeId(id))
                    .evicted_tombstone,
                None
            );
        }
        let next = VolumeId(TOMBSTONES_MAX as u128);
        let deletion = table.delete(Time(TOMBSTONES_MAX as u64), next);
        assert_eq!(deletion.evicted_tombstone, Some(VolumeId(0)));
    }

    proptest! {
        #[test]
        fn reserved_space_covers_volumes_and_pending_deletions(steps in prop::collection::vec(
            (0u8..5, 0u128..8, 0u64..60), 0..200,
        )) {
            let mut table = table();
            for (at, (what, id, bytes)) in steps.into_iter().enumerate() {
                let (now, key) = (Time(at as u64), VolumeId(id));
                let creating = table.get(key).is_some_and(|r| r.state == VolumeState::Creating);
                match what {
                    0 | 1 => drop(table.create(now, &spec(id + 8 * bytes as u128, bytes))),
                    2 if creating => assert!(table.mark_ready(now, key, None)),
                    3 => drop(table.delete(now, key)),
                    _ => table.release_deleted(key),
                }
                let living: u64 = table.rows().map(|row| row.spec.size_bytes).sum();
                let deletions = table.deletions_in_progress.values();
                let leaving: u64 = deletions.map(|(_, amount)| amount.bytes).sum();
                prop_assert!(living + leaving <= 100);
                prop_assert_eq!(table.space().free().bytes, 100 - living - leaving);
            }
        }
    }
}
