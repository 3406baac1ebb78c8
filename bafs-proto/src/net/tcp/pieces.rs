//! What travels on one TCP connection: frames of many calls, in pieces, so that a small one never
//! waits for a large one to end; and signs of life.
//!
//! A piece is a header (call, then kind and length in one word; 32 bits each, little endian) and
//! that many bytes. The first piece of a call begins with the lengths of head and body and holds
//! the whole head; all pieces together are the frame.

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
    FRAME_MS, IDLE_MS, KEEP_ALIVE_MS, broke_off, broken, decode_lengths, encode_lengths,
};
use crate::net::room::{Place, Room};
use crate::net::tls::Secured;

/// Bytes of a body in one piece; what others wait for at most.
const PIECE_BYTES: usize = 256 << 10;

/// Longest hello, in bytes, and answer to it: an error has a text.
const HELLO_BYTES_MAX: usize = 4 << 10;

/// Pieces given to one write of the socket.
const SLICES: usize = 8;

/// Frames that may be under way at once on one connection, from a peer that has no other bound.
const PARTS_MAX: usize = 1024;

const DATA: u32 = 0;
const CANCEL: u32 = 1;
const ALIVE: u32 = 2;

/// What a peer said.
pub(super) enum Word {
    /// A whole frame of a call, with its place in the room.
    Frame(u32, Frame, Option<Place>),
    /// There was no room for the call; its frame was thrown away.
    Refused(u32),
    /// The peer no longer wants an answer.
    Cancel(u32),
}

/// The sending half of a connection, and what both halves know of its life.
pub(super) struct Outbox {
    writing: Mutex<Writing>,
    closed: watch::Sender<bool>,
    /// Reads and writes that moved bytes, and ticks of [`Outbox::keep`].
    heard: AtomicU64,
    sent: AtomicU64,
    ticks: AtomicU64,
}

struct Writing {
    half: Option<Box<dyn AsyncWrite + Send + Unpin>>,
    /// What must go out before anything else. Whoever writes may stop to wait at any moment; the
    /// next one goes on here, so that pieces stay whole.
    left: VecDeque<Bytes>,
}

/// The two halves of a connection. Requests are held to `room`, if there is one.
pub(super) fn halves(
    stream: impl AsyncRead + AsyncWrite + Send + 'static,
    room: Option<Room>,
) -> (Arc<Outbox>, Inbox) {
    let (read, write) = tokio::io::split(stream);
    let outbox = Arc::new(Outbox {
        writing: Mutex::new(Writing {
            half: Some(Box::new(write)),
            left: VecDeque::new(),
        }),
        closed: watch::Sender::new(false),
        heard: AtomicU64::new(0),
        sent: AtomicU64::new(0),
        ticks: AtomicU64::new(0),
    });
    let inbox = Inbox {
        read: Box::new(read),
        parts: HashMap::new(),
        room,
        outbox: outbox.clone(),
        looked: 0,
    };
    (outbox, inbox)
}

impl Outbox {
    /// Sends a frame, other calls' pieces between its own.
    ///
    /// # Errors
    /// `Malformed` when it is too long, `Unreachable` when the connection is broken.
    pub(super) async fn send(&self, call: u32, (head, mut body): Frame) -> Result<()> {
        let lengths = encode_lengths(&head, &body)?;
        let first = body.split_to(body.len().min(PIECE_BYTES));
        let length = lengths.len() + head.len() + first.len();
        let mut begin = header(call, DATA, length);
        begin.put_slice(&lengths);
        self.put([begin.freeze(), head, first]).await?;
        while !body.is_empty() {
            let piece = body.split_to(body.len().min(PIECE_BYTES));
            let begin = header(call, DATA, piece.len()).freeze();
            self.put([begin, piece, Bytes::new()]).await?;
        }
        Ok(())
    }

    /// Says that nobody waits for an answer any more.
    pub(super) async fn cancel(&self, call: u32) {
        let word = header(call, CANCEL, 0).freeze();
        // A broken connection has no calls to cancel.
        let _ = self.put([word, Bytes::new(), Bytes::new()]).await;
    }

    /// Ends the connection; whoever waits to send stops waiting.
    pub(super) async fn close(&self) {
        self.closed.send_replace(true);
        self.writing.lock().await.half = None;
    }

    /// Asks for the end: [`Outbox::closed`] comes true.
    pub(super) fn ask_to_close(&self) {
        self.closed.send_replace(true);
    }

    /// Waits for the end.
    pub(super) async fn closed(&self) {
        // The sender lives as long as `self`.
        let _ = self.closed.subscribe().wait_for(|closed| *closed).await;
    }

    /// Gives signs of life while nothing else is said, until the peer has been silent for too long
    /// or `go_on`, asked at every tick, says no.
    pub(super) async fn keep(&self, mut go_on: impl FnMut() -> bool) -> Error {
        let (mut heard, mut sent, mut silent_ms) = (0, 0, 0);
        loop {
            tokio::time::sleep(Duration::from_millis(KEEP_ALIVE_MS)).await;
            self.ticks.fetch_add(1, Ordering::Relaxed);
            if !go_on() {
                return Error::new(ErrorCode::Unreachable, "closed after nobody used it");
            }
            let now = self.heard.load(Ordering::Relaxed);
            silent_ms = if now == heard {
                silent_ms + KEEP_ALIVE_MS
            } else {
                0
            };
            heard = now;
            if silent_ms >= u64::from(IDLE_MS) {
                return Error::new(ErrorCode::Unreachable, "timed out");
            }
            if sent == self.sent.load(Ordering::Relaxed) {
                self.give_sign().await;
            }
            sent = self.sent.load(Ordering::Relaxed);
        }
    }

    /// Says that this end lives, unless something else is being said.
    async fn give_sign(&self) {
        let Ok(mut writing) = self.writing.try_lock() else {
            return;
        };
        if writing.left.is_empty() {
            writing.left.push_back(header(0, ALIVE, 0).freeze());
        }
        let soon = Duration::from_millis(KEEP_ALIVE_MS);
        // What does not go now stays; a failure shows to the reader of this connection.
        let _ = tokio::time::timeout(soon, self.drain(&mut writing)).await;
    }

    async fn put(&self, words: [Bytes; 3]) -> Result<()> {
        let writing = async {
            let mut writing = self.writing.lock().await;
            let words = words.into_iter().filter(|w| !w.is_empty());
            writing.left.extend(words);
            self.drain(&mut writing).await
        };
        tokio::select! {
            biased;
            written = writing => written.map_err(|e| broken(&e)),
            () = self.closed() => Err(Error::new(ErrorCode::Unreachable, "the connection ended")),
        }
    }

    async fn drain(&self, writing: &mut Writing) -> io::Result<()> {
        let Writing { half, left } = writing;
        let half = half
            .as_mut()
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotConnected, "the connection ended"))?;
        while !left.is_empty() {
            let written = poll_fn(|context| {
                let mut slices = [IoSlice::new(&[]); SLICES];
                let count = left.len().min(SLICES);
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
        self.sent.fetch_add(1, Ordering::Relaxed);
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
pub(super) struct Inbox {
    read: Box<dyn AsyncRead + Send + Unpin>,
    parts: HashMap<u32, Part>,
    room: Option<Room>,
    outbox: Arc<Outbox>,
    /// The tick at which old parts were last looked for.
    looked: u64,
}

/// A frame of which more is to come.
struct Part {
    head: Bytes,
    body: Buffer,
    /// Bytes that `body` lacks.
    lacks: usize,
    /// `None` when nobody counts, or when there was no room: the body is thrown away then.
    place: Option<Place>,
    refused: bool,
    since: u64,
}

impl Inbox {
    /// The next word. To be given up only together with the connection.
    ///
    /// # Errors
    /// `Malformed` for what no peer says, `Unreachable` when the connection is broken.
    pub(super) async fn next(&mut self) -> Result<Word> {
        loop {
            self.look_for_old_parts()?;
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
                    if let Some(word) = self.take_piece(call, length).await? {
                        return Ok(word);
                    }
                }
                (CANCEL, 0) => {
                    self.parts.remove(&call);
                    return Ok(Word::Cancel(call));
                }
                (ALIVE, 0) => {}
                (kind, _) => {
                    let text = format!("a piece of the unknown kind {kind}");
                    return Err(Error::new(ErrorCode::Malformed, text));
                }
            }
        }
    }

    async fn take_piece(&mut self, call: u32, mut length: usize) -> Result<Option<Word>> {
        let mut part = match self.parts.remove(&call) {
            Some(part) => part,
            None => {
                let (part, read) = self.begin(length).await?;
                length -= read;
                part
            }
        };
        if length > part.lacks {
            return Err(malformed("a piece is longer than its frame"));
        }
        part.lacks -= length;
        if part.refused {
            self.skip(length).await?;
        } else {
            self.fill(&mut (&mut *part.body).limit(length)).await?;
        }
        if part.lacks > 0 {
            if length == 0 || self.parts.len() >= PARTS_MAX {
                return Err(malformed("too many frames are under way"));
            }
            self.parts.insert(call, part);
            return Ok(None);
        }
        let frame = (part.head, part.body.freeze());
        Ok(Some(match part.refused {
            true => Word::Refused(call),
            false => Word::Frame(call, frame, part.place),
        }))
    }

    /// Reads lengths and head of a frame of which `length` bytes come at once. Answers also how
    /// many bytes these were.
    async fn begin(&mut self, length: usize) -> Result<(Part, usize)> {
        let mut lengths = [0; 8];
        if length < lengths.len() {
            return Err(malformed("a frame without lengths"));
        }
        self.fill(&mut (&mut lengths[..]).limit(8)).await?;
        let (head_length, body_length) = decode_lengths(lengths)?;
        if head_length > length - lengths.len() {
            return Err(malformed("a frame's head in several pieces"));
        }
        let room = self.room.as_ref();
        let place = room.map(|room| room.take(head_length + body_length));
        let refused = place.as_ref().is_some_and(Option::is_none);
        let mut head = BytesMut::new();
        if refused {
            self.skip(head_length).await?;
        } else {
            head.reserve(head_length);
            self.fill(&mut (&mut head).limit(head_length)).await?;
        }
        let part = Part {
            head: head.freeze(),
            body: Buffer::with_room(if refused { 0 } else { body_length }),
            lacks: body_length,
            place: place.flatten(),
            refused,
            since: self.outbox.ticks.load(Ordering::Relaxed),
        };
        Ok((part, lengths.len() + head_length))
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
            let count = self.read.read_buf(into).await.map_err(|e| broken(&e))?;
            if count == 0 {
                return Err(broke_off());
            }
            self.outbox.heard.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Peers give signs of life, so this is asked once a second at least.
    fn look_for_old_parts(&mut self) -> Result<()> {
        let now = self.outbox.ticks.load(Ordering::Relaxed);
        if now == self.looked {
            return Ok(());
        }
        self.looked = now;
        let limit = FRAME_MS / KEEP_ALIVE_MS;
        if self.parts.values().any(|part| now - part.since > limit) {
            let text = format!("a frame took more than {FRAME_MS} ms; the link is too slow");
            return Err(Error::new(ErrorCode::DeadlineExceeded, text));
        }
        Ok(())
    }
}

/// Sends a head alone, before anything else on a connection: a frame in one piece.
pub(super) async fn write_frame(stream: &mut Secured, head: &[u8]) -> io::Result<()> {
    let lengths = encode_lengths(head, &[]).map_err(io::Error::other)?;
    let mut frame = header(0, DATA, lengths.len() + head.len());
    frame.put_slice(&lengths);
    frame.put_slice(head);
    stream.write_all(&frame).await?;
    stream.flush().await
}

/// Reads what [`write_frame`] wrote.
pub(super) async fn read_frame(stream: &mut Secured) -> io::Result<Result<Bytes>> {
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
    use crate::net::room::{CALL_KIB_MIN, Rooms};
    use tokio::io::DuplexStream;

    /// Holds less than a piece, as a slow link does.
    const LINK_BYTES: usize = 4096;

    fn frame(head: &'static [u8], body: usize) -> Frame {
        (head.into(), vec![7; body].into())
    }

    fn link(room: Option<usize>) -> (Arc<Outbox>, Inbox) {
        let (near, far) = tokio::io::duplex(LINK_BYTES);
        let all = Rooms::new(1 << 20);
        let room = room.map(|kib| Room::of(kib, &all));
        (halves(near, None).0, halves(far, room).1)
    }

    async fn heard(inbox: &mut Inbox) -> (u32, usize) {
        match inbox.next().await.expect("a word") {
            Word::Frame(call, (head, body), _) => (call, head.len() + body.len()),
            Word::Refused(call) => (call, 0),
            Word::Cancel(call) => (call, usize::MAX),
        }
    }

    #[tokio::test]
    async fn small_frames_pass_large_ones() {
        let (outbox, mut inbox) = link(None);
        let sending = async {
            let (large, small) = (frame(b"large", 4 << 20), frame(b"small", 100));
            tokio::join!(outbox.send(1, large), outbox.send(2, small))
        };
        let receiving = async { (heard(&mut inbox).await, heard(&mut inbox).await) };
        let ((large, small), words) = tokio::join!(sending, receiving);
        large.and(small).expect("sent");
        assert_eq!(words, ((2, 105), (1, 5 + (4 << 20))));
    }

    #[tokio::test]
    async fn who_stops_to_wait_leaves_a_whole_connection() {
        let (outbox, mut inbox) = link(None);
        let given_up = Duration::from_millis(20);
        let sending = outbox.send(1, frame(b"large", 2 << 20));
        assert!(tokio::time::timeout(given_up, sending).await.is_err());
        let sending = async {
            outbox.cancel(1).await;
            outbox.send(2, frame(b"small", 1)).await
        };
        let receiving = async { (heard(&mut inbox).await, heard(&mut inbox).await) };
        let (sent, words) = tokio::join!(sending, receiving);
        sent.expect("sent");
        assert_eq!(words, ((1, usize::MAX), (2, 6)));
        assert!(inbox.parts.is_empty());
    }

    #[tokio::test]
    async fn more_than_there_is_room_for_is_refused() {
        let (outbox, mut inbox) = link(Some(3 * CALL_KIB_MIN));
        let sending = async {
            for call in 0..4 {
                let frame = frame(b"head", if call == 1 { 1 << 20 } else { 10 });
                outbox.send(call, frame).await.expect("sent");
            }
        };
        let receiving = async {
            let mut words = Vec::new();
            while words.len() < 4 {
                words.push(inbox.next().await.expect("a word"));
            }
            words
        };
        let ((), words) = tokio::join!(sending, receiving);
        let refused = |word: &Word| matches!(word, Word::Refused(1));
        assert_eq!(
            words.iter().map(refused).collect::<Vec<_>>(),
            [false, true, false, false]
        );
        outbox.ask_to_close();
        assert!(words.iter().all(|word| match word {
            Word::Frame(_, (head, _), _) => head.as_ref() == b"head",
            _ => true,
        }));
        let late = outbox.send(9, frame(b"late", 1 << 20)).await;
        assert_eq!(late.expect_err("closed").code, ErrorCode::Unreachable);
    }

    /// What a receiver says of bytes that no sender of ours sends.
    async fn verdict(bytes: Vec<u8>) -> ErrorCode {
        let (near, far): (DuplexStream, DuplexStream) = tokio::io::duplex(1 << 16);
        let mut inbox = halves(far, None).1;
        let sending = async move {
            let mut near = near;
            let _ = near.write_all(&bytes).await;
        };
        let receiving = async {
            loop {
                if let Err(error) = inbox.next().await {
                    return error.code;
                }
            }
        };
        tokio::join!(sending, receiving).1
    }

    #[tokio::test]
    async fn nonsense_is_refused() {
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
            piece(0, ALIVE, 5, b"xxxxx"),
            piece(1, DATA, 7, b"xxxxxxx"),
            piece(1, DATA, 8, &lengths(1, 0)),
            piece(1, DATA, 8, &lengths(HEAD_BYTES_MAX + 1, 0)),
            piece(1, DATA, 8, &lengths(0, BODY_BYTES_MAX + 1)),
            piece(1, DATA, 9, &[&lengths(0, 0)[..], b"x"].concat()),
            [begun.clone(), piece(1, DATA, 0, b"")].concat(),
            [begun.clone(), piece(1, DATA, 101, &[0; 101])].concat(),
            (0..=PARTS_MAX as u32)
                .flat_map(|call| piece(call, DATA, 9, &[&lengths(0, 9)[..], b"x"].concat()))
                .collect(),
        ];
        for (number, bytes) in nonsense.into_iter().enumerate() {
            assert_eq!(verdict(bytes).await, ErrorCode::Malformed, "{number}");
        }
        for cut in 0..begun.len() {
            let verdict = verdict(begun[..cut].to_vec()).await;
            assert_eq!(verdict, ErrorCode::Unreachable, "{cut}");
        }
    }
}
