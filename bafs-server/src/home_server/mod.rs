//! The home server: exports one directory of the user to a cluster.
//!
//! ```text
//!  HomeServer ─┬─ export.rs, listing.rs, source_reading.rs   lists and reads files, knows digests
//!              ├─ uploads.rs, packs.rs                       takes results, exactly once
//!              │    ├─ upload.rs         the states of one upload, pure
//!              │    ├─ upload_table.rs   its durable row (redb)
//!              │    ├─ upload_fences.rs  the order of uploads to one target (redb)
//!              │    ├─ upload_files.rs   its bytes on disk
//!              │    ├─ upload_recovery.rs   what a start finds, what nobody needs any more
//!              │    └─ space_queue.rs, unfinished.rs   who gets the room of a full disk
//!              ├─ tree_sessions                              file operations (remote I/O)
//!              └─ throttle.rs                                one byte limit for all of these
//! ```
//!
//! * **Listing and reading.** Listings come in pages, in path order. A read names the file with the
//!   identity (size and times) from its listing. If the file is another one now, the read fails
//!   with `SourceChanged`. Each block of a reply has a digest.
//! * **Uploads.** Nothing is visible before the commit. The bytes grow in `.bafs-put/data/`, and
//!   each state is durable in one table before the next step. A large file comes in ranges, small
//!   ones come many in one call. A repeated upload gets the same receipt. An upload never replaces
//!   a file that a later one brought.
//! * **Remote I/O.** A tree session on a directory of the export has no limit of space. It shows no
//!   `.bafs-put/`.
//!
//! Paths are confined to the export by `openat2` (openat2(2)). A symbolic link is followed within
//! the export, and the token must grant both the path as written and the place where the link
//! leads.
//!
//! **Errors.** The caller gets `NotFound`, `BadPath`, `SourceChanged`, `RightMissing`,
//! `NoSpaceBytes` with what the disk has free, and `DeadlineExceeded` if the byte limit does not
//! let it pass in time. `ServerFault` says that the exported directory is gone, or that the disk
//! fails.
//!
//! **Rate limit.** It covers both directions together. Two transfers above 64 KiB pass at once, so
//! each ends soon, and smaller ones pass between them. Users of a service who wait get the same
//! bytes each. A waiting read holds no memory.
//!
//! **Concurrency.** Disk access runs on blocking threads, to its end even if the caller gives up.
//! Each part has its own lock. Several processes may export one directory: they take turns at the
//! table of uploads.
//!
//! State that survives `kill -9` is in `.bafs-put/` of the export: uploads, receipts, and the id of
//! the server. Nodes find a home by that id, not by its address.

mod agent_calls;
mod arrivals;
mod directory_use;
mod directory_view;
mod export;
mod listing;
mod pack_limits;
mod packs;
mod request_rights;
mod source_reading;
mod space_queue;
mod throttle;
mod unfinished;
mod upload;
mod upload_fences;
mod upload_files;
mod upload_recovery;
mod upload_table;
mod uploads;

pub use directory_use::remove_unused_directory;
pub use directory_view::DirectoryView;
pub use export::OWN_DIRECTORY;
pub(crate) use export::{Export, ExportEntry};
pub(crate) use listing::list;
pub(crate) use source_reading::read;
pub use unfinished::{UnfinishedUpload, list_unfinished_uploads};
pub(crate) use uploads::Uploads;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bafs_proto::attributes::Attributes;
use bafs_proto::hash::Digest;
use bafs_proto::identity::Identity;
use bafs_proto::ids::{ServerId, UploadEpoch};
use bafs_proto::limits::PUT_FILES_MAX;
use bafs_proto::message::{
    Advert, CommitPut, Counters as CounterValues, IssueUploadEpoch, Lifetime, ListSource, PutFile,
    PutFiles, PutRange, PutResults, ReadDigests, ReadSource, Reply, Request, ServerKind,
    SourceData, SourceDigests, SourceEntry, SourcePage, UploadEpochReply,
};
use bafs_proto::net::channel::Listener;
use bafs_proto::net::{BoxFuture, IncomingRequest, Service};
use bafs_proto::path::check_result_path;
use bafs_proto::replica::ReadSources;
use bafs_proto::token::{Resource, Right, Token, Verifier};
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;

use request_rights::{home_path, required_rights, unsupported_error};

use crate::access::{AccessChecker, RequiredRight};
use crate::clock;
use crate::counters::{self, Counters, Metrics, ReadMetrics};
use crate::errors::disk_error;
use crate::incarnation::Incarnation;
use crate::serving::{
    ADVERT_TTL_MS, RunningServer, advertise, check_names, pool, reachable_address, withdraw,
};
use crate::source::source_entry;
use crate::start_error::StartError;
use crate::tree_sessions::TreeSessions;
use packs::SmallFile;
use source_reading::RememberedDigests;
use throttle::{CallWait, Throttle};

/// How often silent tree sessions are looked for, in milliseconds.
const SWEEP_MS: u64 = 5_000;

/// After so many such rounds old uploads are looked for as well: every hour.
const PUT_SWEEP_ROUNDS: u64 = 720;

/// What a home server needs to start.
#[derive(Debug, Clone)]
pub struct HomeConfig {
    /// Where to listen, `host:port`; port 0 takes a free one.
    pub listen: String,
    /// Proves that the server belongs to the cluster.
    pub identity: Identity,
    /// The directory to export.
    pub root: PathBuf,
    /// Name by which the home is found.
    pub name: String,
    /// Catalog to tell, `host:port`.
    pub catalog: Option<String>,
    /// Group of the server.
    pub group: String,
    /// Limit for all data in both directions together, in bytes per second.
    pub limit_bytes_per_s: Option<u64>,
}

/// Starts a home server.
///
/// # Errors
/// `NotFound` when the directory is not there, `Conflict` when the port is in use, `Malformed`
/// when the identity is not usable, `BadPath` when the name or the group is none.
pub async fn start(config: HomeConfig) -> Result<RunningServer, StartError> {
    let HomeConfig {
        listen,
        identity,
        root,
        name,
        catalog,
        group,
        limit_bytes_per_s,
    } = config;
    check_names(&name, &group)?;
    let home = HomeServer::open(&root, identity.verifier.clone(), limit_bytes_per_s)?;
    home.export.set_name(&name);
    let listener = Listener::bind(&listen, &identity).map_err(StartError::from_listening)?;
    let counters = home.counters.clone();
    let figures: ReadMetrics = Arc::new(move || Metrics {
        counters: counters.snapshot(),
        ..Metrics::default()
    });
    let mut running = RunningServer::start(listener, home.clone(), figures)?;
    let sweeping = home.clone();
    running.add_task(tokio::spawn(
        async move { sweeping.sweep_periodically().await },
    ));
    if let Some(catalog) = catalog {
        let address = reachable_address(running.address());
        let pool = pool(&identity)?;
        let describe = move || home.advert(&name, &address, &group);
        let (last, token) = (describe(), identity.token.clone());
        let (telling_pool, told) = (pool.clone(), catalog.clone());
        running.set_withdrawal(async move { withdraw(&pool, &token, &catalog, last).await });
        let telling = advertise(telling_pool, identity.token, told, describe);
        running.add_task(tokio::spawn(telling));
    }
    Ok(running)
}

/// Answers calls about one exported directory.
#[derive(Debug)]
pub struct HomeServer {
    id: ServerId,
    access: AccessChecker,
    export: Arc<Export>,
    uploads: Arc<Uploads>,
    trees: TreeSessions,
    throttle: Throttle,
    /// Nodes compare with it what other nodes send.
    remembered: RememberedDigests,
    counters: Counters,
}

impl HomeServer {
    /// Exports the directory `root`, as a former server left it.
    ///
    /// # Errors
    /// `NotFound` when the directory is not there, `ServerFault` when it cannot be written,
    /// `NoSpaceBytes` when its disk is full and no server had it before.
    pub fn open(
        root: &std::path::Path,
        verifier: Verifier,
        limit_bytes_per_s: Option<u64>,
    ) -> Result<Arc<Self>> {
        let export = Arc::new(Export::open(root)?);
        let advise = |error: Error| match error.code {
            ErrorCode::NoSpaceBytes => error.context("make room, then start the home again"),
            _ => error,
        };
        let uploads = Arc::new(Uploads::open(export.clone()).map_err(advise)?);
        uploads.sweep(clock::now());
        let life = Incarnation::begin(uploads.directory()).map_err(|error| {
            let doing = format!("home server's own {}", uploads.directory().display());
            advise(uploads.with_room(disk_error(doing, &error)))
        })?;
        let counters = Counters::with_names(counters::HOME_COUNTERS);
        let remembered = RememberedDigests::open(uploads.directory());
        Ok(Arc::new(Self {
            id: life.server,
            access: AccessChecker::new(verifier),
            export,
            uploads,
            trees: TreeSessions::new(life.number, counters.clone()),
            throttle: Throttle::new(limit_bytes_per_s),
            remembered,
            counters,
        }))
    }

    async fn answer(self: Arc<Self>, incoming: IncomingRequest) -> Result<(Reply, Bytes)> {
        let IncomingRequest {
            peer,
            token,
            request,
            body,
            deadline,
            cancellation: awaited,
        } = incoming;
        let user = self.paced_user(&token);
        let wait = CallWait {
            user: &user,
            deadline,
            awaited: &awaited,
        };
        self.counters.add("home_requests", 1);
        self.counters.add(&format!("calls.{}", request.name()), 1);
        let mut needs = required_rights(&token, &request);
        needs.extend(self.late_right(&token, &request).await);
        if !self.access.has_verdicts(&needs) {
            self.access.check_until_refused(&peer.address, needs).await;
        }
        let bare = |reply| (reply, Bytes::new());
        match request {
            Request::ListSource(call) => {
                let page = self
                    .run_blocking(move |home| home.list(&token, &call))
                    .await?;
                Ok(bare(Reply::ListSource(page)))
            }
            Request::StatSource(call) => {
                let found = self
                    .run_blocking(move |home| home.stat(&token, &call.path))
                    .await?;
                Ok(bare(Reply::StatSource(found)))
            }
            Request::ReadSource(call) => {
                let most = u64::from(call.length);
                let read = move |home: &Self| home.read(&token, &call);
                let (data, bytes) = self.read_in_turn(most, read, wait).await?;
                Ok((Reply::ReadSource(data), bytes))
            }
            Request::ReadSources(call) => {
                let sizes = call.files.iter().map(|file| file.identity.size);
                let most = sizes.fold(0, u64::saturating_add);
                let read = move |home: &Self| home.read_files(&token, &call);
                let (data, bytes) = self.read_in_turn(most, read, wait).await?;
                Ok((Reply::ReadSources(data), bytes))
            }
            Request::ReadDigests(call) => {
                let digests = self.read_digests(token, call, wait).await?;
                Ok(bare(Reply::ReadDigests(digests)))
            }
            Request::IssueUploadEpoch(call) => {
                let issue = move |home: &Self| home.issue_upload_epoch(&token, &call);
                let epoch = self.run_blocking(issue).await?;
                Ok(bare(Reply::IssueUploadEpoch(UploadEpochReply { epoch })))
            }
            Request::BeginPut(_) | Request::PutRange(_) | Request::CommitPut(_) => {
                Ok(bare(self.put(token, request, body, wait).await?))
            }
            Request::PutFiles(call) => {
                let results = self.put_files(call, &body, wait).await?;
                Ok(bare(Reply::PutFiles(results)))
            }
            Request::ReadCounters(_) => Ok(bare(Reply::ReadCounters(self.read_counters(&token)?))),
            other => self.answer_session(token, other, body, wait).await,
        }
    }

    /// Whose share of the link a call uses; empty where nobody shares it, or nobody is named.
    fn paced_user(&self, token: &Token) -> String {
        match self.throttle.is_limited() {
            true => self.access.queue_user(token),
            false => String::new(),
        }
    }

    /// The right that a call of a session or an upload needs. It is demanded where that is used.
    async fn late_right(
        self: &Arc<Self>,
        token: &Token,
        request: &Request,
    ) -> Option<RequiredRight> {
        let of_session = |tree, epoch| {
            let right = self.trees.right(tree, epoch).unwrap_or(Right::Read);
            Some((home_path(tree).ok()?.to_owned(), right))
        };
        let (path, right) = match request {
            Request::RunFileOps(call) => of_session(&call.tree, call.epoch)?,
            Request::CloseTree(call) => of_session(&call.tree, call.epoch)?,
            Request::PutRange(PutRange { extraction, .. })
            | Request::CommitPut(CommitPut { extraction, .. }) => {
                let upload = *extraction;
                let path = match self.uploads.arriving_path(upload) {
                    Some(path) => path,
                    None => {
                        let find = self
                            .clone()
                            .run_blocking(move |home| home.uploads.load(upload));
                        find.await.ok()??.path
                    }
                };
                (path, Right::Write)
            }
            _ => return None,
        };
        Some((Arc::new(token.clone()), Resource::Home(path), right))
    }

    fn read_counters(&self, token: &Token) -> Result<CounterValues> {
        self.access.require(token, Resource::Catalog, Right::Read)?;
        Ok(CounterValues {
            server: self.id,
            values: self.counters.snapshot(),
        })
    }

    /// Reads at most so many bytes when it is their turn, so that those who wait for the limit hold
    /// no memory.
    async fn read_in_turn<T: Send + 'static>(
        self: &Arc<Self>,
        most: u64,
        read: impl FnOnce(&Self) -> Result<(T, Bytes)> + Send + 'static,
        wait: CallWait<'_>,
    ) -> Result<(T, Bytes)> {
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        let turn = self.throttle.turn(most, wait).await?;
        let read = self.clone().run_blocking(read);
        let (data, bytes) = throttle::while_awaited(wait, read).await?;
        turn.pass(bytes.len(), wait).await?;
        self.counters.add("home_read_bytes", bytes.len() as u64);
        Ok((data, bytes))
    }

    async fn put(
        self: Arc<Self>,
        token: Token,
        request: Request,
        body: Bytes,
        wait: CallWait<'_>,
    ) -> Result<Reply> {
        match request {
            Request::BeginPut(call) => {
                let put = move |home: &Self| {
                    let allow = |path: &str| home.require_right(&token, path, Right::Write);
                    let begun = home.uploads.begin(&call, allow);
                    begun.map_err(|error| home.uploads.with_room(error))
                };
                Ok(Reply::BeginPut(self.run_blocking(put).await?))
            }
            Request::PutRange(call) => {
                self.throttle.pass(body.len(), wait).await?;
                self.uploads
                    .turn(call.extraction, call.offset, wait.deadline)
                    .await;
                let put = move |home: &Self| {
                    let allow = |path: &str| home.require_right(&token, path, Right::Write);
                    let written = home
                        .uploads
                        .write(call.extraction, call.offset, &body, allow);
                    let progress = written.map_err(|error| home.uploads.with_room(error))?;
                    home.counters.add("home_written_bytes", body.len() as u64);
                    Ok(progress)
                };
                Ok(Reply::PutRange(self.run_blocking(put).await?))
            }
            Request::CommitPut(call) => {
                let put = move |home: &Self| {
                    let allow = |path: &str| home.require_right(&token, path, Right::Write);
                    let done = home.uploads.commit(&call, allow);
                    done.map_err(|error| home.uploads.with_room(error))
                };
                Ok(Reply::CommitPut(self.run_blocking(put).await?))
            }
            other => Err(unsupported_error(&other)),
        }
    }

    fn issue_upload_epoch(&self, token: &Token, call: &IssueUploadEpoch) -> Result<UploadEpoch> {
        self.require_right(token, &call.path, Right::Write)?;
        let issued = self.uploads.issue_epoch();
        issued.map_err(|error| self.uploads.with_room(error))
    }

    fn small_file(self: &Arc<Self>, call: PutFile, data: Bytes) -> SmallFile {
        let (home, token) = (self.clone(), call.token.clone());
        SmallFile {
            call,
            data,
            allow: Box::new(move |path| home.require_right(&token, path, Right::Write)),
        }
    }

    /// Puts all files of a pack in place at the same time, so that they share what a disk takes for
    /// making one of them durable.
    async fn put_files(
        self: Arc<Self>,
        call: PutFiles,
        body: &Bytes,
        wait: CallWait<'_>,
    ) -> Result<PutResults> {
        let sizes = call.files.iter().map(|file| u64::from(file.size));
        if call.files.len() > PUT_FILES_MAX || sizes.sum::<u64>() != body.len() as u64 {
            let text = format!(
                "{} files in a body of {} bytes do not fit together",
                call.files.len(),
                body.len()
            );
            return Err(Error::new(ErrorCode::Malformed, text));
        }
        self.throttle.pass(body.len(), wait).await?;
        let mut at = 0;
        let files = call.files.into_iter().map(|file| {
            let start = at;
            at += file.size as usize;
            self.small_file(file, body.slice(start..at))
        });
        let results = self.uploads.put(files.collect(), wait.deadline).await?;
        let results = self.uploads.each_with_room(results);
        let put = results.iter().flatten().map(|receipt| receipt.size);
        self.counters.add("home_written_bytes", put.sum());
        Ok(PutResults { results })
    }

    fn list(&self, token: &Token, call: &ListSource) -> Result<SourcePage> {
        let top = self.find_for_token(token, &call.path, Right::Read)?;
        let (page, bytes) = list(&self.export, &top, call.after.as_deref())?;
        self.counters.add("home_listed_bytes", bytes as u64);
        Ok(page)
    }

    fn stat(&self, token: &Token, path: &str) -> Result<SourceEntry> {
        let found = self.find_for_token(token, path, Right::Read)?;
        let entry = source_entry("", &found.stat, || Ok(Vec::new()));
        entry
            .map_err(|error| export::system_error(path, error))?
            .ok_or_else(|| {
                let text = format!("'{path}' is neither a file nor a directory");
                Error::new(ErrorCode::WrongState, text)
            })
    }

    fn read(&self, token: &Token, call: &ReadSource) -> Result<(SourceData, Bytes)> {
        let found = read(call, || self.find_for_token(token, &call.path, Right::Read))?;
        self.remembered.insert(call, &found.0)?;
        Ok(found)
    }

    async fn read_digests(
        self: &Arc<Self>,
        token: Token,
        call: ReadDigests,
        wait: CallWait<'_>,
    ) -> Result<SourceDigests> {
        let read = move |home: &Self| {
            home.require_right(&token, &call.path, Right::Read)?;
            let find = |path: &str| home.find_for_token(&token, path, Right::Read);
            source_reading::read_digests(&call, &home.remembered, find)
        };
        let digests = self.clone().run_blocking(read).await?;
        let welcome: usize = digests.welcome.iter().map(Vec::len).sum();
        let bytes = (digests.needed.len() + welcome) * size_of::<Digest>();
        self.throttle.pass(bytes, wait).await?;
        self.counters.add("home_digest_bytes", bytes as u64);
        Ok(digests)
    }

    fn read_files(&self, token: &Token, call: &ReadSources) -> Result<(SourceData, Bytes)> {
        source_reading::read_files(call, |path| self.find_for_token(token, path, Right::Read))
    }

    /// Finds a path for a token: both the path as it was asked for and the place where symbolic
    /// links lead must be granted.
    fn find_for_token(&self, token: &Token, path: &str, right: Right) -> Result<ExportEntry> {
        let allow = |path: &str| self.require_right(token, path, right);
        allow(path)?;
        self.export.find_allowed(path, allow)
    }

    fn require_right(&self, token: &Token, path: &str, right: Right) -> Result<()> {
        self.access
            .require(token, Resource::Home(path.to_owned()), right)
    }

    /// Runs something that waits for the disk, if the exported directory is in its place. It runs
    /// to its end even if the caller gives up.
    async fn run_blocking<T: Send + 'static>(
        self: Arc<Self>,
        act: impl FnOnce(&Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let act = move || self.export.check_in_place().and_then(|()| act(&self));
        tokio::task::spawn_blocking(act).await.map_err(|error| {
            Error::new(
                ErrorCode::ServerFault,
                format!("the home server failed: {error}"),
            )
        })?
    }

    async fn sweep_periodically(self: Arc<Self>) {
        for round in 1.. {
            tokio::time::sleep(Duration::from_millis(SWEEP_MS)).await;
            self.trees.sweep(clock::now()).await;
            // The log says if the directory is gone, also while nobody asks for anything in it.
            let _ = self.clone().run_blocking(|_| Ok(())).await;
            if round % PUT_SWEEP_ROUNDS != 0 {
                continue;
            }
            let swept = self.clone().run_blocking(|home| {
                home.uploads.sweep(clock::now());
                Ok(())
            });
            if let Err(error) = swept.await {
                tracing::error!(%error, "sweeping old uploads failed");
            }
        }
    }

    fn advert(&self, name: &str, address: &str, group: &str) -> Advert {
        Advert {
            id: self.id,
            kind: ServerKind::Home,
            name: name.to_owned(),
            address: address.to_owned(),
            group: group.to_owned(),
            ttl_ms: ADVERT_TTL_MS,
            capacity_bytes: 0,
            capacity_files: 0,
            free_bytes: 0,
            free_files: 0,
            slots: 0,
            jobs: 0,
            caches: Vec::new(),
            attributes: Attributes::default(),
            lifetime: Lifetime::default(),
        }
    }
}

impl Service for HomeServer {
    fn server(&self) -> Option<ServerId> {
        Some(self.id)
    }

    fn serve(
        self: Arc<Self>,
        incoming: IncomingRequest,
    ) -> BoxFuture<'static, Result<(Reply, Bytes)>> {
        Box::pin(self.answer(incoming))
    }
}
