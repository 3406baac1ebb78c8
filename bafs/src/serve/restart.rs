//! A server becomes the program that its file now holds: the process stays, and with it its parent
//! and its number. Started again it listens where it did.

use std::env;
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Error, anyhow};

/// Set for a server that took the place of another one.
const RESTARTED_VARIABLE: &str = "BAFS_RESTARTED";

/// What the kernel adds to the path of a program whose file was replaced.
const REPLACED_SUFFIX: &[u8] = b" (deleted)";

/// Replaces this process by the program file with the same words, listening at `address`. Returns
/// only if that fails.
pub(super) fn replace_process(address: &str) -> Error {
    let program = match env::current_exe() {
        Ok(path) => strip_replaced(path),
        Err(error) => return Error::new(error).context("find the program file"),
    };
    let words = listen_at(env::args_os().skip(1).collect(), address);
    let mut command = Command::new(&program);
    let error = command.args(words).env(RESTARTED_VARIABLE, "1").exec();
    Err::<(), _>(error)
        .with_context(|| format!("start {} again", program.display()))
        .err()
        .unwrap_or_else(|| anyhow!("the program was not replaced"))
}

/// Whether this process took the place of another server. Who started that one may have stopped to
/// read what it prints.
pub(super) fn is_restarted() -> bool {
    env::var_os(RESTARTED_VARIABLE).is_some()
}

fn strip_replaced(path: PathBuf) -> PathBuf {
    let bytes = path.as_os_str().as_bytes();
    match bytes.strip_suffix(REPLACED_SUFFIX) {
        Some(rest) => OsString::from_vec(rest.to_vec()).into(),
        None => path,
    }
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

    #[test]
    fn replaced_file_keeps_its_path() {
        assert_eq!(
            strip_replaced("/usr/bin/bafs (deleted)".into()),
            PathBuf::from("/usr/bin/bafs")
        );
        assert_eq!(
            strip_replaced("/usr/bin/bafs".into()),
            PathBuf::from("/usr/bin/bafs")
        );
    }
}
