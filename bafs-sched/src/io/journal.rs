//! The journal: the durable events of a run, in one append-only file. Replaying it is recovery.
//!
//! The file starts with [`JOURNAL_MAGIC`], which contains the version. Frames follow:
//!
//! | Bytes | Content |
//! |---|---|
//! | 4 | length of the payload (little endian), at most 1 GiB |
//! | 16 | first half of the payload's BLAKE3 digest |
//! | length | payload (JSON) |
//!
//! The first frame is a [`JournalHeader`]: the run, its workflow, its settings. Every other frame
//! is a list of events with their times ([`JournalRecord`]). The journal does not know what events
//! mean.
//!
//! * [`Journal::open`] creates the file, or reads it and returns its [`History`]. A new journal is
//!   written under another name and synced before it gets its own, so it is never half there.
//! * [`Journal::append`] writes a frame and syncs it (`fdatasync`). The driver applies the events
//!   afterwards.
//! * [`read_history`] reads a journal that another process may be writing.
//!
//! **Crashes.** A frame is written as a whole, so only the last one can be incomplete. Nothing was
//! done yet because of it, and it is cut off. A frame with a wrong digest in the middle is damage.
//!
//! **Errors.** They go to the user, through the driver. `Conflict`: another scheduler has the
//! journal open. `VersionMismatch`: another version wrote it. `Malformed`: it is damaged.
//! `NotFound`: its directory is missing. `ServerFault`: the file cannot be read or written. After a
//! failed append the scheduler must stop.
//!
//! **Concurrency.** The file is locked while it is open (flock(2)), so one scheduler at a time
//! writes it. [`Journal`] belongs to the loop of the driver.
//!
//! **Security.** Only the owner may read the file, because it contains the environments of jobs.
//!
//! Versions change with the decisions of the core, not only with the form: an old journal that led
//! to other decisions could not be replayed.

use std::fs::{File, OpenOptions, Permissions, TryLockError};
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use bafs_proto::hash::Digest;
use bafs_proto::ids::RunId;
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode, Result};
use bafs_workflow::Workflow;
use serde::{Deserialize, Serialize};

use crate::{Event, Settings};

/// First bytes of every journal; the number is the version of its form.
///
/// Ledger: 1 = first form (2026-11). 2 = a core that admits whole pipelines, so that the same facts
/// lead to other decisions; further facts (2026-11). 3 = one setting for where data are (2026-11).
/// 4 = a core that writes again what a failed attempt may have changed (2026-11). 5 = a core that
/// divides caches otherwise and tells full disks from full volumes (2026-11). 6 = a core that keeps
/// batch volumes for pipelines that are behind and older copies of volumes, and learns how unevenly
/// caches are spread; listings tell only what changed (2026-11). 7 = a core that bounds the first
/// copy and room for caches otherwise (2026-11). 8 = a core that believes what it saw of failures,
/// and plans with the nodes on which jobs fit (2026-11). 9 = reports say what disks have free, and
/// a core that tells full disks by that and keeps room for who waits for others (2026-11). 10 = a
/// core that lets go of empty volumes on full disks, and tells them from bad nodes (2026-11). 11 =
/// a core that holds no job that waits for a full disk, weighs copies by who waits for them, and
/// keeps slots for those (2026-11). 12 = a core that lets go of overdue copies and takes who comes
/// at an address for its successor; mounts say whether writes are collected (2026-11). 13 = a core
/// that makes no cache in a kept slot (2026-11). 14 = a core that lets caches for later go before
/// jobs go on one by one (2026-11). 15 = a core that keeps room for batch volumes that are read at
/// once (2026-11). 16 = a core that gives up a node when another one at its address says so, and
/// asks for what has begun where it leaves others nothing (2026-11). 17 = a core that plans with
/// nodes that failed and will be back, and counts what running jobs computed (2026-11). 18 = a core
/// that waits for homes, leaves a node after two faults, and keeps scratch volumes out of groups
/// that need their room (2026-11). 19 = a core that keeps to what was simulated while nodes come
/// and leave, and plans less often; advice names the nodes of several times (2026-11). 20 = caches
/// tell what they got once more, and which home a name means is kept (2026-11). 21 = sizes that
/// nobody declared follow the nodes and grow again, alike jobs of a pipeline are measured, agents
/// say where they count nothing, and logs of jobs that failed go home; volumes warn of what they do
/// not have as their source has it; a scheduler that is cut off waits, and volumes of nodes that
/// come back are used again (2026-11). 22 = events, actions and their fields are named by the
/// glossary of ARCHITECTURE.md (2026-11). 23 = settings name policies, and outputs and copies on
/// several returned nodes are judged together (2026-11).
pub const JOURNAL_MAGIC: &[u8] = b"bafs-journal 23\n";

/// How often, and with which pause, a journal is tried that somebody has open.
const LOCK_TRIES: u32 = 10;
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// A journal is written whole before it gets its name: nobody does so for longer than this.
const DRAFT_AGE_MAX: Duration = Duration::from_secs(600);

/// The name of a run, with which drafts end, has so many characters.
const DRAFT_RUN_CHARS: usize = 16;

/// Mode of what holds the jobs' environments.
pub(super) const OWNER_ONLY: u32 = 0o600;

const CHECKSUM_BYTES: usize = 16;
const FRAME_HEAD_BYTES: usize = 4 + CHECKSUM_BYTES;

/// Largest payload: the workflow of a million jobs has some 600 MB of JSON.
const PAYLOAD_BYTES_MAX: u32 = 1 << 30;

/// First record of a journal: the run, its workflow and its settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JournalHeader {
    /// The run.
    pub run: RunId,
    /// What is run.
    pub workflow: Workflow,
    /// How it is run.
    pub settings: Settings,
}

/// An event, and the time at which the scheduler received it.
pub type JournalRecord = (Time, Event);

/// Content of a journal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct History {
    /// What it is about.
    pub header: JournalHeader,
    /// All facts, in order.
    pub records: Vec<JournalRecord>,
}

/// A journal that is open for writing. No other process can open it meanwhile.
#[derive(Debug)]
pub struct Journal {
    file: File,
    path: String,
}

impl Journal {
    /// Opens the journal at `path`, or creates it with what `header` makes if there is none.
    /// A torn end is cut off.
    ///
    /// # Errors
    /// `Conflict` when another scheduler has it open, `VersionMismatch` when it is of another
    /// version, `Malformed` when it is damaged, `ServerFault` when it cannot be read or written.
    pub fn open(path: &Path, header: impl FnOnce() -> JournalHeader) -> Result<(Self, History)> {
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
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes).map_err(fault)?;
        let (history, length) =
            decode_journal(&bytes).map_err(|e| e.context(format!("journal {name}")))?;
        if length < bytes.len() {
            tracing::warn!(
                journal = name,
                cut = bytes.len() - length,
                "torn end cut off"
            );
            file.set_len(length as u64)
                .and_then(|()| file.sync_all())
                .map_err(fault)?;
        }
        file.seek(SeekFrom::End(0)).map_err(fault)?;
        Ok((Self { file, path: name }, history))
    }

    /// Writes the journal anew, of a run of which nothing happened. Whoever is interrupted in it
    /// finds a journal that is damaged, or the one before.
    ///
    /// # Errors
    /// `ServerFault` when the file cannot be written.
    pub fn begin_anew(&mut self, header: JournalHeader) -> Result<History> {
        let mut bytes = JOURNAL_MAGIC.to_vec();
        bytes.extend(encode_frame(&header)?);
        let mut write = || {
            self.file.set_len(0)?;
            self.file.seek(SeekFrom::Start(0))?;
            self.file.write_all(&bytes)?;
            self.file.sync_all()
        };
        write().map_err(|e| io_error("write", &self.path, &e))?;
        Ok(History {
            header,
            records: Vec::new(),
        })
    }

    /// Makes facts durable, all or none of them.
    ///
    /// # Errors
    /// `ServerFault` when the file cannot be written; the scheduler must stop then.
    pub fn append(&mut self, records: &[JournalRecord]) -> Result<()> {
        let frame = encode_frame(&records)?;
        self.file
            .write_all(&frame)
            .and_then(|()| self.file.sync_data())
            .map_err(|e| {
                let error = io_error("write", &self.path, &e);
                let text = "; correct that, then repeat the command to resume the run";
                Error::new(error.code, error.detail + text)
            })
    }
}

/// Reads a journal without opening it for writing, however its end looks.
///
/// # Errors
/// As [`Journal::open`].
pub fn read_history(path: &Path) -> Result<History> {
    let name = path.display().to_string();
    let bytes = std::fs::read(path).map_err(|e| io_error("read", &name, &e))?;
    Ok(decode_journal(&bytes)
        .map_err(|e| e.context(format!("journal {name}")))?
        .0)
}

/// Takes the journal for this process alone. Who only looks whether it is taken has it for a
/// moment.
fn lock_file(file: &File) -> std::io::Result<bool> {
    for _ in 0..LOCK_TRIES {
        match file.try_lock() {
            Ok(()) => return Ok(true),
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_PAUSE),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    Ok(false)
}

fn lock_error(name: &str, error: &std::io::Error) -> Error {
    let error = io_error("lock", name, error);
    let text = "; a journal needs file locks: name one with --journal on a file system that \
                supports locks";
    Error::new(error.code, error.detail + text)
}

/// Takes from everybody but the owner what they may do with a file, if it is the caller's.
pub(super) fn restrict_to_owner(file: &File) -> std::io::Result<()> {
    let found = file.metadata()?;
    if found.mode() & 0o077 == 0 {
        return Ok(());
    }
    match file.set_permissions(Permissions::from_mode(OWNER_ONLY)) {
        // Another's journal that the group continues.
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => Ok(()),
        closed => closed,
    }
}

fn create_journal(path: &Path, header: &JournalHeader) -> Result<()> {
    let name = path.display().to_string();
    let directory = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    let directory = directory.unwrap_or_else(|| Path::new("."));
    let draft = path.with_extension(format!("draft-{}", header.run));
    // A run that should go on would begin anew where a path is misspelt.
    if !directory.is_dir() {
        let text = format!(
            "cannot create the journal {name}: directory {} does not exist; create it, or correct \
             the path",
            directory.display()
        );
        return Err(Error::new(ErrorCode::NotFound, text));
    }
    remove_drafts(path, directory);
    let mut bytes = JOURNAL_MAGIC.to_vec();
    bytes.extend(encode_frame(header)?);
    let write = || {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(OWNER_ONLY)
            .open(&draft)?;
        file.write_all(&bytes)?;
        file.sync_all()?;
        publish_draft(&draft, path)?;
        File::open(directory)?.sync_all()
    };
    write().map_err(|e| io_error("create", &name, &e))
}

/// Gives a draft its name, unless another scheduler that began at the same time was first: that
/// one's is the journal then.
fn publish_draft(draft: &Path, path: &Path) -> std::io::Result<()> {
    match std::fs::hard_link(draft, path) {
        // Some file systems have no links.
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => std::fs::rename(draft, path),
        _ => std::fs::remove_file(draft),
    }
}

/// Removes what is left of schedulers that were killed before their journals were whole. One that
/// cannot be removed does no harm.
fn remove_drafts(path: &Path, directory: &Path) {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let beginning = format!("{stem}.draft-");
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_draft = name.strip_prefix(&beginning).is_some_and(|run| {
            run.len() == DRAFT_RUN_CHARS && run.chars().all(|c| c.is_ascii_hexdigit())
        });
        let written = entry.metadata().and_then(|data| data.modified()).ok();
        let age = written.and_then(|at| at.elapsed().ok());
        if is_draft && age.is_some_and(|age| age > DRAFT_AGE_MAX) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

fn encode_frame<T: Serialize>(value: &T) -> Result<Vec<u8>> {
    let payload = serde_json::to_vec(value)
        .map_err(|e| Error::new(ErrorCode::Malformed, format!("record does not encode: {e}")))?;
    let length = u32::try_from(payload.len())
        .ok()
        .filter(|length| *length <= PAYLOAD_BYTES_MAX);
    let length = length.ok_or_else(|| {
        Error::new(
            ErrorCode::Malformed,
            "the workflow is too large for a journal",
        )
    })?;
    let mut frame = length.to_le_bytes().to_vec();
    frame.extend_from_slice(&Digest::of(&payload).0[..CHECKSUM_BYTES]);
    frame.extend(payload);
    Ok(frame)
}

/// The payload of the frame at the start of `bytes`, if it is whole.
fn decode_frame(bytes: &[u8]) -> Option<&[u8]> {
    let head = bytes.get(..FRAME_HEAD_BYTES)?;
    let length = u32::from_le_bytes(head[..4].try_into().ok()?);
    if length > PAYLOAD_BYTES_MAX {
        return None;
    }
    let payload = bytes.get(FRAME_HEAD_BYTES..FRAME_HEAD_BYTES + length as usize)?;
    (Digest::of(payload).0[..CHECKSUM_BYTES] == head[4..]).then_some(payload)
}

/// Decodes a journal; answers also how many bytes of it are whole.
fn decode_journal(bytes: &[u8]) -> Result<(History, usize)> {
    let Some(mut rest) = bytes.strip_prefix(JOURNAL_MAGIC) else {
        let is_other = bytes.starts_with(b"bafs-journal ");
        return Err(if is_other {
            let text = "was written by another version of bafs; finish the run with that version";
            Error::new(ErrorCode::VersionMismatch, text)
        } else {
            Error::new(ErrorCode::Malformed, "is not a journal; name another file")
        });
    };
    let damaged = |at: usize, why: &str| {
        let text = format!("is damaged at byte {at}: {why}; restore it, or start a new run");
        Error::new(ErrorCode::Malformed, text)
    };
    let position = |rest: &[u8]| bytes.len() - rest.len();
    let payload = decode_frame(rest)
        .ok_or_else(|| damaged(JOURNAL_MAGIC.len(), "its header is not whole"))?;
    let header = serde_json::from_slice(payload).map_err(|e| {
        damaged(
            JOURNAL_MAGIC.len(),
            &format!("its header does not decode ({e})"),
        )
    })?;
    rest = &rest[FRAME_HEAD_BYTES + payload.len()..];
    let mut records = Vec::new();
    while let Some(payload) = decode_frame(rest) {
        let batch: Vec<JournalRecord> = serde_json::from_slice(payload)
            .map_err(|e| damaged(position(rest), &format!("a record does not decode ({e})")))?;
        records.extend(batch);
        rest = &rest[FRAME_HEAD_BYTES + payload.len()..];
    }
    // A torn frame is the last one. If a whole one follows, this is no tear but damage.
    let follows = |start: usize| decode_frame(&rest[start..]).is_some_and(|p| !p.is_empty());
    if (1..rest.len()).any(follows) {
        return Err(damaged(
            position(rest),
            "a record is wrong, and others follow it",
        ));
    }
    Ok((History { header, records }, position(rest)))
}

fn io_error(doing: &str, name: &str, error: &std::io::Error) -> Error {
    Error::new(
        ErrorCode::ServerFault,
        format!("cannot {doing} the journal {name}: {error}"),
    )
}
