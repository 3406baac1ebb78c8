//! What runs teach, as values: the last measurements of each kind, of which the bounds count.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

/// Measurements that are kept: older ones are of other data or machines.
const SAMPLES_MAX: usize = 16;

/// The last measurements of one thing. A plan fits their bounds, not their mean.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct Samples(VecDeque<u64>);

impl Samples {
    /// Adds a measurement.
    pub(crate) fn add(&mut self, value: u64) {
        self.0.push_back(value);
        if self.0.len() > SAMPLES_MAX {
            self.0.pop_front();
        }
    }

    /// The smallest and the largest one; nothing if there is none.
    pub(crate) fn interval(&self) -> Option<(u64, u64)> {
        Some((*self.0.iter().min()?, *self.0.iter().max()?))
    }

    /// The largest one.
    pub(crate) fn upper_bound(&self) -> Option<u64> {
        self.interval().map(|(_, upper)| upper)
    }

    /// The smallest one: what a plan may count on of a rate.
    pub(crate) fn lower_bound(&self) -> Option<u64> {
        self.interval().map(|(lower, _)| lower)
    }
}

/// A program, in jobs that are named alike.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct LearnedProgram {
    /// Executions that ended.
    pub(crate) executions: u64,
    /// Of them those that failed.
    pub(crate) failures: u64,
    /// Time of computing of those that succeeded, in milliseconds.
    pub(crate) compute_ms: Samples,
    /// The same with the time of waiting for data.
    pub(crate) wall_ms: Samples,
    /// Bytes that they read and wrote.
    pub(crate) read_bytes: Samples,
    pub(crate) written_bytes: Samples,
}

/// A data set: the source of caches, or the scratch volumes of a workflow that are named alike.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct LearnedVolume {
    /// Bytes and files that it held, at least.
    pub(crate) used_bytes: Samples,
    pub(crate) used_files: Samples,
}

/// A node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct LearnedNode {
    /// Jobs whose last execution was there.
    pub(crate) executions: u64,
    /// Of them those that failed.
    pub(crate) failures: u64,
}

/// The links of a cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct LearnedLinks {
    /// Rate of the link to home, in bytes per second.
    pub(crate) home_bytes_per_s: Samples,
    /// Rate of each node's link.
    pub(crate) local_bytes_per_s: Samples,
}

/// A name without its numbers: jobs of one loop are one family.
pub(super) fn family_of(name: &str) -> String {
    let mut family = String::new();
    for letter in name.chars() {
        match letter.is_ascii_digit() {
            true if family.ends_with('#') => {}
            true => family.push('#'),
            false => family.push(letter),
        }
    }
    family
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_come_from_the_last_measurements() {
        let mut samples = Samples::default();
        assert_eq!(samples.interval(), None);
        for value in [1_000, 10, 20, 15] {
            samples.add(value);
        }
        assert_eq!(samples.interval(), Some((10, 1_000)));
        (0..SAMPLES_MAX).for_each(|_| samples.add(12));
        assert_eq!(samples.interval(), Some((12, 12)));
    }

    #[test]
    fn jobs_of_a_loop_are_one_family() {
        assert_eq!(family_of("align12"), family_of("align7"));
        assert_eq!(family_of("s1.part2"), "s#.part#");
    }
}
