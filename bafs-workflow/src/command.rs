//! A job's command: working directory and output files, placed among its mounts; words that the
//! kernel takes. It does not look at what the program does.

use super::ast::Word;
use super::diagnostic::{Diagnostics, SourceLocation};
use super::limits::{WORD_BYTES_MAX, WORDS_BYTES_COMMON, WORDS_BYTES_MAX};
use super::model::{Job, Mount, ProgramSpec, Volume, VolumeKind};
use super::path::{self, PathError};

/// The paths as the description says them.
pub(super) struct CommandPaths {
    pub(super) directory: Option<Word>,
    pub(super) stdout: Option<Word>,
    pub(super) stderr: Option<Word>,
    /// Files that are there before the job.
    pub(super) required: Vec<Word>,
    /// Files that are there after it.
    pub(super) produced: Vec<Word>,
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
        Some(word) => check_path(
            path::parse_absolute(&word.text),
            word,
            "directory",
            diagnostics,
        ),
        None => Some(default_directory(&job.mounts, volumes)),
    };
    job.command.directory = directory.unwrap_or_else(|| "/".to_owned());
    let mut output = |word: &Option<Word>, key: &str| {
        let word = word.as_ref()?;
        let joined = path::join_path(&job.command.directory, &word.text);
        let output = check_path(joined, word, key, diagnostics)?;
        check_output(job, &output, word, key, volumes, complete, diagnostics);
        Some(output)
    };
    let (stdout, stderr) = (
        output(&paths.stdout, "output"),
        output(&paths.stderr, "error"),
    );
    (job.command.stdout, job.command.stderr) = (stdout, stderr);
    job.command.required_files = paths
        .required
        .iter()
        .filter_map(|word| {
            let joined = path::join_path(&job.command.directory, &word.text);
            check_path(joined, word, "requires", diagnostics)
        })
        .collect();
    job.command.produced_files = paths
        .produced
        .iter()
        .filter_map(|word| {
            let joined = path::join_path(&job.command.directory, &word.text);
            let file = check_path(joined, word, "produces", diagnostics)?;
            check_produced(job, &file, word, complete, diagnostics);
            Some(file)
        })
        .collect();
}

/// Refuses a result that no volume keeps.
fn check_produced(
    job: &Job,
    file: &str,
    word: &Word,
    complete: bool,
    diagnostics: &mut Diagnostics,
) {
    let why = match job.mount_at(file) {
        Some(mount) if !mount.writable => "which is mounted read-only",
        Some(mount) if mount.path == file => "which is the top of a volume",
        None if complete => "which is in no volume",
        _ => return,
    };
    let message = format!("job '{}' produces '{file}', {why}", job.name);
    let hint = "name a file below a path where a scratch volume is mounted 'rw'";
    diagnostics.error_hint(word.location, message, hint);
}

/// Refuses arguments and an environment that no node can give to a program, and warns of those that
/// only nodes with a large stack can.
pub(super) fn check_command_words(
    job: &str,
    command: &ProgramSpec,
    at: SourceLocation,
    diagnostics: &mut Diagnostics,
) {
    let arguments = command.arguments.iter().map(String::len);
    let variable = |(name, value): &(String, String)| name.len() + 1 + value.len();
    let environment = command.environment.iter().map(variable);
    let (mut longest, mut all) = (0, 0);
    for bytes in arguments.chain(environment) {
        longest = longest.max(bytes);
        // The kernel counts a final zero and a pointer for each.
        all += bytes + 1 + size_of::<usize>();
    }
    let hint = "put them into a file of a volume, and let the program read that";
    let words = || format!("the arguments and the environment of job '{job}' take {all} bytes");
    if longest > WORD_BYTES_MAX {
        let message = format!(
            "an argument or variable of job '{job}' has {longest} bytes; Linux takes at most \
             {WORD_BYTES_MAX}"
        );
        diagnostics.error_hint(at, message, hint);
    } else if all > WORDS_BYTES_MAX {
        let message = format!("{}; a job may have {WORDS_BYTES_MAX}", words());
        diagnostics.error_hint(at, message, hint);
    } else if all > WORDS_BYTES_COMMON {
        let message = format!(
            "{}; Linux commonly takes {WORDS_BYTES_COMMON} (a quarter of the node's `ulimit -s`)",
            words()
        );
        diagnostics.warn(at, message, hint);
    }
}

fn check_path(
    path: Result<String, PathError>,
    word: &Word,
    key: &str,
    diagnostics: &mut Diagnostics,
) -> Option<String> {
    path.map_err(|error| {
        let message = format!(
            "the path '{}' of '{key}' {}",
            word.text,
            error.description()
        );
        diagnostics.error(word.location, message);
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
    let whose = format!("'{key}' of job '{}'", job.name);
    match job.mount_at(output) {
        Some(mount) if !mount.writable => {
            let volume = &volumes[mount.volume.as_usize()].name;
            let message = format!("{whose} is '{output}', but '{volume}' is read-only there");
            let hint = "name a file below a path where a scratch volume is mounted 'rw'";
            diagnostics.error_hint(word.location, message, hint);
        }
        Some(mount) if mount.path == output => {
            let message = format!("{whose} is the mount path '{output}'");
            diagnostics.error_hint(word.location, message, "name a file below it");
        }
        None if complete => {
            let message = format!("{whose} is '{output}', which is in no volume");
            let hint = "the file is lost when the job ends; name a file in a mounted volume";
            diagnostics.warn(word.location, message, hint);
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
