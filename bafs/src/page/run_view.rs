//! A run as the API shows it, from its intervals and the core behind them. Pure.

use std::collections::BTreeMap;

use bafs_api::{
    DeliveryView, ExecutionOutcomeView, ExecutionView, FailureView, JobDetails, JobStateView,
    JobView, NodeView, ProgressView, RunStateView, RunSummary, RunView, TimeView, TrafficSample,
    VolumeRoleView, VolumeView,
};
use bafs_sched::goodput::compute_goodput;
use bafs_sched::timeline::{ExecutionOutcome, ExecutionRecord, Timeline, VolumeRole};
use bafs_sched::{JobFailure, JobState, Outcome, Progress, Scheduler};
use bafs_workflow::{JobIndex, Workflow};

use super::advice::advise;

/// What the journal does not say.
pub(super) struct Circumstances {
    /// Whether a scheduler has the journal open.
    pub(super) is_running: bool,
    /// Whether the run can be cancelled as a whole.
    pub(super) can_cancel: bool,
    /// From the first fact to now.
    pub(super) so_far_ms: u64,
    pub(super) revision: u64,
    pub(super) traffic: Vec<TrafficSample>,
}

pub(super) fn build_run_view(
    timeline: &Timeline,
    scheduler: &Scheduler,
    around: Circumstances,
) -> RunView {
    let is_active = around.is_running && timeline.outcome.is_none();
    let wall_ms = match is_active {
        true => timeline.wall_ms.max(around.so_far_ms),
        false => timeline.wall_ms,
    };
    let summary = RunSummary {
        id: timeline.run.to_string(),
        workflow: timeline.workflow.clone(),
        state: describe_state(timeline.outcome.as_ref(), around.is_running, scheduler),
        can_steer: is_active,
        can_cancel: is_active && around.can_cancel,
        began_ms: timeline.began_at.0,
        wall_ms,
        revision: around.revision,
        progress: show_progress(&timeline.progress),
    };
    RunView {
        summary,
        time: show_time(timeline, scheduler.workflow()),
        warnings: [scheduler.messages(), &timeline.warnings].concat(),
        jobs: show_jobs(timeline, scheduler),
        executions: timeline.executions.iter().map(show_execution).collect(),
        volumes: show_volumes(timeline),
        deliveries: show_deliveries(timeline),
        nodes: show_nodes(timeline, scheduler),
        failures: show_failures(timeline, scheduler),
        traffic: around.traffic,
    }
}

fn describe_state(
    outcome: Option<&Outcome>,
    is_running: bool,
    scheduler: &Scheduler,
) -> RunStateView {
    match outcome {
        Some(Outcome::Complete) => RunStateView::Complete,
        Some(Outcome::Failed { .. }) => RunStateView::Failed,
        Some(Outcome::Cancelled) => RunStateView::Cancelled,
        None if !is_running => RunStateView::Interrupted,
        None if scheduler.is_run_held() => RunStateView::Held,
        None => RunStateView::Running,
    }
}

fn show_progress(progress: &Progress) -> ProgressView {
    ProgressView {
        jobs_total: progress.jobs_total,
        jobs_done: progress.jobs_done,
        jobs_running: progress.jobs_running,
        jobs_failed: progress.jobs_failed,
        jobs_skipped: progress.jobs_skipped,
        attempts: progress.executions,
        results_total: progress.extracts_total,
        results_done: progress.extracts_done,
        results_failed: progress.extracts_failed,
        result_bytes: progress.extracted_bytes,
        volumes: progress.volumes,
        nodes: progress.nodes,
        nodes_lost: progress.nodes_lost,
    }
}

fn show_time(timeline: &Timeline, workflow: &Workflow) -> TimeView {
    let total = compute_goodput(workflow, timeline).total;
    TimeView {
        computing_ms: total.computing_ms,
        io_wait_ms: total.io_wait_ms,
        copying_ms: total.copying_ms,
        lost_ms: total.lost_ms,
        overhead_ms: total.overhead_ms,
        queued_ms: total.queued_ms,
    }
}

fn show_jobs(timeline: &Timeline, scheduler: &Scheduler) -> Vec<JobView> {
    let workflow = scheduler.workflow();
    let pipelines = workflow.pipelines();
    let mut attempts: BTreeMap<JobIndex, (u32, &ExecutionRecord)> = BTreeMap::new();
    for execution in &timeline.executions {
        let count = attempts.get(&execution.job).map_or(0, |(count, _)| *count);
        attempts.insert(execution.job, (count + 1, execution));
    }
    let show = |(at, job): (usize, &bafs_workflow::Job)| {
        let index = JobIndex(u32::try_from(at).unwrap_or(u32::MAX));
        let last = attempts.get(&index);
        JobView {
            name: job.name.clone(),
            state: show_job_state(timeline.jobs[at].state),
            level: timeline.jobs[at].level,
            pipeline: workflow.jobs[pipelines[at] as usize].name.clone(),
            priority: scheduler.priority(index),
            is_held: scheduler.is_held(index),
            attempts: last.map_or(0, |(count, _)| *count),
            node: last.map(|(_, execution)| execution.node.clone()),
            started_ms: last.map(|(_, execution)| execution.requested_ms),
            ended_ms: last.and_then(|(_, execution)| execution.ended_ms),
            parents: job.parents.iter().map(|parent| parent.0).collect(),
        }
    };
    workflow.jobs.iter().enumerate().map(show).collect()
}

fn show_job_state(state: JobState) -> JobStateView {
    match state {
        JobState::Waiting => JobStateView::Waiting,
        JobState::Ready => JobStateView::Ready,
        JobState::HeldBack => JobStateView::HeldBack,
        JobState::Active => JobStateView::Active,
        JobState::Done => JobStateView::Done,
        JobState::Failed => JobStateView::Failed,
        JobState::Skipped => JobStateView::Skipped,
    }
}

fn show_execution(execution: &ExecutionRecord) -> ExecutionView {
    ExecutionView {
        job: execution.job.0,
        node: execution.node.clone(),
        started_ms: execution.requested_ms,
        ended_ms: execution.ended_ms,
        outcome: match execution.outcome {
            ExecutionOutcome::Running => ExecutionOutcomeView::Running,
            ExecutionOutcome::Done => ExecutionOutcomeView::Done,
            ExecutionOutcome::RolledBack => ExecutionOutcomeView::RolledBack,
            ExecutionOutcome::Failed => ExecutionOutcomeView::Failed,
            ExecutionOutcome::Abandoned => ExecutionOutcomeView::Abandoned,
        },
        end: execution.end_description.clone(),
        slots: execution.slots,
        cpu_ms: execution.cpu_ms,
        waited_ms: execution.waited_ms,
        read_bytes: execution.read_bytes,
        written_bytes: execution.written_bytes,
    }
}

fn show_volumes(timeline: &Timeline) -> Vec<VolumeView> {
    let show = |volume: &bafs_sched::timeline::VolumeRecord| VolumeView {
        name: volume.name.clone(),
        role: match volume.role {
            VolumeRole::Scratch => VolumeRoleView::Scratch,
            VolumeRole::Cache => VolumeRoleView::Cache,
            VolumeRole::Copy => VolumeRoleView::Copy,
        },
        node: volume.node.clone(),
        bytes: volume.bytes,
        is_filled: volume.is_filled,
        requested_ms: volume.requested_ms,
        created_ms: volume.created_ms,
        deleted_ms: volume.deleted_ms,
        is_lost: volume.is_lost,
    };
    timeline.volumes.iter().map(show).collect()
}

fn show_deliveries(timeline: &Timeline) -> Vec<DeliveryView> {
    let attempts = timeline.extract_attempts.iter();
    let views = attempts.map(|attempt| DeliveryView {
        target: attempt.target.clone(),
        requested_ms: attempt.requested_ms,
        ended_ms: attempt.ended_ms,
        bytes: attempt.bytes,
    });
    views.collect()
}

fn show_nodes(timeline: &Timeline, scheduler: &Scheduler) -> Vec<NodeView> {
    let is_over = timeline.outcome.is_some();
    let show = |node: &bafs_sched::timeline::NodeRecord| {
        let executions = timeline.executions.iter();
        let here = executions.filter(|execution| {
            execution.server == node.server && execution.outcome == ExecutionOutcome::Running
        });
        let volumes = timeline.volumes.iter();
        let there = volumes.filter(|it| it.server == node.server && it.deleted_ms.is_none());
        NodeView {
            name: node.name.clone(),
            is_lost: node
                .presence
                .last()
                .is_some_and(|(_, until)| until.is_some()),
            slots: node.slots,
            jobs: u32::try_from(here.count()).unwrap_or(u32::MAX),
            capacity_bytes: node.capacity_bytes,
            reserved_bytes: there.map(|volume| volume.bytes).sum(),
            description: (!is_over)
                .then(|| scheduler.describe_node(node.server))
                .flatten(),
            presence: node.presence.clone(),
        }
    };
    timeline.nodes.iter().map(show).collect()
}

fn show_failures(timeline: &Timeline, scheduler: &Scheduler) -> Vec<FailureView> {
    let mut last: BTreeMap<JobIndex, &ExecutionRecord> = BTreeMap::new();
    last.extend(
        timeline
            .executions
            .iter()
            .map(|execution| (execution.job, execution)),
    );
    let show = |failure: &JobFailure| FailureView {
        job: failure.name.clone(),
        node: failure.node.clone(),
        reason: failure.reason.clone(),
        advice: advise(last.get(&failure.job).and_then(|it| it.reported.as_ref())).to_owned(),
        output_tail: failure.output_tail.clone(),
    };
    scheduler.failures().iter().map(show).collect()
}

/// What the workflow says of a job.
pub(super) fn describe_job(workflow: &Workflow, job: JobIndex) -> JobDetails {
    let job = workflow.job(job);
    let command = std::iter::once(&job.command.executable).chain(&job.command.arguments);
    let mounts = job.mounts.iter();
    JobDetails {
        command: command.cloned().collect(),
        cpus: job.cpus,
        memory_bytes: job.memory_bytes,
        mounts: mounts
            .map(|mount| {
                (
                    mount.path.clone(),
                    workflow.volume(mount.volume).name.clone(),
                )
            })
            .collect(),
    }
}
