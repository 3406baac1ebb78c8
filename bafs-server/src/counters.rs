//! Counters that a server publishes; they only grow.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Counters by name. Cheap to clone; clones count together.
#[derive(Debug, Clone, Default)]
pub struct Counters(Arc<Mutex<BTreeMap<String, u64>>>);

impl Counters {
    /// Adds to a counter, which starts at 0.
    pub fn add(&self, name: &str, amount: u64) {
        let mut values = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(value) = values.get_mut(name) {
            *value += amount;
        } else {
            values.insert(name.to_owned(), amount);
        }
    }

    /// All counters with their present values.
    pub fn snapshot(&self) -> BTreeMap<String, u64> {
        self.0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}
