//! Fenced epochs and deleted trees that are remembered, to answer late callers precisely.

use std::collections::{BTreeSet, VecDeque};

/// Most that are remembered.
const RECENT_MAX: usize = 4096;

/// The last few of something, oldest forgotten first.
pub(super) struct RecentSet<T> {
    set: BTreeSet<T>,
    order: VecDeque<T>,
}

impl<T> Default for RecentSet<T> {
    fn default() -> Self {
        Self {
            set: BTreeSet::new(),
            order: VecDeque::new(),
        }
    }
}

impl<T: Clone + Ord> RecentSet<T> {
    pub(super) fn insert(&mut self, item: T) {
        if self.set.insert(item.clone()) {
            self.order.push_back(item);
        }
        if self.order.len() > RECENT_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.set.remove(&oldest);
        }
    }

    pub(super) fn contains(&self, item: &T) -> bool {
        self.set.contains(item)
    }
}
