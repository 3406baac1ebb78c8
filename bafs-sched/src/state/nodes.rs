//! What we believe of each node: its space, its slots, whether it lives. Places nothing.

mod departures;
mod resources;

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::ServerId;
use bafs_proto::time::Time;
use bafs_workflow::JobIndex;
use serde::{Deserialize, Serialize};

use crate::event::NodeInfo;
use crate::space::{Space, scale_up};
use crate::state::disk_fullness::Fullness;
use crate::state::recorded::{RowChanges, kept, whole_rows};
use crate::state::tracked::Table;
use crate::state::work_counter::WorkCounter;

/// Nodes that a search for a place looks at in each order of preference.
const CANDIDATES_MAX: usize = 8;

/// The part of a node that is kept for this run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Limit {
    pub(crate) space: Space,
    pub(crate) slots: u32,
    /// Other runs have or want a part.
    pub(crate) is_shared: bool,
    /// It is for what has begun there.
    pub(crate) is_over: bool,
}

impl Limit {
    /// Of a node that was not asked yet.
    const NOTHING: Self = Self {
        space: Space::ZERO,
        slots: 0,
        is_shared: false,
        is_over: false,
    };
}

/// One node, as we believe it to be.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct FleetNode {
    pub(crate) seen: NodeInfo,
    /// What our own volumes reserve there. Rebuilt from these.
    #[serde(skip)]
    pub(crate) reserved: Space,
    /// Slots that our own executions occupy. Rebuilt from these.
    #[serde(skip)]
    pub(crate) busy: u32,
    /// Memory that our own executions asked for. Rebuilt from these.
    #[serde(skip)]
    pub(crate) busy_memory: u64,
    /// Since when the catalog does not list it.
    pub(crate) missing_since: Option<Time>,
    /// Given up: nothing of ours exists there any more.
    pub(crate) is_lost: bool,
    /// Gets no new work before this time.
    pub(crate) aside_until: Option<Time>,
    /// Failures of the environment there since the last success.
    pub(crate) faults_in_row: u32,
    /// Its agents cannot run jobs, as far as we know.
    pub(crate) is_unfit: bool,
    /// Jobs that failed there by their own fault, as it seemed, and succeeded elsewhere, since the
    /// last success.
    pub(crate) blamed: u32,
    /// A job succeeded there, and nothing failed since.
    pub(crate) is_proven: bool,
    /// It is set aside because jobs fail there.
    pub(crate) is_suspect: bool,
    pub(crate) full: Fullness,
    /// The job that finds out whether the disk has space again: others wait for it.
    pub(crate) probe: Option<JobIndex>,
    /// How much of it this run may use, where nodes are shared.
    pub(crate) limit: Option<Limit>,
}

/// What of a node is kept but for what was seen of it: compared to know whether it was written.
type NodeFingerprint = (
    [Option<Time>; 2],
    [bool; 5],
    [u32; 4],
    (Time, u64),
    Option<JobIndex>,
    Option<Limit>,
);

impl FleetNode {
    fn fingerprint(&self) -> NodeFingerprint {
        let full = &self.full;
        (
            [self.missing_since, self.aside_until],
            [
                self.is_lost,
                self.is_unfit,
                self.is_proven,
                self.is_suspect,
                full.is_told,
            ],
            [
                self.faults_in_row,
                self.blamed,
                full.for_volumes,
                full.for_writers,
            ],
            (full.refused_at, checksum(&full.why)),
            self.probe,
            self.limit,
        )
    }

    /// Slots that this run may use.
    pub(crate) fn slots(&self) -> u32 {
        let limit = self.limit.map_or(u32::MAX, |limit| limit.slots);
        self.seen.slots.min(limit)
    }

    /// Whether it gets new work and new volumes.
    pub(crate) fn takes_work(&self) -> bool {
        !self.is_lost
            && self.missing_since.is_none()
            && self.aside_until.is_none()
            && !self.seen.departure.is_draining
    }

    /// A job succeeded there.
    pub(crate) fn prove(&mut self) {
        self.faults_in_row = 0;
        self.blamed = 0;
        self.is_unfit = false;
        self.is_proven = true;
    }

    /// It may be used again: what was held against it is forgotten.
    pub(crate) fn pardon(&mut self) {
        self.aside_until = None;
        self.faults_in_row = 0;
        self.blamed = 0;
        self.is_unfit = false;
        self.is_proven = false;
        self.is_suspect = false;
    }
}

whole_rows!(ServerId, FleetNode);

/// All nodes, with those that can take work ordered by what they have free.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Fleet {
    nodes: Table<ServerId, FleetNode>,
    /// Nodes that may take work and have a free slot, by free slots and bytes.
    by_slots: BTreeSet<(u32, u64, ServerId)>,
    /// The same nodes by bytes.
    by_bytes: BTreeSet<(u64, ServerId)>,
    /// Nodes that may hold new volumes, with or without a free slot, by bytes.
    by_room: BTreeSet<(u64, ServerId)>,
    /// The nodes of each group, lost ones too.
    groups: BTreeMap<String, BTreeSet<ServerId>>,
    /// Who was seen last at each address.
    by_address: Table<String, ServerId>,
    /// Nodes that drain, lost ones too. Rebuilt from what was seen of each.
    draining: BTreeSet<ServerId>,
    slack_permille: u32,
    /// Whether nodes are shared with other runs.
    has_limits: bool,
    pub(crate) lost: u64,
    /// Nodes that are not lost.
    pub(crate) alive: u64,
    /// Slots of these nodes that this run may use.
    pub(crate) slots: u64,
    /// Nodes that were looked at.
    pub(crate) tally: WorkCounter,
}

kept! {
    /// What was written of the nodes.
    FleetChanges of Fleet;
    values { lost: u64 }
    tables { by_address: Table<String, ServerId> }
    indexed { nodes: Table<ServerId, FleetNode> }
    parts {}
    rebuilt {
        by_slots, by_bytes, by_room, groups, draining, slack_permille, has_limits, alive, slots,
        tally,
    }
}

impl Fleet {
    pub(crate) fn new(slack_permille: u32) -> Self {
        Self {
            slack_permille,
            ..Self::default()
        }
    }

    /// Of each node only that part is used which it keeps for this run.
    pub(crate) fn with_limits(self, has_limits: bool) -> Self {
        Self { has_limits, ..self }
    }

    /// Whether other runs have or want a part of a live node.
    pub(crate) fn is_shared(&self) -> bool {
        self.has_limits
            && self
                .live()
                .any(|(_, node)| node.limit.is_some_and(|limit| limit.is_shared))
    }

    /// Whether a live node did not say yet what it keeps for this run.
    pub(crate) fn is_unanswered(&self) -> bool {
        self.has_limits
            && self
                .live()
                .any(|(_, node)| node.limit == Some(Limit::NOTHING))
    }

    pub(crate) fn get(&self, server: ServerId) -> Option<&FleetNode> {
        self.tally.one();
        self.nodes.get(&server)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (ServerId, &FleetNode)> {
        let looked_at = self.nodes.iter().inspect(|_| self.tally.one());
        looked_at.map(|(id, node)| (*id, node))
    }

    /// Nodes that are alive, missing or not, set aside or not.
    pub(crate) fn live(&self) -> impl Iterator<Item = (ServerId, &FleetNode)> {
        self.iter().filter(|(_, node)| !node.is_lost)
    }

    pub(crate) fn name(&self, server: ServerId) -> String {
        self.nodes
            .get(&server)
            .map_or_else(|| server.to_string(), |node| node.seen.name.clone())
    }

    /// Changes a node and keeps the orders right.
    pub(crate) fn update<R>(
        &mut self,
        server: ServerId,
        change: impl FnOnce(&mut FleetNode) -> R,
    ) -> Option<R> {
        self.tally.one();
        let slack = self.slack_permille;
        let node = self.nodes.derived_mut(&server)?;
        let had = live_slots(node);
        let kept = node.fingerprint();
        let before = (
            free_slots(node),
            available(node, slack).bytes,
            node.takes_work(),
        );
        let result = change(node);
        let is_written = node.fingerprint() != kept;
        self.slots = self.slots - had + live_slots(node);
        let after = (
            free_slots(node),
            available(node, slack).bytes,
            node.takes_work(),
        );
        if is_written {
            self.nodes.note(&server);
        }
        if before == after {
            return Some(result);
        }
        let (slots, bytes, takes_work) = before;
        if slots > 0 {
            self.by_slots.remove(&(slots, bytes, server));
            self.by_bytes.remove(&(bytes, server));
        }
        if takes_work {
            self.by_room.remove(&(bytes, server));
        }
        let (slots, bytes, takes_work) = after;
        if slots > 0 {
            self.by_slots.insert((slots, bytes, server));
            self.by_bytes.insert((bytes, server));
        }
        if takes_work {
            self.by_room.insert((bytes, server));
        }
        Some(result)
    }

    /// What was to happen after so long happens as much later, in milliseconds.
    pub(crate) fn put_off(&mut self, ms: u64) {
        let waits = |node: &FleetNode| node.missing_since.or(node.aside_until).is_some();
        let waiting = self.nodes.iter().filter(|(_, node)| waits(node));
        for server in waiting.map(|(server, _)| *server).collect::<Vec<_>>() {
            if let Some(node) = self.nodes.get_mut(&server) {
                node.missing_since = node.missing_since.map(|since| since.plus_ms(ms));
                node.aside_until = node.aside_until.map(|until| until.plus_ms(ms));
            }
        }
    }

    /// Whether a listing of a node says nothing new.
    pub(crate) fn is_as_seen(&self, seen: &NodeInfo) -> bool {
        let node = self.nodes.get(&seen.id);
        node.is_some_and(|node| !node.is_lost && node.missing_since.is_none() && node.seen == *seen)
    }

    /// The other node, not lost, that was last seen at the address where this one is now: a machine
    /// that lost its disk comes back as another node, and the one that it was is gone.
    pub(crate) fn at_address_of(&self, seen: &NodeInfo) -> Option<ServerId> {
        let other = self.by_address.get(&seen.address).copied()?;
        let is_there = self
            .nodes
            .get(&other)
            .is_some_and(|node| !node.is_lost && node.seen.address == seen.address);
        (other != seen.id && is_there).then_some(other)
    }

    /// Whether a node is lost and no other one is in its place.
    pub(crate) fn is_vacant(&self, server: ServerId) -> bool {
        let node = self.nodes.get(&server).filter(|node| node.is_lost);
        node.is_some_and(|node| self.by_address.get(&node.seen.address) == Some(&server))
    }

    /// Takes a listing of a node; answers whether it is new or was lost.
    pub(crate) fn see(&mut self, seen: NodeInfo) -> bool {
        let server = seen.id;
        let group = self.nodes.get(&server).map(|node| &node.seen.group);
        if group != Some(&seen.group) {
            if let Some(members) = group.and_then(|group| self.groups.get_mut(group)) {
                members.remove(&server);
            }
            let members = self.groups.entry(seen.group.clone()).or_default();
            members.insert(server);
        }
        self.by_address.insert(seen.address.clone(), server);
        let limit = self.has_limits.then_some(Limit::NOTHING);
        // What is seen is written.
        let node = self.nodes.entry(server).or_insert_with(|| FleetNode {
            limit,
            seen: seen.clone(),
            reserved: Space::ZERO,
            busy: 0,
            busy_memory: 0,
            missing_since: None,
            is_lost: true,
            aside_until: None,
            faults_in_row: 0,
            is_unfit: false,
            blamed: 0,
            is_proven: false,
            is_suspect: false,
            full: Fullness::default(),
            probe: None,
        });
        let is_new = node.is_lost;
        self.see_departure(&seen);
        self.alive += u64::from(is_new);
        self.update(server, |node| {
            node.seen = seen;
            node.missing_since = None;
            node.is_lost = false;
            // Whoever started it again may have repaired it.
            node.is_unfit &= !is_new;
        });
        is_new
    }

    /// Puts back what is believed of nodes, but for what is there of ours.
    pub(crate) fn restore(&mut self, rows: RowChanges<ServerId, FleetNode>) {
        for (server, row) in rows.set {
            let address = self.by_address.get(&row.seen.address).copied();
            self.see(row.seen.clone());
            if let Some(address) = address {
                self.by_address.insert(row.seen.address.clone(), address);
            }
            // It counts as alive since it was seen.
            self.alive -= u64::from(row.is_lost);
            self.update(server, |node| {
                let (reserved, busy) = (node.reserved, node.busy);
                *node = FleetNode {
                    reserved,
                    busy,
                    ..row
                };
            });
        }
    }

    /// Slots that are free for new work, 0 when the node gets none.
    pub(crate) fn free_slots(&self, server: ServerId) -> u32 {
        self.get(server).map_or(0, free_slots)
    }

    /// Space that can be reserved now.
    pub(crate) fn available(&self, server: ServerId) -> Space {
        self.get(server)
            .map_or(Space::ZERO, |node| available(node, self.slack_permille))
    }

    /// Space that could be reserved if nothing of ours were there.
    pub(crate) fn usable(&self, server: ServerId) -> Space {
        self.get(server)
            .map_or(Space::ZERO, |node| usable(node, self.slack_permille))
    }

    /// The same if the node were not lost.
    pub(crate) fn usable_when_back(&self, server: ServerId) -> Space {
        self.get(server).map_or(Space::ZERO, |node| {
            usable_when_back(node, self.slack_permille)
        })
    }

    /// Space that could be reserved if nothing of ours, and of other runs, were there.
    pub(crate) fn offered(&self, server: ServerId) -> Space {
        self.get(server)
            .map_or(Space::ZERO, |node| offered(node, self.slack_permille))
    }

    /// The nodes of the group of `server`, lost ones too.
    pub(crate) fn group_of(
        &self,
        server: ServerId,
    ) -> impl Iterator<Item = (ServerId, &FleetNode)> {
        let group = self.get(server).map(|node| &node.seen.group);
        let members = group.and_then(|group| self.groups.get(group));
        let looked_at = members.into_iter().flatten();
        let looked_at = looked_at.inspect(|_| self.tally.one());
        looked_at.map(|member| (*member, &self.nodes[member]))
    }

    /// How many nodes the group of `server` has, lost ones too.
    pub(crate) fn group_size(&self, server: ServerId) -> usize {
        let group = self.get(server).map(|node| &node.seen.group);
        let members = group.and_then(|group| self.groups.get(group));
        members.map_or(0, BTreeSet::len)
    }

    /// Whether nodes are of several groups, lost ones too.
    pub(crate) fn has_groups(&self) -> bool {
        self.groups.len() > 1
    }

    /// The group of a node.
    pub(crate) fn group_name(&self, server: ServerId) -> Option<&str> {
        self.get(server).map(|node| node.seen.group.as_str())
    }

    /// Whether no other node can have a part of a cache of `server`.
    pub(crate) fn is_sole(&self, server: ServerId) -> bool {
        let group = self
            .get(server)
            .and_then(|node| self.groups.get(&node.seen.group));
        let is_live = |id: &&ServerId| self.get(**id).is_some_and(|node| !node.is_lost);
        let live = group.into_iter().flatten().filter(is_live);
        live.take(2).count() <= 1
    }

    /// Whether two nodes are in one group.
    pub(crate) fn is_together(&self, one: ServerId, other: ServerId) -> bool {
        let group = self.group_name(one);
        group.is_some() && group == self.group_name(other)
    }

    /// Nodes with most bytes for new volumes, best first.
    pub(crate) fn roomiest(&self) -> impl Iterator<Item = ServerId> {
        let looked_at = self.by_room.iter().rev().inspect(|_| self.tally.one());
        looked_at.map(|key| key.1)
    }

    /// Nodes with free slots, those with most first.
    pub(crate) fn idle(&self) -> impl Iterator<Item = ServerId> {
        let looked_at = self.by_slots.iter().rev().inspect(|_| self.tally.one());
        looked_at.map(|key| key.2)
    }

    /// Nodes with free slots, best first: those with most free slots, then those with most bytes.
    pub(crate) fn candidates(&self) -> Vec<ServerId> {
        let by_slots = self
            .by_slots
            .iter()
            .rev()
            .take(CANDIDATES_MAX)
            .map(|key| key.2);
        let by_bytes = self
            .by_bytes
            .iter()
            .rev()
            .take(CANDIDATES_MAX)
            .map(|key| key.1);
        let mut found: Vec<ServerId> = by_slots.collect();
        for server in by_bytes {
            if !found.contains(&server) {
                found.push(server);
            }
        }
        self.tally.add(2 * found.len() as u64);
        found
    }

    /// Whether a live node is not known to be unable to run jobs.
    pub(crate) fn is_any_fit(&self) -> bool {
        self.live()
            .any(|(_, node)| !node.is_unfit && node.seen.slots > 0)
    }

    /// Counts a job that failed there and succeeded elsewhere.
    pub(crate) fn count_blame(&mut self, server: ServerId) {
        if let Some(node) = self.nodes.get_mut(&server) {
            node.blamed = node.blamed.saturating_add(1);
            node.is_proven = false;
        }
    }

    /// Counts a failure of the environment.
    pub(crate) fn count_fault(&mut self, server: ServerId) {
        if let Some(node) = self.nodes.get_mut(&server) {
            node.faults_in_row = node.faults_in_row.saturating_add(1);
            node.is_proven = false;
        }
    }

    /// Whether another live node with slots is a witness.
    pub(crate) fn any_other(
        &self,
        server: ServerId,
        is_witness: impl Fn(&FleetNode) -> bool,
    ) -> bool {
        let mut others = self.live().filter(|(id, _)| *id != server);
        others.any(|(_, node)| node.seen.slots > 0 && is_witness(node))
    }

    /// Whether a node may be set aside because jobs fail there: one may, and further ones while
    /// they are no more than a quarter of all slots. Where many fail, it is hardly the nodes.
    pub(crate) fn can_spare(&self, server: ServerId) -> bool {
        let (mut suspect, mut all) = (0, 0);
        for (id, node) in self.live() {
            let slots = u64::from(node.seen.slots);
            all += slots;
            if node.is_suspect && id != server {
                suspect += slots;
            }
        }
        let own = self.get(server).map_or(0, |node| node.seen.slots);
        suspect == 0 || (suspect + u64::from(own)) * 4 <= all
    }
}

/// Tells texts apart, which are mostly empty.
fn checksum(text: &str) -> u64 {
    let mix = |sum: u64, byte: u8| sum.rotate_left(7) ^ u64::from(byte);
    text.bytes().fold(text.len() as u64, mix)
}

fn live_slots(node: &FleetNode) -> u64 {
    match node.is_lost {
        true => 0,
        false => u64::from(node.slots()),
    }
}

fn free_slots(node: &FleetNode) -> u32 {
    if node.takes_work() && node.probe.is_none() {
        node.slots().saturating_sub(node.busy)
    } else {
        0
    }
}

fn usable(node: &FleetNode, slack_permille: u32) -> Space {
    match node.is_lost {
        true => Space::ZERO,
        false => usable_when_back(node, slack_permille),
    }
}

fn usable_when_back(node: &FleetNode, slack_permille: u32) -> Space {
    match node.limit {
        None => offered_when_back(node, slack_permille),
        // What others hold is not in it.
        Some(limit) => {
            without_slack(node, node.seen.capacity, slack_permille).component_min(limit.space)
        }
    }
}

fn offered(node: &FleetNode, slack_permille: u32) -> Space {
    match node.is_lost {
        true => Space::ZERO,
        false => offered_when_back(node, slack_permille),
    }
}

fn offered_when_back(node: &FleetNode, slack_permille: u32) -> Space {
    let foreign = match node.limit {
        Some(limit) if limit.is_shared => Space::ZERO,
        _ => node.seen.foreign_space,
    };
    // A listing may still tell of the run before. What the node keeps for this one is really free.
    let kept = node.limit.map_or(Space::ZERO, |limit| limit.space);
    let space = node
        .seen
        .capacity
        .saturating_sub(foreign)
        .component_max(kept);
    without_slack(node, space, slack_permille)
}

fn without_slack(node: &FleetNode, mut space: Space, slack_permille: u32) -> Space {
    let slack = scale_up(node.seen.capacity.bytes, u64::from(slack_permille), 1000);
    space.bytes = space
        .bytes
        .min(node.seen.capacity.bytes.saturating_sub(slack));
    space
}

fn available(node: &FleetNode, slack_permille: u32) -> Space {
    usable(node, slack_permille).saturating_sub(node.reserved)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(id: u64, slots: u32, bytes: u64) -> NodeInfo {
        NodeInfo::single_group(ServerId(id), Space { bytes, files: 100 }, slots)
    }

    #[test]
    fn candidates_prefer_free_slots_and_skip_unavailable_nodes() {
        let mut fleet = Fleet::new(0);
        assert!(fleet.see(node(1, 1, 100)));
        assert!(!fleet.see(node(1, 1, 100)));
        fleet.see(node(2, 4, 50));
        fleet.see(node(3, 0, 900));
        assert_eq!(fleet.candidates(), vec![ServerId(2), ServerId(1)]);
        fleet.update(ServerId(2), |node| node.busy = 4);
        assert_eq!(fleet.candidates(), vec![ServerId(1)]);
        fleet.update(ServerId(1), |node| node.aside_until = Some(Time(9)));
        assert!(fleet.candidates().is_empty());
    }

    #[test]
    fn available_space_excludes_slack_and_foreign_data() {
        let mut fleet = Fleet::new(100);
        fleet.see(NodeInfo {
            foreign_space: Space {
                bytes: 30,
                files: 0,
            },
            ..node(1, 1, 100)
        });
        assert_eq!(fleet.available(ServerId(1)).bytes, 70);
        fleet.see(node(1, 1, 100));
        assert_eq!(fleet.available(ServerId(1)).bytes, 90);
        fleet.update(ServerId(1), |node| {
            node.reserved = Space {
                bytes: 95,
                files: 1,
            }
        });
        assert_eq!(
            fleet.available(ServerId(1)),
            Space {
                bytes: 0,
                files: 99
            }
        );
    }
}
