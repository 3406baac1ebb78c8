//! The calls of agents and peers about blocks of a cache. Checks no right.

use std::sync::Arc;

use bafs_proto::Result;
use bafs_proto::hash::Digest;
use bafs_proto::message::{
    BlockData, BlockRange, CacheRef, FetchScope, ManifestPage, Probe, ProbePurpose, Promote,
    ReadBlocks, ReadManifest, Touch,
};
use bafs_proto::time::Deadline;
use bytes::Bytes;

use super::block_run::BlockRun;
use super::caches::Caches;
use super::fetch::probes::list_present;
use super::fetch::read::BlockReader;
use super::fetch::read_ahead;
use super::fetch::reply_errors::{agent_error, home_silence_ms, peer_error};
use super::generation::Generation;
use crate::clock;

impl Caches {
    /// A page of a volume's manifest.
    ///
    /// # Errors
    /// `VolumeLost`.
    pub async fn read_manifest(&self, call: ReadManifest) -> Result<ManifestPage> {
        let generation = self.volume(call.volume)?.generation();
        let peer_check = self.fetcher.peer_check(&generation);
        Ok(generation.store.manifest.page(call.first, peer_check))
    }

    /// Reads blocks from here, from a peer or from home, as the scope permits. Leaves out blocks
    /// past the end of the file.
    ///
    /// # Errors
    /// `VolumeLost` when the cache is not here; `SourceChanged` when the reader works with another
    /// state of the source, or home says that the file changed; `Malformed`; `DeadlineExceeded`;
    /// what home answers.
    pub async fn read_blocks(
        &self,
        call: ReadBlocks,
        deadline: Deadline,
    ) -> Result<(BlockData, Bytes)> {
        let (generation, run) = self.find_blocks(&call.range)?;
        let is_agent = call.scope == FetchScope::AnyNode;
        let Some(run) = run else {
            return Ok((self.block_data(&generation, Vec::new()), Bytes::new()));
        };
        if call.must_verify {
            generation.store.disk.require_verification(&run);
        }
        let reader = BlockReader::new(&self.fetcher, &generation, call.scope, call.priority);
        let read = if is_agent {
            read_ahead::follow(&self.fetcher, &generation, &run);
            let began = clock::monotonic_us();
            let read = reader.read(run, deadline.with_reply_margin());
            read.await
                .map_err(|error| agent_error(&self.fetcher, &generation, &run, began, error))
        } else {
            let read = reader.read(run, deadline);
            read.await
                .map_err(|error| peer_error(&self.fetcher, &generation, error))
        };
        let (digests, bytes) = read?;
        if !is_agent {
            count_served(&generation, &bytes);
        }
        Ok((self.block_data(&generation, digests), bytes))
    }

    /// Says which blocks are here, or sends them, without a fetch.
    ///
    /// # Errors
    /// `VolumeLost`; `SourceChanged`; `Malformed`; `Busy` while blocks are in flight;
    /// `ServerFault`.
    pub async fn probe(&self, call: Probe, deadline: Deadline) -> Result<(BlockData, Bytes)> {
        let (generation, run) = self.find_blocks(&call.range)?;
        if let (ProbePurpose::HomeRead(prober), CacheRef::Cooperative(_)) =
            (&call.purpose, &call.range.cache)
        {
            self.fetcher.note_prober(&generation, prober);
        }
        let Some(run) = run else {
            return Ok((self.block_data(&generation, Vec::new()), Bytes::new()));
        };
        if call.must_verify {
            generation.store.disk.require_verification(&run);
        }
        let ProbePurpose::HomeRead(prober) = call.purpose else {
            let (digests, bytes) = list_present(&generation, &run);
            return Ok((self.block_data(&generation, digests), bytes));
        };
        let answer = self
            .fetcher
            .answer_probe(&generation, run, prober.server, deadline);
        let answer = answer.await;
        let (digests, bytes) =
            answer.map_err(|error| peer_error(&self.fetcher, &generation, error))?;
        count_served(&generation, &bytes);
        let others = self
            .fetcher
            .other_holders(&generation, &run, &digests, prober.server);
        // A hint: the prober gets its blocks all the same.
        let other_holders = others.await.unwrap_or_default();
        let data = BlockData {
            other_holders,
            ..self.block_data(&generation, digests)
        };
        Ok((data, bytes))
    }

    /// Makes the running fetches of blocks urgent.
    ///
    /// # Errors
    /// `VolumeLost`; `SourceChanged`; `Malformed`.
    pub fn promote(&self, call: &Promote) -> Result<()> {
        let (generation, run) = self.find_blocks(&call.range)?;
        if let Some(run) = run {
            generation.inflight.promote(&run);
        }
        Ok(())
    }

    /// Marks the blocks that are here as used now.
    ///
    /// # Errors
    /// `VolumeLost`; `SourceChanged`; `Malformed`.
    pub fn touch(&self, call: &Touch) -> Result<()> {
        let (generation, run) = self.find_blocks(&call.range)?;
        if let Some(run) = run {
            generation.store.disk.touch(&run);
        }
        Ok(())
    }

    fn find_blocks(&self, range: &BlockRange) -> Result<(Arc<Generation>, Option<BlockRun>)> {
        let generation = self.find(&range.cache, range.manifest)?;
        let run = generation
            .store
            .find_run(range.file, range.first, range.count)?;
        Ok((generation, run))
    }

    fn block_data(&self, generation: &Generation, digests: Vec<Digest>) -> BlockData {
        BlockData {
            digests,
            other_holders: Vec::new(),
            home_silence_ms: home_silence_ms(&self.fetcher, generation),
        }
    }
}

fn count_served(generation: &Generation, bytes: &Bytes) {
    let bytes = bytes.len() as u64;
    generation
        .statistics
        .add("cache_served_to_peers_bytes", bytes);
}
