//! Sessions of agents with trees: epochs, leases, fencing, and exactly-once batches.
//!
//! An agent opens a tree, sends batches of operations, and closes the tree. [`TreeSessions`] maps
//! each tree and [`Epoch`] to a session of `bafs-tree`, which runs the operations. Nodes use it for
//! scratch volumes, home servers for remote I/O.
//!
//! * **Epochs.** Each session has a number that only grows, also over restarts: its upper half is
//!   the incarnation of the server.
//! * **Fencing.** A volume has one writer. A new writer ends the sessions of all earlier ones. When
//!   [`TreeSessions::open`] returns, none of their operations runs any more. Their later calls get
//!   `Fenced`.
//! * **Leases.** A session that sends nothing for 60 s ends ([`LEASE_MS`],
//!   [`TreeSessions::sweep`]). An empty batch renews it.
//! * **Exactly once.** The agent numbers its batches. The server keeps the answer to each
//!   (`batch_replay.rs`), so a repeated batch is answered from memory and never runs twice.
//! * **Chains.** Batches with `after_sequence` run one after the other. After the first failed
//!   operation of a chain nothing later in it runs: it gets `ECANCELED`. So the state on disk shows
//!   how far the chain came. A batch of syncs waits for the chain, but nothing waits for it.
//! * **Hand-over.** [`TreeSessions::hand_to_agent`] passes the tree to an agent on the same
//!   machine. From then on this server only keeps the lease.
//!
//! **Errors.** The agent gets `SessionUnknown` after a restart and opens the tree again. `Fenced`
//! and `VolumeLost` are final. `InProgress` after a second means that the batch still runs, and the
//! agent asks again. `Busy` means that the batch before it has not come, or that 4,096 sessions are
//! open. A failed operation is an errno in the results.
//!
//! **Concurrency.** One mutex guards the table, and is never held while an operation runs. A batch
//! runs on a blocking thread, or, if it is cheap, in the runtime (`inline_batches.rs`). It goes on
//! if its caller gives up. Each operation runs under the
//! read lock of its session, and the end of the session takes the write lock.
//!
//! Rights are checked by the servers before ([`TreeSessions::authorise`]). See
//! `docs/decisions/0013-resume-after-server-restart.md` for recovery.

mod batch_replay;
mod descriptors;
mod inline_batches;
mod recent_set;
mod reply_limits;
mod tree_directory;
mod writers;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::Duration;

use bafs_proto::buffer::Buffer;
use bafs_proto::file_op::{Errno, FileOp, FileReply, FileResult};
use bafs_proto::ids::{AgentId, Epoch};
use bafs_proto::limits::BATCH_OPS_MAX;
use bafs_proto::message::{
    AssignedNumbers, CloseTree, FileResults, OpenTree, RunFileOps, TreeRef, TreeSession,
};
use bafs_proto::time::Time;
use bafs_proto::token::Right;
use bafs_proto::{Error, ErrorCode, Result};
use bafs_tree::{JobDescriptorUse, ReservedDescriptors, Session, Tree};
use bytes::Bytes;
use tokio::sync::watch;

use crate::clock;
use crate::counters::Counters;
use crate::full_disk::{DiskFullFlag, FreeSpace};
use crate::incarnation;
use batch_replay::{BatchReplay, BatchReply, BatchStart, is_sync};
use descriptors::reserve_descriptors;
use inline_batches::InlineSlot;
use recent_set::RecentSet;
use reply_limits::{has_room_for, read_bytes_max};
pub(crate) use tree_directory::TreeDirectory;

/// A session ends when it is silent for so long, in milliseconds.
pub const LEASE_MS: u64 = 60_000;

/// A caller that waits so long, for its batch, for the one before it or for its tree, is told how
/// things stand and asks again: a slow disk is no dead server.
pub(crate) const IN_PROGRESS_AFTER: Duration = Duration::from_secs(1);

/// Most sessions at once; each may hold many open files.
const SESSIONS_MAX: usize = 4096;

/// Table of the sessions of agents with trees. Clones share the sessions.
#[derive(Clone)]
pub struct TreeSessions(Arc<SessionsShared>);

struct SessionsShared {
    counters: Counters,
    /// Whether an operation found the disk full.
    full_disk: DiskFullFlag,
    directory: TreeDirectory,
    /// Names the present life of this machine.
    boot_id: u64,
    inline_slot: InlineSlot,
    state: Mutex<SessionTable>,
}

#[derive(Default)]
struct SessionTable {
    last_epoch: u64,
    sessions: BTreeMap<(TreeRef, Epoch), Arc<AgentSession>>,
    /// Sessions that were taken out and may still run something.
    ending_sessions: Vec<(TreeRef, Weak<AgentSession>)>,
    /// What agents have open, of those that have sessions.
    descriptor_shares: BTreeMap<AgentId, JobDescriptorUse>,
    fenced_sessions: RecentSet<(TreeRef, Epoch)>,
    dropped_trees: RecentSet<TreeRef>,
}

/// One agent's session.
struct AgentSession {
    agent: AgentId,
    is_writable: bool,
    /// Descriptors that are kept for what its agent opens early.
    reserved_descriptors: ReservedDescriptors,
    last_seen: Mutex<Time>,
    replay: Mutex<BatchReplay>,
    /// The last batch of the agent's chain that has run.
    last_chained_batch: watch::Sender<u64>,
    /// Whether a batch of that chain runs now.
    is_chain_running: AtomicBool,
    /// An operation of the chain failed: nothing behind it runs any more, so that what is there
    /// after a restart proves that all before it was done.
    has_chain_failed: AtomicBool,
    /// Taken out when the session ends. Every operation runs under the read lock, so whoever has
    /// the write lock knows that nothing of the session runs any more.
    session: RwLock<Option<Session>>,
}

impl std::fmt::Debug for TreeSessions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TreeSessions({} open)", self.lock().sessions.len())
    }
}

impl TreeSessions {
    /// No sessions yet. Counts `file_operations`, `file_read_bytes`, `file_written_bytes` in
    /// `counters`. `life` is the number of this life of the server: all epochs of an earlier one
    /// are smaller, whatever the clock does.
    pub fn new(life: u32, counters: Counters) -> Self {
        Self::in_directory(TreeDirectory::default(), life, counters)
    }

    /// The same for trees in a directory: while that is gone, operations answer nothing.
    pub(crate) fn in_directory(root: TreeDirectory, life: u32, counters: Counters) -> Self {
        let state = SessionTable {
            last_epoch: u64::from(life) << 32,
            ..SessionTable::default()
        };
        Self(Arc::new(SessionsShared {
            counters,
            full_disk: DiskFullFlag::default(),
            directory: root,
            boot_id: incarnation::boot_id().unwrap_or_else(|| u64::from(life)),
            inline_slot: InlineSlot::default(),
            state: Mutex::new(state),
        }))
    }

    /// Opens `tree`, which `open.tree` names, for an agent. A writer of a volume fences all
    /// earlier writers of it: when this returns, none of their operations runs any more.
    ///
    /// # Errors
    /// `VolumeLost` after [`Self::drop_tree`], or when it resumes a session of before the machine
    /// started; `Busy` when there are too many sessions.
    pub async fn open(&self, tree: Arc<Tree>, open: OpenTree) -> Result<TreeSession> {
        let OpenTree {
            tree: name,
            agent,
            writable,
            yields: _,
            resumed_incarnation: resumes,
        } = open;
        let machine = self.0.boot_id;
        if resumes.is_some_and(|resumed| resumed != machine) {
            let text = "the server's machine started again meanwhile: what was written and not \
                        synced may be missing";
            return Err(Error::new(ErrorCode::VolumeLost, text));
        }
        let share = self.lock().descriptor_share(agent);
        let mut own = Session::new(tree, writable).with_descriptor_use(share);
        if resumes.is_some() {
            own = own.resumed();
        }
        let session = AgentSession {
            agent,
            is_writable: writable,
            reserved_descriptors: ReservedDescriptors::default(),
            last_seen: Mutex::new(clock::now()),
            replay: Mutex::default(),
            last_chained_batch: watch::Sender::new(0),
            is_chain_running: AtomicBool::new(false),
            has_chain_failed: AtomicBool::new(false),
            session: RwLock::new(Some(own)),
        };
        let (epoch, early_handles, earlier) = self.lock().insert(name, session)?;
        end_sessions(earlier).await;
        Ok(TreeSession {
            epoch,
            lease_ms: LEASE_MS,
            machine_incarnation: machine,
            early_handles_max: early_handles,
        })
    }

    /// Has `allow` check the right that calls of a session need: whoever may only read must not
    /// work with a writer's session, whatever the operations are. Comes before [`Self::run`].
    ///
    /// # Errors
    /// What `allow` answers; for a session that is no more the errors of [`Self::run`], which are
    /// told to whoever may read.
    pub fn authorise(
        &self,
        tree: &TreeRef,
        epoch: Epoch,
        allow: impl FnOnce(Right) -> Result<()>,
    ) -> Result<()> {
        let found = self.lock().find(tree, epoch);
        allow(
            found
                .as_ref()
                .map_or(Right::Read, |session| session.right()),
        )?;
        found.map(drop)
    }

    /// Runs a batch of operations, or finds the answer of a batch that ran before.
    ///
    /// # Errors
    /// `SessionUnknown`, `Fenced`, `VolumeLost` for a session that is no more; `InProgress` for
    /// a batch that takes longer; `Malformed` for one that is too large; `Conflict` for one that
    /// ran so long ago that its answer is gone.
    pub async fn run(&self, call: RunFileOps, body: Bytes) -> Result<(FileResults, Bytes)> {
        let (sequence, after) = (call.sequence, call.after_sequence);
        let session = self.lock().find(&call.tree, call.epoch)?;
        *lock(&session.last_seen) = clock::now();
        if call.ops.is_empty() {
            return Ok((
                FileResults {
                    results: Vec::new(),
                },
                Bytes::new(),
            ));
        }
        if call.ops.len() > BATCH_OPS_MAX {
            let text = format!(
                "{} operations in one batch; at most {BATCH_OPS_MAX} go",
                call.ops.len()
            );
            return Err(Error::new(ErrorCode::Malformed, text));
        }
        if let Some(after) = after {
            let is_sync = is_sync(&call.ops);
            let has_run = |last: u64| last >= sequence || (is_sync && last > after);
            let is_here = |last| last == after || has_run(last);
            session.wait_for_turn(after, sequence, is_here).await?;
        }
        let begun = lock(&session.replay).begin(sequence);
        let mut answer = match begun {
            BatchStart::Existing(answer) => answer,
            BatchStart::Forgotten => {
                let text = format!("batch {sequence} ran, but its answer is no longer kept");
                return Err(Error::new(ErrorCode::Conflict, text));
            }
            BatchStart::New(sender) => {
                let answer = sender.subscribe();
                self.start_batch(session, call, body, sender);
                answer
            }
        };
        let done = tokio::time::timeout(IN_PROGRESS_AFTER, answer.wait_for(Option::is_some));
        let done = done.await.map_err(|_| running_error(sequence))?;
        let done = done.map_err(|_| interrupted_error())?;
        let (results, body) = done.as_ref().ok_or_else(interrupted_error)?.clone()?;
        Ok((FileResults { results }, body))
    }

    /// Ends all writers' sessions with a volume, as a new writer does; when this returns, none of
    /// their operations runs here any more.
    pub async fn fence(&self, tree: &TreeRef) {
        let earlier = self.lock().fence(tree);
        end_sessions(earlier).await;
    }

    /// Leaves the operations of a session to its agent, to which the tree is handed over as `give`
    /// does it: from now on this server only keeps the lease.
    ///
    /// # Errors
    /// `SessionUnknown`, `Fenced`, `VolumeLost`; `WrongState` when operations have run, or when a
    /// writer is not alone, as only one can account for the tree. What `give` answers: the session
    /// stays as it is then.
    pub fn hand_to_agent<T>(
        &self,
        tree: &TreeRef,
        epoch: Epoch,
        give: impl FnOnce(Right) -> Result<T>,
    ) -> Result<T> {
        let state = self.lock();
        let session = state.find(tree, epoch)?;
        let others = |(name, other): &&(TreeRef, Epoch)| name == tree && *other != epoch;
        if session.is_writable && state.sessions.keys().any(|key| others(&key)) {
            let text = format!("other agents use {tree:?}; its writer works through the server");
            return Err(Error::new(ErrorCode::WrongState, text));
        }
        if !lock(&session.replay).is_new() {
            let text = "operations of the session have run; it stays with the server";
            return Err(Error::new(ErrorCode::WrongState, text));
        }
        let given = give(session.right())?;
        // Nothing runs in it, so this waits for nothing and closes nothing.
        session.end();
        Ok(given)
    }

    /// Whether a session is open.
    pub fn is_open(&self, tree: &TreeRef, epoch: Epoch) -> bool {
        self.lock().sessions.contains_key(&(tree.clone(), epoch))
    }

    /// What a session may do; `None` if it is not open.
    pub fn right(&self, tree: &TreeRef, epoch: Epoch) -> Option<Right> {
        let found = self.lock().find(tree, epoch);
        found.ok().map(|session| session.right())
    }

    /// Ends a session if `allow` grants the right that it needs; ending it again is harmless.
    ///
    /// # Errors
    /// What `allow` answers.
    pub async fn close(
        &self,
        call: &CloseTree,
        allow: impl FnOnce(Right) -> Result<()>,
    ) -> Result<()> {
        let key = (call.tree.clone(), call.epoch);
        let found = self.lock().sessions.get(&key).cloned();
        allow(
            found
                .as_ref()
                .map_or(Right::Read, |session| session.right()),
        )?;
        drop(found);
        let ended = self.lock().take_session(&key);
        end_sessions(ended.into_iter().collect()).await;
        Ok(())
    }

    /// The volume was deleted: all its sessions end, and answer `VolumeLost` from now on.
    pub async fn drop_tree(&self, tree: &TreeRef) {
        let ended = {
            let mut state = self.lock();
            state.dropped_trees.insert(tree.clone());
            state.take_where(|(name, _), _| name == tree)
        };
        end_sessions(ended).await;
    }

    /// Ends the sessions that were silent for longer than their lease.
    pub async fn sweep(&self, now: Time) {
        let silent = |open: &AgentSession| now.ms_since(*lock(&open.last_seen)) > LEASE_MS;
        let ended = self.lock().take_where(|_, open| silent(open));
        if !ended.is_empty() {
            tracing::info!(sessions = ended.len(), "silent tree sessions ended");
        }
        end_sessions(ended).await;
    }

    /// Where it is noted that operations found the disk full.
    pub(crate) fn full_disk(&self) -> &DiskFullFlag {
        &self.0.full_disk
    }

    /// Number of open sessions.
    pub fn len(&self) -> usize {
        self.lock().sessions.len()
    }

    /// Whether no session is open.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn lock(&self) -> MutexGuard<'_, SessionTable> {
        lock(&self.0.state)
    }
}

impl SessionsShared {
    fn count_operations(&self, answer: &BatchReply) {
        let Ok((results, body)) = answer else { return };
        let written = results.iter().map(|result| match result {
            Ok(FileReply::Written { length }) => *length,
            _ => 0,
        });
        self.counters.add("file_operations", results.len() as u64);
        self.counters.add("file_read_bytes", body.len() as u64);
        self.counters.add("file_written_bytes", written.sum());
    }

    fn ended_error(&self, tree: &TreeRef, epoch: Epoch) -> Error {
        lock(&self.state).ended_error(tree, epoch)
    }
}

impl SessionTable {
    /// Adds a session and takes out those that it fences.
    fn insert(
        &mut self,
        name: TreeRef,
        mut session: AgentSession,
    ) -> Result<(Epoch, u32, Vec<Arc<AgentSession>>)> {
        if self.dropped_trees.contains(&name) {
            return Err(volume_lost_error(&name));
        }
        if self.sessions.len() >= SESSIONS_MAX {
            let text = format!("{SESSIONS_MAX} tree sessions are open; try again later");
            return Err(Error::new(ErrorCode::Busy, text));
        }
        let is_only_writer = session.is_writable && matches!(name, TreeRef::Volume(_));
        let earlier = match is_only_writer {
            true => self.fence(&name),
            false => Vec::new(),
        };
        self.last_epoch += 1;
        let epoch = Epoch(self.last_epoch);
        // Others open nothing before we do.
        if is_only_writer {
            let served = self.sessions.values().filter(|open| open.is_served());
            let kept = served.map(|open| open.reserved_descriptors.count());
            session.reserved_descriptors = reserve_descriptors(&mut session.session, kept.sum());
        }
        let early_handles = u32::try_from(session.reserved_descriptors.count()).unwrap_or(u32::MAX);
        self.sessions.insert((name, epoch), Arc::new(session));
        Ok((epoch, early_handles, earlier))
    }

    /// Takes the writers of a volume out. With them come those whose lease ran out while an
    /// operation of theirs hung, and hangs still.
    fn fence(&mut self, tree: &TreeRef) -> Vec<Arc<AgentSession>> {
        let writers =
            |key: &(TreeRef, Epoch), open: &AgentSession| key.0 == *tree && open.is_writable;
        // Kept until they are given back: what the last one closes takes time.
        let mut taken = Vec::new();
        for key in self.keys_where(writers) {
            taken.extend(self.take_session(&key));
            self.fenced_sessions.insert(key);
        }
        let same_tree = self.ending_sessions.iter().filter(|(name, _)| name == tree);
        let running = same_tree.filter_map(|(_, open)| open.upgrade());
        running.filter(|open| open.is_writable).collect()
    }

    /// Takes a session out, which ends when nothing of it runs any more. Others need not wait for
    /// that to have the descriptors which it kept: nobody hears any more what it opens.
    fn take_session(&mut self, key: &(TreeRef, Epoch)) -> Option<Arc<AgentSession>> {
        let open = self.sessions.remove(key)?;
        open.reserved_descriptors.release();
        self.ending_sessions
            .retain(|(_, open)| open.strong_count() > 0);
        self.ending_sessions
            .push((key.0.clone(), Arc::downgrade(&open)));
        Some(open)
    }

    fn find(&self, tree: &TreeRef, epoch: Epoch) -> Result<Arc<AgentSession>> {
        let found = self.sessions.get(&(tree.clone(), epoch)).cloned();
        found.ok_or_else(|| self.ended_error(tree, epoch))
    }

    fn ended_error(&self, tree: &TreeRef, epoch: Epoch) -> Error {
        if self.dropped_trees.contains(tree) {
            return volume_lost_error(tree);
        }
        if self.fenced_sessions.contains(&(tree.clone(), epoch)) {
            let text = match tree {
                TreeRef::Volume(id) => format!("another agent writes volume {id} now"),
                TreeRef::Home(path) => format!("another agent writes {path} now"),
            };
            return Error::new(ErrorCode::Fenced, text);
        }
        let text = format!("no session of epoch {epoch} with {tree:?}; open the tree again");
        Error::new(ErrorCode::SessionUnknown, text)
    }

    fn keys_where(
        &self,
        wanted: impl Fn(&(TreeRef, Epoch), &AgentSession) -> bool,
    ) -> Vec<(TreeRef, Epoch)> {
        let all = self.sessions.iter();
        all.filter(|(key, open)| wanted(key, open))
            .map(|(key, _)| key.clone())
            .collect()
    }

    fn take_where(
        &mut self,
        wanted: impl Fn(&(TreeRef, Epoch), &AgentSession) -> bool,
    ) -> Vec<Arc<AgentSession>> {
        let keys = self.keys_where(wanted);
        keys.iter()
            .filter_map(|key| self.take_session(key))
            .collect()
    }
}

impl AgentSession {
    fn right(&self) -> Right {
        if self.is_writable {
            Right::Write
        } else {
            Right::Read
        }
    }

    /// Waits until the batch before this one in the agent's chain has run, as `is_here` tells by
    /// the last one that did.
    async fn wait_for_turn(
        &self,
        after: u64,
        sequence: u64,
        is_here: impl Fn(u64) -> bool,
    ) -> Result<()> {
        let mut last = self.last_chained_batch.subscribe();
        let waiting = last.wait_for(|last| is_here(*last));
        let turn = tokio::time::timeout(IN_PROGRESS_AFTER, waiting).await;
        match turn {
            Ok(Ok(_)) => Ok(()),
            _ if self.is_chain_running.load(Ordering::Acquire) => Err(running_error(sequence)),
            _ => {
                let text = format!("batch {sequence} waits for batch {after}; send both again");
                Err(Error::new(ErrorCode::Busy, text))
            }
        }
    }

    /// Runs each operation, of the agent's chain only those before the first that fails; `Err`
    /// when the session ended before all ran.
    fn run_batch(
        &self,
        is_in_chain: bool,
        caller: bafs_proto::file_op::Caller,
        (ops, given): (&[FileOp], &[AssignedNumbers]),
        data: &[u8],
        full_disk: &DiskFullFlag,
    ) -> Result<(Vec<FileResult>, Bytes), ()> {
        let mut results = Vec::with_capacity(ops.len());
        let (mut out, mut named) = (Buffer::with_capacity(read_bytes_max(ops)), 0);
        let mut given = given.iter().peekable();
        {
            let guard = self.session.read().unwrap_or_else(PoisonError::into_inner);
            guard.as_ref().ok_or(())?.begin_reads(ops);
        }
        for (place, op) in ops.iter().enumerate() {
            let guard = self.session.read().unwrap_or_else(PoisonError::into_inner);
            let session = guard.as_ref().ok_or(())?;
            let numbers = given.next_if(|given| given.op_index as usize == place);
            let is_behind = is_in_chain && self.has_chain_failed.load(Ordering::Acquire);
            let result = match numbers {
                // That is only asked, and tells why the chain failed.
                _ if is_behind && *op != FileOp::StatFs => {
                    Err(Errno(nix::errno::Errno::ECANCELED as i32))
                }
                _ if !has_room_for(op, out.len(), named) => {
                    Err(Errno(nix::errno::Errno::E2BIG as i32))
                }
                None => session.run(caller, op, data, &mut out),
                Some(AssignedNumbers { ino, handle, .. }) => {
                    session.run_numbered((caller, op, data), (*ino, *handle), &mut out)
                }
            };
            if has_no_space(op, &result) {
                let (bytes, files) = session.disk_free();
                full_disk.note_no_space(FreeSpace::reported(bytes, files));
            }
            if is_in_chain && !is_complete(op, &result) {
                self.has_chain_failed.store(true, Ordering::Release);
            }
            named += batch_replay::name_bytes(&result);
            results.push(result);
        }
        Ok((results, out.freeze()))
    }

    /// Whether its operations run here: not if its tree was handed over to its agent.
    fn is_served(&self) -> bool {
        !self.session.try_read().is_ok_and(|it| it.is_none())
    }

    /// Closes everything, after what runs at this moment.
    fn end(&self) {
        drop(
            self.session
                .write()
                .unwrap_or_else(PoisonError::into_inner)
                .take(),
        );
    }
}

/// Whether an operation did all that it was asked for.
fn is_complete(op: &FileOp, result: &FileResult) -> bool {
    match (op, result) {
        (FileOp::Write { data, .. }, Ok(reply)) => {
            let length = u64::from(data.length);
            *reply == FileReply::Written { length }
        }
        (_, result) => result.is_ok(),
    }
}

/// Whether an operation found no space; a write then may have done a part.
fn has_no_space(op: &FileOp, result: &FileResult) -> bool {
    match result {
        Ok(_) => matches!(op, FileOp::Write { .. }) && !is_complete(op, result),
        Err(errno) => errno.0 == nix::errno::Errno::ENOSPC as i32,
    }
}

/// Ends sessions off the async threads: closing may wait for an operation that runs.
async fn end_sessions(sessions: Vec<Arc<AgentSession>>) {
    if sessions.is_empty() {
        return;
    }
    let closing = move || sessions.iter().for_each(|session| session.end());
    if let Err(error) = tokio::task::spawn_blocking(closing).await {
        tracing::error!(%error, "closing tree sessions failed");
    }
}

fn volume_lost_error(tree: &TreeRef) -> Error {
    Error::new(ErrorCode::VolumeLost, format!("{tree:?} was deleted"))
}

fn running_error(sequence: u64) -> Error {
    let text = format!("batch {sequence}, or one before it, still runs");
    Error::new(ErrorCode::InProgress, text)
}

fn interrupted_error() -> Error {
    Error::new(
        ErrorCode::ServerFault,
        "the server stopped while the batch ran",
    )
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::{AgentId, VolumeId};

    use super::*;

    fn writer(resumes: Option<u64>) -> OpenTree {
        OpenTree {
            tree: TreeRef::Volume(VolumeId(1)),
            agent: AgentId::random(),
            writable: true,
            yields: false,
            resumed_incarnation: resumes,
        }
    }

    #[tokio::test]
    #[expect(clippy::await_holding_lock, reason = "an operation that hangs does so")]
    async fn a_writer_waits_for_operations_of_expired_sessions() {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::open(directory.path(), None).unwrap();
        let sessions = TreeSessions::new(1, Counters::default());
        let opened = sessions.open(tree.clone(), writer(None)).await.unwrap();
        let call = writer(Some(opened.machine_incarnation));
        let hanging = sessions.lock().find(&call.tree, opened.epoch).unwrap();
        let operation = hanging.session.read().unwrap();
        let late = clock::now().plus_ms(LEASE_MS + 1);
        let sweeper = sessions.clone();
        let sweep = tokio::spawn(async move { sweeper.sweep(late).await });
        while !sessions.is_empty() {
            tokio::task::yield_now().await;
        }
        let mut again = std::pin::pin!(sessions.open(tree, call));
        let first = std::future::poll_fn(|cx| std::task::Poll::Ready(again.as_mut().poll(cx)));
        assert!(first.await.is_pending(), "an old operation still runs");
        drop(operation);
        drop(hanging);
        again.await.unwrap();
        sweep.await.unwrap();
    }

    fn stat_root(epoch: Epoch, sequence: u64) -> RunFileOps {
        RunFileOps {
            tree: writer(None).tree,
            epoch,
            sequence,
            after_sequence: None,
            caller: bafs_proto::file_op::Caller::default(),
            ops: vec![FileOp::GetAttr {
                ino: bafs_proto::ids::InodeNo::ROOT,
                handle: None,
            }],
            assigned_numbers: Vec::new(),
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    #[expect(clippy::await_holding_lock, reason = "an operation that hangs does so")]
    async fn a_hanging_cheap_batch_is_reported_in_progress() {
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::open(directory.path(), None).unwrap();
        let sessions = TreeSessions::new(1, Counters::default());
        let open = OpenTree {
            writable: false,
            ..writer(None)
        };
        let hanging = sessions.open(tree.clone(), open.clone()).await.unwrap();
        let other = sessions.open(tree, open.clone()).await.unwrap();
        let found = sessions.lock().find(&open.tree, hanging.epoch).unwrap();
        #[expect(clippy::readonly_write_lock, reason = "whoever reads is to wait")]
        let disk = found.session.write().unwrap();
        let nothing = Bytes::new();
        let told = sessions.run(stat_root(hanging.epoch, 1), nothing.clone());
        let (told, beside) = tokio::join!(told, async {
            sessions
                .run(stat_root(other.epoch, 1), nothing.clone())
                .await
        });
        assert_eq!(told.unwrap_err().code, ErrorCode::InProgress);
        assert!(beside.unwrap().0.results[0].is_ok());
        drop(disk);
        let ran = sessions.run(stat_root(hanging.epoch, 1), nothing).await;
        assert!(ran.unwrap().0.results[0].is_ok(), "asked again");
    }

    #[tokio::test]
    async fn hanging_sessions_do_not_starve_others_of_descriptors() {
        let limit = rustix::process::Rlimit {
            current: Some(256),
            maximum: Some(256),
        };
        rustix::process::setrlimit(rustix::process::Resource::Nofile, limit).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let tree = Tree::open(directory.path(), None).unwrap();
        let sessions = TreeSessions::new(1, Counters::default());
        let open = async |number| {
            let name = TreeRef::Volume(VolumeId(number));
            let call = OpenTree {
                tree: name.clone(),
                ..writer(None)
            };
            let opened = sessions.open(tree.clone(), call).await.unwrap();
            let session = sessions.lock().find(&name, opened.epoch).unwrap();
            (session, opened)
        };
        let mut hanging = Vec::new();
        for number in 0..12 {
            hanging.push(open(number).await.0);
        }
        let operations: Vec<_> = hanging
            .iter()
            .map(|one| one.session.read().unwrap())
            .collect();
        let late = clock::now().plus_ms(LEASE_MS + 1);
        let sweeper = sessions.clone();
        let sweep = tokio::spawn(async move { sweeper.sweep(late).await });
        while !sessions.is_empty() {
            tokio::task::yield_now().await;
        }
        // What the former kept is kept anew: twice as much would be more than there is.
        for number in 12..24 {
            open(number).await;
        }
        let (_, last) = open(24).await;
        let call = RunFileOps {
            tree: TreeRef::Volume(VolumeId(24)),
            epoch: last.epoch,
            sequence: 1,
            after_sequence: None,
            caller: bafs_proto::file_op::Caller {
                uid: 0,
                gid: 0,
                pid: 0,
            },
            ops: vec![FileOp::OpenDirectory {
                ino: bafs_proto::ids::InodeNo::ROOT,
            }],
            assigned_numbers: Vec::new(),
        };
        let (ran, _) = sessions.run(call, Bytes::new()).await.unwrap();
        assert!(ran.results[0].is_ok(), "{:?}", ran.results);
        drop(operations);
        drop(hanging);
        sweep.await.unwrap();
    }
}
