//! How a job ended, told apart from how its environment failed. Decides nothing.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How a job ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum SandboxOutcome {
    /// The job's main process returned this code; 126 and 127 are its own as well.
    Exited(i32),
    /// A signal that the agent did not ask for ended the job's main process.
    Signaled(i32),
    /// The job's program never ran a single instruction.
    NotStarted(NotStarted),
    /// The agent ended the job; the text is the reason it gave.
    Killed(String),
    /// The job's init died without a word: somebody outside killed it, or memory ran out.
    Interrupted(String),
}

/// Why a job's program never ran.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct NotStarted {
    /// What was wrong.
    pub reason: NotStartedReason,
    /// The kernel's error number, when the kernel refused.
    pub errno: Option<i32>,
    /// What was attempted, what failed, and what to do, for people.
    pub message: String,
}

/// What was wrong when a job's program never ran.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum NotStartedReason {
    /// No file of that name, neither at the path nor in `PATH`.
    ExecutableMissing,
    /// The file exists but may not be executed: its mode, its mount, or it is no regular file.
    ExecutableNotExecutable,
    /// The interpreter that the file's first line, or its ELF header, names does not exist.
    InterpreterMissing,
    /// The file is neither a program of this machine nor a script with a `#!` line.
    ExecutableBadFormat,
    /// The working directory cannot be entered.
    DirectoryUnusable,
    /// An input or output file of the job cannot be opened.
    StreamUnusable,
    /// A volume's source is not there, or does not answer.
    VolumeUnusable,
    /// A volume cannot be shown at its path.
    PathUnusable,
    /// The kernel refused part of the private name space.
    NameSpaceRefused,
    /// The requested user or group cannot be taken on.
    IdentityRefused,
    /// The arguments and the environment are larger than the kernel allows.
    CommandTooLong,
    /// Any other refusal to start; the error number tells.
    Refused,
}

/// What a job and all its processes used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobUsage {
    /// The largest resident memory of any single process.
    pub resident_bytes_max: u64,
    /// Processor time in user mode, summed over all processes.
    pub user_us: u64,
    /// Processor time in the kernel, summed over all processes.
    pub system_us: u64,
}

/// A job's end, complete: when this exists, no process of the job is left.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SandboxReport {
    /// How it ended.
    pub outcome: SandboxOutcome,
    /// What it used; absent when its init was killed before it could count.
    pub usage: Option<JobUsage>,
    /// From the start of the program to its end; zero when it never started.
    pub wall: Duration,
    /// Host entries that could not be shown in the job's name space, with reasons.
    pub notes: Vec<String>,
    /// What a user must know to understand a failure of the job.
    pub warnings: Vec<String>,
}
