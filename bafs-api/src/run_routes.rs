//! Routes of runs: what they are, why they wait, and commands for them.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use bafs_queue::Requester;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::api_error::{ApiError, ApiResult};
use crate::app::{Accepted, App, accept};
use crate::derived::{
    GanttBar, WaitGroup, compute_series, count_levels, count_states, draw_gantt, draw_graph,
    group_failures, group_reasons, select_jobs,
};
use crate::parameters::{
    Caller, JobQuery, JsonBody, LogQuery, NoParameters, Parameters, ROWS_MAX, SeriesQuery, Window,
    check_limit, read_integer,
};
use crate::source::RunCommand;
use crate::views::{
    ExecutionView, HistoryPage, JobDetails, JobStateView, JobView, LogView, MetricsView, NodeView,
    RunView, VolumeView,
};

/// Jobs whose reason to wait is asked for at once: each takes a look at all nodes.
const EXPLAINED_MAX: usize = 400;

/// Steps of a series.
const POINTS_MAX: u32 = 2_000;

/// Why a job waits that waits for other jobs: each names others.
const WAITS_FOR_JOBS: &str = "other jobs must finish first";

pub(crate) fn router() -> Router<App> {
    Router::new()
        .route("/runs", get(list_runs))
        .route("/runs/{run}", get(get_run))
        .route("/runs/{run}/cancel", post(cancel_run))
        .route("/runs/{run}/hold", post(hold_run))
        .route("/runs/{run}/release", post(release_run))
        .route("/runs/{run}/jobs", get(list_jobs))
        .route("/runs/{run}/jobs/{job}", get(get_job))
        .route("/runs/{run}/jobs/{job}/logs", get(get_log))
        .route("/runs/{run}/jobs/{job}/cancel", post(cancel_pipeline))
        .route("/runs/{run}/jobs/{job}/hold", post(hold_pipeline))
        .route("/runs/{run}/jobs/{job}/release", post(release_pipeline))
        .route("/runs/{run}/jobs/{job}/priority", post(set_priority))
        .route("/runs/{run}/volumes", get(list_volumes))
        .route("/runs/{run}/nodes", get(list_nodes))
        .route("/runs/{run}/waiting", get(list_waiting))
        .route("/runs/{run}/failures", get(list_failures))
        .route("/runs/{run}/gantt", get(get_gantt))
        .route("/runs/{run}/series", get(get_series))
        .route("/runs/{run}/graph", get(get_graph))
        .route("/runs/{run}/history", get(get_history))
}

async fn view_run(app: &App, requester: &Requester, run: &str) -> ApiResult<Arc<RunView>> {
    let (requester, run) = (requester.clone(), run.to_owned());
    app.ask(move |source| source.view_run(&requester, &run))
        .await
}

/// Position of the job of this name.
fn find_job(view: &RunView, name: &str) -> ApiResult<u32> {
    let at = view.jobs.iter().position(|job| job.name == name);
    let at = at.and_then(|at| u32::try_from(at).ok());
    at.ok_or_else(|| ApiError::not_found(format!("the run has no job '{name}'")))
}

async fn list_runs(
    State(app): State<App>,
    Caller(requester): Caller,
    _: Parameters<NoParameters>,
) -> ApiResult<Response> {
    let runs = app.ask(move |source| source.list_runs(&requester)).await?;
    Ok(Json(json!({ "runs": runs })).into_response())
}

async fn get_run(
    State(app): State<App>,
    Caller(requester): Caller,
    Path(run): Path<String>,
    _: Parameters<NoParameters>,
) -> ApiResult<Response> {
    let view = view_run(&app, &requester, &run).await?;
    let body = json!({
        "run": view.summary,
        "time": view.time,
        "states": count_states(&view.jobs),
        "levels": count_levels(&view.jobs),
        "warnings": view.warnings,
        "failures": view.failures.len(),
    });
    Ok(Json(body).into_response())
}

async fn list_jobs(
    State(app): State<App>,
    Caller(requester): Caller,
    Path(run): Path<String>,
    Parameters(query): Parameters<JobQuery>,
) -> ApiResult<Response> {
    query.check()?;
    let view = view_run(&app, &requester, &run).await?;
    Ok(Json(select_jobs(&view, &query)).into_response())
}

/// A job with all that is known of it.
#[derive(Serialize)]
struct JobAnswer<'v> {
    #[serde(flatten)]
    job: &'v JobView,
    details: JobDetails,
    /// Why it does not run now, or never ran.
    reason: Option<String>,
    parents: Vec<&'v str>,
    children: Vec<&'v str>,
    executions: Vec<&'v ExecutionView>,
    failure: Option<&'v crate::views::FailureView>,
}

async fn get_job(
    State(app): State<App>,
    Caller(requester): Caller,
    Path((run, name)): Path<(String, String)>,
    _: Parameters<NoParameters>,
) -> ApiResult<Response> {
    let view = view_run(&app, &requester, &run).await?;
    let at = find_job(&view, &name)?;
    let (details, reason) = app
        .ask(move |source| {
            let details = source.describe_job(&requester, &run, at)?;
            let reasons = source.explain_jobs(&requester, &run, &[at])?;
            Ok((details, reasons.into_iter().next().flatten()))
        })
        .await?;
    let job = &view.jobs[at as usize];
    let job_name = |at: &u32| view.jobs[*at as usize].name.as_str();
    let children = view.jobs.iter().filter(|other| other.parents.contains(&at));
    let executions = view.executions.iter().filter(|it| it.job == at);
    let answer = JobAnswer {
        job,
        details,
        reason,
        parents: job.parents.iter().map(job_name).collect(),
        children: children.map(|child| child.name.as_str()).collect(),
        executions: executions.collect(),
        failure: view.failures.iter().find(|failure| failure.job == name),
    };
    Ok(Json(answer).into_response())
}

async fn get_log(
    State(app): State<App>,
    Caller(requester): Caller,
    Path((run, name)): Path<(String, String)>,
    Parameters(query): Parameters<LogQuery>,
) -> ApiResult<Json<LogView>> {
    if query.attempt == Some(0) {
        return Err(ApiError::malformed("attempts count from 1"));
    }
    let view = view_run(&app, &requester, &run).await?;
    let at = find_job(&view, &name)?;
    let read =
        move |source: &dyn crate::RunSource| source.read_log(&requester, &run, at, query.attempt);
    Ok(Json(app.ask(read).await?))
}

/// Rows of a list.
#[derive(Serialize)]
struct Rows<'v, T> {
    total: usize,
    offset: u32,
    #[serde(rename = "rows")]
    window: &'v [T],
}

fn select_rows<T: Serialize>(all: &[T], window: Window) -> ApiResult<Response> {
    check_limit(window.limit, ROWS_MAX)?;
    let from = (window.offset as usize).min(all.len());
    let until = from.saturating_add(window.limit as usize).min(all.len());
    let rows = Rows {
        total: all.len(),
        offset: window.offset,
        window: &all[from..until],
    };
    Ok(Json(rows).into_response())
}

async fn list_volumes(
    State(app): State<App>,
    Caller(requester): Caller,
    Path(run): Path<String>,
    Parameters(window): Parameters<Window>,
) -> ApiResult<Response> {
    let view = view_run(&app, &requester, &run).await?;
    // Those that exist come first: of the others there may be many.
    let (there, gone): (Vec<&VolumeView>, Vec<&VolumeView>) =
        view.volumes.iter().partition(|it| it.deleted_ms.is_none());
    select_rows(&[there, gone].concat(), window)
}

async fn list_nodes(
    State(app): State<App>,
    Caller(requester): Caller,
    Path(run): Path<String>,
    Parameters(window): Parameters<Window>,
) -> ApiResult<Response> {
    let view = view_run(&app, &requester, &run).await?;
    let nodes: &[NodeView] = &view.nodes;
    select_rows(nodes, window)
}

async fn list_waiting(
    State(app): State<App>,
    Caller(requester): Caller,
    Path(run): Path<String>,
    _: Parameters<NoParameters>,
) -> ApiResult<Response> {
    let view = view_run(&app, &requester, &run).await?;
    let in_state = |states: &'static [JobStateView]| {
        let jobs = view.jobs.iter().enumerate();
        jobs.filter(move |(_, job)| states.contains(&job.state))
    };
    let ready = in_state(&[JobStateView::Ready, JobStateView::HeldBack]);
    let ready: Vec<u32> = ready.filter_map(|(at, _)| u32::try_from(at).ok()).collect();
    let asked = ready[..ready.len().min(EXPLAINED_MAX)].to_vec();
    let unexplained = ready.len() - asked.len();
    let wanted = asked.clone();
    let reasons = app
        .ask(move |source| source.explain_jobs(&requester, &run, &wanted))
        .await?;
    let pairs = asked.iter().zip(reasons).filter_map(|(at, reason)| {
        let job = &view.jobs[*at as usize];
        Some((job.name.clone(), reason?))
    });
    let waiting = in_state(&[JobStateView::Waiting]);
    let waiting = waiting.map(|(_, job)| (job.name.clone(), WAITS_FOR_JOBS.to_owned()));
    let groups: Vec<WaitGroup> = group_reasons(pairs.chain(waiting));
    let body = json!({ "groups": groups, "unexplained": unexplained });
    Ok(Json(body).into_response())
}

async fn list_failures(
    State(app): State<App>,
    Caller(requester): Caller,
    Path(run): Path<String>,
    _: Parameters<NoParameters>,
) -> ApiResult<Response> {
    let view = view_run(&app, &requester, &run).await?;
    let groups = group_failures(&view.failures);
    let body = json!({ "total": view.failures.len(), "groups": groups });
    Ok(Json(body).into_response())
}

async fn get_gantt(
    State(app): State<App>,
    Caller(requester): Caller,
    Path(run): Path<String>,
    _: Parameters<NoParameters>,
) -> ApiResult<Response> {
    let view = view_run(&app, &requester, &run).await?;
    let gantt = draw_gantt(&view);
    let _: &[GanttBar<'_>] = &gantt.bars;
    Ok(Json(gantt).into_response())
}

async fn get_series(
    State(app): State<App>,
    Caller(requester): Caller,
    Path(run): Path<String>,
    Parameters(query): Parameters<SeriesQuery>,
) -> ApiResult<Response> {
    if !(2..=POINTS_MAX).contains(&query.points) {
        let text = format!("points must be 2 to {POINTS_MAX}");
        return Err(ApiError::malformed(text));
    }
    let view = view_run(&app, &requester, &run).await?;
    Ok(Json(compute_series(&view, query.points)).into_response())
}

async fn get_graph(
    State(app): State<App>,
    Caller(requester): Caller,
    Path(run): Path<String>,
    _: Parameters<NoParameters>,
) -> ApiResult<Response> {
    let view = view_run(&app, &requester, &run).await?;
    Ok(Json(draw_graph(&view)).into_response())
}

async fn get_history(
    State(app): State<App>,
    Caller(requester): Caller,
    Path(run): Path<String>,
    Parameters(window): Parameters<Window>,
) -> ApiResult<Json<HistoryPage>> {
    check_limit(window.limit, ROWS_MAX)?;
    let (from, limit) = (u64::from(window.offset), window.limit as usize);
    let read =
        move |source: &dyn crate::RunSource| source.read_history(&requester, &run, from, limit);
    Ok(Json(app.ask(read).await?))
}

/// Figures of all that the caller may see.
pub(crate) async fn get_metrics(
    State(app): State<App>,
    Caller(requester): Caller,
    _: Parameters<NoParameters>,
) -> ApiResult<Json<MetricsView>> {
    let read = move |source: &dyn crate::RunSource| source.read_metrics(&requester);
    Ok(Json(app.ask(read).await?))
}

type CommandAnswer = ApiResult<(StatusCode, Json<Accepted>)>;

/// Hands a command for a run on.
async fn send_to_run(
    app: &App,
    requester: Requester,
    run: String,
    command: RunCommand,
    message: &str,
) -> CommandAnswer {
    let send = move |source: &dyn crate::RunSource| source.send_command(&requester, &run, command);
    app.ask(send).await?;
    Ok(accept(message))
}

async fn cancel_run(
    State(app): State<App>,
    Caller(requester): Caller,
    Path(run): Path<String>,
    _: Parameters<NoParameters>,
) -> CommandAnswer {
    let text = "the run stops its jobs and deletes its volumes";
    send_to_run(&app, requester, run, RunCommand::CancelRun, text).await
}

async fn hold_run(
    State(app): State<App>,
    Caller(requester): Caller,
    Path(run): Path<String>,
    _: Parameters<NoParameters>,
) -> CommandAnswer {
    let text = "no further job starts; running jobs continue";
    send_to_run(&app, requester, run, RunCommand::HoldRun, text).await
}

async fn release_run(
    State(app): State<App>,
    Caller(requester): Caller,
    Path(run): Path<String>,
    _: Parameters<NoParameters>,
) -> CommandAnswer {
    let text = "jobs may start again";
    send_to_run(&app, requester, run, RunCommand::ReleaseRun, text).await
}

/// Hands a command for the pipeline of a job on.
async fn send_to_pipeline(
    app: &App,
    requester: Requester,
    (run, name): (String, String),
    command: impl FnOnce(u32) -> RunCommand,
    message: &str,
) -> CommandAnswer {
    let view = view_run(app, &requester, &run).await?;
    let at = find_job(&view, &name)?;
    send_to_run(app, requester, run, command(at), message).await
}

async fn cancel_pipeline(
    State(app): State<App>,
    Caller(requester): Caller,
    Path(job): Path<(String, String)>,
    _: Parameters<NoParameters>,
) -> CommandAnswer {
    let text = "the rest of the pipeline does not run";
    send_to_pipeline(&app, requester, job, RunCommand::CancelPipeline, text).await
}

async fn hold_pipeline(
    State(app): State<App>,
    Caller(requester): Caller,
    Path(job): Path<(String, String)>,
    _: Parameters<NoParameters>,
) -> CommandAnswer {
    let text = "no further job of the pipeline starts; running jobs continue";
    send_to_pipeline(&app, requester, job, RunCommand::HoldPipeline, text).await
}

async fn release_pipeline(
    State(app): State<App>,
    Caller(requester): Caller,
    Path(job): Path<(String, String)>,
    _: Parameters<NoParameters>,
) -> CommandAnswer {
    let text = "jobs of the pipeline may start again";
    send_to_pipeline(&app, requester, job, RunCommand::ReleasePipeline, text).await
}

/// A priority.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PriorityBody {
    #[serde(deserialize_with = "read_integer")]
    pub(crate) priority: i32,
}

async fn set_priority(
    State(app): State<App>,
    Caller(requester): Caller,
    Path(job): Path<(String, String)>,
    _: Parameters<NoParameters>,
    JsonBody(body): JsonBody<PriorityBody>,
) -> CommandAnswer {
    let command = |at| RunCommand::SetPriority(at, body.priority);
    let text = "the priority of the pipeline changes within two seconds";
    send_to_pipeline(&app, requester, job, command, text).await
}
