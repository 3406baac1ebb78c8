//! One TCP connection to a server, and the calls that are under way on it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::runtime::Handle;
use tokio::sync::{Semaphore, oneshot};

use super::pieces::{Inbox, Outbox, Word, halves};
use crate::error::{Error, ErrorCode, Result};
use crate::net::Frame;
use crate::net::hello::KEEP_ALIVE_MS;
use crate::net::room::{CONNECTION_KIB, weight};
use crate::net::tls::Secured;

/// Calls and request bodies under way at once, in KiB (see [`weight`]): half of what a server
/// takes, as it still works at calls that were cancelled.
const ROOM_KIB: usize = CONNECTION_KIB / 2;

/// Time after which a connection that nobody uses is closed, if it is not the last, in ticks.
const IDLE_TICKS: u32 = (10_000 / KEEP_ALIVE_MS) as u32;

/// One connection to a server.
pub(super) struct Lane {
    outbox: Arc<Outbox>,
    calls: Mutex<Calls>,
    room: Semaphore,
    runtime: Handle,
}

struct Calls {
    next: u32,
    waiting: HashMap<u32, oneshot::Sender<Result<Frame>>>,
    /// Why nothing can be called any more.
    ended: Option<Error>,
}

impl Lane {
    /// Takes a connection into use. Must be called within a runtime. `first` stays when idle.
    pub(super) fn start(stream: Secured, first: bool) -> Arc<Self> {
        let (outbox, inbox) = halves(stream, None);
        let runtime = Handle::current();
        let lane = Arc::new(Self {
            outbox,
            calls: Mutex::new(Calls {
                next: 0,
                waiting: HashMap::new(),
                ended: None,
            }),
            room: Semaphore::new(ROOM_KIB),
            runtime: runtime.clone(),
        });
        runtime.spawn(run(lane.clone(), inbox, first));
        lane
    }

    /// Calls under way, `None` when it has ended.
    pub(super) fn busy(&self) -> Option<usize> {
        let calls = self.lock();
        calls.ended.is_none().then_some(calls.waiting.len())
    }

    /// Sends a frame and waits for the frame that answers it.
    ///
    /// # Errors
    /// `Unreachable` when the connection is or gets broken.
    pub(super) async fn exchange(&self, frame: Frame) -> Result<Frame> {
        let _place = self
            .room
            .acquire_many(weight(frame.0.len() + frame.1.len()))
            .await
            .map_err(|_| Error::new(ErrorCode::Unreachable, "the connection ended"))?;
        let (call, mut answer) = self.begin()?;
        let call = Waiting { lane: self, call };
        let sent = tokio::select! {
            biased;
            sent = self.outbox.send(call.call, frame) => sent,
            // It ended meanwhile, or the server refuses what it has not read.
            answer = &mut answer => return answer.unwrap_or_else(|_| Err(gone())),
        };
        // Why a connection broke is known to its reader.
        if let Err(error) = sent {
            self.outbox.ask_to_close();
            return answer.await.unwrap_or(Err(error));
        }
        answer.await.unwrap_or_else(|_| Err(gone()))
    }

    /// Ends it when nobody has use for it.
    pub(super) fn retire(&self) {
        self.outbox.ask_to_close();
    }

    fn begin(&self) -> Result<(u32, oneshot::Receiver<Result<Frame>>)> {
        let mut calls = self.lock();
        if let Some(error) = &calls.ended {
            return Err(error.clone());
        }
        let (tell, answer) = oneshot::channel();
        let call = calls.next;
        calls.next = calls.next.wrapping_add(1);
        calls.waiting.insert(call, tell);
        Ok((call, answer))
    }

    fn end(&self, error: Error) {
        let mut calls = self.lock();
        let waiting = std::mem::take(&mut calls.waiting);
        calls.ended.get_or_insert_with(|| error.clone());
        drop(calls);
        for (_, tell) in waiting {
            // Whoever does not wait any more needs no answer.
            let _ = tell.send(Err(error.clone()));
        }
    }

    /// Whether it goes on after another tick: counts ticks without calls, and ends it, so that none
    /// comes in between.
    fn is_wanted(&self, first: bool, idle: &mut u32, last: &mut u32) -> bool {
        let mut calls = self.lock();
        if first || !calls.waiting.is_empty() || calls.next != *last {
            (*idle, *last) = (0, calls.next);
            return true;
        }
        *idle += 1;
        if *idle >= IDLE_TICKS {
            calls.ended = Some(gone());
        }
        calls.ended.is_none()
    }

    fn lock(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call that waits for its answer; when it stops to wait the server is told.
struct Waiting<'a> {
    lane: &'a Lane,
    call: u32,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.lane.lock().waiting.remove(&self.call).is_none() {
            return;
        }
        let (outbox, call) = (self.lane.outbox.clone(), self.call);
        self.lane
            .runtime
            .spawn(async move { outbox.cancel(call).await });
    }
}

async fn run(lane: Arc<Lane>, mut inbox: Inbox, first: bool) {
    let (mut idle, mut last) = (0, 0);
    let reading = async {
        loop {
            match inbox.next().await {
                Ok(Word::Frame(call, frame, _)) => {
                    let waiting = lane.lock().waiting.remove(&call);
                    // Without a waiter it was cancelled while the answer was on its way.
                    if let Some(tell) = waiting {
                        let _ = tell.send(Ok(frame));
                    }
                }
                Ok(Word::Refused(_) | Word::Cancel(_)) => {
                    return Error::new(ErrorCode::Malformed, "the server speaks like a client");
                }
                Err(error) => return error,
            }
        }
    };
    let error = tokio::select! {
        error = reading => error,
        error = lane.outbox.keep(|| lane.is_wanted(first, &mut idle, &mut last)) => error,
        () = lane.outbox.closed() => gone(),
    };
    // What came from the server in error is its fault, and may be better on the next connection.
    let error = Error::new(ErrorCode::Unreachable, error.detail);
    lane.end(error);
    lane.outbox.close().await;
}

fn gone() -> Error {
    Error::new(ErrorCode::Unreachable, "the connection ended")
}
