//! Makes steps of the core durable, and what the next scheduler goes on with; then the driver
//! follows the events itself.

use std::sync::PoisonError;

use bafs_proto::{Error, ErrorCode, Result};

use super::Driver;
use super::journal_opening::take_snapshot;
use crate::{Event, RecordedStep};

impl Driver {
    /// Makes steps durable, with a snapshot when one is due.
    pub(super) async fn write_steps(
        &mut self,
        steps: Vec<RecordedStep>,
    ) -> Result<Vec<RecordedStep>> {
        let gone = || Error::new(ErrorCode::ServerFault, "the journal is no longer usable");
        let mut journal = self.journal.take().ok_or_else(gone)?;
        let written =
            tokio::task::spawn_blocking(move || journal.append(&steps).map(|()| (journal, steps)));
        let (journal, steps) = written.await.map_err(|_| gone())??;
        let is_due = journal.is_snapshot_due();
        self.journal = Some(journal);
        if is_due {
            self.write_snapshot()?;
        }
        Ok(steps)
    }

    /// Writes what the next scheduler goes on with.
    pub(super) fn write_snapshot(&mut self) -> Result<()> {
        let homes = self.servers.homes.lock();
        let homes = homes.unwrap_or_else(PoisonError::into_inner);
        let ended = self.output_collector.ended_attempts();
        let snapshot = take_snapshot(&self.scheduler, &homes, ended);
        drop(homes);
        match &mut self.journal {
            Some(journal) => journal.append_snapshot(&snapshot),
            None => Ok(()),
        }
    }

    /// Does what follows for the driver itself from a fact that the core knows.
    pub(super) fn follow_event(&mut self, event: &Event) {
        match event {
            Event::JobStarted { execution } => {
                if let Some((_, server)) = self.scheduler.execution(*execution) {
                    self.watch_execution(server, *execution);
                }
            }
            Event::NodesListed { .. } => self.update_addresses(),
            Event::ServerSilent { server } => self.stop_watching(*server),
            Event::HomeListed { .. } => {
                let homes = self.servers.homes.lock();
                let mut homes = homes.unwrap_or_else(PoisonError::into_inner);
                homes.note_journaled(event);
            }
            _ => {}
        }
    }
}
