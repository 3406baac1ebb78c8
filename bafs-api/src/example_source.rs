//! A source of runs for tests: a run of `n` jobs in two levels on two nodes.

use std::sync::{Arc, Mutex};

use bafs_proto::{Error, ErrorCode, Result};
use bafs_queue::Requester;

use crate::source::{RunCommand, RunSource};
use crate::views::{
    DeliveryView, ExecutionOutcomeView, ExecutionView, FailureView, HistoryLineView, HistoryPage,
    JobDetails, JobStateView, JobView, LogView, MetricsView, NodeView, ProgressView, RunStateView,
    RunSummary, RunView, TimeView, TrafficSample, VolumeRoleView, VolumeView,
};

const STATES: [JobStateView; 7] = [
    JobStateView::Done,
    JobStateView::Active,
    JobStateView::Failed,
    JobStateView::Ready,
    JobStateView::Waiting,
    JobStateView::HeldBack,
    JobStateView::Skipped,
];

fn example_job(at: u32, jobs: u32) -> JobView {
    JobView {
        name: format!("job.{at}"),
        state: STATES[at as usize % STATES.len()],
        level: u32::from(at > jobs / 2),
        pipeline: "job.0".to_owned(),
        priority: 0,
        is_held: at == 5,
        attempts: 1,
        node: Some("n1".to_owned()),
        started_ms: Some(10),
        ended_ms: None,
        parents: if at > jobs / 2 { vec![0] } else { Vec::new() },
    }
}

fn example_execution(at: u32) -> ExecutionView {
    ExecutionView {
        job: at,
        node: format!("n{}", at % 2 + 1),
        started_ms: u64::from(at) * 10,
        ended_ms: (at != 1).then_some(u64::from(at) * 10 + 35),
        outcome: match at {
            1 => ExecutionOutcomeView::Running,
            2 => ExecutionOutcomeView::Failed,
            _ => ExecutionOutcomeView::Done,
        },
        end: "done".to_owned(),
        slots: 1,
        cpu_ms: 20,
        waited_ms: 1,
        read_bytes: 4_096,
        written_bytes: 10,
    }
}

fn example_node(number: u32) -> NodeView {
    NodeView {
        name: format!("n{number}"),
        is_lost: false,
        slots: 2,
        jobs: 1,
        capacity_bytes: 1_000_000,
        reserved_bytes: 1_000,
        description: Some("it has 1 of 2 slots in use".to_owned()),
        presence: vec![(0, None)],
    }
}

/// A run of so many jobs.
pub(crate) fn example_view(jobs: u32) -> RunView {
    RunView {
        summary: RunSummary {
            id: "7".to_owned(),
            workflow: "w.bafs".to_owned(),
            state: RunStateView::Running,
            can_steer: true,
            can_cancel: true,
            began_ms: 1_000_000,
            wall_ms: 200,
            revision: 3,
            progress: ProgressView {
                jobs_total: u64::from(jobs),
                ..ProgressView::default()
            },
        },
        time: TimeView::default(),
        warnings: vec!["a volume was lost".to_owned()],
        jobs: (0..jobs).map(|at| example_job(at, jobs)).collect(),
        executions: (0..jobs).map(example_execution).collect(),
        volumes: vec![VolumeView {
            name: "v".to_owned(),
            role: VolumeRoleView::Scratch,
            node: "n1".to_owned(),
            bytes: 1_000,
            is_filled: true,
            requested_ms: 1,
            created_ms: Some(2),
            deleted_ms: None,
            is_lost: false,
        }],
        deliveries: vec![DeliveryView {
            target: "bafs://home/x".to_owned(),
            requested_ms: 50,
            ended_ms: Some(60),
            bytes: Some(77),
        }],
        nodes: vec![example_node(1), example_node(2)],
        failures: vec![FailureView {
            job: "job.2".to_owned(),
            node: "n1".to_owned(),
            reason: "exited with code 2".to_owned(),
            advice: "mend it".to_owned(),
            output_tail: "no file".to_owned(),
        }],
        traffic: vec![TrafficSample {
            at_ms: 100,
            home_bytes: 9,
            node_bytes: 8,
        }],
    }
}

/// One run with the id 7, of ann.
#[derive(Default)]
pub(crate) struct ExampleSource {
    pub(crate) commands: Mutex<Vec<RunCommand>>,
}

impl ExampleSource {
    fn check(requester: &Requester, run: &str) -> Result<()> {
        match requester.user == "ann" && (run == "7" || run == "current") {
            true => Ok(()),
            false => Err(Error::new(
                ErrorCode::NotFound,
                format!("there is no run {run}"),
            )),
        }
    }
}

impl RunSource for ExampleSource {
    fn list_runs(&self, requester: &Requester) -> Result<Vec<RunSummary>> {
        let is_own = requester.user == "ann";
        Ok(is_own
            .then(|| example_view(9).summary)
            .into_iter()
            .collect())
    }

    fn view_run(&self, requester: &Requester, run: &str) -> Result<Arc<RunView>> {
        Self::check(requester, run)?;
        Ok(Arc::new(example_view(9)))
    }

    fn describe_job(&self, requester: &Requester, run: &str, _: u32) -> Result<JobDetails> {
        Self::check(requester, run)?;
        Ok(JobDetails {
            command: vec!["sh".to_owned()],
            cpus: 1,
            memory_bytes: 0,
            mounts: vec![("/data".to_owned(), "v".to_owned())],
        })
    }

    fn explain_jobs(
        &self,
        requester: &Requester,
        run: &str,
        jobs: &[u32],
    ) -> Result<Vec<Option<String>>> {
        Self::check(requester, run)?;
        Ok(jobs
            .iter()
            .map(|_| Some("it waits for space".to_owned()))
            .collect())
    }

    fn read_log(
        &self,
        requester: &Requester,
        run: &str,
        job: u32,
        attempt: Option<u32>,
    ) -> Result<LogView> {
        Self::check(requester, run)?;
        if attempt.is_some_and(|attempt| attempt > 1) {
            return Err(Error::new(ErrorCode::NotFound, "there is no such attempt"));
        }
        Ok(LogView {
            job: format!("job.{job}"),
            attempt: 1,
            attempts: 1,
            stdout: "hello\n".to_owned(),
            ..LogView::default()
        })
    }

    fn read_history(
        &self,
        requester: &Requester,
        run: &str,
        from: u64,
        limit: usize,
    ) -> Result<HistoryPage> {
        Self::check(requester, run)?;
        let line = |number| HistoryLineView {
            number,
            at_ms: number * 10,
            subjects: vec!["job.0".to_owned()],
            text: "job job.0 starts".to_owned(),
        };
        Ok(HistoryPage {
            lines: (from..3).take(limit).map(line).collect(),
            total: 3,
        })
    }

    fn send_command(&self, requester: &Requester, run: &str, command: RunCommand) -> Result<()> {
        Self::check(requester, run)?;
        self.commands.lock().expect("no panic").push(command);
        Ok(())
    }

    fn read_metrics(&self, _: &Requester) -> Result<MetricsView> {
        Ok(MetricsView::default())
    }
}
