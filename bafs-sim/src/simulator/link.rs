//! A shared link (or disk): concurrent flows get equal parts of its rate. Integers only, so equal
//! inputs give equal times on every machine. It knows neither the owners of its flows nor other
//! links.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap, VecDeque};

/// Microseconds in a second: rates are bytes per second, times are in microseconds.
pub(super) const SECOND_US: u64 = 1_000_000;

/// Rates of flows are counted in millionths of a byte per second, so that the sum over many flows
/// on a slow link is its rate.
const RATE_SCALE: u64 = 1_000_000;
/// Bytes are counted in these parts: a flow of one such rate gets one in a microsecond.
const BYTE_SCALE: u128 = SECOND_US as u128 * RATE_SCALE as u128;

/// Names a flow of one link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FlowId {
    number: u64,
    /// Where it ends, so that it is found without a search.
    end: u128,
}

/// A link. `T` is the owner of a flow.
///
/// All flows get the same rate, so one number serves for all: the parts that a flow since the start
/// would have by now. A flow ends when that number has grown by its bytes.
#[derive(Debug, Clone)]
pub(super) struct Link<T> {
    rate: u64,
    /// The most that one flow can take, in bytes per second.
    flow_rate_max: u64,
    /// Latency, in microseconds.
    latency_us: u64,
    /// The link's bytes of so many microseconds of rest cross at once afterwards.
    burst_us: u64,
    /// Parts of bytes that cross at once, for all flows together.
    burst_credit: u128,
    /// When `served` was right, in microseconds.
    served_at_us: u64,
    /// Parts of a byte that each flow has got since the beginning.
    served: u128,
    /// Flows by their ends.
    flows: BinaryHeap<Reverse<(u128, u64, T)>>,
    /// Flows that have crossed and arrive later: when, the first one first.
    arriving: VecDeque<(u64, u64, T)>,
    /// Flows that were cut off and are still in `flows`.
    cut_flows: BTreeSet<u64>,
    next_number: u64,
    /// Bytes of flows; for aborted flows the transferred part.
    pub(super) crossed_bytes: u128,
}

impl<T: Copy + Ord> Link<T> {
    /// A link of `rate` bytes per second, of which one flow can take `flow_rate_max`.
    pub(super) fn new(rate: u64, flow_rate_max: u64) -> Self {
        Self {
            rate: rate.max(1),
            flow_rate_max: flow_rate_max.max(1),
            latency_us: 0,
            burst_us: 0,
            burst_credit: 0,
            served_at_us: 0,
            served: 0,
            flows: BinaryHeap::new(),
            arriving: VecDeque::new(),
            cut_flows: BTreeSet::new(),
            next_number: 0,
            crossed_bytes: 0,
        }
    }

    /// The same link, on which everything arrives later than by its rate.
    pub(super) fn with_latency(self, latency_us: u64) -> Self {
        Self { latency_us, ..self }
    }

    /// The same link with a burst: the bytes of its last `burst_us` of rest cross at once. It is
    /// rested at the beginning.
    pub(super) fn with_burst(self, burst_us: u64) -> Self {
        let saved = u128::from(burst_us) * self.total_rate();
        Self {
            burst_us,
            burst_credit: saved,
            ..self
        }
    }

    /// Bytes per second.
    pub(super) fn rate(&self) -> u64 {
        self.rate
    }

    /// The most that one flow can take, in bytes per second.
    pub(super) fn flow_rate_max(&self) -> u64 {
        self.flow_rate_max
    }

    /// Whether no flow takes any of its rate.
    pub(super) fn is_idle(&self) -> bool {
        self.flows.len() == self.cut_flows.len()
    }

    /// Gives the link another rate from now on.
    pub(super) fn set_rate(&mut self, now: u64, rate: u64) {
        self.advance(now);
        self.rate = rate.max(1);
    }

    /// Starts a flow.
    pub(super) fn start_flow(&mut self, now: u64, bytes: u64, owner: T) -> FlowId {
        self.advance(now);
        let number = self.next_number;
        self.next_number += 1;
        self.crossed_bytes += u128::from(bytes);
        let end = self.served + u128::from(bytes) * BYTE_SCALE;
        self.flows.push(Reverse((end, number, owner)));
        self.spend_burst();
        FlowId { number, end }
    }

    /// Ends a flow before its time; answers how many bytes of it did not cross.
    pub(super) fn cut_flow(&mut self, now: u64, id: FlowId) -> u64 {
        self.advance(now);
        let left = id.end.saturating_sub(self.served).div_ceil(BYTE_SCALE);
        let mut arriving = self.arriving.iter();
        if left == 0
            && let Some(at) = arriving.position(|(_, number, _)| *number == id.number)
        {
            self.arriving.remove(at);
            return 0;
        }
        self.crossed_bytes -= left;
        self.cut_flows.insert(id.number);
        self.drop_cut_flows();
        left as u64
    }

    /// When to look for the next flow that ends, if nothing changes.
    pub(super) fn next_end(&self) -> Option<u64> {
        let arrival = self.arriving.front().map(|(at, ..)| *at);
        arrival.into_iter().chain(self.next_crossed()).min()
    }

    fn next_crossed(&self) -> Option<u64> {
        let Reverse((end, ..)) = self.flows.peek()?;
        let left = end.saturating_sub(self.served);
        let wait = left.div_ceil(self.flow_rate());
        Some(
            self.served_at_us
                .saturating_add(u64::try_from(wait).unwrap_or(u64::MAX)),
        )
    }

    /// The next flow that has ended by `now`.
    pub(super) fn take_ended(&mut self, now: u64) -> Option<T> {
        self.advance(now);
        while let Some(&Reverse((end, id, owner))) = self.flows.peek()
            && end <= self.served
        {
            self.flows.pop();
            self.drop_cut_flows();
            if self.latency_us == 0 {
                return Some(owner);
            }
            let arrival = now.saturating_add(self.latency_us);
            self.arriving.push_back((arrival, id, owner));
            // The rest of the burst remains for the next flow.
            self.spend_burst();
        }
        let (at, ..) = self.arriving.front()?;
        let has_arrived = *at <= now;
        let arrived = has_arrived.then(|| self.arriving.pop_front());
        arrived.flatten().map(|(.., owner)| owner)
    }

    /// Rate of each flow, in parts of a byte per microsecond.
    fn flow_rate(&self) -> u128 {
        let flows = (self.flows.len() - self.cut_flows.len()).max(1) as u128;
        let most = u128::from(self.flow_rate_max) * u128::from(RATE_SCALE);
        (self.total_rate() / flows).clamp(1, most)
    }

    /// Rate of all flows together.
    fn total_rate(&self) -> u128 {
        u128::from(self.rate) * u128::from(RATE_SCALE)
    }

    fn advance(&mut self, now: u64) {
        let passed = now.saturating_sub(self.served_at_us);
        if !self.flows.is_empty() {
            self.served += u128::from(passed) * self.flow_rate();
            self.spend_burst();
        } else if self.burst_us > 0 {
            let most = u128::from(self.burst_us) * self.total_rate();
            let rested = u128::from(passed) * self.total_rate();
            self.burst_credit = most.min(self.burst_credit + rested);
        }
        self.served_at_us = self.served_at_us.max(now);
    }

    /// Spends the burst until it ends a flow.
    fn spend_burst(&mut self) {
        if self.burst_credit == 0 {
            return;
        }
        let Some(Reverse((end, ..))) = self.flows.peek() else {
            return;
        };
        let flows = (self.flows.len() - self.cut_flows.len()).max(1) as u128;
        let each = end
            .saturating_sub(self.served)
            .min(self.burst_credit / flows);
        self.served += each;
        // An indivisible remainder is less than a byte.
        self.burst_credit = match self.burst_credit - each * flows {
            left if left < flows => 0,
            left => left,
        };
    }

    fn drop_cut_flows(&mut self) {
        while let Some(Reverse((_, id, _))) = self.flows.peek()
            && self.cut_flows.remove(id)
        {
            self.flows.pop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow_ends(link: &mut Link<u8>) -> Vec<(u64, u8)> {
        let mut found = Vec::new();
        while let Some(at) = link.next_end() {
            while let Some(owner) = link.take_ended(at) {
                found.push((at / 1_000, owner));
            }
        }
        found
    }

    #[test]
    fn flows_share_the_link_equally() {
        let mut link = Link::new(100, 100);
        link.start_flow(0, 100, 1);
        link.start_flow(0, 300, 2);
        // Both at 50 until 2 s, then one at 100: 200 bytes more.
        assert_eq!(flow_ends(&mut link), [(2_000, 1), (4_000, 2)]);
        assert_eq!(link.crossed_bytes, 400);
    }

    #[test]
    fn many_flows_share_the_rate_of_slow_links() {
        for rate in [7, 19_000] {
            let mut link = Link::new(rate, 100);
            for at in 0..100 {
                link.start_flow(0, 1_000, at);
            }
            let last = flow_ends(&mut link).last().map(|(at, _)| *at);
            assert_eq!(last, Some(100_000 * 1_000 / rate.min(10_000)), "{rate}");
        }
    }

    #[test]
    fn single_flow_has_its_own_limit() {
        let mut link = Link::new(100, 10);
        link.start_flow(0, 100, 1);
        link.start_flow(5 * SECOND_US, 100, 2);
        assert_eq!(flow_ends(&mut link), [(10_000, 1), (15_000, 2)]);
    }

    #[test]
    fn latency_delays_arrival_but_frees_the_link() {
        let mut link = Link::new(100, 100).with_latency(500_000);
        link.start_flow(0, 100, 1);
        link.start_flow(0, 300, 2);
        assert_eq!(flow_ends(&mut link), [(2_500, 1), (4_500, 2)]);
        let late = link.start_flow(5 * SECOND_US, 100, 3);
        assert_eq!(link.take_ended(6 * SECOND_US), None);
        assert!(link.is_idle(), "it is only on its way");
        assert_eq!(link.cut_flow(6 * SECOND_US, late), 0);
        assert_eq!(
            (link.take_ended(7 * SECOND_US), link.next_end()),
            (None, None)
        );
        assert_eq!(link.crossed_bytes, 500);
    }

    #[test]
    fn idle_link_saves_a_bounded_burst() {
        // Half a second's bytes at most.
        let mut link = Link::new(100, 100).with_burst(500_000);
        link.start_flow(0, 100, 1);
        assert_eq!(flow_ends(&mut link), [(500, 1)]);
        link.start_flow(SECOND_US, 20, 2);
        assert_eq!(link.next_end(), Some(SECOND_US), "within what it saved");
        assert_eq!(link.take_ended(SECOND_US), Some(2));
        // Thirty remain for the next flow.
        link.start_flow(SECOND_US, 40, 3);
        link.start_flow(SECOND_US, 115, 4);
        assert_eq!(flow_ends(&mut link), [(1_200, 3), (2_250, 4)]);
        link.start_flow(10 * SECOND_US, 100, 5);
        assert_eq!(
            flow_ends(&mut link),
            [(10_500, 5)],
            "a long rest saves no more"
        );
    }

    #[test]
    fn concurrent_flows_share_the_burst_despite_latency() {
        let mut link = Link::new(100, 100)
            .with_burst(500_000)
            .with_latency(200_000);
        link.start_flow(0, 20, 1);
        link.start_flow(0, 10, 2);
        assert_eq!(flow_ends(&mut link), [(200, 1), (200, 2)]);
    }

    #[test]
    fn cut_flow_leaves_its_rate_to_others() {
        let mut link = Link::new(100, 100);
        let first = link.start_flow(0, 1_000, 1);
        link.start_flow(0, 200, 2);
        assert_eq!(link.cut_flow(2 * SECOND_US, first), 900);
        assert_eq!(link.crossed_bytes, 300);
        assert_eq!(flow_ends(&mut link), [(3_000, 2)]);
        assert_eq!(link.next_end(), None);
    }

    #[test]
    fn cut_flow_returns_its_uncrossed_bytes() {
        let mut link = Link::new(10, 10).with_latency(SECOND_US);
        let (short, long) = (link.start_flow(0, 10, 1), link.start_flow(0, 30, 2));
        // Each has five bytes in a second.
        assert_eq!(link.take_ended(2 * SECOND_US), None, "still on its way");
        assert_eq!(link.cut_flow(2 * SECOND_US, short), 0);
        assert_eq!(link.cut_flow(3 * SECOND_US, long), 10);
        assert_eq!(flow_ends(&mut link), []);
        assert_eq!(link.crossed_bytes, 30);
    }
}
