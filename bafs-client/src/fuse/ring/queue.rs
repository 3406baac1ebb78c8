//! The thread that serves the requests of one processor, on that processor: whoever asks and
//! whoever answers need not wake each other across processors. Answers none itself.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use fuser::Errno;
use nix::errno::Errno as Code;

use super::super::bridge::Bridge;
use super::answers::Answer;
use super::outbox::{Answered, Order, Outbox};
use super::requests::{Head, PAYLOAD_AT, dispatch};
use crate::clock;
use crate::kernel::{Buffers, Event, Ring};

/// How long the kernel may take to give back what it has, once it has said that the end is there.
const GIVE_BACK: Duration = Duration::from_millis(500);

/// A request that is being handled.
#[derive(Debug)]
struct Asked {
    unique: u64,
    commit: u64,
    /// The buffers, unless the answer has them.
    buffers: Option<Box<Buffers>>,
}

/// Requests of one processor.
#[derive(Debug)]
pub(super) struct Queue {
    ring: Ring,
    outbox: Arc<Outbox>,
    bridge: Bridge,
    asked: Vec<Option<Asked>>,
}

impl Queue {
    pub(super) fn new(ring: Ring, outbox: Arc<Outbox>, bridge: Bridge, entries: usize) -> Self {
        Self {
            ring,
            outbox,
            bridge,
            asked: (0..entries).map(|_| None).collect(),
        }
    }

    /// Serves until the kernel's connection is over, or until it is told to stop.
    /// `first` is what came already.
    pub(super) fn serve(&mut self, first: Vec<Event>) -> io::Result<()> {
        for event in first {
            self.handle(event)?;
        }
        loop {
            match self.outbox.next() {
                Some(Order::Commit(all)) => {
                    for answered in all {
                        self.commit(answered)?;
                    }
                    continue;
                }
                Some(Order::Stop) => return self.leave(),
                None => {}
            }
            if let Some(event) = self.ring.next()? {
                // What was answered need not wait until this is.
                self.ring.flush()?;
                self.handle(event)?;
            } else if self.outbox.may_sleep() {
                let waited = self.ring.wait();
                self.outbox.awake();
                waited?;
            }
        }
    }

    fn handle(&mut self, event: Event) -> io::Result<()> {
        match event {
            Event::Request(index, buffers) => self.ask(index, buffers),
            Event::Woken => self.be_woken(),
            Event::Gone(error) if is_end(&error) => {}
            Event::Gone(error) => return Err(error),
        }
        Ok(())
    }

    /// Takes note of having been woken, or the waker would go on waking.
    fn be_woken(&self) {
        let mut count = [0; 8];
        // Empty, nobody woke us, which does no harm.
        let _ = rustix::io::read(self.ring.waker(), &mut count);
    }

    fn ask(&mut self, index: usize, buffers: Box<Buffers>) {
        let head = Head::read(buffers.header());
        let (kept, given) = match head.wants_data() {
            true => (None, Some(buffers)),
            false => (Some(buffers), None),
        };
        let answer = Answer::new(Arc::clone(&self.outbox), index, given);
        let payload = kept.as_ref().map(|buffers| buffers.payload());
        let payload = payload.and_then(|payload| payload.get(..head.payload_bytes));
        // The answer may be given before this returns, by any thread; it waits in the outbox.
        dispatch(&self.bridge, &head, payload.unwrap_or_default(), answer);
        self.asked[index] = Some(Asked {
            unique: head.unique,
            commit: head.commit,
            buffers: kept,
        });
    }

    fn commit(&mut self, mut answered: Answered) -> io::Result<()> {
        let asked = self.asked[answered.index].take();
        let asked = asked.ok_or_else(|| io::Error::other("an answer to no request"))?;
        let buffers = answered.buffers.or(asked.buffers);
        let mut buffers = buffers.ok_or_else(|| io::Error::other("an answer without buffers"))?;
        let mut length = answered.in_place;
        if !answered.body.is_empty() {
            let place = buffers.payload_mut().get_mut(..answered.body.len());
            match place {
                Some(place) => place.copy_from_slice(&answered.body),
                None => answered.error = Errno::EIO.code(),
            }
            length = answered.body.len();
        }
        if answered.error != 0 {
            length = 0;
        }
        let header = buffers.header_mut();
        // `struct fuse_out_header`; an answer is at most as long as the payload.
        header[0..4].copy_from_slice(&(16 + length as u32).to_ne_bytes());
        header[4..8].copy_from_slice(&(-answered.error).to_ne_bytes());
        header[8..16].copy_from_slice(&asked.unique.to_ne_bytes());
        header[PAYLOAD_AT..PAYLOAD_AT + 4].copy_from_slice(&(length as u32).to_ne_bytes());
        self.ring.commit(answered.index, buffers, asked.commit)
    }

    /// Takes back what the kernel has of us.
    fn leave(&mut self) -> io::Result<()> {
        let start = clock::now();
        loop {
            while let Some(event) = self.ring.next()? {
                if matches!(event, Event::Woken) {
                    self.be_woken();
                }
            }
            let left = GIVE_BACK.saturating_sub(start.elapsed());
            match self.ring.lent() {
                0 => return Ok(()),
                kept if left.is_zero() => {
                    tracing::warn!(kept, "the kernel keeps memory of a ring");
                    return Ok(());
                }
                _ => self.ring.wait_for(left)?,
            }
        }
    }
}

/// Whether the kernel says by this that the mount is gone. An answer for which nobody waits any
/// more (`ENOENT`) comes when that happens meanwhile.
fn is_end(error: &io::Error) -> bool {
    let ends = [
        Code::ENOTCONN,
        Code::ECONNABORTED,
        Code::ECANCELED,
        Code::ENOENT,
    ];
    let code = error.raw_os_error().map(Code::from_raw);
    code.is_some_and(|code| ends.contains(&code))
}
