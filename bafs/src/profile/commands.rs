//! Traces of commands: which directories are traced, and the commands of a command line.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use bafs_client::sandbox::Access;
use bafs_client::traced_command::{TracedCommand, TracedDirectory, TracedOutput, run_traced};
use bafs_profile::trace::Trace;

use super::enter_sandbox;
use super::profile_file::next_instance;
use crate::args::{ProfileArgs, UsageError};
use crate::output::Printer;

/// Directories of the system, which every machine has. They are traced only if they are named.
const SYSTEM_DIRECTORIES: [&str; 12] = [
    "/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/proc", "/run", "/sbin", "/sys",
    "/usr",
];
/// Directories that all programs share, which are traced only if they are named.
const SHARED_DIRECTORIES: [&str; 3] = ["/", "/tmp", "/var/tmp"];

/// One command of the command line.
#[derive(Debug, PartialEq, Eq)]
struct CommandWords {
    instance: Option<String>,
    words: Vec<OsString>,
}

/// Runs the commands of the command line, and adds their traces. Returns the names of the instances
/// that the user did not name.
pub(super) fn trace_commands(
    args: &ProfileArgs,
    output: Printer,
    traces: &mut Vec<Trace>,
) -> Result<BTreeSet<String>> {
    let mut numbered = BTreeSet::new();
    let commands = split_commands(args.instance.clone(), &args.command)?;
    let directory = std::env::current_dir().context("the working directory no longer exists")?;
    let sandbox = enter_sandbox()?;
    for CommandWords { instance, words } in commands {
        let directories = find_directories(&directory, &args.trace, &words)?;
        let (program, arguments) = words.split_first().context("a command has a program")?;
        let name = Path::new(program).file_name().unwrap_or(program);
        let stdout = match output.is_json() {
            true => TracedOutput::StandardError,
            false => TracedOutput::Inherit,
        };
        let command = TracedCommand {
            program: program.clone(),
            arguments: arguments.to_vec(),
            environment: std::env::vars_os().collect(),
            directory: directory.clone(),
            directories,
            output: [stdout, TracedOutput::Inherit],
        };
        let instance = instance.unwrap_or_else(|| {
            let name = next_instance(&*traces);
            numbered.insert(name.clone());
            name
        });
        let trace = run_traced(&sandbox, &command)?;
        traces.push(Trace {
            instance,
            stage: name.to_string_lossy().into_owned(),
            ..trace
        });
    }
    Ok(numbered)
}

/// Divides `COMMAND --instance NAME -- COMMAND` into commands.
fn split_commands(first: Option<String>, words: &[OsString]) -> Result<Vec<CommandWords>> {
    let mut commands = vec![CommandWords {
        instance: first,
        words: Vec::new(),
    }];
    let mut rest = words;
    while let Some((word, after)) = rest.split_first() {
        if let (true, [name, dashes, more @ ..]) = (word == "--instance", after)
            && dashes == "--"
        {
            commands.push(CommandWords {
                instance: Some(name.to_string_lossy().into_owned()),
                words: Vec::new(),
            });
            rest = more;
            continue;
        }
        if let Some(last) = commands.last_mut() {
            last.words.push(word.clone());
        }
        rest = after;
    }
    if commands.iter().any(|command| command.words.is_empty()) {
        let reason = "write a command after each `--instance NAME --`";
        return Err(UsageError::from_reason(reason.to_owned()));
    }
    Ok(commands)
}

fn is_own_place(path: &Path) -> bool {
    let is_shared = SHARED_DIRECTORIES.iter().any(|it| path == Path::new(it));
    !is_shared && !SYSTEM_DIRECTORIES.iter().any(|it| path.starts_with(it))
}

/// The directories to trace, none in another: the working directory, what the user names, and the
/// directories of paths among the arguments.
fn find_directories(
    directory: &Path,
    named: &[PathBuf],
    words: &[OsString],
) -> Result<Vec<TracedDirectory>> {
    let mut found = Vec::new();
    for path in named {
        let real = path.canonicalize();
        found.push(real.with_context(|| format!("--trace {}", path.display()))?);
    }
    let paths = words
        .iter()
        .map(Path::new)
        .filter(|path| path.is_absolute());
    let real = paths.filter_map(|path| {
        let real = path.canonicalize().ok()?;
        match real.is_dir() {
            true => Some(real),
            false => real.parent().map(Path::to_owned),
        }
    });
    let real = real.chain([directory.to_owned()]);
    found.extend(real.filter(|path| is_own_place(path)));
    found.sort_unstable();
    // A directory comes before those in it.
    found.dedup_by(|below, above| below.starts_with(above));
    if found.is_empty() {
        let shown = directory.display();
        return Err(UsageError::from_reason(format!(
            "nothing is traced: {shown} belongs to the system or to all programs; name a directory \
             with --trace"
        )));
    }
    let traced = |path: PathBuf| TracedDirectory {
        shown: path.to_string_lossy().into_owned(),
        source: path.clone(),
        path,
        access: Access::ReadWrite,
    };
    Ok(found.into_iter().map(traced).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_divide_the_command_line() {
        let words = [
            "bwa",
            "x",
            "--instance",
            "b",
            "--",
            "bwa",
            "--instance",
            "y",
        ];
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        let commands = split_commands(Some("a".to_owned()), &words).unwrap();
        let found: Vec<_> = commands
            .iter()
            .map(|it| (it.instance.as_deref(), it.words.len()))
            .collect();
        assert_eq!(found, [(Some("a"), 2), (Some("b"), 3)]);
        assert!(split_commands(None, &words[2..5]).is_err());
    }

    #[test]
    fn system_directories_are_not_traced() {
        let words = ["/usr/bin/env", "/etc/passwd", "relative", "/no/such/path"];
        let words: Vec<OsString> = words.iter().map(OsString::from).collect();
        let place = tempfile::tempdir().unwrap();
        let below = place.path().join("below");
        std::fs::create_dir(&below).unwrap();
        let found = find_directories(place.path(), &[below], &words).unwrap();
        let paths: Vec<&Path> = found.iter().map(|it| it.path.as_path()).collect();
        assert_eq!(paths, [place.path()]);
    }
}
