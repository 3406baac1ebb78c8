//! Signals by which a person or a batch system asks this process to end.

use std::fs;

use nix::libc;
use nix::sys::signal::Signal;
use tokio::signal::unix::{SignalKind, signal};

/// The signal by which somebody asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// SIGINT: a person at the terminal.
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

/// Returns a future that ends when this process is asked to end, at once if it was asked after
/// this call: what is made from here on can be removed before the process ends.
///
/// It is asked by SIGINT, SIGTERM and, when its terminal goes, SIGHUP; the last counts for nothing
/// where whoever started it had it ignored, as `nohup` does. Must be called in a runtime.
pub fn asked_to_end() -> impl Future<Output = Asked> {
    let hear = |kind| {
        let heard = signal(kind);
        async move {
            match heard {
                Ok(mut signal) => drop(signal.recv().await),
                // Without a handler the signal ends the process by itself.
                Err(_) => std::future::pending().await,
            }
        }
    };
    let interrupt = hear(SignalKind::interrupt());
    let terminate = hear(SignalKind::terminate());
    let hangup = (!is_ignored(libc::SIGHUP)).then(|| hear(SignalKind::hangup()));
    async move {
        let hangup = async {
            match hangup {
                Some(hangup) => hangup.await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = interrupt => Asked::Interrupt,
            () = terminate => Asked::Terminate,
            () = hangup => Asked::Hangup,
        }
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
