//! What a journal is about, where its steps go on, and how its faults are told.

use std::sync::Arc;

use bafs_proto::ids::RunId;
use bafs_proto::{Error, ErrorCode};
use bafs_workflow::Workflow;
use serde::{Deserialize, Serialize};

use crate::io::job_logs::EndedAttempt;
use crate::{Event, Scheduler, Settings, StateChanges, StrategySelector};

/// First record of a journal: the run, its workflow and its settings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JournalHeader {
    /// The run.
    pub run: RunId,
    /// What is run; shared with the scheduler of the run.
    #[serde(with = "shared")]
    pub workflow: Arc<Workflow>,
    /// How it is run.
    pub settings: Settings,
}

/// A shared value in the form of one that is not.
mod shared {
    use std::sync::Arc;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<T: Serialize, S: Serializer>(
        value: &Arc<T>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        value.as_ref().serialize(serializer)
    }

    pub(super) fn deserialize<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<Arc<T>, D::Error> {
        T::deserialize(deserializer).map(Arc::new)
    }
}

impl JournalHeader {
    /// A scheduler of this run of which nothing is done, with the selector of the run.
    pub fn new_scheduler(&self, selector: &dyn StrategySelector) -> Scheduler {
        let (workflow, settings) = (Arc::clone(&self.workflow), self.settings.clone());
        Scheduler::with_strategy_selector(self.run, workflow, settings, selector)
    }
}

/// What a scheduler goes on with that did not read the steps before.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Snapshot {
    /// All rows that differ from those of a new state.
    #[serde(default)]
    pub state: StateChanges,
    /// Which homes the names of the workflow mean, as events.
    #[serde(default)]
    pub homes: Vec<Event>,
    /// The last executions that ended: what they printed may still be on their nodes.
    #[serde(default)]
    pub ended_attempts: Vec<EndedAttempt>,
}

pub(super) fn io_error(doing: &str, name: &str, error: &std::io::Error) -> Error {
    Error::new(
        ErrorCode::ServerFault,
        format!("cannot {doing} the journal {name}: {error}"),
    )
}
