//! Nodes with real stores and a small home within one process, for the tests of volumes.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use bafs_proto::attributes::Attributes;
use bafs_proto::hash::Digest;
use bafs_proto::identity::Authority;
use bafs_proto::ids::{ExtractionId, VolumeId};
use bafs_proto::message::{
    Call, CreateVolume, PutFile, PutProgress, PutReceipt, PutResults, ReadCounters, Reply, Request,
    Role, SourceData, SourceEntry, SourceIdentity, SourceKind, SourcePage,
};
use bafs_proto::net::memory::MemoryNetwork;
use bafs_proto::net::pool::Pool;
use bafs_proto::net::{BoxFuture, IncomingRequest, Service};
use bafs_proto::path::join;
use bafs_proto::source_warning::SourceWarnings;
use bafs_proto::time::{Deadline, Time};
use bafs_proto::token::{Resource, Right, Token};
use bafs_proto::volume::{LimitKind, VolumeKind, VolumeSource, VolumeSpec, VolumeStatus};
use bafs_proto::{Error, ErrorCode, Result};
use bafs_server::home_clients::HomeSettings;
use bafs_server::node::{Node, NodeConfig};
use bytes::Bytes;

pub(crate) const ALL: [Right; 3] = [Right::Read, Right::Write, Right::Manage];
pub(crate) const HOME: &str = "home:1";
/// Address of the first node.
pub(crate) const A: &str = "a:1";
pub(crate) const FOREVER: Time = Time(u64::MAX >> 1);

/// Where a node keeps the files of a volume.
pub(crate) fn tree(store: &Path, id: u128) -> PathBuf {
    let volume = VolumeId(id).to_string();
    store.join("volumes").join(volume).join("tree")
}

/// The volume of the first node as a source.
pub(crate) fn from_volume(id: u128) -> Option<VolumeSource> {
    Some(VolumeSource::Volume {
        address: A.to_owned(),
        volume: VolumeId(id),
    })
}

/// A cluster with one authority.
pub(crate) struct NodeCluster {
    pub(crate) network: MemoryNetwork,
    pub(crate) authority: Authority,
    pub(crate) token: Token,
    pub(crate) pool: Pool,
}

impl NodeCluster {
    pub(crate) fn new() -> Self {
        let authority = Authority::generate().expect("authority");
        let token = authority
            .signer()
            .grant(&[Resource::Cluster], &ALL, FOREVER)
            .expect("token");
        let network = MemoryNetwork::new();
        let pool = Pool::new(network.dialer("test"));
        Self {
            network,
            authority,
            token,
            pool,
        }
    }

    pub(crate) fn config(&self, store: &Path) -> NodeConfig {
        NodeConfig {
            listen: "127.0.0.1:0".to_owned(),
            identity: self
                .authority
                .issue(Role::Server, self.token.clone())
                .expect("identity"),
            store: store.to_owned(),
            capacity_bytes: 64 << 20,
            capacity_files: 1_000,
            catalog: None,
            group: "g".to_owned(),
            name: "n".to_owned(),
            slots: 1,
            agent_program: "/bin/false".into(),
            agent_identity: "/nowhere".into(),
            agent_memory_bytes: None,
            temporary_bytes: None,
            shared_memory_bytes: None,
            trusts_peers: false,
            homes: HomeSettings::default(),
            attributes: Attributes::default(),
            lifetime: None,
            grace: std::time::Duration::from_secs(25),
            catalog_timeout: None,
        }
    }

    /// A node on the store, listening at `address`. A node of an earlier life may need a moment to
    /// let go of the store.
    pub(crate) async fn node(&self, address: &str, config: NodeConfig) -> Arc<Node> {
        for _ in 0..200 {
            let pool = Pool::new(self.network.dialer(address));
            match Node::open(config.clone(), address.to_owned(), pool).await {
                Ok(node) => {
                    self.network.listen(address, node.clone());
                    return node;
                }
                Err(_) => tokio::time::sleep(std::time::Duration::from_millis(20)).await,
            }
        }
        panic!("the store stays locked");
    }

    pub(crate) async fn call<C: Call>(&self, address: &str, call: C) -> Result<C::Reply> {
        self.call_for(address, call, 20_000).await
    }

    pub(crate) async fn call_for<C: Call>(
        &self,
        address: &str,
        call: C,
        ms: u64,
    ) -> Result<C::Reply> {
        self.pool
            .call(address, &self.token, call, Deadline::after_ms(ms))
            .await
    }

    pub(crate) async fn counter(&self, address: &str, name: &str) -> u64 {
        let counters = self.call(address, ReadCounters).await.expect("counters");
        counters.values.get(name).copied().unwrap_or(0)
    }

    pub(crate) async fn create(&self, address: &str, spec: VolumeSpec) -> Result<VolumeStatus> {
        self.call(
            address,
            CreateVolume {
                server: None,
                spec,
                base: None,
                source_token: self.token.clone(),
            },
        )
        .await
    }
}

pub(crate) fn spec(id: u128, fill: Option<VolumeSource>) -> VolumeSpec {
    VolumeSpec {
        id: VolumeId(id),
        name: format!("v{id}"),
        owner: "me".to_owned(),
        kind: VolumeKind::Scratch { fill },
        size_bytes: 8 << 20,
        size_files: 100,
        limit: LimitKind::Exact,
        lifetime_ms: 3_600_000,
    }
}

pub(crate) fn from_home(path: &str) -> Option<VolumeSource> {
    Some(VolumeSource::Home {
        address: HOME.to_owned(),
        path: path.to_owned(),
        id: None,
    })
}

pub(crate) fn random_bytes(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed | 1;
    let next = |_| {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 56) as u8
    };
    (0..length).map(next).collect()
}

/// An upload at the small home.
#[derive(Default)]
pub(crate) struct HomeUploadState {
    path: String,
    received: Vec<u8>,
    receipt: Option<PutReceipt>,
}

/// Kind, content and permission bits of an entry of the small home.
type HomeEntry = (SourceKind, Vec<u8>, u32);

/// A home in memory, with faults to order.
#[derive(Default)]
pub(crate) struct FaultyHome {
    pub(crate) entries: Mutex<BTreeMap<String, HomeEntry>>,
    puts: Mutex<BTreeMap<ExtractionId, HomeUploadState>>,
    pub(crate) files: Mutex<BTreeMap<String, Vec<u8>>>,
    /// So many replies to reads carry damaged bytes.
    pub(crate) damaged_replies: AtomicU32,
    /// So many uploaded pieces arrive, but their replies are lost.
    pub(crate) lost_replies: AtomicU32,
    /// So many uploads cannot begin, as their directory is gone.
    pub(crate) misplaced_uploads: AtomicU32,
    pub(crate) reads: AtomicU32,
    pub(crate) chunks: AtomicU32,
    pub(crate) commits: AtomicU32,
    pub(crate) begins: AtomicU32,
    chunks_in_flight: AtomicU32,
    /// Most uploaded pieces that were here at once.
    chunks_in_flight_max: AtomicU32,
    /// No piece is answered before so many have been here at once.
    pub(crate) chunks_awaited: AtomicU32,
    /// Reads wait so long, in milliseconds.
    pub(crate) delay_ms: AtomicU32,
}

const MTIME_NS: i64 = 1_234_567_890_123_456_789;

impl FaultyHome {
    pub(crate) fn file(&self, path: &str, content: &[u8], mode: u32) {
        let entry = (SourceKind::File, content.to_vec(), mode);
        self.entries
            .lock()
            .expect("lock")
            .insert(path.to_owned(), entry);
    }

    pub(crate) fn add(&self, path: &str, kind: SourceKind) {
        self.entries
            .lock()
            .expect("lock")
            .insert(path.to_owned(), (kind, Vec::new(), 0o750));
    }

    fn list(&self, path: &str, after: Option<&str>) -> Result<SourcePage> {
        let entries = self.entries.lock().expect("lock");
        let entry = |(at, (kind, content, mode)): (&String, &HomeEntry)| {
            let below = if at == path {
                Some("")
            } else {
                at.strip_prefix(&format!("{path}/"))
            };
            let identity = SourceIdentity {
                size: content.len() as u64,
                mtime_ns: MTIME_NS,
                ctime_ns: 0,
            };
            let (kind, mode) = (kind.clone(), *mode);
            below.map(|below| SourceEntry {
                path: below.to_owned(),
                kind,
                identity,
                mode,
            })
        };
        let mut found: Vec<_> = entries.iter().filter_map(entry).collect();
        if found.is_empty() {
            return Err(Error::new(ErrorCode::NotFound, format!("no '{path}'")));
        }
        let key = |path: &str| path.split('/').map(str::to_owned).collect::<Vec<_>>();
        found.sort_by_key(|entry| {
            if entry.path.is_empty() {
                vec![]
            } else {
                key(&entry.path)
            }
        });
        if let Some(after) = after {
            let at = found
                .iter()
                .position(|entry| entry.path == after)
                .expect("after");
            found.drain(..=at);
        }
        let more = found.len() > 3;
        found.truncate(3);
        Ok(SourcePage {
            entries: found,
            warnings: SourceWarnings::default(),
            has_more: more,
        })
    }

    #[expect(
        clippy::too_many_lines,
        reason = "one arm for each call of a small home"
    )]
    fn answer(&self, request: Request, body: &Bytes) -> Result<(Reply, Bytes)> {
        let none = Bytes::new();
        match request {
            Request::ListSource(call) => {
                let page = self.list(&call.path, call.after.as_deref())?;
                Ok((Reply::ListSource(page), none))
            }
            Request::ReadSource(call) => {
                self.reads.fetch_add(1, Ordering::Relaxed);
                let entries = self.entries.lock().expect("lock");
                let content = &entries.get(&call.path).expect("file").1;
                let start = call.offset as usize;
                let end = (start + call.length as usize).min(content.len());
                let mut data = content[start..end].to_vec();
                let digests = data
                    .chunks(call.block_bytes as usize)
                    .map(Digest::of)
                    .collect();
                if take_fault(&self.damaged_replies) {
                    data[0] ^= 1;
                }
                Ok((Reply::ReadSource(SourceData { digests }), data.into()))
            }
            Request::ReadSources(call) => {
                self.reads.fetch_add(1, Ordering::Relaxed);
                let entries = self.entries.lock().expect("lock");
                let (mut digests, mut data) = (Vec::new(), Vec::new());
                for file in &call.files {
                    let content = &entries.get(&join(&call.path, &file.path)).expect("file").1;
                    digests.extend(content.chunks(call.block_bytes as usize).map(Digest::of));
                    data.extend_from_slice(content);
                }
                if take_fault(&self.damaged_replies) {
                    data[0] ^= 1;
                }
                Ok((Reply::ReadSources(SourceData { digests }), data.into()))
            }
            Request::BeginPut(_) if take_fault(&self.misplaced_uploads) => Err(misplaced_error()),
            Request::BeginPut(call) => {
                self.begins.fetch_add(1, Ordering::Relaxed);
                let mut puts = self.puts.lock().expect("lock");
                let put = puts.entry(call.extraction).or_default();
                put.path = call.path;
                let received_bytes = put.received.len() as u64;
                let receipt = put.receipt.clone();
                Ok((
                    Reply::BeginPut(PutProgress {
                        received_bytes,
                        receipt,
                    }),
                    none,
                ))
            }
            Request::PutRange(call) => {
                let mut puts = self.puts.lock().expect("lock");
                let put = puts.get_mut(&call.extraction).expect("begun");
                if call.offset != put.received.len() as u64 {
                    return Err(Error::new(ErrorCode::Conflict, "wrong offset"));
                }
                put.received.extend_from_slice(body);
                self.chunks.fetch_add(1, Ordering::Relaxed);
                if take_fault(&self.lost_replies) {
                    return Err(Error::new(ErrorCode::Unreachable, "reply lost"));
                }
                let received_bytes = put.received.len() as u64;
                Ok((
                    Reply::PutRange(PutProgress {
                        received_bytes,
                        receipt: None,
                    }),
                    none,
                ))
            }
            Request::CommitPut(call) => {
                let mut puts = self.puts.lock().expect("lock");
                let put = puts.get_mut(&call.extraction).expect("begun");
                let digest = Digest::of(&put.received);
                assert_eq!(
                    (digest, put.received.len() as u64),
                    (call.digest, call.size)
                );
                let (extract, path, size) = (call.extraction, put.path.clone(), call.size);
                let receipt = PutReceipt {
                    extraction: extract,
                    path,
                    size,
                    digest,
                };
                put.receipt = Some(receipt.clone());
                self.commits.fetch_add(1, Ordering::Relaxed);
                let content = put.received.clone();
                self.files
                    .lock()
                    .expect("lock")
                    .insert(put.path.clone(), content);
                if take_fault(&self.lost_replies) {
                    return Err(Error::new(ErrorCode::Unreachable, "reply lost"));
                }
                Ok((Reply::CommitPut(receipt), none))
            }
            Request::PutFiles(call) => {
                let (mut results, mut at) = (Vec::new(), 0);
                for file in call.files {
                    let end = at + file.size as usize;
                    let result = self.put_file(file, &body[at..end]);
                    if result.as_ref().is_err_and(Error::is_transient) {
                        return Err(result.expect_err("the reply of all is lost"));
                    }
                    results.push(result);
                    at = end;
                }
                Ok((Reply::PutFiles(PutResults { results }), none))
            }
            other => Err(Error::new(ErrorCode::Unsupported, other.name())),
        }
    }

    fn put_file(&self, call: PutFile, data: &[u8]) -> Result<PutReceipt> {
        if take_fault(&self.misplaced_uploads) {
            return Err(misplaced_error());
        }
        let mut puts = self.puts.lock().expect("lock");
        let put = puts.entry(call.extraction).or_default();
        let digest = Digest::of(data);
        assert_eq!(digest, call.digest);
        let receipt = put.receipt.get_or_insert_with(|| {
            self.commits.fetch_add(1, Ordering::Relaxed);
            PutReceipt {
                extraction: call.extraction,
                path: call.path.clone(),
                size: data.len() as u64,
                digest,
            }
        });
        let mut files = self.files.lock().expect("lock");
        files.insert(call.path, data.to_vec());
        if take_fault(&self.lost_replies) {
            return Err(Error::new(ErrorCode::Unreachable, "reply lost"));
        }
        Ok(receipt.clone())
    }

    /// Waits until it is the turn of a piece, and notes how many are here at once.
    async fn wait_for_chunks(&self, request: &Request) {
        let Request::PutRange(call) = request else {
            return;
        };
        let received = || {
            let puts = self.puts.lock().expect("lock");
            puts.get(&call.extraction).expect("begun").received.len() as u64
        };
        let here = self.chunks_in_flight.fetch_add(1, Ordering::Relaxed) + 1;
        self.chunks_in_flight_max.fetch_max(here, Ordering::Relaxed);
        let together = self.chunks_awaited.load(Ordering::Relaxed);
        while received() < call.offset
            || self.chunks_in_flight_max.load(Ordering::Relaxed) < together
        {
            tokio::task::yield_now().await;
        }
        self.chunks_in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Service for FaultyHome {
    fn serve(
        self: Arc<Self>,
        incoming: IncomingRequest,
    ) -> BoxFuture<'static, Result<(Reply, Bytes)>> {
        Box::pin(async move {
            let delay_ms = self.delay_ms.load(Ordering::Relaxed);
            if delay_ms > 0 {
                tokio::time::sleep(std::time::Duration::from_millis(delay_ms.into())).await;
            }
            self.wait_for_chunks(&incoming.request).await;
            self.answer(incoming.request, &incoming.body)
        })
    }
}

fn misplaced_error() -> Error {
    Error::new(ErrorCode::NotFound, "home has no such directory")
}

fn take_fault(faults: &AtomicU32) -> bool {
    faults
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| {
            left.checked_sub(1)
        })
        .is_ok()
}

pub(crate) fn populated_home(world: &NodeCluster) -> Arc<FaultyHome> {
    let home = Arc::new(FaultyHome::default());
    home.add("in", SourceKind::Directory);
    home.add("in/sub", SourceKind::Directory);
    home.add("in/link", SourceKind::Symlink(b"sub/small".to_vec()));
    home.add("in/out", SourceKind::Symlink(b"/etc/passwd".to_vec()));
    home.file("in/sub/small", b"hello", 0o640);
    home.file("in/big", &random_bytes(3_500_000, 7), 0o755);
    home.file("in/empty", b"", 0o600);
    let mut sparse = vec![0; 2 << 20];
    sparse[1_500_000] = 1;
    home.file("in/sparse", &sparse, 0o444);
    world.network.listen(HOME, home.clone());
    home
}
