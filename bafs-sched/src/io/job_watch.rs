//! Watches the executions of one node by long polling and tells how each ended. Starts and kills
//! nothing, and does not judge a node that does not answer.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bafs_proto::ids::ExecutionId;
use bafs_proto::message::{JobState, WatchJobs};
use bafs_proto::time::Deadline;
use tokio::sync::{mpsc, watch};

use super::servers::Servers;
use crate::Event;
use crate::driver::message::DriverMessage;

/// One poll waits so long for news, in milliseconds.
const POLL_WAIT_MS: u32 = 5_000;

/// The answer to a poll may come so much later than that, in milliseconds.
const POLL_GRACE_MS: u64 = 3_000;

/// Pause after a poll that failed, in milliseconds.
const RETRY_PAUSE_MS: u64 = 200;

/// What to watch on one node.
#[derive(Debug)]
pub(crate) struct WatchList {
    /// Where the node listens now.
    pub(crate) address: String,
    pub(crate) executions: BTreeSet<ExecutionId>,
}

/// The watch list of one node, which changes while it is watched.
pub(crate) type WatchListSender = Arc<watch::Sender<WatchList>>;

/// Watches until the other ends of its channels are gone.
pub(crate) async fn watch_node(
    servers: Servers,
    watched: WatchListSender,
    notes: mpsc::Sender<DriverMessage>,
) {
    let mut changes = watched.subscribe();
    loop {
        let (address, executions) = {
            let list = changes.borrow_and_update();
            (
                list.address.clone(),
                list.executions.iter().copied().collect::<Vec<_>>(),
            )
        };
        if executions.is_empty() {
            if changes.changed().await.is_err() {
                return;
            }
            continue;
        }
        let call = WatchJobs {
            executions: executions.clone(),
            wait_ms: POLL_WAIT_MS,
        };
        let deadline = Deadline::after_ms(u64::from(POLL_WAIT_MS) + POLL_GRACE_MS);
        let poll = servers.call_once(&address, call, deadline);
        let answer = tokio::select! {
            answer = poll => answer,
            // Others are to be watched too: ask anew for all.
            _ = changes.changed() => continue,
        };
        let mut events = Vec::new();
        match answer {
            Ok(answer) => {
                for (&execution, report) in executions.iter().zip(answer.reports) {
                    match report {
                        Some(JobState::Running) => {}
                        Some(JobState::Ended(report)) => {
                            events.push(Event::JobEnded { execution, report });
                        }
                        None => events.push(Event::JobUnknown { execution }),
                    }
                }
            }
            Err(error) => {
                tracing::debug!(node = address, %error, "node does not answer");
                tokio::time::sleep(Duration::from_millis(RETRY_PAUSE_MS)).await;
            }
        }
        for event in events {
            if let Event::JobEnded { execution, .. } | Event::JobUnknown { execution } = &event {
                watched.send_modify(|watched| {
                    watched.executions.remove(execution);
                });
            }
            if notes.send(DriverMessage::Event(event)).await.is_err() {
                return;
            }
        }
    }
}
