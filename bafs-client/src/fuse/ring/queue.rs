//! The thread that serves the requests of one processor, on that processor: whoever asks and
//! whoever answers need not wake each other across processors. Answers none itself.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use fuser::Errno;
use nix::errno::Errno as Code;

use super::super::file_system::VolumeFileSystem;
use super::kernel_reply::KernelReply;
use super::outbox::{Outbox, OutboxCommand, ReadyReply};
use super::requests::{FuseRequestHead, PAYLOAD_OFFSET, dispatch};
use crate::clock;
use crate::kernel::{Ring, RingBuffers, RingEvent};

/// How long the kernel may take to give back what it has, once it has said that the end is there.
const RECLAIM_TIMEOUT: Duration = Duration::from_millis(500);

/// A request that is being handled.
#[derive(Debug)]
struct InflightRequest {
    unique: u64,
    commit_id: u64,
    /// The buffers, unless the answer has them.
    buffers: Option<Box<RingBuffers>>,
}

/// Requests of one processor.
#[derive(Debug)]
pub(super) struct RingQueue {
    ring: Ring,
    outbox: Arc<Outbox>,
    bridge: VolumeFileSystem,
    inflight: Vec<Option<InflightRequest>>,
}

impl RingQueue {
    pub(super) fn new(
        ring: Ring,
        outbox: Arc<Outbox>,
        bridge: VolumeFileSystem,
        entries: usize,
    ) -> Self {
        Self {
            ring,
            outbox,
            bridge,
            inflight: (0..entries).map(|_| None).collect(),
        }
    }

    /// Serves until the kernel's connection is over, or until it is told to stop.
    /// `first` is what came already.
    pub(super) fn serve(&mut self, first: Vec<RingEvent>) -> io::Result<()> {
        for event in first {
            self.handle(event)?;
        }
        loop {
            match self.outbox.take_command() {
                Some(OutboxCommand::Commit(all)) => {
                    for answered in all {
                        self.commit_reply(answered)?;
                    }
                    continue;
                }
                Some(OutboxCommand::Stop) => return self.reclaim_buffers(),
                None => {}
            }
            if let Some(event) = self.ring.next_event()? {
                // What was answered need not wait until this is.
                self.ring.flush()?;
                self.handle(event)?;
            } else if self.outbox.try_sleep() {
                let waited = self.ring.wait();
                self.outbox.mark_awake();
                waited?;
            }
        }
    }

    fn handle(&mut self, event: RingEvent) -> io::Result<()> {
        match event {
            RingEvent::Request(index, buffers) => self.dispatch_request(index, buffers),
            RingEvent::Woken => self.drain_waker(),
            RingEvent::EntryRefused(error) if is_connection_end(&error) => {}
            RingEvent::EntryRefused(error) => return Err(error),
        }
        Ok(())
    }

    /// Takes note of having been woken, or the waker would go on waking.
    fn drain_waker(&self) {
        let mut count = [0; 8];
        // Empty, nobody woke us, which does no harm.
        let _ = rustix::io::read(self.ring.waker(), &mut count);
    }

    fn dispatch_request(&mut self, index: usize, buffers: Box<RingBuffers>) {
        let head = FuseRequestHead::parse_ring(buffers.header());
        let (kept, given) = match head.is_data_request() {
            true => (None, Some(buffers)),
            false => (Some(buffers), None),
        };
        let answer = KernelReply::new(Arc::clone(&self.outbox), index, given);
        let payload = kept.as_ref().map(|buffers| buffers.payload());
        let payload = payload.and_then(|payload| payload.get(..head.payload_bytes));
        // The answer may be given before this returns, by any thread; it waits in the outbox.
        dispatch(&self.bridge, &head, payload.unwrap_or_default(), answer);
        self.inflight[index] = Some(InflightRequest {
            unique: head.unique,
            commit_id: head.commit_id,
            buffers: kept,
        });
    }

    fn commit_reply(&mut self, mut answered: ReadyReply) -> io::Result<()> {
        let asked = self.inflight[answered.index].take();
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
        header[PAYLOAD_OFFSET..PAYLOAD_OFFSET + 4].copy_from_slice(&(length as u32).to_ne_bytes());
        self.ring.commit(answered.index, buffers, asked.commit_id)
    }

    /// Takes back what the kernel has of us.
    fn reclaim_buffers(&mut self) -> io::Result<()> {
        let start = clock::now();
        loop {
            while let Some(event) = self.ring.next_event()? {
                if matches!(event, RingEvent::Woken) {
                    self.drain_waker();
                }
            }
            let left = RECLAIM_TIMEOUT.saturating_sub(start.elapsed());
            match self.ring.lent_count() {
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
fn is_connection_end(error: &io::Error) -> bool {
    let ends = [
        Code::ENOTCONN,
        Code::ECONNABORTED,
        Code::ECANCELED,
        Code::ENOENT,
    ];
    let code = error.raw_os_error().map(Code::from_raw);
    code.is_some_and(|code| ends.contains(&code))
}
