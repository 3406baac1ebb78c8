//! The journal: what happened in a run, what was decided, and what that wrote, in one append-only
//! file. Recovery puts rows back; it decides nothing.
//!
//! The file starts with a line that contains the version ([`JOURNAL_MAGIC`]), and eight bytes with
//! the offset of the last snapshot (little endian, 0 for none). From version 26 on, eight bytes
//! with the offset of the header of the last run come next (0: it is the first). Frames follow:
//!
//! | Bytes | Content |
//! |---|---|
//! | 4 | length of the payload (little endian), at most 1 GiB |
//! | 16 | first half of the payload's BLAKE3 digest |
//! | length | payload: MessagePack with the names of fields, as an LZ4 block (its length first) |
//!
//! The first frame of a run is a [`JournalHeader`]: the run, its workflow, its settings. Other runs
//! of the workflow follow the first. Every other frame has steps of the core ([`RecordedStep`]: an
//! event with its time, the actions that were decided, the rows of the state that changed), or a
//! [`Snapshot`]: all rows that differ from a new state. The journal does not know what they mean.
//!
//! * [`Journal::open`] creates the file, or finds its [`JournalTail`]: the last snapshot and the
//!   steps after it, which are read from the file one frame at a time. A new journal is written
//!   under another name and synced before it gets its own, so it is never half there.
//! * [`Journal::append`] writes a frame and syncs it (`fdatasync`). The driver performs the actions
//!   afterwards.
//! * [`Journal::append_snapshot`] writes a snapshot, then its offset. An offset that points to
//!   nothing whole is not believed: the file is read from its start.
//! * [`Journal::begin_epoch`] begins another run behind the last one. Readers read the last run.
//! * [`read_history`] reads all of a journal that another process may be writing, and
//!   [`JournalFollower`] what came since it last looked.
//!
//! **Crashes.** A frame is written as a whole, so only the last one can be incomplete. Nothing was
//! done yet because of it, and it is cut off. A frame with a wrong digest in the middle is damage.
//!
//! **Versions.** Journals from version 24 on (whose payloads are not compressed) are read and
//! continued, whatever the rules of the core were: rows say what was decided. Unknown fields are
//! ignored, and new ones have defaults. Only a change that an older program could not read counts
//! as another version (`docs/contributing/journal.md`).
//!
//! **Errors.** They go to the user, through the driver. `Conflict`: another scheduler has the
//! journal open. `VersionMismatch`: a version wrote it that is not read. `Malformed`: it is
//! damaged. `NotFound`: its directory is missing. `ServerFault`: the file cannot be read or
//! written. After a failed append the scheduler must stop.
//!
//! **Concurrency.** The file is locked while it is open (flock(2)), so one scheduler at a time
//! writes it. [`Journal`] belongs to the loop of the driver.
//!
//! **Security.** Only the owner may read the file, because it contains the environments of jobs.

mod creation;
mod follower;
mod format;
mod header;
mod pipeline;
mod tail;

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;

use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode, Result};

pub(crate) use self::creation::{OWNER_ONLY, restrict_to_owner};
use self::creation::{create_journal, lock_error, lock_file};
pub use self::follower::{JournalFollower, JournalNews};
use self::format::{
    FRAME_HEAD_BYTES, FrameBuffer, Layout, PayloadForm, StepsFrame, begin_journal, check_torn_end,
    damaged, decode_content, decode_frame, decode_payload, encode_frame, epoch_fields,
    payload_bytes, read_layout,
};
pub use self::format::{JOURNAL_MAGIC, JOURNAL_VERSION};
use self::header::io_error;
pub use self::header::{JournalHeader, Snapshot};
pub use self::pipeline::PipelinedJournal;
pub use self::tail::{JournalTail, TailSteps, read_tail};
use crate::{Event, RecordedStep, StrategySelector};

/// A snapshot is due when so many times its predecessor's bytes were written since: so a quarter
/// of the bytes are snapshots, and what is read at the start is bounded. At one times, snapshots
/// took a quarter of the time of a run of a million jobs (`bench core`).
const SNAPSHOT_SPACING: u64 = 3;

/// No snapshot is due for fewer bytes than these.
const SNAPSHOT_BYTES_MIN: u64 = 4 << 20;

/// First bytes of a journal that are read to find the rest.
const START_BYTES: usize = 64;

/// All that a journal tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct History {
    /// What it is about.
    pub header: JournalHeader,
    /// All steps, in order.
    pub steps: Vec<RecordedStep>,
}

impl History {
    /// What a scheduler decides that is told these events: what its journal would be.
    pub fn decide(
        header: JournalHeader,
        events: impl IntoIterator<Item = (Time, Event)>,
        selector: &dyn StrategySelector,
    ) -> Self {
        let mut scheduler = header.new_scheduler(selector);
        scheduler.start_recording();
        let steps = events.into_iter();
        let steps = steps.map(|(at, event)| scheduler.record_step(at, event));
        Self {
            steps: steps.collect(),
            header,
        }
    }

    /// When the first event was received.
    pub fn began_at(&self) -> Time {
        self.steps.first().map_or(Time(0), |step| step.at)
    }
}

/// A journal that is open for writing. No other process can open it meanwhile.
#[derive(Debug)]
pub struct Journal {
    file: File,
    path: String,
    form: PayloadForm,
    /// Where the offset of the last snapshot is.
    snapshot_field: u64,
    /// Whether another run may follow in the same file.
    has_epochs: bool,
    /// Where the next frame comes.
    end: u64,
    /// Bytes of the last snapshot, and of all frames since.
    snapshot_bytes: u64,
    bytes_since: u64,
    /// Where frames are made.
    buffer: FrameBuffer,
}

impl Journal {
    /// Opens the journal at `path`, or creates it with what `header` makes if there is none.
    /// A torn end is cut off.
    ///
    /// # Errors
    /// `Conflict` when another scheduler has it open, `VersionMismatch` when it is of a version
    /// that is not read, `Malformed` when it is damaged, `ServerFault` when it cannot be read or
    /// written.
    pub fn open(
        path: &Path,
        header: impl FnOnce() -> JournalHeader,
    ) -> Result<(Self, JournalTail)> {
        if !path.exists() {
            create_journal(path, &header())?;
        }
        let name = path.display().to_string();
        let fault = |e: std::io::Error| io_error("open", &name, &e);
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(fault)?;
        if !lock_file(&file).map_err(|e| lock_error(&name, &e))? {
            let text = format!("another scheduler uses the journal {name}; wait until it ends");
            return Err(Error::new(ErrorCode::Conflict, text));
        }
        // It holds the jobs' environments; earlier versions made it readable for everybody.
        restrict_to_owner(&file).map_err(fault)?;
        let length = file.metadata().map_err(fault)?.len();
        let opened = OpenedFile {
            file: &file,
            length,
            name: &name,
        };
        let found = opened
            .find_tail(path)
            .map_err(|e| e.context(format!("journal {name}")))?;
        if found.end < length {
            let cut = length - found.end;
            tracing::warn!(journal = name, cut, "torn end cut off");
            file.set_len(found.end)
                .and_then(|()| file.sync_all())
                .map_err(fault)?;
        }
        file.seek(SeekFrom::End(0)).map_err(fault)?;
        let journal = Self {
            file,
            path: name,
            form: found.layout.form,
            snapshot_field: found.layout.snapshot_field as u64,
            has_epochs: found.layout.has_epochs,
            end: found.end,
            snapshot_bytes: found.snapshot_bytes,
            bytes_since: found.end - found.steps_at,
            buffer: FrameBuffer::default(),
        };
        Ok((journal, found.tail))
    }

    /// Writes the journal anew, of a run of which nothing happened. Whoever is interrupted in it
    /// finds a journal that is damaged, or the one before.
    ///
    /// # Errors
    /// `ServerFault` when the file cannot be written.
    pub fn begin_anew(&mut self, header: JournalHeader) -> Result<JournalTail> {
        let bytes = begin_journal(&header)?;
        let mut write = || {
            self.file.set_len(0)?;
            self.file.seek(SeekFrom::Start(0))?;
            self.file.write_all(&bytes)?;
            self.file.sync_all()
        };
        write().map_err(|e| io_error("write", &self.path, &e))?;
        self.end = bytes.len() as u64;
        self.has_epochs = true;
        self.form = PayloadForm::NEW;
        (self.snapshot_bytes, self.bytes_since) = (0, 0);
        Ok(JournalTail::of_new_run(header))
    }

    /// Begins another run of the workflow behind the last one, of which nothing happened yet. A
    /// journal of an earlier form has room for one run, and is written anew.
    ///
    /// # Errors
    /// `ServerFault` when the file cannot be written.
    pub fn begin_epoch(&mut self, header: JournalHeader) -> Result<JournalTail> {
        if !self.has_epochs {
            return self.begin_anew(header);
        }
        let (at, frame) = (self.end, encode_frame(&header, self.form)?);
        // A crash between the two leaves a frame that tells nothing.
        self.file
            .write_all(&frame)
            .and_then(|()| self.file.sync_data())
            .and_then(|()| {
                self.file
                    .write_all_at(&epoch_fields(at), self.snapshot_field)
            })
            .and_then(|()| self.file.sync_data())
            .map_err(|e| write_error(&self.path, &e))?;
        self.end += frame.len() as u64;
        (self.snapshot_bytes, self.bytes_since) = (0, 0);
        Ok(JournalTail::of_new_run(header))
    }

    /// Makes steps durable, all or none of them.
    ///
    /// # Errors
    /// `ServerFault` when the file cannot be written; the scheduler must stop then.
    pub fn append(&mut self, steps: &[RecordedStep]) -> Result<()> {
        let frame = self.buffer.encode_frame(&StepsFrame { steps }, self.form)?;
        let bytes = frame.len() as u64;
        write_synced(&mut self.file, frame).map_err(|e| write_error(&self.path, &e))?;
        self.end += bytes;
        self.bytes_since += bytes;
        Ok(())
    }

    /// Whether enough was written since the last snapshot for another one.
    pub fn is_snapshot_due(&self) -> bool {
        self.bytes_since >= (SNAPSHOT_SPACING * self.snapshot_bytes).max(SNAPSHOT_BYTES_MIN)
    }

    /// Whether anything was written since the last snapshot.
    pub fn has_steps_since_snapshot(&self) -> bool {
        self.bytes_since > 0
    }

    /// Writes a snapshot, with which the next scheduler begins.
    ///
    /// # Errors
    /// `ServerFault` when the file cannot be written; the scheduler must stop then.
    pub fn append_snapshot(&mut self, snapshot: Snapshot) -> Result<()> {
        let at = self.end;
        let frame = self.buffer.encode_snapshot(snapshot, self.form)?;
        let bytes = frame.len() as u64;
        write_synced(&mut self.file, frame).map_err(|e| write_error(&self.path, &e))?;
        // A snapshot is far larger than what is written else.
        self.buffer = FrameBuffer::default();
        self.end += bytes;
        self.snapshot_bytes = bytes;
        self.bytes_since = 0;
        self.file
            .write_all_at(&at.to_le_bytes(), self.snapshot_field)
            .and_then(|()| self.file.sync_data())
            .map_err(|e| write_error(&self.path, &e))
    }
}

fn write_synced(file: &mut File, frame: &[u8]) -> std::io::Result<()> {
    file.write_all(frame)?;
    file.sync_data()
}

/// Reads all of a journal without opening it for writing, however its end looks.
///
/// # Errors
/// As [`Journal::open`].
pub fn read_history(path: &Path) -> Result<History> {
    read_parts(path, |opened| {
        let (layout, header, begin) = opened.read_start()?;
        let mut steps = Vec::new();
        opened.visit_frames(begin, |payload, at| {
            steps.extend(decode_content(payload, layout.form, at)?.steps);
            Ok(())
        })?;
        Ok(History { header, steps })
    })
}

/// Reads the steps of a journal one by one, without all of it in memory. It ends where a frame is
/// not whole.
///
/// # Errors
/// As [`Journal::open`].
pub(crate) fn visit_steps(
    path: &Path,
    mut each: impl FnMut(&JournalHeader, RecordedStep),
) -> Result<()> {
    read_parts(path, |opened| {
        let (layout, header, mut at) = opened.read_start()?;
        while at < opened.length {
            let bytes = opened.read_frame(at)?;
            let Some(payload) = decode_frame(&bytes) else {
                break;
            };
            let frame = decode_content(payload, layout.form, at)?;
            frame.steps.into_iter().for_each(|step| each(&header, step));
            at += bytes.len() as u64;
        }
        Ok(())
    })
}

/// Reads what a journal is about, and nothing of what happened.
///
/// # Errors
/// As [`Journal::open`].
pub fn read_header(path: &Path) -> Result<JournalHeader> {
    read_parts(path, |opened| Ok(opened.read_start()?.1))
}

/// Opens a journal to read parts of it; errors name it.
fn read_parts<T>(path: &Path, read: impl FnOnce(OpenedFile<'_>) -> Result<T>) -> Result<T> {
    let name = path.display().to_string();
    let fault = |e: std::io::Error| io_error("read", &name, &e);
    let file = File::open(path).map_err(fault)?;
    let length = file.metadata().map_err(fault)?.len();
    let opened = OpenedFile {
        file: &file,
        length,
        name: &name,
    };
    read(opened).map_err(|e| e.context(format!("journal {name}")))
}

/// A file of which parts are read.
struct OpenedFile<'f> {
    file: &'f File,
    length: u64,
    name: &'f str,
}

impl OpenedFile<'_> {
    fn read(&self, from: u64, to: u64) -> Result<Vec<u8>> {
        let length = usize::try_from(to.min(self.length).saturating_sub(from)).unwrap_or(0);
        let mut bytes = vec![0; length];
        self.file
            .read_exact_at(&mut bytes, from)
            .map_err(|e| io_error("read", self.name, &e))?;
        Ok(bytes)
    }

    /// The frame at this place, if its length can be: nothing says that it is whole.
    fn read_frame(&self, at: u64) -> Result<Vec<u8>> {
        let head = self.read(at, at.saturating_add(FRAME_HEAD_BYTES as u64))?;
        let payload = payload_bytes(&head).unwrap_or(0);
        self.read(at, at.saturating_add((FRAME_HEAD_BYTES + payload) as u64))
    }

    fn read_layout(&self) -> Result<Layout> {
        read_layout(&self.read(0, START_BYTES as u64)?)
    }

    /// The header, and where it ends.
    fn read_start(&self) -> Result<(Layout, JournalHeader, u64)> {
        let layout = self.read_layout()?;
        let frame = self.read_frame(layout.header as u64)?;
        let (header, end) = decode_header(&frame, layout)?;
        Ok((layout, header, end as u64))
    }

    /// Gives each whole frame from this byte on to `each`, with where it begins. Answers where the
    /// last one ends.
    fn visit_frames(
        &self,
        from: u64,
        mut each: impl FnMut(&[u8], u64) -> Result<()>,
    ) -> Result<u64> {
        let mut at = from;
        while at < self.length {
            let bytes = self.read_frame(at)?;
            let Some(payload) = decode_frame(&bytes) else {
                check_torn_end(&self.read(at, self.length)?, at)?;
                break;
            };
            each(payload, at)?;
            at += bytes.len() as u64;
        }
        Ok(at)
    }
}

fn decode_header(frame: &[u8], layout: Layout) -> Result<(JournalHeader, usize)> {
    let at = layout.header as u64;
    let payload = decode_frame(frame).ok_or_else(|| damaged(at, "its header is not whole"))?;
    let header = decode_payload(payload, layout.form, at, "its header")?;
    Ok((header, layout.header + FRAME_HEAD_BYTES + payload.len()))
}

fn write_error(name: &str, error: &std::io::Error) -> Error {
    let error = io_error("write", name, error);
    let text = "; correct that, then repeat the command to resume the run";
    Error::new(error.code, error.detail + text)
}
