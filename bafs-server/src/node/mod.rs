//! A node: the volumes, caches and jobs of one machine behind one address.
//!
//! [`Node`] connects the parts and answers calls. The parts do not know the network:
//!
//! ```text
//!  calls ─▶ service.rs  required_rights ─▶ access ─▶ storage   volumes, trees, extraction
//!                                                ├─▶ caches    blocks, manifests, peers
//!                                                ├─▶ executor  jobs
//!                                                └─▶ handoff   tickets for agents on this machine
//!  membership.rs  advertises the node to the catalog each second, and learns peers and homes
//! ```
//!
//! * [`start`] binds the listener, opens the store and starts the tasks. [`RunningServer`] ends
//!   them.
//! * [`Node::open`] opens the store and takes up the volumes in it. Half-made ones are removed. One
//!   process at a time may have a store open: another one gets `Conflict`.
//! * [`Node::start_background_tasks`] starts the work without a caller: adverts, the catalog's
//!   list, the handoff socket, and a sweep each second. The sweep ends expired volumes and silent
//!   sessions, frees space if the disk is full, and looks whether the store still exists.
//!
//! **Rights.** `service.rs` derives the needed rights from the request, and checks them before
//! anything is done. Only calls of tree sessions are checked later, because the session knows the
//! right.
//!
//! **Errors.** Every part returns its own errors to the caller. A node whose store is removed stops
//! itself: its volumes are lost, and callers that meant the old store get `StoreLost`. A catalog
//! that does not answer is no error. The node retries, and its jobs go on.
//!
//! **Concurrency.** A request runs in a task of the transport. Each part owns its state behind its
//! own locks.
//!
//! **End.** A node that is asked to end drains first (`departure.rs`): it says so, serves until
//! others have what only it had, and tells the catalog when it goes. When a node stops, its jobs
//! are killed and its volumes stay. When it is killed, its
//! agents notice the closed pipe and kill their jobs.
//!
//! The price of one process for storage and jobs is that a restart of the node ends its jobs. The
//! scheduler runs them again.

mod handoff;
mod machine;
mod membership;
mod service;
mod subnet;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bafs_proto::attributes::{AttributeValue, Attributes, RETAINED_CACHES};
use bafs_proto::identity::Identity;
use bafs_proto::message::{Advert, ServerKind};
use bafs_proto::net::channel::Listener;
use bafs_proto::net::pool::Pool;
use bafs_proto::{Error, ErrorCode, Result};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use self::subnet::subnet_of;
use crate::access::AccessChecker;
use crate::cache::Caches;
use crate::counters::{self, Counters, Metrics, ReadMetrics};
use crate::departure::Departure;
use crate::executor::{DiskSpace, Executor, ExecutorConfig, TemporaryQuota};
use crate::fd_passing::HandoffServer;
use crate::home_clients::{HomeClients, HomeSettings};
use crate::logic::space::Amount;
use crate::serving::{
    ADVERT_TTL_MS, RunningServer, ServerDeparture, check_names, pool, reachable_address,
};
use crate::start_error::StartError;
use crate::storage::{Storage, Store};

/// How often expired volumes and silent sessions are looked for.
const SWEEP_MS: u64 = 1_000;

/// Names of caches in an advert: a value has 1024 bytes, and such a name at most 57.
const RETAINED_NAMES_MAX: usize = 16;

/// What a node needs to start.
#[derive(Debug, Clone)]
pub struct NodeConfig {
    /// Where to listen, `host:port`; port 0 takes a free one.
    pub listen: String,
    /// Proves that the node belongs to the cluster; its token speaks to catalog and peers.
    pub identity: Identity,
    /// Directory that keeps everything; one node at a time serves it.
    pub store: PathBuf,
    /// Space for volumes, in bytes.
    pub capacity_bytes: u64,
    /// Space for volumes, in files.
    pub capacity_files: u64,
    /// Catalog to tell, `host:port`.
    pub catalog: Option<String>,
    /// Nodes of one group share cooperative caches; empty for the nodes of its subnet: /24 for
    /// IPv4, /64 for IPv6, the machine itself.
    pub group: String,
    /// Name for people.
    pub name: String,
    /// Jobs that it is meant to run at once; 0 for none.
    pub slots: u32,
    /// The program whose hidden command `agent` runs a job.
    pub agent_program: PathBuf,
    /// Directory with the identity that agents show.
    pub agent_identity: PathBuf,
    /// Memory of each agent for data that pass through it, in bytes; its own default if `None`.
    pub agent_memory_bytes: Option<u64>,
    /// Disk of each slot for temporary files of jobs, in bytes; a part of what the disk has left
    /// beside volumes if `None`.
    pub temporary_bytes: Option<u64>,
    /// Memory of each slot that processes of a job share by name, in bytes; of half of the
    /// machine's if `None`.
    pub shared_memory_bytes: Option<u64>,
    /// What it is told of homes of other kinds.
    pub homes: HomeSettings,
    /// Whether blocks of other nodes are taken without asking home what they are.
    pub trusts_peers: bool,
    /// What its administrator says of it in its advert, beside what it measures.
    pub attributes: Attributes,
    /// How long it lives, if that is known.
    pub lifetime: Option<Duration>,
    /// How long it drains before it ends.
    pub grace: Duration,
    /// How long it stays while its catalog does not answer; for ever if `None`.
    pub catalog_timeout: Option<Duration>,
}

/// Starts a node. Stopping it kills its jobs and keeps its volumes.
///
/// # Errors
/// `Conflict` when the port or the store is in use, `Malformed` when the identity is not usable,
/// `ServerFault` when the store cannot be read.
pub async fn start(config: NodeConfig) -> Result<RunningServer, StartError> {
    let listener = Listener::bind(&config.listen, &config.identity);
    let listener = listener.map_err(StartError::from_listening)?;
    let address = reachable_address(listener.local_address()?);
    let pool = pool(&config.identity)?;
    let node = Node::open(config, address, pool).await?;
    let tasks = node.start_background_tasks();
    let published = node.clone();
    let figures: ReadMetrics = Arc::new(move || published.metrics());
    let gone = node.is_store_gone.subscribe();
    let store = node.config.store.clone();
    let (departure, leaving) = (node.departure.clone(), node.clone());
    let mut running = RunningServer::start(listener, node.clone(), figures)?;
    let executor = node.executor.clone();
    running.set_cleanup(async move { executor.remove_left_groups().await });
    let farewell = node.clone();
    let farewell = async move { membership::withdraw_node(&farewell).await };
    running.set_departure(ServerDeparture {
        departure,
        ended: Box::pin(leaving.wait_for_end()),
        farewell: Box::pin(farewell),
    });
    running.set_fatal_condition(gone, move || {
        let text = format!(
            "store {}: somebody removed it while this node served it: its volumes are lost; \
             restart the node",
            store.display()
        );
        Error::new(ErrorCode::StoreLost, text)
    });
    tasks.into_iter().for_each(|task| running.add_task(task));
    Ok(running)
}

/// The parts of a node, ready to answer requests from any transport.
#[derive(Debug)]
pub struct Node {
    config: NodeConfig,
    address: String,
    pool: Pool,
    store: Arc<Store>,
    storage: Arc<Storage>,
    homes: Arc<HomeClients>,
    caches: Arc<Caches>,
    executor: Arc<Executor>,
    handoff_server: Arc<HandoffServer>,
    access: AccessChecker,
    counters: Counters,
    /// What each slot has for temporary files.
    temporary_quota: TemporaryQuota,
    /// What it says of its machine.
    attributes: Attributes,
    /// Whether the store is gone.
    is_store_gone: watch::Sender<bool>,
    departure: Departure,
}

impl Node {
    /// Opens the store of a node that others reach at `address`, and takes up its volumes. Does
    /// nothing by itself before [`Self::start_background_tasks`].
    ///
    /// # Errors
    /// As [`start`], but for the network.
    pub async fn open(
        mut config: NodeConfig,
        address: String,
        pool: Pool,
    ) -> Result<Arc<Self>, StartError> {
        check_names(&config.name, &config.group)?;
        if config.group.is_empty() {
            config.group = subnet_of(&address);
        }
        let counters = Counters::with_names(counters::NODE_COUNTERS);
        let path = config.store.clone();
        let homes = HomeClients::new(
            pool.clone(),
            config.identity.verifier.clone(),
            config.homes.clone(),
        );
        let (opened, sources) = (counters.clone(), homes.clone());
        let (used, reached) = (config.identity.token.clone(), address.clone());
        let (store, caches) = tokio::task::spawn_blocking(move || {
            let store = Arc::new(Store::open(&path)?);
            let (own, place) = ((store.id(), reached), store.cache_directory());
            let caches = Caches::open(place, sources, used, own, opened)?;
            Ok::<_, StartError>((store, caches))
        })
        .await
        .map_err(|e| Error::new(ErrorCode::ServerFault, format!("store: {e}")))??;
        if config.trusts_peers {
            caches.trust_peers();
        }
        config.store = store.root().to_owned();
        if config.catalog.is_none() {
            caches.set_peers(Vec::new());
        }
        let (bytes, files) = (config.capacity_bytes, config.capacity_files);
        let capacity = Amount { bytes, files };
        let (opened, cached, filled) = (store.clone(), caches.clone(), homes.clone());
        let storage = Storage::open(opened, capacity, filled, cached, counters.clone()).await?;
        let share = temporary_quota(&config, &store, storage.space().1).await?;
        let departure = Departure::new(config.lifetime, config.grace);
        let executor = ExecutorConfig {
            departure: departure.clone(),
            copies_agents: true,
            slots: config.slots,
            program: config.agent_program.clone(),
            identity: config.agent_identity.clone(),
            memory_bytes: config.agent_memory_bytes,
            log_directory: store.log_directory(),
            started_file: store.started_file(),
            volume_directory: store.volume_directory(),
            temporary_directory: store.temporary_directory(),
            temporary_quota: share,
        };
        let executor = Executor::open(executor, counters.clone())?;
        let access = AccessChecker::with_address(config.identity.verifier.clone(), address.clone());
        let handoff_server = HandoffServer::new(&config.store, counters.clone());
        let attributes = machine::describe_machine(share.bytes, &config.attributes);
        Ok(Arc::new(Self {
            config,
            address,
            pool,
            store,
            storage,
            homes,
            caches,
            executor,
            handoff_server,
            access,
            counters,
            temporary_quota: share,
            attributes,
            is_store_gone: watch::Sender::new(false),
            departure,
        }))
    }

    /// Starts what a node does by itself: tells the catalog, learns its peers, ends what has
    /// expired, opens its handoff_server to agents on its machine.
    ///
    /// Aborting the tasks stops it; the last one kills the jobs when it is aborted.
    pub fn start_background_tasks(self: &Arc<Self>) -> Vec<JoinHandle<()>> {
        let mut tasks = Vec::new();
        if let Some(catalog) = self.config.catalog.clone() {
            tasks.push(tokio::spawn(membership::advertise_node(
                self.clone(),
                catalog,
            )));
            tasks.push(tokio::spawn(membership::follow_catalog(self.clone())));
        }
        tasks.push(tokio::spawn(self.departure.clone().drain_in_time()));
        tasks.push(tokio::spawn(self.handoff_server.clone().serve()));
        let (storage, caches) = (self.storage.clone(), self.caches.clone());
        let executor = self.executor.clone();
        let (store, gone) = (self.store.clone(), self.is_store_gone.clone());
        tasks.push(tokio::spawn(async move {
            loop {
                tokio::time::sleep(Duration::from_millis(SWEEP_MS)).await;
                storage.sweep().await;
                storage
                    .free_space_for_scratch(executor.take_disk_full())
                    .await;
                caches.maintain().await;
                let looked_at = store.clone();
                let looking = tokio::task::spawn_blocking(move || looked_at.is_gone());
                if looking.await.is_ok_and(|is_gone| is_gone) {
                    gone.send_replace(true);
                }
            }
        }));
        tasks.push(tokio::spawn(self.storage.clone().watch_usage()));
        let jobs = KillJobsOnDrop(self.executor.clone());
        tasks.push(tokio::spawn(async move {
            let _jobs = jobs;
            std::future::pending::<()>().await;
        }));
        tasks
    }

    /// What the node publishes.
    fn metrics(&self) -> Metrics {
        self.caches.count_local_reads();
        let (capacity, free) = self.storage.space();
        let (slots, jobs) = (self.config.slots, self.executor.running_jobs());
        Metrics {
            counters: self.counters.snapshot(),
            gauges: BTreeMap::from([
                ("capacity_bytes", capacity.bytes),
                ("capacity_files", capacity.files),
                ("free_bytes", free.bytes),
                ("free_files", free.files),
                ("slots", u64::from(slots)),
                ("jobs_running", u64::from(jobs)),
                ("slot_temporary_bytes", self.temporary_quota.bytes),
                ("slot_temporary_files", self.temporary_quota.files),
                (
                    "slot_shared_memory_bytes",
                    self.temporary_quota.memory_bytes,
                ),
            ]),
        }
    }

    /// Whether nothing of the node's own would be lost with it that anybody waits for: no job runs,
    /// and no scratch volume is here but kept ones. Blocks of caches are at home.
    fn is_empty(&self) -> bool {
        self.executor.running_jobs() == 0 && !self.storage.has_wanted_scratch()
    }

    /// Waits until the node has to end.
    async fn wait_for_end(self: Arc<Self>) {
        let is_idle = || self.executor.running_jobs() == 0;
        self.departure
            .wait_for_end(|| self.is_empty(), is_idle)
            .await;
    }

    /// What the node says of itself.
    pub fn advert(&self) -> Advert {
        let (capacity, free) = self.storage.space();
        Advert {
            id: self.store.id(),
            kind: ServerKind::Node,
            name: self.config.name.clone(),
            address: self.address.clone(),
            group: self.config.group.clone(),
            ttl_ms: ADVERT_TTL_MS,
            capacity_bytes: capacity.bytes,
            capacity_files: capacity.files,
            free_bytes: free.bytes,
            free_files: free.files,
            slots: self.departure.offered_slots(self.config.slots),
            jobs: self.executor.running_jobs(),
            caches: self.caches.adverts(),
            attributes: self.describe_data(),
            lifetime: self.departure.lifetime(),
        }
    }

    /// The attributes of the machine, and the caches whose data wait here for their next volume.
    fn describe_data(&self) -> Attributes {
        let mut attributes = self.attributes.clone();
        let mut names = self.caches.retained_names();
        names.truncate(RETAINED_NAMES_MAX);
        if !names.is_empty() {
            attributes.set(RETAINED_CACHES, AttributeValue::TextList(names));
        }
        attributes
    }
}

/// What each slot of a node has for temporary files, where volumes may still reserve `free`.
async fn temporary_quota(
    config: &NodeConfig,
    store: &Arc<Store>,
    free: Amount,
) -> Result<TemporaryQuota> {
    let directory = store.temporary_directory();
    let disk = tokio::task::spawn_blocking(move || DiskSpace::measure(&directory)).await;
    let disk = disk.map_err(std::io::Error::other).flatten();
    let disk = disk.map_err(|e| crate::errors::disk_error("store", &e))?;
    let (offered, slots) = (config.capacity_bytes, config.slots);
    let mut share = TemporaryQuota::beside_volumes_quota(disk, offered, free.bytes, slots);
    share.bytes = config.temporary_bytes.unwrap_or(share.bytes);
    share.memory_bytes = config.shared_memory_bytes.unwrap_or(share.memory_bytes);
    if slots > 0 {
        tracing::info!(
            bytes = share.bytes,
            files = share.files,
            shared_memory_bytes = share.memory_bytes,
            "each slot has this for temporary files"
        );
    }
    Ok(share)
}

/// Kills the jobs of a node when the node stops.
struct KillJobsOnDrop(Arc<Executor>);

impl Drop for KillJobsOnDrop {
    fn drop(&mut self) {
        self.0.stop();
    }
}
