//! The runs of a queue of workflows for the API: those that have begun, by the journals in their
//! directories. The queue says who may see and steer which.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use bafs_api::{
    HistoryPage, JobDetails, LogView, MetricsView, PageServer, RunCommand, RunSource, RunSummary,
    RunView, start_server,
};
use bafs_proto::{Error, ErrorCode, Result};
use bafs_queue::{QueueControl, Requester, WorkflowDetails, WorkflowId};

use super::followed_run::{FollowedPlace, FollowedRun};
use super::traffic_meter::TrafficMeter;
use crate::logs;

/// Runs that are followed at once: each takes the memory of a scheduler. Those that nobody asked
/// for longest go first.
const FOLLOWED_MAX: usize = 32;

/// Runs in a list: the newest.
const LISTED_MAX: usize = 100;

/// The run that began last.
const CURRENT_RUN: &str = "current";

/// Serves the page and the API of a queue at an address of this machine. The owner of the queue
/// gives tokens and login links to its users ([`PageServer::access`]).
///
/// # Errors
/// As those of [`start_server`].
pub(crate) fn start_queue_page(address: &str, queue: Arc<dyn QueueControl>) -> Result<PageServer> {
    let source = QueueSource::new(queue.clone());
    start_server(address, Arc::new(source), Some(queue))
}

/// The runs of a queue.
struct QueueSource {
    queue: Arc<dyn QueueControl>,
    followed: Mutex<Followed>,
}

/// Runs, each with the number of its last use.
#[derive(Default)]
struct Followed {
    runs: BTreeMap<WorkflowId, (u64, Arc<FollowedRun>)>,
    uses: u64,
}

impl QueueSource {
    fn new(queue: Arc<dyn QueueControl>) -> Self {
        Self {
            queue,
            followed: Mutex::default(),
        }
    }

    /// Workflows that the requester may see and that have begun, the newest first.
    fn begun(&self, requester: &Requester) -> Result<Vec<(WorkflowId, WorkflowDetails)>> {
        let all = self.queue.list(requester)?.into_iter().rev();
        let begun = all.filter_map(|it| Some((it.id, it.details?)));
        Ok(begun
            .filter(|(_, details)| details.started_ms.is_some())
            .collect())
    }

    fn find(&self, requester: &Requester, run: &str) -> Result<(WorkflowId, Arc<FollowedRun>)> {
        let mut begun = self.begun(requester)?.into_iter();
        let found = match run {
            CURRENT_RUN => begun.next(),
            _ => begun.find(|(id, _)| id.to_string() == run),
        };
        let unknown = || Error::new(ErrorCode::NotFound, format!("there is no run '{run}'"));
        let (id, details) = found.ok_or_else(unknown)?;
        Ok((id, self.follow(id, &details)))
    }

    fn follow(&self, id: WorkflowId, details: &WorkflowDetails) -> Arc<FollowedRun> {
        let mut followed = self.followed.lock().unwrap_or_else(PoisonError::into_inner);
        followed.uses += 1;
        let now = followed.uses;
        if let Some((used, run)) = followed.runs.get_mut(&id) {
            *used = now;
            return run.clone();
        }
        if followed.runs.len() >= FOLLOWED_MAX {
            let oldest = followed.runs.iter().min_by_key(|(_, (used, _))| *used);
            if let Some(oldest) = oldest.map(|(id, _)| *id) {
                followed.runs.remove(&oldest);
            }
        }
        let workflow = Path::new(&details.directory).join(&details.name);
        let journal = logs::sibling_path(&workflow, "journal");
        let run = Arc::new(FollowedRun::new(FollowedPlace {
            id: Some(id.to_string()),
            logs: Some(logs::logs_directory(&journal)),
            journal,
            cancel: None,
            traffic: TrafficMeter::default(),
        }));
        followed.runs.insert(id, (now, run.clone()));
        run
    }
}

impl RunSource for QueueSource {
    fn list_runs(&self, requester: &Requester) -> Result<Vec<RunSummary>> {
        let begun = self.begun(requester)?.into_iter().take(LISTED_MAX);
        // One whose journal is not there yet, or not any more, is in the queue only.
        let summaries = begun.filter_map(|(id, details)| self.follow(id, &details).summary().ok());
        Ok(summaries.collect())
    }

    fn view_run(&self, requester: &Requester, run: &str) -> Result<Arc<RunView>> {
        self.find(requester, run)?.1.view()
    }

    fn describe_job(&self, requester: &Requester, run: &str, job: u32) -> Result<JobDetails> {
        self.find(requester, run)?.1.describe_job(job)
    }

    fn explain_jobs(
        &self,
        requester: &Requester,
        run: &str,
        jobs: &[u32],
    ) -> Result<Vec<Option<String>>> {
        self.find(requester, run)?.1.explain_jobs(jobs)
    }

    fn read_log(
        &self,
        requester: &Requester,
        run: &str,
        job: u32,
        attempt: Option<u32>,
    ) -> Result<LogView> {
        self.find(requester, run)?.1.read_log(job, attempt)
    }

    fn read_history(
        &self,
        requester: &Requester,
        run: &str,
        from: u64,
        limit: usize,
    ) -> Result<HistoryPage> {
        self.find(requester, run)?.1.read_history(from, limit)
    }

    fn send_command(&self, requester: &Requester, run: &str, command: RunCommand) -> Result<()> {
        let (id, followed) = self.find(requester, run)?;
        match command {
            RunCommand::CancelRun => self.queue.remove(requester, id),
            RunCommand::HoldRun => self.queue.hold(requester, id),
            RunCommand::ReleaseRun => self.queue.release(requester, id),
            _ => followed.send_command(command),
        }
    }

    fn read_metrics(&self, requester: &Requester) -> Result<MetricsView> {
        let mut metrics = MetricsView::default();
        for workflow in self.queue.list(requester)? {
            let name = format!("workflows_{}", workflow.state.name());
            *metrics.gauges.entry(name).or_default() += 1;
        }
        Ok(metrics)
    }
}

#[cfg(test)]
mod tests {
    use bafs_queue::{Resources, Submission, WorkflowState, WorkflowSummary};

    use super::*;

    /// A queue with a workflow of ann that waits, and one that has begun.
    struct TwoWorkflows;

    impl QueueControl for TwoWorkflows {
        fn submit(&self, _: &Requester, _: Submission) -> Result<WorkflowId> {
            Ok(WorkflowId(3))
        }

        fn list(&self, requester: &Requester) -> Result<Vec<WorkflowSummary>> {
            let workflow = |id: u64, state| WorkflowSummary {
                id: WorkflowId(id),
                user: Some("ann".to_owned()),
                state,
                details: (requester.user == "ann").then(|| WorkflowDetails {
                    name: "w.bafs".to_owned(),
                    priority: 0,
                    submitted_ms: 1,
                    started_ms: (state == WorkflowState::Running).then_some(2),
                    ended_ms: None,
                    wanted: Resources::default(),
                    needed: Resources::default(),
                    share: None,
                    reason: None,
                    directory: "/nowhere".to_owned(),
                }),
            };
            Ok(vec![
                workflow(1, WorkflowState::Running),
                workflow(2, WorkflowState::Queued),
            ])
        }

        fn hold(&self, _: &Requester, _: WorkflowId) -> Result<()> {
            Ok(())
        }

        fn release(&self, _: &Requester, _: WorkflowId) -> Result<()> {
            Ok(())
        }

        fn remove(&self, _: &Requester, _: WorkflowId) -> Result<()> {
            Ok(())
        }

        fn set_priority(&self, _: &Requester, _: WorkflowId, _: i32) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn queued_workflows_are_no_runs_yet() {
        let source = QueueSource::new(Arc::new(TwoWorkflows));
        let requester = |user: &str| Requester {
            user: user.to_owned(),
            is_operator: false,
            sees_others: false,
        };
        let code = |user: &str, run: &str| {
            let viewed = source.view_run(&requester(user), run);
            viewed.expect_err("there is no journal").code
        };
        assert_eq!(code("ann", "1"), ErrorCode::Busy);
        assert_eq!(code("ann", "current"), ErrorCode::Busy);
        assert_eq!(code("ann", "2"), ErrorCode::NotFound);
        assert_eq!(code("bob", "1"), ErrorCode::NotFound);
        let hold = |user: &str| source.send_command(&requester(user), "1", RunCommand::HoldRun);
        assert!(hold("ann").is_ok() && hold("bob").is_err());
        let metrics = source.read_metrics(&requester("ann")).expect("figures");
        assert_eq!(metrics.gauges["workflows_running"], 1);
        start_queue_page("127.0.0.1:0", Arc::new(TwoWorkflows)).expect("it is served");
    }
}
