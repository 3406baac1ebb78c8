//! Opens the journal of a run: a new one, one to resume, or one of a run that never began.

use bafs_proto::ids::RunId;
use bafs_proto::{Error, ErrorCode, Result};
use bafs_workflow::Workflow;

use super::RunOptions;
use crate::Event;
use crate::io::journal::{History, Journal, JournalHeader};

/// The journal of a run of `workflow`, and what it tells.
pub(super) fn open_journal(
    workflow: &Workflow,
    options: &RunOptions,
) -> Result<(Journal, History)> {
    let fresh = || JournalHeader {
        run: RunId::random(),
        workflow: workflow.clone(),
        settings: options.settings.clone(),
    };
    let (mut journal, mut history) = Journal::open(&options.journal, fresh)?;
    let is_fresh = history.records.is_empty() && history.header.workflow == *workflow;
    if !is_fresh && !has_begun(&history) {
        // Nothing was made, so that what it says binds nobody: it may be over already.
        history = journal.begin_anew(fresh())?;
    }
    if history.header.workflow != *workflow {
        let text = format!(
            "the journal {} belongs to another workflow, or to an earlier version of this one; \
             name another journal, or delete it to start afresh",
            options.journal.display()
        );
        return Err(Error::new(ErrorCode::Conflict, text));
    }
    Ok((journal, history))
}

/// Whether a run saw a node at any time: before that nothing is made.
fn has_begun(history: &History) -> bool {
    let mut events = history.records.iter().map(|(_, event)| event);
    events.any(|event| matches!(event, Event::NodesListed { nodes, .. } if !nodes.is_empty()))
}
