//! Tries in a child process whether a private name space can be had. Changes nothing here.

use std::io::{self, Write};
use std::process::{Command, Stdio};

use super::privilege::{Privilege, enter_private};
use super::running::Sandbox;
use crate::own_process::{OWN_EXECUTABLE, PROBE, SUBCOMMAND};

/// Precedes the verdict, so that a program that does not know the subcommand cannot pass.
const WORKS_PREFIX: &str = "sandbox works as ";
const REFUSED_PREFIX: &str = "sandbox refused: ";

/// The child's part: does all that an agent does, and prints the verdict.
pub(super) fn print_verdict() -> io::Result<()> {
    let verdict = match enter_private().and_then(Sandbox::prepare) {
        Ok(sandbox) => match sandbox.privilege() {
            Privilege::Root => format!("{WORKS_PREFIX}root"),
            Privilege::UserNamespace { uid, .. } => {
                format!("{WORKS_PREFIX}user {uid} in a user name space")
            }
        },
        Err(error) => format!("{REFUSED_PREFIX}{error}"),
    };
    io::stdout().write_all(verdict.as_bytes())
}

/// The parent's part: who can run jobs here, or why nobody can.
pub(super) fn probe_name_space() -> Result<String, String> {
    let output = Command::new(OWN_EXECUTABLE)
        .args([SUBCOMMAND, PROBE])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .map_err(|error| format!("cannot start a process: {error}"))?;
    let verdict = String::from_utf8_lossy(&output.stdout);
    match (
        verdict.strip_prefix(WORKS_PREFIX),
        verdict.strip_prefix(REFUSED_PREFIX),
    ) {
        (Some(_), _) => Ok(verdict.into_owned()),
        (None, Some(why)) => Err(why.to_owned()),
        (None, None) => Err("this program does not call dispatch_job_init".to_owned()),
    }
}
