//! Allotments: what a node keeps for each of several runs. Divides nothing: how much a run asks for
//! is its scheduler's policy.

use serde::{Deserialize, Serialize};

/// A part of a node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeQuota {
    /// Space for volumes, in bytes.
    pub bytes: u64,
    /// Space for volumes, in files.
    pub files: u64,
    /// Jobs at once.
    pub slots: u32,
}

impl NodeQuota {
    /// Nothing.
    pub const ZERO: Self = Self {
        bytes: 0,
        files: 0,
        slots: 0,
    };

    /// Of each part the larger.
    #[must_use]
    pub fn component_max(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.max(other.bytes),
            files: self.files.max(other.files),
            slots: self.slots.max(other.slots),
        }
    }

    /// Of each part the smaller.
    #[must_use]
    pub fn component_min(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.min(other.bytes),
            files: self.files.min(other.files),
            slots: self.slots.min(other.slots),
        }
    }

    /// What is left when `other` is taken away, zero where that is more.
    #[must_use]
    pub fn saturating_sub(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_sub(other.bytes),
            files: self.files.saturating_sub(other.files),
            slots: self.slots.saturating_sub(other.slots),
        }
    }

    /// Whether every part of `other` fits.
    pub fn can_hold(self, other: Self) -> bool {
        self.bytes >= other.bytes && self.files >= other.files && self.slots >= other.slots
    }
}

/// Asks for a part of a node, in place of what was asked for before; harmless to repeat. All zero
/// gives it back.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetNodeQuota {
    /// Who asks, as `crate::volume_tree::VolumeSpec::owner`: volumes of this owner lie in it.
    pub owner: String,
    /// The person for whom it asks.
    pub user: String,
    /// Grows from one asking to the next: what comes late changes nothing.
    pub sequence: u64,
    /// What it could use, if nobody else wanted any.
    pub desired: NodeQuota,
    /// The least with which it can begin anything.
    pub start_minimum: NodeQuota,
    /// What it needs to bring to an end what it has begun: kept for it before all others.
    pub committed: NodeQuota,
    /// What it asks for now.
    pub requested: NodeQuota,
    /// The allotment is forgotten so long after it was last asked for, in milliseconds.
    pub lifetime_ms: u64,
}

/// What an owner has of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeQuotaStatus {
    /// Whose it is.
    pub owner: String,
    /// The person.
    pub user: String,
    /// What the owner could use.
    pub desired: NodeQuota,
    /// The least with which it can begin anything.
    pub start_minimum: NodeQuota,
    /// What it was given.
    pub granted: NodeQuota,
}

/// All that is given of a node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeQuotaList {
    /// What the caller was given: no more than it asked for, and less while others hold more.
    pub granted: NodeQuota,
    /// All of the node.
    pub capacity: NodeQuota,
    /// Who else has a part or wants one.
    pub other_owners: Vec<NodeQuotaStatus>,
}
