//! The batch systems that BAFS knows, by name.

use std::str::FromStr;

use crate::{Engine, EngineCommands, GridEngine, HtCondor, LocalProcesses, Slurm, SshHosts};

/// The batch systems that are known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineName {
    /// Slurm.
    Slurm,
    /// Grid Engine and its descendants.
    GridEngine,
    /// HTCondor.
    HtCondor,
    /// Processes on other machines, by SSH.
    Ssh,
    /// Processes on this machine.
    Local,
}

impl EngineName {
    /// All, with their names on the command line.
    const ALL: [(&'static str, Self); 5] = [
        ("slurm", Self::Slurm),
        ("sge", Self::GridEngine),
        ("htcondor", Self::HtCondor),
        ("ssh", Self::Ssh),
        ("local", Self::Local),
    ];

    /// Name on the command line.
    pub fn as_str(self) -> &'static str {
        let found = Self::ALL.iter().find(|(_, engine)| *engine == self);
        found.map_or("", |(name, _)| name)
    }
}

impl FromStr for EngineName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.iter().find(|(name, _)| *name == text);
        found.map(|(_, engine)| *engine).ok_or_else(|| {
            let known = Self::ALL.map(|(name, _)| name).join(", ");
            format!("'{text}' is no known batch system; use one of {known}")
        })
    }
}

/// A batch system by its name. `hosts` are for SSH, which needs the user's options in all calls.
pub fn open_engine(
    name: EngineName,
    commands: EngineCommands,
    hosts: &[String],
    options: &[String],
) -> Box<dyn Engine> {
    match name {
        EngineName::Slurm => Box::new(Slurm::new(commands)),
        EngineName::GridEngine => Box::new(GridEngine::new(commands)),
        EngineName::HtCondor => Box::new(HtCondor::new(commands)),
        EngineName::Ssh => {
            let engine = SshHosts::new(commands, hosts.to_vec());
            Box::new(engine.with_options(options.to_vec()))
        }
        EngineName::Local => Box::new(LocalProcesses::new(commands)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn engine_names_are_read_as_printed() {
        for (name, engine) in EngineName::ALL {
            assert_eq!(name.parse(), Ok(engine));
            assert_eq!(engine.as_str(), name);
        }
        let refused = "pbs".parse::<EngineName>().expect_err("unknown");
        assert!(refused.contains("slurm, sge"), "{refused}");
    }
}
