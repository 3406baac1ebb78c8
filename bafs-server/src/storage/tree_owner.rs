//! Who accounts for the tree of a scratch volume: this server, or the agent to which it was handed
//! over. Runs no operation and knows no session.
//!
//! A lock file beside the tree is the truth. Whoever accounts for the tree has it open and locked,
//! and nobody else counts or changes the tree meanwhile. A handed-over lock is the agent's alone:
//! it outlives this server, and it ends when the agent gives it up or its process is dead, which
//! is when none of its system calls runs any more.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use bafs_proto::fd_passing::{HandoffHeader, HandoffReply, HandoffRequest, TreeHandoff};
use bafs_proto::ids::{Epoch, VolumeId};
use bafs_proto::net::BoxFuture;
use bafs_proto::time::Deadline;
use bafs_proto::volume::LimitKind;
use bafs_proto::{Error, ErrorCode, Result};
use bafs_tree::{Limit, Tree, TreeUse};
use rustix::fs::{FlockOperation, Mode, OFlags, flock, open};
use tokio::sync::{Mutex, MutexGuard, watch};
use tokio::task::JoinHandle;

use super::bind_mounts::{MountedBy, is_bind_mounted};
use crate::counters::Counters;
use crate::errors::{disk_error, run_blocking};
use crate::fd_passing::{HandlerReply, Handoff, HandoffHandler};
use crate::tree_sessions::IN_PROGRESS_AFTER;

/// An agent that must give a tree back gets so long, in milliseconds; then whoever wants the tree
/// is asked to come again.
const GIVE_BACK_MS: u64 = 3_000;

/// Pauses between two looks at the lock.
const LOCK_POLL: Duration = Duration::from_millis(1);
const LOCK_POLL_MAX: Duration = Duration::from_millis(20);

/// The tree of one scratch volume.
#[derive(Debug)]
pub(super) struct VolumeTree {
    id: VolumeId,
    root: PathBuf,
    limit: std::sync::Mutex<Limit>,
    kind: LimitKind,
    owner: Mutex<TreeOwner>,
    /// Wants back what readers got; its receivers are their connections.
    reader_recall: watch::Sender<Option<Error>>,
    mounted_by: std::sync::Mutex<MountedBy>,
    counters: Counters,
}

/// Who accounts for the tree.
#[derive(Debug)]
pub(super) enum TreeOwner {
    /// Nobody that this server knows of.
    Unknown,
    /// This server, when it has counted what the tree holds.
    Counting(JoinHandle<Result<(Arc<Tree>, OwnedFd)>>),
    /// This server.
    Server {
        /// The counted tree.
        tree: Arc<Tree>,
        /// Locked for as long as it is open.
        lock: OwnedFd,
    },
    /// An agent.
    Agent(AgentOwner),
}

#[derive(Debug)]
pub(super) struct AgentOwner {
    epoch: Epoch,
    /// Wants the tree back; its receiver is the agent's connection.
    recall: watch::Sender<Option<Error>>,
    /// For readers meanwhile.
    reader_tree: Arc<Tree>,
    /// What the tree holds, as last told.
    reported_use: Arc<TreeUse>,
    /// What a watched tree may hold: what it held when it was handed over, if that was too much
    /// already, so that its next user can remove something.
    allowed_limit: Limit,
}

impl VolumeTree {
    /// A tree of which nothing is known. Counts `mount_searches` in `counters`.
    pub(super) fn new(
        id: VolumeId,
        root: PathBuf,
        limit: Limit,
        kind: LimitKind,
        counters: Counters,
    ) -> Self {
        Self {
            id,
            root,
            limit: std::sync::Mutex::new(limit),
            kind,
            owner: Mutex::new(TreeOwner::Unknown),
            reader_recall: watch::Sender::new(None),
            mounted_by: std::sync::Mutex::new(MountedBy::Anybody),
            counters,
        }
    }

    fn mounted_by(&self) -> std::sync::MutexGuard<'_, MountedBy> {
        self.mounted_by
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// The volume was made just now.
    pub(super) fn note_new(&self) {
        *self.mounted_by() = MountedBy::Nobody;
    }

    /// A writer ended its session, as agents do after the last process of their job: nobody has to
    /// look for one, which takes 3 ms on a machine with 150 processes.
    pub(super) fn note_orderly_end(&self, epoch: Epoch) {
        let mut by = self.mounted_by();
        if *by == MountedBy::Session(epoch) {
            *by = MountedBy::Nobody;
        }
    }

    /// Keeps everybody else from changing who accounts for the tree.
    pub(super) async fn lock_owner(&self) -> MutexGuard<'_, TreeOwner> {
        self.owner.lock().await
    }

    /// The tree for those who do not write.
    ///
    /// # Errors
    /// `Busy` while an agent of an earlier life of the server has it, `InProgress` while what it
    /// holds is counted, `ServerFault`.
    pub(super) async fn open_for_reader(
        &self,
        hold: &mut TreeOwner,
        until: Deadline,
    ) -> Result<Arc<Tree>> {
        match hold {
            TreeOwner::Agent(away) if !away.recall.is_closed() => Ok(away.reader_tree.clone()),
            _ => self.counted_tree(hold, until).await,
        }
    }

    /// The tree for a writer: an agent that has it must give it back first.
    ///
    /// # Errors
    /// `Busy` when it does not, `InProgress` while what it holds is counted, `ServerFault`.
    pub(super) async fn open_for_writer(
        &self,
        hold: &mut TreeOwner,
        why: Error,
        until: Deadline,
    ) -> Result<Arc<Tree>> {
        if let TreeOwner::Agent(away) = hold {
            recall_tree(&away.recall, why);
        }
        self.counted_tree(hold, until).await
    }

    async fn counted_tree(&self, hold: &mut TreeOwner, until: Deadline) -> Result<Arc<Tree>> {
        if let TreeOwner::Server { tree, .. } = hold {
            return Ok(tree.clone());
        }
        if !matches!(hold, TreeOwner::Counting(_)) {
            let lock = self.lock(until.earlier_of(give_back_deadline())).await?;
            *hold = TreeOwner::Counting(self.start_count(lock));
        }
        let TreeOwner::Counting(counting) = hold else {
            return Err(Error::new(ErrorCode::ServerFault, "nobody counts the tree"));
        };
        // It goes on when this caller is told how things stand.
        let Ok(counted) = tokio::time::timeout(IN_PROGRESS_AFTER, counting).await else {
            let text = format!("the node still counts the content of volume {}", self.id);
            return Err(Error::new(ErrorCode::InProgress, text));
        };
        *hold = TreeOwner::Unknown;
        let counted =
            counted.unwrap_or_else(|e| Err(tree_io_error(self.id, &std::io::Error::other(e))));
        let (tree, lock) = counted?;
        // It may have changed since the count began.
        tree.set_limit(self.limit());
        *hold = TreeOwner::Server {
            tree: tree.clone(),
            lock,
        };
        Ok(tree)
    }

    fn start_count(&self, lock: OwnedFd) -> JoinHandle<Result<(Arc<Tree>, OwnedFd)>> {
        let (id, root, limit) = (self.id, self.root.clone(), self.limit());
        tokio::task::spawn_blocking(move || {
            let opened = Tree::open(&root, Some(limit)).map_err(|e| tree_io_error(id, &e))?;
            Ok((opened, lock))
        })
    }

    async fn lock(&self, until: Deadline) -> Result<OwnedFd> {
        let (id, path) = (self.id, self.root.with_file_name("lock"));
        let mut pause = LOCK_POLL;
        loop {
            let path = path.clone();
            let may_be_mounted =
                self.kind == LimitKind::Watched && *self.mounted_by() != MountedBy::Nobody;
            let searched = may_be_mounted.then(|| (self.root.clone(), self.counters.clone()));
            let looked = run_blocking(move || {
                let lock = try_lock(&path).map_err(|e| tree_io_error(id, &e.into()))?;
                // Processes of a job outlive its agent, which had the lock, for a moment.
                Ok(lock.filter(|_| {
                    !searched.is_some_and(|(root, counters)| {
                        counters.add("mount_searches", 1);
                        is_bind_mounted(&root)
                    })
                }))
            });
            if let Some(lock) = looked.await? {
                *self.mounted_by() = MountedBy::Nobody;
                return Ok(lock);
            }
            if until.remaining().is_zero() {
                let text = format!(
                    "an agent on the node still holds volume {id}; it is being killed or hangs"
                );
                return Err(Error::new(ErrorCode::Busy, text));
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LOCK_POLL_MAX);
        }
    }

    /// Hands the tree over to a writer, which accounts for it from now on.
    ///
    /// # Errors
    /// `WrongState` when this server does not account for it, `ServerFault`; nothing has changed
    /// then.
    pub(super) fn hand_to_writer(&self, hold: &mut TreeOwner, epoch: Epoch) -> Result<Handoff> {
        let TreeOwner::Server { tree, lock } = hold else {
            let text = format!("volume {} is not this server's to hand over", self.id);
            return Err(Error::new(ErrorCode::WrongState, text));
        };
        let broken = |e: rustix::io::Errno| tree_io_error(self.id, &e.into());
        let (used, duplicate) = (tree.used(), || rustix::io::dup(tree.directory()));
        let limit = self.limit();
        let told = Arc::new(TreeUse::new(limit, used));
        let beside = Tree::open_read_only(duplicate().map_err(broken)?, told.clone());
        let beside = beside.map_err(|e| tree_io_error(self.id, &e))?;
        let files = vec![
            clone_cloexec(tree.directory()).map_err(broken)?,
            clone_cloexec(&*lock).map_err(broken)?,
        ];
        let (recall, recalled) = watch::channel(None);
        *self.mounted_by() = MountedBy::Session(epoch);
        *hold = TreeOwner::Agent(AgentOwner {
            epoch,
            recall,
            reader_tree: beside,
            reported_use: told.clone(),
            allowed_limit: Limit {
                bytes: limit.bytes.max(used.0),
                files: limit.files.max(used.1),
            },
        });
        Ok(self.make_handoff(files, used, told, recalled))
    }

    /// Hands the tree over to a reader.
    ///
    /// # Errors
    /// `ServerFault`.
    pub(super) fn hand_to_reader(&self, tree: &Tree) -> Result<Handoff> {
        let used = tree.used();
        let file =
            clone_cloexec(tree.directory()).map_err(|e| tree_io_error(self.id, &e.into()))?;
        let told = Arc::new(TreeUse::new(self.limit(), used));
        Ok(self.make_handoff(vec![file], used, told, self.reader_recall.subscribe()))
    }

    fn make_handoff(
        &self,
        files: Vec<OwnedFd>,
        (used_bytes, used_files): (u64, u64),
        told: Arc<TreeUse>,
        recall: watch::Receiver<Option<Error>>,
    ) -> Handoff {
        let path = self.root.to_str().map(str::to_owned);
        let limit = self.limit();
        let header = HandoffHeader::Tree(TreeHandoff {
            bind_path: path.filter(|_| self.kind == LimitKind::Watched),
            size_bytes: limit.bytes,
            size_files: limit.files,
            used_bytes,
            used_files,
        });
        Handoff {
            header,
            files,
            handler: Box::new(TreeHandoffHandler(told)),
            recall,
        }
    }

    /// Whether an agent has the tree, and nobody counts what it holds.
    pub(super) fn is_watched(&self) -> bool {
        // Whoever has the lock now is about to change that; the next look will tell.
        self.kind == LimitKind::Watched
            && self
                .owner
                .try_lock()
                .is_ok_and(|hold| Self::is_owned_by_agent(&hold))
    }

    pub(super) fn id(&self) -> VolumeId {
        self.id
    }

    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// What it may hold.
    pub(super) fn limit(&self) -> Limit {
        *self.limit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets it hold so much from now on.
    ///
    /// # Errors
    /// `LeaseHeld` while an agent accounts for it, `WrongState` when it holds more; as
    /// [`Self::open_for_reader`].
    pub(super) async fn set_limit(&self, hold: &mut TreeOwner, limit: Limit) -> Result<()> {
        if Self::is_owned_by_agent(hold) {
            return Err(lease_held_error(self.id));
        }
        let tree = self.counted_tree(hold, give_back_deadline()).await?;
        if !tree.set_limit(limit) {
            let (bytes, files) = tree.used();
            let text = format!(
                "volume {} holds {bytes} bytes in {files} files, which is more than its new size",
                self.id
            );
            return Err(Error::new(ErrorCode::WrongState, text));
        }
        *self.limit.lock().unwrap_or_else(PoisonError::into_inner) = limit;
        Ok(())
    }

    /// The session of the agent that has it now, and what it may hold meanwhile.
    pub(super) fn agent_hold(&self) -> Option<(Epoch, Limit)> {
        let hold = self.owner.try_lock().ok()?;
        match &*hold {
            TreeOwner::Agent(away) => Some((away.epoch, away.allowed_limit)),
            _ => None,
        }
    }

    /// Takes note of what was found in a tree that the agent of a session has.
    pub(super) fn note_usage(&self, epoch: Epoch, used: (u64, u64)) {
        if let Ok(hold) = self.owner.try_lock()
            && let TreeOwner::Agent(away) = &*hold
            && away.epoch == epoch
        {
            away.reported_use.set(used);
        }
    }

    /// Ends the session of a writer, unless a later one has the tree by now.
    pub(super) async fn end_writer(&self, epoch: Epoch, why: Error) {
        if let TreeOwner::Agent(away) = &*self.owner.lock().await
            && away.epoch == epoch
        {
            recall_tree(&away.recall, why);
        }
    }

    /// Whether an agent has the tree.
    pub(super) fn is_owned_by_agent(hold: &TreeOwner) -> bool {
        matches!(hold, TreeOwner::Agent(away) if !away.recall.is_closed())
    }

    /// Wants the tree back from a writer whose session is over.
    pub(super) fn recall_if(&self, is_over: impl FnOnce(Epoch) -> bool) {
        let Ok(hold) = self.owner.try_lock() else {
            return;
        };
        if let TreeOwner::Agent(away) = &*hold
            && !away.recall.is_closed()
            && is_over(away.epoch)
        {
            let text = format!("the lease of volume {} was not renewed", self.id);
            recall_tree(&away.recall, Error::new(ErrorCode::SessionUnknown, text));
        }
    }

    /// Wants everything back from everybody, as the volume is gone, and waits for it for a while.
    pub(super) async fn end_all_users(&self, why: Error) {
        let hold = self.owner.lock().await;
        recall_tree(&self.reader_recall, why.clone());
        let all = async {
            if let TreeOwner::Agent(away) = &*hold {
                recall_tree(&away.recall, why);
                away.recall.closed().await;
            }
            self.reader_recall.closed().await;
        };
        let limit = Duration::from_millis(GIVE_BACK_MS);
        if tokio::time::timeout(limit, all).await.is_err() {
            tracing::warn!(volume = %self.id, "an agent hangs and keeps a volume that is gone");
        }
    }
}

/// When an agent that is asked now must have given a tree back.
pub(super) fn give_back_deadline() -> Deadline {
    Deadline::after_ms(GIVE_BACK_MS)
}

/// Takes note of what an agent tells about a tree that it has.
struct TreeHandoffHandler(Arc<TreeUse>);

impl HandoffHandler for TreeHandoffHandler {
    fn answer(&mut self, request: HandoffRequest) -> BoxFuture<'static, HandlerReply> {
        let answer = match request {
            HandoffRequest::ReportUse { bytes, files } => {
                self.0.set((bytes, files));
                Ok((HandoffReply::Done, Vec::new()))
            }
            HandoffRequest::PinFile { .. }
            | HandoffRequest::ReleaseFile { .. }
            | HandoffRequest::ReadBlocks { .. } => {
                let text = "a scratch volume has no blocks";
                Err(Error::new(ErrorCode::Unsupported, text))
            }
        };
        Box::pin(std::future::ready(answer))
    }
}

/// The refusal of who does not fence the writer of a volume.
pub(super) fn lease_held_error(id: VolumeId) -> Error {
    let text = format!("another agent writes volume {id}; repeat this when it has ended");
    Error::new(ErrorCode::LeaseHeld, text)
}

fn recall_tree(recall: &watch::Sender<Option<Error>>, why: Error) {
    recall.send_if_modified(|asked| {
        let first = asked.is_none();
        asked.get_or_insert(why);
        first
    });
}

/// The locked file; `None` while somebody else has it.
fn try_lock(path: &Path) -> rustix::io::Result<Option<OwnedFd>> {
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let file = open(path, flags, Mode::RUSR | Mode::WUSR)?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(Some(file)),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
        Err(error) => Err(error),
    }
}

fn clone_cloexec(file: impl std::os::fd::AsFd) -> rustix::io::Result<OwnedFd> {
    rustix::io::fcntl_dupfd_cloexec(file, 0)
}

fn tree_io_error(id: VolumeId, error: &std::io::Error) -> Error {
    disk_error(format!("tree of volume {id}"), error)
}
