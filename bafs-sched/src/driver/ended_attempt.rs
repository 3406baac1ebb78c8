//! Which attempt a fact ends.

use crate::io::job_logs::{EndedAttempt, LoggedAttempt};
use crate::{Event, Scheduler};

/// The attempt that has ended, if that is the fact; the core has not been told.
pub(super) fn find_ended_attempt(scheduler: &Scheduler, event: &Event) -> Option<EndedAttempt> {
    let Event::JobEnded { execution, report } = event else {
        return None;
    };
    let (job, server) = scheduler.execution(*execution)?;
    let name = scheduler.workflow().job(job).name.clone();
    let node = scheduler.node(server).map(|node| node.name.clone());
    let number = scheduler.ended_attempts(job) + 1;
    let attempt = LoggedAttempt::new(name, number, node.unwrap_or_default(), report);
    Some(EndedAttempt {
        execution: *execution,
        server,
        attempt,
    })
}
