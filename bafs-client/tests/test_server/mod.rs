//! A small server for tests: a directory as a tree and as a cache volume, with chosen faults.
//! Checks no tokens and keeps nothing.
#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "all of this is test, and each test program uses its own part"
)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bafs_client::tree::Server;
use bafs_proto::file_op::{Errno, FileOp};
use bafs_proto::hash::Digest;
use bafs_proto::ids::{Epoch, VolumeId};
use bafs_proto::limits::EARLY_HANDLES_MAX;
use bafs_proto::message::{
    BlockData, Done, FileResults, ManifestPage, PeerCheck, ReadBlocks, ReadManifest, Reply,
    Request, RunFileOps, SourceEntry, SourceIdentity, SourceKind, TreeSession,
};
use bafs_proto::net::memory::MemoryNetwork;
use bafs_proto::net::pool::Pool;
use bafs_proto::net::{BoxFuture, IncomingRequest, Service};
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode, Result};
use bafs_tree::Limit;
use bytes::Bytes;
use nix::libc;

pub(crate) const ADDRESS: &str = "server";
pub(crate) const BLOCK_BYTES: u32 = 16 << 10;
pub(crate) const VOLUME: VolumeId = VolumeId(1);

/// What the server does wrong from now on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// Does what is asked, but the answer is lost, so many times.
    LoseReplies(u32),
    /// Answers with this code.
    Refuse(ErrorCode),
    /// Does not answer.
    Silent,
    /// Answers what has no operations at once, and all else after so many milliseconds: what is
    /// before it is on the wire.
    DelayOperations(u64),
    /// Answers what has operations with this code after so many milliseconds.
    RefuseLate(ErrorCode, u64),
    /// Has no room for what is written.
    DiskFull,
    /// Has no descriptor but those that it keeps for opens by given numbers.
    OutOfDescriptors,
    /// Sends damaged blocks, so many times.
    DamageBlocks(u32),
    /// Starts again: before the next request runs, or after it ran and before it is answered.
    Restart {
        runs: bool,
    },
}

pub(crate) struct FakeServer {
    root: PathBuf,
    tree: Arc<bafs_tree::Tree>,
    sessions: Mutex<BTreeMap<u64, Arc<bafs_tree::Session>>>,
    answered_batches: Mutex<BTreeMap<(u64, u64), (FileResults, Bytes)>>,
    /// For each session the last batch in its agent's order that ran.
    last_batches: Mutex<BTreeMap<u64, u64>>,
    fault: Mutex<Fault>,
    epochs: AtomicU64,
    pub(crate) blocks_sent: AtomicU64,
    pub(crate) ops_run: AtomicU64,
    /// Calls that had operations.
    pub(crate) batches_run: AtomicU64,
    pub(crate) closed_sessions: AtomicU32,
    /// For how long the session that was closed last wanted its volume kept.
    pub(crate) requested_lifetime_ms: AtomicU64,
    pub(crate) lease_ms: AtomicU64,
    /// How many turns of other tasks a request and its answer may take, each; chosen by this seed.
    delays: Mutex<(u64, u64)>,
}

impl FakeServer {
    pub(crate) fn new(root: &Path) -> Arc<Self> {
        Self::with_limit(root, None)
    }

    pub(crate) fn with_limit(root: &Path, limit: Option<Limit>) -> Arc<Self> {
        Arc::new(Self {
            root: root.to_owned(),
            tree: bafs_tree::Tree::open(root, limit).unwrap(),
            sessions: Mutex::default(),
            answered_batches: Mutex::default(),
            last_batches: Mutex::default(),
            fault: Mutex::new(Fault::None),
            epochs: AtomicU64::new(0),
            blocks_sent: AtomicU64::new(0),
            ops_run: AtomicU64::new(0),
            batches_run: AtomicU64::new(0),
            closed_sessions: AtomicU32::new(0),
            requested_lifetime_ms: AtomicU64::new(0),
            lease_ms: AtomicU64::new(600_000),
            delays: Mutex::new((0, 0)),
        })
    }

    pub(crate) fn set_fault(&self, fault: Fault) {
        *self.fault.lock().unwrap() = fault;
    }

    /// From now on requests and answers take their time, at most so many turns of other tasks.
    pub(crate) fn set_delays(&self, turns_max: u64, seed: u64) {
        *self.delays.lock().unwrap() = (turns_max, seed);
    }

    async fn delay(&self) {
        let turns = {
            let (turns_max, seed) = &mut *self.delays.lock().unwrap();
            *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (*seed >> 33) % (*turns_max + 1)
        };
        for _ in 0..turns {
            tokio::task::yield_now().await;
        }
    }

    /// A way to call this server over memory.
    pub(crate) fn server(self: &Arc<Self>, op_deadline_ms: u64) -> Server {
        let network = MemoryNetwork::new();
        network.listen(ADDRESS, self.clone());
        Server {
            pool: Pool::new(network.dialer("agent")),
            address: ADDRESS.to_owned(),
            token: Token::none(),
            op_deadline_ms,
        }
    }

    /// Forgets all sessions, as a new life does.
    pub(crate) fn restart(&self) {
        self.sessions.lock().unwrap().clear();
        self.answered_batches.lock().unwrap().clear();
    }

    fn fault(&self) -> Fault {
        let mut fault = self.fault.lock().unwrap();
        let now = *fault;
        *fault = match now {
            Fault::LoseReplies(0 | 1) | Fault::DamageBlocks(0 | 1) | Fault::Restart { .. } => {
                Fault::None
            }
            Fault::LoseReplies(left) => Fault::LoseReplies(left - 1),
            Fault::DamageBlocks(left) => Fault::DamageBlocks(left - 1),
            other => other,
        };
        now
    }

    fn read_manifest(&self, read: &ReadManifest) -> Reply {
        let entries = build_manifest(&self.root);
        let manifest = Digest::of(format!("{entries:?}").as_bytes());
        // Short pages, so that reading on is tested.
        let page: Vec<_> = entries
            .iter()
            .skip(read.first.0 as usize)
            .take(3)
            .cloned()
            .collect();
        let more = read.first.0 as usize + page.len() < entries.len();
        let page = ManifestPage {
            manifest,
            block_bytes: BLOCK_BYTES,
            peer_check: PeerCheck::Home,
            root: source_entry(&self.root, ""),
            entries: page,
            has_more: more,
        };
        Reply::ReadManifest(page)
    }

    fn answer(&self, request: Request, body: &Bytes, damage: bool) -> Result<(Reply, Bytes)> {
        match request {
            Request::OpenTree(open) => {
                let epoch = self.epochs.fetch_add(1, Ordering::Relaxed) + 1;
                let session = Arc::new(bafs_tree::Session::new(self.tree.clone(), open.writable));
                self.sessions.lock().unwrap().insert(epoch, session);
                let lease_ms = self.lease_ms.load(Ordering::Relaxed);
                Ok((
                    Reply::OpenTree(TreeSession {
                        epoch: Epoch(epoch),
                        lease_ms,
                        machine_incarnation: 1,
                        early_handles_max: EARLY_HANDLES_MAX,
                    }),
                    Bytes::new(),
                ))
            }
            Request::RunFileOps(run) => self.run_ops(run, body),
            Request::CloseTree(close) => {
                self.sessions.lock().unwrap().remove(&close.epoch.0);
                self.closed_sessions.fetch_add(1, Ordering::Relaxed);
                self.requested_lifetime_ms
                    .store(close.lifetime_ms_min, Ordering::Relaxed);
                Ok((Reply::CloseTree(Done), Bytes::new()))
            }
            Request::ReadManifest(read) => Ok((self.read_manifest(&read), Bytes::new())),
            Request::ReadBlocks(ReadBlocks { range: read, .. }) => {
                let entry = build_manifest(&self.root).swap_remove(read.file.0 as usize);
                let data = std::fs::read(self.root.join(entry.path)).unwrap();
                let chunks = data.chunks(BLOCK_BYTES as usize);
                let wanted: Vec<_> = chunks
                    .skip(read.first.0 as usize)
                    .take(read.count as usize)
                    .collect();
                self.blocks_sent
                    .fetch_add(wanted.len() as u64, Ordering::Relaxed);
                let digests = wanted.iter().map(|block| Digest::of(block)).collect();
                let mut body = wanted.concat();
                if damage {
                    body[0] ^= 1;
                }
                let others = Vec::new();
                Ok((
                    Reply::ReadBlocks(BlockData {
                        digests,
                        other_holders: others,
                        home_silence_ms: None,
                    }),
                    body.into(),
                ))
            }
            other => Err(Error::new(ErrorCode::Unsupported, other.name())),
        }
    }

    async fn wait_for_predecessor(&self, run: &RunFileOps) {
        let Some(after) = run.after_sequence else {
            return;
        };
        loop {
            let last = self.last_batches.lock().unwrap().get(&run.epoch.0).copied();
            let last = last.unwrap_or(0);
            let is_gone = !self.sessions.lock().unwrap().contains_key(&run.epoch.0);
            let has_run = is_sync(&run.ops) && last > after;
            if is_gone || has_run || last == after || last >= run.sequence {
                return;
            }
            tokio::task::yield_now().await;
        }
    }

    fn run_ops(&self, run: RunFileOps, body: &Bytes) -> Result<(Reply, Bytes)> {
        let key = (run.epoch.0, run.sequence);
        if let Some((results, data)) = self.answered_batches.lock().unwrap().get(&key) {
            return Ok((Reply::RunFileOps(results.clone()), data.clone()));
        }
        let session = self.sessions.lock().unwrap().get(&run.epoch.0).cloned();
        let session = session.ok_or_else(|| Error::new(ErrorCode::SessionUnknown, "who?"))?;
        let has_operations = u64::from(!run.ops.is_empty());
        self.batches_run
            .fetch_add(has_operations, Ordering::Relaxed);
        let mut data = Vec::new();
        let results = run
            .ops
            .iter()
            .enumerate()
            .map(|(at, op)| {
                self.ops_run.fetch_add(1, Ordering::Relaxed);
                let given = run
                    .assigned_numbers
                    .iter()
                    .find(|given| given.op_index as usize == at);
                match (*self.fault.lock().unwrap(), op) {
                    (Fault::DiskFull, FileOp::Write { .. }) => return Err(Errno(libc::ENOSPC)),
                    (Fault::OutOfDescriptors, FileOp::Open { .. }) if given.is_none() => {
                        return Err(Errno(libc::ENFILE));
                    }
                    _ => {}
                }
                let numbers = given.map_or((None, None), |given| (given.ino, given.handle));
                session.run_numbered((run.caller, op, body), numbers, &mut data)
            })
            .collect();
        let answer = (FileResults { results }, Bytes::from(data));
        self.answered_batches
            .lock()
            .unwrap()
            .insert(key, answer.clone());
        if run.after_sequence.is_some() && !is_sync(&run.ops) {
            self.last_batches
                .lock()
                .unwrap()
                .insert(run.epoch.0, run.sequence);
        }
        Ok((Reply::RunFileOps(answer.0), answer.1))
    }
}

impl Service for FakeServer {
    fn serve(
        self: Arc<Self>,
        incoming: IncomingRequest,
    ) -> BoxFuture<'static, Result<(Reply, Bytes)>> {
        Box::pin(async move {
            self.delay().await;
            let fault = self.fault();
            match fault {
                Fault::Refuse(code) => return Err(Error::new(code, "as the test wants it")),
                Fault::Silent => tokio::time::sleep(Duration::from_secs(600)).await,
                Fault::DelayOperations(ms) if has_operations(&incoming.request) => {
                    tokio::time::sleep(Duration::from_millis(ms)).await;
                }
                Fault::RefuseLate(code, ms) if has_operations(&incoming.request) => {
                    tokio::time::sleep(Duration::from_millis(ms)).await;
                    return Err(Error::new(code, "as the test wants it"));
                }
                _ => {}
            }
            if fault == (Fault::Restart { runs: false }) {
                self.restart();
            }
            if let Request::RunFileOps(run) = &incoming.request {
                self.wait_for_predecessor(run).await;
            }
            let damage = matches!(fault, Fault::DamageBlocks(_));
            let answer = self.answer(incoming.request, &incoming.body, damage);
            if fault == (Fault::Restart { runs: true }) {
                self.restart();
                return Err(Error::new(ErrorCode::Unreachable, "the server died"));
            }
            if let Fault::LoseReplies(_) = fault {
                return Err(Error::new(ErrorCode::Unreachable, "the reply got lost"));
            }
            self.delay().await;
            answer
        })
    }
}

/// Whether a batch waits for the chain and is no part of it.
fn is_sync(ops: &[FileOp]) -> bool {
    ops.iter().all(|op| matches!(op, FileOp::Fsync { .. }))
}

fn has_operations(request: &Request) -> bool {
    matches!(request, Request::RunFileOps(run) if !run.ops.is_empty())
}

fn source_entry(at: &Path, name: &str) -> SourceEntry {
    use std::os::unix::ffi::OsStringExt;
    use std::os::unix::fs::MetadataExt;
    let metadata = std::fs::symlink_metadata(at).unwrap();
    let kind = if metadata.is_dir() {
        SourceKind::Directory
    } else if metadata.is_symlink() {
        let target = std::fs::read_link(at).unwrap();
        SourceKind::Symlink(target.into_os_string().into_vec())
    } else {
        SourceKind::File
    };
    SourceEntry {
        path: name.to_owned(),
        kind,
        identity: SourceIdentity {
            size: metadata.len(),
            mtime_ns: metadata.mtime() * 1_000_000_000 + metadata.mtime_nsec(),
            ctime_ns: 0,
        },
        mode: metadata.mode() & 0o777,
    }
}

fn build_manifest(root: &Path) -> Vec<SourceEntry> {
    fn walk(root: &Path, at: &Path, entries: &mut Vec<SourceEntry>) {
        let mut names: Vec<_> = std::fs::read_dir(at)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        names.sort();
        for path in names {
            let name = path.strip_prefix(root).unwrap().to_str().unwrap();
            let entry = source_entry(&path, name);
            let is_directory = entry.kind == SourceKind::Directory;
            entries.push(entry);
            if is_directory {
                walk(root, &path, entries);
            }
        }
    }
    let mut entries = Vec::new();
    walk(root, root, &mut entries);
    entries
}
