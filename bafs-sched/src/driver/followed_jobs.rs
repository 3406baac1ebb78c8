//! Jobs whose output somebody follows: asked of their nodes while they run. The run goes on
//! meanwhile, and does not depend on it.

use bafs_proto::ids::ExecutionId;
use bafs_workflow::JobIndex;

use super::{Driver, wall_time_now};
use crate::io::followed_output::{read_requests, write_answer};
use crate::io::user_commands::find_job;

impl Driver {
    /// Shows what followed jobs printed so far, unless the last answers are still under way.
    pub(super) fn show_followed_jobs(&mut self) {
        let Some(logs) = self.output_collector.directory() else {
            return;
        };
        let is_busy = |task: &tokio::task::JoinHandle<()>| !task.is_finished();
        if self.following.as_ref().is_some_and(is_busy) {
            return;
        }
        let names = read_requests(&logs, wall_time_now());
        let found = names.iter().filter_map(|name| {
            let job = find_job(self.scheduler.workflow(), name)?;
            self.find_running(job)
        });
        let running: Vec<_> = found.collect();
        if running.is_empty() {
            return;
        }
        let servers = self.servers.clone();
        self.following = Some(tokio::spawn(async move {
            for (name, attempt, execution, address) in running {
                // Before a job prints something, its node has nothing.
                let Ok(printed) = servers.read_output(&address, execution).await else {
                    continue;
                };
                let logs = logs.clone();
                let writing = tokio::task::spawn_blocking(move || {
                    write_answer(&logs, (&name, attempt), &printed)
                });
                if let Ok(Err(error)) = writing.await {
                    tracing::debug!(%error, "the output of a followed job is not shown");
                }
            }
        }));
    }

    /// A job's running attempt: name, number, execution and address.
    fn find_running(&self, job: JobIndex) -> Option<(String, u32, ExecutionId, String)> {
        let (execution, server) = self.scheduler.running_attempt(job)?;
        let name = self.scheduler.workflow().job(job).name.clone();
        let number = self.scheduler.ended_attempts(job) + 1;
        let address = self.server_address(server).address;
        Some((name, number, execution, address))
    }
}
