//! The calls for the blocks of a cache volume: one reads blocks, three others cost no request to
//! the home server. Decides nothing.
//!
//! | Call | The asked node |
//! |---|---|
//! | [`ReadBlocks`] | sends the blocks, and fetches them as far as the scope permits |
//! | [`Probe`] | says which blocks it has, or sends them; fetches nothing |
//! | [`Promote`] | makes running background fetches of the blocks urgent |
//! | [`Touch`] | marks its copies of the blocks as used now |

use serde::{Deserialize, Serialize};

use crate::cache::CacheMember;
use crate::hash::Digest;
use crate::ids::{BlockIndex, FileIndex, VolumeId};

/// Names a cache to a server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum CacheRef {
    /// The volume of this id.
    Volume(VolumeId),
    /// This server's volume of the cooperative cache of this name.
    Cooperative(String),
}

/// Neighbouring blocks of one file of a cache. Blocks past the end of the file count as absent from
/// the range.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockRange {
    /// The cache: an agent names the volume, a peer the cooperative cache.
    pub cache: CacheRef,
    /// State of the source that the reader works with; otherwise `SourceChanged`.
    pub manifest: Digest,
    /// Which file.
    pub file: FileIndex,
    /// First block.
    pub first: BlockIndex,
    /// Number of blocks; they must fit the body of a reply.
    pub count: u32,
}

/// How far a server may go for blocks that it lacks. A server never forwards a read with the scope
/// of that read, so outdated lists of peers cause no loops. A reader waits only for fetches of its
/// own scope or of a smaller one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum FetchScope {
    /// To the home server, after a probe of the nodes that may have the blocks. For peers that take
    /// the server for the primary node.
    Home,
    /// To the primary node, else to the home server. For peers that cannot reach the primary node.
    PrimaryNode,
    /// To the primary node, to the next nodes in the ranking, to the home server. For agents.
    AnyNode,
}

/// Whether somebody waits for blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FetchPriority {
    /// A reader waits.
    Urgent,
    /// Nobody waits yet: the home server is asked only while few readers wait for it.
    Background,
}

/// Reads blocks of a cache volume; they follow each other in the body of the reply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReadBlocks {
    /// Which blocks.
    pub range: BlockRange,
    /// How far the server may go for them.
    pub scope: FetchScope,
    /// Whether somebody waits for them.
    pub priority: FetchPriority,
    /// The last reply did not match its digests. The server first verifies its copies of the blocks
    /// and replaces damaged ones.
    pub must_verify: bool,
}

/// Asks which blocks a server has. The server fetches nothing. The digest of a block that it lacks
/// is [`Digest::ABSENT`] or [`Digest::EVICTED`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    /// Which blocks.
    pub range: BlockRange,
    /// What the answer is for.
    pub purpose: ProbePurpose,
    /// As of [`ReadBlocks`].
    pub must_verify: bool,
}

/// What the answer to a probe is for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProbePurpose {
    /// Only the digests are wanted. Without blocks, the probe asks whether the server is alive.
    Presence,
    /// This member is about to ask the home server. It gets the blocks that are on disk or in
    /// flight. If two members probe each other, the one with the larger id waits for the other.
    HomeRead(CacheMember),
}

/// A reader now waits for blocks that were read with [`FetchPriority::Background`]: their running
/// fetches become urgent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Promote {
    /// Which blocks.
    pub range: BlockRange,
}

/// A reader is about to come to these blocks: the copies that are here count as used now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Touch {
    /// Which blocks.
    pub range: BlockRange,
}

/// What tells a node that blocks which other nodes send are those of the source.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PeerCheck {
    /// The home says what their digests are.
    Home,
    /// The home knows no digests: the node that read a block first is trusted.
    FirstReader,
    /// Nothing: the node trusts all nodes.
    Nothing,
}

/// Blocks, in the body, each of the block size but the last of the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockData {
    /// Digest of each, made at the origin.
    pub digests: Vec<Digest>,
    /// To a probe: others that may have the blocks which are absent.
    pub other_holders: Vec<CacheMember>,
    /// How long ago home last sent something to this server, in milliseconds, if it ever did. A
    /// reader that waits for this server may wait for home.
    pub home_silence_ms: Option<u64>,
}
