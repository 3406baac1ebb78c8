//! Where processors come from: batch systems that start pilots, and the pool that keeps them.
//!
//! A pilot is `bafs node` in a batch job. An [`Engine`] submits, polls and cancels pilots by the
//! command line of one batch system. [`logic::PoolController`] decides which; it has no clock and
//! no I/O. This crate knows no cluster: the program tells the controller which nodes live.

mod engine;
mod engine_command;
mod engine_name;
mod grid_engine;
mod htcondor;
mod local;
pub mod logic;
mod process_shell;
mod slurm;
mod ssh;

pub use engine::{Engine, EngineError, PilotId, PilotSpec, PilotState};
pub use engine_command::EngineCommands;
pub use engine_name::{EngineName, open_engine};
pub use grid_engine::GridEngine;
pub use htcondor::HtCondor;
pub use local::LocalProcesses;
pub use slurm::Slurm;
pub use ssh::SshHosts;
