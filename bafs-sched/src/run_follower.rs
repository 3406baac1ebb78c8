//! A run while it goes on, from its journal: what happened, the intervals so far, and a copy of the
//! core that can be asked why jobs wait. It changes nothing, and nobody waits for it.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bafs_proto::Result;

use crate::io::journal::{JournalFollower, JournalHeader, JournalNews};
use crate::replay::{HistoryLine, HistoryWriter};
use crate::timeline::{Observer, Timeline};
use crate::{RecordedStep, Scheduler, StrategySelector};

/// Lines of the history that are kept: the last ones. The journal has all.
const LINES_KEPT_MAX: usize = 100_000;

/// A run that is followed.
pub struct RunFollower {
    path: PathBuf,
    selector: Arc<dyn StrategySelector>,
    journal: JournalFollower,
    observer: Observer,
    history: HistoryWriter,
    lines: VecDeque<HistoryLine>,
    /// Lines that are not kept any more.
    lines_dropped: u64,
    steps: u64,
}

impl RunFollower {
    /// Follows the last run of a journal, with the selector of the run.
    ///
    /// # Errors
    /// As those of [`crate::io::journal::read_history`].
    pub fn open(path: &Path, selector: Arc<dyn StrategySelector>) -> Result<Self> {
        let journal = JournalFollower::open(path)?;
        let new_scheduler = || journal.header().new_scheduler(&*selector);
        Ok(Self {
            path: path.to_owned(),
            observer: Observer::new(new_scheduler()),
            history: HistoryWriter::new(new_scheduler()),
            lines: VecDeque::new(),
            lines_dropped: 0,
            steps: 0,
            journal,
            selector,
        })
    }

    /// What the run is about.
    pub fn header(&self) -> &JournalHeader {
        self.journal.header()
    }

    /// Steps of the run that were read so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Takes what was written since the last time. Where another run follows in the journal, that
    /// one is followed from now on.
    ///
    /// # Errors
    /// As those of [`crate::io::journal::read_history`].
    pub fn read_news(&mut self) -> Result<()> {
        match self.journal.read_news()? {
            JournalNews::Steps(steps) => steps.into_iter().for_each(|step| self.step(step)),
            JournalNews::OtherRun => {
                *self = Self::open(&self.path, self.selector.clone())?;
                self.read_news()?;
            }
        }
        Ok(())
    }

    fn step(&mut self, step: RecordedStep) {
        self.steps += 1;
        self.history.step(&step);
        self.lines.extend(self.history.take_lines());
        let excess = self.lines.len().saturating_sub(LINES_KEPT_MAX);
        self.lines_dropped += excess as u64;
        drop(self.lines.drain(..excess));
        self.observer.step(step);
    }

    /// The intervals so far, and the core as it is now.
    pub fn snapshot(&self) -> (Timeline, Scheduler) {
        let mut scheduler = self.observer.scheduler().clone();
        scheduler.finish_redo();
        (self.observer.clone().finish(), scheduler)
    }

    /// Lines of the history from number `from` on, and the number of the first of them: later than
    /// `from` where older ones are not kept any more.
    pub fn lines(&self, from: u64) -> (u64, impl Iterator<Item = &HistoryLine>) {
        let first = from.max(self.lines_dropped);
        let skipped = usize::try_from(first - self.lines_dropped).unwrap_or(usize::MAX);
        (first, self.lines.iter().skip(skipped))
    }

    /// Lines of the history so far, with those that are not kept any more.
    pub fn line_count(&self) -> u64 {
        self.lines_dropped + self.lines.len() as u64
    }
}

impl std::fmt::Debug for RunFollower {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RunFollower")
            .field("path", &self.path)
            .field("steps", &self.steps)
            .finish_non_exhaustive()
    }
}
