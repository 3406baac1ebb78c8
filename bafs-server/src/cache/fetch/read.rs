//! Reads runs of blocks: first from the disk, then by a fetch as far as the scope of the reader
//! permits. Knows no volume.

use std::sync::Arc;
use std::time::Duration;

use bafs_proto::Result;
use bafs_proto::inflight_fetches::Join;
use bafs_proto::message::{FetchPriority, FetchScope};
use bafs_proto::net::BoxFuture;
use bafs_proto::time::Deadline;

use super::extent_fetch::ExtentFetch;
use super::fetcher::Fetcher;
use super::inflight::{BlockOwner, BlockWaiter, wait_for_block};
use super::origin::{FETCH_MS_MAX, Urgency};
use crate::cache::block_run::{Block, BlockRun, RunData};
use crate::cache::errors::fetch_in_progress;
use crate::cache::generation::Generation;
use crate::cache::store::disk::DiskRead;
use crate::clock;
use crate::logic::placement::Extent;

/// Most bytes of one request to home or to a peer.
const REQUEST_BYTES_MAX: usize = 1 << 20;

/// How long an agent waits until the disk has what came; then it gets the bytes.
const WRITE_WAIT_MAX: Duration = Duration::from_millis(50);

/// Reads blocks of one generation for one reader.
#[derive(Clone)]
pub(crate) struct BlockReader {
    pub(crate) fetcher: Arc<Fetcher>,
    pub(crate) generation: Arc<Generation>,
    /// How far a fetch may go.
    pub(crate) scope: FetchScope,
    pub(crate) urgency: Urgency,
}

/// What an agent on this machine gets.
#[derive(Debug)]
pub(crate) enum Materialised {
    /// Its map says that it can read the blocks.
    Local,
    /// The blocks.
    Bytes(RunData),
}

/// A block that came by a fetch, with its place in the run.
struct FetchedBlock {
    place: usize,
    waiter: BlockWaiter,
    block: Block,
}

impl BlockReader {
    /// A reader of a scope and a priority.
    pub(crate) fn new(
        fetcher: &Arc<Fetcher>,
        generation: &Arc<Generation>,
        scope: FetchScope,
        priority: FetchPriority,
    ) -> Self {
        Self {
            fetcher: fetcher.clone(),
            generation: generation.clone(),
            scope,
            urgency: Urgency::of(priority),
        }
    }

    /// A reader for an agent.
    pub(crate) fn for_agent(fetcher: &Arc<Fetcher>, generation: &Arc<Generation>) -> Self {
        Self::new(
            fetcher,
            generation,
            FetchScope::AnyNode,
            FetchPriority::Urgent,
        )
    }

    /// Reads a run.
    ///
    /// # Errors
    /// `DeadlineExceeded` while the blocks are on their way (they will be here when the caller
    /// repeats the read), else why they could not be fetched.
    pub(crate) fn read(
        self,
        run: BlockRun,
        deadline: Deadline,
    ) -> BoxFuture<'static, Result<RunData>> {
        Box::pin(async move {
            let local = self.generation.store.read(run).await?;
            let statistics = &self.generation.statistics;
            let is_for_agent = self.scope == FetchScope::AnyNode;
            if is_for_agent {
                statistics.count_hits(&run, |n| local.digests[n].is_some());
            }
            let began = clock::monotonic_us();
            let is_complete = local.absent().is_empty();
            let data = self.complete(run, local, deadline).await?;
            if !is_complete && is_for_agent {
                statistics.count_wait(began);
            }
            Ok(data)
        })
    }

    /// Makes a run readable for an agent on this machine, which reads the files itself. The agent
    /// gets bytes only when the disk is slow or does not store the blocks.
    ///
    /// # Errors
    /// As of [`BlockReader::read`].
    pub(crate) async fn materialise(
        &self,
        run: BlockRun,
        deadline: Deadline,
    ) -> Result<Materialised> {
        let (store, statistics) = (&self.generation.store, &self.generation.statistics);
        let absent: Vec<_> = {
            let table = store.disk.table();
            let places = 0..run.count;
            places.filter(|n| !table.contains(run.key(*n))).collect()
        };
        statistics.count_hits(&run, |n| absent.binary_search(&n).is_err());
        let began = clock::monotonic_us();
        let mut fetched = self.fetch(&run, &absent, deadline).await?;
        if !absent.is_empty() {
            statistics.count_wait(began);
        }
        let written = async {
            for block in &mut fetched {
                block.waiter.wait_until_ended().await;
            }
        };
        // Whether or not that is in time, the table knows.
        let _ = tokio::time::timeout(WRITE_WAIT_MAX, written).await;
        if store.disk.can_agents_read(&run) {
            return Ok(Materialised::Local);
        }
        let mut local = store.read(run).await?;
        put_fetched(&mut local, &run, fetched);
        let data = self.complete(run, local, deadline).await?;
        Ok(Materialised::Bytes(data))
    }

    /// Fetches the absent ones of the blocks at these places of a run before a reader comes. They
    /// are on disk afterwards, if there is room. Returns the bytes fetched.
    ///
    /// # Errors
    /// Why some could not be fetched.
    pub(crate) async fn prefetch(&self, run: BlockRun, places: &[usize]) -> Result<u64> {
        let mut bytes = 0;
        for (n, mut waiter) in self.join_or_start(&run, places).await? {
            wait_for_block(&mut waiter).await?;
            waiter.wait_until_ended().await;
            bytes += run.length(n) as u64;
        }
        Ok(bytes)
    }

    /// Adds the absent blocks of a run.
    async fn complete(
        &self,
        run: BlockRun,
        mut local: DiskRead,
        deadline: Deadline,
    ) -> Result<RunData> {
        loop {
            let absent = local.absent();
            if absent.is_empty() {
                return Ok(local.into_run_data());
            }
            if deadline.remaining().is_zero() {
                return Err(fetch_in_progress());
            }
            let fetched = self.fetch(&run, &absent, deadline).await?;
            let has_more_on_disk = fetched.len() < absent.len();
            put_fetched(&mut local, &run, fetched);
            if has_more_on_disk {
                let fresh = self.generation.store.read(run).await?;
                for n in local.absent() {
                    if let Some(digest) = fresh.digests[n] {
                        local.put(&run, n, &fresh.bytes[run.range(n, 1)], digest);
                    }
                }
            }
        }
    }

    /// Fetches the blocks at these places of a run, and waits until all have come. A block that is
    /// not among the results came to the disk meanwhile.
    async fn fetch(
        &self,
        run: &BlockRun,
        places: &[usize],
        deadline: Deadline,
    ) -> Result<Vec<FetchedBlock>> {
        let until = deadline.instant().into();
        let joined = tokio::time::timeout_at(until, self.join_or_start(run, places));
        let joined = joined.await.map_err(|_| fetch_in_progress())??;
        let mut fetched = Vec::with_capacity(joined.len());
        for (place, mut waiter) in joined {
            let block = tokio::time::timeout_at(until, wait_for_block(&mut waiter));
            let block = block.await.map_err(|_| fetch_in_progress())??;
            fetched.push(FetchedBlock {
                place,
                waiter,
                block,
            });
        }
        Ok(fetched)
    }

    /// Joins or starts the fetches of the blocks at these places of a run. A block without a waiter
    /// came to the disk meanwhile.
    async fn join_or_start(
        &self,
        run: &BlockRun,
        places: &[usize],
    ) -> Result<Vec<(usize, BlockWaiter)>> {
        let generation = &self.generation;
        if generation.membership.is_shared() {
            self.fetcher.wait_for_peers().await;
        }
        let view = self.fetcher.view(generation).await?;
        let mut waiters = Vec::new();
        let mut groups: Vec<RequestGroup> = Vec::new();
        let mut last: Option<(Extent, FetchScope)> = None;
        for &n in places {
            let key = run.key(n);
            let extent = view.extent(key);
            let scope = match last {
                Some((of, scope)) if of == extent => scope,
                _ if view.is_own(extent) => FetchScope::Home,
                _ => self.scope,
            };
            last = Some((extent, scope));
            let is_present = || generation.store.disk.table().contains(key);
            let inflight = &generation.inflight;
            match inflight.join_or_start(key, scope, &self.urgency, is_present) {
                Join::Present => {}
                Join::Waiter(waiter) => {
                    generation.statistics.add("cache_joined_fetches", 1);
                    waiters.push((n, waiter));
                }
                Join::Owner(owner) => {
                    waiters.push((n, owner.waiter()));
                    let group = groups.last_mut();
                    match group.filter(|group| group.takes(n, run, extent, scope)) {
                        Some(group) => group.owners.push(owner),
                        None => groups.push(RequestGroup {
                            first: n,
                            scope,
                            extent,
                            owners: vec![owner],
                        }),
                    }
                }
            }
        }
        for group in groups {
            let fetch = ExtentFetch {
                fetcher: self.fetcher.clone(),
                generation: generation.clone(),
                view: view.clone(),
                run: run.part(group.first, group.owners.len()),
                urgency: self.urgency.clone(),
                deadline: Deadline::after_ms(FETCH_MS_MAX),
            };
            // A task of its own: it goes on when the reader that started it is cancelled.
            tokio::spawn(fetch.run(group.scope, group.owners));
        }
        Ok(waiters)
    }
}

/// Neighbouring blocks of one extent that come with one request.
struct RequestGroup {
    first: usize,
    scope: FetchScope,
    extent: Extent,
    owners: Vec<BlockOwner>,
}

impl RequestGroup {
    fn takes(&self, n: usize, run: &BlockRun, extent: Extent, scope: FetchScope) -> bool {
        let count = self.owners.len() + 1;
        let is_same = self.scope == scope && self.extent == extent;
        let bytes = || run.range(self.first, count).len();
        is_same && self.first + count == n + 1 && bytes() <= REQUEST_BYTES_MAX
    }
}

fn put_fetched(local: &mut DiskRead, run: &BlockRun, fetched: Vec<FetchedBlock>) {
    for FetchedBlock { place, block, .. } in fetched {
        local.put(run, place, &block.0, block.1);
    }
}
