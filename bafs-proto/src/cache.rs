//! Cache volumes as they are shown, warmed and joined; the blocks themselves are in
//! [`crate::block_calls`]. Decides nothing.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::block_calls::PeerCheck;
use crate::error::Error;
use crate::hash::Digest;
use crate::ids::{ServerId, VolumeId};
use crate::token::Token;

/// Starts a new generation of a cache volume: lists the source again and drops changed files.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InvalidateVolume {
    /// Which.
    pub volume: VolumeId,
    /// Capability for the source.
    pub source_token: Token,
}

/// Shows what a cache volume holds and what it did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct GetCache {
    /// Which.
    pub volume: VolumeId,
}

/// Lists data of sources that no cache volume of the node shows any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListRetainedData;

/// Removes such data. It is harmless to repeat.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DropRetainedData {
    /// Path of the source at its home; nothing for all sources.
    pub path: Option<String>,
}

/// Data of sources that no cache volume shows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RetainedDataList {
    /// Each state of each source.
    pub data: Vec<RetainedSource>,
}

/// What is left of a state of a source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RetainedSource {
    /// Address of the home.
    pub address: String,
    /// Path below its export.
    pub path: String,
    /// Bytes on disk.
    pub bytes: u64,
    /// Files of which something is on disk.
    pub files: u64,
    /// When the last volume left it, in seconds since 1970.
    pub used_at: u64,
}

/// A cache volume, as its server sees it. Space is in bytes as it is charged: in whole pieces of
/// 4096.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheStatus {
    /// The volume.
    pub volume: VolumeId,
    /// Name of the cooperative cache; empty when it shares with nobody.
    pub cooperative: String,
    /// State of the source that it shows.
    pub manifest: Digest,
    /// Block size in bytes.
    pub block_bytes: u32,
    /// What tells the node that blocks of other nodes are right.
    pub peer_check: PeerCheck,
    /// Size of the source, in bytes.
    pub source_bytes: u64,
    /// Regular files of the source.
    pub source_files: u64,
    /// Most bytes that it keeps.
    pub capacity_bytes: u64,
    /// Blocks that others look for here.
    pub primary_bytes: u64,
    /// Copies of blocks that others keep too.
    pub secondary_bytes: u64,
    /// Blocks that never leave.
    pub pinned_bytes: u64,
    /// Paths below which blocks are pinned; the empty path is the whole source.
    pub pinned_paths: Vec<String>,
    /// The last warming, if there was one since the server started.
    pub warming: Option<WarmingStatus>,
    /// What it did since the server started; the names are in `docs/guide/performance.md`.
    pub counters: BTreeMap<String, u64>,
    /// The others that share it, as this server believes.
    pub peers: Vec<CachePeer>,
}

impl CacheStatus {
    /// How often home sent each byte that this server had as its primary, of those that it had
    /// when it started and those that it wanted since. Nothing when there are none.
    pub fn home_ratio(&self) -> Option<f64> {
        let count = |name: &str| self.counters.get(name).copied().unwrap_or(0);
        let kept = count("cache_recovered_bytes");
        let (sent, wanted) = (count("cache_home_bytes"), count("cache_home_unique_bytes"));
        let needed = kept.saturating_add(wanted);
        (needed > 0).then(|| kept.saturating_add(sent) as f64 / needed as f64)
    }
}

/// A server that shares a cache, as another one sees it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CachePeer {
    /// The server.
    pub server: ServerId,
    /// Where it listens.
    pub address: String,
    /// Most bytes that it keeps of this cache.
    pub capacity_bytes: u64,
    /// Bytes that it kept when it last told the catalog; `None` when it has not yet.
    pub used_bytes: Option<u64>,
    /// Whether it failed lately and is passed over for a while.
    pub is_unresponsive: bool,
    /// What was asked of it since this server started; the names are in
    /// `docs/guide/performance.md`.
    pub counters: BTreeMap<String, u64>,
}

/// What becomes of the blocks below a path when they are warmed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Pinning {
    /// They are fetched, and may leave again.
    #[default]
    FetchOnly,
    /// They are fetched and stay.
    Pin,
    /// They may leave from now on; nothing is fetched.
    Unpin,
}

/// Fetches what a cache volume does not have yet, behind all that jobs ask for. A server fetches
/// its own share of a cooperative cache: the blocks of which it is the primary. Harmless to
/// repeat; another path is warmed together with those that still are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WarmCache {
    /// Which volume.
    pub volume: VolumeId,
    /// A file or a directory of the source; empty for all of it.
    pub path: String,
    /// Whether the blocks stay.
    pub pinning: Pinning,
}

/// How far the warming of a cache volume is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WarmingStatus {
    /// What is warmed: a path, or several with a comma between them.
    pub path: String,
    /// Where it is.
    pub state: WarmingState,
    /// Size of this server's share, in bytes.
    pub total_bytes: u64,
    /// Bytes of it that are here.
    pub present_bytes: u64,
}

/// Where a warming is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WarmingState {
    /// Blocks are on their way.
    Running,
    /// All are here.
    Done,
    /// Not all are here: no more find room in the volume or on the disk, unless others leave.
    Full,
    /// It stopped.
    Failed(Error),
}

/// Tells a server that another one shares a cooperative cache from now on, before the catalog
/// says so, and asks whether it shares it as well.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinCache {
    /// Name of the cooperative cache.
    pub cooperative: String,
    /// State of the source; otherwise `SourceChanged`.
    pub manifest: Digest,
    /// The one that joins.
    pub member: CacheMember,
}

/// A cooperative cache, as the server shares it that was told of another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JoinCacheReply {
    /// The server itself.
    pub member: CacheMember,
    /// Others that share the cache, as it believes: the catalog may not name them yet.
    pub other_members: Vec<CacheMember>,
    /// Paths that are pinned in the cache.
    pub pinned_paths: Vec<String>,
    /// Servers, with the most bytes that each kept, among which its blocks were placed before.
    pub former_placements: Vec<Vec<(ServerId, u64)>>,
}

/// A server that shares a cooperative cache.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheMember {
    /// The server.
    pub server: ServerId,
    /// Where it listens, `host:port`.
    pub address: String,
    /// Most bytes that it keeps of this cache.
    pub capacity_bytes: u64,
}
