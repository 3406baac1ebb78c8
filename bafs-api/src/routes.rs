//! All routes, and what stands before them: the host name, who asks, and the headers of answers.

use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::StatusCode;
use axum::http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderName, HeaderValue, REFERRER_POLICY,
    WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS, X_FRAME_OPTIONS,
};
use axum::middleware::{Next, from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use bafs_proto::ErrorCode;
use bafs_queue::Requester;
use serde_json::json;

use crate::access::check_host;
use crate::api_error::ApiError;
use crate::app::App;
use crate::event_stream::stream_events;
use crate::parameters::{Caller, NoParameters, Parameters};
use crate::{page, run_routes, workflow_routes};

/// The description of all routes.
pub(crate) const OPENAPI: &str = include_str!("openapi.json");

/// Longest body: the text of a workflow. Others are small.
const BODY_BYTES_MAX: usize = 16 << 20;

/// The page loads nothing from elsewhere, runs no script of others, and is in no frame.
const CONTENT_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; \
                              connect-src 'self'; img-src 'self' data:; base-uri 'none'; \
                              form-action 'none'; frame-ancestors 'none'";

/// All that is served.
pub(crate) fn create_router(app: App) -> Router {
    let api = run_routes::router()
        .merge(workflow_routes::router())
        .route("/openapi.json", get(get_description))
        .route("/session", get(get_session))
        .route("/login-links", post(create_login_link))
        .route("/metrics", get(run_routes::get_metrics))
        .route("/runs/{run}/events", get(stream_events))
        .layer(from_fn_with_state(app.clone(), authenticate));
    Router::new()
        .nest("/api/v1", api)
        .merge(page::router())
        .fallback(|| async { ApiError::not_found("there is no such route") })
        .method_not_allowed_fallback(|| async {
            ApiError::new(
                StatusCode::METHOD_NOT_ALLOWED,
                ErrorCode::Unsupported,
                "the route does not take this method",
                "The header Allow lists the methods of the route.",
            )
        })
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(from_fn(guard))
        .with_state(app)
}

/// Rejects other host names, and says in each answer what browsers may do with it.
async fn guard(request: Request, next: Next) -> Response {
    let mut response = match check_host(request.headers()) {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    };
    for (name, value) in [
        (CONTENT_SECURITY_POLICY, CONTENT_POLICY),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (X_FRAME_OPTIONS, "DENY"),
        (REFERRER_POLICY, "no-referrer"),
        (CACHE_CONTROL, "no-store"),
        (
            HeaderName::from_static("cross-origin-resource-policy"),
            "same-origin",
        ),
        (
            HeaderName::from_static("cross-origin-opener-policy"),
            "same-origin",
        ),
    ] {
        let value = HeaderValue::from_static(value);
        response.headers_mut().insert(name, value);
    }
    response
}

/// Finds out who asks, or rejects the request.
async fn authenticate(State(app): State<App>, mut request: Request, next: Next) -> Response {
    match app.access.authenticate(request.method(), request.headers()) {
        Ok(requester) => {
            request.extensions_mut().insert(requester);
            next.run(request).await
        }
        Err(error) => {
            let mut response = error.into_response();
            if response.status() == StatusCode::UNAUTHORIZED {
                let scheme = HeaderValue::from_static("Bearer");
                response.headers_mut().insert(WWW_AUTHENTICATE, scheme);
            }
            response
        }
    }
}

async fn get_description(_: Parameters<NoParameters>) -> Response {
    let kind = HeaderValue::from_static("application/json");
    ([(CONTENT_TYPE, kind)], OPENAPI).into_response()
}

async fn get_session(
    State(app): State<App>,
    Caller(Requester {
        user, is_operator, ..
    }): Caller,
    _: Parameters<NoParameters>,
) -> Json<serde_json::Value> {
    Json(json!({
        "user": user,
        "is_operator": is_operator,
        "has_queue": app.queue.is_some(),
        "version": env!("CARGO_PKG_VERSION"),
    }))
}

/// A link for a browser, for whoever has a bearer token.
async fn create_login_link(
    State(app): State<App>,
    Caller(requester): Caller,
    _: Parameters<NoParameters>,
) -> (StatusCode, Json<serde_json::Value>) {
    let link = app.access.create_login_link(requester).to_string();
    (StatusCode::CREATED, Json(json!({ "url": link })))
}
