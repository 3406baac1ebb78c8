//! Counters that a server publishes; they only grow.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// What a node counts, besides calls (`calls.NAME`).
pub const NODE_COUNTERS: &[&str] = &[
    "jobs_started",
    "jobs_ended",
    "volumes_created",
    "volumes_failed",
    "volumes_expired",
    "fill_files",
    "fill_bytes",
    "fill_received_bytes",
    "fill_digest_failures",
    "extract_files",
    "extract_bytes",
    "file_operations",
    "file_read_bytes",
    "file_written_bytes",
    "tree_handoffs",
    "handoff_connections",
    "handoff_refusals",
    "handoff_tickets",
    "mount_searches",
    "cache_served_to_peers_bytes",
    "cache_home_unique_bytes",
    "cache_recovered_bytes",
    "cache_hits_local",
    "cache_hit_local_bytes",
    "cache_hits_peer",
    "cache_hit_peer_bytes",
    "cache_home_reads",
    "cache_home_bytes",
    "cache_read_ahead_bytes",
    "cache_read_ahead_used_bytes",
    "cache_warmed_bytes",
    "cache_whole_files_opened",
    "cache_whole_files_refused",
    "cache_whole_files_verified",
    "cache_joined_fetches",
    "cache_digest_failures",
    "cache_digest_calls",
    "cache_fallbacks",
    "cache_bypassed_blocks",
    "cache_evicted_primary",
    "cache_evicted_secondary",
    "cache_evicted_for_full_disk",
    "cache_wait_us",
];

/// What a home server counts, besides calls.
pub const HOME_COUNTERS: &[&str] = &[
    "file_operations",
    "file_read_bytes",
    "file_written_bytes",
    "home_requests",
    "home_read_bytes",
    "home_written_bytes",
    "home_listed_bytes",
    "home_digest_bytes",
];

/// Counters by name. Cheap to clone; clones count together.
#[derive(Debug, Clone, Default)]
pub struct Counters {
    values: Arc<Mutex<BTreeMap<String, u64>>>,
    parent: Option<Arc<Self>>,
}

impl Counters {
    /// Counters with these names at 0: whoever watches them sees the first event as well.
    pub fn with_names(names: &[&str]) -> Self {
        let values = names.iter().map(|name| ((*name).to_owned(), 0)).collect();
        Self {
            values: Arc::new(Mutex::new(values)),
            parent: None,
        }
    }

    /// Counters of a part of what these count: what is added there is added here too.
    pub fn child(&self) -> Self {
        Self {
            values: Arc::default(),
            parent: Some(Arc::new(self.clone())),
        }
    }

    /// Adds to a counter, which starts at 0.
    pub fn add(&self, name: &str, amount: u64) {
        {
            let mut values = self.values.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(value) = values.get_mut(name) {
                *value += amount;
            } else {
                values.insert(name.to_owned(), amount);
            }
        }
        if let Some(whole) = &self.parent {
            whole.add(name, amount);
        }
    }

    /// All counters with their present values.
    pub fn snapshot(&self) -> BTreeMap<String, u64> {
        self.values
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// What a server publishes at one moment.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Metrics {
    /// Numbers that only grow while the server lives, by name.
    pub counters: BTreeMap<String, u64>,
    /// Numbers that go up and down, by name.
    pub gauges: BTreeMap<&'static str, u64>,
}

/// Reads what a server publishes; takes no longer than a lock.
pub type ReadMetrics = Arc<dyn Fn() -> Metrics + Send + Sync>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_parent_counter_sums_its_children() {
        let whole = Counters::default();
        let (one, two) = (whole.child(), whole.child());
        one.add("a", 2);
        two.add("a", 3);
        whole.add("b", 1);
        assert_eq!(one.snapshot()["a"], 2);
        assert_eq!(whole.snapshot()["a"], 5);
        assert!(!two.snapshot().contains_key("b"));
    }
}
