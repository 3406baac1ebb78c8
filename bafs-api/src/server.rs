//! Serves the routes at an address of this machine, in a thread of its own, so that nobody who asks
//! can slow a run. The only user of the HTTP library beside the metrics.

use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use bafs_proto::{Error, ErrorCode, Result};
use bafs_queue::QueueControl;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::TcpStream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::access::Access;
use crate::app::App;
use crate::open_streams::OpenStreams;
use crate::routes::create_router;
use crate::source::RunSource;

/// Connections at once: a browser has six, and each stream of events one. Further ones are closed.
const CONNECTIONS_MAX: usize = 128;

/// The head of a request must be there after so long.
const HEADER_TIMEOUT: Duration = Duration::from_secs(10);

/// Bytes and fields of a request's head.
const HEADER_BYTES_MAX: usize = 32 << 10;
const HEADER_FIELDS_MAX: usize = 64;

/// After an error of the system, nothing is accepted for so long.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Threads that read files for requests: a run needs the processors.
const BLOCKING_THREADS_MAX: usize = 8;

/// Pages read the last state within so long after their streams ended.
const LAST_LOOK: Duration = Duration::from_secs(1);

/// How often the end of the last stream is looked for.
const STREAM_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// What is served, for as long as the process lives.
#[derive(Debug, Clone)]
pub struct PageServer {
    access: Arc<Access>,
    streams: OpenStreams,
}

impl PageServer {
    /// Who may use it.
    pub fn access(&self) -> &Access {
        &self.access
    }

    /// Where it is.
    pub fn address(&self) -> SocketAddr {
        self.access.address()
    }

    /// Waits until open pages know the end of their runs, and have read the last state, at most so
    /// long. Without pages it does not wait.
    pub async fn finish_streams(&self, timeout: Duration) {
        let has_streams = || self.streams.has_any();
        if !has_streams() {
            return;
        }
        let all = async {
            while has_streams() {
                tokio::time::sleep(STREAM_POLL_INTERVAL).await;
            }
            tokio::time::sleep(LAST_LOOK).await;
        };
        // Who does not read any more gets nothing.
        let _ = tokio::time::timeout(timeout, all).await;
    }
}

/// Serves runs, and a queue where there is one, at `address`, which must be of the machine itself:
/// nothing is encrypted. Port 0 chooses a free one.
///
/// # Errors
/// `Malformed` if the address is none, or not of the machine itself; `ServerFault` if it cannot be
/// listened at.
pub fn start_server(
    address: &str,
    source: Arc<dyn RunSource>,
    queue: Option<Arc<dyn QueueControl>>,
) -> Result<PageServer> {
    let malformed = |why: String| Error::new(ErrorCode::Malformed, why);
    let places = address.to_socket_addrs();
    let places = places.map_err(|e| malformed(format!("{address} is no HOST:PORT: {e}")))?;
    let places: Vec<SocketAddr> = places.collect();
    if !places.iter().all(|place| place.ip().is_loopback()) {
        let text = format!(
            "{address} can be reached from other machines, and nothing is encrypted; give an \
             address such as 127.0.0.1:0, and forward its port with ssh -L"
        );
        return Err(malformed(text));
    }
    let fault = |e: std::io::Error| {
        let text = format!("cannot listen at {address}: {e}");
        Error::new(ErrorCode::ServerFault, text)
    };
    let listener = TcpListener::bind(&*places).map_err(fault)?;
    listener.set_nonblocking(true).map_err(fault)?;
    let bound = listener.local_addr().map_err(fault)?;
    let server = PageServer {
        access: Arc::new(Access::new(bound)),
        streams: OpenStreams::default(),
    };
    let router = create_router(App {
        access: server.access.clone(),
        source,
        queue,
        streams: server.streams.clone(),
    });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(BLOCKING_THREADS_MAX)
        .build()
        .map_err(fault)?;
    let work = move || {
        runtime.block_on(async {
            match tokio::net::TcpListener::from_std(listener) {
                Ok(listener) => accept_connections(&listener, &router).await,
                Err(error) => tracing::error!(%error, "there is no page"),
            }
        });
    };
    let thread = std::thread::Builder::new().name("page".to_owned());
    thread.spawn(work).map_err(fault)?;
    Ok(server)
}

async fn accept_connections(listener: &tokio::net::TcpListener, router: &Router) {
    let places = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        match listener.accept().await {
            Ok((stream, _)) => {
                if let Ok(place) = places.clone().try_acquire_owned() {
                    tokio::spawn(serve_connection(stream, place, router.clone()));
                }
            }
            Err(error) => {
                tracing::debug!(%error, "a connection for the page was not accepted");
                tokio::time::sleep(ACCEPT_RETRY).await;
            }
        }
    }
}

async fn serve_connection(stream: TcpStream, place: OwnedSemaphorePermit, router: Router) {
    let _place = place;
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .max_buf_size(HEADER_BYTES_MAX)
        .max_headers(HEADER_FIELDS_MAX)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    if let Err(error) = connection.await {
        tracing::debug!(%error, "a request for the page was not answered");
    }
}

#[cfg(test)]
mod tests;
