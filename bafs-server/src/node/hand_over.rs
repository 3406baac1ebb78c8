//! What a node hands over at its door, and who makes it ready.

use bafs_proto::door::{HandOverOf, HandOverTicket};
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode, Result};

use super::Node;

impl Node {
    /// Gives out a ticket for a hand-over. The right to a cache has been checked; a tree's depends
    /// on the session.
    pub(super) fn hand_over(&self, what: HandOverOf, _token: &Token) -> Result<HandOverTicket> {
        let grant = match what {
            HandOverOf::Tree { .. } => return Err(unsupported()),
            HandOverOf::Cache { volume, manifest } => self.caches.grant(volume, manifest)?,
        };
        self.door.ticket(grant)
    }
}

fn unsupported() -> Error {
    let text = "this node hands no scratch volume over; use the network";
    Error::new(ErrorCode::Unsupported, text)
}
