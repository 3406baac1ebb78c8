//! A journal whose steps are written while the core decides the next ones.

use bafs_proto::{Error, ErrorCode, Result};
use tokio::task::JoinHandle;

use super::{Journal, Snapshot};
use crate::RecordedStep;

/// What a write brings back.
type Written = Result<(Journal, Vec<RecordedStep>)>;

/// A journal of which at most one frame is being written, on a blocking thread.
pub struct PipelinedJournal {
    /// Nothing while a frame is being written, and after a write that failed.
    idle: Option<Journal>,
    write: Option<JoinHandle<Written>>,
    is_snapshot_due: bool,
}

impl PipelinedJournal {
    /// That journal, of which nothing is being written.
    pub fn new(journal: Journal) -> Self {
        Self {
            is_snapshot_due: journal.is_snapshot_due(),
            idle: Some(journal),
            write: None,
        }
    }

    /// Whether a frame is being written.
    pub fn is_writing(&self) -> bool {
        self.write.is_some()
    }

    /// Whether a snapshot was due after the last frame that is durable.
    pub fn is_snapshot_due(&self) -> bool {
        self.is_snapshot_due
    }

    /// Begins to make steps durable. Needs a Tokio runtime.
    ///
    /// # Errors
    /// `ServerFault` while a frame is being written, or after a write that failed.
    pub fn begin_append(&mut self, steps: Vec<RecordedStep>) -> Result<()> {
        let mut journal = self.idle.take().ok_or_else(unusable)?;
        self.write = Some(tokio::task::spawn_blocking(move || {
            journal.append(&steps)?;
            Ok((journal, steps))
        }));
        Ok(())
    }

    /// Waits until the frame is durable, and answers its steps. To drop the future loses nothing.
    ///
    /// # Errors
    /// `ServerFault` if it could not be written; the scheduler must stop then. The same if nothing
    /// is being written.
    pub async fn wait_written(&mut self) -> Result<Vec<RecordedStep>> {
        let write = self.write.as_mut().ok_or_else(unusable)?;
        let written = write.await;
        self.write = None;
        let (journal, steps) = written.map_err(|_| unusable())??;
        self.is_snapshot_due = journal.is_snapshot_due();
        self.idle = Some(journal);
        Ok(steps)
    }

    /// Whether anything was written since the last snapshot; nothing is being written.
    pub fn has_steps_since_snapshot(&self) -> bool {
        let idle = self.idle.as_ref();
        idle.is_some_and(Journal::has_steps_since_snapshot)
    }

    /// Begins to write a snapshot, as [`Self::begin_append`] begins to write steps. No step
    /// becomes durable with it.
    ///
    /// # Errors
    /// `ServerFault` while a frame is being written, or after a write that failed.
    pub fn begin_snapshot(&mut self, snapshot: Snapshot) -> Result<()> {
        let mut journal = self.idle.take().ok_or_else(unusable)?;
        self.is_snapshot_due = false;
        self.write = Some(tokio::task::spawn_blocking(move || {
            journal.append_snapshot(snapshot)?;
            Ok((journal, Vec::new()))
        }));
        Ok(())
    }
}

fn unusable() -> Error {
    Error::new(ErrorCode::ServerFault, "the journal is no longer usable")
}
