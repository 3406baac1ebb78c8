//! Frames of many calls on one TCP connection, in chunks, so that a small frame never waits for a
//! whole large one; and heartbeats.
//!
//! A piece is a header (call, then kind and length in one word; 32 bits each, little endian) and
//! that many bytes. The first chunk of a call begins with the lengths of head and body and holds
//! the whole head; all chunks together are the frame.

use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{Mutex, watch};

use crate::buffer::Buffer;
use crate::error::{Error, ErrorCode, Result};
use crate::net::Frame;
use crate::net::hello::{
    FRAME_TIMEOUT_MS, IDLE_TIMEOUT_MS, KEEP_ALIVE_INTERVAL_MS, connection_error, decode_lengths,
    encode_lengths, peer_closed_error,
};
use crate::net::memory_budget::{BudgetPermit, ConnectionBudget};
use crate::net::tls::TlsTcpStream;

/// Bytes of a body in one chunk, the most that other frames wait for.
const CHUNK_BYTES: usize = 256 << 10;

/// Longest hello, in bytes, and answer to it: an error has a text.
const HELLO_BYTES_MAX: usize = 4 << 10;

/// Pieces given to one write of the socket.
const WRITE_SLICES_MAX: usize = 8;

/// Frames in progress at once on one connection, from a peer without another bound.
const PARTIAL_FRAMES_MAX: usize = 1024;

const DATA: u32 = 0;
const CANCEL: u32 = 1;
const KEEPALIVE: u32 = 2;

/// A message of the peer.
pub(super) enum FrameEvent {
    /// A whole frame of a call, with its place in the room.
    Frame(u32, Frame, Option<BudgetPermit>),
    /// There was no room for the call; its frame was thrown away.
    Refused(u32),
    /// The peer no longer wants an answer.
    Cancel(u32),
}

/// The sending half of a connection, and the liveness state that both halves share.
pub(super) struct FrameSender {
    write_state: Mutex<WriteState>,
    closed: watch::Sender<bool>,
    /// Reads and writes that moved bytes, and ticks of [`FrameSender::run_keepalive`].
    reads: AtomicU64,
    writes: AtomicU64,
    ticks: AtomicU64,
}

struct WriteState {
    writer: Option<Box<dyn AsyncWrite + Send + Unpin>>,
    /// Bytes that must be sent before anything else. A writer may be cancelled at any moment; the
    /// next one continues here, so that chunks stay whole.
    unsent: VecDeque<Bytes>,
}

/// The two halves of a connection. Requests are held to `room`, if there is one.
pub(super) fn split_stream(
    stream: impl AsyncRead + AsyncWrite + Send + 'static,
    budget: Option<ConnectionBudget>,
) -> (Arc<FrameSender>, FrameReceiver) {
    let (read, write) = tokio::io::split(stream);
    let sender = Arc::new(FrameSender {
        write_state: Mutex::new(WriteState {
            writer: Some(Box::new(write)),
            unsent: VecDeque::new(),
        }),
        closed: watch::Sender::new(false),
        reads: AtomicU64::new(0),
        writes: AtomicU64::new(0),
        ticks: AtomicU64::new(0),
    });
    let receiver = FrameReceiver {
        reader: Box::new(read),
        partial_frames: HashMap::new(),
        budget,
        sender: sender.clone(),
        last_check_tick: 0,
    };
    (sender, receiver)
}

impl FrameSender {
    /// Sends a frame, interleaved with other calls' chunks.
    ///
    /// # Errors
    /// `Malformed` when it is too long, `Unreachable` when the connection is broken.
    pub(super) async fn send(&self, call: u32, (head, mut body): Frame) -> Result<()> {
        let lengths = encode_lengths(&head, &body)?;
        let first = body.split_to(body.len().min(CHUNK_BYTES));
        let length = lengths.len() + head.len() + first.len();
        let mut chunk_header = header(call, DATA, length);
        chunk_header.put_slice(&lengths);
        self.write_slices([chunk_header.freeze(), head, first])
            .await?;
        while !body.is_empty() {
            let chunk = body.split_to(body.len().min(CHUNK_BYTES));
            let chunk_header = header(call, DATA, chunk.len()).freeze();
            self.write_slices([chunk_header, chunk, Bytes::new()])
                .await?;
        }
        Ok(())
    }

    /// Tells the peer that the caller no longer waits for an answer.
    pub(super) async fn cancel(&self, call: u32) {
        let word = header(call, CANCEL, 0).freeze();
        // A broken connection has no calls to cancel.
        let _ = self.write_slices([word, Bytes::new(), Bytes::new()]).await;
    }

    /// Ends the connection and wakes all waiting senders.
    pub(super) async fn close(&self) {
        self.closed.send_replace(true);
        self.write_state.lock().await.writer = None;
    }

    /// Asks for the end: [`FrameSender::closed`] comes true.
    pub(super) fn request_close(&self) {
        self.closed.send_replace(true);
    }

    /// Waits for the end.
    pub(super) async fn wait_closed(&self) {
        // The sender lives as long as `self`.
        let _ = self.closed.subscribe().wait_for(|closed| *closed).await;
    }

    /// Sends heartbeats on an idle connection, until the peer has been silent for too long or
    /// `go_on`, called at every tick, returns false.
    pub(super) async fn run_keepalive(&self, mut go_on: impl FnMut() -> bool) -> Error {
        let (mut heard, mut sent, mut silent_ms) = (0, 0, 0);
        loop {
            tokio::time::sleep(Duration::from_millis(KEEP_ALIVE_INTERVAL_MS)).await;
            self.ticks.fetch_add(1, Ordering::Relaxed);
            if !go_on() {
                return Error::new(ErrorCode::Unreachable, "closed after nobody used it");
            }
            let now = self.reads.load(Ordering::Relaxed);
            silent_ms = if now == heard {
                silent_ms + KEEP_ALIVE_INTERVAL_MS
            } else {
                0
            };
            heard = now;
            if silent_ms >= u64::from(IDLE_TIMEOUT_MS) {
                return Error::new(ErrorCode::Unreachable, "timed out");
            }
            if sent == self.writes.load(Ordering::Relaxed) {
                self.send_keepalive().await;
            }
            sent = self.writes.load(Ordering::Relaxed);
        }
    }

    /// Sends a heartbeat, unless another frame is being sent.
    async fn send_keepalive(&self) {
        let Ok(mut writing) = self.write_state.try_lock() else {
            return;
        };
        if writing.unsent.is_empty() {
            writing.unsent.push_back(header(0, KEEPALIVE, 0).freeze());
        }
        let soon = Duration::from_millis(KEEP_ALIVE_INTERVAL_MS);
        // Unsent bytes stay buffered; the reader of this connection sees the failure.
        let _ = tokio::time::timeout(soon, self.flush_unsent(&mut writing)).await;
    }

    async fn write_slices(&self, words: [Bytes; 3]) -> Result<()> {
        let writing = async {
            let mut writing = self.write_state.lock().await;
            let words = words.into_iter().filter(|w| !w.is_empty());
            writing.unsent.extend(words);
            self.flush_unsent(&mut writing).await
        };
        tokio::select! {
            biased;
            written = writing => written.map_err(|e| connection_error(&e)),
            () = self.wait_closed() => {
                Err(Error::new(ErrorCode::Unreachable, "the connection ended"))
            }
        }
    }

    async fn flush_unsent(&self, writing: &mut WriteState) -> io::Result<()> {
        let WriteState {
            writer: half,
            unsent: left,
        } = writing;
        let half = half
            .as_mut()
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotConnected, "the connection ended"))?;
        while !left.is_empty() {
            let written = poll_fn(|context| {
                let mut slices = [IoSlice::new(&[]); WRITE_SLICES_MAX];
                let count = left.len().min(WRITE_SLICES_MAX);
                for (slice, word) in slices.iter_mut().zip(left.iter()) {
                    *slice = IoSlice::new(word);
                }
                Pin::new(&mut *half).poll_write_vectored(context, &slices[..count])
            })
            .await?;
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            advance(left, written);
        }
        half.flush().await?;
        self.writes.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// Takes `count` bytes off the front.
fn advance(left: &mut VecDeque<Bytes>, mut count: usize) {
    while count > 0 {
        let Some(first) = left.front_mut() else {
            return;
        };
        let taken = count.min(first.len());
        first.advance(taken);
        count -= taken;
        if first.is_empty() {
            left.pop_front();
        }
    }
}

fn header(call: u32, kind: u32, length: usize) -> BytesMut {
    // A head and a piece together are far below the 24 bits of a length.
    let length = u32::try_from(length).unwrap_or(u32::MAX) & 0x00ff_ffff;
    let mut header = BytesMut::with_capacity(16);
    header.put_u32_le(call);
    header.put_u32_le(kind << 24 | length);
    header
}

/// The receiving half of a connection.
pub(super) struct FrameReceiver {
    reader: Box<dyn AsyncRead + Send + Unpin>,
    partial_frames: HashMap<u32, PartialFrame>,
    budget: Option<ConnectionBudget>,
    sender: Arc<FrameSender>,
    /// The tick of the last search for incomplete frames.
    last_check_tick: u64,
}

/// A frame of which more is to come.
struct PartialFrame {
    head: Bytes,
    body: Buffer,
    /// Missing bytes of `body`.
    missing_bytes: usize,
    /// `None` without accounting, or without space: the body is discarded then.
    permit: Option<BudgetPermit>,
    is_refused: bool,
    start_tick: u64,
}

impl FrameReceiver {
    /// The next word. May be cancelled only together with the connection.
    ///
    /// # Errors
    /// `Malformed` for an invalid frame, `Unreachable` for a broken connection.
    pub(super) async fn next_event(&mut self) -> Result<FrameEvent> {
        loop {
            self.check_stalled_frames()?;
            let mut word = [0; 8];
            self.fill(&mut (&mut word[..]).limit(8)).await?;
            let [a, b, c, d, e, f, g, h] = word;
            let (call, word) = (
                u32::from_le_bytes([a, b, c, d]),
                u32::from_le_bytes([e, f, g, h]),
            );
            let length = (word & 0x00ff_ffff) as usize;
            match (word >> 24, length) {
                (DATA, _) => {
                    if let Some(word) = self.take_chunk(call, length).await? {
                        return Ok(word);
                    }
                }
                (CANCEL, 0) => {
                    self.partial_frames.remove(&call);
                    return Ok(FrameEvent::Cancel(call));
                }
                (KEEPALIVE, 0) => {}
                (kind, _) => {
                    let text = format!("a piece of the unknown kind {kind}");
                    return Err(Error::new(ErrorCode::Malformed, text));
                }
            }
        }
    }

    async fn take_chunk(&mut self, call: u32, mut length: usize) -> Result<Option<FrameEvent>> {
        let mut partial_frame = match self.partial_frames.remove(&call) {
            Some(partial_frame) => partial_frame,
            None => {
                let (partial_frame, read) = self.begin_frame(length).await?;
                length -= read;
                partial_frame
            }
        };
        if length > partial_frame.missing_bytes {
            return Err(malformed("a piece is longer than its frame"));
        }
        partial_frame.missing_bytes -= length;
        if partial_frame.is_refused {
            self.skip(length).await?;
        } else {
            self.fill(&mut (&mut *partial_frame.body).limit(length))
                .await?;
        }
        if partial_frame.missing_bytes > 0 {
            if length == 0 || self.partial_frames.len() >= PARTIAL_FRAMES_MAX {
                return Err(malformed("too many frames are under way"));
            }
            self.partial_frames.insert(call, partial_frame);
            return Ok(None);
        }
        let frame = (partial_frame.head, partial_frame.body.freeze());
        Ok(Some(match partial_frame.is_refused {
            true => FrameEvent::Refused(call),
            false => FrameEvent::Frame(call, frame, partial_frame.permit),
        }))
    }

    /// Reads lengths and head of a frame of which `length` bytes come at once. Answers also how
    /// many bytes these were.
    async fn begin_frame(&mut self, length: usize) -> Result<(PartialFrame, usize)> {
        let mut lengths = [0; 8];
        if length < lengths.len() {
            return Err(malformed("a frame without lengths"));
        }
        self.fill(&mut (&mut lengths[..]).limit(8)).await?;
        let (head_length, body_length) = decode_lengths(lengths)?;
        if head_length > length - lengths.len() {
            return Err(malformed("a frame's head in several pieces"));
        }
        let budget = self.budget.as_ref();
        let permit = budget.map(|room| room.try_reserve(head_length + body_length));
        let refused = permit.as_ref().is_some_and(Option::is_none);
        let mut head = BytesMut::new();
        if refused {
            self.skip(head_length).await?;
        } else {
            head.reserve(head_length);
            self.fill(&mut (&mut head).limit(head_length)).await?;
        }
        let partial_frame = PartialFrame {
            head: head.freeze(),
            body: Buffer::with_capacity(if refused { 0 } else { body_length }),
            missing_bytes: body_length,
            permit: permit.flatten(),
            is_refused: refused,
            start_tick: self.sender.ticks.load(Ordering::Relaxed),
        };
        Ok((partial_frame, lengths.len() + head_length))
    }

    async fn skip(&mut self, mut length: usize) -> Result<()> {
        let mut unwanted = [0; 4096];
        while length > 0 {
            let count = length.min(unwanted.len());
            self.fill(&mut (&mut unwanted[..count]).limit(count))
                .await?;
            length -= count;
        }
        Ok(())
    }

    /// Reads until `into` is full.
    async fn fill(&mut self, into: &mut (impl BufMut + Send)) -> Result<()> {
        while into.has_remaining_mut() {
            let count = self
                .reader
                .read_buf(into)
                .await
                .map_err(|e| connection_error(&e))?;
            if count == 0 {
                return Err(peer_closed_error());
            }
            self.sender.reads.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Peers send heartbeats, so this is called at least once a second.
    fn check_stalled_frames(&mut self) -> Result<()> {
        let now = self.sender.ticks.load(Ordering::Relaxed);
        if now == self.last_check_tick {
            return Ok(());
        }
        self.last_check_tick = now;
        let limit = FRAME_TIMEOUT_MS / KEEP_ALIVE_INTERVAL_MS;
        if self
            .partial_frames
            .values()
            .any(|partial_frame| now - partial_frame.start_tick > limit)
        {
            let text =
                format!("a frame took more than {FRAME_TIMEOUT_MS} ms; the link is too slow");
            return Err(Error::new(ErrorCode::DeadlineExceeded, text));
        }
        Ok(())
    }
}

/// Sends a head alone, before anything else on a connection: a frame in one piece.
pub(super) async fn write_head(stream: &mut TlsTcpStream, head: &[u8]) -> io::Result<()> {
    let lengths = encode_lengths(head, &[]).map_err(io::Error::other)?;
    let mut frame = header(0, DATA, lengths.len() + head.len());
    frame.put_slice(&lengths);
    frame.put_slice(head);
    stream.write_all(&frame).await?;
    stream.flush().await
}

/// Reads the bytes of [`write_head`].
pub(super) async fn read_head(stream: &mut TlsTcpStream) -> io::Result<Result<Bytes>> {
    let mut words = [0; 16];
    stream.read_exact(&mut words).await?;
    let [_, _, _, _, _, _, _, _, a, b, c, d, e, f, g, h] = words;
    let length = match decode_lengths([a, b, c, d, e, f, g, h]) {
        Ok((head, 0)) if head <= HELLO_BYTES_MAX => head,
        Ok(_) => return Ok(Err(malformed("a connection begins with a hello"))),
        Err(error) => return Ok(Err(error)),
    };
    let mut head = vec![0; length];
    stream.read_exact(&mut head).await?;
    Ok(Ok(head.into()))
}

fn malformed(text: &str) -> Error {
    Error::new(ErrorCode::Malformed, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::{BODY_BYTES_MAX, HEAD_BYTES_MAX};
    use crate::net::memory_budget::{CALL_WEIGHT_KIB_MIN, ProcessBudget};
    use tokio::io::DuplexStream;

    /// Holds less than a piece, as a slow link does.
    const LINK_BYTES: usize = 4096;

    fn frame(head: &'static [u8], body: usize) -> Frame {
        (head.into(), vec![7; body].into())
    }

    fn sender_and_receiver(budget: Option<usize>) -> (Arc<FrameSender>, FrameReceiver) {
        let (near, far) = tokio::io::duplex(LINK_BYTES);
        let all = ProcessBudget::new(1 << 20);
        let budget = budget.map(|kib| ConnectionBudget::with_budgets(kib, &all));
        (split_stream(near, None).0, split_stream(far, budget).1)
    }

    async fn call_and_length(receiver: &mut FrameReceiver) -> (u32, usize) {
        match receiver.next_event().await.expect("a word") {
            FrameEvent::Frame(call, (head, body), _) => (call, head.len() + body.len()),
            FrameEvent::Refused(call) => (call, 0),
            FrameEvent::Cancel(call) => (call, usize::MAX),
        }
    }

    #[tokio::test]
    async fn small_frames_overtake_large_ones() {
        let (sender, mut receiver) = sender_and_receiver(None);
        let sending = async {
            let (large, small) = (frame(b"large", 4 << 20), frame(b"small", 100));
            tokio::join!(sender.send(1, large), sender.send(2, small))
        };
        let receiving = async {
            (
                call_and_length(&mut receiver).await,
                call_and_length(&mut receiver).await,
            )
        };
        let ((large, small), words) = tokio::join!(sending, receiving);
        large.and(small).expect("sent");
        assert_eq!(words, ((2, 105), (1, 5 + (4 << 20))));
    }

    #[tokio::test]
    async fn a_cancelled_send_keeps_the_connection_usable() {
        let (sender, mut receiver) = sender_and_receiver(None);
        let given_up = Duration::from_millis(20);
        let sending = sender.send(1, frame(b"large", 2 << 20));
        assert!(tokio::time::timeout(given_up, sending).await.is_err());
        let sending = async {
            sender.cancel(1).await;
            sender.send(2, frame(b"small", 1)).await
        };
        let receiving = async {
            (
                call_and_length(&mut receiver).await,
                call_and_length(&mut receiver).await,
            )
        };
        let (sent, words) = tokio::join!(sending, receiving);
        sent.expect("sent");
        assert_eq!(words, ((1, usize::MAX), (2, 6)));
        assert!(receiver.partial_frames.is_empty());
    }

    #[tokio::test]
    async fn frames_beyond_the_memory_budget_are_refused() {
        let (sender, mut receiver) = sender_and_receiver(Some(3 * CALL_WEIGHT_KIB_MIN));
        let sending = async {
            for call in 0..4 {
                let frame = frame(b"head", if call == 1 { 1 << 20 } else { 10 });
                sender.send(call, frame).await.expect("sent");
            }
        };
        let receiving = async {
            let mut words = Vec::new();
            while words.len() < 4 {
                words.push(receiver.next_event().await.expect("a word"));
            }
            words
        };
        let ((), words) = tokio::join!(sending, receiving);
        let refused = |word: &FrameEvent| matches!(word, FrameEvent::Refused(1));
        assert_eq!(
            words.iter().map(refused).collect::<Vec<_>>(),
            [false, true, false, false]
        );
        sender.request_close();
        assert!(words.iter().all(|word| match word {
            FrameEvent::Frame(_, (head, _), _) => head.as_ref() == b"head",
            _ => true,
        }));
        let late = sender.send(9, frame(b"late", 1 << 20)).await;
        assert_eq!(late.expect_err("closed").code, ErrorCode::Unreachable);
    }

    /// The receiver's reaction to bytes that no valid sender sends.
    async fn receive_error(bytes: Vec<u8>) -> ErrorCode {
        let (near, far): (DuplexStream, DuplexStream) = tokio::io::duplex(1 << 16);
        let mut receiver = split_stream(far, None).1;
        let sending = async move {
            let mut near = near;
            let _ = near.write_all(&bytes).await;
        };
        let receiving = async {
            loop {
                if let Err(error) = receiver.next_event().await {
                    return error.code;
                }
            }
        };
        tokio::join!(sending, receiving).1
    }

    #[tokio::test]
    async fn malformed_chunks_are_refused() {
        let piece = |call, kind, length, bytes: &[u8]| {
            let mut piece = header(call, kind, length);
            piece.put_slice(bytes);
            piece.to_vec()
        };
        let lengths = |head: u32, body: u32| {
            let mut lengths = head.to_le_bytes().to_vec();
            lengths.extend(body.to_le_bytes());
            lengths
        };
        let begun = piece(1, DATA, 9, &[&lengths(0, 100)[..], b"x"].concat());
        let nonsense = [
            piece(1, 3, 0, b""),
            piece(1, 255, 0, b""),
            piece(1, CANCEL, 1, b"x"),
            piece(0, KEEPALIVE, 5, b"xxxxx"),
            piece(1, DATA, 7, b"xxxxxxx"),
            piece(1, DATA, 8, &lengths(1, 0)),
            piece(1, DATA, 8, &lengths(HEAD_BYTES_MAX + 1, 0)),
            piece(1, DATA, 8, &lengths(0, BODY_BYTES_MAX + 1)),
            piece(1, DATA, 9, &[&lengths(0, 0)[..], b"x"].concat()),
            [begun.clone(), piece(1, DATA, 0, b"")].concat(),
            [begun.clone(), piece(1, DATA, 101, &[0; 101])].concat(),
            (0..=PARTIAL_FRAMES_MAX as u32)
                .flat_map(|call| piece(call, DATA, 9, &[&lengths(0, 9)[..], b"x"].concat()))
                .collect(),
        ];
        for (number, bytes) in nonsense.into_iter().enumerate() {
            assert_eq!(receive_error(bytes).await, ErrorCode::Malformed, "{number}");
        }
        for cut in 0..begun.len() {
            let verdict = receive_error(begun[..cut].to_vec()).await;
            assert_eq!(verdict, ErrorCode::Unreachable, "{cut}");
        }
    }
}
