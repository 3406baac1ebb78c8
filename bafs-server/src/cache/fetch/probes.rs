//! Answers probes: what this node gives to a peer that is about to ask home. These are blocks whose
//! primary node changed, and blocks that both nodes are about to read. Fetches nothing.

use std::sync::Arc;

use bafs_proto::Result;
use bafs_proto::buffer::Buffer;
use bafs_proto::cache::CacheMember;
use bafs_proto::hash::Digest;
use bafs_proto::ids::ServerId;
use bafs_proto::time::Deadline;
use bytes::Bytes;

use super::fetcher::Fetcher;
use crate::cache::block_run::{BlockRun, RunData};
use crate::cache::errors::fetch_in_progress;
use crate::cache::generation::Generation;
use crate::logic::blocks::CopyClass;

/// Most other holders in the reply to a probe.
const OTHER_HOLDERS_MAX: usize = 8;

impl Fetcher {
    /// Notes that the sender of a probe shares the cache, whatever was believed.
    pub(crate) fn note_prober(&self, generation: &Generation, prober: &CacheMember) {
        if !self.members(generation).contains(prober) {
            self.add_peer(generation, prober.clone());
        }
    }

    /// Answers a probe: the blocks of a run that are here or in flight.
    ///
    /// # Errors
    /// `DeadlineExceeded`; `ServerFault` when the system does not let this process read now.
    pub(crate) async fn answer_probe(
        &self,
        generation: &Arc<Generation>,
        run: BlockRun,
        prober: ServerId,
        deadline: Deadline,
    ) -> Result<RunData> {
        // Joining comes first: a block that is neither in flight now nor here afterwards was not in
        // flight.
        let join = |key| {
            let inflight = &generation.inflight;
            inflight.join_for_probe(key, self.server, prober)
        };
        let waiters: Vec<_> = run.keys().map(join).collect();
        let local = generation.store.read(run).await?;
        let mut digests = Vec::with_capacity(run.count);
        let mut body = Buffer::with_capacity(run.bytes());
        for (n, waiter) in waiters.into_iter().enumerate() {
            if let Some(digest) = local.digests[n] {
                digests.push(digest);
                body.extend_from_slice(&local.bytes[run.range(n, 1)]);
                continue;
            }
            let fetched = match waiter {
                Some(mut waiter) => {
                    let result = tokio::time::timeout_at(deadline.instant().into(), waiter.wait());
                    result.await.map_err(|_| fetch_in_progress())?
                }
                None => None,
            };
            if let Some(Ok((bytes, digest))) = fetched {
                digests.push(digest);
                body.extend_from_slice(&bytes);
                continue;
            }
            let had_block = generation.statistics.primary_blocks.contains(run.key(n));
            digests.push(match had_block {
                true => Digest::EVICTED,
                false => Digest::ABSENT,
            });
        }
        self.hand_over(generation, &run, &digests, prober).await?;
        Ok((digests, body.freeze()))
    }

    /// A peer has got blocks. If it is their primary node, they are secondary copies here from now
    /// on.
    async fn hand_over(
        &self,
        generation: &Arc<Generation>,
        run: &BlockRun,
        digests: &[Digest],
        receiver: ServerId,
    ) -> Result<()> {
        let given = (0..run.count).filter(|n| !digests[*n].is_of_no_bytes());
        let given: Vec<_> = given.collect();
        let Some(&first) = given.first() else {
            return Ok(());
        };
        let view = self.view(generation).await?;
        let extent = view.extent(run.key(first));
        if view.owner(extent) != receiver {
            return Ok(());
        }
        let mut classes = Vec::with_capacity(given.len());
        let statistics = &generation.statistics;
        for n in given {
            let key = run.key(n);
            if view.extent(key) != extent {
                continue;
            }
            classes.push((key, CopyClass::Secondary));
            // A block that was read in place of the primary node counts as read by it, now that it
            // has the block.
            if statistics.non_owner_reads.remove(key) {
                statistics.primary_blocks.insert(key);
                statistics.add("cache_home_unique_bytes", run.length(n) as u64);
            }
        }
        generation.store.reclassify(classes).await
    }

    /// Peers that a prober should probe for the blocks of one extent that it did not get: it may
    /// know fewer earlier placements than this server.
    ///
    /// # Errors
    /// `ServerFault`.
    pub(crate) async fn other_holders(
        &self,
        generation: &Arc<Generation>,
        run: &BlockRun,
        digests: &[Digest],
        prober: ServerId,
    ) -> Result<Vec<CacheMember>> {
        let lacking = run.keys().zip(digests);
        let lacking = lacking.filter(|(_, digest)| digest.is_of_no_bytes());
        let lacking: Vec<_> = lacking.map(|(key, _)| key).collect();
        let Some(first) = lacking.first() else {
            return Ok(Vec::new());
        };
        let view = self.view(generation).await?;
        let mut others = view.likely_holders(view.extent(*first));
        let claimants = generation.inflight.claimants(lacking.iter().copied());
        let claimants = claimants.iter().filter_map(|server| view.peer(*server));
        others.extend(claimants.cloned());
        others.retain(|peer| peer.server != prober);
        let others = others.into_iter().take(OTHER_HOLDERS_MAX);
        Ok(others.collect())
    }
}

/// Which blocks of a run are here.
pub(crate) fn list_present(generation: &Generation, run: &BlockRun) -> RunData {
    let table = generation.store.disk.table();
    let digest = |key| {
        let digest = table.contains(key).then(|| table.digest_of(key));
        digest.flatten().unwrap_or(Digest::ABSENT)
    };
    (run.keys().map(digest).collect(), Bytes::new())
}
