//! Nodes that several runs share: what this run could use of each, what it needs of it, what it
//! has. How much it asks for is decided in `policy/order/fair_share.rs`.

use bafs_proto::ids::ServerId;
use bafs_proto::node_quota::NodeQuota;
use bafs_proto::time::Time;
use bafs_workflow::JobIndex;

use crate::policy::View;
use crate::space::Space;
use crate::state::nodes::FleetNode;
use crate::state::scheduler_state::Phase;
use crate::state::volumes::Instance;

/// A run that has nothing under way waits so long for what others have, before it gives up what
/// jobs have made, in milliseconds: two turns and a little.
const OTHERS_WAIT_MS: u64 = 25_000;

/// The least that it waits before it gives up caches, in milliseconds: nodes are asked each second
/// what they keep for it.
const CACHES_WAIT_MS: u64 = 2_000;

/// 10 MB/s, which a wide-area link may carry (an assumption): a run waits for room about as long as
/// its caches would take to come again.
const LINK_BYTES_PER_MS: u64 = 10_000;

/// What a run with nothing under way gives up for its next jobs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Concession {
    /// It waits.
    Nothing,
    /// What can be fetched again.
    Caches,
    /// What has to be made again too.
    Work,
}

/// How long a run waits for what other runs have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WaitForOthers {
    /// Until when, at most.
    pub(crate) until: Time,
    /// Since when a job has slots, and no room; nothing where it has no slots.
    pub(crate) lacks_room_since: Option<Time>,
    /// When to look again; nothing where it waits no more.
    pub(crate) look_at: Option<Time>,
}

/// What a run has to do with one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeDemand {
    /// What it could use.
    pub desired: NodeQuota,
    /// The least with which it can begin anything.
    pub start_minimum: NodeQuota,
    /// What it needs to bring to an end what it has begun there.
    pub committed: NodeQuota,
    /// Whether something that it has begun there has a job to start yet.
    pub has_next: bool,
}

impl View<'_> {
    /// What the run could use of a live node, and needs of it; nothing of others. Admission says
    /// what lets all end that has begun there, and whether that has a job to start yet.
    pub(crate) fn node_demand(
        &self,
        server: ServerId,
        least_to_end: impl FnOnce() -> (Space, bool),
    ) -> Option<NodeDemand> {
        let node = self.fleet.get(server).filter(|node| !node.is_lost)?;
        let capacity = quota(node.seen.capacity, node.seen.slots);
        let held = node.reserved.saturating_sub(self.warmed_on(server));
        let (least, has_next) = least_to_end();
        let keep = quota(held.saturating_add(least), node.busy);
        let begun = self.graph.finals() + self.attempts.len() as u64;
        let left = (self.graph.workflow.jobs.len() as u64).saturating_sub(begun);
        if left == 0 || matches!(self.phase, Phase::Finishing | Phase::Over) {
            let unit = NodeQuota::ZERO;
            return Some(NodeDemand {
                desired: keep,
                start_minimum: unit,
                committed: keep,
                has_next: false,
            });
        }
        let left = u32::try_from(left).unwrap_or(u32::MAX);
        let left_slots = left.saturating_mul(self.cpus_max);
        let slots = node.busy.saturating_add(left_slots).min(node.seen.slots);
        let (want, unit) = match self.settings.caches_nothing() {
            true => (Space::ZERO, Space::ZERO),
            false => (node.seen.capacity, self.unit()),
        };
        let unit = quota(unit, self.cpus_max.min(slots)).component_min(capacity);
        Some(NodeDemand {
            desired: quota(want, slots).component_max(keep),
            start_minimum: unit,
            committed: keep,
            has_next,
        })
    }

    /// The space of a node with which any pipeline can begin there: what it needs at once, and its
    /// part of the caches.
    fn unit(&self) -> Space {
        let nodes = self.fleet.alive.max(1);
        let cache = Space {
            bytes: self.cache_need_max.bytes.div_ceil(nodes),
            files: self.cache_need_max.files,
        };
        self.graph.courses.most.least.saturating_add(cache)
    }

    /// Nothing of this run goes on: what it gives up for these jobs, those that should start first
    /// first, rather than to wait for what others have; and how long it waits.
    pub(crate) fn concede(&self, candidates: &[JobIndex]) -> (Concession, Option<WaitForOthers>) {
        if !self.fleet.is_shared() {
            return (Concession::Work, None);
        }
        let slots = candidates.iter().map(|job| self.slots_of(*job)).min();
        let slots = slots.unwrap_or(1);
        let most = self.fleet.idle().next();
        let most = most.map_or(0, |server| self.fleet.free_slots(server));
        let is_room_lacking = most >= slots;
        if most > 0 && !self.others_could_make_room(candidates) {
            return (Concession::Work, None);
        }
        let (until, lacks_room_since) = match self.wait_until {
            Some(until) => (until, self.lacks_room_since),
            None => (self.now.plus_ms(OTHERS_WAIT_MS), None),
        };
        let mut wait = WaitForOthers {
            until,
            lacks_room_since,
            look_at: None,
        };
        if self.now >= until && most > 0 {
            return (Concession::Work, Some(wait));
        }
        // What a turn brings may be told in parts.
        let since = lacks_room_since.unwrap_or(self.now);
        wait.lacks_room_since = is_room_lacking.then_some(since);
        let caches_due = since.plus_ms(self.caches_wait_ms());
        let may_concede_caches = is_room_lacking && !self.packs_volumes();
        wait.look_at = Some(match may_concede_caches && self.now < caches_due {
            true => caches_due.min(until),
            false => until,
        });
        match may_concede_caches && self.now >= caches_due {
            true => (Concession::Caches, Some(wait)),
            false => (Concession::Nothing, Some(wait)),
        }
    }

    /// About as long as caches of this run would take to come again, in milliseconds.
    fn caches_wait_ms(&self) -> u64 {
        let wait_ms = CACHES_WAIT_MS.saturating_add(self.cache_bytes() / LINK_BYTES_PER_MS);
        wait_ms.min(OTHERS_WAIT_MS)
    }

    /// What is reserved for caches of this run on all nodes, in bytes.
    fn cache_bytes(&self) -> u64 {
        let is_cache = |i: &&Instance| self.graph.volume(i.volume).is_cache;
        let instances = self.volumes.iter().map(|(_, instance)| instance);
        let caches = instances.filter(is_cache);
        caches.fold(0, |sum, i| u64::saturating_add(sum, i.size.bytes))
    }

    /// Whether one of these jobs might find room if other runs held nothing: else it is what this
    /// run itself holds that is in the way, and no turn of others changes that.
    fn others_could_make_room(&self, candidates: &[JobIndex]) -> bool {
        if self.fleet.is_unanswered() {
            return true;
        }
        let left = |(server, node): (ServerId, &FleetNode)| {
            self.fleet.offered(server).saturating_sub(node.reserved)
        };
        let mut together = Space::ZERO;
        let mut most = Space::ZERO;
        for left in self.fleet.live().map(left) {
            together = together.saturating_add(left);
            most = most.component_max(left);
        }
        candidates.iter().any(|job| {
            let mounted = self.graph.mounted(*job).into_iter();
            let missing = mounted.filter(|(volume, _)| !self.volumes.is_live(*volume));
            let (mut scratch, mut all) = (Space::ZERO, Space::ZERO);
            for (volume, _) in missing {
                let size = self.size_of(volume);
                all = all.saturating_add(size);
                if !self.graph.volume(volume).is_cache {
                    scratch = scratch.component_max(size);
                }
            }
            most.can_hold(scratch) && together.can_hold(all)
        })
    }
}

fn quota(space: Space, slots: u32) -> NodeQuota {
    NodeQuota {
        bytes: space.bytes,
        files: space.files,
        slots,
    }
}
