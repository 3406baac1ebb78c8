//! What the catalog listed lately, and whether it says anything new. Asks nobody.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use bafs_proto::attributes::{AttributeValue, RETAINED_CACHES};
use bafs_proto::ids::ServerId;
use bafs_proto::message::{Advert, Lifetime, ServerKind};
use bafs_proto::time::Time;
use bafs_workflow::VolumeIndex;

use crate::{Event, NodeDeparture, NodeInfo, Scheduler, Space};

/// A node that stopped answering, but is still listed, gets another chance after so many listings.
const SECOND_CHANCE_POLLS: u64 = 10;

/// Listings over which foreign reservations are smoothed: our own creations and deletions show up
/// in adverts late.
const FOREIGN_SPACE_POLLS: usize = 4;

/// A smaller change of foreign reservations is not worth a record, in bytes.
const FOREIGN_CHANGE_BYTES_MIN: u64 = 1 << 20;

/// A smaller change of the time at which a node leaves is not worth a record, in milliseconds: an
/// advert is listed for at most four seconds.
const DEPARTURE_CHANGE_MS_MIN: u64 = 4_000;

/// Caches of a workflow by the names of their cooperative caches.
pub type CacheNames = BTreeMap<String, Vec<VolumeIndex>>;

/// What the catalog listed lately.
#[derive(Debug, Clone, Default)]
pub struct ListingTracker {
    /// Who was in the last list.
    listed_nodes: BTreeSet<ServerId>,
    foreign_space: BTreeMap<ServerId, VecDeque<Space>>,
    /// Listings so far.
    pub polls: u64,
}

impl ListingTracker {
    /// The fact that a listing is, if it says anything new. `caches` are those of the workflow, by
    /// the names of their cooperative caches.
    pub fn compare_listing(
        &mut self,
        scheduler: &Scheduler,
        (adverts, caches): (Vec<Advert>, &CacheNames),
        now: Time,
        is_heard: impl Fn(ServerId) -> bool,
    ) -> Option<Event> {
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
            let foreign = capacity
                .saturating_sub(free)
                .saturating_sub(scheduler.reserved(advert.id));
            let history = self.foreign_space.entry(advert.id).or_default();
            history.push_back(foreign);
            if history.len() > FOREIGN_SPACE_POLLS {
                history.pop_front();
            }
            let least = |of: fn(&Space) -> u64| history.iter().map(of).min().unwrap_or(0);
            let foreign = Space {
                bytes: least(|s| s.bytes),
                files: least(|s| s.files),
            };
            let known = scheduler.node(advert.id).map(|known| known.departure);
            nodes.push(NodeInfo {
                cached: read_cached(&advert, caches),
                memory_bytes: read_bytes(&advert, "memory_bytes"),
                temporary_bytes: read_bytes(&advert, "temporary_bytes"),
                departure: read_departure(advert.lifetime, now, known.unwrap_or_default()),
                id: advert.id,
                name: advert.name,
                address: advert.address,
                group: advert.group,
                capacity,
                foreign_space: foreign,
                slots: advert.slots,
            });
        }
        self.find_changes(scheduler, nodes, is_heard)
    }

    /// The fact that a whole list of nodes is, if it says anything that the core does not know. Who
    /// is not in it is there all the same if the scheduler hears it: the catalog may be cut off.
    pub fn find_changes(
        &mut self,
        scheduler: &Scheduler,
        nodes: Vec<NodeInfo>,
        is_heard: impl Fn(ServerId) -> bool,
    ) -> Option<Event> {
        self.polls += 1;
        let is_chance = self.polls.is_multiple_of(SECOND_CHANCE_POLLS);
        let listed: BTreeSet<ServerId> = nodes.iter().map(|node| node.id).collect();
        let is_news = |node: &NodeInfo| {
            let is_known = self.listed_nodes.contains(&node.id)
                && scheduler
                    .node(node.id)
                    .is_some_and(|known| is_similar(known, node));
            !is_known || is_chance && scheduler.is_lost(node.id)
        };
        let mut nodes: Vec<NodeInfo> = nodes.into_iter().filter(is_news).collect();
        let live = scheduler.live_nodes();
        let unlisted = live.filter(|server| !listed.contains(server));
        let (missed, missing): (Vec<ServerId>, Vec<ServerId>) =
            unlisted.partition(|server| scheduler.is_listed(*server));
        // A node that drains takes itself from the list when it goes.
        let is_gone = |server: &ServerId| scheduler.is_draining(*server) || !is_heard(*server);
        let missed: Vec<ServerId> = missed.into_iter().filter(is_gone).collect();
        let back = missing.into_iter().filter(|server| is_heard(*server));
        nodes.extend(back.filter_map(|server| scheduler.node(server).cloned()));
        self.listed_nodes = listed;
        // That there is no node is said once.
        let is_said = nodes.is_empty() && missed.is_empty() && self.polls > 1;
        (!is_said).then_some(Event::NodesListed {
            nodes,
            unlisted: missed,
        })
    }
}

/// Caches of the workflow whose data a node has although no volume shows them.
fn read_cached(advert: &Advert, caches: &CacheNames) -> Vec<VolumeIndex> {
    let names = match advert.attributes.get(RETAINED_CACHES) {
        Some(AttributeValue::TextList(names)) => names.as_slice(),
        _ => &[],
    };
    let known = names.iter().filter_map(|name| caches.get(name));
    let mut cached: Vec<VolumeIndex> = known.flatten().copied().collect();
    cached.sort_unstable();
    cached
}

/// A size that a node publishes as an attribute; 0 if it does not.
fn read_bytes(advert: &Advert, name: &str) -> u64 {
    match advert.attribute(name) {
        Some(AttributeValue::Integer(bytes)) => u64::try_from(bytes).unwrap_or(0),
        _ => 0,
    }
}

/// When a node leaves, by its advert. How long adverts are on their way differs: a smaller change
/// is none.
fn read_departure(lifetime: Lifetime, now: Time, known: NodeDeparture) -> NodeDeparture {
    let told = NodeDeparture {
        at: lifetime.left_ms.map(|left_ms| now.plus_ms(left_ms)),
        is_draining: lifetime.is_draining,
    };
    match (known.at, told.at) {
        (Some(before), Some(at))
            if known.is_draining == told.is_draining
                && before.0.abs_diff(at.0) < DEPARTURE_CHANGE_MS_MIN =>
        {
            known
        }
        _ => told,
    }
}

/// Whether a node is as it is known, small changes of foreign reservations aside.
fn is_similar(known: &NodeInfo, node: &NodeInfo) -> bool {
    let is_small =
        known.foreign_space.bytes.abs_diff(node.foreign_space.bytes) < FOREIGN_CHANGE_BYTES_MIN;
    is_small
        && NodeInfo {
            foreign_space: known.foreign_space,
            ..node.clone()
        } == *known
}

#[cfg(test)]
mod tests {
    use bafs_proto::attributes::Attributes;
    use bafs_proto::ids::RunId;
    use bafs_workflow::parse_workflow;

    use super::*;
    use crate::Settings;

    const NODES: u64 = 4;

    fn test_node(id: u64, slots: u32) -> NodeInfo {
        let capacity = Space {
            bytes: 1_000_000,
            files: 1_000,
        };
        NodeInfo::single_group(ServerId(id), capacity, slots)
    }

    #[test]
    fn listing_says_which_caches_a_node_has() {
        let text = "volume a cache bafs://home/a 5 MB\nvolume b cache bafs://home/a 5 MB\n\
                    volume c cache bafs://home/c 5 MB\njob j {\nexecutable = x\n}\n\
                    mount a j /a\nmount b j /b\nmount c j /c\n";
        let parsed = parse_workflow("w", text, &|_| unreachable!()).unwrap();
        let scheduler = Scheduler::new(RunId(1), parsed.workflow, Settings::default());
        let names = ["a-1".to_owned(), "other-2".to_owned()];
        let node = test_node(1, 2);
        let mut attributes = Attributes::default();
        attributes.set(RETAINED_CACHES, AttributeValue::TextList(names.to_vec()));
        let advert = Advert {
            id: node.id,
            kind: ServerKind::Node,
            name: node.name,
            address: node.address,
            group: node.group,
            ttl_ms: 4_000,
            capacity_bytes: node.capacity.bytes,
            capacity_files: node.capacity.files,
            free_bytes: node.capacity.bytes,
            free_files: node.capacity.files,
            slots: node.slots,
            jobs: 0,
            caches: Vec::new(),
            attributes,
            lifetime: Lifetime::default(),
        };
        let caches = CacheNames::from([
            ("a-1".to_owned(), vec![VolumeIndex(0), VolumeIndex(1)]),
            ("c-3".to_owned(), vec![VolumeIndex(2)]),
        ]);
        let mut listing = ListingTracker::default();
        let said = listing.compare_listing(&scheduler, (vec![advert], &caches), Time(0), |_| true);
        let Some(Event::NodesListed { nodes, .. }) = said else {
            panic!("{said:?}");
        };
        assert_eq!(nodes[0].cached, [VolumeIndex(0), VolumeIndex(1)]);
    }

    struct ListingFixture {
        scheduler: Scheduler,
        listing: ListingTracker,
        now: Time,
    }

    impl ListingFixture {
        fn new() -> Self {
            let parsed =
                parse_workflow("w", "job a {\nexecutable = x\n}\n", &|_| unreachable!()).unwrap();
            Self {
                scheduler: Scheduler::new(RunId(1), parsed.workflow, Settings::default()),
                listing: ListingTracker::default(),
                now: Time(0),
            }
        }

        /// What a list says that is new: nodes and who is missed. The core is told.
        fn changes_in(&mut self, nodes: Vec<NodeInfo>) -> Option<(Vec<ServerId>, Vec<ServerId>)> {
            self.now = self.now.plus_ms(1_000);
            let news = self
                .listing
                .find_changes(&self.scheduler, nodes, |_| false)?;
            let Event::NodesListed {
                nodes,
                unlisted: missed,
            } = &news
            else {
                panic!("a list says who is there: {news:?}");
            };
            let told = (nodes.iter().map(|n| n.id).collect(), missed.clone());
            self.scheduler.step(self.now, news, &mut Vec::new());
            Some(told)
        }
    }

    #[test]
    fn list_reports_only_new_changed_and_missing_nodes() {
        let mut told = ListingFixture::new();
        let all = || (0..NODES).map(|id| test_node(id, 1)).collect::<Vec<_>>();
        let everybody = (0..NODES).map(ServerId).collect();
        assert_eq!(told.changes_in(all()), Some((everybody, vec![])));
        assert_eq!(told.changes_in(all()), None);
        let mut changed = all();
        changed[2] = test_node(2, 8);
        assert_eq!(
            told.changes_in(changed.clone()),
            Some((vec![ServerId(2)], vec![]))
        );
        let gone = changed.split_off(3);
        let missed = Some((vec![], vec![ServerId(3)]));
        assert_eq!(told.changes_in(changed.clone()), missed);
        assert_eq!(told.changes_in(changed.clone()), None, "it is missed once");
        changed.extend(gone);
        assert_eq!(told.changes_in(changed), Some((vec![ServerId(3)], vec![])));
    }

    #[test]
    fn listed_lost_node_gets_a_second_chance_periodically() {
        let mut told = ListingFixture::new();
        told.changes_in(vec![test_node(1, 1)]);
        let silent = Event::ServerSilent {
            server: ServerId(1),
        };
        told.scheduler.step(told.now, silent, &mut Vec::new());
        assert!(told.scheduler.is_lost(ServerId(1)));
        for poll in 2..SECOND_CHANCE_POLLS {
            assert_eq!(told.changes_in(vec![test_node(1, 1)]), None, "poll {poll}");
        }
        let chance = Some((vec![ServerId(1)], vec![]));
        assert_eq!(told.changes_in(vec![test_node(1, 1)]), chance);
        assert!(!told.scheduler.is_lost(ServerId(1)));
    }

    #[test]
    fn new_node_replaces_another_at_its_address() {
        let mut told = ListingFixture::new();
        told.changes_in(vec![test_node(1, 1), test_node(2, 1)]);
        let successor = NodeInfo {
            address: test_node(1, 1).address,
            ..test_node(3, 1)
        };
        // The catalog lists both for a while, and the old one gets no other chance meanwhile.
        for _ in 0..2 * SECOND_CHANCE_POLLS {
            told.changes_in(vec![test_node(1, 1), test_node(2, 1), successor.clone()]);
            assert!(told.scheduler.is_lost(ServerId(1)));
            assert!(!told.scheduler.is_lost(ServerId(2)));
            assert!(!told.scheduler.is_lost(ServerId(3)));
        }
    }

    /// One list does not tell who came later; and nodes may have exchanged their addresses.
    #[test]
    fn simultaneous_listing_at_one_address_loses_no_node() {
        let at = |id: u64, place: u64| NodeInfo {
            address: test_node(place, 1).address,
            ..test_node(id, 1)
        };
        let is_any_lost =
            |told: &ListingFixture| (1..4).any(|id| told.scheduler.is_lost(ServerId(id)));
        let mut told = ListingFixture::new();
        told.changes_in(vec![at(3, 1), at(1, 1)]);
        assert!(!is_any_lost(&told));
        let mut told = ListingFixture::new();
        told.changes_in(vec![at(1, 1), at(2, 2)]);
        told.changes_in(vec![at(1, 2), at(2, 1)]);
        assert!(!is_any_lost(&told));
    }

    #[test]
    fn empty_list_is_reported_once() {
        let mut told = ListingFixture::new();
        assert_eq!(told.changes_in(vec![]), Some((vec![], vec![])));
        assert_eq!(told.changes_in(vec![]), None);
    }

    #[test]
    fn departure_changes_by_more_than_an_adverts_age() {
        let living = |left_ms| Lifetime {
            left_ms: Some(left_ms),
            is_draining: false,
        };
        let known = read_departure(living(60_000), Time(0), NodeDeparture::default());
        assert_eq!(known.at, Some(Time(60_000)));
        assert_eq!(read_departure(living(58_500), Time(1_000), known), known);
        let prolonged = read_departure(living(90_000), Time(1_000), known);
        assert_eq!(prolonged.at, Some(Time(91_000)));
        let draining = Lifetime {
            left_ms: Some(60_000),
            is_draining: true,
        };
        assert!(read_departure(draining, Time(0), known).is_draining);
    }

    #[test]
    fn draining_node_is_missed_although_it_answers() {
        let mut fixture = ListingFixture::new();
        let mut draining = test_node(1, 1);
        draining.departure.is_draining = true;
        let nodes = vec![draining, test_node(2, 1)];
        let seen = Event::nodes_listed(nodes);
        fixture.scheduler.step(Time(0), seen, &mut Vec::new());
        let found = fixture
            .listing
            .find_changes(&fixture.scheduler, Vec::new(), |_| true);
        match found {
            Some(Event::NodesListed { unlisted, .. }) => assert_eq!(unlisted, [ServerId(1)]),
            other => panic!("{other:?}"),
        }
    }
}
