//! What all requests share: who may, the runs, the queue.

use std::sync::Arc;

use axum::Json;
use axum::http::StatusCode;
use bafs_proto::{Error, ErrorCode, Result};
use bafs_queue::QueueControl;
use serde::Serialize;

use crate::access::Access;
use crate::api_error::ApiResult;
use crate::open_streams::OpenStreams;
use crate::source::RunSource;

/// What all requests share.
#[derive(Clone)]
pub(crate) struct App {
    pub(crate) access: Arc<Access>,
    pub(crate) source: Arc<dyn RunSource>,
    pub(crate) queue: Option<Arc<dyn QueueControl>>,
    /// Streams of events that are open.
    pub(crate) streams: OpenStreams,
}

impl App {
    /// Asks the source, which may read files, on a thread that may wait.
    pub(crate) async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&dyn RunSource) -> Result<T> + Send + 'static,
    ) -> ApiResult<T> {
        let source = self.source.clone();
        let answer = tokio::task::spawn_blocking(move || question(&*source)).await;
        let broken = |_| Error::new(ErrorCode::ServerFault, "the request could not be answered");
        Ok(answer.map_err(broken)??)
    }
}

/// A command was handed on.
#[derive(Debug, Serialize)]
pub(crate) struct Accepted {
    accepted: bool,
    message: String,
}

pub(crate) fn accept(message: impl Into<String>) -> (StatusCode, Json<Accepted>) {
    let message = message.into();
    let accepted = true;
    (StatusCode::ACCEPTED, Json(Accepted { accepted, message }))
}
