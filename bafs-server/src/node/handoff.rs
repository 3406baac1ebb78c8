//! What a node hands over at its door, and who makes it ready.

use bafs_proto::Result;
use bafs_proto::fd_passing::{HandoffTarget, HandoffTicket};
use bafs_proto::token::{Resource, Token};

use super::Node;
use crate::storage::volume_id;

impl Node {
    /// Gives out a ticket for a hand-over. The right to a cache has been checked; a tree's depends
    /// on the session.
    pub(super) fn issue_handoff_ticket(
        &self,
        what: HandoffTarget,
        token: &Token,
    ) -> Result<HandoffTicket> {
        let grant = match what {
            HandoffTarget::Tree { tree, epoch } => {
                let resource = volume_id(&tree).map(Resource::Volume)?;
                let allow = |right| self.access.require(token, resource, right);
                self.storage.prepare_tree_handoff(tree, epoch, allow)?
            }
            HandoffTarget::Cache { volume, manifest } => {
                self.caches.prepare_handoff(volume, manifest)?
            }
        };
        self.handoff_server.issue_ticket(grant)
    }
}
