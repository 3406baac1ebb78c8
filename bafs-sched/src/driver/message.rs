//! What the tasks of a run tell its loop.

use bafs_proto::ids::{ExecutionId, ServerId};
use bafs_proto::message::Advert;
use bafs_proto::node_quota::NodeQuotaList;
use bafs_proto::{Error, Result};
use tokio::sync::mpsc;

use crate::Event;

/// What the tasks of a run tell its loop.
#[derive(Debug)]
pub(crate) enum DriverMessage {
    /// A fact.
    Event(Event),
    /// An execution whose end must be waited for.
    WatchExecution(ServerId, ExecutionId),
    /// A listing of the catalog.
    CatalogListed(Vec<Advert>),
    /// The run must not begin, or go on.
    RunRejected(Error),
    /// The catalog will never answer this run.
    CatalogRefused(Error),
    /// Volumes must be kept alive.
    RenewalDue,
    /// Users may have wished something, and nodes may be silent.
    PeriodicCheckDue,
    /// What a node keeps for the run, or why it does not.
    QuotaAnswered(ServerId, Result<NodeQuotaList>),
}

pub(super) async fn send_event(notes: &mpsc::Sender<DriverMessage>, event: Option<Event>) {
    if let Some(event) = event {
        // The loop ended: nobody waits for this any more.
        let _ = notes.send(DriverMessage::Event(event)).await;
    }
}
