//! Pilots as processes on other machines, by `ssh`. It needs a key that asks for nothing.

use std::collections::BTreeMap;

use crate::engine_command::{shorten, words};
use crate::process_shell::{cancel_script, find_state, list_script, parse_started, start_script};
use crate::{Engine, EngineCommands, EngineError, PilotId, PilotSpec, PilotState};

/// Machines by SSH. The id of a pilot is `HOST/PID:START`; pilots go to the hosts in turn.
#[derive(Debug, Clone)]
pub struct SshHosts {
    commands: EngineCommands,
    hosts: Vec<String>,
    /// The user's options, for commands that concern no particular pilot.
    options: Vec<String>,
}

impl SshHosts {
    /// With commands run like this, on these hosts.
    pub fn new(commands: EngineCommands, hosts: Vec<String>) -> Self {
        Self {
            commands,
            hosts,
            options: Vec::new(),
        }
    }

    /// With options of `ssh` for all of its calls.
    #[must_use]
    pub fn with_options(mut self, options: Vec<String>) -> Self {
        self.options = options;
        self
    }

    fn run_script(&self, host: &str, script: &str) -> Result<String, EngineError> {
        let mut arguments = words(&["-o", "BatchMode=yes", "-T"]);
        arguments.extend(self.options.iter().cloned());
        arguments.extend(words(&["--", host, "/bin/sh", "-s"]));
        self.commands.run("ssh", &arguments, script)
    }

    /// The host of a pilot: its name ends with its number in the pool.
    fn choose_host(&self, pilot: &PilotSpec) -> Result<&str, EngineError> {
        let digits = pilot.name.rsplit(|c: char| !c.is_ascii_digit()).next();
        let number: usize = digits.and_then(|text| text.parse().ok()).unwrap_or(0);
        let index = number.checked_rem(self.hosts.len());
        let host = index.and_then(|index| self.hosts.get(index));
        host.map(String::as_str)
            .ok_or_else(|| EngineError::NotStarted {
                command: "ssh".to_owned(),
                reason: "no host is named (--pool-hosts)".to_owned(),
            })
    }
}

impl Engine for SshHosts {
    fn check(&self, pilot: &PilotSpec) -> Result<(), EngineError> {
        let host = self.choose_host(pilot)?;
        let script = format!("command -v setsid && [ -r '{}' ]", pilot.script.display());
        self.run_script(host, &script).map(drop)
    }

    fn submit(&self, pilot: &PilotSpec) -> Result<PilotId, EngineError> {
        let host = self.choose_host(pilot)?;
        let printed = self.run_script(host, &start_script(pilot))?;
        let started = parse_started(&printed).ok_or_else(|| unreadable(&printed))?;
        Ok(PilotId(format!("{host}/{started}")))
    }

    fn poll(&self, ids: &[PilotId]) -> Result<BTreeMap<PilotId, PilotState>, EngineError> {
        let mut states = BTreeMap::new();
        let mut by_host: BTreeMap<&str, Vec<&PilotId>> = BTreeMap::new();
        for id in ids {
            match id.0.rsplit_once('/') {
                Some((host, _)) => by_host.entry(host).or_default().push(id),
                None => drop(states.insert(id.clone(), PilotState::Ended)),
            }
        }
        for (host, ids) in by_host {
            let processes: Vec<&str> = ids.iter().map(|id| process_of(id)).collect();
            let printed = self.run_script(host, &list_script(&processes))?;
            for id in ids {
                let state = find_state(&printed, process_of(id));
                states.insert(id.clone(), state.ok_or_else(|| unreadable(&printed))?);
            }
        }
        Ok(states)
    }

    fn cancel(&self, id: &PilotId) -> Result<(), EngineError> {
        let Some((host, process)) = id.0.rsplit_once('/') else {
            return Ok(());
        };
        match cancel_script(process) {
            Some(script) => self.run_script(host, &script).map(drop),
            None => Ok(()),
        }
    }

    fn cancel_named(&self, _: &str) -> Result<(), EngineError> {
        // Its time limit ends a process whose start was not confirmed.
        Ok(())
    }
}

fn process_of(id: &PilotId) -> &str {
    id.0.rsplit_once('/').map_or("", |(_, process)| process)
}

fn unreadable(printed: &str) -> EngineError {
    EngineError::Unreadable {
        command: "ssh".to_owned(),
        printed: shorten(printed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pilots_go_to_the_hosts_in_turn() {
        let hosts = vec!["a".to_owned(), "b".to_owned()];
        let engine = SshHosts::new(EngineCommands::default(), hosts);
        let pilot = |name: &str| PilotSpec {
            name: name.to_owned(),
            script: "/s".into(),
            log: "/l".into(),
            time_limit_s: None,
            options: Vec::new(),
        };
        let chosen = |name: &str| engine.choose_host(&pilot(name)).expect("a host").to_owned();
        assert_eq!(
            [chosen("p-0"), chosen("p-1"), chosen("p-2")],
            ["a", "b", "a"]
        );
        let none = SshHosts::new(EngineCommands::default(), Vec::new());
        assert!(none.choose_host(&pilot("p-0")).is_err());
    }
}
