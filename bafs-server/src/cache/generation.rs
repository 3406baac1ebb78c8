//! One state of the source of a cache volume, in five parts. Each part has one owner, which alone
//! changes its fields.

use std::sync::Arc;

use bafs_proto::message::{BlockRange, CacheRef};

use super::block_run::BlockRun;
use super::fetch::home_digests::HomeDigests;
use super::fetch::inflight::BlockFetches;
use super::membership::members::Membership;
use super::statistics::Statistics;
use super::store::block_store::BlockStore;

/// One state of the source, and what is here of it.
pub(crate) struct Generation {
    /// The blocks on disk, the manifest and the pins.
    pub(crate) store: Arc<BlockStore>,
    /// The blocks that are being fetched.
    pub(crate) inflight: BlockFetches,
    /// What home says of the blocks.
    pub(crate) digests: HomeDigests,
    /// The nodes that share the cache, and who of them is the primary node of which blocks.
    pub(crate) membership: Arc<Membership>,
    /// What it did.
    pub(crate) statistics: Statistics,
}

impl Generation {
    /// A run of blocks as a peer knows it.
    pub(crate) fn range_of(&self, run: &BlockRun) -> BlockRange {
        BlockRange {
            cache: CacheRef::Cooperative(self.membership.cooperative().to_owned()),
            manifest: self.store.manifest.digest(),
            file: run.file,
            first: run.key(0).block,
            count: run.count as u32,
        }
    }
}
