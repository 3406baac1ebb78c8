//! One page at a port, for whoever asks: few connections at once, none for long, in a thread of its
//! own, so that nobody who asks can slow the server. The only user of the HTTP library.

use std::convert::Infallible;
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use hyper::body::Incoming;
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Connections at once; further ones are closed at once.
pub(super) const CONNECTIONS_MAX: usize = 32;

/// A connection may last so long, whatever happens on it, in milliseconds.
const CONNECTION_TIMEOUT_MS: u64 = 5_000;

/// The head of a request must be there after so long, in milliseconds.
const HEADER_TIMEOUT_MS: u64 = 2_000;

/// Bytes and fields of a request's head.
const HEADER_BYTES_MAX: usize = 16 << 10;
const HEADER_FIELDS_MAX: usize = 64;

/// After an error of the system, nothing is accepted for so long, in milliseconds.
const ACCEPT_RETRY_MS: u64 = 100;

const PAGE_CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Makes the page.
type PageRenderer = Arc<dyn Fn() -> String + Send + Sync>;

/// Serves the page for as long as the process lives.
pub(super) fn serve_page(listener: TcpListener, page: PageRenderer) -> Result<()> {
    listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let work = move || {
        runtime.block_on(async {
            match tokio::net::TcpListener::from_std(listener) {
                Ok(listener) => accept_connections(&listener, &page).await,
                Err(error) => tracing::error!(%error, "there are no metrics"),
            }
        });
    };
    std::thread::Builder::new()
        .name("metrics".to_owned())
        .spawn(work)
        .context("cannot start the thread of the metrics")?;
    Ok(())
}

async fn accept_connections(listener: &tokio::net::TcpListener, page: &PageRenderer) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                if let Ok(place) = places.clone().try_acquire_owned() {
                    tokio::spawn(serve_connection(stream, place, page.clone()));
                }
            }
            Err(error) => {
                tracing::debug!(%error, "a connection for metrics was not accepted");
                tokio::time::sleep(Duration::from_millis(ACCEPT_RETRY_MS)).await;
            }
        }
    }
}

async fn serve_connection(stream: TcpStream, place: OwnedSemaphorePermit, page: PageRenderer) {
    let _place = place;
    let reply = service_fn(|request: Request<Incoming>| {
        let response = respond_to_request(&request, &page);
        async { Ok::<_, Infallible>(response) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(Duration::from_millis(HEADER_TIMEOUT_MS))
        .keep_alive(false)
        .max_buf_size(HEADER_BYTES_MAX)
        .max_headers(HEADER_FIELDS_MAX)
        .serve_connection(TokioIo::new(stream), reply);
    let whole = Duration::from_millis(CONNECTION_TIMEOUT_MS);
    if let Ok(Err(error)) = tokio::time::timeout(whole, connection).await {
        tracing::debug!(%error, "a request for metrics was not answered");
    }
}

fn respond_to_request(request: &Request<Incoming>, page: &PageRenderer) -> Response<String> {
    let plain = |status: StatusCode, text: &str| {
        let mut response = Response::new(text.to_owned());
        *response.status_mut() = status;
        response
    };
    if request.uri().path() != "/metrics" {
        return plain(StatusCode::NOT_FOUND, "the metrics are at /metrics\n");
    }
    if request.method() != Method::GET && request.method() != Method::HEAD {
        let mut response = plain(StatusCode::METHOD_NOT_ALLOWED, "GET and HEAD only\n");
        let allowed = HeaderValue::from_static("GET, HEAD");
        response.headers_mut().insert(ALLOW, allowed);
        return response;
    }
    let mut response = Response::new(page());
    let kind = HeaderValue::from_static(PAGE_CONTENT_TYPE);
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}
