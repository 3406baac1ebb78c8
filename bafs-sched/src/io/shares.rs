//! What this run asks nodes to keep for it, and what they gave. Whose turn it is, and how much
//! everybody gets, is in `logic/division.rs`.

use std::collections::BTreeMap;

use bafs_proto::allotment::{SetNodeQuota, NodeQuotaStatus, NodeQuotaList, NodeQuota};
use bafs_proto::ids::ServerId;
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode};

use crate::logic::division::{Claim, leaves_nothing, share_of};
use crate::logic::{Demand, NodeShare, Scheduler, Space};

/// A node that others use too is asked so often, in milliseconds, and one that nobody else uses.
const SHARED_MS: u64 = 1_000;
const ALONE_MS: u64 = 4_000;

/// A turn takes so long, in milliseconds, where not everybody's part is of use.
const TURN_MS: u64 = 10_000;

/// A node forgets a run that is silent for so long, in milliseconds.
const LIFETIME_MS: u64 = 30_000;

/// Nodes are looked at so often, in milliseconds, while none come or go.
const LOOK_MS: u64 = 250;

/// What is known of one node.
#[derive(Debug, Default)]
struct Known {
    granted: NodeQuota,
    /// This run's part, however much it has begun.
    fair: NodeQuota,
    others: Vec<NodeQuotaStatus>,
    asked: Option<Time>,
    is_asking: bool,
    /// Why it keeps nothing, if that is so and is no matter of the way to it.
    refusal: Option<ErrorCode>,
    has_answered: bool,
    /// It was asked once at least, and answered, refused or was silent.
    was_tried: bool,
    /// What the core was told.
    told: Option<NodeShare>,
}

/// Parts of nodes.
#[derive(Debug)]
pub(crate) struct Shares {
    user: String,
    owner: String,
    known: BTreeMap<ServerId, Known>,
    /// When nodes were looked at last, and how many there were.
    looked: Option<(Time, u64)>,
    /// Of the last call.
    serial: u64,
}

/// What time it is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment {
    /// By the clock that other schedulers know too, which may be set back.
    pub(crate) now: Time,
    /// By one that only goes on.
    pub(crate) tick: Time,
}

impl Shares {
    pub(crate) fn new(user: String, owner: String) -> Self {
        Self {
            user,
            owner,
            known: BTreeMap::new(),
            looked: None,
            serial: 0,
        }
    }

    /// Parts that become smaller, which the core must know before the nodes do, and calls that are
    /// due.
    pub(crate) fn due(
        &mut self,
        Moment { now, tick }: Moment,
        scheduler: &Scheduler,
    ) -> (Vec<NodeShare>, Vec<(ServerId, SetNodeQuota)>) {
        // A run that has just begun knows no node; with the first it must not wait for more news.
        let nodes = scheduler.nodes_alive();
        let is_as_seen = |(at, seen)| tick.ms_since(at) < LOOK_MS && seen == nodes;
        if self.looked.is_some_and(is_as_seen) {
            return (Vec::new(), Vec::new());
        }
        self.looked = Some((tick, nodes));
        self.serial = self.serial_after(now);
        let (mut smaller, mut calls) = (Vec::new(), Vec::new());
        for server in scheduler.live_nodes() {
            let known = self.known.entry(server).or_default();
            let is_alone = known.others.is_empty() && known.refusal.is_none();
            let pause_ms = if is_alone { ALONE_MS } else { SHARED_MS };
            let is_early = known.asked.is_some_and(|at| tick.ms_since(at) < pause_ms);
            if is_early || known.is_asking {
                continue;
            }
            let (Some(demand), Some(node)) = (scheduler.demand(server), scheduler.node(server))
            else {
                continue;
            };
            let capacity = NodeQuota {
                bytes: node.capacity.bytes,
                files: node.capacity.files,
                slots: node.slots,
            };
            let others = known.others.iter().map(|other| Claim {
                owner: other.owner.clone(),
                user: other.user.clone(),
                want: other.desired,
                unit: other.start_minimum,
            });
            let own = Claim {
                owner: self.owner.clone(),
                user: self.user.clone(),
                want: demand.want,
                unit: demand.unit,
            };
            let claims: Vec<Claim> = others.chain([own]).collect();
            let turn = (now.0 / TURN_MS).wrapping_add(server.0);
            let mut fair = share_of(&self.owner, capacity, &claims, turn);
            if demand.has_next && leaves_nothing(&self.owner, capacity, demand.keep, &claims) {
                fair.slots = fair.slots.max(1);
            }
            let ask = fair.component_max(demand.keep).component_min(capacity);
            known.fair = fair;
            if known.told.is_some() {
                known.granted = known.granted.component_min(ask);
                smaller.extend(known.tell(server));
            }
            known.asked = Some(tick);
            known.is_asking = true;
            calls.push((server, self.call(self.serial, demand, ask)));
        }
        (smaller, calls)
    }

    /// Grows also when the clock was set back.
    fn serial_after(&self, now: Time) -> u64 {
        now.0.max(self.serial.saturating_add(1))
    }

    fn call(&self, serial: u64, demand: Demand, ask: NodeQuota) -> SetNodeQuota {
        SetNodeQuota {
            owner: self.owner.clone(),
            user: self.user.clone(),
            sequence: serial,
            desired: demand.want,
            start_minimum: demand.unit,
            committed: demand.keep,
            requested: ask,
            lifetime_ms: LIFETIME_MS,
        }
    }

    /// Takes what a node keeps; what the core must know. The first answers are told together: a
    /// cache is divided once, among the nodes that are known then.
    pub(crate) fn answered(&mut self, server: ServerId, answer: NodeQuotaList) -> Vec<NodeShare> {
        let known = self.known.entry(server).or_default();
        (known.is_asking, known.was_tried, known.refusal) = (false, true, None);
        known.granted = answer.granted;
        known.others = answer.other_owners;
        known.has_answered = true;
        self.news(Some(server))
    }

    /// Takes that a node keeps nothing; whether that is news to people, and what the core must
    /// know.
    pub(crate) fn refused(&mut self, server: ServerId, error: &Error) -> (bool, Vec<NodeShare>) {
        let known = self.known.entry(server).or_default();
        (known.is_asking, known.was_tried) = (false, true);
        let is_busy = error.code == ErrorCode::Busy;
        if error.is_transient() && !is_busy {
            return (false, self.news(None));
        }
        let is_news = known.refusal.replace(error.code) != Some(error.code);
        // Others have all of it: the run waits for its turn, and does not fail.
        known.has_answered |= is_busy;
        (is_news, self.news(None))
    }

    /// What the core must know: that node, and those that it has not heard of.
    fn news(&mut self, of: Option<ServerId>) -> Vec<NodeShare> {
        let is_first = self.known.values().all(|known| known.told.is_none());
        let is_awaited = |known: &Known| known.is_asking && !known.was_tried;
        if is_first && self.known.values().any(is_awaited) {
            return Vec::new();
        }
        let is_new = |(id, known): &(&ServerId, &mut Known)| {
            known.has_answered && (of == Some(**id) || known.told.is_none())
        };
        let news = self.known.iter_mut().filter(is_new);
        news.filter_map(|(id, known)| known.tell(*id)).collect()
    }

    /// Whether no node ever kept anything for the run, and each said that it never will.
    pub(crate) fn is_hopeless(&self) -> bool {
        let is_lasting = |code: ErrorCode| !Error::new(code, "").is_transient();
        let mut nodes = self.known.values();
        !self.known.is_empty()
            && nodes.all(|known| known.told.is_none() && known.refusal.is_some_and(is_lasting))
    }

    /// Calls that give everything back.
    pub(crate) fn end(&self, now: Time) -> Vec<(ServerId, SetNodeQuota)> {
        let nothing = Demand {
            want: NodeQuota::ZERO,
            unit: NodeQuota::ZERO,
            keep: NodeQuota::ZERO,
            has_next: false,
        };
        let (serial, nodes) = (self.serial_after(now), self.known.keys());
        nodes
            .map(|server| (*server, self.call(serial, nothing, NodeQuota::ZERO)))
            .collect()
    }
}

impl Known {
    fn tell(&mut self, server: ServerId) -> Option<NodeShare> {
        let is_full = self.refusal == Some(ErrorCode::Busy);
        let is_shared = is_full || !self.others.is_empty();
        let fair = NodeQuota {
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
            is_over: is_shared && !fair.can_hold(self.granted),
        };
        let is_new = self.told != Some(share);
        self.told = Some(share);
        is_new.then_some(share)
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::RunId;

    use super::*;
    use crate::logic::{Event, NodeSeen, Settings};
    use crate::workflow::parse_workflow;

    const NODE: ServerId = ServerId(2);

    fn scheduler(nodes: &[ServerId]) -> Scheduler {
        let text = "volume v scratch 1 MB\njob a {\nexecutable = x\n}\nmount v a /v\n";
        scheduler_of(text, nodes)
    }

    fn scheduler_of(text: &str, nodes: &[ServerId]) -> Scheduler {
        let parsed = parse_workflow("w.bafs", text, &|path| Err(path.to_owned()));
        let settings = Settings {
            user: Some("me".to_owned()),
            ..Settings::default()
        };
        let mut scheduler = Scheduler::new(RunId(1), parsed.unwrap().workflow, settings);
        let capacity = Space {
            bytes: 10_000_000,
            files: 1_000,
        };
        let nodes = nodes.iter().map(|id| NodeSeen::alone(*id, capacity, 2));
        let nodes = nodes.collect();
        scheduler.step(Time(1), Event::seen(nodes), &mut Vec::new());
        scheduler
    }

    fn shares() -> Shares {
        Shares::new("me".to_owned(), "me (run 1)".to_owned())
    }

    fn granted(call: &SetNodeQuota) -> NodeQuotaList {
        NodeQuotaList {
            granted: call.requested,
            capacity: call.requested,
            other_owners: Vec::new(),
        }
    }

    #[test]
    fn a_clock_that_is_set_back_stops_no_asking() {
        let (scheduler, mut shares) = (scheduler(&[NODE]), shares());
        let mut ask = |now, tick| {
            let moment = Moment {
                now: Time(now),
                tick: Time(tick),
            };
            let (_, calls) = shares.due(moment, &scheduler);
            for (server, call) in &calls {
                shares.answered(*server, granted(call));
            }
            calls.first().map(|(_, call)| call.sequence)
        };
        let first = ask(1_000_000, 0).expect("it is asked");
        assert_eq!(ask(1_000_300, 300), None, "it was asked just now");
        let second = ask(940_000, ALONE_MS).expect("it is asked again");
        assert!(second > first);
        assert!(shares.end(Time(940_000))[0].1.sequence > second);
    }

    #[test]
    fn nodes_that_come_right_after_a_look_are_asked_at_once() {
        let (mut shares, at) = (shares(), Time(1));
        let moment = Moment { now: at, tick: at };
        let asked = |shares: &mut Shares, nodes: &[ServerId]| {
            let (_, calls) = shares.due(moment, &scheduler(nodes));
            calls.iter().map(|(server, _)| server.0).collect::<Vec<_>>()
        };
        assert_eq!(
            asked(&mut shares, &[]),
            [0; 0],
            "the catalog has not answered"
        );
        assert_eq!(asked(&mut shares, &[NODE]), [NODE.0]);
        assert_eq!(asked(&mut shares, &[NODE, ServerId(3)]), [3]);
    }

    /// What others wait for is held by what has begun: in their turn too it goes on, or nobody
    /// would.
    #[test]
    fn what_has_begun_goes_on_in_the_turn_of_those_whom_it_leaves_nothing() {
        let told_in_turn_of_others = |mb: u64| {
            let text = format!(
                "volume v scratch {mb} MB files 9\njob a {{\nexecutable = x\n}}\n\
                 job b {{\nexecutable = x\n}}\nparent a child b\nmount v a /v\nmount v b /v\n"
            );
            let (mut scheduler, mut shares) = (scheduler_of(&text, &[NODE]), shares());
            let moment = |now| Moment {
                now: Time(now),
                tick: Time(now),
            };
            let (_, calls) = shares.due(moment(0), &scheduler);
            let other = NodeQuotaStatus {
                owner: "they (run 2)".to_owned(),
                user: "they".to_owned(),
                desired: calls[0].1.requested,
                start_minimum: NodeQuota {
                    bytes: 7_000_000,
                    files: 1,
                    slots: 2,
                },
                granted: NodeQuota::ZERO,
            };
            let answer = NodeQuotaList {
                other_owners: vec![other],
                ..granted(&calls[0].1)
            };
            let told = shares.answered(NODE, answer);
            let told = Event::SharesSeen { shares: told };
            scheduler.step(Time(2), told, &mut Vec::new());
            let demand = scheduler.demand(NODE).expect("it lives");
            assert_eq!((demand.keep.bytes / 1_000_000, demand.has_next), (mb, true));
            let turn = u64::from(!NODE.0.is_multiple_of(2)) + 1;
            let (smaller, _) = shares.due(moment(turn * TURN_MS), &scheduler);
            (smaller[0].slots, smaller[0].is_over)
        };
        assert_eq!(told_in_turn_of_others(6), (1, true));
        assert_eq!(told_in_turn_of_others(2), (0, false));
    }

    /// The only job that is left needs more than one slot.
    #[test]
    fn slots_are_asked_for_as_many_as_the_jobs_that_are_left_keep() {
        for cpus in [1, 2] {
            let text = format!("job a {{\nexecutable = x\nrequest_cpus = {cpus}\n}}\n");
            let scheduler = scheduler_of(&text, &[NODE]);
            let demand = scheduler.demand(NODE).expect("it lives");
            assert_eq!(demand.want.slots, cpus);
        }
    }

    #[test]
    fn a_node_that_is_full_of_runs_is_waited_for_and_one_that_refuses_is_told_once() {
        let (scheduler, mut shares) = (scheduler(&[NODE]), shares());
        let moment = |tick| Moment {
            now: Time(tick),
            tick: Time(tick),
        };
        assert_eq!(shares.due(moment(0), &scheduler).1.len(), 1);
        let away = Error::new(ErrorCode::Unreachable, "");
        assert_eq!(shares.refused(NODE, &away), (false, Vec::new()));
        let (is_news, told) = shares.refused(NODE, &Error::new(ErrorCode::Busy, ""));
        assert!(is_news && told.len() == 1 && told[0].is_shared && told[0].slots == 0);
        assert!(!shares.is_hopeless());
        let (smaller, calls) = shares.due(moment(SHARED_MS), &scheduler);
        assert_eq!(smaller, [], "it is as full as before");
        let told = shares.answered(NODE, granted(&calls[0].1));
        assert!(told.len() == 1 && told[0].slots > 0, "{told:?}");

        let mut shares = self::shares();
        shares.due(moment(0), &scheduler);
        let never = Error::new(ErrorCode::RightMissing, "");
        assert_eq!(shares.refused(NODE, &never), (true, Vec::new()));
        assert_eq!(shares.refused(NODE, &never), (false, Vec::new()));
        assert!(shares.is_hopeless());
    }

    #[test]
    fn the_first_answers_are_told_together_and_later_ones_at_once() {
        let ids: Vec<_> = (1..=4).map(ServerId).collect();
        let (scheduler, mut shares) = (scheduler(&ids), shares());
        let moment = Moment {
            now: Time(1),
            tick: Time(1),
        };
        let (_, calls) = shares.due(moment, &scheduler);
        assert_eq!(calls.len(), 4);
        let told = |shares: Vec<NodeShare>| -> Vec<u64> {
            shares.iter().map(|share| share.server.0).collect()
        };
        let nobody: [u64; 0] = [];
        for at in [1, 0, 2] {
            let answer = shares.answered(ids[at], granted(&calls[at].1));
            assert_eq!(told(answer), nobody);
        }
        // One that does not answer keeps the others no longer.
        let away = Error::new(ErrorCode::Unreachable, "");
        assert_eq!(told(shares.refused(ids[3], &away).1), [1, 2, 3]);
        let mut late = || told(shares.answered(ids[3], granted(&calls[3].1)));
        assert_eq!(late(), [4]);
        assert_eq!(late(), nobody);
    }
}
