//! What the core wants done, as imperatives. All are safe to repeat.

use bafs_proto::ids::{ExecutionId, ExtractionId, ServerId, VolumeId};
use bafs_workflow::{JobIndex, VolumeIndex};
use serde::{Deserialize, Serialize};

use crate::space::Space;
use crate::state::progress::Outcome;

/// One thing to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Action {
    /// Create a volume; answered by `VolumeCreated` or `VolumeCreateFailed`.
    CreateVolume {
        /// Its id.
        id: VolumeId,
        /// What it is in the workflow.
        volume: VolumeIndex,
        /// Where.
        server: ServerId,
        /// How much to reserve: for a cache perhaps less than the whole.
        size: Space,
    },
    /// Copy a volume to another node; answered by `VolumeCopied` or `VolumeCreateFailed`.
    CopyVolume {
        /// Id of the copy.
        id: VolumeId,
        /// What is copied.
        source: MountedVolume,
        /// Where the copy goes.
        server: ServerId,
        /// How much to reserve.
        size: Space,
        /// An older copy there: what it has need not cross the network again.
        base_copy: Option<VolumeId>,
    },
    /// Fetch what a cache does not have, behind all that jobs ask for; not answered.
    WarmCache {
        /// Which.
        id: VolumeId,
        /// Where it is.
        server: ServerId,
    },
    /// Ask what a part of a cache keeps; answered by `CacheInspected`, or not at all: what is
    /// learned from it may wait for the next reader.
    InspectCache {
        /// Which.
        id: VolumeId,
        /// Where it is.
        server: ServerId,
    },
    /// Delete a volume; answered by `VolumeDeleted` or `VolumeDeleteFailed`.
    DeleteVolume {
        /// Which.
        id: VolumeId,
        /// Where it is.
        server: ServerId,
    },
    /// Start a job; answered by `JobStarted` or `JobStartFailed`, later by `JobEnded` or
    /// `JobUnknown`.
    StartJob {
        /// This execution.
        execution: ExecutionId,
        /// Of this job,
        job: JobIndex,
        /// on this node,
        server: ServerId,
        /// with these volumes, in the order of the job's mounts.
        volumes: Vec<MountedVolume>,
        /// Those that hold results when it has succeeded: files are to be extracted, and nobody
        /// else is to write.
        results: Vec<VolumeIndex>,
        /// It may use so much memory, in bytes; 0 if the workflow does not say.
        #[serde(default)]
        memory_bytes: u64,
    },
    /// Kill an execution; answered by `JobEnded` or `JobUnknown`.
    KillJob {
        /// Which.
        execution: ExecutionId,
        /// Where it runs.
        server: ServerId,
    },
    /// Send a file home; answered by `FileExtracted` or `ExtractFailed`.
    ExtractFile {
        /// This extraction.
        extract: ExtractionId,
        /// Position in the workflow's list of extracts.
        index: u32,
        /// The volume that has the file.
        source: MountedVolume,
    },
    /// Ask a server which of these volumes it has lost; answered by `VolumesProbed`.
    ProbeVolumes {
        /// Which server.
        server: ServerId,
        /// Which volumes.
        volumes: Vec<VolumeId>,
    },
    /// Ask a node that was given up, and is back, which of these volumes it has; answered by
    /// `VolumesFound`.
    FindVolumes {
        /// Which node.
        server: ServerId,
        /// Which volumes.
        volumes: Vec<VolumeId>,
    },
    /// The workflow is over and nothing is left.
    Finish {
        /// How it ended.
        outcome: Outcome,
    },
}

/// A volume of the workflow as it exists on a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountedVolume {
    /// What it is in the workflow.
    pub volume: VolumeIndex,
    /// Its id. With remote I/O nothing has this id; it only keeps attempts apart.
    pub id: VolumeId,
    /// Where it is; `None` with remote I/O.
    pub server: Option<ServerId>,
}
