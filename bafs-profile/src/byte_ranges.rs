//! Sets of bytes of a file, for counts of different bytes.

use std::collections::BTreeMap;

/// Bytes of a file: ranges that neither overlap nor touch, by their first byte.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ByteRanges(BTreeMap<u64, u64>);

impl ByteRanges {
    /// Adds the bytes from `start` up to `end`.
    pub(crate) fn insert(&mut self, (mut start, mut end): (u64, u64)) {
        if start >= end {
            return;
        }
        if let Some((&before, &until)) = self.0.range(..=start).next_back()
            && until >= start
        {
            if until >= end {
                return;
            }
            start = before;
        }
        while let Some((&next, &until)) = self.0.range(start..=end).next() {
            self.0.remove(&next);
            end = end.max(until);
        }
        self.0.insert(start, end);
    }

    /// How many different bytes there are.
    pub(crate) fn count_bytes(&self) -> u64 {
        self.0.iter().map(|(start, end)| end - start).sum()
    }

    /// How many blocks of a size hold one of the bytes.
    pub(crate) fn count_blocks(&self, block_bytes: u64) -> u64 {
        let mut last = None;
        let mut blocks = 0;
        for (start, end) in &self.0 {
            let (first, until) = (start / block_bytes, (end - 1) / block_bytes);
            let is_counted = last == Some(first);
            blocks += until - first + u64::from(!is_counted);
            last = Some(until);
        }
        blocks
    }

    /// Adds all bytes of another set.
    pub(crate) fn merge(&mut self, other: &Self) {
        for (start, end) in &other.0 {
            self.insert((*start, *end));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_match_a_bitmap() {
        let mut numbers: u64 = 7;
        let mut next = |bound: u64| {
            numbers = numbers
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (numbers >> 33) % bound
        };
        for _ in 0..200 {
            let (mut ranges, mut bits) = (ByteRanges::default(), [false; 64]);
            for _ in 0..12 {
                let start = next(64);
                let end = start + next(64 - start + 1);
                ranges.insert((start, end));
                bits[start as usize..end as usize].fill(true);
                assert_eq!(
                    ranges.count_bytes(),
                    bits.iter().filter(|it| **it).count() as u64
                );
                let blocks = bits.chunks(4).filter(|block| block.contains(&true));
                assert_eq!(ranges.count_blocks(4), blocks.count() as u64);
            }
        }
    }
}
