//! Keeps the end of what a job prints, for messages. Interprets nothing.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use nix::fcntl::OFlag;
use nix::unistd::pipe2;

use crate::limits::OUTPUT_TAIL_BYTES;

/// The end of one job's output. Cheap to clone; clones share it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tail(Arc<Mutex<VecDeque<u8>>>);

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
            })?;
        Ok((tail, to))
    }

    /// What came so far, at most the last 64 KiB; bytes that are no text are replaced.
    pub(crate) fn text(&self) -> String {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes: Vec<u8> = kept.iter().copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn push(&self, bytes: &[u8]) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend(bytes);
        let excess = kept.len().saturating_sub(OUTPUT_TAIL_BYTES);
        kept.drain(..excess);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_end_is_kept() {
        let (tail, to) = Tail::collect().unwrap();
        let mut to = File::from(to);
        to.write_all(&vec![b'x'; 3 * OUTPUT_TAIL_BYTES]).unwrap();
        to.write_all(b"the end\xff").unwrap();
        drop(to);
        for _ in 0..500 {
            if tail.text().ends_with("the end\u{fffd}") {
                assert_eq!(tail.0.lock().unwrap().len(), OUTPUT_TAIL_BYTES);
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        panic!("the end never came");
    }
}
