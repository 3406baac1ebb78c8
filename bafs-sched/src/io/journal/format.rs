//! The bytes of a journal: its first line, its frames.

use std::borrow::Cow;

use bafs_proto::hash::Digest;
use bafs_proto::{Error, ErrorCode, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::{JournalHeader, Snapshot};
use crate::RecordedStep;

/// What every journal begins with, before its version.
const MAGIC_PREFIX: &[u8] = b"bafs-journal ";

/// First bytes of a journal of this version.
pub const JOURNAL_MAGIC: &[u8] = b"bafs-journal 25\n";

/// The version of the form of new journals. It changes when an older program could not read what a
/// newer one writes; `docs/contributing/journal.md` says how.
pub const JOURNAL_VERSION: u32 = 25;

/// The first version that is read: those before kept no rows of the state.
const VERSION_MIN: u32 = 24;

/// The first version whose payloads are compressed.
const COMPRESSED_SINCE: u32 = 25;

/// Where the last snapshot is: its offset, after the first line. Zero: there is none.
const SNAPSHOT_FIELD_BYTES: usize = 8;

const CHECKSUM_BYTES: usize = 16;
pub(super) const FRAME_HEAD_BYTES: usize = 4 + CHECKSUM_BYTES;

/// Largest payload: the workflow of a million jobs has some 400 MB.
const PAYLOAD_BYTES_MAX: u32 = 1 << 30;

/// A frame after the header, as it is written.
#[derive(Serialize)]
pub(super) struct FrameContent<'a> {
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub(super) steps: &'a [RecordedStep],
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) snapshot: Option<&'a Snapshot>,
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PayloadForm {
    /// As MessagePack.
    Plain,
    /// As an LZ4 block of that, after its length in four bytes (little endian).
    Compressed,
}

impl PayloadForm {
    /// That of new journals.
    pub(super) const NEW: Self = Self::Compressed;

    fn encode(self, plain: &[u8]) -> Vec<u8> {
        match self {
            Self::Plain => plain.to_vec(),
            Self::Compressed => lz4_flex::compress_prepend_size(plain),
        }
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
    /// Where the header's frame begins.
    pub(super) header: usize,
    /// What the field says.
    pub(super) snapshot_at: u64,
}

/// The first bytes of a new journal.
pub(super) fn begin_journal(header: &JournalHeader) -> Result<Vec<u8>> {
    let mut bytes = JOURNAL_MAGIC.to_vec();
    bytes.extend([0; SNAPSHOT_FIELD_BYTES]);
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
    let header = snapshot_field + SNAPSHOT_FIELD_BYTES;
    let field = bytes.get(snapshot_field..header);
    let field = field.and_then(|field| field.try_into().ok());
    let field = field.ok_or_else(|| damaged(snapshot_field as u64, "its start is not whole"))?;
    let form = match version < COMPRESSED_SINCE {
        true => PayloadForm::Plain,
        false => PayloadForm::Compressed,
    };
    Ok(Layout {
        form,
        snapshot_field,
        header,
        snapshot_at: u64::from_le_bytes(field),
    })
}

/// A frame of its own.
pub(super) fn encode_frame<T: Serialize>(value: &T, form: PayloadForm) -> Result<Vec<u8>> {
    let plain = rmp_serde::to_vec_named(value)
        .map_err(|e| Error::new(ErrorCode::Malformed, format!("record does not encode: {e}")))?;
    let payload = form.encode(&plain);
    let length = u32::try_from(plain.len().max(payload.len()))
        .ok()
        .filter(|length| *length <= PAYLOAD_BYTES_MAX);
    if length.is_none() {
        let text = "the workflow is too large for a journal";
        return Err(Error::new(ErrorCode::Malformed, text));
    }
    let mut frame = Vec::with_capacity(FRAME_HEAD_BYTES + payload.len());
    frame.extend((payload.len() as u32).to_le_bytes());
    frame.extend(&Digest::of(&payload).0[..CHECKSUM_BYTES]);
    frame.extend(payload);
    Ok(frame)
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

/// Reads the frames from `bytes` on, which begin at byte `start` of the journal. Answers where the
/// last whole one ends.
pub(super) fn read_frames(
    bytes: &[u8],
    form: PayloadForm,
    start: u64,
    mut each: impl FnMut(Frame),
) -> Result<u64> {
    let mut rest = bytes;
    let position = |rest: &[u8]| start + (bytes.len() - rest.len()) as u64;
    while let Some(payload) = decode_frame(rest) {
        each(decode_content(payload, form, position(rest))?);
        rest = &rest[FRAME_HEAD_BYTES + payload.len()..];
    }
    // A torn frame is the last one. If a whole one follows, this is no tear but damage.
    let follows = |start: usize| decode_frame(&rest[start..]).is_some_and(|p| !p.is_empty());
    if (1..rest.len()).any(follows) {
        let text = "a record is wrong, and others follow it";
        return Err(damaged(position(rest), text));
    }
    Ok(position(rest))
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
