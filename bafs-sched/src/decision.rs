//! What the policies decided, as plain data: each decision takes effect in one place,
//! `transition/commit.rs`.

use bafs_proto::ids::ServerId;
use bafs_workflow::{JobIndex, VolumeIndex};
use serde::{Deserialize, Serialize};

use crate::allocation_strategy::Strategy;
use crate::space::Space;
use crate::state::limits::AllocationRules;
use crate::state::planned_volumes::Create;

/// One decision.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Decision {
    // Placement.
    /// A job starts.
    Start {
        /// Which.
        job: JobIndex,
        /// Where.
        server: ServerId,
        /// The volumes that are made for it.
        creates: Vec<Create>,
        /// Nodes that borrow room of others from then on, each with what it lacks.
        borrows: Vec<(ServerId, Space)>,
    },

    // Admission.
    /// Running jobs begin: the workflow fits into the nodes that are there.
    BeginRunning,
    /// Limits of the strategy give way, as they block the workflow.
    RelaxLimits(LimitRelaxation),
    /// A pipeline loses its volumes to another one, which then runs alone.
    Preempt {
        /// Which loses them, named by its first job.
        victim: u32,
        /// Which runs alone.
        beneficiary: u32,
    },
    /// A pipeline that ran alone does so no more, as it waits for jobs of others.
    Unprotect,
    /// Nothing helps: the run ends.
    GiveUp {
        /// Why, in a sentence.
        reason: String,
    },

    // Cache space.
    /// A cache is deleted on all nodes.
    EvictCache {
        /// Which.
        volume: VolumeIndex,
    },
    /// A batch volume comes before its readers.
    Prefetch {
        /// Which.
        volume: VolumeIndex,
        /// What is made of it where; nothing when it is there already.
        parts: Vec<(ServerId, Space)>,
    },
    /// A node that joined takes the part of a batch volume that its group lacks.
    CompleteCache {
        /// Which.
        volume: VolumeIndex,
        /// Where.
        server: ServerId,
        /// How much.
        part: Space,
    },

    // Order.
    /// Jobs whose chain is so long go first, from now on.
    PrioritiseChains {
        /// In seconds; none is urgent at the largest number.
        from: u32,
        /// Whether that is the last word on it.
        is_final: bool,
    },

    // Strategy.
    /// A strategy is followed from now on.
    FollowStrategy {
        /// Which; nothing when none fits and need alone decides.
        strategy: Option<Strategy>,
        /// Why, in one sentence.
        reason: String,
        /// Its limits.
        rules: Option<AllocationRules>,
        /// Whether these limits were simulated as the best.
        has_simulated_rules: bool,
    },
}

/// How limits of a strategy give way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LimitRelaxation {
    /// The part that is under way takes no further pipelines.
    ClosePart,
    /// Batch volumes that nobody uses go.
    EvictBatch(Vec<VolumeIndex>),
    /// None hold any more.
    DropAll,
}
