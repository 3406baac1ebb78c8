//! One call of a session: sent again while that may help, and waited for while its server is not
//! silent. Knows nothing of what it carries.

use std::pin::pin;
use std::time::Duration;

use bafs_proto::message::{FileResults, RunFileOps};
use bafs_proto::time::{Deadline, KeepaliveDeadline};
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;

use super::{RemoteSession, lock};
use crate::clock;
use crate::limits::{RETRY_PAUSE_MS_MAX, RETRY_PAUSE_MS_MIN};
use crate::tree::Server;

impl RemoteSession {
    /// Calls until there is an answer that is no transient error. `maybe_ran` tells then whether
    /// an attempt may have reached the server whose answer did not reach us.
    pub(super) async fn call_with_retries(
        &self,
        call: RunFileOps,
        data: &Bytes,
        deadline: Deadline,
        maybe_ran: &mut bool,
    ) -> Result<(FileResults, Bytes)> {
        let Server {
            pool,
            address,
            token,
            ..
        } = &self.server;
        let mut pause_ms = RETRY_PAUSE_MS_MIN;
        let mut timeout = KeepaliveDeadline::new(deadline);
        loop {
            let deadline = timeout.deadline();
            let error = match pool.connection(address, deadline).await {
                Err(error) => error,
                Ok(connection) => {
                    let (call, data, end) = (call.clone(), data.clone(), timeout.final_deadline());
                    let calling = connection.call_with_body(token, call, data, end);
                    match self.wait_for_reply(&mut timeout, calling).await {
                        Ok(answer) => return Ok(answer),
                        Err(error) => {
                            let told =
                                matches!(error.code, ErrorCode::Busy | ErrorCode::SessionUnknown);
                            *maybe_ran |= error.is_transient() && !told;
                            error
                        }
                    }
                }
            };
            if timeout.extend_if_in_progress(&error) {
                // It is one batch, whose answer this call waits for. A server that says so at once
                // must not make us spin.
                tokio::time::sleep(Duration::from_millis(RETRY_PAUSE_MS_MIN)).await;
                continue;
            }
            let again = error.is_transient() && error.code != ErrorCode::SessionUnknown;
            // The time that is left counts from what was heard last, whenever that is looked at.
            timeout.extend_since(self.time_since_reply());
            let deadline = timeout.deadline();
            if !again || deadline.remaining() <= Duration::from_millis(pause_ms) {
                return Err(error);
            }
            tracing::debug!(address, %error, "retrying operations");
            tokio::time::sleep(Duration::from_millis(pause_ms)).await;
            pause_ms = (pause_ms * 2).min(RETRY_PAUSE_MS_MAX);
        }
    }

    /// How long ago the server answered anything of this session.
    fn time_since_reply(&self) -> Duration {
        clock::now().saturating_duration_since(*lock(&self.last_reply_at))
    }

    /// The answer to a call, if the server is not silent until the deadline: whoever waits behind
    /// others on a slow link waits on, as long as it answers anything.
    async fn wait_for_reply<T>(
        &self,
        timeout: &mut KeepaliveDeadline,
        calling: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        let mut calling = pin!(calling);
        loop {
            let deadline = timeout.deadline().instant().into();
            match tokio::time::timeout_at(deadline, &mut calling).await {
                Ok(answer) => {
                    if answer.as_ref().map_or_else(is_server_reply, |_| true) {
                        *lock(&self.last_reply_at) = clock::now();
                    }
                    return answer;
                }
                Err(_) => {
                    if !timeout.extend_since(self.time_since_reply()) {
                        let text = format!("{} did not answer in time", self.server.address);
                        return Err(Error::new(ErrorCode::DeadlineExceeded, text));
                    }
                }
            }
        }
    }
}

/// Whether it is the server that says this, and not who waited for it.
fn is_server_reply(error: &Error) -> bool {
    matches!(error.code, ErrorCode::Busy | ErrorCode::InProgress)
}
