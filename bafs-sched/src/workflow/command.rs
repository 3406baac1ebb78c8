//! The paths of a job's command: working directory and output files, placed among its mounts. It
//! does not look at what the program does.

use super::ast::Word;
use super::checked::{Job, Mount, Volume, VolumeKind};
use super::diagnostic::Diagnostics;
use super::path::{self, PathError};

/// The paths as the description says them.
pub(super) struct CommandPaths {
    pub(super) directory: Option<Word>,
    pub(super) stdout: Option<Word>,
    pub(super) stderr: Option<Word>,
}

/// Fills in the paths of a job whose mounts are known. `complete` says whether all of them are.
pub(super) fn complete_command(
    job: &mut Job,
    paths: &CommandPaths,
    volumes: &[Volume],
    complete: bool,
    diagnostics: &mut Diagnostics,
) {
    let directory = match &paths.directory {
        Some(word) => checked(path::absolute(&word.text), word, "directory", diagnostics),
        None => Some(default_directory(&job.mounts, volumes)),
    };
    job.command.directory = directory.unwrap_or_else(|| "/".to_owned());
    let mut output = |word: &Option<Word>, key: &str| {
        let word = word.as_ref()?;
        let joined = path::joined(&job.command.directory, &word.text);
        let output = checked(joined, word, key, diagnostics)?;
        check_output(job, &output, word, key, volumes, complete, diagnostics);
        Some(output)
    };
    let (stdout, stderr) = (
        output(&paths.stdout, "output"),
        output(&paths.stderr, "error"),
    );
    (job.command.stdout, job.command.stderr) = (stdout, stderr);
}

fn checked(
    path: Result<String, PathError>,
    word: &Word,
    key: &str,
    diagnostics: &mut Diagnostics,
) -> Option<String> {
    path.map_err(|error| {
        let message = format!("the path '{}' of '{key}' {}", word.text, error.text());
        diagnostics.error(word.place, message);
    })
    .ok()
}

fn check_output(
    job: &Job,
    output: &str,
    word: &Word,
    key: &str,
    volumes: &[Volume],
    complete: bool,
    diagnostics: &mut Diagnostics,
) {
    let is_there = |m: &&Mount| !m.path.is_empty() && path::is_inside(output, &m.path);
    let whose = format!("'{key}' of job '{}'", job.name);
    match job.mounts.iter().find(is_there) {
        Some(mount) if !mount.writable => {
            let volume = &volumes[mount.volume.as_usize()].name;
            let message = format!("{whose} is '{output}', but '{volume}' is read-only there");
            let hint = "name a file below a path where a scratch volume is mounted 'rw'";
            diagnostics.error_hint(word.place, message, hint);
        }
        Some(mount) if mount.path == output => {
            let message = format!("{whose} is the mount path '{output}'");
            diagnostics.error_hint(word.place, message, "name a file below it");
        }
        None if complete => {
            let message = format!("{whose} is '{output}', which is in no volume");
            let hint = "the file is lost when the job ends; name one in a mounted volume";
            diagnostics.warn(word.place, message, hint);
        }
        _ => {}
    }
}

/// Where a job starts that does not say: where it can leave its files.
fn default_directory(mounts: &[Mount], volumes: &[Volume]) -> String {
    let is_scratch = |mount: &&Mount| {
        matches!(
            volumes[mount.volume.as_usize()].kind,
            VolumeKind::Scratch { .. }
        )
    };
    let writable = mounts.iter().find(|mount| mount.writable);
    let chosen = writable.or_else(|| mounts.iter().find(is_scratch));
    chosen.map_or_else(|| "/".to_owned(), |mount| mount.path.clone())
}
