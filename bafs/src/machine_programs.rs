//! Programs and interpreters of this machine, as jobs find them that run here, and those that a
//! workflow brings.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use bafs_proto::path::PROGRAM_DIRECTORY;
use bafs_workflow::Job;

use crate::home_view::{FoundPath, LookupError};

/// Bytes of a script that are read for its `#!` line: what the kernel reads.
const SHEBANG_BYTES: usize = 256;

/// Where a job has a program of this name that its workflow brings.
pub(crate) fn brought_place(program: &str) -> String {
    format!("{PROGRAM_DIRECTORY}/{program}")
}

/// Whether the workflow brings a program of this name to the job.
pub(crate) fn is_brought(job: &Job, program: &str) -> bool {
    let place = brought_place(program);
    job.mounts.iter().any(|mount| mount.path == place)
}

/// A program of this machine: by its path, or on the `PATH` that the job inherits.
pub(crate) fn find_on_machine(job: &Job, program: &str) -> Option<Result<FoundPath, LookupError>> {
    let stat = |path: &Path| {
        let found = path.metadata().ok()?;
        Some(FoundPath {
            is_directory: found.is_dir(),
            mode: found.permissions().mode() & 0o7777,
        })
    };
    if program.starts_with('/') {
        return Some(stat(Path::new(program)).ok_or(LookupError::Missing));
    }
    let has_own_path = job
        .command
        .environment
        .iter()
        .any(|(name, _)| name == "PATH");
    // Another system has its own programs, and a volume may bring this one.
    let is_elsewhere = job.root().is_some() || is_brought(job, program);
    if program.contains('/') || has_own_path || is_elsewhere {
        return None;
    }
    let path = std::env::var_os("PATH")?;
    let mut found = std::env::split_paths(&path).filter_map(|directory| {
        let found = stat(&directory.join(program))?;
        (!found.is_directory && found.mode & 0o111 != 0).then_some(found)
    });
    Some(found.next().ok_or(LookupError::Missing))
}

/// The interpreter of a script's `#!` line that is not on this machine.
pub(crate) fn find_missing_interpreter(script: &Path) -> Option<String> {
    let mut start = Vec::new();
    let file = File::open(script).ok()?;
    file.take(SHEBANG_BYTES as u64)
        .read_to_end(&mut start)
        .ok()?;
    let line = start.strip_prefix(b"#!")?;
    let line = line.split(|byte| *byte == b'\n').next()?;
    let mut words = std::str::from_utf8(line).ok()?.split_whitespace();
    let interpreter = words.next()?;
    if interpreter.starts_with('/') && !Path::new(interpreter).exists() {
        return Some(interpreter.to_owned());
    }
    // `env` looks for the next word that is neither an option nor a variable.
    let is_env = interpreter.rsplit('/').next() == Some("env");
    let named = words.find(|word| !word.starts_with('-') && !word.contains('='));
    let named = named.filter(|_| is_env)?;
    let path = std::env::var_os("PATH")?;
    let is_missing = !std::env::split_paths(&path).any(|it| it.join(named).is_file());
    is_missing.then(|| named.to_owned())
}
