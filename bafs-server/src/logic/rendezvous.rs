//! Which servers come first for a key: weighted rendezvous hashing. Knows no network.
//!
//! Thaler and Ravishankar 1998, with the weights of Schindelhauer and Schomaker 2005: the server
//! with the largest `weight / -log(score)` wins. A server that comes or goes moves only its own
//! share, and shares follow the weights. The logarithm is computed with integers, because every
//! server must come to the same answer whatever its mathematics library.

use std::cmp::Ordering;

use bafs_proto::hash;
use bafs_proto::ids::ServerId;

/// Bits after the point of the logarithm.
const FRACTION_BITS: u32 = 24;

/// A server that can hold blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Candidate {
    /// The server.
    pub(crate) server: ServerId,
    /// Its share is proportional to this; 0 counts as 1.
    pub(crate) weight: u64,
}

/// Orders the candidates for a key: the primary first, then who follows if it leaves.
pub(crate) fn rank(key: &[&[u8]], candidates: &[Candidate]) -> Vec<ServerId> {
    let mut scored: Vec<_> = candidates
        .iter()
        .map(|candidate| with_score(key, *candidate))
        .collect();
    scored.sort_by(compare_rank);
    scored
        .into_iter()
        .map(|(candidate, _)| candidate.server)
        .collect()
}

/// Place of the first in rank among the candidates that `admits` lets through, by their places.
pub(crate) fn best_candidate(
    key: &[&[u8]],
    candidates: &[Candidate],
    admits: impl Fn(usize) -> bool,
) -> Option<usize> {
    let admitted = candidates.iter().enumerate().filter(|(n, _)| admits(*n));
    admitted
        .map(|(n, candidate)| (n, with_score(key, *candidate)))
        .min_by(|(_, a), (_, b)| compare_rank(a, b))
        .map(|(n, _)| n)
}

fn with_score(key: &[&[u8]], candidate: Candidate) -> (Candidate, u64) {
    let server = candidate.server.0.to_le_bytes();
    let parts: Vec<&[u8]> = key.iter().copied().chain([server.as_slice()]).collect();
    (candidate, negative_log2(hash::rendezvous_score(&parts)))
}

/// Orders by `weight / log`, the largest first, without division.
fn compare_rank((a, a_log): &(Candidate, u64), (b, b_log): &(Candidate, u64)) -> Ordering {
    let left = u128::from(a.weight.max(1)) * u128::from(*b_log);
    let right = u128::from(b.weight.max(1)) * u128::from(*a_log);
    right.cmp(&left).then(a.server.cmp(&b.server))
}

/// `-log2(score / 2^64)` with [`FRACTION_BITS`] bits after the point, rounded up: at least 1.
fn negative_log2(score: u64) -> u64 {
    let score = score.max(1);
    let exponent = 63 - score.leading_zeros();
    // Mantissa in [1, 2) with 63 bits after the point; each squaring yields one bit of the log.
    let mut mantissa = score << score.leading_zeros();
    let mut fraction = 0u64;
    for _ in 0..FRACTION_BITS {
        let square = (u128::from(mantissa) * u128::from(mantissa)) >> 63;
        fraction <<= 1;
        if square >> 64 == 1 {
            fraction |= 1;
            mantissa = (square >> 1) as u64;
        } else {
            mantissa = square as u64;
        }
    }
    let log = (u64::from(exponent) << FRACTION_BITS) | fraction;
    (64 << FRACTION_BITS) - log
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const KEYS: u64 = 4_000;

    fn candidates(weights: &[u64]) -> Vec<Candidate> {
        let servers = (1..).map(|n| ServerId(n * 7919));
        servers
            .zip(weights)
            .map(|(server, &weight)| Candidate { server, weight })
            .collect()
    }

    fn primary(key: u64, candidates: &[Candidate]) -> ServerId {
        rank(&[b"cache", b"nr.psq", &key.to_le_bytes()], candidates)[0]
    }

    #[test]
    fn the_logarithm_matches_floating_point() {
        for score in [
            1,
            2,
            3,
            1 << 20,
            12_345_678_901,
            u64::MAX / 3,
            u64::MAX - 1,
            u64::MAX,
        ] {
            let exact = 64.0 - (score as f64).log2();
            let ours = negative_log2(score) as f64 / f64::from(1 << FRACTION_BITS);
            assert!((exact - ours).abs() < 1e-5, "{score}: {exact} {ours}");
        }
        assert!(negative_log2(u64::MAX) >= 1);
    }

    #[test]
    fn shares_follow_capacity() {
        let weights = [1 << 30, 1 << 30, 2 << 30, 4 << 30];
        let all = candidates(&weights);
        for (candidate, weight) in all.iter().zip(weights) {
            let held = (0..KEYS)
                .filter(|k| primary(*k, &all) == candidate.server)
                .count();
            let expected = KEYS as f64 * weight as f64 / (8u64 << 30) as f64;
            let error = (held as f64 - expected).abs() / expected;
            assert!(
                error < 0.15,
                "{candidate:?} holds {held}, expected {expected}"
            );
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]

        #[test]
        fn a_departing_server_moves_only_its_share(
            weights in prop::collection::vec(1u64..1 << 40, 2..10),
            pick in any::<prop::sample::Index>(),
        ) {
            let all = candidates(&weights);
            let gone = all[pick.index(all.len())].server;
            let rest: Vec<_> = all.iter().copied().filter(|c| c.server != gone).collect();
            for key in 0..300 {
                let before = rank(&[b"c", &u64::to_le_bytes(key)], &all);
                let after = rank(&[b"c", &u64::to_le_bytes(key)], &rest);
                let expected: Vec<_> = before.into_iter().filter(|s| *s != gone).collect();
                prop_assert_eq!(after, expected);
            }
        }

        #[test]
        fn order_of_candidates_does_not_matter(weights in prop::collection::vec(0u64..9, 1..8)) {
            let all = candidates(&weights);
            let mut turned = all.clone();
            turned.reverse();
            prop_assert_eq!(rank(&[b"k"], &all), rank(&[b"k"], &turned));
        }
    }
}
