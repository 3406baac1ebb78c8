//! Tries in a child process whether a private name space can be had. Changes nothing here.

use std::io::{self, Write};
use std::process::{Command, Stdio};

use serde::{Deserialize, Serialize};

use super::privilege::{Privilege, enter_private};
use super::running::Sandbox;
use crate::own_process::{OWN_EXECUTABLE, PROBE, SUBCOMMAND};

/// What the child tells its parent. A program that does not know the subcommand prints none.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
enum Verdict {
    /// Jobs can run here, by this right.
    Works(Privilege),
    Refused(NamespaceRefusal),
}

/// Why no job can run here.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct NamespaceRefusal {
    pub(super) problem: String,
    /// What to do about it.
    pub(super) remedy: String,
}

/// The child's part: does all that an agent does, and prints the verdict.
pub(super) fn print_verdict() -> io::Result<()> {
    let verdict = match enter_private().and_then(Sandbox::prepare) {
        Ok(sandbox) => Verdict::Works(sandbox.privilege()),
        Err(error) => Verdict::Refused(NamespaceRefusal {
            problem: error.problem(),
            remedy: error.remedy().to_owned(),
        }),
    };
    io::stdout().write_all(&serde_json::to_vec(&verdict)?)
}

/// The parent's part: by what right jobs can run here, or why none can.
pub(super) fn probe_name_space() -> Result<Privilege, NamespaceRefusal> {
    let refusal = |problem: String| NamespaceRefusal {
        problem,
        remedy: "run as root".to_owned(),
    };
    let output = Command::new(OWN_EXECUTABLE)
        .args([SUBCOMMAND, PROBE])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .map_err(|error| refusal(format!("cannot start a process: {error}")))?;
    match serde_json::from_slice(&output.stdout) {
        Ok(Verdict::Works(privilege)) => Ok(privilege),
        Ok(Verdict::Refused(refused)) => Err(refused),
        Err(_) => Err(refusal(
            "this program does not call dispatch_job_init".to_owned(),
        )),
    }
}
