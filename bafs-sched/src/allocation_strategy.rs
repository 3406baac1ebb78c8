//! The names of the allocation strategies (thesis §4.2.6, Table 4.2), and in what they differ
//! whatever the workload. It computes no sizes and does not choose.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Which data are allocated at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Strategy {
    /// Everything.
    All,
    /// All private volumes, and one batch volume after the other.
    AllPrivate,
    /// All batch volumes, and the private volumes of as many pipelines as fit.
    AllBatch,
    /// One batch volume and one private volume of every pipeline.
    Slice,
    /// One batch volume and the private volumes of as many pipelines as fit.
    Minimal,
    /// Nothing: jobs access home directly. Never chosen unless the user asks.
    Remote,
    /// What jobs need when they start, with no plan at all: nothing is kept back for others, and
    /// caches are spread over all nodes.
    #[serde(rename = "need")]
    Need,
}

impl Strategy {
    /// The strategies of the thesis, in its order.
    pub const THESIS_STRATEGIES: [Self; 6] = [
        Self::All,
        Self::AllPrivate,
        Self::AllBatch,
        Self::Slice,
        Self::Minimal,
        Self::Remote,
    ];

    /// What a plan compares: those of the thesis, and no plan.
    pub const CANDIDATES: [Self; 7] = [
        Self::All,
        Self::AllPrivate,
        Self::AllBatch,
        Self::Slice,
        Self::Minimal,
        Self::Remote,
        Self::Need,
    ];

    /// Whether it runs a stage of all pipelines (of a part) before the next.
    pub fn is_level_by_level(self) -> bool {
        matches!(self, Self::AllPrivate | Self::Slice | Self::Minimal)
    }

    /// Whether batch data stay after the last job that reads them.
    pub fn has_retained_batch_data(self) -> bool {
        matches!(self, Self::All | Self::AllBatch | Self::Need)
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::All => "All",
            Self::AllPrivate => "AllPrivate",
            Self::AllBatch => "AllBatch",
            Self::Slice => "Slice",
            Self::Minimal => "Minimal",
            Self::Remote => "Remote",
            Self::Need => "need",
        })
    }
}
