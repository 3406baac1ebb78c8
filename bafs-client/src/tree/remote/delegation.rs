//! Answers for the one writer of a volume before its server has run the operations. What may be
//! answered is decided in `logic/delegation.rs`; `log_shipping.rs` brings it to the server.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};

use bafs_proto::ErrorCode;
use bafs_proto::file_op::{Caller, Errno, FileOp, FileReply, FileResult, TreeStat};
use bafs_proto::ids::{Epoch, InodeNo};
use bytes::Bytes;
use tokio::runtime::Handle;
use tokio::sync::{Notify, watch};

use super::begun_task::BegunTask;
use super::{RemoteSession, SessionFailure};
use crate::clock;
use crate::errno::errno_of;
use crate::limits::{BATCH_BYTES, BATCH_OPS_MAX, BATCHES_MAX, LOG_OPS_MAX};
use crate::logic::attribute_updates::is_change;
use crate::logic::delegation::{Decision, DelegatedRequest, Delegation, can_block_opens};
use crate::logic::inflight_queries::InflightQuery;
use crate::logic::operation_log::Space;
use crate::logic::small_files::{FetchAhead, FilesToRead};
use crate::memory::{self, LogMemoryShare};
use crate::tree::Completion;

/// How often an operation is decided about again because its session lacked something.
const DECISION_ROUNDS_MAX: usize = 8;

/// What of a program's work an agent's death does not lose, once the program was told of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    /// What it synced: enough where the agent's death ends the program, which then runs again.
    OnSync,
    /// What it closed too, and each change of names and attributes.
    OnClose,
}

/// What became of an operation that the server was not asked about.
pub(super) enum EarlyAnswer {
    /// It was answered. These files should be read meanwhile.
    Given(FilesToRead),
    /// It was not, for this reason.
    Missing(Decision, Completion),
}

/// What a session with a delegation has beside it.
#[derive(Debug)]
pub(super) struct SessionDelegation {
    state: Mutex<DelegationState>,
    durability: Durability,
    /// There may be something to send.
    pub(super) wake: Notify,
    /// What sends the log.
    pub(super) shipping_task: OnceLock<Weak<BegunTask>>,
    /// All before this position of the log has run,
    pub(super) acknowledged: watch::Sender<u64>,
    /// and all before this one is on its way.
    pub(super) sent: watch::Sender<u64>,
    /// Held by whoever fetches ahead, mostly.
    pub(super) fetch_lock: Arc<tokio::sync::Mutex<()>>,
    pub(super) runtime: Handle,
}

#[derive(Default)]
pub(super) struct DelegationState {
    pub(super) delegation: Delegation,
    /// What its log takes of the memory for all.
    memory_share: LogMemoryShare,
    pending_answers: Vec<PendingAnswer>,
    /// References that the kernel dropped, to be told when all before a position has run.
    pub(super) pending_forgets: VecDeque<(u64, InodeNo, u64)>,
    /// Somebody waits for this position.
    pub(super) wanted_position: u64,
    /// Whether what nobody waits for is sent later, together with what somebody does.
    holds_back: bool,
    /// Batches on their way.
    pub(super) inflight_batches: usize,
    /// The last of them: the session that it went to, and its number there.
    pub(super) last_batch: Option<(Epoch, u64)>,
    /// What the volume held, and its disk, after the latest batch that was answered.
    pub(super) latest_stat: Option<TreeStat>,
}

/// An answer that is held back.
pub(super) struct PendingAnswer {
    done: Completion,
    result: FileResult,
    condition: AnswerCondition,
}

/// What an answer waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum AnswerCondition {
    /// Nothing.
    Immediately,
    /// That the log is not full any more.
    LogSpace,
    /// That all before a position of the log has run.
    Acknowledged(u64),
}

impl std::fmt::Debug for DelegationState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "State({:?})", self.delegation.log)
    }
}

impl DelegationState {
    /// Whether an answer may go.
    pub(super) fn is_satisfied(&self, until: AnswerCondition) -> bool {
        match until {
            AnswerCondition::Immediately => true,
            AnswerCondition::LogSpace => !self.is_full(),
            AnswerCondition::Acknowledged(position) => {
                self.delegation.log.acknowledged_position() >= position
            }
        }
    }

    /// Takes out the answers that may go now.
    pub(super) fn take_ready_answers(&mut self) -> Vec<PendingAnswer> {
        let _ = self.is_full();
        let all = std::mem::take(&mut self.pending_answers);
        let (over, held) = all
            .into_iter()
            .partition(|held| self.is_satisfied(held.condition));
        self.pending_answers = held;
        over
    }

    fn is_full(&self) -> bool {
        let log = &self.delegation.log;
        let ops = log.end_position() - log.acknowledged_position();
        // Counted at each look, also where it does not matter.
        self.memory_share.is_over_budget(ops, log.bytes()) || ops > LOG_OPS_MAX
    }

    /// Whether a batch should go now: a small one waits while others are on their way, so that
    /// more travels with it. Where a close will wait for the server, it waits for that in any case:
    /// file, data and close are one message then, and not three.
    pub(super) fn is_batch_due(&self) -> bool {
        let log = &self.delegation.log;
        let (ops, bytes) = log.unsent();
        let is_large = bytes >= BATCH_BYTES as u64 / 2 || ops >= BATCH_OPS_MAX as u64 / 2;
        let is_wanted = self.wanted_position > log.sent_position();
        ops > 0
            && self.inflight_batches < BATCHES_MAX
            && (is_large || is_wanted || (self.inflight_batches == 0 && !self.holds_back))
    }
}

impl PendingAnswer {
    pub(super) fn send(self) {
        (self.done)(self.result, &[]);
    }

    pub(super) fn send_failure(self) {
        (self.done)(Err(errno_of(ErrorCode::VolumeLost)), &[]);
    }
}

impl SessionDelegation {
    fn new(durability: Durability) -> Self {
        let state = DelegationState {
            holds_back: durability == Durability::OnClose,
            ..DelegationState::default()
        };
        Self {
            state: Mutex::new(state),
            durability,
            wake: Notify::new(),
            shipping_task: OnceLock::new(),
            acknowledged: watch::Sender::new(0),
            sent: watch::Sender::new(0),
            fetch_lock: Arc::default(),
            runtime: Handle::current(),
        }
    }

    pub(super) fn lock_state(&self) -> MutexGuard<'_, DelegationState> {
        // No holder leaves what it changes half-changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends what was held back for a close that has not come.
    pub(super) fn send_held_back(&self) {
        let mut state = self.lock_state();
        if state.holds_back && state.delegation.log.unsent().0 > 0 {
            state.wanted_position = state.delegation.log.end_position();
            drop(state);
            self.wake.notify_one();
        }
    }

    /// Sends the log from this thread, for a program that waits until it has run: to wake another
    /// thread first takes as long as a message.
    pub(super) fn ship_here(&self) {
        let wake = || self.wake.notify_one();
        match self.shipping_task.get().and_then(Weak::upgrade) {
            Some(shipping) => shipping.wake_here(wake),
            None => wake(),
        }
    }

    /// What the answer to an operation waits for that appended what ends at this position.
    fn answer_condition(&self, op: &FileOp, appended: Option<u64>) -> AnswerCondition {
        let has_no_close = matches!(
            op,
            FileOp::MakeDirectory { .. }
                | FileOp::Unlink { .. }
                | FileOp::RemoveDirectory { .. }
                | FileOp::Rename { .. }
                | FileOp::SetAttr { handle: None, .. }
        );
        match appended {
            // Nobody waits for the answer to a release.
            None => AnswerCondition::Immediately,
            Some(_) if matches!(op, FileOp::Release { .. }) => AnswerCondition::Immediately,
            Some(end) if has_no_close && self.durability == Durability::OnClose => {
                AnswerCondition::Acknowledged(end)
            }
            Some(_) => AnswerCondition::LogSpace,
        }
    }

    /// Whether the close of a file has something to wait for.
    pub(super) fn has_blocking_close(&self) -> bool {
        self.durability == Durability::OnClose
    }
}

impl RemoteSession {
    /// Learns what a delegation begins with.
    pub(super) async fn begin_delegation(&self, durability: Durability) -> SessionDelegation {
        let own = SessionDelegation::new(durability);
        let caller = Caller::default();
        let (free, _) = self
            .run_operation(caller, FileOp::StatFs, Bytes::new())
            .await;
        let (ino, handle) = (InodeNo::ROOT, None);
        let op = FileOp::GetAttr { ino, handle };
        let (root, _) = self.run_operation(caller, op, Bytes::new()).await;
        {
            let delegation = &mut own.lock_state().delegation;
            delegation.limit_small_files(memory::blocks_bytes_max());
            delegation.set_free_space(free_space(free.as_ref().ok()), 0);
            if let Ok(FileReply::Attr(attr)) = root {
                delegation.metadata.store_attr(&attr);
            }
        }
        own
    }

    /// The decision, and where the log ends now if it has grown.
    fn decide(
        self: &Arc<Self>,
        own: &SessionDelegation,
        (caller, op, data): (Caller, &FileOp, &[u8]),
        may_fetch: bool,
    ) -> (Decision, Option<u64>) {
        let now = clock::time_of_day();
        let asked = DelegatedRequest {
            caller,
            op,
            data,
            now,
        };
        let mut state = own.lock_state();
        let before = state.delegation.log.end_position();
        let decision = state
            .delegation
            .decide(&mut self.inode_map(), asked, may_fetch);
        let end = state.delegation.log.end_position();
        let appended = (end > before).then_some(end);
        let dropped = state.delegation.take_dropped_references();
        let directories = state.delegation.take_directories_to_list();
        let is_due = appended.is_some() && state.is_batch_due();
        drop(state);
        if is_due {
            own.wake.notify_one();
        }
        for ino in dropped {
            self.forget_later(own, ino, 1);
        }
        self.fetch_ahead(own, FetchAhead::Directories(directories));
        (decision, appended)
    }

    /// Answers at once if that may be; otherwise gives back what it was not answered with.
    pub(super) fn answer_early(
        self: &Arc<Self>,
        own: &SessionDelegation,
        caller: Caller,
        op: &FileOp,
        data: &[u8],
        done: Completion,
    ) -> EarlyAnswer {
        match self.decide(own, (caller, op, data), true) {
            (Decision::Answer(result), appended) => {
                let until = own.answer_condition(op, appended);
                self.answer_after(own, until, done, result);
                EarlyAnswer::Given(FilesToRead::default())
            }
            (Decision::AnswerRead(data, files), _) => {
                done(read_reply(&data), &data);
                EarlyAnswer::Given(files)
            }
            (decision, _) => EarlyAnswer::Missing(decision, done),
        }
    }

    /// Answers now, or has it answered when that may be.
    fn answer_after(
        &self,
        own: &SessionDelegation,
        until: AnswerCondition,
        done: Completion,
        result: FileResult,
    ) {
        if until == AnswerCondition::Immediately {
            return done(result, &[]);
        }
        let mut state = own.lock_state();
        if state.is_satisfied(until) {
            drop(state);
            return done(self.fail_if_lost(result), &[]);
        }
        state.pending_answers.push(PendingAnswer {
            done,
            result,
            condition: until,
        });
        if let AnswerCondition::Acknowledged(position) = until {
            state.wanted_position = state.wanted_position.max(position);
        }
        drop(state);
        own.ship_here();
        if self.health.loss().is_some() {
            self.fail_pending_answers(own);
        }
    }

    /// A program closes a file: what it did with it has run when this is answered.
    pub(super) fn close_file(&self, own: &SessionDelegation, ino: InodeNo, done: Completion) {
        let busy = own.lock_state().delegation.log.last_position_of(ino);
        let until = busy.map_or(AnswerCondition::Immediately, AnswerCondition::Acknowledged);
        // What has run may have failed.
        let result = self.fail_if_lost(Ok(FileReply::Done));
        self.answer_after(own, until, done, result);
    }

    pub(super) fn fail_if_lost(&self, result: FileResult) -> FileResult {
        match self.health.loss() {
            Some(_) => Err(errno_of(ErrorCode::VolumeLost)),
            None => result,
        }
    }

    /// Answers with the server's help.
    pub(super) async fn answer_with_server(
        self: &Arc<Self>,
        own: &SessionDelegation,
        (caller, op, data): (Caller, FileOp, Bytes),
        mut decision: Decision,
    ) -> (FileResult, Bytes) {
        let (mut may_fetch, mut appended) = (true, None);
        for round in 0.. {
            match decision {
                Decision::Answer(result) => {
                    let until = own.answer_condition(&op, appended);
                    return (
                        self.wait_for_condition(own, until, result).await,
                        Bytes::new(),
                    );
                }
                Decision::QueryAfter(position) => {
                    let synced = self.sync_behind_log(own, (caller, &op), position).await;
                    if let Some(result) = synced {
                        return (result, Bytes::new());
                    }
                    self.wait_for_position(own, position).await;
                    break;
                }
                Decision::AnswerRead(data, files) => {
                    self.fetch_ahead(own, FetchAhead::Files(files));
                    return (read_reply(&data), data);
                }
                Decision::ReadFiles(files) => {
                    may_fetch = false;
                    let _turn = Arc::clone(&own.fetch_lock).try_lock_owned();
                    self.read_files(own, files).await;
                }
                _ if round >= DECISION_ROUNDS_MAX => break,
                Decision::ListDirectory(directory) => {
                    may_fetch = false;
                    self.cache_names(own, directory).await;
                }
                Decision::LearnAttr(ino) => self.learn_attr(own, (caller, &op), ino).await,
                Decision::AwaitFetch => drop(own.fetch_lock.lock().await),
                Decision::ProvideObjects => {
                    // What a restarted server does not have yet may have to be made again first.
                    self.wait_for_log(own).await;
                    if let Err(errno) = self.provide_objects(&op).await {
                        return (Err(errno), Bytes::new());
                    }
                }
            }
            (decision, appended) = self.decide(own, (caller, &op, &data), may_fetch);
        }
        own.lock_state().delegation.reserve_space(&op);
        if is_change(&op) {
            // What changes something goes when all before it has run.
            self.wait_for_log(own).await;
        }
        let mut round = 0;
        loop {
            round += 1;
            let question = self.begin_query(own, &op, round > 1).await;
            // From here on nobody opens what this removes without the server.
            let (mut result, body) = self.run_operation(caller, op.clone(), data.clone()).await;
            let unsettled = question.awaited_position();
            let is_true = self.end_query(own, (caller, &op, question), &mut result);
            if !is_true && let Some(position) = unsettled {
                self.wait_for_position(own, position).await;
                return (self.refresh_attr(own, caller, result).await, body);
            }
            if is_true || round >= DECISION_ROUNDS_MAX || !is_directory_query(&op, &result) {
                return (result, body);
            }
            own.lock_state().delegation.reserve_space(&op);
        }
    }

    pub(super) fn end_query(
        &self,
        own: &SessionDelegation,
        ended: (Caller, &FileOp, InflightQuery),
        result: &mut FileResult,
    ) -> bool {
        let delegation = &mut own.lock_state().delegation;
        delegation.end_query(&self.inode_map(), ended, result)
    }

    /// The attributes in an answer as they are now. What programs do meanwhile the kernel heeds
    /// itself: it does not believe attributes that were asked for before a change.
    async fn refresh_attr(
        &self,
        own: &SessionDelegation,
        caller: Caller,
        found: FileResult,
    ) -> FileResult {
        let Ok(FileReply::Attr(attr)) = &found else {
            return found;
        };
        // It was found: the kernel counts a reference, whatever became of it.
        let fetched = self.fetch_attr(own, caller, attr.ino).await;
        fetched.map_or(found, |attr| Ok(FileReply::Attr(attr)))
    }

    /// A question begins; if it `is_urgent`, when the server has run all that concerns its file, so
    /// that the answer is true unless something changes meanwhile.
    pub(super) async fn begin_query(
        &self,
        own: &SessionDelegation,
        op: &FileOp,
        is_urgent: bool,
    ) -> InflightQuery {
        loop {
            let position = {
                let delegation = &mut own.lock_state().delegation;
                let busy = match op {
                    FileOp::GetAttr { ino, .. } if is_urgent => {
                        delegation.log.last_position_of(*ino)
                    }
                    _ => None,
                };
                match busy.filter(|_| self.health.loss().is_none()) {
                    None => return delegation.begin_query(&self.inode_map(), op),
                    Some(position) => position,
                }
            };
            self.wait_for_position(own, position).await;
        }
    }

    /// Before a file or directory loses a name, gets more than all of which are known here, or may
    /// not be opened any more, the server must have it open if the program has.
    pub(super) async fn open_deferred_handles(&self, op: &FileOp) -> Result<(), Errno> {
        let touched = match op {
            FileOp::Unlink { parent, name } | FileOp::RemoveDirectory { parent, name } => {
                self.inode_map().inode_by_name(*parent, name)
            }
            FileOp::Rename {
                new_parent,
                new_name,
                ..
            } => self.inode_map().inode_by_name(*new_parent, new_name),
            FileOp::SetAttr { ino, change, .. } if can_block_opens(change) => Some(*ino),
            FileOp::MakeLink { ino, .. } => Some(*ino),
            _ => None,
        };
        let Some(ino) = touched.filter(|_| self.is_sole_writer()) else {
            return Ok(());
        };
        loop {
            let Some(handle) = self.inode_map().missing_handle(ino) else {
                return Ok(());
            };
            let provided = self.provide_objects(&FileOp::Release { handle }).await;
            // It may have been closed meanwhile.
            if self.inode_map().open_parameters(handle).is_some() {
                provided?;
            }
        }
    }

    /// Gives the session all that an operation names.
    async fn provide_objects(&self, op: &FileOp) -> Result<(), Errno> {
        let deadline = self.server.deadline();
        loop {
            let link = self.link();
            match self.translate(&link, op, deadline).await {
                Ok(_) => return Ok(()),
                Err(SessionFailure::SessionForgotten { .. }) => {
                    match self.reopen_session(&link, deadline).await {
                        Ok(()) => {}
                        Err(cause) => return Err(errno_of_failure(cause)),
                    }
                }
                Err(cause) => return Err(errno_of_failure(cause)),
            }
        }
    }

    /// The volume is lost: nobody will make room for answers that are held back.
    pub(super) fn fail_pending_answers(&self, own: &SessionDelegation) {
        let held = std::mem::take(&mut own.lock_state().pending_answers);
        held.into_iter().for_each(PendingAnswer::send_failure);
    }
}

fn read_reply(data: &Bytes) -> FileResult {
    // At most as many as were asked for.
    let length = data.len() as u32;
    Ok(FileReply::Read { length })
}

/// Whether an answer is the attributes of a directory, to a question that changes nothing. The
/// kernel believes them until it hears of another change, so they must be true when it gets them.
fn is_directory_query(op: &FileOp, result: &FileResult) -> bool {
    let asks = matches!(op, FileOp::GetAttr { .. });
    asks && matches!(result, Ok(FileReply::Attr(attr)) if attr.is_directory())
}

pub(super) fn free_space(stat: Option<&FileReply>) -> Space {
    match stat {
        Some(FileReply::StatFs(stat)) => Space {
            bytes: stat.free_bytes,
            files: stat.free_files,
        },
        _ => Space::default(),
    }
}

pub(super) fn errno_of_failure(failure: SessionFailure) -> Errno {
    match failure {
        SessionFailure::OperationRefused(errno) => errno,
        SessionFailure::CallFailed(code) => errno_of(code),
        SessionFailure::SessionForgotten { .. } | SessionFailure::FileMissing(_) => {
            errno_of(ErrorCode::SessionUnknown)
        }
    }
}
