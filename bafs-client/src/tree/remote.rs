//! A tree behind a server: a scratch volume, or a home path without any caching. One call per
//! operation; a lost reply never runs an operation twice, because calls carry numbers.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bafs_proto::file_op::{Caller, FileOp, FileReply, FileResult};
use bafs_proto::ids::AgentId;
use bafs_proto::limits::OPS_MAX;
use bafs_proto::message::{CloseTree, FileResults, OpenTree, RunFileOps, TreeRef, TreeSession};
use bafs_proto::net::pool::Pool;
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::Done;
use crate::errno::errno_of;
use crate::fate::{Fate, is_fatal};
use crate::limits::{CLOSE_MS, FORGETS_MAX, RENEW_MS_MAX};

/// How to call the server that holds a volume.
#[derive(Debug, Clone)]
pub struct Server {
    /// Connections of this process.
    pub pool: Pool,
    /// Where it is, `host:port`.
    pub address: String,
    /// Capability for the volume.
    pub token: Token,
    /// Deadline of each operation, in milliseconds.
    pub op_deadline_ms: u64,
}

impl Server {
    /// The deadline of an operation that starts now.
    pub fn deadline(&self) -> Deadline {
        Deadline::after_ms(self.op_deadline_ms)
    }
}

/// A session with a tree of a server.
#[derive(Debug)]
pub struct RemoteTree {
    session: Arc<Session>,
    runtime: Handle,
    renewal: JoinHandle<()>,
}

#[derive(Debug)]
struct Session {
    server: Server,
    tree: TreeRef,
    opened: TreeSession,
    fate: Fate,
    /// The last number given to a batch.
    sequence: AtomicU64,
    /// References that the kernel dropped; nobody waits for them, so they travel together.
    forgets: Mutex<Vec<FileOp>>,
    /// Set before the session is ended on purpose.
    is_closing: AtomicBool,
}

impl RemoteTree {
    /// Opens a tree and keeps its lease alive. Must be called within a tokio runtime, which then
    /// makes all calls.
    ///
    /// # Errors
    /// What the server answers, or the last transient error when the deadline passes.
    pub async fn open(
        server: Server,
        tree: TreeRef,
        agent: AgentId,
        writable: bool,
        fate: Fate,
    ) -> Result<Self> {
        let call = OpenTree {
            tree: tree.clone(),
            agent,
            writable,
        };
        let deadline = server.deadline();
        let (opened, _) = server
            .pool
            .call_until(&server.address, &server.token, call, Bytes::new(), deadline)
            .await?;
        let session = Arc::new(Session {
            server,
            tree,
            opened,
            fate,
            sequence: AtomicU64::new(0),
            forgets: Mutex::default(),
            is_closing: AtomicBool::new(false),
        });
        let renewal = tokio::spawn(Arc::clone(&session).renew());
        Ok(Self {
            session,
            runtime: Handle::current(),
            renewal,
        })
    }

    pub(super) fn run(&self, caller: Caller, op: FileOp, data: &[u8], done: Done) {
        if let FileOp::Forget { .. } = op {
            self.forget(op);
            return done(Ok(FileReply::Done), &[]);
        }
        let session = Arc::clone(&self.session);
        let data = Bytes::copy_from_slice(data);
        self.runtime.spawn(async move {
            let (result, data) = session.run_one(caller, op, data).await;
            done(result, &data);
        });
    }

    /// Ends the session politely. A server that does not answer ends it by its lease.
    pub(super) async fn close(&self) {
        self.renewal.abort();
        self.session.is_closing.store(true, Ordering::Release);
        let Session {
            server,
            tree,
            opened,
            fate,
            ..
        } = &*self.session;
        if fate.loss().is_some() {
            return;
        }
        let call = CloseTree {
            tree: tree.clone(),
            epoch: opened.epoch,
        };
        let deadline = Deadline::after_ms(CLOSE_MS);
        let closed = server
            .pool
            .call_until(&server.address, &server.token, call, Bytes::new(), deadline)
            .await;
        if let Err(error) = closed {
            tracing::debug!(?tree, %error, "session not closed; its lease will end it");
        }
    }

    fn forget(&self, op: FileOp) {
        let many = {
            let mut forgets = self
                .session
                .forgets
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            forgets.push(op);
            forgets.len() >= FORGETS_MAX
        };
        if many {
            let session = Arc::clone(&self.session);
            self.runtime
                .spawn(async move { session.send_forgets().await });
        }
    }
}

impl Drop for RemoteTree {
    fn drop(&mut self) {
        self.renewal.abort();
    }
}

impl Session {
    async fn run_one(&self, caller: Caller, op: FileOp, data: Bytes) -> (FileResult, Bytes) {
        match self.run_batch(caller, vec![op], data).await {
            Ok((mut results, body)) => match results.pop() {
                Some(Ok(FileReply::Read { length })) if length as usize != body.len() => {
                    let text = "the server's data are shorter or longer than it says";
                    let error = Error::new(ErrorCode::Malformed, text);
                    let errno = errno_of(error.code);
                    self.fate.lose(error);
                    (Err(errno), Bytes::new())
                }
                Some(result) => (result, body),
                None => (Err(errno_of(ErrorCode::Malformed)), Bytes::new()),
            },
            Err(code) => (Err(errno_of(code)), Bytes::new()),
        }
    }

    /// Runs a batch once, however often it must be sent. An error that ends the session ends the
    /// volume too; whoever waits for it gets the code.
    async fn run_batch(
        &self,
        caller: Caller,
        ops: Vec<FileOp>,
        data: Bytes,
    ) -> Result<(Vec<FileResult>, Bytes), ErrorCode> {
        let count = ops.len();
        let call = RunFileOps {
            tree: self.tree.clone(),
            epoch: self.opened.epoch,
            sequence: self.sequence.fetch_add(1, Ordering::Relaxed) + 1,
            caller,
            ops,
        };
        let Server {
            pool,
            address,
            token,
            ..
        } = &self.server;
        let calling = pool.call_until(address, token, call, data, self.server.deadline());
        let Some(answer) = self.fate.while_there(calling).await else {
            return Err(ErrorCode::VolumeLost);
        };
        let answer = answer.and_then(|(FileResults { results }, body)| {
            if results.len() == count {
                return Ok((results, body));
            }
            let text = format!("{} results for {count} operations", results.len());
            Err(Error::new(ErrorCode::Malformed, text))
        });
        answer.map_err(|error| self.fail(error))
    }

    fn fail(&self, error: Error) -> ErrorCode {
        let code = error.code;
        if code == ErrorCode::SessionUnknown && self.is_closing.load(Ordering::Acquire) {
            // The mount is gone, so only a `Release` can be under way: the session's end, which
            // overtook it, has closed its file.
            tracing::debug!(tree = ?self.tree, "an operation came after the end of its session");
        } else if code == ErrorCode::SessionUnknown {
            self.restarted(error);
        } else if is_fatal(&error) {
            self.fate.lose(error);
        }
        code
    }

    /// The server restarted and forgot the session. Open files of the job live in the session,
    /// so the volume is lost to this job; the files themselves are still on the server.
    fn restarted(&self, error: Error) {
        let doing = format!(
            "the server at {} restarted under the job",
            self.server.address
        );
        self.fate.lose(error.context(doing));
    }

    /// Shows interest before the lease ends, as long as the session lasts.
    async fn renew(self: Arc<Self>) {
        let pause = Duration::from_millis((self.opened.lease_ms / 3).clamp(1, RENEW_MS_MAX));
        while self.fate.loss().is_none() {
            tokio::time::sleep(pause).await;
            self.send_forgets().await;
        }
    }

    /// Sends what was forgotten, even if it is nothing: any call is a sign of life.
    async fn send_forgets(&self) {
        let forgets = {
            let mut forgets = self.forgets.lock().unwrap_or_else(PoisonError::into_inner);
            let count = forgets.len().min(OPS_MAX);
            let rest = forgets.split_off(count);
            std::mem::replace(&mut *forgets, rest)
        };
        // A loss is recorded where it is found; nothing else can be done about it here.
        let _ = self
            .run_batch(Caller::default(), forgets, Bytes::new())
            .await;
    }
}
