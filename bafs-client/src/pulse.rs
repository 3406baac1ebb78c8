//! Signs of life of an agent to a process that watches it: one end beats, the other notices when
//! the beats, or the agent, end. What then happens is the watcher's affair.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

/// Pause between two beats.
pub(crate) const BEAT: Duration = Duration::from_millis(500);

/// One beat, and the word that all is well and nobody need watch any more.
const BEATS: u8 = b'.';
const WELL: u8 = b'q';

/// The watcher's word that it watches.
pub(crate) const READY: u8 = b'r';

/// How the watching ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PulseEnd {
    /// There is nothing to watch any more.
    Well,
    /// The agent is gone.
    Gone,
    /// The agent is there and gives no sign of life.
    Silent,
}

/// The agent's end.
#[derive(Debug)]
pub(crate) struct Pulse(UnixStream);

impl Pulse {
    /// Both ends; the other one is for [`watch`], in another process.
    pub(crate) fn pair() -> io::Result<(Self, UnixStream)> {
        let (ours, theirs) = UnixStream::pair()?;
        // A watcher that does not read must not stop the agent.
        ours.set_nonblocking(true)?;
        Ok((Self(ours), theirs))
    }

    /// Gives a sign of life. Without a watcher there is nobody to tell.
    pub(crate) fn beat(&self) {
        let _ = (&self.0).write(&[BEATS]);
    }

    /// Beats for ever; where it runs is what is watched.
    pub(crate) async fn beat_on(self: Arc<Self>) {
        loop {
            self.beat();
            tokio::time::sleep(BEAT).await;
        }
    }

    /// Waits until the watcher says that it watches.
    pub(crate) fn await_watcher(&self, longest: Duration) -> io::Result<()> {
        self.0.set_nonblocking(false)?;
        self.0.set_read_timeout(Some(longest))?;
        (&self.0).read_exact(&mut [READY])?;
        self.0.set_nonblocking(true)
    }

    /// Says that nobody need watch any more.
    pub(crate) fn end(&self) {
        let _ = (&self.0).write(&[WELL]);
    }
}

/// Watches until the end. Time is counted in beats that did not come, so that a pause of the whole
/// machine counts as one.
pub(crate) fn watch(mut pulse: UnixStream, silence: Duration) -> PulseEnd {
    let silent_max = silence.as_millis().div_ceil(BEAT.as_millis());
    let mut silent = 0;
    let mut beats = [0; 64];
    if pulse.set_read_timeout(Some(BEAT)).is_err() {
        return PulseEnd::Gone;
    }
    loop {
        match pulse.read(&mut beats) {
            Ok(0) => return PulseEnd::Gone,
            Ok(count) if beats[..count].contains(&WELL) => return PulseEnd::Well,
            Ok(_) => silent = 0,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                silent += 1;
                if silent > silent_max {
                    return PulseEnd::Silent;
                }
            }
            Err(_) => return PulseEnd::Gone,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_end_is_told_apart() {
        let watching = |end: fn(Pulse) -> Option<Pulse>| {
            let (pulse, watched) = Pulse::pair().unwrap();
            pulse.beat();
            let kept = end(pulse);
            let ended = watch(watched, BEAT);
            drop(kept);
            ended
        };
        let well = |pulse: Pulse| {
            pulse.end();
            None
        };
        assert_eq!(watching(well), PulseEnd::Well);
        assert_eq!(watching(|_| None), PulseEnd::Gone);
        assert_eq!(watching(Some), PulseEnd::Silent);
    }
}
