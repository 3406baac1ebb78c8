//! Makes steps of the core durable, and what the next scheduler goes on with; then the driver
//! follows the events itself.

use std::sync::PoisonError;

use bafs_proto::Result;

use super::Driver;
use super::journal_opening::take_snapshot;
use crate::{Event, RecordedStep};

impl Driver {
    /// Waits until what is being written is durable, and then does what follows from it.
    pub(super) async fn finish_write(&mut self) -> Result<()> {
        if self.journal.is_writing() {
            let steps = self.journal.wait_written().await?;
            self.follow_steps(steps);
        }
        Ok(())
    }

    /// Does what follows from steps that are durable.
    pub(super) fn follow_steps(&mut self, steps: Vec<RecordedStep>) {
        for ended in std::mem::take(&mut self.unwritten_attempts) {
            self.collect_output(ended);
        }
        for step in &steps {
            self.follow_event(&step.event);
        }
        for action in steps.into_iter().flat_map(|step| step.actions) {
            self.execute_action(action);
        }
    }

    /// Begins to write what the next scheduler goes on with. Nothing may be being written.
    pub(super) fn begin_snapshot(&mut self) -> Result<()> {
        let homes = self.servers.homes.lock();
        let homes = homes.unwrap_or_else(PoisonError::into_inner);
        let ended = self.output_collector.ended_attempts();
        let snapshot = take_snapshot(&self.scheduler, &homes, ended);
        drop(homes);
        self.journal.begin_snapshot(snapshot)
    }

    /// Does what follows for the driver itself from a fact that the core knows.
    fn follow_event(&mut self, event: &Event) {
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
