//! Routes of the queue of workflows, where the program has one.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::routing::{get, post};
use axum::{Json, Router};
use bafs_proto::{Error, ErrorCode, Result};
use bafs_queue::{QueueControl, Requester, Submission, WorkflowId};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::api_error::{ApiError, ApiResult};
use crate::app::{Accepted, App, accept};
use crate::parameters::{Caller, JsonBody, NoParameters, Parameters, read_integer};
use crate::run_routes::PriorityBody;

pub(crate) fn router() -> Router<App> {
    Router::new()
        .route("/workflows", get(list_workflows).post(submit_workflow))
        .route("/workflows/{id}/hold", post(hold_workflow))
        .route("/workflows/{id}/release", post(release_workflow))
        .route("/workflows/{id}/remove", post(remove_workflow))
        .route("/workflows/{id}/priority", post(set_priority))
}

/// A workflow that is handed in.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct SubmissionBody {
    name: String,
    text: String,
    #[serde(default)]
    files: BTreeMap<String, String>,
    #[serde(default)]
    key: String,
    #[serde(default, deserialize_with = "read_integer")]
    priority: i32,
}

/// Asks the queue on a thread that may wait.
async fn ask_queue<T: Send + 'static>(
    app: &App,
    question: impl FnOnce(&dyn QueueControl) -> Result<T> + Send + 'static,
) -> ApiResult<T> {
    let missing = || {
        ApiError::new(
            StatusCode::NOT_FOUND,
            ErrorCode::NotFound,
            "this program has no queue of workflows",
            "Use the address of a service: `bafs scheduler` has a queue.",
        )
    };
    let queue: Arc<dyn QueueControl> = app.queue.clone().ok_or_else(missing)?;
    let answer = tokio::task::spawn_blocking(move || question(&*queue)).await;
    let broken = |_| Error::new(ErrorCode::ServerFault, "the request could not be answered");
    Ok(answer.map_err(broken)??)
}

async fn list_workflows(
    State(app): State<App>,
    Caller(requester): Caller,
    _: Parameters<NoParameters>,
) -> ApiResult<Json<Value>> {
    let workflows = ask_queue(&app, move |queue| queue.list(&requester)).await?;
    Ok(Json(json!({ "workflows": workflows })))
}

async fn submit_workflow(
    State(app): State<App>,
    Caller(requester): Caller,
    _: Parameters<NoParameters>,
    JsonBody(body): JsonBody<SubmissionBody>,
) -> ApiResult<(StatusCode, Json<Value>)> {
    let submission = Submission {
        name: body.name,
        text: body.text,
        files: body.files,
        key: body.key,
        priority: body.priority,
    };
    let id = ask_queue(&app, move |queue| queue.submit(&requester, submission)).await?;
    Ok((StatusCode::CREATED, Json(json!({ "id": id }))))
}

type CommandAnswer = ApiResult<(StatusCode, Json<Accepted>)>;

async fn command_queue(
    app: &App,
    id: &str,
    message: &str,
    command: impl FnOnce(&dyn QueueControl, WorkflowId) -> Result<()> + Send + 'static,
) -> CommandAnswer {
    let wrong = || ApiError::malformed("the id of a workflow is a number");
    let id: WorkflowId = id.parse().map_err(|_| wrong())?;
    ask_queue(app, move |queue| command(queue, id)).await?;
    Ok(accept(message))
}

async fn hold_workflow(
    State(app): State<App>,
    Caller(requester): Caller,
    Path(id): Path<String>,
    _: Parameters<NoParameters>,
) -> CommandAnswer {
    let hold = move |queue: &dyn QueueControl, id| queue.hold(&requester, id);
    command_queue(&app, &id, "the workflow is held", hold).await
}

async fn release_workflow(
    State(app): State<App>,
    Caller(requester): Caller,
    Path(id): Path<String>,
    _: Parameters<NoParameters>,
) -> CommandAnswer {
    let release = move |queue: &dyn QueueControl, id| queue.release(&requester, id);
    command_queue(&app, &id, "the workflow is released", release).await
}

async fn remove_workflow(
    State(app): State<App>,
    Caller(requester): Caller,
    Path(id): Path<String>,
    _: Parameters<NoParameters>,
) -> CommandAnswer {
    let remove = move |queue: &dyn QueueControl, id| queue.remove(&requester, id);
    command_queue(&app, &id, "the workflow is removed", remove).await
}

async fn set_priority(
    State(app): State<App>,
    Caller(requester): Caller,
    Path(id): Path<String>,
    _: Parameters<NoParameters>,
    JsonBody(body): JsonBody<PriorityBody>,
) -> CommandAnswer {
    let set = change_priority(requester, body.priority);
    command_queue(&app, &id, "the priority is changed", set).await
}

fn change_priority(
    requester: Requester,
    priority: i32,
) -> impl FnOnce(&dyn QueueControl, WorkflowId) -> Result<()> + Send + 'static {
    move |queue, id| queue.set_priority(&requester, id, priority)
}
