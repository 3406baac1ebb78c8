//! What the catalog listed lately, and whether it says anything new. Asks nobody.

use std::collections::{BTreeMap, VecDeque};

use bafs_proto::ids::ServerId;
use bafs_proto::message::{Advert, ServerKind};

use crate::logic::{Event, NodeSeen, Scheduler, Space};

/// A node that stopped answering, but is still listed, gets another chance after so many listings.
const SECOND_CHANCE_POLLS: u64 = 10;

/// Listings over which foreign reservations are smoothed: our own creations and deletions show up
/// in adverts late.
const FOREIGN_POLLS: usize = 4;

/// A smaller change of foreign reservations is not worth a record, in bytes.
const FOREIGN_BYTES_MIN: u64 = 1 << 20;

/// What the catalog listed lately.
#[derive(Default)]
pub(crate) struct Listing {
    told: Option<Vec<NodeSeen>>,
    foreign: BTreeMap<ServerId, VecDeque<Space>>,
    /// Listings so far.
    pub(crate) polls: u64,
}

impl Listing {
    /// The fact that a listing is, if it says anything new.
    pub(crate) fn compare(&mut self, scheduler: &Scheduler, adverts: Vec<Advert>) -> Option<Event> {
        self.polls += 1;
        let mut nodes = Vec::new();
        for advert in adverts
            .into_iter()
            .filter(|advert| advert.kind == ServerKind::Node)
        {
            let capacity = Space {
                bytes: advert.capacity_bytes,
                files: advert.capacity_files,
            };
            let free = Space {
                bytes: advert.free_bytes,
                files: advert.free_files,
            };
            let foreign = capacity.minus(free).minus(scheduler.reserved(advert.id));
            let history = self.foreign.entry(advert.id).or_default();
            history.push_back(foreign);
            if history.len() > FOREIGN_POLLS {
                history.pop_front();
            }
            let least = |of: fn(&Space) -> u64| history.iter().map(of).min().unwrap_or(0);
            let foreign = Space {
                bytes: least(|s| s.bytes),
                files: least(|s| s.files),
            };
            nodes.push(NodeSeen {
                id: advert.id,
                name: advert.name,
                address: advert.address,
                group: advert.group,
                capacity,
                foreign,
                slots: advert.slots,
            });
        }
        let given_up = nodes.iter().any(|node| scheduler.is_lost(node.id));
        let is_chance = given_up && self.polls.is_multiple_of(SECOND_CHANCE_POLLS);
        if !is_chance && self.told.as_ref().is_some_and(|told| is_same(told, &nodes)) {
            return None;
        }
        self.told = Some(nodes.clone());
        Some(Event::ServersSeen { nodes })
    }
}

/// Whether two listings say the same, small changes of foreign reservations aside.
fn is_same(told: &[NodeSeen], nodes: &[NodeSeen]) -> bool {
    told.len() == nodes.len()
        && told.iter().zip(nodes).all(|(a, b)| {
            let is_close = a.foreign.bytes.abs_diff(b.foreign.bytes) < FOREIGN_BYTES_MIN;
            is_close
                && NodeSeen {
                    foreign: a.foreign,
                    ..b.clone()
                } == *a
        })
}
