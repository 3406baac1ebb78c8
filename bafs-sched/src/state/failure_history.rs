//! What went wrong with a job: nothing with most. Decides nothing.

use std::collections::BTreeSet;
use std::ops::{Deref, DerefMut};

use bafs_proto::ids::ServerId;
use bafs_proto::time::Time;
use serde::{Deserialize, Serialize};

/// Failures of the environment of a job.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct EnvironmentFaults {
    /// As many as are not forgotten, and when the last one was.
    pub(crate) count: u32,
    pub(crate) last: Time,
    /// All of them.
    pub(crate) all: u32,
    /// Those that looked like a full disk.
    pub(crate) full_disks: u32,
    /// Where the last one was, if no success came since.
    pub(crate) last_on: Option<ServerId>,
    /// Nothing unless a home did not answer since it last succeeded.
    pub(crate) away: Option<Away>,
}

/// Attempts that found a home away.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(crate) struct Away {
    pub(crate) tries: u32,
    /// When the first of them ended.
    pub(crate) since: Time,
    /// When the last of them ended.
    pub(crate) last: Time,
}

/// What went wrong with a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Failures {
    /// Failures by its own fault.
    #[serde(default)]
    pub(crate) own_faults: u32,
    /// Tries that used up the memory which they asked for.
    #[serde(default)]
    pub(crate) used_up_memory: u32,
    #[serde(default)]
    pub(crate) environment: EnvironmentFaults,
    /// Nodes that cannot run it, however often they try.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) refused_by: BTreeSet<ServerId>,
    /// Nodes on which it failed by its own fault, as it seemed.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) failed_on: BTreeSet<ServerId>,
    /// Nodes on which its environment failed twice in a row.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) faulted_on: BTreeSet<ServerId>,
    /// Nodes on which it met a full disk, which blames nobody.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) full_on: BTreeSet<ServerId>,
    /// Nodes that refused it room for its volumes: what it reads there does not bind it to them.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) no_room_on: BTreeSet<ServerId>,
    /// Nodes that were lost or restarted while it ran, one after the other.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) killed: Vec<ServerId>,
}

const NONE: Failures = Failures {
    own_faults: 0,
    used_up_memory: 0,
    environment: EnvironmentFaults {
        count: 0,
        last: Time(0),
        all: 0,
        full_disks: 0,
        last_on: None,
        away: None,
    },
    refused_by: BTreeSet::new(),
    failed_on: BTreeSet::new(),
    faulted_on: BTreeSet::new(),
    full_on: BTreeSet::new(),
    no_room_on: BTreeSet::new(),
    killed: Vec::new(),
};

/// [`Failures`] that takes no room as long as there is none: a million jobs are looked at often.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub(crate) struct FailureHistory(Option<Box<Failures>>);

impl FailureHistory {
    /// Whether there surely were none.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Whether it runs there again only where it must: it failed, its environment did so twice, or
    /// it met a full disk.
    pub(crate) fn avoids(&self, server: ServerId) -> bool {
        let mut sets = [&self.failed_on, &self.faulted_on, &self.full_on].into_iter();
        sets.any(|set| set.contains(&server))
    }

    /// Whether there is a node that it avoids.
    pub(crate) fn avoids_any(&self) -> bool {
        let mut sets = [&self.failed_on, &self.faulted_on, &self.full_on].into_iter();
        sets.any(|set| !set.is_empty())
    }
}

impl Deref for FailureHistory {
    type Target = Failures;

    fn deref(&self) -> &Failures {
        static NO_FAILURES: Failures = NONE;
        self.0.as_deref().unwrap_or(&NO_FAILURES)
    }
}

impl DerefMut for FailureHistory {
    fn deref_mut(&mut self) -> &mut Failures {
        self.0.get_or_insert_with(|| Box::new(NONE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failure_history_is_empty_until_one_is_noted() {
        let mut failure_history = FailureHistory::default();
        assert!(
            failure_history.is_empty()
                && !failure_history.avoids_any()
                && failure_history.own_faults == 0
        );
        failure_history.full_on.insert(ServerId(7));
        assert!(
            !failure_history.is_empty()
                && failure_history.avoids(ServerId(7))
                && !failure_history.avoids(ServerId(8))
        );
    }
}
