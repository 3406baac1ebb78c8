//! Which volumes exist where. Knows no jobs and decides nothing.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_workflow::{JobIndex, VolumeIndex, VolumeKind, Workflow};
use serde::{Deserialize, Serialize};

use crate::space::Space;
use crate::state::changes::Changed;
use crate::state::recorded::{RowChanges, is_default, kept, whole_rows};
use crate::state::tracked::Table;
use crate::state::work_counter::WorkCounter;

/// Where a volume is in its life, as far as we know.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum InstanceState {
    /// Asked for.
    Creating,
    /// Ready.
    Ready,
    /// A copy of a volume that exists elsewhere, being made.
    Copying,
    /// A copy, complete: of use when the volume is lost.
    Copy,
    /// Out of use; it stays until the log of a job that failed is at home.
    Held,
    /// To be deleted; counts as reserved until it is gone.
    Deleting,
}

impl InstanceState {
    /// Whether jobs may use the volume now or soon.
    fn is_live(self) -> bool {
        matches!(self, Self::Creating | Self::Ready)
    }

    /// Whether its server was asked to make it and has not answered.
    pub(crate) fn is_being_made(self) -> bool {
        matches!(self, Self::Creating | Self::Copying)
    }

    /// Whether it is complete on its server.
    pub(crate) fn is_complete(self) -> bool {
        matches!(self, Self::Ready | Self::Copy | Self::Held)
    }
}

/// A volume of the workflow as it exists on one server.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Instance {
    pub(crate) volume: VolumeIndex,
    /// `None` with remote I/O.
    pub(crate) server: Option<ServerId>,
    pub(crate) size: Space,
    pub(crate) state: InstanceState,
    /// Jobs that start when it is ready. Rebuilt from their attempts.
    #[serde(skip)]
    pub(crate) waiters: Vec<JobIndex>,
    /// Deletions that failed.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) delete_faults: u32,
    /// It holds results that could not be sent home, and outlives the run.
    #[serde(default, skip_serializing_if = "is_default")]
    pub(crate) is_kept: bool,
}

whole_rows!(Instance);

/// All volumes that exist.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Volumes {
    instances: Table<VolumeId, Instance>,
    /// For each volume of the workflow what is creating or ready, by server.
    live: Vec<BTreeMap<Option<ServerId>, VolumeId>>,
    /// Everything that exists on a server.
    on_server: BTreeMap<ServerId, BTreeMap<VolumeId, VolumeIndex>>,
    /// Bytes of each cache; nothing for scratch volumes.
    cache_bytes: Vec<Option<u64>>,
    /// How many caches of each size neither exist nor are being created: to look at every cache
    /// whenever one is divided would take the square of their number.
    absent: BTreeMap<u64, u64>,
    /// How often anything of this may have changed.
    changes: u64,
    /// What all volumes had that are gone, in bytes.
    freed_bytes: u64,
    /// Servers where anything of this may have changed.
    pub(crate) changed: Changed<ServerId>,
    /// Volumes that were looked at.
    pub(crate) tally: WorkCounter,
}

kept! {
    /// What was written of the volumes that exist.
    VolumeChanges of Volumes;
    values { changes: u64, freed_bytes: u64 }
    tables {}
    indexed { instances: Table<VolumeId, Instance> }
    parts {}
    rebuilt { live, on_server, cache_bytes, absent, changed, tally }
}

impl Volumes {
    pub(crate) fn new(workflow: &Workflow) -> Self {
        let cache_bytes = workflow.volumes.iter().map(|volume| {
            let is_cache = matches!(volume.kind, VolumeKind::Cache { .. });
            is_cache.then_some(volume.size_bytes)
        });
        let cache_bytes: Vec<Option<u64>> = cache_bytes.collect();
        let mut absent = BTreeMap::new();
        for bytes in cache_bytes.iter().flatten() {
            *absent.entry(*bytes).or_default() += 1;
        }
        Self {
            instances: Table::default(),
            live: vec![BTreeMap::new(); workflow.volumes.len()],
            on_server: BTreeMap::new(),
            cache_bytes,
            absent,
            changes: 0,
            freed_bytes: 0,
            changed: Changed::default(),
            tally: WorkCounter::default(),
        }
    }

    pub(crate) fn get(&self, id: VolumeId) -> Option<&Instance> {
        self.tally.one();
        self.instances.get(&id)
    }

    /// How often anything may have changed.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    /// What all volumes had that are gone, in bytes.
    pub(crate) fn freed_bytes(&self) -> u64 {
        self.freed_bytes
    }

    /// Who waits for a volume, to be put back: nothing changes.
    pub(crate) fn restored_waiters(&mut self, id: VolumeId) -> Option<&mut Vec<JobIndex>> {
        let instance = self.instances.derived_mut(&id)?;
        Some(&mut instance.waiters)
    }

    fn note_change(&mut self, server: Option<ServerId>) {
        self.changes += 1;
        if let Some(server) = server {
            self.changed.note(server);
        }
    }

    pub(crate) fn get_mut(&mut self, id: VolumeId) -> Option<&mut Instance> {
        self.tally.one();
        let instance = self.instances.get_mut(&id)?;
        self.changes += 1;
        if let Some(server) = instance.server {
            self.changed.note(server);
        }
        Some(instance)
    }

    /// The same for who waits for it, which is not kept.
    pub(crate) fn waiters_mut(&mut self, id: VolumeId) -> Option<&mut Instance> {
        self.tally.one();
        let instance = self.instances.derived_mut(&id)?;
        self.changes += 1;
        if let Some(server) = instance.server {
            self.changed.note(server);
        }
        Some(instance)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (VolumeId, &Instance)> {
        let looked_at = self.instances.iter().inspect(|_| self.tally.one());
        looked_at.map(|(id, instance)| (*id, instance))
    }

    pub(crate) fn len(&self) -> usize {
        self.instances.len()
    }

    /// What exists, or is being made, of a volume; by server.
    pub(crate) fn live(&self, volume: VolumeIndex) -> &BTreeMap<Option<ServerId>, VolumeId> {
        &self.live[volume.as_usize()]
    }

    /// The same, but for what is on no server.
    pub(crate) fn parts(&self, volume: VolumeIndex) -> impl Iterator<Item = (VolumeId, ServerId)> {
        let looked_at = self.live(volume).iter().inspect(|_| self.tally.one());
        looked_at.filter_map(|(server, id)| Some((*id, (*server)?)))
    }

    pub(crate) fn is_live(&self, volume: VolumeIndex) -> bool {
        self.tally.one();
        !self.live[volume.as_usize()].is_empty()
    }

    /// How many caches of each size neither exist nor are being created.
    pub(crate) fn absent(&self) -> &BTreeMap<u64, u64> {
        &self.absent
    }

    /// Sizes of the caches that neither exist nor are being created, but for one, each with how
    /// many there are.
    pub(crate) fn absent_beside(&self, volume: VolumeIndex) -> impl Iterator<Item = (u64, u64)> {
        let own = self.cache_bytes[volume.as_usize()].filter(|_| !self.is_live(volume));
        let beside = self.absent.iter();
        beside.map(move |(bytes, count)| (*bytes, count - u64::from(own == Some(*bytes))))
    }

    /// A volume has another size from now on.
    pub(crate) fn resize(&mut self, volume: VolumeIndex, bytes: u64) {
        let is_absent = !self.is_live(volume);
        if self.cache_bytes[volume.as_usize()].is_some() {
            self.count_absent(volume, is_absent, false);
            self.cache_bytes[volume.as_usize()] = Some(bytes);
            self.count_absent(volume, false, is_absent);
        }
    }

    fn count_absent(&mut self, volume: VolumeIndex, was_absent: bool, is_absent: bool) {
        let Some(bytes) = self.cache_bytes[volume.as_usize()] else {
            return;
        };
        let count = self.absent.entry(bytes).or_default();
        *count = *count + u64::from(is_absent) - u64::from(was_absent);
        if *count == 0 {
            self.absent.remove(&bytes);
        }
    }

    /// Begins the use of a volume on a server.
    fn begin(&mut self, volume: VolumeIndex, server: Option<ServerId>, id: VolumeId) {
        let was_absent = !self.is_live(volume);
        let before = self.live[volume.as_usize()].insert(server, id);
        assert!(before.is_none(), "a volume exists once on a server");
        self.count_absent(volume, was_absent, false);
    }

    /// Ends it.
    fn end(&mut self, volume: VolumeIndex, server: Option<ServerId>) {
        let was_absent = !self.is_live(volume);
        self.live[volume.as_usize()].remove(&server);
        self.count_absent(volume, was_absent, !self.is_live(volume));
    }

    /// The volume on this server, if it is creating or ready there.
    pub(crate) fn live_at(
        &self,
        volume: VolumeIndex,
        server: Option<ServerId>,
    ) -> Option<VolumeId> {
        self.tally.one();
        self.live[volume.as_usize()].get(&server).copied()
    }

    /// The only one of a scratch volume.
    pub(crate) fn scratch(&self, volume: VolumeIndex) -> Option<(VolumeId, Option<ServerId>)> {
        self.live[volume.as_usize()]
            .iter()
            .next()
            .map(|(server, id)| (*id, *server))
    }

    /// Whether anything is on a server.
    pub(crate) fn has_any(&self, server: ServerId) -> bool {
        self.tally.one();
        self.on_server.contains_key(&server)
    }

    /// Everything on a server.
    pub(crate) fn on_server(&self, server: ServerId) -> Vec<(VolumeId, VolumeIndex)> {
        let there = self.on_server.get(&server);
        self.tally.add(1 + there.map_or(0, BTreeMap::len) as u64);
        there
            .map(|all| all.iter().map(|(id, volume)| (*id, *volume)).collect())
            .unwrap_or_default()
    }

    pub(crate) fn add(&mut self, id: VolumeId, instance: Instance) {
        self.note_change(instance.server);
        self.tally.one();
        assert!(instance.state.is_live(), "a volume begins its life alive");
        let (volume, server) = (instance.volume, instance.server);
        self.begin(volume, server, id);
        if let Some(server) = server {
            self.on_server.entry(server).or_default().insert(id, volume);
        }
        self.instances.insert(id, instance);
    }

    /// Adds a copy: it exists, but no job uses it.
    pub(crate) fn add_copy(&mut self, id: VolumeId, instance: Instance) {
        self.note_change(instance.server);
        assert!(!instance.state.is_live(), "a copy is not in use");
        if let Some(server) = instance.server {
            let there = self.on_server.entry(server).or_default();
            there.insert(id, instance.volume);
        }
        self.instances.insert(id, instance);
    }

    /// Takes a complete copy into use, in the place of a volume that is gone.
    pub(crate) fn promote(&mut self, id: VolumeId) {
        let Some(instance) = self.instances.get_mut(&id) else {
            return;
        };
        assert!(
            instance.state == InstanceState::Copy,
            "only a copy is promoted"
        );
        instance.state = InstanceState::Ready;
        let (volume, server) = (instance.volume, instance.server);
        self.note_change(server);
        self.begin(volume, server, id);
    }

    /// Takes a volume out of use, which is [`InstanceState::Held`] or [`InstanceState::Deleting`]
    /// then; it keeps its space until it is removed.
    pub(crate) fn retire(&mut self, id: VolumeId, state: InstanceState) {
        self.tally.one();
        assert!(!state.is_live(), "what is out of use is not live");
        if let Some(instance) = self.instances.get_mut(&id) {
            let was_live = instance.state.is_live();
            let (volume, server) = (instance.volume, instance.server);
            instance.state = state;
            instance.waiters.clear();
            self.note_change(server);
            if was_live {
                self.end(volume, server);
            }
        }
    }

    /// Forgets a volume that is gone.
    pub(crate) fn remove(&mut self, id: VolumeId) -> Option<Instance> {
        self.tally.one();
        let instance = self.instances.remove(&id)?;
        self.freed_bytes = self.freed_bytes.saturating_add(instance.size.bytes);
        self.note_change(instance.server);
        if instance.state.is_live() {
            self.end(instance.volume, instance.server);
        }
        if let Some(server) = instance.server
            && let Some(there) = self.on_server.get_mut(&server)
        {
            there.remove(&id);
            if there.is_empty() {
                self.on_server.remove(&server);
            }
        }
        Some(instance)
    }

    /// Puts back what exists. Answers each volume as it was and as it is.
    pub(crate) fn restore(
        &mut self,
        rows: RowChanges<VolumeId, Instance>,
    ) -> Vec<(VolumeId, Option<Instance>, Option<Instance>)> {
        // Counts of changes are kept by themselves.
        let counts = (self.changes, self.freed_bytes);
        let mut changed = Vec::new();
        if rows.is_all {
            let set: BTreeSet<VolumeId> = rows.set.iter().map(|(id, _)| *id).collect();
            let left = self.instances.keys().filter(|id| !set.contains(id));
            for id in left.copied().collect::<Vec<_>>() {
                changed.push((id, self.remove(id), None));
            }
        }
        for id in rows.gone {
            changed.push((id, self.remove(id), None));
        }
        let ids = rows.set.iter().map(|(id, _)| *id);
        let ids: Vec<VolumeId> = ids.collect();
        // All go before any comes: another may be in the place of one.
        let before: Vec<Option<Instance>> = ids.into_iter().map(|id| self.remove(id)).collect();
        for ((id, mut instance), before) in rows.set.into_iter().zip(before) {
            if let (Some(before), InstanceState::Creating) = (&before, instance.state) {
                instance.waiters.clone_from(&before.waiters);
            }
            changed.push((id, before, Some(instance.clone())));
            match instance.state.is_live() {
                true => self.add(id, instance),
                false => self.add_copy(id, instance),
            }
        }
        (self.changes, self.freed_bytes) = counts;
        changed
    }
}
