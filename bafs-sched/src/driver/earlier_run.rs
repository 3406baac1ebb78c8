//! What a journal tells of the last run, and of those before it, to whoever begins another one.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use bafs_proto::Result;
use bafs_proto::ids::{RunId, ServerId};
use bafs_workflow::Workflow;

use super::journal_opening::has_begun;
use crate::earlier_work::{JobRecord, KeptVolume};
use crate::io::journal::{JournalTail, read_tail};
use crate::{Event, NullSelector};

/// The last run in a journal, with what is known of all jobs that any run finished.
#[derive(Debug, Clone)]
pub struct EarlierRun {
    /// The last run.
    pub run: RunId,
    /// What it ran.
    pub workflow: Arc<Workflow>,
    /// Whether it ended.
    pub is_over: bool,
    /// Whether it saw a node, so that something may be left of it.
    pub has_begun: bool,
    /// Whether its nodes ended with it.
    pub is_temporary: bool,
    /// Of jobs that are done, by their names.
    pub records: BTreeMap<String, JobRecord>,
    /// Names of the jobs that failed in it.
    pub failed: BTreeSet<String>,
    /// Volumes that outlived it.
    pub kept: Vec<KeptVolume>,
    /// How long they do, in milliseconds.
    pub keep_ms: u64,
    /// Which home servers the names of its workflow were, and where they listened.
    pub homes: BTreeMap<String, (ServerId, String)>,
}

impl EarlierRun {
    /// Reads a journal; nothing when there is none.
    ///
    /// # Errors
    /// As [`Journal::open`](crate::io::journal::Journal::open).
    pub fn read(journal: &Path) -> Result<Option<Self>> {
        if !journal.exists() {
            return Ok(None);
        }
        let tail = read_tail(journal)?;
        let has_begun = has_begun(&tail);
        let homes = named_homes(&tail)?;
        let mut scheduler = tail.header.new_scheduler(&NullSelector);
        tail.restore(&mut scheduler)?;
        let records = scheduler.job_records();
        let failed = scheduler.failures.iter().map(|failed| failed.name.clone());
        Ok(Some(Self {
            run: tail.header.run,
            is_over: scheduler.outcome().is_some(),
            has_begun,
            is_temporary: scheduler.is_temporary(),
            records: records.map(|it| (it.job.clone(), it)).collect(),
            failed: failed.collect(),
            kept: scheduler.kept_volumes(),
            keep_ms: tail.header.settings.keep_ms,
            homes,
            workflow: tail.header.workflow,
        }))
    }
}

fn named_homes(tail: &JournalTail) -> Result<BTreeMap<String, (ServerId, String)>> {
    let before = tail.snapshot.iter().flat_map(|it| it.homes.clone());
    let mut homes = BTreeMap::new();
    let mut note = |event: Event| {
        if let Event::HomeListed {
            name,
            server,
            address,
        } = event
        {
            homes.insert(name, (server, address));
        }
    };
    before.for_each(&mut note);
    for step in tail.steps.read() {
        note(step?.event);
    }
    Ok(homes)
}
