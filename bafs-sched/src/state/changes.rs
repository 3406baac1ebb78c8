//! What changed since it was last looked at.

/// Changes that are noted one by one: where nobody asks, as with a strategy's rules, they are not
/// kept.
pub(crate) const CHANGED_MAX: usize = 4_096;

/// What changed since it was asked for, of which nothing is known when it was too much. Part of no
/// state, as what it is for.
#[derive(Debug, Clone)]
pub(crate) struct Changed<T> {
    pub(crate) some: Vec<T>,
    pub(crate) is_any: bool,
}

impl<T> Default for Changed<T> {
    fn default() -> Self {
        Self {
            some: Vec::new(),
            is_any: false,
        }
    }
}

impl<T> PartialEq for Changed<T> {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl<T: PartialEq> Changed<T> {
    pub(crate) fn note(&mut self, changed: T) {
        if self.is_any || self.some.last() == Some(&changed) {
            return;
        }
        match self.some.len() == CHANGED_MAX {
            true => self.note_all(),
            false => self.some.push(changed),
        }
    }

    /// All may have changed.
    pub(crate) fn note_all(&mut self) {
        self.some.clear();
        self.is_any = true;
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.some.is_empty() && !self.is_any
    }

    /// From now on nothing has changed.
    pub(crate) fn forget(&mut self) {
        self.some.clear();
        self.is_any = false;
    }

    /// All that changed; nothing when anything may have.
    pub(crate) fn known(&self) -> Option<&[T]> {
        (!self.is_any).then_some(&self.some)
    }
}
