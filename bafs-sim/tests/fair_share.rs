//! Parts of shared nodes, for random claims.

use bafs_proto::node_quota::NodeQuota;
use bafs_sched::policy::order::fair_share::{QuotaClaim, compute_fair_share};
use bafs_sim::seeded_rng::SeededRng;

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

/// Whoever wants something gets its unit sooner or later, and no more is divided than there is.
#[test]
fn every_claim_is_served_and_nothing_given_twice() {
    let mut rng = SeededRng::new(1);
    for _ in 0..2_000 {
        let slots = 1 + u32::try_from(rng.next_below(8)).expect("it is small");
        let capacity = share(1 + rng.next_below(1_000), slots);
        let claims: Vec<QuotaClaim> = (0..1 + rng.next_below(5))
            .map(|run| {
                let user = ["a", "b", "c"][usize::try_from(rng.next_below(3)).expect("three")];
                let unit = share(1 + rng.next_below(capacity.bytes), 1);
                let want = unit.component_max(share(rng.next_below(2_000), slots));
                claim(user, u32::try_from(run).expect("few"), want, unit)
            })
            .collect();
        let mut has_had = vec![false; claims.len()];
        for turn in 0..30 {
            let mut sum = (0, 0);
            for (claim, has_had) in claims.iter().zip(&mut has_had) {
                let part = compute_fair_share(&claim.owner, capacity, &claims, turn);
                *has_had |= part.can_hold(claim.start_minimum);
                sum = (sum.0 + part.bytes, sum.1 + part.slots);
            }
            let is_within = sum.0 <= capacity.bytes && sum.1 <= capacity.slots;
            assert!(is_within, "{capacity:?}: {sum:?} of {claims:?}");
        }
        assert!(has_had.iter().all(|had| *had), "{capacity:?}: {claims:?}");
    }
}
