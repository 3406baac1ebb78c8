//! Signals by which a person or a batch system asks this process to end.

use std::fs;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::libc;
use nix::sys::signal::{SigSet, Signal};
use tokio::signal::unix::{Signal as Heard, SignalKind, signal};

use crate::kernel::{disregard_signal, record_signal_origin};

/// The signal by which somebody asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopSignal {
    /// SIGINT: mostly a person at the terminal.
    Interrupt,
    /// SIGTERM: whoever manages processes here.
    Terminate,
    /// SIGHUP: the terminal has gone.
    Hangup,
}

impl StopSignal {
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
pub(crate) enum SignalOrigin {
    /// A key of the terminal, which the job has heard too.
    Keyboard,
    /// Anybody else, who told this process only.
    Other,
}

/// Whether the last SIGINT came from a key.
static IS_FROM_KEYBOARD: AtomicBool = AtomicBool::new(false);

/// Returns a future that ends when this process is asked to end, at once if it was asked after
/// this call: what is made from here on can be removed before the process ends.
///
/// It is asked by SIGINT, SIGTERM and, when its terminal goes, SIGHUP; the last counts for nothing
/// where whoever started it had it ignored, as `nohup` does. Must be called in a runtime.
pub fn wait_for_stop_signal() -> impl Future<Output = StopSignal> {
    let mut requests = StopSignals::subscribe();
    async move { requests.next_signal().await.0 }
}

/// Has SIGUSR2 end no process of this program: a server that hears it starts its program file
/// again, and nothing else has a use for it. Called before there are threads.
pub fn disregard_restart_signal() {
    if let Err(error) = disregard_signal(libc::SIGUSR2) {
        tracing::debug!(%error, "SIGUSR2 ends this process");
    }
    // The process that this one replaced held it back.
    if let Err(error) = restart_signal().thread_unblock() {
        tracing::debug!(%error, "SIGUSR2 is not heard");
    }
}

/// Holds SIGUSR2 back in this thread, so that it does not end the program that takes the place of
/// this one before that hears it.
pub fn hold_restart_signal() {
    if let Err(error) = restart_signal().thread_block() {
        tracing::debug!(%error, "SIGUSR2 may end the next program");
    }
}

fn restart_signal() -> SigSet {
    SigSet::from_iter([Signal::SIGUSR2])
}

/// All that asks this process to end, one after the other.
pub(crate) struct StopSignals {
    /// `None` where the signal ends the process by itself, or nobody hears it.
    interrupt: Option<Heard>,
    terminate: Option<Heard>,
    hangup: Option<Heard>,
}

impl StopSignals {
    /// Hears what comes from here on, as [`wait_for_stop_signal`] does.
    pub(crate) fn subscribe() -> Self {
        static NOTING: Once = Once::new();
        // Before it is heard: who hears it finds the note. Without it nobody used a key.
        NOTING.call_once(|| {
            if let Err(error) = record_signal_origin(libc::SIGINT, &IS_FROM_KEYBOARD) {
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
    pub(crate) async fn next_signal(&mut self) -> (StopSignal, SignalOrigin) {
        tokio::select! {
            () = receive_signal(&mut self.interrupt) => {
                let by_key = IS_FROM_KEYBOARD.load(Ordering::SeqCst);
                let origin = if by_key { SignalOrigin::Keyboard } else { SignalOrigin::Other };
                (StopSignal::Interrupt, origin)
            }
            () = receive_signal(&mut self.terminate) => {
                (StopSignal::Terminate, SignalOrigin::Other)
            }
            () = receive_signal(&mut self.hangup) => (StopSignal::Hangup, SignalOrigin::Other),
        }
    }
}

async fn receive_signal(heard: &mut Option<Heard>) {
    match heard {
        Some(heard) => drop(heard.recv().await),
        None => std::future::pending().await,
    }
}

/// Whether a signal was ignored when this process began, and nobody changed that since.
fn is_ignored(signal: i32) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    has_ignored_bit(&status, signal)
}

/// As above, by the text of proc(5)'s `status`.
fn has_ignored_bit(status: &str, signal: i32) -> bool {
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
    fn the_signal_mask_starts_with_signal_one() {
        let status = "SigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\nSigCgt:\t0\n";
        assert!(has_ignored_bit(status, libc::SIGHUP));
        assert!(has_ignored_bit(status, libc::SIGPIPE));
        assert!(!has_ignored_bit(status, libc::SIGTERM));
        assert!(!has_ignored_bit("", libc::SIGHUP));
    }
}
