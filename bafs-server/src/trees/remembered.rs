//! Fenced epochs and deleted trees that are remembered, to answer late callers precisely.

use std::collections::{BTreeSet, VecDeque};

/// Most that are remembered.
const REMEMBERED_MAX: usize = 4096;

/// The last few of something, oldest forgotten first.
pub(super) struct Remembered<T> {
    set: BTreeSet<T>,
    order: VecDeque<T>,
}

impl<T> Default for Remembered<T> {
    fn default() -> Self {
        Self {
            set: BTreeSet::new(),
            order: VecDeque::new(),
        }
    }
}

impl<T: Clone + Ord> Remembered<T> {
    pub(super) fn insert(&mut self, item: T) {
        if self.set.insert(item.clone()) {
            self.order.push_back(item);
        }
        if self.order.len() > REMEMBERED_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.set.remove(&oldest);
        }
    }

    pub(super) fn contains(&self, item: &T) -> bool {
        self.set.contains(item)
    }
}
