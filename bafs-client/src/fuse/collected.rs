//! Writes that the kernel collects in its memory (write-back), and how they get out of it before a
//! mount is taken away. Writes nothing itself.
//!
//! The kernel sends what a file has when the file is closed, also on behalf of a process that was
//! killed, and tells its release afterwards. So nothing is left when no file is open.

use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use bafs_proto::file_op::FileResult;
use bafs_proto::{Error, ErrorCode};
use rustix::fs::syncfs;

use crate::clock;
use crate::fate::Fate;
use crate::limits::{
    COLLECTED_CLOSE, COLLECTED_LOOK, COLLECTED_QUIET, COLLECTED_SYNC, COLLECTED_SYNC_MAX,
};
use crate::tree::Done;

/// What is known of the writes that the kernel has collected. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct Collected(Arc<Mutex<State>>);

#[derive(Debug, Default)]
struct State {
    /// Files that the kernel has open, each as often as it is.
    open: u64,
    /// Requests under way that write or release.
    under_way: u64,
    /// When the last of those came or was answered.
    moved: Option<Instant>,
}

impl Collected {
    /// Takes the answer to a request that opens a file.
    pub(super) fn opening(&self, done: Done) -> Done {
        let own = self.clone();
        Box::new(move |result: FileResult, data| {
            // Counted first: the release may come before the answer is finished here.
            if result.is_ok() {
                own.state().open += 1;
            }
            done(result, data);
        })
    }

    /// Takes the answer to a write, or to a release.
    pub(super) fn moving(&self, is_release: bool, done: Done) -> Done {
        let own = self.clone();
        {
            let mut state = own.state();
            state.under_way += 1;
            state.moved = Some(clock::now());
        }
        Box::new(move |result: FileResult, data| {
            done(result, data);
            let mut state = own.state();
            state.under_way -= 1;
            state.open -= u64::from(is_release && state.open > 0);
            state.moved = Some(clock::now());
        })
    }

    /// Waits until no file is open, for what can still come from processes that are dead. Ends
    /// early when the volume is lost, or when somebody else holds files open and writes nothing:
    /// then it is not known whether all has come, and that is deplored.
    pub(super) fn await_closed(&self, fate: &Fate) {
        let start = clock::now();
        self.wait(fate, |state| state.is_quiet(start, COLLECTED_CLOSE));
        if self.state().open > 0 {
            fate.deplore(not_come());
        }
    }

    /// Has the kernel send what it has collected for programs that go on, and waits until that has
    /// come. They may write on: this ends in any case. What has not come by then is deplored.
    pub(super) fn sync(&self, fate: &Fate, directory: &Path) {
        if self.state().open == 0 {
            return;
        }
        let directory = directory.to_owned();
        // A thread of its own, as the call may wait for a server that never answers.
        let asking = thread::spawn(move || File::open(directory).map(syncfs));
        let start = clock::now();
        self.wait(fate, |state| {
            let is_asked = asking.is_finished() && state.is_quiet(start, COLLECTED_QUIET);
            is_asked || state.has_stalled(start)
        });
        if self.state().open == 0 {
            return;
        }
        if !asking.is_finished() {
            return fate.deplore(not_come());
        }
        // What a write failed of was told when it failed.
        match asking.join() {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => fate.deplore(not_asked(&error)),
            Err(_) => fate.deplore(not_come()),
        }
    }

    fn wait(&self, fate: &Fate, is_over: impl Fn(&State) -> bool) {
        while fate.loss().is_none() {
            {
                let state = self.state();
                if state.open == 0 || is_over(&state) {
                    break;
                }
            }
            thread::sleep(COLLECTED_LOOK);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // No holder leaves the numbers half-changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn not_come() -> Error {
    let text = "not all that programs wrote, and the kernel had collected, has come";
    Error::new(ErrorCode::ServerFault, text)
}

fn not_asked(error: &io::Error) -> Error {
    let text = format!("what the kernel had collected was not asked for: {error}");
    Error::new(ErrorCode::ServerFault, text)
}

impl State {
    /// Whether nothing has come or gone for long, or for very long programs have written on.
    fn has_stalled(&self, start: Instant) -> bool {
        let last = self.moved.map_or(start, |moved| moved.max(start));
        let now = clock::now();
        now.duration_since(last) > COLLECTED_SYNC || now.duration_since(start) > COLLECTED_SYNC_MAX
    }

    /// Whether nothing has come or gone for so long, since a start.
    fn is_quiet(&self, start: Instant, time: Duration) -> bool {
        let last = self.moved.map_or(start, |moved| moved.max(start));
        self.under_way == 0 && clock::now().duration_since(last) > time
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::file_op::{Errno, FileReply};
    use tokio::sync::mpsc;

    use super::*;

    fn ignored() -> Done {
        Box::new(|_, _| {})
    }

    fn numbers(collected: &Collected) -> (u64, u64) {
        let state = collected.state();
        (state.open, state.under_way)
    }

    #[test]
    fn nothing_is_waited_for_when_no_file_is_open() {
        let (collected, fate) = (
            Collected::default(),
            Fate::new("v", mpsc::unbounded_channel().0),
        );
        collected.opening(ignored())(Err(Errno(2)), &[]);
        collected.await_closed(&fate);
        collected.opening(ignored())(Ok(FileReply::Done), &[]);
        let release = collected.moving(true, ignored());
        assert_eq!(numbers(&collected), (1, 1));
        release(Ok(FileReply::Done), &[]);
        collected.await_closed(&fate);
        assert_eq!(numbers(&collected), (0, 0));
    }

    #[test]
    fn a_write_under_way_is_waited_for_and_a_lost_volume_is_not() {
        let (collected, fate) = (
            Collected::default(),
            Fate::new("v", mpsc::unbounded_channel().0),
        );
        collected.opening(ignored())(Ok(FileReply::Done), &[]);
        let write = collected.moving(false, ignored());
        let long_ago = clock::now() - 10 * COLLECTED_CLOSE;
        collected.state().moved = Some(long_ago);
        assert!(!collected.state().is_quiet(long_ago, COLLECTED_CLOSE));
        write(Ok(FileReply::Done), &[]);
        collected.state().moved = Some(long_ago);
        assert!(collected.state().is_quiet(long_ago, COLLECTED_CLOSE));
        let error = Error::new(ErrorCode::VolumeLost, "gone");
        fate.lose(error);
        let _write = collected.moving(false, ignored());
        collected.await_closed(&fate);
    }
}
