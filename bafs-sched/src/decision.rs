//! What the policies decided, as plain data: each decision takes effect in one place,
//! `transition/commit.rs`.

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_workflow::{JobIndex, VolumeIndex};
use serde::{Deserialize, Serialize};

use crate::action::MountedVolume;
use crate::allocation_strategy::Strategy;
use crate::space::Space;
use crate::state::limits::AllocationRules;
use crate::state::planned_volumes::Create;

/// One decision.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
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

    // Failure.
    /// A job that has no attempt runs again.
    Retry {
        /// Which.
        job: JobIndex,
        /// How long it is held back first, in milliseconds.
        pause_ms: u64,
    },
    /// A job fails for good, and what depends on it does not run.
    Fail {
        /// Which.
        job: JobIndex,
        /// What the user is told, as the end of a sentence that begins with the job.
        reason: String,
        /// The last lines that the job printed.
        output_tail: String,
    },
    /// A node gets no new work for a while.
    Quarantine {
        /// Which.
        node: ServerId,
        /// For how long at least, in milliseconds.
        duration_ms: u64,
        /// Why.
        reason: QuarantineReason,
    },
    /// A node is given up with all that is there.
    GiveUpNode {
        /// Which.
        node: ServerId,
    },
    /// A finished job runs again, since its output is lost or outdated.
    Redo {
        /// Which.
        job: JobIndex,
    },
    /// Other amounts are reserved for volumes of a pipeline from now on.
    Resize {
        /// The pipeline, by the position of its first job.
        pipeline: u32,
        /// Volumes, each with its new size.
        sizes: Vec<(VolumeIndex, Space)>,
    },
    /// Another amount is reserved for volumes of unknown size that do not exist yet.
    ReserveUnmade {
        /// The volumes.
        volumes: Vec<VolumeIndex>,
        /// The size of each.
        size: Space,
    },
    /// A node that is back has volumes that are used again.
    ReuseVolume {
        /// Which.
        volume: VolumeId,
        /// Where it is.
        node: ServerId,
        /// Whether it is a copy of what is elsewhere.
        is_copy: bool,
    },
    /// Jobs need not run again, since their outputs are back.
    SkipRedo {
        /// Which.
        jobs: Vec<JobIndex>,
    },

    // Replication.
    /// A volume is copied to another node.
    CopyVolume {
        /// What is copied.
        source: MountedVolume,
        /// Where the copy goes.
        server: ServerId,
        /// An older copy there: what it has does not cross the network again.
        base_copy: Option<VolumeId>,
    },
    /// Copies of a volume are deleted.
    DropCopies {
        /// The volume.
        volume: VolumeIndex,
        /// The copies.
        copies: Vec<VolumeId>,
    },
    /// A copy takes the place of a volume that is gone.
    RestoreVolume {
        /// The volume.
        volume: VolumeIndex,
        /// The copy.
        copy: VolumeId,
    },
    /// A job whose volumes are still being made on a node that leaves starts elsewhere.
    Withdraw {
        /// Which.
        job: JobIndex,
    },
    /// A volume on a node that leaves is deleted, as nobody needs what it has.
    DropVolume {
        /// Which.
        id: VolumeId,
    },
    /// A copy takes the place of a volume on a node that leaves, which is deleted.
    SwitchToCopy {
        /// The volume.
        volume: VolumeIndex,
        /// What is deleted of it.
        id: VolumeId,
        /// The copy.
        copy: VolumeId,
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

/// Why a node is in quarantine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum QuarantineReason {
    /// Jobs fail there that do not fail elsewhere.
    JobsFail,
    /// It cannot run jobs.
    Unfit,
    /// Its disk had no space.
    DiskFull,
    /// Its disk had no space so often that nobody waits for it any more.
    DiskLongFull,
}
