//! Where pipelines that have begun are at home.

use bafs_proto::ids::ServerId;

use crate::state::scheduler_state::State;

impl State {
    /// Pipelines that have created scratch volumes and are not at their end.
    pub(crate) fn pipelines_at_home(&self) -> impl Iterator<Item = u32> {
        self.claims.home.keys().copied()
    }

    /// Whether a pipeline has created scratch volumes and is not at its end.
    pub(crate) fn is_under_way(&self, pipeline: u32) -> bool {
        self.claims.home.contains_key(&pipeline)
    }

    /// Whether a pipeline created scratch volumes on this node last.
    pub(crate) fn is_at_home(&self, pipeline: u32, server: ServerId) -> bool {
        self.claims.home.get(&pipeline) == Some(&server)
    }

    /// Where a pipeline created scratch volumes last.
    pub(crate) fn home_of(&self, pipeline: u32) -> Option<ServerId> {
        self.claims.home.get(&pipeline).copied()
    }

    /// How often rules blocked the workflow and gave way.
    pub fn rule_relaxations(&self) -> u64 {
        self.rules_eased
    }
}
