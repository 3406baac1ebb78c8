//! What this run asks nodes to keep for it, and what they gave. Whose turn it is, and how much
//! everybody gets, is in `logic/division.rs`.

use std::collections::BTreeMap;

use bafs_proto::allotment::{Allot, Allotment, Allotments, Share};
use bafs_proto::ids::ServerId;
use bafs_proto::time::Time;

use crate::logic::division::{Claim, share_of};
use crate::logic::{Demand, NodeShare, Scheduler, Space};

/// A node that others use too is asked so often, in milliseconds, and one that nobody else uses.
const SHARED_MS: u64 = 1_000;
const ALONE_MS: u64 = 4_000;

/// A turn takes so long, in milliseconds, where not everybody's part is of use.
const TURN_MS: u64 = 10_000;

/// A node forgets a run that is silent for so long, in milliseconds.
const LIFETIME_MS: u64 = 30_000;

/// Nodes are looked at so often, in milliseconds.
const LOOK_MS: u64 = 250;

/// What is known of one node.
#[derive(Debug, Default)]
struct Known {
    granted: Share,
    /// This run's part, however much it has begun.
    fair: Share,
    others: Vec<Allotment>,
    asked: Option<Time>,
    is_asking: bool,
    /// What the core was told.
    told: Option<NodeShare>,
}

/// Parts of nodes.
#[derive(Debug)]
pub(crate) struct Shares {
    user: String,
    owner: String,
    known: BTreeMap<ServerId, Known>,
    looked: Option<Time>,
}

impl Shares {
    pub(crate) fn new(user: String, owner: String) -> Self {
        Self {
            user,
            owner,
            known: BTreeMap::new(),
            looked: None,
        }
    }

    /// Parts that become smaller, which the core must know before the nodes do, and calls that are
    /// due.
    pub(crate) fn due(
        &mut self,
        now: Time,
        scheduler: &Scheduler,
    ) -> (Vec<NodeShare>, Vec<(ServerId, Allot)>) {
        if self.looked.is_some_and(|at| now.ms_since(at) < LOOK_MS) {
            return (Vec::new(), Vec::new());
        }
        self.looked = Some(now);
        let (mut smaller, mut calls) = (Vec::new(), Vec::new());
        for server in scheduler.live_nodes() {
            let known = self.known.entry(server).or_default();
            let pause_ms = if known.others.is_empty() {
                ALONE_MS
            } else {
                SHARED_MS
            };
            let is_early = known.asked.is_some_and(|at| now.ms_since(at) < pause_ms);
            if is_early || known.is_asking {
                continue;
            }
            let (Some(demand), Some(node)) = (scheduler.demand(server), scheduler.node(server))
            else {
                continue;
            };
            let capacity = Share {
                bytes: node.capacity.bytes,
                files: node.capacity.files,
                slots: node.slots,
            };
            let others = known.others.iter().map(|other| Claim {
                owner: other.owner.clone(),
                user: other.user.clone(),
                want: other.want,
                unit: other.unit,
            });
            let own = Claim {
                owner: self.owner.clone(),
                user: self.user.clone(),
                want: demand.want,
                unit: demand.unit,
            };
            let claims: Vec<Claim> = others.chain([own]).collect();
            let turn = (now.0 / TURN_MS).wrapping_add(server.0);
            let fair = share_of(&self.owner, capacity, &claims, turn);
            let ask = fair.most(demand.keep).least(capacity);
            known.fair = fair;
            if known.told.is_some() {
                known.granted = known.granted.least(ask);
                smaller.extend(known.tell(server));
            }
            known.asked = Some(now);
            known.is_asking = true;
            calls.push((server, self.call(now, demand, ask)));
        }
        (smaller, calls)
    }

    fn call(&self, now: Time, demand: Demand, ask: Share) -> Allot {
        Allot {
            owner: self.owner.clone(),
            user: self.user.clone(),
            serial: now.0,
            want: demand.want,
            unit: demand.unit,
            keep: demand.keep,
            ask,
            lifetime_ms: LIFETIME_MS,
        }
    }

    /// Takes the answer of a node, or that there was none; what the core must know.
    pub(crate) fn answered(
        &mut self,
        server: ServerId,
        answer: Option<Allotments>,
    ) -> Option<NodeShare> {
        let known = self.known.entry(server).or_default();
        known.is_asking = false;
        let answer = answer?;
        known.granted = answer.granted;
        known.others = answer.others;
        known.tell(server)
    }

    /// Calls that give everything back.
    pub(crate) fn end(&self, now: Time) -> Vec<(ServerId, Allot)> {
        let nothing = Demand {
            want: Share::ZERO,
            unit: Share::ZERO,
            keep: Share::ZERO,
        };
        let nodes = self.known.keys();
        nodes
            .map(|server| (*server, self.call(now.plus_ms(1), nothing, Share::ZERO)))
            .collect()
    }
}

impl Known {
    fn tell(&mut self, server: ServerId) -> Option<NodeShare> {
        let is_shared = !self.others.is_empty();
        let fair = Share {
            slots: self.granted.slots,
            ..self.fair
        };
        let share = NodeShare {
            server,
            space: Space {
                bytes: self.granted.bytes,
                files: self.granted.files,
            },
            // Jobs that run are not stopped, but none takes their place.
            slots: self.granted.slots.min(self.fair.slots),
            is_shared,
            is_over: is_shared && !fair.holds(self.granted),
        };
        let is_new = self.told != Some(share);
        self.told = Some(share);
        is_new.then_some(share)
    }
}
