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
use crate::limits::{
    WRITE_BACK_CLOSE_IDLE_MAX, WRITE_BACK_POLL_INTERVAL, WRITE_BACK_QUIET,
    WRITE_BACK_SYNC_IDLE_MAX, WRITE_BACK_SYNC_MAX,
};
use crate::tree::Completion;
use crate::volume_health::VolumeHealth;

/// What is known of the writes that the kernel has collected. Clones share it.
#[derive(Debug, Clone, Default)]
pub(super) struct WriteBackTracker(Arc<Mutex<WriteBackState>>);

#[derive(Debug, Default)]
struct WriteBackState {
    /// Files that the kernel has open, each as often as it is.
    open_files: u64,
    /// Requests under way that write or release.
    inflight_requests: u64,
    /// When the last of those came or was answered.
    last_activity: Option<Instant>,
}

impl WriteBackTracker {
    /// Takes the answer to a request that opens a file.
    pub(super) fn track_open(&self, done: Completion) -> Completion {
        let own = self.clone();
        Box::new(move |result: FileResult, data| {
            // Counted first: the release may come before the answer is finished here.
            if result.is_ok() {
                own.lock().open_files += 1;
            }
            done(result, data);
        })
    }

    /// Takes the answer to a write, or to a release.
    pub(super) fn track_transfer(&self, is_release: bool, done: Completion) -> Completion {
        let own = self.clone();
        {
            let mut state = own.lock();
            state.inflight_requests += 1;
            state.last_activity = Some(clock::now());
        }
        Box::new(move |result: FileResult, data| {
            done(result, data);
            let mut state = own.lock();
            state.inflight_requests -= 1;
            state.open_files -= u64::from(is_release && state.open_files > 0);
            state.last_activity = Some(clock::now());
        })
    }

    /// Waits until no file is open, for what can still come from processes that are dead. Ends
    /// early when the volume is lost, or when somebody else holds files open and writes nothing:
    /// then it is not known whether all has come, and that is deplored.
    pub(super) fn wait_until_closed(&self, health: &VolumeHealth) {
        let start = clock::now();
        self.wait(health, |state| {
            state.is_quiet(start, WRITE_BACK_CLOSE_IDLE_MAX)
        });
        if self.lock().open_files > 0 {
            health.report_data_loss(data_loss_error());
        }
    }

    /// Has the kernel send what it has collected for programs that go on, and waits until that has
    /// come. They may write on: this ends in any case. What has not come by then is deplored.
    pub(super) fn sync(&self, health: &VolumeHealth, directory: &Path) {
        if self.lock().open_files == 0 {
            return;
        }
        let directory = directory.to_owned();
        // A thread of its own, as the call may wait for a server that never answers.
        let asking = thread::spawn(move || File::open(directory).map(syncfs));
        let start = clock::now();
        self.wait(health, |state| {
            let is_asked = asking.is_finished() && state.is_quiet(start, WRITE_BACK_QUIET);
            is_asked || state.has_stalled(start)
        });
        if self.lock().open_files == 0 {
            return;
        }
        if !asking.is_finished() {
            return health.report_data_loss(data_loss_error());
        }
        // What a write failed of was told when it failed.
        match asking.join() {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => health.report_data_loss(sync_error(&error)),
            Err(_) => health.report_data_loss(data_loss_error()),
        }
    }

    fn wait(&self, health: &VolumeHealth, is_over: impl Fn(&WriteBackState) -> bool) {
        while health.loss().is_none() {
            {
                let state = self.lock();
                if state.open_files == 0 || is_over(&state) {
                    break;
                }
            }
            thread::sleep(WRITE_BACK_POLL_INTERVAL);
        }
    }

    fn lock(&self) -> MutexGuard<'_, WriteBackState> {
        // No holder leaves the numbers half-changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn data_loss_error() -> Error {
    let text = "the kernel has not sent all cached writes of programs";
    Error::new(ErrorCode::ServerFault, text)
}

fn sync_error(error: &io::Error) -> Error {
    let text = format!("cannot request the kernel's cached writes: {error}");
    Error::new(ErrorCode::ServerFault, text)
}

impl WriteBackState {
    /// Whether nothing has come or gone for long, or for very long programs have written on.
    fn has_stalled(&self, start: Instant) -> bool {
        let last = self.last_activity.map_or(start, |moved| moved.max(start));
        let now = clock::now();
        now.duration_since(last) > WRITE_BACK_SYNC_IDLE_MAX
            || now.duration_since(start) > WRITE_BACK_SYNC_MAX
    }

    /// Whether nothing has come or gone for so long, since a start.
    fn is_quiet(&self, start: Instant, time: Duration) -> bool {
        let last = self.last_activity.map_or(start, |moved| moved.max(start));
        self.inflight_requests == 0 && clock::now().duration_since(last) > time
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::file_op::{Errno, FileReply};
    use tokio::sync::mpsc;

    use super::*;

    fn ignored_completion() -> Completion {
        Box::new(|_, _| {})
    }

    fn counts(collected: &WriteBackTracker) -> (u64, u64) {
        let state = collected.lock();
        (state.open_files, state.inflight_requests)
    }

    #[test]
    fn write_back_waits_only_for_open_files() {
        let (collected, volume_status) = (
            WriteBackTracker::default(),
            VolumeHealth::new("v", mpsc::unbounded_channel().0),
        );
        collected.track_open(ignored_completion())(Err(Errno(2)), &[]);
        collected.wait_until_closed(&volume_status);
        collected.track_open(ignored_completion())(Ok(FileReply::Done), &[]);
        let release = collected.track_transfer(true, ignored_completion());
        assert_eq!(counts(&collected), (1, 1));
        release(Ok(FileReply::Done), &[]);
        collected.wait_until_closed(&volume_status);
        assert_eq!(counts(&collected), (0, 0));
    }

    #[test]
    fn pending_writes_are_awaited_unless_data_is_lost() {
        let (collected, volume_status) = (
            WriteBackTracker::default(),
            VolumeHealth::new("v", mpsc::unbounded_channel().0),
        );
        collected.track_open(ignored_completion())(Ok(FileReply::Done), &[]);
        let write = collected.track_transfer(false, ignored_completion());
        let long_ago = clock::now() - 10 * WRITE_BACK_CLOSE_IDLE_MAX;
        collected.lock().last_activity = Some(long_ago);
        assert!(
            !collected
                .lock()
                .is_quiet(long_ago, WRITE_BACK_CLOSE_IDLE_MAX)
        );
        write(Ok(FileReply::Done), &[]);
        collected.lock().last_activity = Some(long_ago);
        assert!(
            collected
                .lock()
                .is_quiet(long_ago, WRITE_BACK_CLOSE_IDLE_MAX)
        );
        let error = Error::new(ErrorCode::VolumeLost, "gone");
        volume_status.mark_lost(error);
        let _write = collected.track_transfer(false, ignored_completion());
        collected.wait_until_closed(&volume_status);
    }
}
