//! Reads a journal that another task or process goes on writing: each time what came since.

use std::path::{Path, PathBuf};

use bafs_proto::Result;

use super::format::{FRAME_HEAD_BYTES, Layout, decode_content, decode_frame};
use super::{JournalHeader, OpenedFile, read_parts};
use crate::RecordedStep;

/// A journal that is followed.
#[derive(Debug)]
pub struct JournalFollower {
    path: PathBuf,
    start: JournalStart,
    header: JournalHeader,
    /// Where the next frame begins.
    at: u64,
}

/// By what the last run of a journal is known again.
#[derive(Debug, Clone, PartialEq, Eq)]
struct JournalStart {
    header_at: usize,
    /// Length and digest of the frame with the header.
    header_frame: Vec<u8>,
}

/// What a followed journal has that was not read yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JournalNews {
    /// Steps of the run; mostly there are none.
    Steps(Vec<RecordedStep>),
    /// The journal has another run now: it is to be followed anew.
    OtherRun,
}

impl JournalFollower {
    /// Follows the last run of a journal from its first step on.
    ///
    /// # Errors
    /// As those of [`super::read_history`].
    pub fn open(path: &Path) -> Result<Self> {
        read_parts(path, |opened| {
            let (layout, header, at) = opened.read_start()?;
            Ok(Self {
                path: path.to_owned(),
                start: read_journal_start(&opened, layout)?,
                header,
                at,
            })
        })
    }

    /// What the journal is about.
    pub fn header(&self) -> &JournalHeader {
        &self.header
    }

    /// Reads what was written since the last time. A frame that is not whole is read later.
    ///
    /// # Errors
    /// As those of [`super::read_history`].
    pub fn read_news(&mut self) -> Result<JournalNews> {
        let (start, mut at) = (&self.start, self.at);
        let news = read_parts(&self.path, |opened| {
            let layout = opened.read_layout()?;
            if opened.length < at || read_journal_start(&opened, layout)? != *start {
                return Ok(JournalNews::OtherRun);
            }
            let mut steps = Vec::new();
            while at < opened.length {
                let bytes = opened.read_frame(at)?;
                let Some(payload) = decode_frame(&bytes) else {
                    break;
                };
                steps.extend(decode_content(payload, layout.form, at)?.steps);
                at += bytes.len() as u64;
            }
            Ok(JournalNews::Steps(steps))
        })?;
        self.at = at;
        Ok(news)
    }
}

fn read_journal_start(opened: &OpenedFile<'_>, layout: Layout) -> Result<JournalStart> {
    let header_at = layout.header;
    let header_frame = opened.read(header_at as u64, (header_at + FRAME_HEAD_BYTES) as u64)?;
    Ok(JournalStart {
        header_at,
        header_frame,
    })
}

#[cfg(test)]
mod tests {
    use bafs_proto::ids::RunId;
    use bafs_proto::time::Time;
    use bafs_workflow::parse_workflow;

    use super::super::Journal;
    use super::*;
    use crate::{Event, Settings};

    fn header(run: u64) -> JournalHeader {
        let text = "job a {\nexecutable = x\n}\n";
        let parsed = parse_workflow("w.bafs", text, &|path| Err(path.to_owned()));
        JournalHeader {
            run: RunId(run),
            workflow: parsed.expect("it parses").workflow.into(),
            settings: Settings::default(),
        }
    }

    fn step(at: u64) -> RecordedStep {
        let mut scheduler = header(1).new_scheduler(&crate::NullSelector);
        scheduler.start_recording();
        scheduler.record_step(Time(at), Event::Tick)
    }

    #[test]
    fn follower_reads_each_step_once() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("w.journal");
        let (mut journal, _) = Journal::open(&path, || header(1)).expect("it is created");
        let mut follower = JournalFollower::open(&path).expect("it is there");
        let mut read = || follower.read_news().expect("it is read");
        assert_eq!(read(), JournalNews::Steps(Vec::new()));
        journal.append(&[step(1), step(2)]).expect("it is written");
        assert_eq!(read(), JournalNews::Steps(vec![step(1), step(2)]));
        // A torn frame is read when it is whole.
        let whole = std::fs::metadata(&path).expect("it is there").len();
        journal.append(&[step(3)]).expect("it is written");
        let all = std::fs::read(&path).expect("it is read");
        std::fs::write(&path, &all[..all.len() - 1]).expect("it is torn");
        assert!(whole < all.len() as u64);
        assert_eq!(read(), JournalNews::Steps(Vec::new()));
        std::fs::write(&path, &all).expect("it is whole");
        assert_eq!(read(), JournalNews::Steps(vec![step(3)]));
    }

    #[test]
    fn follower_reports_the_next_run() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("w.journal");
        let (mut journal, _) = Journal::open(&path, || header(1)).expect("it is created");
        journal.append(&[step(1)]).expect("it is written");
        let mut follower = JournalFollower::open(&path).expect("it is there");
        follower.read_news().expect("it is read");
        journal.begin_epoch(header(2)).expect("it is written");
        let news = follower.read_news().expect("it is read");
        assert_eq!(news, JournalNews::OtherRun);
        let follower = JournalFollower::open(&path).expect("it is there");
        assert_eq!(follower.header().run, RunId(2));
    }
}
