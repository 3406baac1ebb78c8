//! A token bucket as arithmetic: how long a transfer must wait. Reads no clock.

/// Nanoseconds in a second.
const SECOND_NS: u64 = 1_000_000_000;

/// Unused capacity is kept for so long, in nanoseconds: the longest burst.
pub const BURST_NS: u64 = SECOND_NS / 5;

/// Limits a flow of bytes. First come, first served: each taker waits for those before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenBucket {
    bytes_per_s: u64,
    /// When everything that was taken so far has flowed, in nanoseconds.
    drained_at_ns: u64,
}

impl TokenBucket {
    /// A bucket that lets `bytes_per_s` flow, at least 1.
    pub fn new(bytes_per_s: u64) -> Self {
        Self {
            bytes_per_s: bytes_per_s.max(1),
            drained_at_ns: 0,
        }
    }

    /// Takes `bytes` at the time `now_ns` and gives the nanoseconds that their owner must wait;
    /// `None`, and nothing is taken, when that is more than `wait_ns_max`.
    pub fn take(&mut self, now_ns: u64, bytes: u64, wait_ns_max: u64) -> Option<u64> {
        let cost_ns = u128::from(bytes) * u128::from(SECOND_NS);
        let cost_ns = cost_ns.div_ceil(u128::from(self.bytes_per_s));
        let cost_ns = u64::try_from(cost_ns).unwrap_or(u64::MAX);
        let start_ns = self.drained_at_ns.max(now_ns.saturating_sub(BURST_NS));
        let clear_at_ns = start_ns.saturating_add(cost_ns);
        let wait_ns = clear_at_ns.saturating_sub(now_ns);
        if wait_ns > wait_ns_max {
            return None;
        }
        self.drained_at_ns = clear_at_ns;
        Some(wait_ns)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const START_NS: u64 = 1_000 * SECOND_NS;

    #[test]
    fn an_idle_bucket_allows_exactly_one_burst() {
        let mut bucket = TokenBucket::new(1000);
        assert_eq!(bucket.take(START_NS, 200, u64::MAX), Some(0));
        assert_eq!(bucket.take(START_NS, 1000, u64::MAX), Some(SECOND_NS));
        assert_eq!(
            bucket.take(START_NS, 500, u64::MAX),
            Some(SECOND_NS * 3 / 2)
        );
    }

    #[test]
    fn a_refused_request_takes_no_tokens() {
        let mut bucket = TokenBucket::new(1000);
        assert_eq!(bucket.take(START_NS, 5000, SECOND_NS), None);
        assert_eq!(bucket.take(START_NS, 200, 0), Some(0));
        assert_eq!(bucket.take(START_NS, u64::MAX, SECOND_NS), None);
    }

    proptest! {
        /// Whatever is asked when, no stretch of time lets more flow than its length and one burst.
        #[test]
        fn the_flow_never_exceeds_rate_plus_burst(
            rate in 1u64..1 << 32,
            asks in proptest::collection::vec((0u64..SECOND_NS, 0u64..1 << 22), 1..60),
        ) {
            let mut bucket = TokenBucket::new(rate);
            let mut now = START_NS;
            let mut flows = Vec::new();
            for (pause, bytes) in asks {
                now += pause;
                let wait = bucket.take(now, bytes, u64::MAX).expect("no bound on waiting");
                flows.push((now + wait, bytes));
            }
            for (first, (begin, _)) in flows.iter().enumerate() {
                let mut sum = 0u128;
                for (end, bytes) in &flows[first..] {
                    sum += u128::from(*bytes);
                    // The first transfer of the stretch flowed before its beginning.
                    let allowed_ns = end - begin + BURST_NS;
                    let allowed = u128::from(allowed_ns) * u128::from(rate) / u128::from(SECOND_NS);
                    let own = u128::from(flows[first].1);
                    prop_assert!(sum <= allowed + own + 1, "{sum} > {allowed} + {own}");
                }
            }
        }
    }
}
