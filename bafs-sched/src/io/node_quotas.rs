//! What this run asks nodes to keep for it, and what they gave. Whose turn it is, and how much
//! everybody gets, is in `logic/fair_share.rs`.

use std::collections::BTreeMap;

use bafs_proto::ids::ServerId;
use bafs_proto::node_quota::{NodeQuota, NodeQuotaList, NodeQuotaStatus, SetNodeQuota};
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode};

use crate::policy::order::fair_share::{QuotaClaim, compute_fair_share, is_starving_others};
use crate::run_limit::RunLimit;
use crate::{NodeDemand, RunQuota, Scheduler, Space};

/// A node that others use too is asked so often, in milliseconds, and one that nobody else uses.
const SHARED_NODE_INTERVAL_MS: u64 = 1_000;
const UNSHARED_NODE_INTERVAL_MS: u64 = 4_000;

/// A turn takes so long, in milliseconds, where not everybody's part is of use.
const TURN_MS: u64 = 10_000;

/// A node forgets a run that is silent for so long, in milliseconds.
const QUOTA_LIFETIME_MS: u64 = 30_000;

/// Nodes are looked at so often, in milliseconds, while none come or go.
const NODE_CHECK_INTERVAL_MS: u64 = 250;

/// What is known of one node.
#[derive(Debug, Default)]
struct KnownQuota {
    granted: NodeQuota,
    /// This run's part, however much it has begun.
    fair_share: NodeQuota,
    other_quotas: Vec<NodeQuotaStatus>,
    requested_at: Option<Time>,
    is_requesting: bool,
    /// Whether the limit of the run leaves less of this node than its part.
    is_limited: bool,
    /// Why it keeps nothing, if that is so and is no matter of the way to it.
    refusal: Option<ErrorCode>,
    has_answered: bool,
    /// It was asked once at least, and answered, refused or was silent.
    has_been_tried: bool,
    /// What the core was told.
    reported: Option<RunQuota>,
}

/// Parts of nodes.
#[derive(Debug)]
pub(crate) struct NodeQuotas {
    user: String,
    owner: String,
    by_server: BTreeMap<ServerId, KnownQuota>,
    /// When nodes were looked at last, and how many there were.
    last_check: Option<(Time, u64)>,
    /// Of the last call.
    serial: u64,
    /// What the run may use of all nodes together.
    limit: RunLimit,
}

/// What time it is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ClockReading {
    /// By the clock that other schedulers know too, which may be set back.
    pub(crate) wall_time: Time,
    /// By one that only goes on.
    pub(crate) monotonic_time: Time,
}

impl NodeQuotas {
    pub(crate) fn new(user: String, owner: String, limit: RunLimit) -> Self {
        Self {
            user,
            owner,
            by_server: BTreeMap::new(),
            last_check: None,
            serial: 0,
            limit,
        }
    }

    /// Parts that become smaller, which the core must know before the nodes do, and calls that are
    /// due.
    pub(crate) fn take_due_requests(
        &mut self,
        ClockReading {
            wall_time: now,
            monotonic_time: tick,
        }: ClockReading,
        scheduler: &Scheduler,
    ) -> (Vec<RunQuota>, Vec<(ServerId, SetNodeQuota)>) {
        // A run that has just begun knows no node; with the first it must not wait for more news.
        let nodes = scheduler.live_node_count();
        let is_as_seen = |(at, seen)| tick.ms_since(at) < NODE_CHECK_INTERVAL_MS && seen == nodes;
        if self.last_check.is_some_and(is_as_seen) {
            return (Vec::new(), Vec::new());
        }
        self.last_check = Some((tick, nodes));
        self.serial = self.next_serial(now);
        let (mut smaller, mut calls) = (Vec::new(), Vec::new());
        let limit = self.limit.get();
        let (mut kept_bytes, mut kept_slots) = self.sum_granted();
        for server in scheduler.live_nodes() {
            let known = self.by_server.entry(server).or_default();
            if !known.is_due(tick) {
                continue;
            }
            let (Some(demand), Some(node)) =
                (scheduler.node_demand(server), scheduler.node(server))
            else {
                continue;
            };
            let capacity = NodeQuota {
                bytes: node.capacity.bytes,
                files: node.capacity.files,
                slots: node.slots,
            };
            let claims = known.list_claims(QuotaClaim {
                owner: self.owner.clone(),
                user: self.user.clone(),
                desired: demand.desired,
                start_minimum: demand.start_minimum,
            });
            let turn = (now.0 / TURN_MS).wrapping_add(server.0);
            let mut fair = compute_fair_share(&self.owner, capacity, &claims, turn);
            if demand.has_next
                && is_starving_others(&self.owner, capacity, demand.committed, &claims)
            {
                fair.slots = fair.slots.max(1);
            }
            kept_bytes = kept_bytes.saturating_sub(known.granted.bytes);
            kept_slots = kept_slots.saturating_sub(u64::from(known.granted.slots));
            known.is_limited = false;
            if let Some(limit) = limit {
                let kept = (kept_bytes, kept_slots);
                let capped = limit.cap(fair, kept, demand.start_minimum);
                known.is_limited = capped != fair;
                fair = capped;
            }
            let requested_quota = fair.component_max(demand.committed).component_min(capacity);
            kept_bytes = kept_bytes.saturating_add(requested_quota.bytes);
            kept_slots = kept_slots.saturating_add(u64::from(requested_quota.slots));
            known.fair_share = fair;
            if known.reported.is_some() {
                known.granted = known.granted.component_min(requested_quota);
                smaller.extend(known.take_change(server));
            }
            known.requested_at = Some(tick);
            known.is_requesting = true;
            calls.push((
                server,
                self.build_request(self.serial, demand, requested_quota),
            ));
        }
        (smaller, calls)
    }

    /// Bytes and slots that all nodes keep for the run.
    fn sum_granted(&self) -> (u64, u64) {
        let nodes = self.by_server.values();
        nodes.fold((0, 0), |(bytes, slots), known| {
            let granted = known.granted;
            let bytes = granted.bytes.saturating_add(bytes);
            (bytes, u64::from(granted.slots).saturating_add(slots))
        })
    }

    /// Grows also when the clock was set back.
    fn next_serial(&self, now: Time) -> u64 {
        now.0.max(self.serial.saturating_add(1))
    }

    fn build_request(&self, serial: u64, demand: NodeDemand, ask: NodeQuota) -> SetNodeQuota {
        SetNodeQuota {
            owner: self.owner.clone(),
            user: self.user.clone(),
            sequence: serial,
            desired: demand.desired,
            start_minimum: demand.start_minimum,
            committed: demand.committed,
            requested: ask,
            lifetime_ms: QUOTA_LIFETIME_MS,
        }
    }

    /// Takes what a node keeps; what the core must know. The first answers are told together: a
    /// cache is divided once, among the nodes that are known then.
    pub(crate) fn handle_grant(
        &mut self,
        server: ServerId,
        answer: NodeQuotaList,
    ) -> Vec<RunQuota> {
        let known = self.by_server.entry(server).or_default();
        (known.is_requesting, known.has_been_tried, known.refusal) = (false, true, None);
        known.granted = answer.granted;
        known.other_quotas = answer.other_owners;
        known.has_answered = true;
        self.take_changes(Some(server))
    }

    /// Takes that a node keeps nothing; whether that is news to people, and what the core must
    /// know.
    pub(crate) fn handle_refusal(
        &mut self,
        server: ServerId,
        error: &Error,
    ) -> (bool, Vec<RunQuota>) {
        let known = self.by_server.entry(server).or_default();
        (known.is_requesting, known.has_been_tried) = (false, true);
        let is_busy = error.code == ErrorCode::Busy;
        if error.is_transient() && !is_busy {
            return (false, self.take_changes(None));
        }
        let is_news = known.refusal.replace(error.code) != Some(error.code);
        // Others have all of it: the run waits for its turn, and does not fail.
        known.has_answered |= is_busy;
        (is_news, self.take_changes(None))
    }

    /// What the core must know: that node, and those that it has not heard of.
    fn take_changes(&mut self, of: Option<ServerId>) -> Vec<RunQuota> {
        let is_first = self
            .by_server
            .values()
            .all(|known| known.reported.is_none());
        let is_awaited = |known: &KnownQuota| known.is_requesting && !known.has_been_tried;
        if is_first && self.by_server.values().any(is_awaited) {
            return Vec::new();
        }
        let is_new = |(id, known): &(&ServerId, &mut KnownQuota)| {
            known.has_answered && (of == Some(**id) || known.reported.is_none())
        };
        let news = self.by_server.iter_mut().filter(is_new);
        news.filter_map(|(id, known)| known.take_change(*id))
            .collect()
    }

    /// Whether no node ever kept anything for the run, and each said that it never will.
    pub(crate) fn is_hopeless(&self) -> bool {
        let is_lasting = |code: ErrorCode| !Error::new(code, "").is_transient();
        let mut nodes = self.by_server.values();
        !self.by_server.is_empty()
            && nodes.all(|known| known.reported.is_none() && known.refusal.is_some_and(is_lasting))
    }

    /// Calls that give everything back.
    pub(crate) fn release_requests(&self, now: Time) -> Vec<(ServerId, SetNodeQuota)> {
        let nothing = NodeDemand {
            desired: NodeQuota::ZERO,
            start_minimum: NodeQuota::ZERO,
            committed: NodeQuota::ZERO,
            has_next: false,
        };
        let (serial, nodes) = (self.next_serial(now), self.by_server.keys());
        nodes
            .map(|server| {
                (
                    *server,
                    self.build_request(serial, nothing, NodeQuota::ZERO),
                )
            })
            .collect()
    }
}

impl KnownQuota {
    /// Whether the node is to be asked now.
    fn is_due(&self, tick: Time) -> bool {
        let is_alone = self.other_quotas.is_empty() && self.refusal.is_none();
        let pause_ms = match is_alone {
            true => UNSHARED_NODE_INTERVAL_MS,
            false => SHARED_NODE_INTERVAL_MS,
        };
        let is_early = self
            .requested_at
            .is_some_and(|at| tick.ms_since(at) < pause_ms);
        !is_early && !self.is_requesting
    }

    /// What others want of the node, and this run.
    fn list_claims(&self, own: QuotaClaim) -> Vec<QuotaClaim> {
        let others = self.other_quotas.iter().map(|other| QuotaClaim {
            owner: other.owner.clone(),
            user: other.user.clone(),
            desired: other.desired,
            start_minimum: other.start_minimum,
        });
        others.chain([own]).collect()
    }

    fn take_change(&mut self, server: ServerId) -> Option<RunQuota> {
        let is_full = self.refusal == Some(ErrorCode::Busy);
        // What a limit leaves may grow, as what others have may: the run waits and does not fail.
        let is_shared = is_full || self.is_limited || !self.other_quotas.is_empty();
        let fair = NodeQuota {
            slots: self.granted.slots,
            ..self.fair_share
        };
        let share = RunQuota {
            server,
            space: Space {
                bytes: self.granted.bytes,
                files: self.granted.files,
            },
            // Jobs that run are not stopped, but none takes their place.
            slots: self.granted.slots.min(self.fair_share.slots),
            is_shared,
            is_above_fair_share: is_shared && !fair.can_hold(self.granted),
        };
        let is_new = self.reported != Some(share);
        self.reported = Some(share);
        is_new.then_some(share)
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::RunId;
    use bafs_workflow::parse_workflow;

    use super::*;
    use crate::run_limit::ClusterLimit;
    use crate::{Event, NodeInfo, Settings};

    const NODE: ServerId = ServerId(2);

    fn scheduler(nodes: &[ServerId]) -> Scheduler {
        let text = "volume v scratch 1 MB\njob a {\nexecutable = x\n}\nmount v a /v\n";
        scheduler_for(text, nodes)
    }

    fn scheduler_for(text: &str, nodes: &[ServerId]) -> Scheduler {
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
        let nodes = nodes
            .iter()
            .map(|id| NodeInfo::single_group(*id, capacity, 2));
        let nodes = nodes.collect();
        scheduler.step(Time(1), Event::nodes_listed(nodes), &mut Vec::new());
        scheduler
    }

    fn test_quotas() -> NodeQuotas {
        limited_quotas(RunLimit::default())
    }

    fn limited_quotas(limit: RunLimit) -> NodeQuotas {
        NodeQuotas::new("me".to_owned(), "me (run 1)".to_owned(), limit)
    }

    fn grant_request(call: &SetNodeQuota) -> NodeQuotaList {
        NodeQuotaList {
            granted: call.requested,
            capacity: call.requested,
            other_owners: Vec::new(),
        }
    }

    #[test]
    fn setting_the_clock_back_delays_no_quota_request() {
        let (scheduler, mut shares) = (scheduler(&[NODE]), test_quotas());
        let mut ask = |now, tick| {
            let moment = ClockReading {
                wall_time: Time(now),
                monotonic_time: Time(tick),
            };
            let (_, calls) = shares.take_due_requests(moment, &scheduler);
            for (server, call) in &calls {
                shares.handle_grant(*server, grant_request(call));
            }
            calls.first().map(|(_, call)| call.sequence)
        };
        let first = ask(1_000_000, 0).expect("it is asked");
        assert_eq!(ask(1_000_300, 300), None, "it was asked just now");
        let second = ask(940_000, UNSHARED_NODE_INTERVAL_MS).expect("it is asked again");
        assert!(second > first);
        assert!(shares.release_requests(Time(940_000))[0].1.sequence > second);
    }

    #[test]
    fn limit_of_the_run_caps_all_nodes_together() {
        let nodes = [ServerId(2), ServerId(3), ServerId(4)];
        let jobs = (1..=6).map(|i| {
            format!(
                "volume v{i} scratch 3 MB\njob j{i} {{\nexecutable = x\n}}\nmount v{i} j{i} /v\n"
            )
        });
        let scheduler = scheduler_for(&jobs.collect::<String>(), &nodes);
        let limit = RunLimit::default();
        let mut shares = limited_quotas(limit.clone());
        let mut now = Time(0);
        let mut sum_asked = |shares: &mut NodeQuotas, slots| {
            let bytes = 12_000_000;
            limit.set(Some(ClusterLimit { slots, bytes }));
            now = now.plus_ms(UNSHARED_NODE_INTERVAL_MS);
            let moment = ClockReading {
                wall_time: now,
                monotonic_time: now,
            };
            let (_, calls) = shares.take_due_requests(moment, &scheduler);
            for (server, call) in &calls {
                let told = shares.handle_grant(*server, grant_request(call));
                let is_wrong = |told: &RunQuota| told.slots < 2 && !told.is_shared;
                assert!(!told.iter().any(is_wrong), "{told:?}");
            }
            let asked = calls.iter().map(|(_, call)| call.requested);
            let slots: u32 = asked.clone().map(|asked| asked.slots).sum();
            let bytes: u64 = asked.clone().map(|asked| asked.bytes).sum();
            assert!(bytes <= 12_000_000, "{bytes}");
            let is_of_use = |asked: NodeQuota| asked.bytes >= u64::from(asked.slots) * 3_000_000;
            assert!(
                asked.into_iter().all(is_of_use),
                "space goes where slots go"
            );
            slots
        };
        assert_eq!(sum_asked(&mut shares, 3), 3);
        assert_eq!(sum_asked(&mut shares, 0), 0);
        assert_eq!(sum_asked(&mut shares, 2), 2);
    }

    #[test]
    fn new_nodes_are_asked_for_quotas_at_once() {
        let (mut shares, at) = (test_quotas(), Time(1));
        let moment = ClockReading {
            wall_time: at,
            monotonic_time: at,
        };
        let asked = |shares: &mut NodeQuotas, nodes: &[ServerId]| {
            let (_, calls) = shares.take_due_requests(moment, &scheduler(nodes));
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
    fn begun_pipeline_continues_in_turns_of_blocked_users() {
        let told_in_turn_of_others = |mb: u64| {
            let text = format!(
                "volume v scratch {mb} MB files 9\njob a {{\nexecutable = x\n}}\n\
                 job b {{\nexecutable = x\n}}\nparent a child b\nmount v a /v\nmount v b /v\n"
            );
            let (mut scheduler, mut shares) = (scheduler_for(&text, &[NODE]), test_quotas());
            let moment = |now| ClockReading {
                wall_time: Time(now),
                monotonic_time: Time(now),
            };
            let (_, calls) = shares.take_due_requests(moment(0), &scheduler);
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
                ..grant_request(&calls[0].1)
            };
            let told = shares.handle_grant(NODE, answer);
            let told = Event::QuotasChanged { quotas: told };
            scheduler.step(Time(2), told, &mut Vec::new());
            let demand = scheduler.node_demand(NODE).expect("it lives");
            assert_eq!(
                (demand.committed.bytes / 1_000_000, demand.has_next),
                (mb, true)
            );
            let turn = u64::from(!NODE.0.is_multiple_of(2)) + 1;
            let (smaller, _) = shares.take_due_requests(moment(turn * TURN_MS), &scheduler);
            (smaller[0].slots, smaller[0].is_above_fair_share)
        };
        assert_eq!(told_in_turn_of_others(6), (1, true));
        assert_eq!(told_in_turn_of_others(2), (0, false));
    }

    /// The only job that is left needs more than one slot.
    #[test]
    fn slot_demand_covers_jobs_with_several_cpus() {
        for cpus in [1, 2] {
            let text = format!("job a {{\nexecutable = x\nrequest_cpus = {cpus}\n}}\n");
            let scheduler = scheduler_for(&text, &[NODE]);
            let demand = scheduler.node_demand(NODE).expect("it lives");
            assert_eq!(demand.desired.slots, cpus);
        }
    }

    #[test]
    fn busy_node_is_retried_and_refusal_reported_once() {
        let (scheduler, mut shares) = (scheduler(&[NODE]), test_quotas());
        let moment = |tick| ClockReading {
            wall_time: Time(tick),
            monotonic_time: Time(tick),
        };
        assert_eq!(shares.take_due_requests(moment(0), &scheduler).1.len(), 1);
        let away = Error::new(ErrorCode::Unreachable, "");
        assert_eq!(shares.handle_refusal(NODE, &away), (false, Vec::new()));
        let (is_news, told) = shares.handle_refusal(NODE, &Error::new(ErrorCode::Busy, ""));
        assert!(is_news && told.len() == 1 && told[0].is_shared && told[0].slots == 0);
        assert!(!shares.is_hopeless());
        let (smaller, calls) =
            shares.take_due_requests(moment(SHARED_NODE_INTERVAL_MS), &scheduler);
        assert_eq!(smaller, [], "it is as full as before");
        let told = shares.handle_grant(NODE, grant_request(&calls[0].1));
        assert!(told.len() == 1 && told[0].slots > 0, "{told:?}");

        let mut shares = test_quotas();
        shares.take_due_requests(moment(0), &scheduler);
        let never = Error::new(ErrorCode::RightMissing, "");
        assert_eq!(shares.handle_refusal(NODE, &never), (true, Vec::new()));
        assert_eq!(shares.handle_refusal(NODE, &never), (false, Vec::new()));
        assert!(shares.is_hopeless());
    }

    #[test]
    fn quotas_are_reported_together_first_then_singly() {
        let ids: Vec<_> = (1..=4).map(ServerId).collect();
        let (scheduler, mut shares) = (scheduler(&ids), test_quotas());
        let moment = ClockReading {
            wall_time: Time(1),
            monotonic_time: Time(1),
        };
        let (_, calls) = shares.take_due_requests(moment, &scheduler);
        assert_eq!(calls.len(), 4);
        let told = |shares: Vec<RunQuota>| -> Vec<u64> {
            shares.iter().map(|share| share.server.0).collect()
        };
        let nobody: [u64; 0] = [];
        for at in [1, 0, 2] {
            let answer = shares.handle_grant(ids[at], grant_request(&calls[at].1));
            assert_eq!(told(answer), nobody);
        }
        // One that does not answer keeps the others no longer.
        let away = Error::new(ErrorCode::Unreachable, "");
        assert_eq!(told(shares.handle_refusal(ids[3], &away).1), [1, 2, 3]);
        let mut late = || told(shares.handle_grant(ids[3], grant_request(&calls[3].1)));
        assert_eq!(late(), [4]);
        assert_eq!(late(), nobody);
    }
}
