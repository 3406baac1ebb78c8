//! Waits until operations of the log are on their way, or have run at the server.

use bafs_proto::file_op::FileResult;
use tokio::sync::watch;

use super::RemoteSession;
use super::delegation::{AnswerCondition, SessionDelegation};

impl RemoteSession {
    /// Waits until an answer may go.
    pub(super) async fn wait_for_condition(
        &self,
        own: &SessionDelegation,
        until: AnswerCondition,
        result: FileResult,
    ) -> FileResult {
        match until {
            AnswerCondition::Immediately => return result,
            AnswerCondition::Acknowledged(position) => self.wait_for_position(own, position).await,
            AnswerCondition::LogSpace => loop {
                let settled = {
                    let state = own.lock_state();
                    if state.is_satisfied(until) {
                        return result;
                    }
                    state.delegation.log.acknowledged_position()
                };
                if self.health.loss().is_some() {
                    break;
                }
                self.wait_for_position(own, settled + 1).await;
            },
        }
        self.fail_if_lost(result)
    }

    /// Waits until all that is in the log now has run.
    pub(super) async fn wait_for_log(&self, own: &SessionDelegation) {
        let end = own.lock_state().delegation.log.end_position();
        self.wait_for_position(own, end).await;
    }

    /// Waits until all before a position has run, or the volume is lost.
    pub(super) async fn wait_for_position(&self, own: &SessionDelegation, position: u64) {
        self.wait_until_reached(own, &own.acknowledged, position)
            .await;
    }

    /// Waits until all before a position is on its way, or the volume is lost.
    pub(super) async fn wait_until_sent(&self, own: &SessionDelegation, position: u64) {
        self.wait_until_reached(own, &own.sent, position).await;
    }

    async fn wait_until_reached(
        &self,
        own: &SessionDelegation,
        progress: &watch::Sender<u64>,
        position: u64,
    ) {
        let mut reached = progress.subscribe();
        if *reached.borrow_and_update() >= position {
            return;
        }
        {
            let mut state = own.lock_state();
            state.wanted_position = state.wanted_position.max(position);
        }
        own.ship_here();
        let waiting = reached.wait_for(|reached| *reached >= position);
        let _ = self.health.run_unless_lost(waiting).await;
    }
}
