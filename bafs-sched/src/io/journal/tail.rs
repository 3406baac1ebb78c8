//! The end of a journal: the last snapshot, and the steps after it. These stay in the file until
//! they are put back, one frame at a time: those of a million jobs take gigabytes in memory.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use bafs_proto::Result;

use super::format::{Frame, Layout, PayloadForm, damaged, decode_frame, decode_payload};
use super::header::{JournalHeader, Snapshot, io_error};
use super::{OpenedFile, read_parts};
use crate::{RecordedStep, Scheduler};

/// The end of a journal: what a scheduler needs to go on.
#[derive(Debug, Clone)]
pub struct JournalTail {
    /// What it is about.
    pub header: JournalHeader,
    /// The last snapshot; nothing when `steps` are all there are. Its rows were not checked.
    pub snapshot: Option<Snapshot>,
    /// The steps after it.
    pub steps: TailSteps,
}

impl JournalTail {
    /// Of a run of which nothing happened yet.
    pub(super) fn of_new_run(header: JournalHeader) -> Self {
        Self {
            header,
            snapshot: None,
            steps: TailSteps::default(),
        }
    }

    /// Whether the journal tells of any step.
    pub fn has_steps(&self) -> bool {
        self.snapshot.is_some() || !self.steps.is_empty()
    }

    /// Puts all of it back into a scheduler of which nothing is done.
    ///
    /// # Errors
    /// As those of [`TailSteps::read`].
    pub fn restore(&self, scheduler: &mut Scheduler) -> Result<()> {
        if let Some(snapshot) = &self.snapshot {
            scheduler.try_redo(&snapshot.state)?;
        }
        for step in self.steps.read() {
            scheduler.try_redo(&step?.changes)?;
        }
        scheduler.finish_redo();
        Ok(())
    }
}

/// Steps that are in a file.
#[derive(Debug, Clone, Default)]
pub struct TailSteps {
    /// Nothing if there are none.
    file: Option<Arc<File>>,
    name: Arc<str>,
    form: PayloadForm,
    /// Where the first of their frames begins, and the last one ends. All of them are whole.
    from: u64,
    end: u64,
}

impl TailSteps {
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.from == self.end
    }

    /// Reads the steps in order, each frame when its first step is wanted. Rows are not checked:
    /// they are put back with [`Scheduler::try_redo`]. The iterator ends after an error.
    ///
    /// # Errors
    /// `Malformed` when a frame does not decode, `ServerFault` when the file cannot be read.
    pub fn read(&self) -> impl Iterator<Item = Result<RecordedStep>> + '_ {
        let mut at = self.from;
        let mut steps = Vec::new().into_iter();
        std::iter::from_fn(move || {
            loop {
                if let Some(step) = steps.next() {
                    return Some(Ok(step));
                }
                if at == self.end {
                    return None;
                }
                match self.read_frame(at) {
                    Ok((read, next)) => (steps, at) = (read.into_iter(), next),
                    Err(error) => {
                        at = self.end;
                        return Some(Err(error.context(format!("journal {}", self.name))));
                    }
                }
            }
        })
    }

    /// The steps of the frame at this place, and where it ends.
    fn read_frame(&self, at: u64) -> Result<(Vec<RecordedStep>, u64)> {
        let Some(file) = &self.file else {
            return Ok((Vec::new(), self.end));
        };
        let opened = OpenedFile {
            file,
            length: self.end,
            name: &self.name,
        };
        let bytes = opened.read_frame(at)?;
        let next = at + bytes.len() as u64;
        let payload = decode_frame(&bytes);
        let payload = payload.ok_or_else(|| damaged(at, "a record is not whole any more"))?;
        // A snapshot among them, whose place was not noted, says what the steps before it say.
        let frame: Frame = decode_payload(payload, self.form, at, "a record")?;
        Ok((frame.steps, next))
    }
}

/// The end of a journal, and where it was found.
pub(super) struct FoundTail {
    pub(super) layout: Layout,
    pub(super) tail: JournalTail,
    pub(super) snapshot_bytes: u64,
    pub(super) steps_at: u64,
    pub(super) end: u64,
}

impl OpenedFile<'_> {
    /// Finds the last snapshot, and checks that all frames behind it are whole.
    pub(super) fn find_tail(&self, path: &Path) -> Result<FoundTail> {
        let (layout, header, steps_at) = self.read_start()?;
        let (snapshot, snapshot_bytes, steps_at) = match self.find_snapshot(layout, steps_at)? {
            Some((snapshot, bytes)) => (Some(snapshot), bytes, layout.snapshot_at + bytes),
            None => (None, 0, steps_at),
        };
        let end = self.visit_frames(steps_at, |_, _| Ok(()))?;
        // Opened anew: the journal's own file is locked as long as a copy of it lives.
        let file = File::open(path).map_err(|e| io_error("read", self.name, &e))?;
        let steps = TailSteps {
            file: Some(Arc::new(file)),
            name: self.name.into(),
            form: layout.form,
            from: steps_at,
            end,
        };
        Ok(FoundTail {
            layout,
            tail: JournalTail {
                header,
                snapshot,
                steps,
            },
            snapshot_bytes,
            steps_at,
            end,
        })
    }

    /// The snapshot where the journal says that one is, if it is whole; and its bytes.
    fn find_snapshot(&self, layout: Layout, steps_at: u64) -> Result<Option<(Snapshot, u64)>> {
        let at = layout.snapshot_at;
        if at < steps_at || at >= self.length {
            return Ok(None);
        }
        let bytes = self.read_frame(at)?;
        let frame = decode_frame(&bytes).map(|payload| -> Result<Frame> {
            decode_payload(payload, layout.form, at, "a snapshot")
        });
        let snapshot = frame.and_then(Result::ok).and_then(|frame| frame.snapshot);
        Ok(snapshot.map(|snapshot| (snapshot, bytes.len() as u64)))
    }
}

/// Reads the end of a journal without opening it for writing.
///
/// # Errors
/// As [`super::Journal::open`].
pub fn read_tail(path: &Path) -> Result<JournalTail> {
    read_parts(path, |opened| Ok(opened.find_tail(path)?.tail))
}
