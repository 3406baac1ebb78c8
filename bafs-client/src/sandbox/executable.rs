//! Finds a job's program and explains precisely why one does not start. Starts nothing.

use std::env::split_paths;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use bafs_proto::job_arguments::too_long_message;
use nix::errno::Errno;
use nix::unistd::{AccessFlags, access};

use super::outcome::{NotStarted, NotStartedReason as Reason};

/// Where programs are looked up when the job has no `PATH`; the same as in `execvp`'s manual,
/// less the working directory.
pub(super) const SEARCH_PATH_DEFAULT: &str = "/usr/local/bin:/usr/bin:/bin";

/// Finds `program` as a shell would, with the rights of this process.
pub(super) fn find_executable(
    program: &OsStr,
    path: Option<&OsStr>,
) -> Result<PathBuf, NotStarted> {
    if program.as_bytes().contains(&b'/') {
        return Ok(program.into());
    }
    let path = path.unwrap_or_else(|| OsStr::new(SEARCH_PATH_DEFAULT));
    let mut unusable = None;
    for directory in split_paths(path) {
        // An empty entry means the working directory.
        let candidate = if directory.as_os_str().is_empty() {
            Path::new(".").join(program)
        } else {
            directory.join(program)
        };
        if candidate.is_file() {
            match access(&candidate, AccessFlags::X_OK) {
                Ok(()) => return Ok(candidate),
                Err(_) => unusable = unusable.or(Some(candidate)),
            }
        }
    }
    Err(unusable.map_or_else(
        || NotStarted {
            reason: Reason::ExecutableMissing,
            errno: Some(Errno::ENOENT as i32),
            message: format!(
                "no program {} in the job's PATH ({})",
                program.display(),
                path.display()
            ),
        },
        |found| explain_refusal(&found, &Errno::EACCES.into()),
    ))
}

/// The shell that runs a script without a first line of its own, as with `execvp`.
pub(super) const SHELL: &str = "/bin/sh";

/// Whether a file that the kernel cannot execute looks like a script: text, up to its first line.
pub(super) fn is_script(program: &Path) -> bool {
    let mut head = Vec::new();
    let read = File::open(program).and_then(|file| file.take(256).read_to_end(&mut head));
    let first = head.split(|&byte| byte == b'\n').next().unwrap_or_default();
    read.is_ok() && !first.contains(&0)
}

/// Says why the kernel refused to execute `program`.
pub(super) fn explain_refusal(program: &Path, error: &io::Error) -> NotStarted {
    let shown = program.display();
    let (reason, message) = match error.raw_os_error().map(Errno::from_raw) {
        Some(Errno::ENOENT) if program.exists() => match interpreter_of(program) {
            Some(name) => (
                Reason::InterpreterMissing,
                describe_missing_interpreter(program, &name),
            ),
            None => (
                Reason::InterpreterMissing,
                format!("{shown} exists, but its loader does not"),
            ),
        },
        Some(Errno::ENOENT) if program.is_symlink() => (
            Reason::ExecutableMissing,
            format!("{shown} is a symbolic link to nowhere"),
        ),
        Some(Errno::ENOENT | Errno::ENOTDIR) => {
            (Reason::ExecutableMissing, format!("{shown} does not exist"))
        }
        Some(Errno::EACCES | Errno::EPERM) => (
            Reason::ExecutableNotExecutable,
            describe_not_executable(program),
        ),
        Some(Errno::ENOEXEC) => (
            Reason::ExecutableBadFormat,
            format!("{shown} is neither a program for this machine nor a script"),
        ),
        Some(Errno::E2BIG) => (Reason::CommandTooLong, too_long_message(&shown.to_string())),
        _ => (Reason::Refused, format!("{shown} does not start: {error}")),
    };
    NotStarted {
        reason,
        errno: error.raw_os_error(),
        message,
    }
}

fn describe_missing_interpreter(program: &Path, name: &OsStr) -> String {
    let hint = if name.as_bytes().ends_with(b"\r") {
        "; it has Windows line ends; convert them with dos2unix"
    } else {
        ""
    };
    format!(
        "{} exists, but its interpreter {name:?} does not{hint}",
        program.display()
    )
}

fn describe_not_executable(program: &Path) -> String {
    let shown = program.display();
    if program.is_dir() {
        return format!("{shown} is a directory");
    }
    if program.exists() && access(program, AccessFlags::X_OK).is_err() {
        return format!(
            "{shown} is not executable; run chmod +x on it, or mount its file system without noexec"
        );
    }
    match interpreter_of(program) {
        Some(name) => format!("{shown}: its interpreter {name:?} is not executable"),
        None => format!("{shown} is not executable, or a directory on its path denies access"),
    }
}

/// What the first line after `#!` names.
fn interpreter_of(program: &Path) -> Option<OsString> {
    // The kernel reads 256 bytes as well (BINPRM_BUF_SIZE).
    let mut head = Vec::new();
    File::open(program)
        .ok()?
        .take(256)
        .read_to_end(&mut head)
        .ok()?;
    let line = head
        .strip_prefix(b"#!")?
        .split(|&byte| byte == b'\n')
        .next()?;
    let blank = |byte: &u8| matches!(byte, b' ' | b'\t');
    let name = line.split(blank).find(|word| !word.is_empty())?;
    Some(OsStr::from_bytes(name).to_owned())
}

/// Whether two names are the same file, so that two streams must share one position.
pub(super) fn is_same_file(one: &Path, other: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let identity = |path| fs::metadata(path).map(|found| (found.dev(), found.ino()));
    one == other || matches!((identity(one), identity(other)), (Ok(a), Ok(b)) if a == b)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;

    use super::*;

    #[track_caller]
    fn check(content: Option<&str>, mode: u32, reason: Reason, says: &str) {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("program");
        if let Some(content) = content {
            fs::write(&program, content).unwrap();
            fs::set_permissions(&program, fs::Permissions::from_mode(mode)).unwrap();
        }
        let error = Command::new(&program).spawn().unwrap_err();
        let explained = explain_refusal(&program, &error);
        assert_eq!(explained.reason, reason, "{explained}");
        assert!(explained.message.contains(says), "{explained}");
        assert_eq!(explained.errno, error.raw_os_error());
    }

    #[test]
    fn start_refusals_are_distinguished() {
        check(None, 0, Reason::ExecutableMissing, "does not exist");
        check(
            Some("#!/bin/sh\n"),
            0o644,
            Reason::ExecutableNotExecutable,
            "chmod +x",
        );
        check(
            Some("#! /no/sh -e\n"),
            0o755,
            Reason::InterpreterMissing,
            "/no/sh",
        );
        check(
            Some("#!/bin/sh\r\n"),
            0o755,
            Reason::InterpreterMissing,
            "dos2unix",
        );
    }

    #[test]
    fn scripts_are_distinguished_from_foreign_programs() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("file");
        for (content, expected) in [
            (&b"echo hello\n\0"[..], true),
            (b"", true),
            (b"\x7fELF\x02\0\0\0", false),
        ] {
            fs::write(&file, content).unwrap();
            assert_eq!(is_script(&file), expected, "{content:?}");
        }
        assert!(!is_script(Path::new("/no/such/file")));
    }

    #[test]
    fn executable_names_are_resolved_on_the_path() {
        assert_eq!(
            find_executable(OsStr::new("./x"), None).unwrap(),
            Path::new("./x")
        );
        let found = find_executable(OsStr::new("sh"), Some(OsStr::new("/none:/bin"))).unwrap();
        assert_eq!(found, Path::new("/bin/sh"));
        let lost = find_executable(OsStr::new("no-such-program"), None).unwrap_err();
        assert_eq!(lost.reason, Reason::ExecutableMissing);
        assert!(lost.message.contains(SEARCH_PATH_DEFAULT));
    }
}
