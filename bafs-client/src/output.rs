//! Keeps the end of what a job prints, for messages. Interprets nothing.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use nix::fcntl::OFlag;
use nix::unistd::pipe2;
use tokio::sync::watch;

use crate::limits::OUTPUT_TAIL_BYTES;

/// How long the end of a job's output is waited for, once the job is over.
const END_MAX: Duration = Duration::from_secs(2);

/// The end of one job's output. Cheap to clone; clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tail(Arc<Kept>);

#[derive(Debug, Default)]
struct Kept {
    bytes: Mutex<VecDeque<u8>>,
    /// Whether nobody has the output open any more, and all of it came.
    is_whole: watch::Sender<bool>,
}

impl Tail {
    /// A tail that takes what is written to the returned descriptor, until its last copy closes.
    pub(crate) fn collect() -> io::Result<(Self, OwnedFd)> {
        let (from, to) = pipe2(OFlag::O_CLOEXEC)?;
        let tail = Self::default();
        let filled = tail.clone();
        thread::Builder::new()
            .name("bafs-output".to_owned())
            .spawn(move || {
                let mut from = File::from(from);
                let mut piece = vec![0; OUTPUT_TAIL_BYTES];
                while let Ok(length @ 1..) = from.read(&mut piece) {
                    filled.push(&piece[..length]);
                }
                filled.0.is_whole.send_replace(true);
            })?;
        Ok((tail, to))
    }

    /// What a job that is over printed last, at most 64 KiB; bytes that are no text are replaced.
    pub(crate) async fn text(&self) -> String {
        // On a busy machine the thread above may be behind. Who was started otherwise than by the
        // job may keep its output open for as long as it likes.
        let mut whole = self.0.is_whole.subscribe();
        let _ = tokio::time::timeout(END_MAX, whole.wait_for(|is_whole| *is_whole)).await;
        let kept = self.0.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes: Vec<u8> = kept.iter().copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn push(&self, bytes: &[u8]) {
        let mut kept = self.0.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend(bytes);
        let excess = kept.len().saturating_sub(OUTPUT_TAIL_BYTES);
        kept.drain(..excess);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[tokio::test]
    async fn the_end_is_kept_and_waited_for() {
        let (tail, to) = Tail::collect().unwrap();
        let job = thread::spawn(move || {
            let mut to = File::from(to);
            to.write_all(&vec![b'x'; 3 * OUTPUT_TAIL_BYTES]).unwrap();
            to.write_all(b"the end\xff").unwrap();
        });
        let text = tail.text().await;
        job.join().unwrap();
        assert!(text.ends_with("the end\u{fffd}"));
        assert_eq!(tail.0.bytes.lock().unwrap().len(), OUTPUT_TAIL_BYTES);
    }

    #[tokio::test]
    async fn who_keeps_the_output_open_is_not_waited_for() {
        let (tail, to) = Tail::collect().unwrap();
        let mut kept = File::from(to);
        kept.write_all(b"before").unwrap();
        assert_eq!(tail.text().await, "before");
    }
}
