//! Pilots as processes on this machine.

use std::collections::BTreeMap;

use crate::engine_command::{shorten, words};
use crate::process_shell::{cancel_script, find_state, list_script, parse_started, start_script};
use crate::{Engine, EngineCommands, EngineError, PilotId, PilotSpec, PilotState};

/// This machine. The user's options are not used: there is nobody to hand them to.
#[derive(Debug, Clone, Default)]
pub struct LocalProcesses {
    commands: EngineCommands,
}

impl LocalProcesses {
    /// With commands run like this.
    pub fn new(commands: EngineCommands) -> Self {
        Self { commands }
    }

    fn run_script(&self, script: &str) -> Result<String, EngineError> {
        self.commands.run("/bin/sh", &words(&["-s"]), script)
    }
}

impl Engine for LocalProcesses {
    fn check(&self, _: &PilotSpec) -> Result<(), EngineError> {
        self.run_script("command -v setsid").map(drop)
    }

    fn submit(&self, pilot: &PilotSpec) -> Result<PilotId, EngineError> {
        let printed = self.run_script(&start_script(pilot))?;
        parse_started(&printed).ok_or_else(|| unreadable(&printed))
    }

    fn poll(&self, ids: &[PilotId]) -> Result<BTreeMap<PilotId, PilotState>, EngineError> {
        let texts: Vec<&str> = ids.iter().map(|id| id.0.as_str()).collect();
        let printed = self.run_script(&list_script(&texts))?;
        let state = |id: &PilotId| Some((id.clone(), find_state(&printed, &id.0)?));
        let states: Option<_> = ids.iter().map(state).collect();
        states.ok_or_else(|| unreadable(&printed))
    }

    fn cancel(&self, id: &PilotId) -> Result<(), EngineError> {
        match cancel_script(&id.0) {
            Some(script) => self.run_script(&script).map(drop),
            None => Ok(()),
        }
    }

    fn cancel_named(&self, _: &str) -> Result<(), EngineError> {
        // A start that failed here left nothing.
        Ok(())
    }
}

fn unreadable(printed: &str) -> EngineError {
    EngineError::Unreadable {
        command: "/bin/sh".to_owned(),
        printed: shorten(printed),
    }
}
