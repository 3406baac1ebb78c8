//! Signals by which a person or a batch system asks this process to end.

use std::fs;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::libc;
use nix::sys::signal::Signal;
use tokio::signal::unix::{Signal as Heard, SignalKind, signal};

use crate::kernel::note_origin;

/// The signal by which somebody asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// SIGINT: mostly a person at the terminal.
    Interrupt,
    /// SIGTERM: whoever manages processes here.
    Terminate,
    /// SIGHUP: the terminal has gone.
    Hangup,
}

impl Asked {
    /// The signal itself.
    pub fn signal(self) -> Signal {
        match self {
            Self::Interrupt => Signal::SIGINT,
            Self::Terminate => Signal::SIGTERM,
            Self::Hangup => Signal::SIGHUP,
        }
    }

    /// What a shell says of a program that this signal ended.
    pub fn exit_code(self) -> i32 {
        128 + self.signal() as i32
    }
}

/// Who asked, for those who have a job on the same terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum By {
    /// A key of the terminal, which the job has heard too.
    Keyboard,
    /// Anybody else, who told this process only.
    Other,
}

/// Whether the last SIGINT came from a key.
static BY_KEY: AtomicBool = AtomicBool::new(false);

/// Returns a future that ends when this process is asked to end, at once if it was asked after
/// this call: what is made from here on can be removed before the process ends.
///
/// It is asked by SIGINT, SIGTERM and, when its terminal goes, SIGHUP; the last counts for nothing
/// where whoever started it had it ignored, as `nohup` does. Must be called in a runtime.
pub fn asked_to_end() -> impl Future<Output = Asked> {
    let mut requests = Requests::hear();
    async move { requests.next().await.0 }
}

/// All that asks this process to end, one after the other.
pub(crate) struct Requests {
    /// `None` where the signal ends the process by itself, or nobody hears it.
    interrupt: Option<Heard>,
    terminate: Option<Heard>,
    hangup: Option<Heard>,
}

impl Requests {
    /// Hears what comes from here on, as [`asked_to_end`] does.
    pub(crate) fn hear() -> Self {
        static NOTING: Once = Once::new();
        // Before it is heard: who hears it finds the note. Without it nobody used a key.
        NOTING.call_once(|| {
            if let Err(error) = note_origin(libc::SIGINT, &BY_KEY) {
                tracing::debug!(%error, "who sends SIGINT is not known");
            }
        });
        let hear = |kind| signal(kind).ok();
        let hears_hangup = !is_ignored(libc::SIGHUP);
        Self {
            interrupt: hear(SignalKind::interrupt()),
            terminate: hear(SignalKind::terminate()),
            hangup: hears_hangup.then(|| hear(SignalKind::hangup())).flatten(),
        }
    }

    /// The next.
    pub(crate) async fn next(&mut self) -> (Asked, By) {
        tokio::select! {
            () = next(&mut self.interrupt) => {
                let by_key = BY_KEY.load(Ordering::SeqCst);
                (Asked::Interrupt, if by_key { By::Keyboard } else { By::Other })
            }
            () = next(&mut self.terminate) => (Asked::Terminate, By::Other),
            () = next(&mut self.hangup) => (Asked::Hangup, By::Other),
        }
    }
}

async fn next(heard: &mut Option<Heard>) {
    match heard {
        Some(heard) => drop(heard.recv().await),
        None => std::future::pending().await,
    }
}

/// Whether a signal was ignored when this process began, and nobody changed that since.
fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    ignores(&status, signal)
}

/// As above, by the text of proc(5)'s `status`.
fn ignores(status: &str, signal: i32) -> bool {
    let mask = status
        .lines()
        .find_map(|line| line.strip_prefix("SigIgn:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & (1 << (signal - 1)) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_of_ignored_signals_begins_with_the_first() {
        let status = "SigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\nSigCgt:\t0\n";
        assert!(ignores(status, libc::SIGHUP));
        assert!(ignores(status, libc::SIGPIPE));
        assert!(!ignores(status, libc::SIGTERM));
        assert!(!ignores("", libc::SIGHUP));
    }
}
