//! Who gets how much of a node that several runs want: alike for each user, and for each run of a
//! user; what one does not want goes to the others. Pure arithmetic, which every scheduler does for
//! itself from the same figures; nodes see to it that nothing is given twice.

use std::collections::BTreeMap;

use bafs_proto::node_quota::NodeQuota;

/// What a run wants of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuotaClaim {
    /// The run.
    pub owner: String,
    /// The person.
    pub user: String,
    /// What it could use.
    pub desired: NodeQuota,
    /// The least with which it can begin anything.
    pub start_minimum: NodeQuota,
}

/// What `owner` may ask for of a node with this capacity, in the turn of this number. Where parts
/// that are alike would be too small for some to begin anything, one after the other gets what it
/// needs for a turn, and the others divide the rest.
pub fn compute_fair_share(
    owner: &str,
    capacity: NodeQuota,
    claims: &[QuotaClaim],
    turn: u64,
) -> NodeQuota {
    let mut claims: Vec<&QuotaClaim> = claims.iter().collect();
    claims.sort_by(|a, b| (&a.user, &a.owner).cmp(&(&b.user, &b.owner)));
    claims.dedup_by(|a, b| a.owner == b.owner);
    let all: Vec<NodeQuota> = divide(capacity, &claims);
    let is_large = |position: usize| {
        let claim = claims[position];
        let unit = claim.start_minimum.component_min(capacity);
        claim.desired.can_hold(unit) && !all[position].can_hold(unit)
    };
    let position = claims.iter().position(|claim| claim.owner == owner);
    let Some(position) = position else {
        return NodeQuota::ZERO;
    };
    if !(0..claims.len()).any(is_large) {
        return all[position];
    }
    let first = whose_turn(&claims, turn);
    if is_large(first) {
        let unit = claims[first]
            .start_minimum
            .component_max(all[first])
            .component_min(capacity);
        if first == position {
            return unit;
        }
        let others = |at: &usize| *at != first;
        return divide_among(capacity.saturating_sub(unit), &claims, position, others);
    }
    match is_large(position) {
        true => NodeQuota::ZERO,
        false => divide_among(capacity, &claims, position, |at| !is_large(*at)),
    }
}

/// Whether what `owner` keeps of a node leaves some other run too little space to begin anything:
/// that one gets on only when the owner ends what it has begun, whoever's turn it is.
pub fn is_starving_others(
    owner: &str,
    capacity: NodeQuota,
    keep: NodeQuota,
    claims: &[QuotaClaim],
) -> bool {
    let left = NodeQuota {
        slots: u32::MAX,
        ..capacity.saturating_sub(keep)
    };
    let mut others = claims.iter().filter(|claim| claim.owner != owner);
    let is_large = |claim: &QuotaClaim| {
        let unit = claim.start_minimum.component_min(capacity);
        claim.desired.can_hold(unit) && !left.can_hold(unit)
    };
    others.any(is_large)
}

/// Users take turns, and in each user's turns its runs.
fn whose_turn(claims: &[&QuotaClaim], turn: u64) -> usize {
    let mut users: Vec<&str> = claims.iter().map(|claim| &*claim.user).collect();
    users.dedup();
    let count = users.len() as u64;
    let user = users[usize::try_from(turn % count).unwrap_or(0)];
    let is_theirs = |at: &usize| claims[*at].user == user;
    let runs: Vec<usize> = (0..claims.len()).filter(is_theirs).collect();
    let run = turn / count % runs.len() as u64;
    runs[usize::try_from(run).unwrap_or(0)]
}

fn divide_among(
    capacity: NodeQuota,
    claims: &[&QuotaClaim],
    position: usize,
    is_in: impl Fn(&usize) -> bool,
) -> NodeQuota {
    let among: Vec<usize> = (0..claims.len()).filter(is_in).collect();
    let theirs: Vec<&QuotaClaim> = among.iter().map(|at| claims[*at]).collect();
    let shares = divide(capacity, &theirs);
    let at = among.iter().position(|at| *at == position);
    at.map(|at| shares[at]).unwrap_or_default()
}

/// Parts that are alike, in the order of the claims, which are sorted by user.
fn divide(capacity: NodeQuota, claims: &[&QuotaClaim]) -> Vec<NodeQuota> {
    let by = |of: fn(&NodeQuota) -> u64| {
        let mut users: BTreeMap<&str, Vec<u64>> = BTreeMap::new();
        for claim in claims {
            let wants = users.entry(&claim.user).or_default();
            wants.push(of(&claim.desired).min(of(&capacity)));
        }
        let sums = users.values();
        let sums: Vec<u64> = sums.map(|wants| wants.iter().fold(0, add)).collect();
        let parts = fill(of(&capacity), &sums);
        let runs = users.values().zip(parts);
        let runs = runs.flat_map(|(wants, part)| fill(part, wants));
        runs.collect::<Vec<u64>>()
    };
    let (bytes, files) = (by(|s| s.bytes), by(|s| s.files));
    let slots = by(|s| u64::from(s.slots));
    let parts = bytes.into_iter().zip(files).zip(slots);
    let part = |((bytes, files), slots)| NodeQuota {
        bytes,
        files,
        slots: u32::try_from(slots).unwrap_or(u32::MAX),
    };
    parts.map(part).collect()
}

fn add(sum: u64, more: &u64) -> u64 {
    sum.saturating_add(*more)
}

/// Divides `left` so that nobody gets more than wanted, and who gets less gets as much as any.
fn fill(mut left: u64, wants: &[u64]) -> Vec<u64> {
    let mut parts = vec![0; wants.len()];
    loop {
        let lack = |at: &usize| parts[*at] < wants[*at];
        let open: Vec<usize> = (0..wants.len()).filter(lack).collect();
        if open.is_empty() || left == 0 {
            return parts;
        }
        let each = left / open.len() as u64;
        for at in open {
            let more = (wants[at] - parts[at]).min(each.max(1)).min(left);
            parts[at] += more;
            left -= more;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(bytes: u64, slots: u32) -> NodeQuota {
        NodeQuota {
            bytes,
            files: bytes,
            slots,
        }
    }

    fn claim(user: &str, run: u32, want: NodeQuota, unit: NodeQuota) -> QuotaClaim {
        QuotaClaim {
            owner: format!("{user}{run}"),
            user: user.to_owned(),
            desired: want,
            start_minimum: unit,
        }
    }

    fn shares(capacity: NodeQuota, claims: &[QuotaClaim], turn: u64) -> Vec<(u64, u32)> {
        let part = |claim: &QuotaClaim| compute_fair_share(&claim.owner, capacity, claims, turn);
        let parts = claims.iter().map(part);
        parts.map(|part| (part.bytes, part.slots)).collect()
    }

    #[test]
    fn users_get_equal_shares_however_many_runs() {
        let all = share(100, 8);
        let unit = share(10, 1);
        let claims = [
            claim("a", 1, all, unit),
            claim("b", 1, all, unit),
            claim("b", 2, all, unit),
        ];
        assert_eq!(shares(all, &claims, 0), [(50, 4), (25, 2), (25, 2)]);
        assert_eq!(shares(all, &claims[..1], 7), [(100, 8)]);
    }

    #[test]
    fn unwanted_share_goes_to_other_claims() {
        let (all, unit) = (share(100, 8), share(5, 1));
        let claims = [
            claim("a", 1, share(10, 1), unit),
            claim("b", 1, all, unit),
            claim("c", 1, all, unit),
        ];
        assert_eq!(shares(all, &claims, 3), [(10, 1), (45, 4), (45, 3)]);
    }

    #[test]
    fn claim_larger_than_half_is_served_in_turn() {
        let all = share(100, 2);
        let claims = [
            claim("a", 1, all, share(80, 1)),
            claim("b", 1, all, share(10, 1)),
        ];
        assert_eq!(shares(all, &claims, 0), [(80, 1), (20, 1)]);
        assert_eq!(shares(all, &claims, 1), [(0, 0), (100, 2)]);
        let both = [
            claim("a", 1, all, share(80, 1)),
            claim("b", 1, all, share(70, 1)),
        ];
        assert_eq!(shares(all, &both, 0), [(80, 1), (20, 1)]);
        assert_eq!(shares(all, &both, 1), [(30, 1), (70, 1)]);
    }

    #[test]
    fn run_holding_too_much_leaves_others_nothing() {
        let all = share(100, 1);
        let [small, large] = [30, 80].map(|unit| claim("b", 1, all, share(unit, 1)));
        let leaves_nothing = |keep, other: &QuotaClaim| {
            let own = claim("a", 1, all, large.start_minimum);
            is_starving_others("a1", all, share(keep, 1), &[own, other.clone()])
        };
        assert!(!leaves_nothing(70, &small) && leaves_nothing(71, &small));
        assert!(leaves_nothing(30, &large) && !leaves_nothing(0, &large));
        let done = claim("b", 1, share(0, 0), large.start_minimum);
        assert!(!leaves_nothing(70, &done), "it wants nothing any more");
        let huge = claim("b", 1, all, share(200, 1));
        assert!(!leaves_nothing(0, &huge), "no node has as much");
    }

    #[test]
    fn single_slot_alternates_between_two_claims() {
        let one = share(100, 1);
        let claims = [
            claim("a", 1, one, share(1, 1)),
            claim("b", 1, one, share(1, 1)),
        ];
        let slots = |turn| {
            let shares = shares(one, &claims, turn);
            [shares[0].1, shares[1].1]
        };
        assert_eq!(slots(0), [1, 0]);
        assert_eq!(slots(1), [0, 1]);
    }
}
