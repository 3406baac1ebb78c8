//! One connection per server, made when needed and made again when broken.
//!
//! Two layers, as in Chirp: [`Pool::call`] tries once; [`Pool::call_with_retries`] repeats
//! transient failures with growing pauses until the deadline. Only calls that are safe to repeat
//! may use the second; all of the volume API is.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use tokio::sync::Mutex;

use super::{Connection, Dial};
use crate::error::{Error, ErrorCode, Result};
use crate::ids::ServerId;
use crate::message::Call;
use crate::time::{Deadline, KeepaliveDeadline};
use crate::token::Token;

/// Longest time to wait for a connection before trying afresh.
const DIAL_MS_MAX: u64 = 3_000;

/// First pause of [`Pool::call_with_retries`] after a transient failure; doubles up to the maximum.
const PAUSE_MS_MIN: u64 = 20;
const PAUSE_MS_MAX: u64 = 1_000;

type SharedPoolEntry = Arc<Mutex<PoolEntry>>;

/// The pool's state for one address.
#[derive(Default)]
struct PoolEntry {
    connection: Option<Connection>,
    /// The server that first answered there.
    first_server: Option<ServerId>,
}

/// Connections by address: one for each server, made at first use and again when broken. Clones
/// share the connections.
#[derive(Clone)]
pub struct Pool {
    dialer: Arc<dyn Dial>,
    entries: Arc<std::sync::Mutex<BTreeMap<String, SharedPoolEntry>>>,
    pins_servers: bool,
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Pool")
    }
}

impl Pool {
    /// A pool without connections.
    pub fn new(dialer: Arc<dyn Dial>) -> Self {
        Self {
            dialer,
            entries: Arc::default(),
            pins_servers: false,
        }
    }

    /// The same, but the first server at an address must stay there: for short-lived processes that
    /// know servers only by address.
    #[must_use]
    pub fn with_pinned_servers(self) -> Self {
        let is_faithful = true;
        Self {
            pins_servers: is_faithful,
            ..self
        }
    }

    /// The connection to `address`, made if there is none.
    ///
    /// # Errors
    /// `Unreachable` or `DeadlineExceeded`.
    pub async fn connection(&self, address: &str, deadline: Deadline) -> Result<Connection> {
        let slot = {
            let mut slots = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
            slots.entry(address.to_owned()).or_default().clone()
        };
        // Others may be dialing, one after the other; each waits no longer than it wants.
        let slot = tokio::time::timeout_at(deadline.instant().into(), slot.lock());
        let mut slot = slot.await.map_err(|_| {
            let text = format!("{address} does not answer, and other calls already wait for it");
            Error::new(ErrorCode::Unreachable, text)
        })?;
        let open = slot.connection.take().filter(|c| !c.is_closed());
        let connection = match open {
            Some(connection) => connection,
            None => {
                let soon = deadline.earlier_of(Deadline::after_ms(DIAL_MS_MAX));
                self.dialer.dial(address, soon).await?
            }
        };
        if self.pins_servers {
            slot.first_server = slot.first_server.or_else(|| connection.server());
            check_server_id(slot.first_server, &connection, address)?;
        }
        slot.connection = Some(connection.clone());
        Ok(connection)
    }

    /// The connection to a certain server, if it is at `address`; to any server there for `None`.
    ///
    /// # Errors
    /// As [`Self::connection`]; a different server there is accepted.
    pub async fn connection_to(
        &self,
        server: Option<ServerId>,
        address: &str,
        deadline: Deadline,
    ) -> Result<Connection> {
        let connection = self.connection(address, deadline).await?;
        check_server_id(server, &connection, address)?;
        Ok(connection)
    }

    /// Makes a call once.
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub async fn call<C: Call>(
        &self,
        address: &str,
        token: &Token,
        call: C,
        deadline: Deadline,
    ) -> Result<C::Reply> {
        self.connection(address, deadline)
            .await?
            .call(token, call, deadline)
            .await
    }

    /// Makes a call, and repeats it while the server reports progress ([`KeepaliveDeadline`]).
    ///
    /// # Errors
    /// As [`Connection::call`].
    pub async fn call_with_keepalives<C: Call + Clone>(
        &self,
        address: &str,
        token: &Token,
        call: C,
        deadline: Deadline,
    ) -> Result<C::Reply> {
        let mut keepalive_deadline = KeepaliveDeadline::new(deadline);
        loop {
            let asked = self.call(address, token, call.clone(), keepalive_deadline.deadline());
            match asked.await {
                Err(error) if keepalive_deadline.extend_if_in_progress(&error) => {}
                answer => return answer,
            }
            tokio::time::sleep(Duration::from_millis(PAUSE_MS_MIN)).await;
        }
    }

    /// Makes a call with raw data once.
    ///
    /// # Errors
    /// As [`Connection::call_with_body`].
    pub async fn call_with_body<C: Call>(
        &self,
        address: &str,
        token: &Token,
        call: C,
        body: Bytes,
        deadline: Deadline,
    ) -> Result<(C::Reply, Bytes)> {
        let connection = self.connection(address, deadline).await?;
        connection.call_with_body(token, call, body, deadline).await
    }

    /// Makes a call, again and again while it fails transiently, until the deadline. A server's
    /// keepalives extend the deadline ([`KeepaliveDeadline`]).
    ///
    /// # Errors
    /// The first error that is not transient, or the last transient one. When the deadline passes,
    /// with the reason of the earlier repetition; [`ErrorCode::HomeUnreachable`] is kept.
    pub async fn call_with_retries<C: Call + Clone>(
        &self,
        address: &str,
        token: &Token,
        call: C,
        body: Bytes,
        deadline: Deadline,
    ) -> Result<(C::Reply, Bytes)> {
        let mut pause_ms = PAUSE_MS_MIN;
        let mut keepalive_deadline = KeepaliveDeadline::new(deadline);
        // The reason of the repetition is more precise than the timeout.
        let mut reason = None;
        loop {
            let body = body.clone();
            let deadline = keepalive_deadline.deadline();
            match self
                .call_with_body(address, token, call.clone(), body, deadline)
                .await
            {
                Err(error) if keepalive_deadline.extend_if_in_progress(&error) => {
                    pause_ms = PAUSE_MS_MIN;
                    reason = None;
                }
                Err(error)
                    if error.is_transient()
                        && error.code != ErrorCode::SessionUnknown
                        && deadline.remaining() > Duration::from_millis(pause_ms) =>
                {
                    tracing::debug!(address, %error, "retrying a call");
                    if error.code != ErrorCode::DeadlineExceeded {
                        reason = Some(error);
                    }
                }
                Err(error) if error.code == ErrorCode::DeadlineExceeded => {
                    return Err(deadline_error(error, reason));
                }
                result => return result,
            }
            tokio::time::sleep(Duration::from_millis(pause_ms)).await;
            pause_ms = (pause_ms * 2).min(PAUSE_MS_MAX);
        }
    }
}

/// Checks that the server that is meant, if any is, answers at an address.
fn check_server_id(meant: Option<ServerId>, there: &Connection, address: &str) -> Result<()> {
    if meant.is_none() || meant == there.server() {
        return Ok(());
    }
    let text =
        format!("another server is at {address} now; restart the earlier one, at any address");
    Err(Error::new(ErrorCode::Unreachable, text))
}

/// The error when the deadline passed after a call was repeated for a `reason`. The code stays,
/// because callers recognise a silent server by it; but a silent home is reported as such.
fn deadline_error(error: Error, reason: Option<Error>) -> Error {
    match reason {
        Some(reason) if reason.code == ErrorCode::HomeUnreachable => reason,
        Some(reason) => error.context(format!("before that: {reason}")),
        None => error,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::message::ListVolumes;
    use crate::net::BoxFuture;

    /// Never connects.
    struct SilentDialer;

    impl Dial for SilentDialer {
        fn dial<'a>(
            &'a self,
            address: &'a str,
            deadline: Deadline,
        ) -> BoxFuture<'a, Result<Connection>> {
            Box::pin(async move {
                tokio::time::sleep_until(deadline.instant().into()).await;
                Err(Error::new(ErrorCode::Unreachable, address))
            })
        }
    }

    #[tokio::test]
    async fn callers_do_not_wait_for_foreign_dial_attempts() {
        let pool = Pool::new(Arc::new(SilentDialer));
        let patient = pool.clone();
        let first =
            tokio::spawn(
                async move { patient.connection("a:1", Deadline::after_ms(60_000)).await },
            );
        tokio::time::sleep(Duration::from_millis(50)).await;
        let wait = pool.connection("a:1", Deadline::after_ms(100));
        let second = tokio::time::timeout(Duration::from_millis(1_500), wait).await;
        let error = second.expect("within its deadline").expect_err("silence");
        assert_eq!(error.code, ErrorCode::Unreachable);
        first.abort();
    }

    /// Is rejected once, then gets no answer until the deadline.
    #[derive(Default)]
    struct RefusingThenSilentDialer(AtomicBool);

    impl Dial for RefusingThenSilentDialer {
        fn dial<'a>(&'a self, _: &'a str, deadline: Deadline) -> BoxFuture<'a, Result<Connection>> {
            let was_refused = self.0.swap(true, Ordering::Relaxed);
            Box::pin(async move {
                if !was_refused {
                    return Err(Error::new(ErrorCode::Unreachable, "refused"));
                }
                tokio::time::sleep_until(deadline.instant().into()).await;
                Err(Error::new(ErrorCode::DeadlineExceeded, "silence"))
            })
        }
    }

    #[tokio::test]
    async fn a_timeout_reports_the_earlier_refusal() {
        let pool = Pool::new(Arc::new(RefusingThenSilentDialer::default()));
        let (token, call) = (Token::none(), ListVolumes::default());
        let deadline = Deadline::after_ms(500);
        let error = pool
            .call_with_retries("a:1", &token, call, Bytes::new(), deadline)
            .await;
        let error = error.expect_err("nobody answers");
        assert_eq!(error.code, ErrorCode::DeadlineExceeded, "it is silent");
        assert!(error.detail.contains("refused"), "{error}");
    }
}
