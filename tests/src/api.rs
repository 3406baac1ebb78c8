//! The volume API spoken directly, for tests and benchmarks: cache volumes on chosen nodes, blocks,
//! jobs, counters. Shows no files and starts no process itself.

use std::collections::BTreeMap;
use std::future::Future;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, ensure};
use bafs_proto::hash::Digest;
use bafs_proto::identity::Identity;
use bafs_proto::ids::{BlockIndex, ExecutionId, FileIndex, VolumeId};
use bafs_proto::limits::{BLOCK_BYTES_DEFAULT, OP_DEADLINE_MS_DEFAULT};
use bafs_proto::message::{
    BlockRange, CacheRef, Call, CreateVolume, DeleteVolume, FetchPriority, FetchScope, GetVolume,
    InvalidateVolume, JobCommand, JobLimits, JobReport, JobSpec, JobState, MountSpec, MountTarget,
    ReadBlocks, ReadCounters, ReadManifest, Role, SourceEntry, SourceKind, StartJob, WatchJobs,
};
use bafs_proto::net::channel::Dialer;
use bafs_proto::net::pool::Pool;
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::volume::{
    LimitKind, ReplacementPolicy, VolumeKind, VolumeSource, VolumeSpec, VolumeStatus,
};
use bytes::Bytes;
use tokio::runtime::Runtime;

/// One call may take so long, in milliseconds.
const CALL_TIMEOUT_MS: u64 = 120_000;

/// Bytes that a reader asks for at once, as the kernel does at most.
pub const READ_BYTES_MAX: u32 = 1 << 20;

/// Day and night: no volume of a test expires by itself.
const VOLUME_LIFETIME_MS: u64 = 24 * 3600 * 1000;

/// The description of a cache volume.
#[derive(Debug, Clone)]
pub struct CacheSpec {
    /// Path below the home's export.
    pub path: String,
    /// Cooperative cache; empty for an independent one.
    pub cooperative: String,
    /// Most bytes it keeps.
    pub size_bytes: u64,
    /// Which block goes first.
    pub replacement: ReplacementPolicy,
    /// Size of its blocks in bytes.
    pub block_bytes: u32,
}

impl CacheSpec {
    /// A cooperative cache of usual blocks, named after its path.
    pub fn new(path: &str, size_bytes: u64) -> Self {
        Self {
            path: path.to_owned(),
            cooperative: path.to_owned(),
            size_bytes,
            replacement: ReplacementPolicy::Lru,
            block_bytes: BLOCK_BYTES_DEFAULT,
        }
    }
}

/// A cache volume on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheVolume {
    /// Where its node listens.
    pub node: String,
    /// The volume.
    pub id: VolumeId,
}

impl CacheVolume {
    /// It, as a job mounts it.
    pub fn mount_target(&self) -> MountTarget {
        MountTarget::Cache {
            server: self.node.clone(),
            volume: self.id,
        }
    }
}

/// A cache volume's list of files, as a reader knows it.
#[derive(Debug, Clone)]
pub struct CacheListing {
    /// State of the source.
    pub manifest: Digest,
    /// Size of a block in bytes.
    pub block_bytes: u32,
    /// Everything in it; the place is the file's index.
    pub entries: Vec<SourceEntry>,
}

impl CacheListing {
    /// Regular files with their places.
    pub fn regular_files(&self) -> impl Iterator<Item = (FileIndex, &SourceEntry)> {
        let numbered = (0..).map(FileIndex).zip(&self.entries);
        numbered.filter(|(_, entry)| entry.kind == SourceKind::File)
    }
}

/// The client: its own connections, and a user's rights. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ApiClient {
    pool: Pool,
    token: Token,
}

impl ApiClient {
    /// Connections of its own, with the identities in a cluster's directory. Must be called within
    /// a runtime.
    ///
    /// # Errors
    /// No identity, no socket.
    pub fn new(identity: &Path) -> Result<Self> {
        let identity = Identity::load(&identity.join("scheduler"), Role::Scheduler)?;
        let token = identity.token.clone();
        let pool = Pool::new(Arc::new(Dialer::new(&identity)?));
        Ok(Self { pool, token })
    }

    /// The client's rights.
    pub fn token(&self) -> Token {
        self.token.clone()
    }

    /// Makes a call, again while it fails for a moment, as on a machine that is out of breath.
    ///
    /// # Errors
    /// The server's error.
    pub async fn call<C: Call + Clone>(
        &self,
        address: &str,
        call: C,
    ) -> bafs_proto::Result<C::Reply> {
        let deadline = Deadline::after_ms(CALL_TIMEOUT_MS);
        let token = &self.token;
        let asked = self
            .pool
            .call_with_retries(address, token, call, Bytes::new(), deadline);
        Ok(asked.await?.0)
    }

    /// Makes a cache volume.
    ///
    /// # Errors
    /// The node's error, also as the volume's fault.
    pub async fn create_cache(
        &self,
        node: &str,
        home: &str,
        stop_request: &CacheSpec,
    ) -> Result<CacheVolume> {
        let id = VolumeId::random();
        let known = self
            .pool
            .connection(home, Deadline::after_ms(CALL_TIMEOUT_MS));
        let source = VolumeSource::Home {
            address: home.to_owned(),
            path: stop_request.path.clone(),
            id: known.await?.server(),
        };
        let spec = VolumeSpec {
            id,
            name: stop_request.path.clone(),
            owner: "test".to_owned(),
            kind: VolumeKind::Cache {
                source,
                cooperative: stop_request.cooperative.clone(),
                replacement: stop_request.replacement,
                block_bytes: stop_request.block_bytes,
            },
            size_bytes: stop_request.size_bytes,
            size_files: 1_000,
            limit: LimitKind::Exact,
            lifetime_ms: VOLUME_LIFETIME_MS,
        };
        let source_token = self.token.clone();
        let status = self
            .call(
                node,
                CreateVolume {
                    spec,
                    server: None,
                    base: None,
                    source_token,
                },
            )
            .await?;
        ensure!(status.error.is_none(), "{:?}", status.error);
        let node = node.to_owned();
        Ok(CacheVolume { node, id })
    }

    /// Lists the source again.
    ///
    /// # Errors
    /// The node's error.
    pub async fn invalidate_cache(&self, volume: &CacheVolume) -> Result<VolumeStatus> {
        let call = InvalidateVolume {
            volume: volume.id,
            source_token: self.token.clone(),
        };
        Ok(self.call(&volume.node, call).await?)
    }

    /// Deletes a volume.
    ///
    /// # Errors
    /// The node's error.
    pub async fn delete_volume(&self, volume: &CacheVolume) -> Result<()> {
        let id = volume.id;
        self.call(&volume.node, DeleteVolume { volume: id }).await?;
        Ok(())
    }

    /// The node's status of a volume.
    ///
    /// # Errors
    /// The node's error.
    pub async fn read_status(&self, volume: &CacheVolume) -> Result<VolumeStatus> {
        let id = volume.id;
        Ok(self.call(&volume.node, GetVolume { volume: id }).await?)
    }

    /// Counters of a server.
    ///
    /// # Errors
    /// The server's error.
    pub async fn read_counters(&self, address: &str) -> Result<BTreeMap<String, u64>> {
        Ok(self.call(address, ReadCounters).await?.values)
    }

    /// The list of files of a cache volume.
    ///
    /// # Errors
    /// The node's error.
    pub async fn list_files(&self, volume: &CacheVolume) -> Result<CacheListing> {
        let mut entries: Vec<SourceEntry> = Vec::new();
        loop {
            let first = FileIndex(u32::try_from(entries.len())?);
            let call = ReadManifest {
                volume: volume.id,
                first,
            };
            let page = self.call(&volume.node, call).await?;
            entries.extend(page.entries);
            if !page.has_more {
                return Ok(CacheListing {
                    manifest: page.manifest,
                    block_bytes: page.block_bytes,
                    entries,
                });
            }
        }
    }

    /// Reads `count` blocks as an agent does: repeats transient failures. The digests are compared
    /// with the bytes.
    ///
    /// # Errors
    /// The node's error, or bytes that do not match.
    pub async fn read_blocks(
        &self,
        volume: &CacheVolume,
        listing: &CacheListing,
        file: FileIndex,
        first: u64,
        count: u32,
    ) -> Result<Bytes> {
        let call = ReadBlocks {
            range: BlockRange {
                cache: CacheRef::Volume(volume.id),
                manifest: listing.manifest,
                file,
                first: BlockIndex(first),
                count,
            },
            scope: FetchScope::AnyNode,
            priority: FetchPriority::Urgent,
            must_verify: false,
        };
        let deadline = Deadline::after_ms(CALL_TIMEOUT_MS);
        let asked =
            self.pool
                .call_with_retries(&volume.node, &self.token, call, Bytes::new(), deadline);
        let (blocks, body) = asked.await?;
        let cut = body.chunks(listing.block_bytes as usize);
        ensure!(
            cut.map(Digest::of).eq(blocks.digests),
            "blocks from {first} on do not match their digests"
        );
        Ok(body)
    }

    /// Reads every file of a volume from beginning to end, and shows each piece with the file's
    /// path and its offset.
    ///
    /// # Errors
    /// As [`ApiClient::read_blocks`].
    pub async fn scan_files(
        &self,
        volume: &CacheVolume,
        mut show: impl FnMut(&str, u64, &[u8]),
    ) -> Result<u64> {
        let listing = self.list_files(volume).await?;
        let step = READ_BYTES_MAX / listing.block_bytes;
        let mut total = 0;
        for (file, entry) in listing.regular_files() {
            let mut offset = 0;
            while offset < entry.identity.size {
                let first = offset / u64::from(listing.block_bytes);
                let bytes = self
                    .read_blocks(volume, &listing, file, first, step)
                    .await?;
                ensure!(!bytes.is_empty(), "{} ends at {offset}", entry.path);
                show(&entry.path, offset, &bytes);
                offset += bytes.len() as u64;
            }
            total += offset;
        }
        Ok(total)
    }

    /// Starts `sh -c script` on a node, with a cache volume or a home directory at `/data`.
    ///
    /// # Errors
    /// The node's error.
    pub async fn start_job(
        &self,
        node: &str,
        target: MountTarget,
        script: &str,
    ) -> Result<ExecutionId> {
        self.start_job_with(node, target, script, |_| ()).await
    }

    /// The same, after `change` has changed the job's description.
    ///
    /// # Errors
    /// The node's error.
    pub async fn start_job_with(
        &self,
        node: &str,
        target: MountTarget,
        script: &str,
        change: impl FnOnce(&mut JobSpec),
    ) -> Result<ExecutionId> {
        let execution = ExecutionId::random();
        let command = JobCommand {
            executable: "/bin/sh".to_owned(),
            arguments: vec!["-c".to_owned(), script.to_owned()],
            environment: std::env::vars()
                .filter(|(name, _)| name == "PATH")
                .collect(),
            directory: "/".to_owned(),
            stdout: None,
            stderr: None,
            shared_directories: Vec::new(),
            required_files: Vec::new(),
            produced_files: Vec::new(),
        };
        let mount = MountSpec {
            name: "data".to_owned(),
            path: "/data".to_owned(),
            target,
            writable: false,
            write_back: false,
            token: self.token.clone(),
            lifetime_ms_min: 0,
        };
        let mut job = JobSpec {
            name: "reader".to_owned(),
            command,
            mounts: vec![mount],
            op_deadline_ms: OP_DEADLINE_MS_DEFAULT,
            limits: JobLimits::default(),
        };
        change(&mut job);
        self.call(node, StartJob { execution, job }).await?;
        Ok(execution)
    }

    /// Waits for the end of a job.
    ///
    /// # Errors
    /// The node's error, or an unknown job.
    pub async fn wait_for_job(&self, node: &str, execution: ExecutionId) -> Result<JobReport> {
        loop {
            let call = WatchJobs {
                executions: vec![execution],
                wait_ms: 10_000,
            };
            let mut watched = self.call(node, call).await?;
            match watched.reports.pop().flatten() {
                Some(JobState::Ended(report)) => return Ok(report),
                Some(JobState::Running) => {}
                None => anyhow::bail!("the node does not know the job"),
            }
        }
    }
}

/// A speaker with a runtime of its own, for code that waits.
#[derive(Debug)]
pub struct BlockingClient {
    runtime: Runtime,
    client: ApiClient,
}

impl BlockingClient {
    /// Speaks with the identities in a cluster's directory.
    ///
    /// # Errors
    /// As [`ApiClient::new`].
    pub fn new(identity: &Path) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .enable_all()
            .build()?;
        let api_client = runtime.block_on(async { ApiClient::new(identity) })?;
        Ok(Self {
            runtime,
            client: api_client,
        })
    }

    /// The client.
    pub fn client(&self) -> &ApiClient {
        &self.client
    }

    /// Waits for something.
    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    /// Runs many tasks at once, waits for all, and returns their results in order.
    ///
    /// # Errors
    /// The first failure, in their order.
    pub fn run_all<T: Send + 'static>(
        &self,
        futures: impl IntoIterator<Item: Future<Output = Result<T>> + Send + 'static>,
    ) -> Result<Vec<T>> {
        let started: Vec<_> = futures
            .into_iter()
            .map(|future| self.runtime.spawn(future))
            .collect();
        self.block_on(async {
            let mut done = Vec::with_capacity(started.len());
            for handle in started {
                done.push(handle.await.context("a task broke off")?);
            }
            done.into_iter().collect()
        })
    }
}
