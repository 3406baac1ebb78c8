//! The bytes of a journal: its first line, its frames.

use std::borrow::Cow;

use bafs_proto::hash::Digest;
use bafs_proto::{Error, ErrorCode, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::header::{JournalHeader, Snapshot};
use crate::RecordedStep;

/// What every journal begins with, before its version.
const MAGIC_PREFIX: &[u8] = b"bafs-journal ";

/// First bytes of a journal of this version.
pub const JOURNAL_MAGIC: &[u8] = b"bafs-journal 26\n";

/// The version of the form of new journals. It changes when an older program could not read what a
/// newer one writes; `docs/contributing/journal.md` says how.
pub const JOURNAL_VERSION: u32 = 26;

/// The first version that is read: those before kept no rows of the state.
const VERSION_MIN: u32 = 24;

/// The first version whose payloads are compressed.
const COMPRESSED_SINCE: u32 = 25;

/// Where the last snapshot is: its offset, after the first line. Zero: there is none.
const SNAPSHOT_FIELD_BYTES: usize = 8;

/// Where the header of the last run is: its offset, behind that of the snapshot. Zero: it is right
/// behind. From version 26 on.
const EPOCH_FIELD_BYTES: usize = 8;

/// The first version whose journals have several runs.
const EPOCHS_SINCE: u32 = 26;

const CHECKSUM_BYTES: usize = 16;
pub(super) const FRAME_HEAD_BYTES: usize = 4 + CHECKSUM_BYTES;

/// First bytes of a map with so many fields, and of bytes whose length has four bytes.
const MAP_WITH_1_FIELD: u8 = 0x81;
const MAP_WITH_3_FIELDS: u8 = 0x83;
const BYTES_32: u8 = 0xc6;

/// Largest payload: the workflow of a million jobs has some 400 MB.
const PAYLOAD_BYTES_MAX: u32 = 1 << 30;

/// A frame with steps, as it is written.
#[derive(Serialize)]
pub(super) struct StepsFrame<'a> {
    pub(super) steps: &'a [RecordedStep],
}

/// A frame after the header, as it is read.
#[derive(Debug, Deserialize)]
pub(super) struct Frame {
    #[serde(default)]
    pub(super) steps: Vec<RecordedStep>,
    #[serde(default)]
    pub(super) snapshot: Option<Snapshot>,
}

/// How a journal keeps its payloads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum PayloadForm {
    /// As MessagePack.
    Plain,
    /// As an LZ4 block of that, after its length in four bytes (little endian).
    #[default]
    Compressed,
}

impl PayloadForm {
    /// That of new journals.
    pub(super) const NEW: Self = Self::Compressed;

    /// How long a payload can be of so many bytes.
    fn payload_bytes_max(self, plain_bytes: usize) -> usize {
        match self {
            Self::Plain => plain_bytes,
            Self::Compressed => 4 + lz4_flex::block::get_maximum_output_size(plain_bytes),
        }
    }

    /// Puts a payload at the start of `target`, which has room for it. Answers its length; nothing
    /// if there are more bytes than a journal can say.
    fn encode(self, plain: &[u8], target: &mut [u8]) -> Option<usize> {
        if self == Self::Plain {
            target[..plain.len()].copy_from_slice(plain);
            return Some(plain.len());
        }
        let length = u32::try_from(plain.len()).ok()?;
        target[..4].copy_from_slice(&length.to_le_bytes());
        Some(4 + lz4_flex::block::compress_into(plain, &mut target[4..]).ok()?)
    }

    /// Nothing if it is damaged, or says that it is longer than any is.
    fn decode(self, payload: &[u8]) -> Option<Cow<'_, [u8]>> {
        if self == Self::Plain {
            return Some(Cow::Borrowed(payload));
        }
        let length = u32::from_le_bytes(payload.get(..4)?.try_into().ok()?);
        if length > PAYLOAD_BYTES_MAX {
            return None;
        }
        let plain = lz4_flex::decompress_size_prepended(payload);
        plain.ok().map(Cow::Owned)
    }
}

/// Where things are in a journal that begins with these bytes.
#[derive(Debug, Clone, Copy)]
pub(super) struct Layout {
    pub(super) form: PayloadForm,
    /// Where the offset of the last snapshot is.
    pub(super) snapshot_field: usize,
    /// Where the frame of the last run's header begins.
    pub(super) header: usize,
    /// What the field says.
    pub(super) snapshot_at: u64,
    /// Whether another run may follow.
    pub(super) has_epochs: bool,
}

/// The first bytes of a new journal.
pub(super) fn begin_journal(header: &JournalHeader) -> Result<Vec<u8>> {
    let mut bytes = JOURNAL_MAGIC.to_vec();
    bytes.extend([0; SNAPSHOT_FIELD_BYTES + EPOCH_FIELD_BYTES]);
    bytes.extend(encode_frame(header, PayloadForm::NEW)?);
    Ok(bytes)
}

/// Reads the first line and what follows it.
pub(super) fn read_layout(bytes: &[u8]) -> Result<Layout> {
    let other = || {
        let text = "is not a journal; name another file";
        Error::new(ErrorCode::Malformed, text)
    };
    let rest = bytes.strip_prefix(MAGIC_PREFIX).ok_or_else(other)?;
    let line_end = rest.iter().take(10).position(|byte| *byte == b'\n');
    let line_end = line_end.ok_or_else(other)?;
    let version = std::str::from_utf8(&rest[..line_end]).ok();
    let version: u32 = version
        .and_then(|text| text.parse().ok())
        .ok_or_else(other)?;
    if version < VERSION_MIN {
        let text = "was written by an earlier version of bafs, whose journals this one cannot \
                    continue; finish the run with that version";
        return Err(Error::new(ErrorCode::VersionMismatch, text));
    }
    if version > JOURNAL_VERSION {
        let text = format!(
            "was written by a later version of bafs (its form is {version}, this program reads \
             {VERSION_MIN} to {JOURNAL_VERSION}); use that version"
        );
        return Err(Error::new(ErrorCode::VersionMismatch, text));
    }
    let snapshot_field = MAGIC_PREFIX.len() + line_end + 1;
    let has_epochs = version >= EPOCHS_SINCE;
    let epoch_field = snapshot_field + SNAPSHOT_FIELD_BYTES;
    let first_header = epoch_field + if has_epochs { EPOCH_FIELD_BYTES } else { 0 };
    let epoch_at = match has_epochs {
        true => read_field(bytes, epoch_field)?,
        false => 0,
    };
    let header = usize::try_from(epoch_at).unwrap_or(usize::MAX);
    let form = match version < COMPRESSED_SINCE {
        true => PayloadForm::Plain,
        false => PayloadForm::Compressed,
    };
    Ok(Layout {
        form,
        snapshot_field,
        header: header.max(first_header),
        snapshot_at: read_field(bytes, snapshot_field)?,
        has_epochs,
    })
}

fn read_field(bytes: &[u8], at: usize) -> Result<u64> {
    let field = bytes.get(at..at + 8);
    let field = field.and_then(|field| field.try_into().ok());
    let field = field.ok_or_else(|| damaged(at as u64, "its start is not whole"))?;
    Ok(u64::from_le_bytes(field))
}

/// The fields of a journal in which a run without a snapshot begins at this byte.
pub(super) fn epoch_fields(header_at: u64) -> [u8; SNAPSHOT_FIELD_BYTES + EPOCH_FIELD_BYTES] {
    let mut fields = [0; SNAPSHOT_FIELD_BYTES + EPOCH_FIELD_BYTES];
    fields[SNAPSHOT_FIELD_BYTES..].copy_from_slice(&header_at.to_le_bytes());
    fields
}

/// A frame of its own.
pub(super) fn encode_frame<T: Serialize>(value: &T, form: PayloadForm) -> Result<Vec<u8>> {
    let mut buffer = FrameBuffer::default();
    let length = buffer.encode_frame(value, form)?.len();
    buffer.frame.truncate(length);
    Ok(buffer.frame)
}

/// Memory in which frames are made, one after the other.
#[derive(Debug, Default)]
pub(super) struct FrameBuffer {
    /// A payload that is not compressed yet.
    plain: Vec<u8>,
    /// A frame, and what is left behind it of a longer one.
    frame: Vec<u8>,
}

impl FrameBuffer {
    /// Makes a frame, which is there until the next one is made.
    pub(super) fn encode_frame<T: Serialize>(
        &mut self,
        value: &T,
        form: PayloadForm,
    ) -> Result<&[u8]> {
        self.plain.clear();
        write_value(&mut self.plain, value)?;
        self.close_frame(form)
    }

    /// Makes a frame with a snapshot, in the memory of its rows: they are most of the state of a
    /// run, and a copy of them would be the most memory that the run ever needs.
    pub(super) fn encode_snapshot(
        &mut self,
        snapshot: Snapshot,
        form: PayloadForm,
    ) -> Result<&[u8]> {
        let Snapshot {
            state,
            homes,
            ended_attempts,
        } = snapshot;
        self.plain = state.into_bytes();
        let rows = u32::try_from(self.plain.len()).map_err(|_| too_large())?;
        let mut start = vec![MAP_WITH_1_FIELD];
        write_value(&mut start, "snapshot")?;
        start.push(MAP_WITH_3_FIELDS);
        write_value(&mut start, "state")?;
        start.push(BYTES_32);
        start.extend(rows.to_be_bytes());
        drop(self.plain.splice(0..0, start));
        write_value(&mut self.plain, "homes")?;
        write_value(&mut self.plain, &homes)?;
        write_value(&mut self.plain, "ended_attempts")?;
        write_value(&mut self.plain, &ended_attempts)?;
        self.close_frame(form)
    }

    /// Makes the frame of what is in `plain`.
    fn close_frame(&mut self, form: PayloadForm) -> Result<&[u8]> {
        let longest = FRAME_HEAD_BYTES + form.payload_bytes_max(self.plain.len());
        if self.frame.len() < longest {
            // Of zeroed memory only what is written to takes room.
            self.frame = vec![0; longest];
        }
        let length = form.encode(&self.plain, &mut self.frame[FRAME_HEAD_BYTES..]);
        let is_allowed = |length: &usize| {
            let longest = self.plain.len().max(*length);
            longest <= PAYLOAD_BYTES_MAX as usize
        };
        let length = length.filter(is_allowed).ok_or_else(too_large)?;
        let (head, payload) = self.frame.split_at_mut(FRAME_HEAD_BYTES);
        let payload = &payload[..length];
        head[..4].copy_from_slice(&(length as u32).to_le_bytes());
        head[4..].copy_from_slice(&Digest::of(payload).0[..CHECKSUM_BYTES]);
        Ok(&self.frame[..FRAME_HEAD_BYTES + length])
    }
}

fn write_value<T: Serialize + ?Sized>(bytes: &mut Vec<u8>, value: &T) -> Result<()> {
    rmp_serde::encode::write_named(bytes, value)
        .map_err(|e| Error::new(ErrorCode::Malformed, format!("record does not encode: {e}")))
}

fn too_large() -> Error {
    let text = "the workflow is too large for a journal";
    Error::new(ErrorCode::Malformed, text)
}

/// The payload of the frame at the start of `bytes`, if it is whole.
pub(super) fn decode_frame(bytes: &[u8]) -> Option<&[u8]> {
    let payload = bytes.get(FRAME_HEAD_BYTES..FRAME_HEAD_BYTES + payload_bytes(bytes)?)?;
    (Digest::of(payload).0[..CHECKSUM_BYTES] == bytes[4..FRAME_HEAD_BYTES]).then_some(payload)
}

/// How long the payload is of the frame at the start of `bytes`.
pub(super) fn payload_bytes(bytes: &[u8]) -> Option<usize> {
    let head = bytes.get(..FRAME_HEAD_BYTES)?;
    let length = u32::from_le_bytes(head[..4].try_into().ok()?);
    (length <= PAYLOAD_BYTES_MAX).then_some(length as usize)
}

/// What a payload says that begins at this byte of the journal.
pub(super) fn decode_payload<T: DeserializeOwned>(
    payload: &[u8],
    form: PayloadForm,
    at: u64,
    what: &str,
) -> Result<T> {
    let plain = form.decode(payload);
    let plain = plain.ok_or_else(|| damaged(at, &format!("{what} does not decompress")))?;
    rmp_serde::from_slice(&plain).map_err(|e| damaged(at, &format!("{what} does not decode ({e})")))
}

/// What a frame after the header says. Rows are checked, so that whoever puts them back need not.
pub(super) fn decode_content(payload: &[u8], form: PayloadForm, at: u64) -> Result<Frame> {
    let frame: Frame = decode_payload(payload, form, at, "a record")?;
    let snapshots = frame.snapshot.iter().map(|snapshot| &snapshot.state);
    let steps = frame.steps.iter().map(|step| &step.changes);
    for changes in snapshots.chain(steps) {
        let checked = changes.check();
        checked.map_err(|e| damaged(at, &format!("rows do not decode ({e})")))?;
    }
    Ok(frame)
}

/// Refuses an end that is damaged, not torn: `bytes`, from byte `start` of the journal on, begin
/// with a frame that is not whole, and a torn one is the last one.
pub(super) fn check_torn_end(bytes: &[u8], start: u64) -> Result<()> {
    let follows = |start: usize| decode_frame(&bytes[start..]).is_some_and(|p| !p.is_empty());
    if (1..bytes.len()).any(follows) {
        let text = "a record is wrong, and others follow it";
        return Err(damaged(start, text));
    }
    Ok(())
}

pub(super) fn damaged(at: u64, why: &str) -> Error {
    let text = format!("is damaged at byte {at}: {why}; restore it, or start a new run");
    Error::new(ErrorCode::Malformed, text)
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::RunId;
    use bafs_proto::time::Time;
    use bafs_workflow::{JobIndex, parse_workflow};
    use bytes::Bytes;
    use serde_json::{Value, json};

    use super::*;
    use crate::{Event, JobState, Scheduler, Settings, StateChanges};

    fn decode(frame: &Value) -> Frame {
        let payload = rmp_serde::to_vec_named(frame).expect("it encodes");
        decode_payload(&payload, PayloadForm::Plain, 0, "a record").expect("it decodes")
    }

    fn scheduler() -> Scheduler {
        let text = "job a {\nexecutable = x\n}\n";
        let parsed = parse_workflow("w.bafs", text, &|path| Err(path.to_owned()));
        let workflow = parsed.expect("it parses").workflow;
        Scheduler::new(RunId(1), workflow, Settings::default())
    }

    #[test]
    fn later_fields_are_ignored() {
        let rows = json!({
            "now": 7,
            "later": [1, 2],
            "graph": {"jobs": {"set": [[0, {"state": "done", "later": {"x": 1}}]]}, "later": null},
        });
        let step = json!({"at": 5, "event": "Tick", "later": "text"});
        let frame = decode(&json!({"steps": [step], "later": {"a": [true]}}));
        assert_eq!(
            (frame.steps[0].at, &frame.steps[0].event),
            (Time(5), &Event::Tick)
        );
        let rows = rmp_serde::to_vec_named(&rows).expect("they encode");
        let bytes = rmp_serde::to_vec(&Bytes::from(rows)).expect("they encode");
        let changes: StateChanges = rmp_serde::from_slice(&bytes).expect("they decode");
        assert_eq!(changes.check(), Ok(()));
        let mut scheduler = scheduler();
        scheduler.redo(&changes);
        scheduler.finish_redo();
        assert_eq!(scheduler.job_state(JobIndex(0)), JobState::Done);
        assert_eq!(scheduler.now(), Time(7));
    }

    #[test]
    fn snapshot_is_read_as_it_was_written() {
        let mut scheduler = scheduler();
        scheduler.start_recording();
        let step = scheduler.record_step(Time(5), Event::Tick);
        let snapshot = Snapshot {
            state: scheduler.snapshot(),
            homes: vec![step.event],
            ended_attempts: Vec::new(),
        };
        for form in [PayloadForm::Plain, PayloadForm::Compressed] {
            let mut buffer = FrameBuffer::default();
            let frame = buffer.encode_snapshot(snapshot.clone(), form);
            let frame = frame.expect("it encodes").to_vec();
            let payload = decode_frame(&frame).expect("it is whole");
            let read = decode_content(payload, form, 0).expect("it decodes");
            assert_eq!(read.snapshot, Some(snapshot.clone()));
        }
    }

    #[test]
    fn missing_fields_have_defaults() {
        let frame = decode(&json!({"steps": [{"at": 5, "event": "Tick"}]}));
        assert_eq!(frame.steps[0].at, Time(5));
        assert!(frame.steps[0].actions.is_empty() && frame.snapshot.is_none());
        let mut scheduler = scheduler();
        scheduler.redo(&frame.steps[0].changes);
        scheduler.finish_redo();
        assert_eq!(scheduler.job_state(JobIndex(0)), JobState::Ready);
        let snapshot = decode(&json!({"snapshot": {}})).snapshot;
        assert!(snapshot.is_some_and(|snapshot| snapshot.homes.is_empty()));
    }
}
