//! Signs of life of an agent to a process that watches it: one end beats, the other notices when
//! the beats, or the agent, end. What then happens is the watcher's affair.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Pause between two beats.
pub(crate) const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(500);

/// One beat, and the word that all is well and nobody need watch any more.
const BEAT_BYTE: u8 = b'.';
const FINISHED_BYTE: u8 = b'q';

/// The watcher's word that it watches.
pub(crate) const READY_BYTE: u8 = b'r';

/// How the watching ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HeartbeatEnd {
    /// There is nothing to watch any more.
    Finished,
    /// The agent is gone.
    Gone,
    /// The agent is there and gives no sign of life.
    Silent,
    /// The process for whose sake it was watched has ended.
    ProcessEnded,
}

/// The agent's end.
#[derive(Debug)]
pub(crate) struct Heartbeat(UnixStream);

impl Heartbeat {
    /// Both ends; the other one is for [`watch_heartbeat`], in another process.
    pub(crate) fn pair() -> io::Result<(Self, UnixStream)> {
        let (ours, theirs) = UnixStream::pair()?;
        // A watcher that does not read must not stop the agent.
        ours.set_nonblocking(true)?;
        Ok((Self(ours), theirs))
    }

    /// Gives a sign of life. Without a watcher there is nobody to tell.
    pub(crate) fn send_beat(&self) {
        let _ = (&self.0).write(&[BEAT_BYTE]);
    }

    /// Beats for ever; where it runs is what is watched.
    pub(crate) async fn send_beats(self: Arc<Self>) {
        loop {
            self.send_beat();
            tokio::time::sleep(HEARTBEAT_INTERVAL).await;
        }
    }

    /// Waits until the watcher says that it watches.
    pub(crate) fn wait_for_watcher(&self, longest: Duration) -> io::Result<()> {
        self.0.set_nonblocking(false)?;
        self.0.set_read_timeout(Some(longest))?;
        (&self.0).read_exact(&mut [READY_BYTE])?;
        self.0.set_nonblocking(true)
    }

    /// Says that nobody need watch any more.
    pub(crate) fn finish(&self) {
        let _ = (&self.0).write(&[FINISHED_BYTE]);
    }
}

/// Watches until the end, or that of a process by its descriptor. Time is counted in beats that did
/// not come, so that a pause of the whole machine counts as one.
pub(crate) fn watch_heartbeat(
    mut socket: UnixStream,
    silence: Duration,
    process: Option<&OwnedFd>,
) -> HeartbeatEnd {
    let silent_max = silence.as_millis().div_ceil(HEARTBEAT_INTERVAL.as_millis());
    let mut silent = 0;
    let mut beats = [0; 64];
    let pause = Timespec {
        tv_sec: 0,
        tv_nsec: HEARTBEAT_INTERVAL.as_nanos() as _,
    };
    loop {
        let mut watched = vec![PollFd::new(&socket, PollFlags::IN)];
        watched.extend(process.map(|process| PollFd::new(process, PollFlags::IN)));
        match poll(&mut watched, Some(&pause)) {
            Ok(0) => {
                silent += 1;
                if silent > silent_max {
                    return HeartbeatEnd::Silent;
                }
                continue;
            }
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return HeartbeatEnd::Gone,
        }
        if watched.get(1).is_some_and(|it| !it.revents().is_empty()) {
            return HeartbeatEnd::ProcessEnded;
        }
        drop(watched);
        // Something is there, if only its end.
        match socket.read(&mut beats) {
            Ok(0) => return HeartbeatEnd::Gone,
            Ok(count) if beats[..count].contains(&FINISHED_BYTE) => return HeartbeatEnd::Finished,
            Ok(_) => silent = 0,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return HeartbeatEnd::Gone,
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::PidfdFlags;

    use super::*;

    #[test]
    fn every_heartbeat_end_is_distinguished() {
        let watching = |end: fn(Heartbeat) -> Option<Heartbeat>| {
            let (heartbeat, watched) = Heartbeat::pair().unwrap();
            heartbeat.send_beat();
            let kept = end(heartbeat);
            let ended = watch_heartbeat(watched, HEARTBEAT_INTERVAL, None);
            drop(kept);
            ended
        };
        let well = |heartbeat: Heartbeat| {
            heartbeat.finish();
            None
        };
        assert_eq!(watching(well), HeartbeatEnd::Finished);
        assert_eq!(watching(|_| None), HeartbeatEnd::Gone);
        assert_eq!(watching(Some), HeartbeatEnd::Silent);
    }

    #[test]
    fn end_of_a_process_ends_its_watch() {
        let (_heartbeat, watched) = Heartbeat::pair().unwrap();
        let mut process = std::process::Command::new("true").spawn().unwrap();
        let pid = rustix::process::Pid::from_child(&process);
        let descriptor = rustix::process::pidfd_open(pid, PidfdFlags::empty()).unwrap();
        let ended = watch_heartbeat(watched, Duration::from_secs(60), Some(&descriptor));
        assert_eq!(ended, HeartbeatEnd::ProcessEnded);
        process.wait().unwrap();
    }
}
