//! A server becomes the program that its file now holds: the process stays, and with it its parent
//! and its number. Started again it listens where it did.

use std::env;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Error, Result, anyhow, bail};
use bafs_client::signals::hold_restart_signal;

use crate::config::FILE_VARIABLE;
use crate::program_file::{PROGRAM_VARIABLE, program_file};

/// Set for a server that took the place of another one.
const RESTARTED_VARIABLE: &str = "BAFS_RESTARTED";

/// The program that runs, wherever its file is by now.
const RUNNING_PROGRAM: &str = "/proc/self/exe";

/// A program that takes longer to tell its version is not the next one.
const CHECK_TIMEOUT: Duration = Duration::from_secs(10);

/// Whether the program file can take the place of this process: it tells its version.
pub(super) async fn check_program() -> Result<()> {
    let program = program_file()?;
    let mut command = tokio::process::Command::new(program);
    command
        .arg("--version")
        .env(FILE_VARIABLE, "")
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .kill_on_drop(true);
    let shown = program.display();
    let ended = tokio::time::timeout(CHECK_TIMEOUT, command.status()).await;
    let ended = ended.with_context(|| format!("{shown} --version does not end"))?;
    let status = ended.with_context(|| format!("cannot start {shown}"))?;
    match status.success() {
        true => Ok(()),
        false => bail!("{shown} --version fails: {status}"),
    }
}

/// Replaces this process by the program file with the same words, listening at `address`. A file
/// that is no program is replaced by what runs here. Returns only if that fails.
pub(super) async fn replace_process(address: &str) -> Error {
    let program = match program_file() {
        Ok(path) => path,
        Err(error) => return error,
    };
    let words = listen_at(env::args_os().skip(1).collect(), address);
    let command = |file: &Path| {
        let mut command = Command::new(file);
        command.args(&words).env(RESTARTED_VARIABLE, "1");
        command
    };
    let checked = check_program().await;
    hold_restart_signal();
    let refused = match checked {
        Ok(()) => anyhow!(command(program).exec()),
        Err(error) => error,
    };
    tracing::warn!("the server goes on with the program that it has: {refused:#}");
    let mut running = command(Path::new(RUNNING_PROGRAM));
    let error = running.env(PROGRAM_VARIABLE, program).exec();
    anyhow!(error).context("cannot start this program again")
}

/// Whether this process took the place of another server. Who started that one may have stopped to
/// read what it prints.
pub(super) fn is_restarted() -> bool {
    env::var_os(RESTARTED_VARIABLE).is_some()
}

/// The words with this `--listen`: any free port was chosen once, and is known to others now.
fn listen_at(words: Vec<OsString>, address: &str) -> Vec<OsString> {
    let mut kept = Vec::new();
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        match word.as_bytes() {
            b"--listen" => {
                words.next();
            }
            bytes if bytes.starts_with(b"--listen=") => {}
            _ => kept.push(word),
        }
    }
    kept.push("--listen".into());
    kept.push(address.into());
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_stays_after_a_restart() {
        let listen = |words: &str| {
            let words = words.split(' ').map(OsString::from).collect();
            let words = listen_at(words, "a:7");
            let words: Vec<_> = words.iter().map(|word| word.to_string_lossy()).collect();
            words.join(" ")
        };
        assert_eq!(
            listen("node --listen a:0 --slots 2"),
            "node --slots 2 --listen a:7"
        );
        assert_eq!(listen("node --listen=a:0"), "node --listen a:7");
        assert_eq!(listen("node"), "node --listen a:7");
    }
}
