//! What a server needs to bring blocks from elsewhere and to keep them. Decides no replacement.
//!
//! `route` says whom to ask, `from_peers` and `from_home` ask, `arrival` checks what comes.
//!
//! Who waits for whom: a flight from a peer may wait for that peer's detour or flight to home, a
//! detour for the primary's flight to home. A flight to home that is undecided, because others may
//! have the blocks, waits for servers with smaller ids, or for those that have decided; one that
//! has decided waits for home and for nobody. So there are no circles, whatever the servers believe
//! of each other.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use bafs_proto::cache::CacheMember;
use bafs_proto::ids::{FileIndex, ServerId};
use bafs_proto::net::pool::Pool;
use bafs_proto::time::{Deadline, Time};
use bafs_proto::token::Token;
use bafs_proto::{Error, Result};
use tokio::sync::{Semaphore, SemaphorePermit, watch};

use super::blocking;
use super::classes::Sorting;
use super::disk::{CacheDisk, Run};
use super::flights::{Block, Flights};
use super::gate::Gate;
use super::manifest::Manifest;
use super::meter::{BlockSet, Meter};
use super::peers::{CacheName, Peers};
use super::pins::Pins;
use super::route::View;
use crate::home_clients::HomeClients;
use crate::logic::blocks::CopyClass;
use crate::logic::placement::extent_bytes;
use crate::logic::read_ahead::SequentialReaders;
use crate::logic::rendezvous::Candidate;

/// A fetch outlives the readers that wait for it, so that a slow home is not asked twice; after
/// this time it is given up.
pub(super) const FLIGHT_MS_MAX: u64 = 120_000;

/// A node that starts with cooperative caches learns its peers before it goes home for a block,
/// but waits no longer than this.
const SETTLE_MS_MAX: u64 = 3_000;

/// Most whole files of a volume that are compared with their digests at once.
const COMPARISONS_MAX: usize = 2;

/// Blocks that readers have before the disk does, in units of [`UNKEPT_UNIT`] bytes: 64 MiB.
const UNKEPT_MAX: usize = 1024;
const UNKEPT_UNIT: usize = 64 << 10;

/// How the comparison of a file ended, once it has.
pub(super) type Comparison = watch::Receiver<Option<Result<()>>>;

/// One state of the source of a cache volume, and what is here of it.
pub(crate) struct Generation {
    /// The source.
    pub(crate) manifest: Manifest,
    /// The blocks that are here.
    pub(crate) disk: CacheDisk,
    /// Name of the cooperative cache; empty when it shares with nobody.
    pub(crate) cooperative: String,
    /// Most bytes it keeps.
    pub(crate) capacity_bytes: u64,
    /// Bytes of all files of its source.
    pub(super) source_bytes: u64,
    /// Bytes of a file that have one primary.
    pub(super) extent_bytes: u64,
    /// Capability for the source; replaced when a fresher one comes.
    pub(crate) source_token: Arc<RwLock<Token>>,
    /// Blocks on their way for a primary: from home, or from who was primary before.
    pub(crate) from_home: Flights,
    /// Blocks on their way for a server that cannot reach their primary.
    pub(crate) detours: Flights,
    /// Blocks on their way from a primary.
    pub(crate) from_peers: Flights,
    /// What the volume did.
    pub(crate) meter: Arc<Meter>,
    /// Blocks that this server had as their primary, wherever it had them from, and as far as it
    /// still had them when it started.
    pub(crate) wanted: BlockSet,
    /// Blocks that it read from home in place of their primary, which does not have them yet.
    pub(crate) strays: BlockSet,
    /// Blocks that were fetched ahead of a reader and not yet read.
    pub(crate) ahead: BlockSet,
    /// Who reads in order, and where.
    pub(crate) readers: Mutex<SequentialReaders>,
    /// Which paths are pinned.
    pub(crate) pins: Arc<Pins>,
    /// When home last sent blocks, as a [`Time`]; 0 if it never did.
    pub(super) home_answered_ms: AtomicU64,
    /// When home last sent something to another server that was asked for blocks, as that told.
    pub(super) home_of_peers_ms: AtomicU64,
    /// How far the classes of the blocks are right.
    pub(super) sorting: Mutex<Sorting>,
    /// Whether it was told that blocks are passed through.
    told_full: AtomicBool,
    /// Where the blocks are.
    pub(super) view: RwLock<Option<Arc<View>>>,
    /// Among which servers they were placed before, as others told.
    pub(super) told_former: Mutex<Vec<Vec<Candidate>>>,
    /// Held while they are placed anew.
    pub(super) looking: tokio::sync::Mutex<()>,
    /// Held while blocks are written.
    writing: tokio::sync::Mutex<()>,
    /// Whole files that are being compared with their digests, and how that ends.
    pub(super) comparing: Mutex<BTreeMap<FileIndex, Comparison>>,
    /// Large files that were compared because they were wholly here: once each, or a block that
    /// comes and goes would cost the comparison of all others.
    pub(super) compared_on_arrival: Mutex<BTreeSet<FileIndex>>,
    /// For so many of them at once: it takes a processor each.
    pub(super) comparing_places: Semaphore,
    /// Why agents must give back what was handed over to them, once they must.
    pub(super) recall: Mutex<watch::Sender<Option<Error>>>,
}

/// What a generation begins with.
pub(crate) struct Beginning {
    pub(crate) manifest: Manifest,
    pub(crate) disk: CacheDisk,
    pub(crate) cooperative: String,
    pub(crate) capacity_bytes: u64,
    pub(crate) source_token: Arc<RwLock<Token>>,
    pub(crate) meter: Arc<Meter>,
    pub(crate) pins: Arc<Pins>,
}

impl Generation {
    pub(crate) fn new(beginning: Beginning) -> Self {
        let Beginning {
            manifest,
            disk,
            cooperative,
            capacity_bytes,
            source_token,
            meter,
            pins,
        } = beginning;
        let source_bytes = manifest.source_bytes();
        let extent_bytes = extent_bytes(source_bytes, manifest.block_bytes());
        Self {
            source_bytes,
            extent_bytes,
            manifest,
            disk,
            cooperative,
            capacity_bytes,
            source_token,
            from_home: Flights::default(),
            detours: Flights::default(),
            from_peers: Flights::default(),
            meter,
            wanted: BlockSet::default(),
            strays: BlockSet::default(),
            ahead: BlockSet::default(),
            readers: Mutex::default(),
            pins,
            home_answered_ms: AtomicU64::new(0),
            home_of_peers_ms: AtomicU64::new(0),
            sorting: Mutex::default(),
            told_full: AtomicBool::new(false),
            view: RwLock::default(),
            told_former: Mutex::default(),
            looking: tokio::sync::Mutex::default(),
            writing: tokio::sync::Mutex::default(),
            comparing: Mutex::default(),
            compared_on_arrival: Mutex::default(),
            comparing_places: Semaphore::new(COMPARISONS_MAX),
            recall: Mutex::default(),
        }
    }

    /// Counts what an earlier life of this server had as the primary and is still here: home has
    /// sent it once, and if it goes and comes again, that is the second time.
    pub(crate) fn count_kept(&self) {
        let table = self.disk.table();
        let mut bytes = 0;
        for (key, held, class) in table.iter() {
            if class != CopyClass::Secondary {
                self.wanted.insert(key);
                bytes += u64::from(held.length);
            }
        }
        self.meter.add("cache_recovered_bytes", bytes);
    }

    /// Counts blocks that find no place, and says so once.
    fn tell_pass_through(&self, blocks: u64) {
        self.meter.add("cache_bypassed_blocks", blocks);
        if self.told_full.swap(true, Ordering::Relaxed) {
            return;
        }
        let table = self.disk.table();
        tracing::info!(
            capacity_bytes = self.capacity_bytes,
            used_bytes = table.used_bytes(),
            capacity_files = table.capacity_files(),
            used_files = table.used_files(),
            pinned_bytes = table.class_bytes(CopyClass::Pinned),
            "a cache volume has no space for some blocks, so each read fetches them again; give it \
             more bytes or files, or unpin blocks"
        );
    }

    pub(crate) fn name(&self) -> CacheName {
        (self.cooperative.clone(), self.manifest.digest())
    }
}

/// What a server needs to fetch blocks.
pub(crate) struct Fetcher {
    pub(super) homes: Arc<HomeClients>,
    pub(super) pool: Pool,
    pub(super) token: Token,
    pub(super) server: ServerId,
    pub(super) address: String,
    peers: Mutex<Peers>,
    /// The ways to homes, by their addresses: one that is slow keeps nobody from another.
    gates: Mutex<BTreeMap<String, Arc<Gate>>>,
    /// Bytes that are being fetched ahead of readers now.
    pub(super) ahead_bytes: AtomicU64,
    unkept: Semaphore,
    settled: watch::Sender<bool>,
    settle_until: Deadline,
}

impl Fetcher {
    /// A fetcher that shows `token` to its peers, which reach it at `address`.
    pub(crate) fn new(
        homes: Arc<HomeClients>,
        token: Token,
        server: ServerId,
        address: String,
    ) -> Self {
        Self {
            pool: homes.pool().clone(),
            homes,
            token,
            server,
            address,
            peers: Mutex::new(Peers::new(server)),
            gates: Mutex::default(),
            ahead_bytes: AtomicU64::new(0),
            unkept: Semaphore::new(UNKEPT_MAX),
            settled: watch::Sender::new(true),
            settle_until: Deadline::after_ms(SETTLE_MS_MAX),
        }
    }

    /// From here on nobody goes home before [`Fetcher::settle`], for a while.
    pub(crate) fn unsettle(&self) {
        self.settled.send_replace(false);
    }

    /// The peers are known.
    pub(crate) fn settle(&self) {
        self.settled.send_replace(true);
    }

    pub(crate) fn is_settled(&self) -> bool {
        *self.settled.borrow()
    }

    /// Waits until the peers are known, but not for long.
    pub(crate) async fn until_settled(&self) {
        let mut settled = self.settled.subscribe();
        let known = settled.wait_for(|settled| *settled);
        let _ = tokio::time::timeout_at(self.settle_until.instant().into(), known).await;
    }

    /// Where the sources are.
    pub(crate) fn homes(&self) -> &HomeClients {
        &self.homes
    }

    /// The way to a home.
    pub(super) fn gate(&self, home: &str) -> Arc<Gate> {
        let mut gates = self.gates.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(gate) = gates.get(home) {
            return gate.clone();
        }
        // Homes that nobody is on the way to are forgotten.
        gates.retain(|_, gate| Arc::strong_count(gate) > 1);
        let gate = Arc::new(Gate::new());
        gates.insert(home.to_owned(), gate.clone());
        gate
    }

    /// When the home of a generation last sent something, to whatever volume: they all wait for
    /// each other on the way there.
    pub(super) fn home_answered(&self, generation: &Generation) -> Time {
        let own = Time(generation.home_answered_ms.load(Ordering::Relaxed));
        let gates = self.gates.lock().unwrap_or_else(PoisonError::into_inner);
        let of_all = gates.get(generation.manifest.home().address);
        of_all.map_or(own, |gate| gate.answered().max(own))
    }

    /// What this server believes of others. Not to be held while waiting.
    pub(crate) fn peers(&self) -> MutexGuard<'_, Peers> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This server as one that shares a cache.
    pub(crate) fn member(&self, generation: &Generation) -> CacheMember {
        CacheMember {
            server: self.server,
            address: self.address.clone(),
            capacity_bytes: generation.capacity_bytes,
        }
    }

    /// A place for blocks that readers get before the disk does, if there is one.
    pub(super) fn unkept(&self, run: &Run) -> Option<SemaphorePermit<'_>> {
        let units = u32::try_from(run.bytes().div_ceil(UNKEPT_UNIT)).ok()?;
        self.unkept.try_acquire_many(units).ok()
    }

    /// Writes fetched blocks to disk as far as there is room.
    pub(crate) async fn keep(
        &self,
        generation: &Arc<Generation>,
        run: &Run,
        blocks: Vec<Block>,
        class: CopyClass,
    ) -> Result<()> {
        // Writers of one file wait for each other in the kernel, and burn a processor meanwhile.
        let one_at_a_time = generation.writing.lock().await;
        let (keeping, run) = (generation.clone(), *run);
        let is_new = blocking(move || {
            let passed = keeping.disk.keep(&run, &blocks, class);
            if passed > 0 {
                keeping.tell_pass_through(passed as u64);
            }
            passed < run.count && keeping.is_large_and_new(run.file)
        });
        let is_new = is_new.await?;
        drop(one_at_a_time);
        if is_new {
            drop(generation.begin_to_compare(run.file));
        }
        Ok(())
    }
}
