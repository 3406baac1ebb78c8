//! Runs a cheap batch in the thread of the runtime that has its call: to hand it to a thread for
//! blocking work, and the answer back, takes longer than the batch.
//!
//! A disk may hang. So one batch at a time runs in this way: the other threads of the runtime serve
//! everything else, and later batches get threads of their own. The thread that hangs may be the
//! one that waits for the network on behalf of all. A watcher notices that and wakes another one.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bafs_proto::file_op::FileOp;
use bafs_proto::message::RunFileOps;
use bytes::Bytes;
use nix::libc;
use tokio::runtime::{Handle, RuntimeFlavor};

use super::batch_replay::{BatchReplySender, is_sync};
use super::{AgentSession, TreeSessions, lock};

/// Operations of a cheap batch, at most. An operation takes one to four system calls. To hand a
/// batch over, and its answer back, took 6.3 calls of futex and two changes of the processor
/// (measured in November 2026).
const CHEAP_OPS_MAX: usize = 8;

/// Bytes that a cheap batch reads and writes, at most.
const CHEAP_BYTES_MAX: u64 = 64 << 10;

/// A batch that runs for longer may hang. Everybody waits for so long then, and once more.
const WATCH_INTERVAL: Duration = Duration::from_millis(20);

/// The one place for a batch that runs in a thread of the runtime.
#[derive(Debug, Default)]
pub(super) struct InlineSlot(Arc<SharedSlot>);

#[derive(Debug, Default)]
struct SharedSlot {
    state: Mutex<SlotState>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct SlotState {
    /// Counts the batches.
    run_count: u64,
    /// The runtime of the batch that runs.
    running: Option<Handle>,
    has_watcher: bool,
    /// Whether the watcher looks at times. Otherwise it waits to be woken.
    is_watching: bool,
    is_closed: bool,
}

/// The right to run a batch now, until this is dropped.
#[derive(Debug)]
pub(super) struct InlineTurn(Arc<SharedSlot>);

impl TreeSessions {
    /// Runs a batch, not tied to its call: a caller that gives up may ask again for the answer.
    pub(super) fn start_batch(
        &self,
        session: Arc<AgentSession>,
        call: RunFileOps,
        body: Bytes,
        sender: BatchReplySender,
    ) {
        let shared = self.0.clone();
        let is_chained = call.after_sequence.is_some() && !is_sync(&call.ops);
        if is_chained {
            session.is_chain_running.store(true, Ordering::Release);
        }
        let turn = shared.inline_slot.take_turn(&call.ops, body.len());
        let is_inline = turn.is_some();
        let run_batch = move || {
            let RunFileOps {
                tree,
                epoch,
                sequence,
                caller,
                ops,
                assigned_numbers: given,
                ..
            } = call;
            let full = &shared.full_disk;
            let ran = session.run_batch(is_chained, caller, (&ops, &given), &body, full);
            let answer = ran.map_err(|()| shared.ended_error(&tree, epoch));
            let answer = shared.directory.reject_if_gone(answer);
            shared.count_operations(&answer);
            lock(&session.replay).finish(sequence, &ops, &answer);
            if is_chained {
                session.is_chain_running.store(false, Ordering::Release);
                session.last_chained_batch.send_replace(sequence);
            }
            drop(turn);
            sender.send_replace(Some(answer));
        };
        if is_inline {
            tokio::spawn(async move { run_batch() });
        } else {
            tokio::task::spawn_blocking(run_batch);
        }
    }
}

impl InlineSlot {
    /// Takes the place for a batch that reads and writes `body_bytes` beside what its operations
    /// say; `None` if the batch needs a thread of its own.
    pub(super) fn take_turn(&self, ops: &[FileOp], body_bytes: usize) -> Option<InlineTurn> {
        if !is_cheap(ops, body_bytes) {
            return None;
        }
        let runtime = Handle::try_current().ok()?;
        let is_shared = runtime.runtime_flavor() == RuntimeFlavor::MultiThread;
        if !is_shared || runtime.metrics().num_workers() < 2 {
            return None;
        }
        let mut state = self.0.lock();
        if state.running.is_some() || !self.start_watcher(&mut state) {
            return None;
        }
        state.run_count += 1;
        state.running = Some(runtime);
        if !std::mem::replace(&mut state.is_watching, true) {
            self.0.wake.notify_one();
        }
        drop(state);
        Some(InlineTurn(Arc::clone(&self.0)))
    }

    /// Whether somebody watches.
    fn start_watcher(&self, state: &mut SlotState) -> bool {
        if !state.has_watcher {
            let shared = Arc::clone(&self.0);
            let watcher = std::thread::Builder::new().name("inline-watcher".to_owned());
            state.has_watcher = watcher.spawn(move || shared.watch()).is_ok();
        }
        state.has_watcher
    }
}

impl Drop for InlineSlot {
    fn drop(&mut self) {
        self.0.lock().is_closed = true;
        self.0.wake.notify_one();
    }
}

impl Drop for InlineTurn {
    fn drop(&mut self) {
        self.0.lock().running = None;
    }
}

impl SharedSlot {
    fn lock(&self) -> MutexGuard<'_, SlotState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes a thread of the runtime, again and again, while a batch runs for long.
    fn watch(&self) {
        let mut seen = 0;
        loop {
            let mut state = self.lock();
            if state.running.is_none() && state.run_count == seen {
                state.is_watching = false;
                let waiting = |state: &mut SlotState| !state.is_watching && !state.is_closed;
                state = match self.wake.wait_while(state, waiting) {
                    Ok(state) => state,
                    Err(poisoned) => poisoned.into_inner(),
                };
            }
            if state.is_closed {
                return;
            }
            let is_long = state.run_count == seen;
            let runtime = state.running.clone().filter(|_| is_long);
            seen = state.run_count;
            drop(state);
            if let Some(runtime) = runtime {
                // Whoever runs this looks at the network next.
                runtime.spawn(async {});
            }
            std::thread::sleep(WATCH_INTERVAL);
        }
    }
}

/// Whether a batch takes no longer than its hand-over to a thread, if its disk does not hang.
fn is_cheap(ops: &[FileOp], body_bytes: usize) -> bool {
    let mut bytes = body_bytes as u64;
    for op in ops {
        match op {
            FileOp::Read { length, .. }
            | FileOp::ReadFile {
                bytes_max: length, ..
            } => bytes += u64::from(*length),
            FileOp::ReadDirectory {
                bytes_max: length,
                plus: false,
                ..
            } => bytes += u64::from(*length),
            // A look at each file, a wait for the disk, or more than a few bytes.
            FileOp::ReadDirectory { .. }
            | FileOp::ListDirectory { .. }
            | FileOp::Fsync { .. }
            | FileOp::FsyncDirectory { .. }
            | FileOp::Allocate { .. }
            | FileOp::CopyRange { .. } => return false,
            FileOp::SetAttr { change, .. } if change.size.is_some() => return false,
            FileOp::Open { flags, .. } if flags & libc::O_TRUNC != 0 => return false,
            _ => {}
        }
    }
    ops.len() <= CHEAP_OPS_MAX && bytes <= CHEAP_BYTES_MAX
}

#[cfg(test)]
mod tests {
    use bafs_proto::file_op::AttrChange;
    use bafs_proto::ids::{HandleId, InodeNo};

    use super::*;

    const STAT: FileOp = FileOp::GetAttr {
        ino: InodeNo::ROOT,
        handle: None,
    };

    fn read(length: u32) -> FileOp {
        FileOp::Read {
            handle: HandleId(1),
            offset: 0,
            length,
        }
    }

    #[test]
    fn only_short_batches_without_waits_are_cheap() {
        let sync = FileOp::Fsync {
            handle: HandleId(1),
            data_only: true,
        };
        let truncate = FileOp::SetAttr {
            ino: InodeNo::ROOT,
            handle: None,
            change: AttrChange {
                size: Some(0),
                ..AttrChange::default()
            },
        };
        assert!(is_cheap(&[STAT, read(64 << 10)], 0));
        assert!(!is_cheap(&[read(64 << 10)], 1));
        assert!(!is_cheap(&[STAT; CHEAP_OPS_MAX + 1], 0));
        for op in [sync, truncate] {
            assert!(!is_cheap(&[STAT, op.clone()], 0), "{op:?}");
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn one_batch_at_a_time_runs_inline() {
        let slot = InlineSlot::default();
        let turn = slot.take_turn(&[STAT], 0);
        assert!(turn.is_some() && slot.take_turn(&[STAT], 0).is_none());
        drop(turn);
        assert!(slot.take_turn(&[STAT], 0).is_some());
    }

    #[tokio::test]
    async fn a_runtime_of_one_thread_runs_nothing_inline() {
        assert!(InlineSlot::default().take_turn(&[STAT], 0).is_none());
    }

    /// The thread that hangs has waited for the network and for all times.
    #[test]
    fn a_hanging_batch_stops_no_timer() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()
            .expect("runtime");
        let slot = Arc::new(InlineSlot::default());
        let (release, hang) = std::sync::mpsc::channel::<()>();
        let (told, fired) = std::sync::mpsc::channel();
        runtime.spawn(async move {
            // It comes from the thread that waits for the network and for times.
            tokio::time::sleep(Duration::from_millis(50)).await;
            let turn = slot.take_turn(&[STAT], 0).expect("nothing runs");
            let hanging = tokio::spawn(async move {
                let _ = hang.recv();
                drop(turn);
            });
            let waited = tokio::time::timeout(Duration::from_millis(100), hanging).await;
            told.send(waited.is_err()).expect("the test waits");
        });
        let fired = fired.recv_timeout(Duration::from_secs(5));
        assert_eq!(fired, Ok(true), "the timer did not fire");
        drop(release);
    }
}
