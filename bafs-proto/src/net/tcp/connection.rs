//! One TCP connection to a server, and its calls in progress.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::runtime::Handle;
use tokio::sync::{Semaphore, oneshot};

use super::chunks::{FrameEvent, FrameReceiver, FrameSender, split_stream};
use crate::error::{Error, ErrorCode, Result};
use crate::net::Frame;
use crate::net::hello::KEEP_ALIVE_INTERVAL_MS;
use crate::net::memory_budget::{CONNECTION_BUDGET_KIB, call_weight_kib};
use crate::net::tls::TlsTcpStream;

/// Calls and request bodies in progress at once, in KiB (see [`call_weight_kib`]): half of the
/// server's bound, because the server still works on cancelled calls.
const CALL_BUDGET_KIB: usize = CONNECTION_BUDGET_KIB / 2;

/// Ticks after which an idle connection is closed, unless it is the last.
const IDLE_TICKS: u32 = (10_000 / KEEP_ALIVE_INTERVAL_MS) as u32;

/// One connection to a server.
pub(super) struct TcpConnection {
    outbox: Arc<FrameSender>,
    calls: Mutex<PendingCalls>,
    call_budget: Semaphore,
    runtime: Handle,
}

struct PendingCalls {
    next_call: u32,
    reply_senders: HashMap<u32, oneshot::Sender<Result<Frame>>>,
    /// Why nothing can be called any more.
    end_error: Option<Error>,
}

impl TcpConnection {
    /// Takes a connection into use. Must be called within a runtime. `first` stays when idle.
    pub(super) fn start(stream: TlsTcpStream, first: bool) -> Arc<Self> {
        let (sender, receiver) = split_stream(stream, None);
        let runtime = Handle::current();
        let connection = Arc::new(Self {
            outbox: sender,
            calls: Mutex::new(PendingCalls {
                next_call: 0,
                reply_senders: HashMap::new(),
                end_error: None,
            }),
            call_budget: Semaphore::new(CALL_BUDGET_KIB),
            runtime: runtime.clone(),
        });
        runtime.spawn(run_connection(connection.clone(), receiver, first));
        connection
    }

    /// Calls in progress, `None` after the end.
    pub(super) fn calls_in_flight(&self) -> Option<usize> {
        let calls = self.lock();
        calls
            .end_error
            .is_none()
            .then_some(calls.reply_senders.len())
    }

    /// Sends a frame and waits for the frame that answers it.
    ///
    /// # Errors
    /// `Unreachable` when the connection is or gets broken.
    pub(super) async fn exchange(&self, frame: Frame) -> Result<Frame> {
        let _place = self
            .call_budget
            .acquire_many(call_weight_kib(frame.0.len() + frame.1.len()))
            .await
            .map_err(|_| Error::new(ErrorCode::Unreachable, "the connection ended"))?;
        let (call, mut answer) = self.add_call()?;
        let call = PendingCall {
            connection: self,
            call,
        };
        let sent = tokio::select! {
            biased;
            sent = self.outbox.send(call.call, frame) => sent,
            // The connection ended, or the server rejects the unread request.
            answer = &mut answer => return answer.unwrap_or_else(|_| Err(ended_error())),
        };
        // Why a connection broke is known to its reader.
        if let Err(error) = sent {
            self.outbox.request_close();
            return answer.await.unwrap_or(Err(error));
        }
        answer.await.unwrap_or_else(|_| Err(ended_error()))
    }

    /// Ends the connection if it is unused.
    pub(super) fn request_close(&self) {
        self.outbox.request_close();
    }

    fn add_call(&self) -> Result<(u32, oneshot::Receiver<Result<Frame>>)> {
        let mut calls = self.lock();
        if let Some(error) = &calls.end_error {
            return Err(error.clone());
        }
        let (tell, answer) = oneshot::channel();
        let call = calls.next_call;
        calls.next_call = calls.next_call.wrapping_add(1);
        calls.reply_senders.insert(call, tell);
        Ok((call, answer))
    }

    fn fail_calls(&self, error: Error) {
        let mut calls = self.lock();
        let waiting = std::mem::take(&mut calls.reply_senders);
        calls.end_error.get_or_insert_with(|| error.clone());
        drop(calls);
        for (_, tell) in waiting {
            // A cancelled caller needs no answer.
            let _ = tell.send(Err(error.clone()));
        }
    }

    /// Whether the connection stays open after another tick: counts ticks without calls, and closes
    /// it atomically, so that no call starts in between.
    fn is_needed(&self, first: bool, idle: &mut u32, last: &mut u32) -> bool {
        let mut calls = self.lock();
        if first || !calls.reply_senders.is_empty() || calls.next_call != *last {
            (*idle, *last) = (0, calls.next_call);
            return true;
        }
        *idle += 1;
        if *idle >= IDLE_TICKS {
            calls.end_error = Some(ended_error());
        }
        calls.end_error.is_none()
    }

    fn lock(&self) -> MutexGuard<'_, PendingCalls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call that waits for its answer; dropping it cancels the call at the server.
struct PendingCall<'a> {
    connection: &'a TcpConnection,
    call: u32,
}

impl Drop for PendingCall<'_> {
    fn drop(&mut self) {
        if self
            .connection
            .lock()
            .reply_senders
            .remove(&self.call)
            .is_none()
        {
            return;
        }
        let (sender, call) = (self.connection.outbox.clone(), self.call);
        self.connection
            .runtime
            .spawn(async move { sender.cancel(call).await });
    }
}

async fn run_connection(connection: Arc<TcpConnection>, mut receiver: FrameReceiver, first: bool) {
    let (mut idle, mut last) = (0, 0);
    let reading = async {
        loop {
            match receiver.next_event().await {
                Ok(FrameEvent::Frame(call, frame, _)) => {
                    let waiting = connection.lock().reply_senders.remove(&call);
                    // Without a waiter it was cancelled while the answer was on its way.
                    if let Some(tell) = waiting {
                        let _ = tell.send(Ok(frame));
                    }
                }
                Ok(FrameEvent::Refused(_) | FrameEvent::Cancel(_)) => {
                    return Error::new(ErrorCode::Malformed, "the server speaks like a client");
                }
                Err(error) => return error,
            }
        }
    };
    let error = tokio::select! {
        error = reading => error,
        error = connection.outbox.run_keepalive(|| {
            connection.is_needed(first, &mut idle, &mut last)
        }) => error,
        () = connection.outbox.wait_closed() => ended_error(),
    };
    // The server's invalid frames are its fault; a new connection may work.
    let error = Error::new(ErrorCode::Unreachable, error.detail);
    connection.fail_calls(error);
    connection.outbox.close().await;
}

fn ended_error() -> Error {
    Error::new(ErrorCode::Unreachable, "the connection ended")
}
