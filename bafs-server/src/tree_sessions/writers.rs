//! What agents that have sessions are beside them: one that is about to end, one that has its share
//! of the descriptors.

use std::time::Duration;

use bafs_proto::ids::AgentId;
use bafs_proto::message::TreeRef;
use bafs_proto::time::{Deadline, Time};
use bafs_tree::JobDescriptorUse;

use super::{SessionTable, TreeSessions, lock};
use crate::clock;

/// How long a new writer of a volume waits for an earlier one to end by itself, which it does if it
/// is about to: in milliseconds, and between two looks.
const WRITER_END_WAIT_MS: u64 = 1_000;
const WRITER_END_POLL: Duration = Duration::from_millis(10);

/// An agent that was silent for so long, in milliseconds, is not waited for: it gives a sign of
/// life each second.
const SILENT_WRITER_MS: u64 = 1_500;

/// A writer to whom another yields may be silent for so long, in milliseconds: ten signs of life.
const YIELDED_SILENCE_MS: u64 = 10_000;

impl TreeSessions {
    /// Whether another agent has a session to write a volume, and was heard of lately.
    pub(crate) fn has_writer(&self, tree: &TreeRef, agent: AgentId) -> bool {
        let sessions = self.lock();
        sessions.has_live_writer(tree, agent, clock::now(), YIELDED_SILENCE_MS)
    }

    /// Lets an agent that writes a volume end before another is its writer: one that is asked to
    /// end, or was unmounted, has what it wrote under way. Waits for a moment at most, and only for
    /// one that was heard of just now.
    pub async fn wait_for_writer_end(&self, tree: &TreeRef, agent: AgentId) {
        let deadline = Deadline::after_ms(WRITER_END_WAIT_MS);
        while self
            .lock()
            .has_live_writer(tree, agent, clock::now(), SILENT_WRITER_MS)
            && !deadline.remaining().is_zero()
        {
            tokio::time::sleep(WRITER_END_POLL).await;
        }
    }
}

impl SessionTable {
    /// What an agent has open counts for all its sessions.
    pub(super) fn descriptor_share(&mut self, agent: AgentId) -> JobDescriptorUse {
        self.descriptor_shares
            .retain(|_, share| !share.is_unshared());
        self.descriptor_shares.entry(agent).or_default().clone()
    }

    /// Whether another agent writes a volume, and was silent for less than so long.
    fn has_live_writer(&self, tree: &TreeRef, agent: AgentId, now: Time, silence_ms: u64) -> bool {
        self.sessions.iter().any(|((name, _), open)| {
            let is_other = name == tree && open.is_writable && open.agent != agent;
            is_other && now.ms_since(*lock(&open.last_seen)) < silence_ms
        })
    }
}
