//! What is kept for each of several runs, whether they use it or not. Pure; divides nothing: a run
//! gets what it asks for, as far as no other has it.
//!
//! Runs hold volumes by the names of their owners. An owner with an allotment may hold as much
//! without asking anybody; others get only what neither is held nor kept. Those without an
//! allotment (people, by hand) may also take what runs were given beyond what they keep.

use std::collections::BTreeMap;

use bafs_proto::node_quota::{NodeQuota, NodeQuotaList, NodeQuotaStatus, SetNodeQuota};
use bafs_proto::time::Time;

use super::space::Amount;

/// Most runs with an allotment on one node.
pub const RUNS_MAX: usize = 256;

/// Longest lifetime of an allotment, in milliseconds.
pub const LIFETIME_MS_MAX: u64 = 600_000;

#[derive(Debug)]
struct RunQuota {
    status: NodeQuotaStatus,
    serial: u64,
    guaranteed: NodeQuota,
    expires: Time,
}

/// What is kept for whom.
#[derive(Debug, Default)]
pub struct QuotaLedger {
    quotas: BTreeMap<String, RunQuota>,
}

impl QuotaLedger {
    /// Answers a run that asks for `call.ask`. The owner holds `held` of `capacity`, `free` is held
    /// by nobody, and `held_by` tells what other owners hold. Nothing when there are too many runs.
    pub fn set_quota(
        &mut self,
        now: Time,
        call: SetNodeQuota,
        capacity: NodeQuota,
        free: Amount,
        held_by: impl Fn(&str) -> Amount,
    ) -> Option<NodeQuotaList> {
        self.expire(now);
        let is_late = |given: &&RunQuota| given.serial >= call.sequence;
        let latest = self.quotas.get(&call.owner).filter(is_late);
        let granted = match latest {
            Some(given) => given.status.granted,
            None => self
                .grantable(&call.owner, capacity, free, &held_by)
                .component_min(call.requested),
        };
        if latest.is_none() {
            if self.quotas.len() >= RUNS_MAX && !self.quotas.contains_key(&call.owner) {
                return None;
            }
            self.record_quota(now, call.clone(), granted);
        }
        let has_any = |given: &&RunQuota| {
            let NodeQuotaStatus {
                desired: want,
                granted,
                ..
            } = given.status;
            given.status.owner != call.owner
                && (want != NodeQuota::ZERO || granted != NodeQuota::ZERO)
        };
        let others = self.quotas.values().filter(has_any);
        Some(NodeQuotaList {
            granted,
            capacity,
            other_owners: others.map(|given| given.status.clone()).collect(),
        })
    }

    /// The most that this owner can be given.
    fn grantable(
        &self,
        owner: &str,
        capacity: NodeQuota,
        free: Amount,
        held_by: impl Fn(&str) -> Amount,
    ) -> NodeQuota {
        let held = held_by(owner);
        let left = self.available_to_run(owner, free, &held_by);
        let others = self.quotas.iter().filter(|(other, _)| *other != owner);
        let taken: u32 = others.map(|(_, given)| given.status.granted.slots).sum();
        NodeQuota {
            bytes: held.bytes.saturating_add(left.bytes),
            files: held.files.saturating_add(left.files),
            slots: capacity.slots.saturating_sub(taken),
        }
    }

    /// What was given back stays as nothing for a while, so that an asking that is late finds it.
    fn record_quota(&mut self, now: Time, call: SetNodeQuota, granted: NodeQuota) {
        let given = RunQuota {
            serial: call.sequence,
            guaranteed: call.committed.component_min(granted),
            expires: now.plus_ms(call.lifetime_ms.min(LIFETIME_MS_MAX)),
            status: NodeQuotaStatus {
                owner: call.owner.clone(),
                user: call.user,
                desired: call.desired,
                start_minimum: call.start_minimum,
                granted,
            },
        };
        self.quotas.insert(call.owner, given);
    }

    /// What this owner may still take of `free`, which nobody holds.
    pub fn available_to(
        &self,
        owner: &str,
        free: Amount,
        held_by: impl Fn(&str) -> Amount,
    ) -> Amount {
        match self.quotas.contains_key(owner) {
            true => self.available_to_run(owner, free, &held_by),
            false => self.remaining(owner, free, &held_by, |given| given.guaranteed),
        }
    }

    /// What others were not given, and in any case what is kept for this run: of what others were
    /// given beyond that, people may have taken a part by hand.
    fn available_to_run(
        &self,
        owner: &str,
        free: Amount,
        held_by: impl Fn(&str) -> Amount,
    ) -> Amount {
        let left = self.remaining(owner, free, &held_by, |given| given.status.granted);
        let Some(own) = self.quotas.get(owner) else {
            return left;
        };
        let (held, kept) = (held_by(owner), own.guaranteed);
        let unkept = self.remaining(owner, free, &held_by, |given| given.guaranteed);
        let of_kept = |kept: u64, held: u64, unkept: u64| kept.saturating_sub(held).min(unkept);
        Amount {
            bytes: left
                .bytes
                .max(of_kept(kept.bytes, held.bytes, unkept.bytes)),
            files: left
                .files
                .max(of_kept(kept.files, held.files, unkept.files)),
        }
    }

    /// What is left of `free` beside what others may yet take of what is kept for them.
    fn remaining(
        &self,
        owner: &str,
        free: Amount,
        held_by: impl Fn(&str) -> Amount,
        kept: impl Fn(&RunQuota) -> NodeQuota,
    ) -> Amount {
        let others = self.quotas.iter().filter(|(other, _)| *other != owner);
        others.fold(free, |left, (other, given)| {
            let (kept, held) = (kept(given), held_by(other));
            Amount {
                bytes: left
                    .bytes
                    .saturating_sub(kept.bytes.saturating_sub(held.bytes)),
                files: left
                    .files
                    .saturating_sub(kept.files.saturating_sub(held.files)),
            }
        })
    }

    /// Forgets what was not asked for any more.
    pub fn expire(&mut self, now: Time) {
        self.quotas.retain(|_, given| given.expires > now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CAPACITY: NodeQuota = NodeQuota {
        bytes: 100,
        files: 100,
        slots: 4,
    };

    fn share(bytes: u64, slots: u32) -> NodeQuota {
        NodeQuota {
            bytes,
            files: bytes,
            slots,
        }
    }

    fn amount(bytes: u64) -> Amount {
        Amount {
            bytes,
            files: bytes,
        }
    }

    fn call(serial: u64, owner: &str, ask: NodeQuota, keep: NodeQuota) -> SetNodeQuota {
        SetNodeQuota {
            owner: owner.to_owned(),
            user: owner.to_owned(),
            sequence: serial,
            desired: CAPACITY,
            start_minimum: NodeQuota::ZERO,
            committed: keep,
            requested: ask,
            lifetime_ms: 1_000,
        }
    }

    #[test]
    fn granted_quota_is_exclusive_until_released() {
        let mut ledger = QuotaLedger::default();
        let none = |_: &str| Amount::default();
        let mut ask = |now, owner, ask, keep| {
            let call = call(now + 1, owner, ask, keep);
            ledger.set_quota(Time(now), call, CAPACITY, amount(100), none)
        };
        let first = ask(0, "a", share(100, 4), share(30, 1)).expect("there is room");
        assert_eq!(first.granted, share(100, 4));
        let second = ask(1, "b", share(50, 2), NodeQuota::ZERO).expect("there is room");
        assert_eq!(second.granted, NodeQuota::ZERO, "a has all");
        assert_eq!(second.other_owners[0].owner, "a");
        let less = ask(2, "a", share(50, 2), share(30, 1)).expect("there is room");
        assert_eq!(less.granted, share(50, 2));
        assert_eq!(less.other_owners[0].desired, CAPACITY, "b still wants");
        let again = ask(3, "b", share(60, 2), NodeQuota::ZERO).expect("there is room");
        assert_eq!(again.granted, share(50, 2));
        let late = ask(1_003, "b", share(60, 4), NodeQuota::ZERO).expect("there is room");
        assert_eq!(late.granted, share(60, 4), "the time of a is up");
    }

    #[test]
    fn outdated_quota_calls_change_nothing() {
        let mut ledger = QuotaLedger::default();
        let none = |_: &str| Amount::default();
        let mut ask = |serial, owner, ask| {
            let want = if ask == NodeQuota::ZERO {
                ask
            } else {
                CAPACITY
            };
            let call = SetNodeQuota {
                desired: want,
                ..call(serial, owner, ask, NodeQuota::ZERO)
            };
            let answer = ledger.set_quota(Time(0), call, CAPACITY, amount(100), none);
            answer.expect("there is room")
        };
        ask(1, "a", share(100, 4));
        assert_eq!(ask(3, "a", NodeQuota::ZERO).granted, NodeQuota::ZERO);
        assert_eq!(
            ask(2, "a", share(100, 4)).granted,
            NodeQuota::ZERO,
            "it gave all back"
        );
        let other = ask(1, "b", share(100, 4));
        assert_eq!(
            (other.granted, other.other_owners.len()),
            (share(100, 4), 0)
        );
    }

    #[test]
    fn volumes_count_against_their_owners_quota() {
        let mut ledger = QuotaLedger::default();
        let held = |owner: &str| amount(if owner == "a" { 20 } else { 0 });
        let call = call(1, "a", share(70, 1), share(40, 1));
        ledger.set_quota(Time(0), call, CAPACITY, amount(80), held);
        assert_eq!(ledger.available_to("a", amount(80), held), amount(80));
        // By hand all may be taken that the run does not keep: 80 free, 20 of them kept.
        assert_eq!(ledger.available_to("by hand", amount(80), held), amount(60));
        let other = SetNodeQuota {
            owner: "b".to_owned(),
            ..self::call(1, "b", share(90, 1), NodeQuota::ZERO)
        };
        let given = ledger.set_quota(Time(0), other, CAPACITY, amount(80), held);
        assert_eq!(given.expect("there is room").granted.bytes, 30);
        assert_eq!(ledger.available_to("b", amount(80), held), amount(30));
    }

    #[test]
    fn the_reserved_quota_survives_manual_allocations() {
        let mut ledger = QuotaLedger::default();
        let by_hand = |hand| move |owner: &str| amount(if owner == "by hand" { hand } else { 0 });
        for (serial, owner) in [(1, "a"), (2, "b")] {
            let call = call(serial, owner, share(50, 1), share(10, 1));
            ledger.set_quota(Time(0), call, CAPACITY, amount(100), by_hand(0));
        }
        assert_eq!(
            ledger.available_to("by hand", amount(100), by_hand(0)),
            amount(80)
        );
        let (free, held) = (amount(20), by_hand(80));
        assert_eq!(ledger.available_to("a", free, held), amount(10));
        let again = call(3, "a", share(50, 1), share(10, 1));
        let again = ledger.set_quota(Time(0), again, CAPACITY, free, held);
        assert_eq!(again.expect("there is room").granted.bytes, 10);
        assert_eq!(ledger.available_to("b", free, held), amount(10));
    }

    const RUNS: usize = 4;

    proptest! {
        /// Whatever runs ask for and make, and people make by hand, what is kept and held never
        /// exceeds the capacity; nor does what runs were given. Whoever holds less than is kept
        /// can make the difference, and less than was given unless people made something.
        #[test]
        fn granted_quota_is_always_usable(steps in prop::collection::vec(
            (0..RUNS + 1, any::<bool>(), 0u64..60, 0u64..60, 0u64..700), 0..60,
        )) {
            let mut ledger = QuotaLedger::default();
            let (mut held, mut given) = ([0u64; RUNS + 1], [(0u64, 0u64, 0u64); RUNS + 1]);
            let mut now = 0;
            for (serial, (owner, is_ask, bytes, keep, pass_ms)) in (1..).zip(steps) {
                now += pass_ms;
                ledger.expire(Time(now));
                for given in &mut given {
                    if given.2 <= now {
                        *given = (0, 0, 0);
                    }
                }
                let free = amount(100 - held.iter().sum::<u64>());
                let look = held;
                let held_by = move |owner: &str| {
                    amount(owner.parse::<usize>().map_or(0, |owner| look[owner]))
                };
                let name = owner.to_string();
                let is_run = owner < RUNS;
                if is_run && (is_ask || given[owner].2 == 0) {
                    let call = call(serial, &name, share(bytes.max(1), 1), share(keep, 1));
                    let answer = ledger.set_quota(Time(now), call, CAPACITY, free, held_by);
                    let granted = answer.expect("there is room").granted.bytes;
                    given[owner] = (granted, keep.min(granted), now + 1_000);
                } else {
                    let left = ledger.available_to(&name, free, held_by).bytes;
                    let (granted, kept, _) = given[owner];
                    prop_assert!(left >= kept.saturating_sub(held[owner]));
                    let by_hand = if is_run { held[RUNS] } else { 0 };
                    prop_assert!(left + by_hand >= granted.saturating_sub(held[owner]));
                    held[owner] = if bytes <= left { held[owner] + bytes } else { 0 };
                }
                let sum = |of: fn(&(u64, u64, u64)) -> u64| -> u64 {
                    (0..RUNS).map(|run| held[run].max(of(&given[run]))).sum()
                };
                prop_assert!(sum(|given| given.1) + held[RUNS] <= 100);
                prop_assert!(sum(|given| given.0) <= 100);
            }
        }
    }
}
