//! The journal of the queue: facts and decisions in one append-only file, with snapshots. It does
//! not know what they mean.
//!
//! The file begins with a line that has the version. Frames follow: the length of the payload (4
//! bytes, little endian), the first half of its BLAKE3 digest (16 bytes), and the payload, which is
//! JSON: a snapshot of the queue, or a fact with what was decided because of it. A new file begins
//! with a snapshot. It gets its name when it is whole and synced.
//!
//! **Crashes.** A frame counts when it is whole. Only the last one can be incomplete: nobody was
//! told of it, and it is cut off. Its end is missing, or has zeros where its data did not come.
//! Everything else that is not whole is damage, which is `Malformed`: nothing is cut off.
//!
//! **A full disk.** A step that finds no room is cut off at once, as if nobody had told it.
//!
//! **Concurrency.** The file's directory has a lock, so one service at a time writes.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use bafs_proto::hash::Digest;
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode, Result};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use crate::event::{QueueDecision, QueueEvent};
use crate::logic::queue_state::QueueState;

/// First bytes of a journal.
const MAGIC: &[u8] = b"bafs-queue 1\n";

/// What a journal of any version begins with.
const MAGIC_PREFIX: &[u8] = b"bafs-queue ";

const CHECKSUM_BYTES: usize = 16;
const FRAME_HEAD_BYTES: usize = 4 + CHECKSUM_BYTES;

/// The file is written anew when so many bytes were written since the last snapshot, and no fewer
/// than that had: so at most half of the bytes are snapshots, and what is read is bounded.
const SNAPSHOT_BYTES_MIN: u64 = 4 << 20;

/// Largest payload: 100,000 workflows have some 40 MB.
const PAYLOAD_BYTES_MAX: u32 = 1 << 30;

/// Only the owner reads it: it names users and their work.
const OWNER_ONLY: u32 = 0o600;

/// A fact, when it was told, and what was decided because of it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueStep {
    /// When.
    pub at: Time,
    /// What happened.
    pub event: QueueEvent,
    /// What was decided.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub decisions: Vec<QueueDecision>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Frame {
    Snapshot(Box<QueueState>),
    Step(QueueStep),
}

/// The same, without a copy of the state.
#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
enum FrameToWrite<'f> {
    Snapshot(&'f QueueState),
    Step(&'f QueueStep),
}

/// The journal of one queue.
#[derive(Debug)]
pub struct QueueJournal {
    path: PathBuf,
    file: File,
    snapshot_bytes: u64,
    step_bytes: u64,
    /// The next snapshot is due when steps have so many bytes.
    snapshot_due_bytes: u64,
    /// Whether a write failed: the end of the file is not known then.
    is_broken: bool,
}

impl QueueJournal {
    /// Opens the journal at `path`, or begins one, and returns what it tells.
    ///
    /// # Errors
    /// `Malformed` if it is damaged, `VersionMismatch` if a later version wrote it, `ServerFault`
    /// if it cannot be read or written.
    pub fn open(path: &Path) -> Result<(Self, QueueState)> {
        let bytes = match fs::read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let state = QueueState::default();
                return Ok((Self::begin(path, &state)?, state));
            }
            Err(error) => return Err(io_error("read", path, &error)),
        };
        let (state, layout) = read_frames(&bytes).map_err(|error| error.context(path.display()))?;
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).open(path);
        let file = file.map_err(|error| io_error("open", path, &error))?;
        let mut journal = Self {
            path: path.to_owned(),
            file,
            snapshot_bytes: layout.snapshot_bytes,
            step_bytes: layout.end - layout.snapshot_bytes,
            snapshot_due_bytes: SNAPSHOT_BYTES_MIN.max(layout.snapshot_bytes),
            is_broken: false,
        };
        match layout.end < bytes.len() as u64 {
            true => journal.cut_to(layout.end)?,
            false => {
                let placed = journal.file.seek(SeekFrom::End(0));
                placed.map_err(|error| io_error("open", path, &error))?;
            }
        }
        Ok((journal, state))
    }

    /// Begins a journal with a state, in place of one that is there.
    fn begin(path: &Path, state: &QueueState) -> Result<Self> {
        let draft = Draft::write(path, state)?;
        draft.place(path)
    }

    /// Writes a step and syncs it. `state` is the state after it: a snapshot may be due.
    ///
    /// # Errors
    /// `NoSpaceBytes`: the disk is full, and the step is not in the file. `ServerFault`: it may be
    /// there or not, so the service must end.
    pub fn append(&mut self, step: &QueueStep, state: &QueueState) -> Result<()> {
        if self.is_broken {
            let text = format!("{} could not be written before", self.path.display());
            return Err(Error::new(ErrorCode::ServerFault, text));
        }
        let bytes = encode(&FrameToWrite::Step(step))?;
        self.is_broken = true;
        let written = self.file.write_all(&bytes);
        let written = written.and_then(|()| self.file.sync_data());
        if let Err(error) = written {
            let told = io_error("write", &self.path, &error);
            if told.code == ErrorCode::NoSpaceBytes {
                self.cut_to(self.end())?;
                self.is_broken = false;
            }
            return Err(told);
        }
        self.is_broken = false;
        self.step_bytes += bytes.len() as u64;
        if self.step_bytes < self.snapshot_due_bytes {
            return Ok(());
        }
        match Draft::write(&self.path, state) {
            // The step is in the file; a snapshot is only to keep that short.
            Err(error) if error.code == ErrorCode::NoSpaceBytes => {
                self.snapshot_due_bytes = self.step_bytes + SNAPSHOT_BYTES_MIN;
            }
            draft => *self = draft?.place(&self.path)?,
        }
        Ok(())
    }

    /// What the file tells.
    ///
    /// # Errors
    /// As [`Self::open`].
    pub(crate) fn read_state(&self) -> Result<QueueState> {
        let bytes = fs::read(&self.path).map_err(|error| io_error("read", &self.path, &error))?;
        let read = read_frames(&bytes).map_err(|error| error.context(self.path.display()))?;
        Ok(read.0)
    }

    /// Where the last whole frame ends.
    fn end(&self) -> u64 {
        self.snapshot_bytes + self.step_bytes
    }

    /// Cuts off what is behind the last whole frame.
    fn cut_to(&mut self, end: u64) -> Result<()> {
        let cut = self.file.set_len(end);
        let cut = cut.and_then(|()| self.file.sync_all());
        let cut = cut.and_then(|()| self.file.seek(SeekFrom::Start(end)));
        cut.map_err(|error| io_error("cut", &self.path, &error))?;
        Ok(())
    }
}

/// A new journal that has no name yet.
struct Draft {
    path: PathBuf,
    file: File,
    bytes: u64,
}

impl Draft {
    /// Writes a snapshot beside the journal at `path`.
    fn write(path: &Path, state: &QueueState) -> Result<Self> {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(encode(&FrameToWrite::Snapshot(state))?);
        let mut draft = path.as_os_str().to_owned();
        draft.push(".new");
        let draft = PathBuf::from(draft);
        let written = || {
            let mut options = OpenOptions::new();
            options.create(true).truncate(true).read(true).write(true);
            let mut file = options.mode(OWNER_ONLY).open(&draft)?;
            file.write_all(&bytes)?;
            file.sync_all()?;
            Ok(file)
        };
        match written() {
            Ok(file) => Ok(Self {
                path: draft,
                file,
                bytes: bytes.len() as u64,
            }),
            Err(error) => {
                let _ = fs::remove_file(&draft);
                Err(io_error("write", path, &error))
            }
        }
    }

    /// Gives it its name.
    fn place(self, path: &Path) -> Result<QueueJournal> {
        let placed = || {
            fs::rename(&self.path, path)?;
            let directory = path.parent().filter(|it| !it.as_os_str().is_empty());
            File::open(directory.unwrap_or_else(|| Path::new(".")))?.sync_all()
        };
        placed().map_err(|error| {
            let text = format!("cannot write {}: {error}", path.display());
            Error::new(ErrorCode::ServerFault, text)
        })?;
        Ok(QueueJournal {
            path: path.to_owned(),
            file: self.file,
            snapshot_bytes: self.bytes,
            step_bytes: 0,
            snapshot_due_bytes: SNAPSHOT_BYTES_MIN.max(self.bytes),
            is_broken: false,
        })
    }
}

/// Where things are in a journal.
struct JournalLayout {
    snapshot_bytes: u64,
    /// Where the last whole frame ends.
    end: u64,
}

fn read_frames(bytes: &[u8]) -> Result<(QueueState, JournalLayout)> {
    let Some(mut rest) = bytes.strip_prefix(MAGIC) else {
        return Err(match bytes.starts_with(MAGIC_PREFIX) {
            true => Error::new(
                ErrorCode::VersionMismatch,
                "was written by a later version of bafs; use that version",
            ),
            false => Error::new(ErrorCode::Malformed, "is no journal of a queue"),
        });
    };
    let mut state = None;
    let mut layout = JournalLayout {
        snapshot_bytes: 0,
        end: MAGIC.len() as u64,
    };
    while let Some((payload, after)) = split_frame(rest)? {
        let damaged = |error: serde_json::Error| {
            Error::new(ErrorCode::Malformed, format!("is damaged: {error}"))
        };
        match serde_json::from_slice(payload).map_err(damaged)? {
            Frame::Snapshot(snapshot) => {
                let mut snapshot = *snapshot;
                snapshot.rebuild_index();
                state = Some(snapshot);
            }
            Frame::Step(step) => {
                let state: &mut QueueState = state.as_mut().ok_or_else(no_snapshot)?;
                state.replay(step.at, &step.event, &step.decisions);
            }
        }
        layout.end += (rest.len() - after.len()) as u64;
        if layout.snapshot_bytes == 0 {
            layout.snapshot_bytes = layout.end;
        }
        rest = after;
    }
    Ok((state.ok_or_else(no_snapshot)?, layout))
}

/// The first frame and what is behind it; nothing if it is the last one, which a crash cut short.
fn split_frame(bytes: &[u8]) -> Result<Option<(&[u8], &[u8])>> {
    match split_whole_frame(bytes) {
        Some(frame) => Ok(Some(frame)),
        None if is_torn_frame(bytes) => Ok(None),
        None => Err(damaged_frame()),
    }
}

/// The payload of the first frame and what is behind it, if the frame is whole.
fn split_whole_frame(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (head, rest) = bytes.split_at_checked(FRAME_HEAD_BYTES)?;
    let (payload, after) = rest.split_at_checked(read_length(head))?;
    (Digest::of(payload).0[..CHECKSUM_BYTES] == head[4..]).then_some((payload, after))
}

fn read_length(head: &[u8]) -> usize {
    u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize
}

/// Whether these bytes are the beginning of one frame, as a crash leaves it: its length may be
/// damaged, so what is behind it decides, too.
fn is_torn_frame(bytes: &[u8]) -> bool {
    let Some((head, rest)) = bytes.split_at_checked(FRAME_HEAD_BYTES) else {
        return true;
    };
    let is_followed = (1..bytes.len()).any(|at| {
        let whole = split_whole_frame(&bytes[at..]);
        whole.is_some_and(|(payload, _)| !payload.is_empty())
    });
    if is_followed {
        return false;
    }
    // A file that grew before its data came has zeros there, and JSON has none.
    if head.iter().all(|byte| *byte == 0) || rest.contains(&0) {
        return true;
    }
    let is_complete = serde_json::from_slice::<IgnoredAny>(rest).is_ok();
    rest.len() < read_length(head) && !is_complete
}

fn encode(frame: &FrameToWrite<'_>) -> Result<Vec<u8>> {
    let payload = serde_json::to_vec(frame)
        .map_err(|error| Error::new(ErrorCode::ServerFault, format!("encode: {error}")))?;
    let length = u32::try_from(payload.len()).ok();
    let length = length.filter(|length| *length <= PAYLOAD_BYTES_MAX);
    let too_long = || {
        Error::new(
            ErrorCode::TooLarge,
            "the queue is too large for its journal",
        )
    };
    let mut bytes = length.ok_or_else(too_long)?.to_le_bytes().to_vec();
    bytes.extend(&Digest::of(&payload).0[..CHECKSUM_BYTES]);
    bytes.extend(payload);
    Ok(bytes)
}

fn no_snapshot() -> Error {
    let text = "is damaged: it does not begin with a snapshot; restore it from a copy";
    Error::new(ErrorCode::Malformed, text)
}

fn damaged_frame() -> Error {
    let text = "is damaged, and not by a crash while it was written; restore it from a copy: all \
                workflows that it has stay as they are until then";
    Error::new(ErrorCode::Malformed, text)
}

fn io_error(what: &str, path: &Path, error: &std::io::Error) -> Error {
    let code = match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => ErrorCode::NoSpaceBytes,
        _ => ErrorCode::ServerFault,
    };
    let text = format!("cannot {what} {}: {error}", path.display());
    Error::new(code, text)
}

#[cfg(test)]
mod tests;
