//! Calls of a run to its servers: with which token, until when, and how often again.

use bafs_proto::message::{Call, Request};
use bafs_proto::time::{Deadline, KeepaliveDeadline};
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;

use super::servers::Servers;
use crate::driver::{monotonic_now, wall_time_now};

/// A call that nobody answers is made again so often because no node answered meanwhile.
const CUT_OFF_RETRIES_MAX: u32 = 3;

impl Servers {
    /// Makes a call once.
    pub(crate) async fn call_once<C: Call + Clone>(
        &self,
        address: &str,
        call: C,
        deadline: Deadline,
    ) -> Result<C::Reply> {
        let token =
            self.make_call_token(address, call.clone().into(), deadline.remaining_ms().into())?;
        let answer = self.pool.call(address, &token, call, deadline).await;
        // One call may be late for other reasons: silence begins with its end.
        self.note_call_result(address, monotonic_now(), &answer);
        answer
    }

    /// The token that a call shows: good for nothing else, and at no other node.
    pub(super) fn make_call_token(
        &self,
        address: &str,
        request: Request,
        ms: u64,
    ) -> Result<Token> {
        self.bearer
            .token_for_call(address, &request, wall_time_now(), ms)
    }

    pub(crate) async fn call_until<C: Call + Clone>(
        &self,
        address: &str,
        call: C,
        ms: u64,
    ) -> Result<C::Reply> {
        self.call_until_with_body(address, call, Bytes::new(), ms)
            .await
    }

    pub(super) async fn call_until_with_body<C: Call + Clone>(
        &self,
        address: &str,
        call: C,
        body: Bytes,
        ms: u64,
    ) -> Result<C::Reply> {
        let mut doubts = 0;
        loop {
            let (since, deadline) = (monotonic_now(), Deadline::after_ms(ms));
            let token = self.make_call_token(
                address,
                call.clone().into(),
                KeepaliveDeadline::total_ms_max(ms),
            )?;
            let (call, body) = (call.clone(), body.clone());
            let asked = self
                .pool
                .call_with_retries(address, &token, call, body, deadline);
            let answer = asked.await.map(|(reply, _)| reply);
            self.note_call_result(address, since, &answer);
            match &answer {
                Err(error) if is_unanswered(error) && doubts < CUT_OFF_RETRIES_MAX => {
                    doubts += 1;
                    if !self.wait_out_cut_off(since).await {
                        return answer;
                    }
                }
                _ => return answer,
            }
        }
    }
}

/// Whether a call failed because nobody answered it.
pub(crate) fn is_unanswered(error: &Error) -> bool {
    matches!(
        error.code,
        ErrorCode::Unreachable | ErrorCode::DeadlineExceeded
    )
}
