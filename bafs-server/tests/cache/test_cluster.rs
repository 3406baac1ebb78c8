//! A home that counts and several nodes with caches, in one process, with chosen faults.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bafs_proto::attributes::Attributes;
use bafs_proto::cache::{CacheStatus, Pinning, WarmCache, WarmingState};
use bafs_proto::hash::Digest;
use bafs_proto::ids::{BlockIndex, FileIndex, ServerId, VolumeId};
use bafs_proto::message::{
    Advert, BlockData, BlockRange, CacheRef, Done, FetchPriority, FetchScope, Lifetime, ReadBlocks,
    ReadManifest, Reply, Request, ServerKind, SourceBlocks, SourceData, SourceDigests, SourceEntry,
    SourceIdentity, SourceKind, SourcePage,
};
use bafs_proto::net::memory::MemoryNetwork;
use bafs_proto::net::pool::Pool;
use bafs_proto::net::{BoxFuture, IncomingRequest, Service};
use bafs_proto::path::join;
use bafs_proto::source_warning::SourceWarnings;
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::volume::{LimitKind, ReplacementPolicy, VolumeKind, VolumeSource, VolumeSpec};
use bafs_proto::{Error, ErrorCode, Result};
use bafs_server::cache::Caches;
use bafs_server::counters::Counters;
use bafs_server::home_clients::HomeClients;
use bafs_server::logic::space::Amount;
use bytes::Bytes;

pub(crate) const BLOCK: u32 = 16 << 10;
pub(crate) const HOME: &str = "home:1";
pub(crate) const NAME: &str = "shared";

/// Bytes that differ from place to place, the same for the same seed.
pub(crate) fn content(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

#[derive(Clone)]
struct HomeFile {
    bytes: Arc<Vec<u8>>,
    mtime_ns: i64,
}

/// A home server whose files are in memory.
#[derive(Default)]
pub(crate) struct MemoryHome {
    files: Mutex<BTreeMap<String, HomeFile>>,
    /// Bytes that left it.
    pub(crate) read_bytes: AtomicU64,
    /// So many of its next replies are damaged on the way.
    pub(crate) damaged_replies: AtomicU64,
    /// Each read takes so long, in milliseconds.
    pub(crate) read_ms: AtomicU64,
    /// Whoever has this for writing keeps all reads waiting.
    pub(crate) reads_paused: tokio::sync::RwLock<()>,
    /// Blocks that left it, to find doubles: path and offset.
    sent_blocks: Mutex<BTreeSet<(String, u64)>>,
    pub(crate) duplicate_blocks: AtomicU64,
    /// It is no home server, and says nothing of blocks that others send.
    pub(crate) knows_no_digests: AtomicBool,
}

impl MemoryHome {
    pub(crate) fn put(&self, path: &str, bytes: Vec<u8>, mtime_ns: i64) {
        let file = HomeFile {
            bytes: Arc::new(bytes),
            mtime_ns,
        };
        self.files
            .lock()
            .expect("works in tests")
            .insert(path.to_owned(), file);
    }

    fn list(&self, below: &str, after: Option<String>) -> SourcePage {
        let files = self.files.lock().expect("works in tests");
        let entries = files.iter().filter_map(|(path, file)| {
            let path = if path == below {
                ""
            } else {
                path.strip_prefix(&format!("{below}/"))?
            };
            (after.as_deref() < Some(path)).then(|| SourceEntry {
                path: path.to_owned(),
                kind: SourceKind::File,
                identity: identity(file),
                mode: 0o644,
            })
        });
        let top = SourceEntry {
            path: String::new(),
            kind: SourceKind::Directory,
            identity: SourceIdentity {
                size: 0,
                mtime_ns: 1,
                ctime_ns: 0,
            },
            mode: 0o755,
        };
        let is_top = after.is_none() && !files.contains_key(below);
        let entries = is_top.then_some(top).into_iter().chain(entries);
        let mut entries: Vec<_> = entries.take(1001).collect();
        let more = entries.len() > 1000;
        entries.truncate(1000);
        SourcePage {
            entries,
            warnings: SourceWarnings::default(),
            has_more: more,
        }
    }

    fn digests(&self, top: &str, blocks: &SourceBlocks, block_bytes: u32) -> Result<Vec<Digest>> {
        let files = self.files.lock().expect("works in tests");
        let file = files.get(&join(top, &blocks.path));
        let file = file.filter(|file| identity(file) == blocks.identity);
        let file = file.ok_or_else(|| Error::new(ErrorCode::SourceChanged, "another file"))?;
        let all = file.bytes.chunks(block_bytes as usize).map(Digest::of);
        let all = all.skip(blocks.first.0 as usize);
        Ok(all.take(blocks.count as usize).collect())
    }

    async fn answer(&self, request: Request) -> Result<(Reply, Bytes)> {
        match request {
            Request::ReadDigests(call) if !self.knows_no_digests.load(Ordering::Relaxed) => {
                let digests = |blocks| self.digests(&call.path, blocks, call.block_bytes);
                let needed = digests(&call.needed)?;
                let welcome = call.welcome.iter().map(digests).collect::<Result<_>>()?;
                let digests = SourceDigests { needed, welcome };
                Ok((Reply::ReadDigests(digests), Bytes::new()))
            }
            Request::ListSource(call) => Ok((
                Reply::ListSource(self.list(&call.path, call.after)),
                Bytes::new(),
            )),
            Request::ReadSource(call) => {
                tokio::time::sleep(Duration::from_millis(self.read_ms.load(Ordering::Relaxed)))
                    .await;
                let _turn = self.reads_paused.read().await;
                let file = self
                    .files
                    .lock()
                    .expect("works in tests")
                    .get(&call.path)
                    .cloned();
                let file = file.ok_or_else(|| Error::new(ErrorCode::NotFound, "no such file"))?;
                if identity(&file) != call.identity {
                    return Err(Error::new(ErrorCode::SourceChanged, "another file"));
                }
                let end = (call.offset as usize + call.length as usize).min(file.bytes.len());
                let mut bytes = file.bytes[call.offset as usize..end].to_vec();
                let pieces = bytes.chunks(call.block_bytes as usize);
                let digests: Vec<_> = pieces.map(Digest::of).collect();
                self.read_bytes
                    .fetch_add(bytes.len() as u64, Ordering::Relaxed);
                for n in 0..digests.len() as u64 {
                    let offset = call.offset + n * u64::from(call.block_bytes);
                    if !self
                        .sent_blocks
                        .lock()
                        .expect("works in tests")
                        .insert((call.path.clone(), offset))
                    {
                        self.duplicate_blocks.fetch_add(1, Ordering::Relaxed);
                    }
                }
                let damaged = &self.damaged_replies;
                let less = |left: u64| left.checked_sub(1);
                if damaged
                    .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less)
                    .is_ok()
                {
                    bytes[0] ^= 1;
                }
                Ok((Reply::ReadSource(SourceData { digests }), bytes.into()))
            }
            other => Err(Error::new(ErrorCode::Unsupported, other.name())),
        }
    }
}

fn identity(file: &HomeFile) -> SourceIdentity {
    SourceIdentity {
        size: file.bytes.len() as u64,
        mtime_ns: file.mtime_ns,
        ctime_ns: 0,
    }
}

impl Service for MemoryHome {
    fn serve(
        self: Arc<Self>,
        incoming: IncomingRequest,
    ) -> BoxFuture<'static, Result<(Reply, Bytes)>> {
        Box::pin(async move { self.answer(incoming.request).await })
    }
}

struct NodeService {
    caches: Arc<Caches>,
    /// It sends other bytes than it should, with a digest that fits them.
    false_replies: Arc<AtomicU64>,
}

impl NodeService {
    fn falsify(&self, blocks: &mut BlockData, bytes: &mut Bytes) {
        let lies = self.false_replies.load(Ordering::Relaxed) > 0;
        if lies && blocks.digests.len() == 1 && !bytes.is_empty() {
            let mut other = bytes.to_vec();
            other[0] ^= 1;
            blocks.digests = vec![Digest::of(&other)];
            *bytes = other.into();
        }
    }
}

impl Service for NodeService {
    fn serve(
        self: Arc<Self>,
        incoming: IncomingRequest,
    ) -> BoxFuture<'static, Result<(Reply, Bytes)>> {
        Box::pin(async move {
            match incoming.request {
                Request::ReadBlocks(call) => {
                    let (mut blocks, mut bytes) =
                        self.caches.read_blocks(call, incoming.deadline).await?;
                    self.falsify(&mut blocks, &mut bytes);
                    Ok((Reply::ReadBlocks(blocks), bytes))
                }
                Request::Probe(call) => {
                    let (mut blocks, mut bytes) =
                        self.caches.probe(call, incoming.deadline).await?;
                    self.falsify(&mut blocks, &mut bytes);
                    Ok((Reply::Probe(blocks), bytes))
                }
                Request::Promote(call) => {
                    self.caches.promote(&call)?;
                    Ok((Reply::Promote(Done), Bytes::new()))
                }
                Request::Touch(call) => {
                    self.caches.touch(&call)?;
                    Ok((Reply::Touch(Done), Bytes::new()))
                }
                Request::JoinCache(call) => {
                    let member = self.caches.join(call)?;
                    Ok((Reply::JoinCache(member), Bytes::new()))
                }
                other => Err(Error::new(ErrorCode::Unsupported, other.name())),
            }
        })
    }
}

/// A node with its caches.
#[derive(Clone)]
pub(crate) struct CacheNode {
    pub(crate) server: ServerId,
    pub(crate) address: String,
    pub(crate) directory: PathBuf,
    pub(crate) caches: Arc<Caches>,
    pub(crate) counters: Counters,
    pub(crate) false_replies: Arc<AtomicU64>,
}

impl CacheNode {
    pub(crate) fn counter(&self, name: &str) -> u64 {
        self.counters
            .snapshot()
            .get(name)
            .copied()
            .unwrap_or_default()
    }

    /// Removes a volume, and its data.
    pub(crate) async fn forget(&self, volume: VolumeId) {
        self.caches.remove(volume).await;
        self.caches.limit_retained(Amount::default()).await;
    }

    /// What the node tells of a cache volume.
    pub(crate) fn status(&self, volume: VolumeId) -> CacheStatus {
        self.caches.get_cache(volume).expect("works in tests")
    }

    /// Warms the node's share of a volume and waits until that is over.
    pub(crate) async fn warm(
        &self,
        volume: VolumeId,
        path: &str,
        pinning: Pinning,
    ) -> WarmingState {
        let path = path.to_owned();
        let call = WarmCache {
            volume,
            path,
            pinning,
        };
        let mut warming = self.caches.warm(call).await.expect("works in tests");
        while warming.state == WarmingState::Running {
            tokio::time::sleep(Duration::from_millis(1)).await;
            warming = self.status(volume).warming.expect("it has begun");
        }
        warming.state
    }

    pub(crate) async fn read(
        &self,
        volume: VolumeId,
        file: u32,
        first: u64,
        count: u32,
    ) -> Result<Bytes> {
        self.read_until(volume, file, first, count, Deadline::after_ms(60_000))
            .await
    }

    pub(crate) async fn read_until(
        &self,
        volume: VolumeId,
        file: u32,
        first: u64,
        count: u32,
        deadline: Deadline,
    ) -> Result<Bytes> {
        let blocks = (file, first, count);
        self.read_blocks(FetchScope::AnyNode, volume, blocks, deadline)
            .await
    }

    /// As another server would ask.
    pub(crate) async fn read_as(
        &self,
        scope: FetchScope,
        volume: VolumeId,
        file: u32,
        first: u64,
        count: u32,
    ) -> Result<Bytes> {
        let (blocks, deadline) = ((file, first, count), Deadline::after_ms(60_000));
        self.read_blocks(scope, volume, blocks, deadline).await
    }

    async fn read_blocks(
        &self,
        scope: FetchScope,
        volume: VolumeId,
        (file, first, count): (u32, u64, u32),
        deadline: Deadline,
    ) -> Result<Bytes> {
        let page = self
            .caches
            .read_manifest(ReadManifest {
                volume,
                first: FileIndex(0),
            })
            .await?;
        let call = ReadBlocks {
            range: BlockRange {
                cache: CacheRef::Volume(volume),
                manifest: page.manifest,
                file: FileIndex(file),
                first: BlockIndex(first),
                count,
            },
            scope,
            priority: FetchPriority::Urgent,
            must_verify: false,
        };
        Ok(self.caches.read_blocks(call, deadline).await?.1)
    }
}

/// Everything.
pub(crate) struct CacheCluster {
    pub(crate) network: MemoryNetwork,
    pub(crate) home: Arc<MemoryHome>,
    pub(crate) nodes: Vec<CacheNode>,
    /// A node that the catalog names no more is believed in for so long; not at all, so that tests
    /// need not wait.
    pub(crate) ttl_ms: u64,
    directory: tempfile::TempDir,
}

impl CacheCluster {
    pub(crate) fn new(nodes: u64) -> Self {
        let network = MemoryNetwork::new();
        let home = Arc::new(MemoryHome::default());
        network.listen(HOME, home.clone());
        let directory = tempfile::tempdir().expect("works in tests");
        let mut world = Self {
            network,
            home,
            nodes: Vec::new(),
            ttl_ms: 0,
            directory,
        };
        for number in 1..=nodes {
            world.start(number);
        }
        world.announce_nodes();
        world
    }

    /// Starts a node, with what an earlier life left in its directory.
    pub(crate) fn start(&mut self, number: u64) {
        let address = format!("node:{number}");
        let directory = self.directory.path().join(number.to_string());
        let pool = Pool::new(self.network.dialer(&address));
        let counters = Counters::default();
        let server = ServerId(number * 1_000_003);
        let caches = Caches::open(
            directory.clone(),
            HomeClients::home_servers_only(pool),
            Token::none(),
            (server, address.clone()),
            counters.clone(),
        )
        .expect("works in tests");
        let lies = Arc::new(AtomicU64::new(0));
        let service = NodeService {
            caches: caches.clone(),
            false_replies: lies.clone(),
        };
        self.network.listen(&address, Arc::new(service));
        // As a node that starts asks the catalog; the others hear of it later.
        caches.set_peers(self.adverts());
        self.nodes.push(CacheNode {
            server,
            address,
            directory,
            caches,
            counters,
            false_replies: lies,
        });
    }

    /// Kills a node: it no longer answers and nobody remembers its process.
    pub(crate) fn kill(&mut self, index: usize) -> CacheNode {
        let node = self.nodes.remove(index);
        self.network.kill(&node.address);
        node
    }

    /// Tells all nodes of all nodes, as the catalog does every second.
    pub(crate) fn announce_nodes(&self) {
        for node in &self.nodes {
            node.caches.set_peers(self.adverts());
        }
    }

    fn adverts(&self) -> Vec<Advert> {
        let advert = |node| Advert {
            ttl_ms: self.ttl_ms,
            ..advert(node)
        };
        self.nodes.iter().map(advert).collect()
    }

    /// Makes the same cache volume on all nodes.
    pub(crate) async fn create(&self, spec: &VolumeSpec) {
        for node in &self.nodes {
            let deadline = Deadline::after_ms(30_000);
            node.caches
                .create(spec, Token::none(), deadline)
                .await
                .expect("works in tests");
        }
    }

    pub(crate) fn home_bytes(&self) -> u64 {
        self.home.read_bytes.load(Ordering::Relaxed)
    }

    /// Where the nodes keep their directories, by number.
    pub(crate) fn root(&self) -> &std::path::Path {
        self.directory.path()
    }

    /// Waits until the first node has so many blocks on disk.
    pub(crate) async fn wait_for_blocks(&self, volume: VolumeId, blocks: u64) {
        let node = &self.nodes[0];
        for _ in 0..10_000 {
            tokio::time::sleep(Duration::from_millis(1)).await;
            if node
                .caches
                .usage(volume)
                .expect("used")
                .0
                .div_ceil(u64::from(BLOCK))
                == blocks
            {
                // What is charged may still be on its way to the disk.
                tokio::time::sleep(Duration::from_millis(20)).await;
                return;
            }
        }
        panic!(
            "{blocks} blocks are not kept: {:?}",
            node.caches.usage(volume)
        );
    }

    pub(crate) fn counter_sum(&self, counter: &str) -> u64 {
        self.nodes.iter().map(|node| node.counter(counter)).sum()
    }
}

fn advert(node: &CacheNode) -> Advert {
    Advert {
        id: node.server,
        kind: ServerKind::Node,
        name: node.address.clone(),
        address: node.address.clone(),
        group: "here".to_owned(),
        ttl_ms: 0,
        capacity_bytes: 1 << 30,
        capacity_files: 1 << 20,
        free_bytes: 1 << 30,
        free_files: 1 << 20,
        slots: 1,
        jobs: 0,
        caches: node.caches.adverts(),
        attributes: Attributes::default(),
        lifetime: Lifetime::default(),
    }
}

/// A cache of everything below `db`.
pub(crate) fn cache(number: u128, size_bytes: u64, replacement: ReplacementPolicy) -> VolumeSpec {
    VolumeSpec {
        id: VolumeId(number),
        name: "cache".to_owned(),
        owner: "test".to_owned(),
        kind: VolumeKind::Cache {
            source: VolumeSource::Home {
                address: HOME.to_owned(),
                path: "db".to_owned(),
                id: None,
            },
            cooperative: NAME.to_owned(),
            replacement,
            block_bytes: BLOCK,
        },
        size_bytes,
        size_files: 100_000,
        limit: LimitKind::Exact,
        lifetime_ms: 60_000,
    }
}
