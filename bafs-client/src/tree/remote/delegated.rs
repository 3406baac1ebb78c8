//! Answers for the one writer of a volume before its server has run the operations. What may be
//! answered is decided in `logic/delegation.rs`; `shipping.rs` brings it to the server.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bafs_proto::ErrorCode;
use bafs_proto::file_op::{Caller, Errno, FileOp, FileReply, FileResult, TreeStat};
use bafs_proto::ids::InodeNo;
use bafs_proto::limits::DIRECTORY_BYTES_MAX;
use bytes::Bytes;
use tokio::sync::{Notify, watch};

use super::{Session, Trouble};
use crate::clock;
use crate::errno::errno_of;
use crate::limits::{BATCH_BYTES, BATCH_OPS_MAX, BATCHES_MAX, DIRECTORY_PAGES_MAX, LOG_OPS_MAX};
use crate::logic::delegation::{Asked, Decision, Delegation, shuts};
use crate::logic::learning::changes;
use crate::logic::log::Room;
use crate::logic::questions::Question;
use crate::memory::LogShare;
use crate::tree::Done;

/// How often an operation is decided about again because its session lacked something.
const ROUNDS_MAX: usize = 8;

/// What of a program's work an agent's death does not lose, once the program was told of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Promise {
    /// What it synced: enough where the agent's death ends the program, which then runs again.
    Synced,
    /// What it closed too, and each change of names and attributes.
    Closed,
}

/// What a session with a delegation has beside it.
#[derive(Debug)]
pub(super) struct Delegated {
    state: Mutex<State>,
    promise: Promise,
    /// There may be something to send.
    pub(super) wake: Notify,
    /// All before this position of the log has run.
    pub(super) settled: watch::Sender<u64>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) delegation: Delegation,
    /// What its log takes of the memory for all.
    share: LogShare,
    held: Vec<Held>,
    /// References that the kernel dropped, to be told when all before a position has run.
    pub(super) forgets: VecDeque<(u64, InodeNo, u64)>,
    /// Somebody waits for this position.
    wanted: u64,
    /// Batches on their way.
    pub(super) under_way: usize,
    /// What the volume held, and its disk, after the latest batch that was answered.
    pub(super) latest: Option<TreeStat>,
}

/// An answer that is held back.
pub(super) struct Held {
    done: Done,
    result: FileResult,
    until: Until,
}

/// What an answer waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Until {
    /// Nothing.
    Now,
    /// That the log is not full any more.
    Room,
    /// That all before a position of the log has run.
    Ran(u64),
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "State({:?})", self.delegation.log)
    }
}

impl State {
    /// Whether an answer may go.
    fn is_over(&self, until: Until) -> bool {
        match until {
            Until::Now => true,
            Until::Room => !self.is_full(),
            Until::Ran(position) => self.delegation.log.settled() >= position,
        }
    }

    /// Takes out the answers that may go now.
    pub(super) fn let_go(&mut self) -> Vec<Held> {
        let _ = self.is_full();
        let all = std::mem::take(&mut self.held);
        let (over, held) = all.into_iter().partition(|held| self.is_over(held.until));
        self.held = held;
        over
    }

    fn is_full(&self) -> bool {
        let log = &self.delegation.log;
        let ops = log.end() - log.settled();
        // Counted at each look, also where it does not matter.
        self.share.is_too_much(ops, log.bytes()) || ops > LOG_OPS_MAX
    }

    /// Whether a batch should go now: a small one waits while others are on their way, so that
    /// more travels with it.
    pub(super) fn should_send(&self) -> bool {
        let log = &self.delegation.log;
        let (ops, bytes) = log.unsent();
        let is_large = bytes >= BATCH_BYTES as u64 / 2 || ops >= BATCH_OPS_MAX as u64 / 2;
        let is_wanted = self.wanted > log.sent();
        ops > 0 && self.under_way < BATCHES_MAX && (self.under_way == 0 || is_large || is_wanted)
    }
}

impl Held {
    pub(super) fn answer(self) {
        (self.done)(self.result, &[]);
    }

    pub(super) fn refuse(self) {
        (self.done)(Err(errno_of(ErrorCode::VolumeLost)), &[]);
    }
}

impl Delegated {
    fn new(promise: Promise) -> Self {
        Self {
            state: Mutex::default(),
            promise,
            wake: Notify::new(),
            settled: watch::Sender::new(0),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        // No holder leaves what it changes half-changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the answer to an operation waits for that appended what ends at this position.
    fn until(&self, op: &FileOp, appended: Option<u64>) -> Until {
        let has_no_close = matches!(
            op,
            FileOp::MakeDirectory { .. }
                | FileOp::Unlink { .. }
                | FileOp::Rename { .. }
                | FileOp::SetAttr { handle: None, .. }
        );
        match appended {
            // Nobody waits for the answer to a release.
            None => Until::Now,
            Some(_) if matches!(op, FileOp::Release { .. }) => Until::Now,
            Some(end) if has_no_close && self.promise == Promise::Closed => Until::Ran(end),
            Some(_) => Until::Room,
        }
    }

    /// Whether the close of a file has something to wait for.
    pub(super) fn close_waits(&self) -> bool {
        self.promise == Promise::Closed
    }
}

impl Session {
    /// Learns what a delegation begins with.
    pub(super) async fn begin_delegation(&self, promise: Promise) -> Delegated {
        let own = Delegated::new(promise);
        let caller = Caller::default();
        let (free, _) = self.run_one(caller, FileOp::StatFs, Bytes::new()).await;
        let (ino, handle) = (InodeNo::ROOT, None);
        let op = FileOp::GetAttr { ino, handle };
        let (root, _) = self.run_one(caller, op, Bytes::new()).await;
        {
            let delegation = &mut own.state().delegation;
            delegation.has_free(room_of(free.as_ref().ok()), 0);
            if let Ok(FileReply::Attr(attr)) = root {
                delegation.image.see(&attr);
            }
        }
        own
    }

    /// The decision, and where the log ends now if it has grown.
    fn decide(
        &self,
        own: &Delegated,
        (caller, op, data): (Caller, &FileOp, &[u8]),
        may_list: bool,
    ) -> (Decision, Option<u64>) {
        let now = clock::time_of_day();
        let asked = Asked {
            caller,
            op,
            data,
            now,
        };
        let mut state = own.state();
        let before = state.delegation.log.end();
        let decision = state.delegation.decide(&mut self.known(), asked, may_list);
        let end = state.delegation.log.end();
        let appended = (end > before).then_some(end);
        if appended.is_some() && state.should_send() {
            drop(state);
            own.wake.notify_one();
        }
        (decision, appended)
    }

    /// Answers at once if that may be; otherwise gives back what it was not answered with.
    pub(super) fn answer(
        &self,
        own: &Delegated,
        caller: Caller,
        op: &FileOp,
        data: &[u8],
        done: Done,
    ) -> Option<(Decision, Done)> {
        match self.decide(own, (caller, op, data), true) {
            (Decision::Answered(result), appended) => {
                let until = own.until(op, appended);
                self.answer_when(own, until, done, result);
                None
            }
            (decision, _) => Some((decision, done)),
        }
    }

    /// Answers now, or has it answered when that may be.
    fn answer_when(&self, own: &Delegated, until: Until, done: Done, result: FileResult) {
        if until == Until::Now {
            return done(result, &[]);
        }
        let mut state = own.state();
        if state.is_over(until) {
            drop(state);
            return done(self.unless_lost(result), &[]);
        }
        state.held.push(Held {
            done,
            result,
            until,
        });
        if let Until::Ran(position) = until {
            state.wanted = state.wanted.max(position);
        }
        drop(state);
        own.wake.notify_one();
        if self.fate.loss().is_some() {
            self.refuse_held(own);
        }
    }

    /// A program closes a file: what it did with it has run when this is answered.
    pub(super) fn close_file(&self, own: &Delegated, ino: InodeNo, done: Done) {
        let busy = own.state().delegation.log.busy(ino);
        let until = busy.map_or(Until::Now, Until::Ran);
        // What has run may have failed.
        let result = self.unless_lost(Ok(FileReply::Done));
        self.answer_when(own, until, done, result);
    }

    fn unless_lost(&self, result: FileResult) -> FileResult {
        match self.fate.loss() {
            Some(_) => Err(errno_of(ErrorCode::VolumeLost)),
            None => result,
        }
    }

    /// Answers with the server's help.
    pub(super) async fn answer_later(
        &self,
        own: &Delegated,
        (caller, op, data): (Caller, FileOp, Bytes),
        mut decision: Decision,
    ) -> (FileResult, Bytes) {
        let (mut may_list, mut appended) = (true, None);
        for round in 0.. {
            match decision {
                Decision::Answered(result) => {
                    let until = own.until(&op, appended);
                    return (self.wait_until(own, until, result).await, Bytes::new());
                }
                Decision::AskAfter(position) => {
                    self.wait_settled(own, position).await;
                    break;
                }
                _ if round == ROUNDS_MAX => break,
                Decision::List(directory) => {
                    may_list = false;
                    self.list(own, directory).await;
                }
                Decision::Provide => {
                    // What a restarted server does not have yet may have to be made again first.
                    self.wait_for_all(own).await;
                    if let Err(errno) = self.provide_all(&op).await {
                        return (Err(errno), Bytes::new());
                    }
                }
            }
            (decision, appended) = self.decide(own, (caller, &op, &data), may_list);
        }
        own.state().delegation.set_aside(&op);
        if changes(&op) {
            // What changes something goes when all before it has run.
            self.wait_for_all(own).await;
        }
        let mut round = 0;
        loop {
            round += 1;
            let question = self.begin_asking(own, &op, round > 1).await;
            // From here on nobody opens what this removes without the server.
            let (mut result, body) = self.run_one(caller, op.clone(), data.clone()).await;
            let unsettled = question.unsettled();
            let is_true = self.end_asking(own, (caller, &op, question), &mut result);
            if !is_true && let Some(position) = unsettled {
                self.wait_settled(own, position).await;
                return (self.attr_again(own, caller, result).await, body);
            }
            if is_true || round >= ROUNDS_MAX || !asks_about_directory(&op, &result) {
                return (result, body);
            }
            own.state().delegation.set_aside(&op);
        }
    }

    fn end_asking(
        &self,
        own: &Delegated,
        ended: (Caller, &FileOp, Question),
        result: &mut FileResult,
    ) -> bool {
        let delegation = &mut own.state().delegation;
        delegation.end_asking(&self.known(), ended, result)
    }

    /// The attributes in an answer as they are now. What programs do meanwhile the kernel heeds
    /// itself: it does not believe attributes that were asked for before a change.
    async fn attr_again(&self, own: &Delegated, caller: Caller, found: FileResult) -> FileResult {
        let Ok(FileReply::Attr(attr)) = &found else {
            return found;
        };
        let (ino, handle) = (attr.ino, None);
        let op = FileOp::GetAttr { ino, handle };
        own.state().delegation.set_aside(&op);
        let question = self.begin_asking(own, &op, false).await;
        let (mut result, _) = self.run_one(caller, op.clone(), Bytes::new()).await;
        self.end_asking(own, (caller, &op, question), &mut result);
        // It was found: the kernel counts a reference, whatever became of it.
        result.or(found)
    }

    /// A question begins; if it `is_urgent`, when the server has run all that concerns its file, so
    /// that the answer is true unless something changes meanwhile.
    async fn begin_asking(&self, own: &Delegated, op: &FileOp, is_urgent: bool) -> Question {
        loop {
            let position = {
                let delegation = &mut own.state().delegation;
                let busy = match op {
                    FileOp::GetAttr { ino, .. } if is_urgent => delegation.log.busy(*ino),
                    _ => None,
                };
                match busy.filter(|_| self.fate.loss().is_none()) {
                    None => return delegation.begin_asking(&self.known(), op),
                    Some(position) => position,
                }
            };
            self.wait_settled(own, position).await;
        }
    }

    /// Waits until an answer may go.
    async fn wait_until(&self, own: &Delegated, until: Until, result: FileResult) -> FileResult {
        match until {
            Until::Now => return result,
            Until::Ran(position) => self.wait_settled(own, position).await,
            Until::Room => loop {
                let settled = {
                    let state = own.state();
                    if state.is_over(until) {
                        return result;
                    }
                    state.delegation.log.settled()
                };
                if self.fate.loss().is_some() {
                    break;
                }
                self.wait_settled(own, settled + 1).await;
            },
        }
        self.unless_lost(result)
    }

    /// Waits until all that is in the log now has run.
    pub(super) async fn wait_for_all(&self, own: &Delegated) {
        let end = own.state().delegation.log.end();
        self.wait_settled(own, end).await;
    }

    /// Before a file or directory loses a name, gets more than all of which are known here, or may
    /// not be opened any more, the server must have it open if the program has.
    pub(super) async fn open_unseen(&self, op: &FileOp) -> Result<(), Errno> {
        let touched = match op {
            FileOp::Unlink { parent, name } | FileOp::RemoveDirectory { parent, name } => {
                self.known().named(*parent, name)
            }
            FileOp::Rename {
                new_parent,
                new_name,
                ..
            } => self.known().named(*new_parent, new_name),
            FileOp::SetAttr { ino, change, .. } if shuts(change) => Some(*ino),
            FileOp::MakeLink { ino, .. } => Some(*ino),
            _ => None,
        };
        let Some(ino) = touched.filter(|_| self.is_sole_writer()) else {
            return Ok(());
        };
        loop {
            let Some(handle) = self.known().unseen(ino) else {
                return Ok(());
            };
            let provided = self.provide_all(&FileOp::Release { handle }).await;
            // It may have been closed meanwhile.
            if self.known().opening(handle).is_some() {
                provided?;
            }
        }
    }

    /// Gives the session all that an operation names.
    async fn provide_all(&self, op: &FileOp) -> Result<(), Errno> {
        let deadline = self.server.deadline();
        loop {
            let link = self.link();
            match self.translate(&link, op, deadline).await {
                Ok(_) => return Ok(()),
                Err(Trouble::Forgotten { .. }) => match self.resume(&link, deadline).await {
                    Ok(()) => {}
                    Err(trouble) => return Err(errno_of_trouble(trouble)),
                },
                Err(trouble) => return Err(errno_of_trouble(trouble)),
            }
        }
    }

    /// Waits until all before a position has run, or the volume is lost.
    pub(super) async fn wait_settled(&self, own: &Delegated, position: u64) {
        let mut settled = own.settled.subscribe();
        if *settled.borrow_and_update() >= position {
            return;
        }
        {
            let mut state = own.state();
            state.wanted = state.wanted.max(position);
        }
        own.wake.notify_one();
        let waiting = settled.wait_for(|settled| *settled >= position);
        let _ = self.fate.while_there(waiting).await;
    }

    /// The volume is lost: nobody will make room for answers that are held back.
    pub(super) fn refuse_held(&self, own: &Delegated) {
        let held = std::mem::take(&mut own.state().held);
        held.into_iter().for_each(Held::refuse);
    }

    /// Learns all names of a directory, if they are not too many.
    async fn list(&self, own: &Delegated, directory: InodeNo) {
        let begun = loop {
            let position = {
                let delegation = &mut own.state().delegation;
                // What is appended from now on is told to the listing.
                match delegation.log.busy(directory) {
                    Some(position) if self.fate.loss().is_none() => position,
                    _ => break delegation.image.begin_listing(directory),
                }
            };
            self.wait_settled(own, position).await;
        };
        let names = self.names(directory).await;
        let image = &mut own.state().delegation.image;
        image.end_listing(directory, begun, names);
    }

    async fn names(&self, directory: InodeNo) -> Option<BTreeSet<Vec<u8>>> {
        let ask = |op| self.run_one(Caller::default(), op, Bytes::new());
        let op = FileOp::OpenDirectory { ino: directory };
        let Ok(FileReply::Opened { handle, .. }) = ask(op).await.0 else {
            return None;
        };
        let (mut names, mut cookie) = (BTreeSet::new(), 0);
        let mut is_whole = false;
        for _ in 0..DIRECTORY_PAGES_MAX {
            let op = FileOp::ReadDirectory {
                handle,
                cookie,
                bytes_max: DIRECTORY_BYTES_MAX,
                plus: false,
            };
            let Ok(FileReply::Entries(entries)) = ask(op).await.0 else {
                break;
            };
            let Some(last) = entries.last() else {
                is_whole = true;
                break;
            };
            cookie = last.cookie;
            names.extend(entries.into_iter().map(|entry| entry.name));
        }
        let _ = ask(FileOp::ReleaseDirectory { handle }).await;
        is_whole.then_some(names)
    }

    /// The kernel dropped references; the server is told when nothing on its way needs them.
    pub(super) fn forget_later(&self, own: &Delegated, ino: InodeNo, count: u64) -> usize {
        let mut state = own.state();
        let end = state.delegation.log.end();
        if end > state.delegation.log.settled() {
            state.forgets.push_back((end, ino, count));
            return 0;
        }
        self.forget_now(&mut state, ino, count)
    }

    pub(super) fn forget_now(&self, state: &mut State, ino: InodeNo, count: u64) -> usize {
        let queued = self.forget(ino, count);
        if !self.known().has(ino) {
            state.delegation.image.forget(ino);
        }
        queued
    }
}

/// Whether an answer is the attributes of a directory, to a question that changes nothing. The
/// kernel believes them until it hears of another change, so they must be true when it gets them.
fn asks_about_directory(op: &FileOp, result: &FileResult) -> bool {
    let asks = matches!(op, FileOp::GetAttr { .. });
    asks && matches!(result, Ok(FileReply::Attr(attr)) if attr.is_directory())
}

pub(super) fn room_of(stat: Option<&FileReply>) -> Room {
    match stat {
        Some(FileReply::StatFs(stat)) => Room {
            bytes: stat.free_bytes,
            files: stat.free_files,
        },
        _ => Room::default(),
    }
}

pub(super) fn errno_of_trouble(trouble: Trouble) -> Errno {
    match trouble {
        Trouble::Refused(errno) => errno,
        Trouble::Failed(code) => errno_of(code),
        Trouble::Forgotten { .. } | Trouble::NotThere(_) => errno_of(ErrorCode::SessionUnknown),
    }
}
