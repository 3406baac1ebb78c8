//! Answers for the one writer of a volume before its server has run the operations, and brings them
//! there in their order. What may be answered is decided in `logic/delegation.rs`; what becomes of
//! operations that a restart of the server met on their way is found out in `settling.rs`.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bafs_proto::file_op::{BodyRange, Caller, Errno, FileOp, FileReply, FileResult};
use bafs_proto::ids::InodeNo;
use bafs_proto::limits::DIRECTORY_BYTES_MAX;
use bafs_proto::message::GivenNumbers;
use bafs_proto::{Error, ErrorCode};
use bytes::{Bytes, BytesMut};
use nix::libc;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;

use super::Done;
use super::remote::{Link, Session, Trouble};
use crate::clock;
use crate::errno::errno_of;
use crate::limits::{
    BATCH_BYTES, BATCH_OPS_MAX, BATCHES_MAX, DIRECTORY_PAGES_MAX, LOG_BYTES_MAX, LOG_OPS_MAX,
    NAMES_KNOWN_MAX,
};
use crate::logic::delegation::{Asked, Decision, Delegation};
use crate::logic::learning::changes;
use crate::logic::log::{Entry, Room};

/// How often an operation is decided about again because its session lacked something.
const ROUNDS_MAX: usize = 8;

/// What a session with a delegation has beside it.
#[derive(Debug)]
pub(super) struct Delegated {
    state: Mutex<State>,
    /// There may be something to send.
    wake: Notify,
    /// All before this position of the log has run.
    settled: watch::Sender<u64>,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) delegation: Delegation,
    /// Answers that are held back while the log is full.
    held: VecDeque<(Done, FileResult)>,
    /// References that the kernel dropped, to be told when all before a position has run.
    forgets: VecDeque<(u64, InodeNo, u64)>,
    /// Somebody waits for this position.
    wanted: u64,
    /// Batches on their way.
    under_way: usize,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "State({:?})", self.delegation.log)
    }
}

impl State {
    fn is_full(&self) -> bool {
        let log = &self.delegation.log;
        log.bytes() > LOG_BYTES_MAX || log.end() - log.settled() > LOG_OPS_MAX
    }

    /// Whether a batch should go now: a small one waits while others are on their way, so that
    /// more travels with it.
    fn should_send(&self) -> bool {
        let log = &self.delegation.log;
        let (ops, bytes) = log.unsent();
        let is_large = bytes >= BATCH_BYTES as u64 / 2 || ops >= BATCH_OPS_MAX as u64 / 2;
        let is_wanted = self.wanted > log.sent();
        ops > 0 && self.under_way < BATCHES_MAX && (self.under_way == 0 || is_large || is_wanted)
    }
}

/// A batch on its way.
pub(super) struct Sent {
    /// For each entry whether it was left out, because nothing of it is left to do.
    left_out: Vec<bool>,
    pub(super) answer: JoinHandle<Result<Vec<FileResult>, Trouble>>,
}

impl Delegated {
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::default(),
            wake: Notify::new(),
            settled: watch::Sender::new(0),
        }
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        // No holder leaves what it changes half-changed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Session {
    /// Learns what a delegation begins with.
    pub(super) async fn begin_delegation(&self) -> Delegated {
        let own = Delegated::new();
        let caller = Caller::default();
        let (free, _) = self.run_one(caller, FileOp::StatFs, Bytes::new()).await;
        let (ino, handle) = (InodeNo::ROOT, None);
        let op = FileOp::GetAttr { ino, handle };
        let (root, _) = self.run_one(caller, op, Bytes::new()).await;
        {
            let delegation = &mut own.state().delegation;
            delegation.has_free(room_of(free.as_ref().ok()));
            if let Ok(FileReply::Attr(attr)) = root {
                delegation.image.see(&attr);
            }
        }
        own
    }

    fn decide(
        &self,
        own: &Delegated,
        (caller, op, data): (Caller, &FileOp, &[u8]),
        may_list: bool,
    ) -> Decision {
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
        let has_more = state.delegation.log.end() > before;
        if has_more && state.should_send() {
            drop(state);
            own.wake.notify_one();
        }
        decision
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
            Decision::Answered(result) => {
                let mut state = own.state();
                if matches!(op, FileOp::Write { .. }) && state.is_full() {
                    state.held.push_back((done, result));
                    drop(state);
                    if self.fate.loss().is_some() {
                        self.refuse_held(own);
                    }
                } else {
                    drop(state);
                    done(result, &[]);
                }
                None
            }
            decision => Some((decision, done)),
        }
    }

    /// Answers with the server's help.
    pub(super) async fn answer_later(
        &self,
        own: &Delegated,
        (caller, op, data): (Caller, FileOp, Bytes),
        mut decision: Decision,
    ) -> (FileResult, Bytes) {
        let mut may_list = true;
        for _ in 0..ROUNDS_MAX {
            match decision {
                Decision::Answered(result) => return (result, Bytes::new()),
                Decision::AskAfter(position) => {
                    self.wait_settled(own, position).await;
                    break;
                }
                Decision::List(directory) => {
                    may_list = false;
                    self.list(own, directory).await;
                }
                Decision::Provide => {
                    if let Err(errno) = self.provide_all(&op).await {
                        return (Err(errno), Bytes::new());
                    }
                }
            }
            decision = self.decide(own, (caller, &op, &data), may_list);
        }
        self.wait_for_log(own, &op).await;
        if let Err(errno) = self.open_unseen(&op).await {
            return (Err(errno), Bytes::new());
        }
        own.state().delegation.begin_asking(&self.known(), &op);
        let (result, body) = self.run_one(caller, op.clone(), data).await;
        let mut state = own.state();
        let delegation = &mut state.delegation;
        delegation.end_asking(&self.known(), caller, &op, &result);
        (result, body)
    }

    /// What changes something goes when all before it has run.
    async fn wait_for_log(&self, own: &Delegated, op: &FileOp) {
        if changes(op) {
            let end = own.state().delegation.log.end();
            self.wait_settled(own, end).await;
        }
    }

    /// Before a file loses a name the server must have it open, if the program has.
    async fn open_unseen(&self, op: &FileOp) -> Result<(), Errno> {
        let victim = match op {
            FileOp::Unlink { parent, name } => self.known().named(*parent, name),
            FileOp::Rename {
                new_parent,
                new_name,
                ..
            } => self.known().named(*new_parent, new_name),
            _ => None,
        };
        let Some(ino) = victim else { return Ok(()) };
        loop {
            let Some(handle) = self.known().unseen(ino) else {
                return Ok(());
            };
            self.provide_all(&FileOp::Release { handle }).await?;
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

    /// Learns all names of a directory, if they are not too many.
    async fn list(&self, own: &Delegated, directory: InodeNo) {
        let busy = own.state().delegation.log.busy(directory);
        self.wait_settled(own, busy.unwrap_or(0)).await;
        let changes = own.state().delegation.image.changes();
        let names = self.names(directory).await;
        let image = &mut own.state().delegation.image;
        match names {
            Some(names) => image.list(directory, names, changes, NAMES_KNOWN_MAX),
            None => image.is_large(directory),
        }
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

    fn forget_now(&self, state: &mut State, ino: InodeNo, count: u64) -> usize {
        let queued = self.forget(ino, count);
        if !self.known().has(ino) {
            state.delegation.image.forget(ino);
        }
        queued
    }

    /// Sends what is in the log for as long as the volume is there.
    pub(super) async fn ship(self: Arc<Self>) {
        let Some(own) = self.delegated.get() else {
            return;
        };
        let mut sent = VecDeque::<Sent>::new();
        // The session that all of them go to, and the last of them.
        let (mut link, mut last) = (self.link(), 0);
        while self.fate.loss().is_none() {
            own.state().under_way = sent.len();
            let mut trouble = None;
            if link.opened.epoch != self.link().opened.epoch {
                // Somebody else has found out.
                trouble = Some(Trouble::Forgotten { maybe_ran: true });
            } else if own.state().should_send() {
                match self.send(own, &link, &mut last).await {
                    Ok(batch) => sent.push_back(batch),
                    Err(other) => trouble = Some(other),
                }
                if trouble.is_none() {
                    continue;
                }
            }
            if let Some(trouble) = trouble {
                (link, last) = (self.recover(own, &mut sent, trouble).await, 0);
                continue;
            }
            let Some(oldest) = sent.front_mut() else {
                self.fate.while_there(own.wake.notified()).await;
                continue;
            };
            let answer = tokio::select! {
                answer = &mut oldest.answer => answer,
                () = own.wake.notified() => continue,
            };
            let Some(batch) = sent.pop_front() else {
                continue;
            };
            match answer {
                Ok(Ok(results)) => self.settle(own, &batch, results),
                Ok(Err(trouble)) => {
                    (link, last) = (self.recover(own, &mut sent, trouble).await, 0);
                }
                Err(error) => {
                    let text = format!("a batch was not sent: {error}");
                    self.fate.lose(Error::new(ErrorCode::ServerFault, text));
                }
            }
        }
        self.refuse_held(own);
    }

    /// The volume is lost: nobody will make room for answers that are held back.
    fn refuse_held(&self, own: &Delegated) {
        let held = std::mem::take(&mut own.state().held);
        for (done, _) in held {
            done(Err(errno_of(ErrorCode::VolumeLost)), &[]);
        }
    }

    /// Puts the next batch on its way.
    async fn send(
        self: &Arc<Self>,
        own: &Delegated,
        link: &Link,
        last: &mut u64,
    ) -> Result<Sent, Trouble> {
        let entries = own.state().delegation.log.take(BATCH_OPS_MAX, BATCH_BYTES);
        let count = entries.len();
        let caller = entries
            .first()
            .map(|entry| entry.caller)
            .unwrap_or_default();
        let caller = Caller { pid: 0, ..caller };
        let mut ops = Vec::with_capacity(count + 1);
        let mut given = Vec::new();
        let mut left_out = Vec::with_capacity(count);
        let with_data = entries
            .iter()
            .filter(|entry| !entry.data.is_empty())
            .count();
        let total: usize = entries.iter().map(|entry| entry.data.len()).sum();
        let (mut body, mut whole) = (BytesMut::new(), Bytes::new());
        if with_data > 1 {
            body.reserve(total);
        }
        for entry in &entries {
            let op = self.in_session(link, entry).await?;
            left_out.push(op.is_none());
            let Some(mut op) = op else { continue };
            if let FileOp::Write { data, .. } = &mut op {
                *data = BodyRange {
                    start: body.len() as u32,
                    length: entry.data.len() as u32,
                };
                if with_data > 1 {
                    body.extend_from_slice(&entry.data);
                } else {
                    whole = entry.data.clone();
                }
            }
            if entry.made != (None, None) {
                given.push(GivenNumbers {
                    op: ops.len() as u32,
                    ino: entry.made.0,
                    handle: entry.made.1,
                });
            }
            ops.push(op);
        }
        ops.push(FileOp::StatFs);
        let body = if with_data > 1 { body.freeze() } else { whole };
        let sequence = link.next_sequence();
        let after = std::mem::replace(last, sequence);
        let (session, link) = (Arc::clone(self), link.clone());
        let answer = tokio::spawn(async move {
            let deadline = session.server.deadline();
            let numbers = (sequence, Some(after), given);
            let ran = session.run_batch(&link, caller, (ops, numbers), &body, deadline);
            ran.await.map(|(results, _)| results)
        });
        Ok(Sent { left_out, answer })
    }

    /// Takes in the answers of the oldest batch.
    fn settle(&self, own: &Delegated, batch: &Sent, results: Vec<FileResult>) {
        let mut results = results.into_iter();
        let mut state = own.state();
        for left_out in &batch.left_out {
            let result = if *left_out {
                Some(Ok(FileReply::Done))
            } else {
                results.next()
            };
            if let Some(Err(errno)) = result {
                let log = &state.delegation.log;
                let op = log.entry(log.settled()).map(|entry| entry.op.clone());
                self.fail_late(&op, errno);
            }
            let reply = result.and_then(Result::ok);
            state.delegation.settle(&mut self.known(), reply.as_ref());
        }
        if let Some(Ok(stat @ FileReply::StatFs(_))) = results.next() {
            state.delegation.has_free(room_of(Some(&stat)));
        }
        self.after_settling(own, state);
    }

    /// Tells everybody how far the log is settled.
    pub(super) fn after_settling(&self, own: &Delegated, mut state: MutexGuard<'_, State>) {
        let settled = state.delegation.log.settled();
        let mut queued = 0;
        while let Some(&(position, ino, count)) = state.forgets.front() {
            if position > settled {
                break;
            }
            state.forgets.pop_front();
            queued = self.forget_now(&mut state, ino, count).max(queued);
        }
        let mut held = VecDeque::new();
        if !state.is_full() {
            held = std::mem::take(&mut state.held);
        }
        drop(state);
        own.settled.send_replace(settled);
        for (done, result) in held {
            done(result, &[]);
        }
    }

    /// An operation that was answered has failed: what the program believes is not true.
    fn fail_late(&self, op: &Option<FileOp>, errno: Errno) {
        let code = match errno.0 {
            libc::ENOSPC => ErrorCode::NoSpaceBytes,
            _ => ErrorCode::ServerFault,
        };
        let text = format!("an operation failed after it was answered: {op:?}: {errno:?}");
        self.fate.lose(Error::new(code, text));
    }

    /// An entry in numbers of the session; `None` when nothing of it is left to do.
    async fn in_session(&self, link: &Link, entry: &Entry) -> Result<Option<FileOp>, Trouble> {
        if entry.asked.0 == link.opened.epoch {
            return Ok(Some(entry.asked.1.clone()));
        }
        // A restarted server knows none of the numbers any more.
        if let FileOp::Open { .. } = entry.op {
            // It is opened again when somebody needs it.
            return Ok(None);
        }
        if let FileOp::Release { handle } = entry.op
            && self.known().is_stale(handle)
        {
            return Ok(None);
        }
        let deadline = self.server.deadline();
        let op = self.translate(link, &entry.op, deadline).await?;
        let mut known = self.known();
        if known.epoch() != link.opened.epoch {
            return Err(Trouble::Forgotten { maybe_ran: false });
        }
        if let Some(ino) = entry.made.0 {
            known.make_again(ino);
        }
        if let Some(given) = entry.made.1 {
            known.open_given_again(given);
        }
        Ok(Some(op))
    }
}

fn room_of(stat: Option<&FileReply>) -> Room {
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
