//! The queue with its journal: what happened is on stable storage before anybody is told.

use std::path::Path;

use bafs_proto::time::Time;
use bafs_proto::{ErrorCode, Result};

use crate::event::{QueueDecision, QueueEvent};
use crate::journal::{QueueJournal, QueueStep};
use crate::logic::queue_state::QueueState;

/// A queue on stable storage.
#[derive(Debug)]
pub struct RecordedQueue {
    state: QueueState,
    journal: QueueJournal,
}

impl RecordedQueue {
    /// Opens the queue whose journal is at `path`, or begins one.
    ///
    /// # Errors
    /// As [`QueueJournal::open`].
    pub fn open(path: &Path) -> Result<Self> {
        let (journal, state) = QueueJournal::open(path)?;
        Ok(Self { state, journal })
    }

    /// What is known.
    pub fn state(&self) -> &QueueState {
        &self.state
    }

    /// Takes a fact; when this returns, it and the decisions are on stable storage.
    ///
    /// # Errors
    /// `NoSpaceBytes`: the disk is full, and the queue is as it was. Else as
    /// [`QueueJournal::append`]: the service must end then.
    pub fn record(&mut self, now: Time, event: QueueEvent) -> Result<Vec<QueueDecision>> {
        let decisions = self.state.step(now, &event);
        if event == QueueEvent::Ticked && decisions.is_empty() {
            return Ok(decisions);
        }
        let at = now;
        let step = QueueStep {
            at,
            event,
            decisions,
        };
        if let Err(error) = self.journal.append(&step, &self.state) {
            if error.code == ErrorCode::NoSpaceBytes {
                // The state is a step ahead.
                self.state = self.journal.read_state()?;
            }
            return Err(error);
        }
        Ok(step.decisions)
    }
}
