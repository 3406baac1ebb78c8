//! What BAFS needs of a batch system. Decides nothing: the pool controller does.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

/// The batch system's own name of a job, as it prints it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PilotId(pub String);

impl fmt::Display for PilotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One batch job that shall become a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PilotSpec {
    /// Name of the batch job and of its node; no other pilot has it.
    pub name: String,
    /// Shell script that the job runs, readable on the machine of the job.
    pub script: PathBuf,
    /// File for what the job prints.
    pub log: PathBuf,
    /// Time limit in seconds; nothing leaves it to the batch system.
    pub time_limit_s: Option<u64>,
    /// The user's options, handed over verbatim after all others.
    pub options: Vec<String>,
}

/// What a batch system says of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PilotState {
    /// It waits, for the first time or again after a requeue.
    Waiting,
    /// It runs.
    Running {
        /// Seconds until its time limit, if the batch system says.
        left_s: Option<u64>,
    },
    /// It is being ended; it may be requeued under the same id.
    Ending,
    /// It has ended, or the batch system does not know it.
    Ended,
}

/// Why a batch system did not do what it should.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// A command could not be started.
    #[error("cannot start {command}: {reason}; install the client commands of the batch system")]
    NotStarted {
        /// The program.
        command: String,
        /// The system's words.
        reason: String,
    },
    /// A command did not end in time, and was killed: its effect is unknown.
    #[error("{command} did not end within {seconds} s")]
    TimedOut {
        /// The program.
        command: String,
        /// The limit in seconds.
        seconds: u64,
    },
    /// A command failed.
    #[error("{command} failed: {said}")]
    Failed {
        /// The program.
        command: String,
        /// The last line of its error output.
        said: String,
    },
    /// A command succeeded with an answer of unknown form.
    #[error("{command} printed an answer of unknown form: {printed}")]
    Unreadable {
        /// The program.
        command: String,
        /// The beginning of the answer.
        printed: String,
    },
}

/// A batch system. Calls block for as long as its commands take, at most
/// [`crate::EngineCommands::timeout`] each.
pub trait Engine: Send + Sync {
    /// Checks that the batch system would accept this pilot, without submitting it.
    ///
    /// # Errors
    /// Its refusal.
    fn check(&self, pilot: &PilotSpec) -> Result<(), EngineError>;

    /// Submits a pilot.
    ///
    /// # Errors
    /// Its refusal. After an error, the pilot may exist all the same:
    /// [`Engine::cancel_named`] ends it.
    fn submit(&self, pilot: &PilotSpec) -> Result<PilotId, EngineError>;

    /// States of pilots. An unknown id is [`PilotState::Ended`].
    ///
    /// # Errors
    /// The batch system does not answer; then nothing is known of any pilot.
    fn poll(&self, ids: &[PilotId]) -> Result<BTreeMap<PilotId, PilotState>, EngineError>;

    /// Ends a pilot, queued or running. An unknown id is no error.
    ///
    /// # Errors
    /// The batch system does not answer.
    fn cancel(&self, id: &PilotId) -> Result<(), EngineError>;

    /// Ends the pilot of this name, if there is one.
    ///
    /// # Errors
    /// The batch system does not answer.
    fn cancel_named(&self, name: &str) -> Result<(), EngineError>;
}

/// States of the asked ids, of which the batch system listed some.
pub(crate) fn fill_unlisted(
    ids: &[PilotId],
    mut listed: BTreeMap<PilotId, PilotState>,
) -> BTreeMap<PilotId, PilotState> {
    let mut find_state = |id: &PilotId| listed.remove(id).unwrap_or(PilotState::Ended);
    ids.iter().map(|id| (id.clone(), find_state(id))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unlisted_pilot_counts_as_ended() {
        let id = |text: &str| PilotId(text.to_owned());
        let listed = BTreeMap::from([
            (id("1"), PilotState::Waiting),
            (id("9"), PilotState::Ending),
        ]);
        let states = fill_unlisted(&[id("1"), id("2")], listed);
        let expected = [(id("1"), PilotState::Waiting), (id("2"), PilotState::Ended)];
        assert_eq!(states, BTreeMap::from(expected));
    }
}
