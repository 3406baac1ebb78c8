//! The state machine of one upload. Pure: knows no table, no file and no clock.
//!
//! ```text
//!             Begun              Staged              Published
//!   (none) ─────────▶ Receiving ─────────▶ Durable ─────────────▶ Published
//!      │                  ▲                │    ▲
//!      │                  └────── Lost ────┘    │
//!      └───────────────── Staged ───────────────┘
//! ```
//!
//! An upload is one file with one id. A large file arrives in ranges: it is `Receiving` first.
//! A small one arrives whole, and is `Durable` at once.

use bafs_proto::hash::Digest;
use bafs_proto::ids::ExtractionId;
use bafs_proto::message::PutReceipt;
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode, Result};
use serde::{Deserialize, Serialize};

/// Bits of a stamp below its milliseconds: uploads that change in the same one have an order.
const STAMP_ORDER_BITS: u32 = 20;

/// Size and digest of a whole file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Content {
    pub(super) size: u64,
    pub(super) digest: Digest,
}

/// The bytes of an upload, before they have the name of the target.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct StagedData {
    /// Their name among the uploads' files.
    pub(super) name: String,
    /// Which file it is, whatever its name and content.
    pub(super) identity: FileIdentity,
}

/// Number and time of birth of a file, which renaming and writing leave as they are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FileIdentity {
    pub(super) inode: u64,
    /// In nanoseconds; 0 where the file system does not know.
    pub(super) born_ns: u64,
}

/// When a row was written: milliseconds, then the order within one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct UploadStamp(u64);

impl UploadStamp {
    /// One later than `last`, if the clock does not say a later one.
    pub(super) fn next(now: Time, last: Option<Self>) -> Self {
        let now = now.0 << STAMP_ORDER_BITS;
        Self(last.map_or(now, |last| now.max(last.0 + 1)))
    }

    pub(super) fn time(self) -> Time {
        Time(self.0 >> STAMP_ORDER_BITS)
    }
}

/// Where an upload stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum UploadState {
    /// Bytes arrive, in a file named by the id.
    Receiving,
    /// All is checked and durable. The file may or may not have the name of its target.
    Durable { content: Content, data: StagedData },
    /// The file got the name of its target, durably.
    Published(Content),
}

/// The row of an upload.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct UploadRecord {
    /// The target, below the export.
    pub(super) path: String,
    /// Permission bits of the target.
    pub(super) mode: u32,
    pub(super) stamp: UploadStamp,
    pub(super) state: UploadState,
}

/// What happened to an upload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum UploadEvent {
    /// A sender asked for it.
    Begun { path: String, mode: u32 },
    /// All bytes are durable in a file, which may get the name of the target.
    Staged {
        path: String,
        mode: u32,
        content: Content,
        data: StagedData,
    },
    /// The file got the name of its target, durably.
    Published,
    /// Neither the staged file nor the target is there.
    Lost,
}

impl UploadRecord {
    /// The row after an event. The same row where the event is old news.
    ///
    /// # Errors
    /// `Conflict` for another path, or another content of a decided upload. `NotFound` for an
    /// event of an upload that is not there.
    pub(super) fn after(
        known: Option<Self>,
        extract: ExtractionId,
        event: UploadEvent,
        stamp: UploadStamp,
    ) -> Result<Self> {
        if let (Some(known), UploadEvent::Begun { path, .. } | UploadEvent::Staged { path, .. }) =
            (&known, &event)
        {
            known.check_path(extract, path)?;
        }
        match (known, event) {
            (None, UploadEvent::Begun { path, mode }) => Ok(Self {
                path,
                mode: mode & 0o777,
                stamp,
                state: UploadState::Receiving,
            }),
            (
                known,
                UploadEvent::Staged {
                    path,
                    mode,
                    content,
                    data,
                },
            ) if known.as_ref().is_none_or(Self::is_receiving) => Ok(Self {
                path,
                mode: mode & 0o777,
                stamp,
                state: UploadState::Durable { content, data },
            }),
            (Some(known), UploadEvent::Staged { content, .. }) => {
                known.check_content(extract, content)?;
                Ok(known)
            }
            (
                Some(Self {
                    path,
                    mode,
                    state: UploadState::Durable { content, .. },
                    ..
                }),
                event,
            ) if !matches!(event, UploadEvent::Begun { .. }) => {
                let state = match event {
                    UploadEvent::Lost => UploadState::Receiving,
                    _ => UploadState::Published(content),
                };
                Ok(Self {
                    path,
                    mode,
                    stamp,
                    state,
                })
            }
            (Some(known), _) => Ok(known),
            (None, _) => Err(unknown_upload_error(extract)),
        }
    }

    pub(super) fn is_receiving(&self) -> bool {
        self.state == UploadState::Receiving
    }

    /// The name of the file with its bytes, before it has the name of the target.
    pub(super) fn data_name(&self, extract: ExtractionId) -> String {
        match &self.state {
            UploadState::Durable { data, .. } => data.name.clone(),
            _ => extract.to_string(),
        }
    }

    /// Size and digest, once they are decided.
    pub(super) fn content(&self) -> Option<Content> {
        match &self.state {
            UploadState::Receiving => None,
            UploadState::Durable { content, .. } | UploadState::Published(content) => {
                Some(*content)
            }
        }
    }

    /// The receipt, once the content is decided.
    pub(super) fn receipt(&self, extract: ExtractionId) -> Option<PutReceipt> {
        let Content { size, digest } = self.content()?;
        Some(PutReceipt {
            extraction: extract,
            path: self.path.clone(),
            size,
            digest,
        })
    }

    /// Checks that a sender means the same target.
    ///
    /// # Errors
    /// `Conflict`.
    pub(super) fn check_path(&self, extract: ExtractionId, path: &str) -> Result<()> {
        if self.path == path {
            return Ok(());
        }
        let text = format!(
            "upload {extract} was started for '{}', not for '{path}'; use a new id",
            self.path
        );
        Err(Error::new(ErrorCode::Conflict, text))
    }

    /// Checks that a sender means the same content.
    ///
    /// # Errors
    /// `Conflict`.
    pub(super) fn check_content(&self, extract: ExtractionId, content: Content) -> Result<()> {
        if self.content() == Some(content) {
            return Ok(());
        }
        let text = format!("upload {extract} is done with other content");
        Err(Error::new(ErrorCode::Conflict, text))
    }
}

pub(super) fn unknown_upload_error(extract: ExtractionId) -> Error {
    let text = format!("upload {extract} does not exist here; start it first");
    Error::new(ErrorCode::NotFound, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXTRACT: ExtractionId = ExtractionId(7);

    fn begun(path: &str) -> UploadEvent {
        UploadEvent::Begun {
            path: path.to_owned(),
            mode: 0o100_640,
        }
    }

    fn staged(path: &str, data: &[u8], name: &str) -> UploadEvent {
        UploadEvent::Staged {
            path: path.to_owned(),
            mode: 0o640,
            content: Content {
                size: data.len() as u64,
                digest: Digest::of(data),
            },
            data: StagedData {
                name: name.to_owned(),
                identity: FileIdentity::default(),
            },
        }
    }

    /// The last row, or the first error.
    fn run(events: impl IntoIterator<Item = UploadEvent>) -> Result<UploadRecord> {
        let mut known = None;
        for (number, event) in (0..).zip(events) {
            known = Some(UploadRecord::after(
                known,
                EXTRACT,
                event,
                UploadStamp(number),
            )?);
        }
        Ok(known.expect("an event"))
    }

    #[test]
    fn an_upload_is_published_once() {
        let events = [begun("f"), staged("f", b"x", "a"), UploadEvent::Published];
        let done = run(events.clone()).expect("done");
        assert_eq!(done.receipt(EXTRACT).expect("receipt").size, 1);
        assert_eq!((done.mode, done.stamp), (0o640, UploadStamp(2)));
        // Whatever comes again changes nothing.
        let again = [
            begun("f"),
            staged("f", b"x", "b"),
            UploadEvent::Published,
            UploadEvent::Lost,
        ];
        assert_eq!(run(events.into_iter().chain(again)), Ok(done));
    }

    #[test]
    fn the_first_staged_file_of_an_upload_wins() {
        let row = run([staged("f", b"x", "first"), staged("f", b"x", "second")]).expect("row");
        let UploadState::Durable { data, .. } = row.state else {
            panic!("{row:?}");
        };
        assert_eq!(data.name, "first");
        let lost = run([
            staged("f", b"x", "a"),
            UploadEvent::Lost,
            staged("f", b"y", "b"),
        ]);
        assert_eq!(
            lost.expect("anew").content().expect("it has one").digest,
            Digest::of(b"y")
        );
    }

    #[test]
    fn another_path_or_content_is_a_conflict() {
        for events in [
            [begun("f"), begun("g")],
            [begun("f"), staged("g", b"x", "a")],
            [staged("f", b"x", "a"), begun("g")],
            [staged("f", b"x", "a"), staged("f", b"y", "b")],
        ] {
            assert_eq!(run(events).expect_err("another").code, ErrorCode::Conflict);
        }
        let unknown = run([UploadEvent::Published]).expect_err("none");
        assert_eq!(unknown.code, ErrorCode::NotFound);
    }

    #[test]
    fn stamps_keep_their_order_within_a_millisecond() {
        let first = UploadStamp::next(Time(5), None);
        let second = UploadStamp::next(Time(5), Some(first));
        assert!(first < second && second.time() == Time(5));
        assert!(
            UploadStamp::next(Time(4), Some(second)) > second,
            "a clock set back"
        );
        assert_eq!(UploadStamp::next(Time(6), Some(second)).time(), Time(6));
    }
}
