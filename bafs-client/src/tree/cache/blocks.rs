//! Blocks of a cache volume on their way to the kernel: fetched once however many ask at once,
//! verified, and kept for a short while. The page cache of the kernel does the real caching.

use std::collections::BTreeMap;
use std::ops::{Deref, Range};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bafs_proto::buffer::Buffer;
use bafs_proto::hash::Digest;
use bafs_proto::ids::{BlockIndex, VolumeId};
use bafs_proto::inflight_fetches::{FetchOwner, FetchWaiter, InflightFetches, Join};
use bafs_proto::limits::IO_BYTES_MAX;
use bafs_proto::message::{BlockRange, CacheRef, FetchPriority, FetchScope, ReadBlocks};
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorClass, ErrorCode, Result};
use bytes::Bytes;

use super::local_blocks::{BlockDelivery, LocalBlocks};
use crate::limits::DIGEST_RETRIES;
use crate::logic::manifest_tree::ManifestFile;
use crate::memory;
use crate::tree::Server;

/// File and block.
type BlockKey = (u32, u64);

/// Fetches blocks of one cache volume.
#[derive(Debug)]
pub(super) struct BlockFetcher {
    server: Server,
    volume: VolumeId,
    manifest: Digest,
    block_bytes: u32,
    local_blocks: Option<Arc<LocalBlocks>>,
    inflight: InflightFetches<BlockKey, Bytes>,
    buffer: Mutex<BlockBuffer>,
}

/// What a read yields: a part of some bytes.
#[derive(Debug)]
pub(super) struct ReadData {
    bytes: Buffer,
    range: Range<usize>,
}

impl Deref for ReadData {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[self.range.clone()]
    }
}

#[derive(Debug, Default)]
struct BlockBuffer {
    blocks: BTreeMap<BlockKey, BufferedBlock>,
    /// When each kept block was used last, oldest first.
    keys_by_use: BTreeMap<u64, BlockKey>,
    use_count: u64,
    bytes: usize,
}

#[derive(Debug)]
struct BufferedBlock {
    data: Bytes,
    last_use: u64,
}

/// What to do about one wanted block.
enum BlockAction {
    Ready(Bytes),
    Wait(FetchWaiter<Bytes>),
    Fetch(FetchClaim),
}

impl BlockFetcher {
    pub(super) fn new(
        server: Server,
        volume: VolumeId,
        (manifest, block_bytes): (Digest, u32),
        near: Option<Arc<LocalBlocks>>,
    ) -> Self {
        Self {
            server,
            volume,
            manifest,
            block_bytes,
            local_blocks: near,
            inflight: InflightFetches::default(),
            buffer: Mutex::default(),
        }
    }

    /// Block size in bytes.
    pub(super) fn block_bytes(&self) -> u64 {
        u64::from(self.block_bytes)
    }

    /// Whether all blocks of `range` seem to be on this machine.
    pub(super) fn has_all(&self, file: ManifestFile, range: &Range<u64>) -> bool {
        let mut blocks = self.blocks_of(&(range.start..range.end.min(file.size)));
        let near = |block| {
            self.local_blocks
                .as_ref()
                .is_some_and(|near| near.has(file, block))
        };
        let buffer = self.lock();
        let has_block = |block| buffer.blocks.contains_key(&(file.index.0, block));
        blocks.all(|block| near(block) || has_block(block))
    }

    /// Bytes of `range` (within the file) if all of its blocks are at hand.
    pub(super) fn get_buffered(&self, file: ManifestFile, range: &Range<u64>) -> Option<ReadData> {
        let mut buffer = self.lock();
        let mut blocks = Vec::new();
        for block in self.blocks_of(range) {
            blocks.push(buffer.get((file.index.0, block))?);
        }
        drop(buffer);
        Some(self.assemble(range, &blocks))
    }

    /// Bytes of `range` (within the file), fetched where necessary.
    ///
    /// # Errors
    /// The server's, or `DigestMismatch` when damaged data come again and again.
    pub(super) async fn read(&self, file: ManifestFile, range: &Range<u64>) -> Result<ReadData> {
        // What the node was given and did not use is not given to the network once more.
        let mut left = None;
        if let Some(near) = &self.local_blocks
            && let Some(data) = self.materialise(near, file, range, &mut left).await?
        {
            return Ok(data);
        }
        let wanted = self.blocks_of(range);
        let mut blocks = Vec::new();
        let mut next = wanted.start;
        while next < wanted.end {
            if let Some(data) = self.read_local_block(file, next) {
                blocks.push(data);
                next += 1;
                continue;
            }
            match self.plan_block(file, next..wanted.end) {
                BlockAction::Ready(data) => {
                    blocks.push(data);
                    next += 1;
                }
                BlockAction::Wait(mut waiter) => {
                    if let Some(Ok(data)) = waiter.wait().await {
                        blocks.push(data);
                        next += 1;
                    }
                }
                BlockAction::Fetch(claim) => {
                    let deadline = left.take().unwrap_or_else(|| self.server.deadline());
                    let fetched = self.fetch(file, claim.blocks.clone(), deadline).await?;
                    next = claim.blocks.end;
                    self.complete(&claim, &fetched);
                    blocks.extend(fetched);
                }
            }
        }
        Ok(self.assemble(range, &blocks))
    }

    /// Has the node bring what of `range` is not here, and reads it from the node's files; `None`
    /// when it is not all there to be read, for whatever reason: the buffer has what else came. A
    /// node that failed leaves its deadline in `left`.
    ///
    /// # Errors
    /// The server's that end the volume.
    async fn materialise(
        &self,
        local_blocks: &LocalBlocks,
        file: ManifestFile,
        range: &Range<u64>,
        remaining: &mut Option<Deadline>,
    ) -> Result<Option<ReadData>> {
        let wanted = self.blocks_of(range);
        let mut next = wanted.start;
        while next < wanted.end {
            if local_blocks.has(file, next) {
                next += 1;
                continue;
            }
            match self.plan_block(file, next..wanted.end) {
                BlockAction::Ready(_) => next += 1,
                BlockAction::Wait(mut waiter) => {
                    if let Some(Ok(_)) = waiter.wait().await {
                        next += 1;
                    }
                }
                BlockAction::Fetch(claim) => {
                    next = claim.blocks.end;
                    let deadline = self.server.deadline();
                    // The network needs time to say why they are late.
                    let near_deadline = Deadline::after(deadline.remaining() / 2);
                    let blocks = claim.blocks.clone();
                    match self
                        .materialise_blocks(local_blocks, file, blocks, near_deadline)
                        .await
                    {
                        Ok(Some(fetched)) => self.complete(&claim, &fetched),
                        Ok(None) => {}
                        Err(why) if why.class() == ErrorClass::VolumeLost => return Err(why),
                        Err(why) => {
                            tracing::debug!(%why, "the agent requests blocks through the network");
                            *remaining = Some(deadline);
                            return Ok(None);
                        }
                    }
                }
            }
        }
        let whole = (wanted.end - wanted.start) * self.block_bytes();
        let mut bytes = Buffer::with_unspecified_content(usize::try_from(whole).unwrap_or(0));
        Ok(local_blocks
            .read(file, range, &mut bytes)
            .map(|place| ReadData {
                bytes,
                range: place,
            }))
    }

    /// Blocks that the node brings; `None` when they can be read from its files.
    async fn materialise_blocks(
        &self,
        local_blocks: &LocalBlocks,
        file: ManifestFile,
        blocks: Range<u64>,
        deadline: Deadline,
    ) -> Result<Option<Vec<Bytes>>> {
        let count = block_count(&blocks)?;
        let fetching = local_blocks.fetch(file.index, BlockIndex(blocks.start), count);
        let fetched = tokio::time::timeout_at(deadline.instant().into(), fetching).await;
        match fetched
            .unwrap_or_else(|_| Err(Error::new(ErrorCode::DeadlineExceeded, "no answer")))?
        {
            BlockDelivery::Local => Ok(None),
            BlockDelivery::Bytes(digests, body) => {
                self.verify(file, blocks, &digests, &body).map(Some)
            }
        }
    }

    /// Decides about the first of the wanted blocks. A claim also takes as many of the following
    /// blocks as nobody has or fetches, and as one call may carry.
    fn plan_block(&self, file: ManifestFile, wanted: Range<u64>) -> BlockAction {
        let first = (file.index.0, wanted.start);
        let owner = loop {
            if let Some(data) = self.lock().get(first) {
                return BlockAction::Ready(data);
            }
            match self.join(first) {
                Join::Owner(owner) => break owner,
                Join::Waiter(waiter) => return BlockAction::Wait(waiter),
                // It is buffered by now.
                Join::Present => {}
            }
        };
        let mut owners = vec![owner];
        let blocks_per_call = u64::from((IO_BYTES_MAX / self.block_bytes).max(1));
        let is_local = |block| {
            let local = self.local_blocks.as_ref();
            local.is_some_and(|local| local.has(file, block))
        };
        let limit = wanted.end.min(wanted.start + blocks_per_call);
        for block in wanted.start + 1..limit {
            match self.join((file.index.0, block)) {
                Join::Owner(owner) if !is_local(block) => owners.push(owner),
                _ => break,
            }
        }
        let blocks = wanted.start..wanted.start + owners.len() as u64;
        BlockAction::Fetch(FetchClaim { blocks, owners })
    }

    fn join(&self, key: BlockKey) -> Join<BlockKey, Bytes> {
        let is_buffered = || self.lock().blocks.contains_key(&key);
        self.inflight.join_or_start(key, is_buffered, |_| {}, || ())
    }

    /// Gives the blocks of a claim to the buffer and to all who wait for them.
    fn complete(&self, claim: &FetchClaim, fetched: &[Bytes]) {
        for (owner, data) in claim.owners.iter().zip(fetched) {
            // A copy of its own: a slice would keep the whole reply alive.
            let data = Bytes::copy_from_slice(data);
            self.lock().insert(*owner.key(), data.clone());
            owner.complete(Ok(data));
        }
    }

    /// A block that came to this machine while others were waited for.
    fn read_local_block(&self, file: ManifestFile, block: u64) -> Option<Bytes> {
        let near = self.local_blocks.as_ref()?;
        let start = block * self.block_bytes();
        let range = start..(start + self.block_bytes()).min(file.size);
        let mut bytes = Vec::new();
        near.read(file, &range, &mut bytes)?;
        Some(bytes.into())
    }

    async fn fetch(
        &self,
        file: ManifestFile,
        blocks: Range<u64>,
        deadline: Deadline,
    ) -> Result<Vec<Bytes>> {
        let (first, count) = (BlockIndex(blocks.start), block_count(&blocks)?);
        let mut call = ReadBlocks {
            range: BlockRange {
                cache: CacheRef::Volume(self.volume),
                manifest: self.manifest,
                file: file.index,
                first,
                count,
            },
            scope: FetchScope::AnyNode,
            priority: FetchPriority::Urgent,
            must_verify: false,
        };
        let Server {
            pool,
            address,
            token,
            ..
        } = &self.server;
        let mut damaged = 0;
        loop {
            let (reply, body) = pool
                .call_with_retries(address, token, call.clone(), Bytes::new(), deadline)
                .await?;
            match self.verify(file, blocks.clone(), &reply.digests, &body) {
                Err(error) if error.code == ErrorCode::DigestMismatch => {
                    damaged += 1;
                    tracing::warn!(%error, damaged, "damaged block");
                    if damaged > DIGEST_RETRIES {
                        return Err(error);
                    }
                    // The server may have other bytes on its disk than it believes.
                    call.must_verify = true;
                }
                result => return result,
            }
        }
    }

    /// Cuts the body into blocks and checks each.
    fn verify(
        &self,
        file: ManifestFile,
        blocks: Range<u64>,
        digests: &[Digest],
        body: &Bytes,
    ) -> Result<Vec<Bytes>> {
        let block_bytes = u64::from(self.block_bytes);
        let start = blocks.start * block_bytes;
        let length = file.size.min(blocks.end * block_bytes) - start;
        if digests.len() as u64 != blocks.end - blocks.start || body.len() as u64 != length {
            let text = format!(
                "asked for {} blocks ({length} bytes), got {} ({} bytes)",
                blocks.end - blocks.start,
                digests.len(),
                body.len()
            );
            return Err(Error::new(ErrorCode::Malformed, text));
        }
        let step = self.block_bytes as usize;
        let mut cut = Vec::with_capacity(digests.len());
        for (number, digest) in digests.iter().enumerate() {
            let data = body.slice(number * step..body.len().min((number + 1) * step));
            if Digest::of(&data) != *digest {
                let block = blocks.start + number as u64;
                let text = format!("block {block} of file {} arrived damaged", file.index);
                return Err(Error::new(ErrorCode::DigestMismatch, text));
            }
            cut.push(data);
        }
        Ok(cut)
    }

    fn blocks_of(&self, range: &Range<u64>) -> Range<u64> {
        let block_bytes = u64::from(self.block_bytes);
        range.start / block_bytes..range.end.div_ceil(block_bytes)
    }

    fn assemble(&self, range: &Range<u64>, blocks: &[Bytes]) -> ReadData {
        let length = usize::try_from(range.end - range.start).unwrap_or(0);
        let mut bytes = Buffer::with_capacity(length);
        let mut skip = (range.start % u64::from(self.block_bytes)) as usize;
        for block in blocks {
            let take = (block.len() - skip).min(length - bytes.len());
            bytes.extend_from_slice(&block[skip..skip + take]);
            skip = 0;
        }
        let place = 0..bytes.len();
        ReadData {
            bytes,
            range: place,
        }
    }

    fn lock(&self) -> MutexGuard<'_, BlockBuffer> {
        // No holder leaves the buffer half-changed.
        self.buffer.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl BlockBuffer {
    fn get(&mut self, key: BlockKey) -> Option<Bytes> {
        let block = self.blocks.get_mut(&key)?;
        self.keys_by_use.remove(&block.last_use);
        self.use_count += 1;
        block.last_use = self.use_count;
        self.keys_by_use.insert(self.use_count, key);
        Some(block.data.clone())
    }

    fn insert(&mut self, key: BlockKey, data: Bytes) {
        self.use_count += 1;
        self.bytes += data.len();
        self.keys_by_use.insert(self.use_count, key);
        self.blocks.insert(
            key,
            BufferedBlock {
                data,
                last_use: self.use_count,
            },
        );
        while self.bytes > memory::blocks_bytes_max() {
            let Some((_, oldest)) = self.keys_by_use.pop_first() else {
                break;
            };
            if let Some(block) = self.blocks.remove(&oldest) {
                self.bytes -= block.data.len();
            }
        }
    }
}

fn block_count(blocks: &Range<u64>) -> Result<u32> {
    u32::try_from(blocks.end - blocks.start)
        .map_err(|_| Error::new(ErrorCode::Malformed, "too many blocks in one read"))
}

/// Blocks that this reader fetches. When it is dropped without them, other readers try.
struct FetchClaim {
    blocks: Range<u64>,
    owners: Vec<FetchOwner<BlockKey, Bytes>>,
}
