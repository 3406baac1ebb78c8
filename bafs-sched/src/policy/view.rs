//! What a policy sees of the state.

use std::ops::Deref;

use crate::state::scheduler_state::State;

/// The state, for reading: cheap to copy.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View<'s>(&'s State);

impl<'s> View<'s> {
    pub(crate) fn new(state: &'s State) -> Self {
        Self(state)
    }
}

impl Deref for View<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        self.0
    }
}
