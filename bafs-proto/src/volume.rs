//! Volumes as the volume API describes them; holds no volume and decides nothing.

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::hash::Digest;
use crate::ids::{ServerId, VolumeId};
use crate::source_warning::SourceWarnings;
use crate::time::Time;

/// Kind of a volume: it decides what a job may do with it and where its data are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum VolumeKind {
    /// A read-write tree on one server.
    Scratch {
        /// What it contains at first; `None` for an empty tree.
        fill: Option<VolumeSource>,
    },
    /// A read-only view of a home path, fetched block by block.
    Cache {
        /// What it shows.
        source: VolumeSource,
        /// The cooperative cache it belongs to: servers of one group that hold a cache volume of
        /// this name share its blocks.
        cooperative: String,
        /// Which block goes when space is short.
        replacement: ReplacementPolicy,
        /// Block size in bytes, a power of two within the limits.
        block_bytes: u32,
    },
}

/// Where the bytes of a volume come from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum VolumeSource {
    /// A path of a home server.
    Home {
        /// Address of the home server, `host:port`.
        address: String,
        /// Path below the exported directory, without a leading slash; empty for all of it.
        path: String,
        /// Which home server that is, wherever it is by now; `None`: whoever is at the address.
        id: Option<ServerId>,
    },
    /// A scratch volume of another storage server: this makes the new volume a replica.
    Volume {
        /// Address of the storage server that holds it, `host:port`.
        address: String,
        /// The volume there.
        volume: VolumeId,
    },
}

/// Replacement policy of a cache volume.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ReplacementPolicy {
    /// The block unused for longest goes first.
    #[default]
    Lru,
    /// The block used last goes first: right for repeated scans of more than fits.
    Mru,
}

/// How the limit of a scratch volume is enforced. Where its owner says nothing, its size decides:
/// [`LimitKind::for_size`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LimitKind {
    /// Each operation is accounted for: past the limit it fails with ENOSPC.
    #[default]
    Exact,
    /// A job on the node works on the directory itself, as fast as the disk. The server looks now
    /// and then, and ends a job that is past the limit.
    Watched,
}

/// Least margin of a watched volume, in bytes: what a fast disk takes until a job is ended.
const MARGIN_BYTES_MIN: u64 = 64 << 20;

/// Least margin of a watched volume, in files: so many more were made until a job was ended.
const MARGIN_FILES_MIN: u64 = 10_000;

/// Least size of a volume of which a tenth is a whole margin, in bytes.
pub const WATCHED_BYTES_MIN: u64 = 10 * MARGIN_BYTES_MIN;

/// Least number of files of such a volume: what one of that size has by default, one per 16 KiB.
pub const WATCHED_FILES_MIN: u64 = WATCHED_BYTES_MIN >> 14;

/// Description of a volume, as its creator asks for it. The server reserves its size in bytes and
/// files before it makes the volume.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeSpec {
    /// Chosen by the caller; creating the same id with the same specification again is harmless.
    pub id: VolumeId,
    /// A name for people.
    pub name: String,
    /// Who asked for it, for people and for accounting.
    pub owner: String,
    /// What it is made of.
    pub kind: VolumeKind,
    /// Reserved space in bytes: for scratch the most it can hold, for cache the most it keeps.
    pub size_bytes: u64,
    /// Reserved number of files and directories (inodes), the root not counted.
    pub size_files: u64,
    /// How the limit of a scratch volume is kept; a cache always keeps its own exactly.
    pub limit: LimitKind,
    /// The volume is deleted this long after the last sign of interest, in milliseconds. May become
    /// longer while it lives.
    pub lifetime_ms: u64,
}

impl VolumeSpec {
    /// Bytes and files that are reserved for it: for a watched volume a tenth more than it may
    /// hold, so that one past its limit takes nothing from others until it is ended.
    pub fn reservation(&self) -> (u64, u64) {
        self.limit.reservation(self.size_bytes, self.size_files)
    }
}

impl LimitKind {
    /// How the limit of a scratch volume is kept that may hold so many bytes and files: watched
    /// where a tenth more bytes are margin enough, exactly where that would be a larger part of it.
    pub fn for_size(bytes: u64, files: u64) -> Self {
        match bytes >= WATCHED_BYTES_MIN && files >= WATCHED_FILES_MIN {
            true => Self::Watched,
            false => Self::Exact,
        }
    }

    /// Bytes and files to reserve for a volume that may hold so many.
    pub fn reservation(self, bytes: u64, files: u64) -> (u64, u64) {
        match self {
            Self::Exact => (bytes, files),
            Self::Watched => (
                bytes.saturating_add((bytes / 10).max(MARGIN_BYTES_MIN)),
                files.saturating_add((files / 10).max(MARGIN_FILES_MIN)),
            ),
        }
    }

    /// The most bytes and files that a volume may hold for which so many are reserved.
    pub fn limit_for_reservation(self, bytes: u64, files: u64) -> (u64, u64) {
        let within = |reserved: u64, least: u64| {
            let by_tenth = reserved / 11 * 10 + (reserved % 11).min(9);
            by_tenth.min(reserved.saturating_sub(least))
        };
        match self {
            Self::Exact => (bytes, files),
            Self::Watched => (
                within(bytes, MARGIN_BYTES_MIN),
                within(files, MARGIN_FILES_MIN),
            ),
        }
    }
}

/// Changes the size of a volume that is ready. Repeating it is harmless. Fails with `NoSpaceBytes`
/// or `NoSpaceFiles` when the node has too little, with `WrongState` when the volume holds more,
/// and with `LeaseHeld` while an agent accounts for the volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResizeVolume {
    /// Which.
    pub volume: VolumeId,
    /// New size in bytes, at least 1.
    pub size_bytes: u64,
    /// New number of files, at least 1; `None` leaves it.
    pub size_files: Option<u64>,
}

/// State of a volume: it is being made, ready, or its making failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VolumeState {
    /// Space is reserved, the content is on its way.
    Creating,
    /// In use.
    Ready,
    /// Making it failed; why is in [`VolumeStatus::error`].
    Failed,
}

/// Description, state and use of a volume, as its server reports them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VolumeStatus {
    /// As it was asked for.
    pub spec: VolumeSpec,
    /// Where it is in its life.
    pub state: VolumeState,
    /// Why it failed, if it did.
    pub error: Option<Error>,
    /// Bytes in use now.
    pub used_bytes: u64,
    /// Files and directories in use now.
    pub used_files: u64,
    /// Bytes of files that came over the network to fill it in this life of the server.
    pub received_bytes: u64,
    /// For a cache volume: digest of the list of source files with sizes and times, equal on all
    /// servers that show the same state of the source.
    pub manifest: Option<Digest>,
    /// What it does not have as its source has it; empty in a list of volumes.
    pub warnings: SourceWarnings,
    /// When the volume is deleted unless someone shows interest.
    pub expires: Time,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unspecified_limits_add_at_most_a_tenth() {
        for (bytes, files, expected) in [
            (1_000_000, 1_024, LimitKind::Exact),
            (WATCHED_BYTES_MIN - 1, 1 << 30, LimitKind::Exact),
            (1 << 50, WATCHED_FILES_MIN - 1, LimitKind::Exact),
            (WATCHED_BYTES_MIN, WATCHED_FILES_MIN, LimitKind::Watched),
            (1 << 50, 1 << 30, LimitKind::Watched),
        ] {
            let kind = LimitKind::for_size(bytes, files);
            assert_eq!(kind, expected, "{bytes} bytes, {files} files");
            let (reserved, places) = kind.reservation(bytes, files);
            assert!(reserved <= bytes + bytes / 10);
            assert!(places <= files + (files / 10).max(MARGIN_FILES_MIN));
        }
    }

    #[test]
    fn volume_limits_match_their_reservation() {
        let kind = LimitKind::Watched;
        let margin = MARGIN_BYTES_MIN;
        for bytes in [
            0,
            1,
            9,
            10 * margin - 1,
            10 * margin,
            10 * margin + 9,
            1 << 40,
        ] {
            for files in [1, 99_999, 100_000, 100_009, 1_000_001] {
                let (reserved, places) = kind.reservation(bytes, files);
                assert_eq!(kind.limit_for_reservation(reserved, places), (bytes, files));
            }
        }
        for reserved in (11 * margin - 25..11 * margin + 25).chain([0, margin - 1, u64::MAX]) {
            let (held, _) = kind.limit_for_reservation(reserved, 0);
            assert!(held == 0 || kind.reservation(held, 0).0 <= reserved);
        }
    }
}
