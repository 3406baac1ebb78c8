//! Scripts as commands: which interpreter runs the text, and how the text reaches it. It runs
//! nothing.

use super::ast::{JobDeclaration, Word};
use super::diagnostic::{Diagnostics, SourceLocation};
use super::limits::SCRIPT_BYTES_MAX;
use super::model::{Job, JobIndex, Mount};
use super::name_functions::quote_for_shell;
use super::path;

/// What runs a script that names no interpreter: it ends at the first error or unset variable.
const DEFAULT_INTERPRETER: [&str; 2] = ["sh", "-eu"];

/// Interpreters that take the text itself after `-c`, and then the script's name.
const SHELLS: [&str; 6] = ["sh", "bash", "dash", "ash", "ksh", "zsh"];

/// Directories that each job has for itself, in the order in which a script is put there.
const SCRIPT_DIRECTORIES: [&str; 3] = ["/tmp", "/var/tmp", "/dev/shm"];

/// The file of a script for interpreters that read one.
const SCRIPT_FILE: &str = "bafs-script";

/// A script of a job as its description has it.
pub(super) struct JobScript {
    pub(super) text: Word,
    /// Its words; empty when none is given.
    pub(super) interpreter: Vec<Word>,
}

/// Rejects a job without a program, and one with two.
pub(super) fn check_program(declaration: &JobDeclaration, diagnostics: &mut Diagnostics) {
    let JobDeclaration { name, settings, .. } = declaration;
    if declaration.is_missing_executable {
        let message = format!("job '{}' has no executable", name.text);
        let hint = "add a line 'executable = PROGRAM' to its description, or a 'script'";
        diagnostics.error_hint(name.location, message, hint);
    }
    if let (Some(script), Some(_)) = (&settings.script, &settings.executable) {
        let message = format!("job '{}' has both an executable and a script", name.text);
        let hint = "remove one; 'interpreter' names the program that runs a script";
        diagnostics.error_hint(script.location, message, hint);
    }
    let interpreter = settings
        .interpreter
        .as_ref()
        .and_then(|words| words.first());
    if let (Some(interpreter), None) = (interpreter, &settings.script) {
        let message = format!("job '{}' has an interpreter and no script", name.text);
        let hint = "write 'script = <<END', the lines of the script, and a line 'END'";
        diagnostics.error_hint(interpreter.location, message, hint);
    }
}

/// Makes the command of a job that has a script, its mounts known. False after an error.
pub(super) fn complete_script(
    job: &mut Job,
    script: &JobScript,
    diagnostics: &mut Diagnostics,
) -> bool {
    let text = &script.text.text;
    if text.len() > SCRIPT_BYTES_MAX {
        let message = format!(
            "the script of job '{}' has {} bytes; Linux takes at most {SCRIPT_BYTES_MAX}",
            job.name,
            text.len()
        );
        let hint = "put it into a file of a volume, and name that as the executable";
        diagnostics.error_hint(script.text.location, message, hint);
        return false;
    }
    if text.trim().is_empty() {
        let message = format!("the script of job '{}' is empty", job.name);
        diagnostics.error(script.text.location, message);
        return false;
    }
    let mut words = interpreter_words(script);
    let own = std::mem::take(&mut job.command.arguments);
    if is_shell(&words) {
        job.command.executable = words.remove(0);
        words.extend(["-c".to_owned(), text.clone(), job.name.clone()]);
    } else {
        let Some(directory) = private_directory(job) else {
            report_no_private_directory(job, &words[0], script.text.location, diagnostics);
            return false;
        };
        let file = format!("{directory}/{SCRIPT_FILE}");
        let words_quoted: Vec<String> = words.iter().map(|word| quote_for_shell(word)).collect();
        let launcher = format!(
            "printf %s \"$1\" >{file} || exit; shift; exec {} {file} \"$@\"",
            words_quoted.join(" ")
        );
        job.command.executable = "/bin/sh".to_owned();
        words = vec!["-c".to_owned(), launcher, job.name.clone(), text.clone()];
    }
    words.extend(own);
    job.command.arguments = words;
    true
}

/// Interpreters of scripts that a shell starts for them, of the scripts of all jobs in order.
pub(super) fn hidden_interpreters<'s>(
    scripts: impl Iterator<Item = Option<&'s JobScript>>,
) -> Vec<(JobIndex, String)> {
    let named = scripts.zip(0u32..).filter_map(|(script, index)| {
        let words = interpreter_words(script?);
        let is_env = |word: &&String| word.rsplit('/').next() == Some("env");
        let mut named = words.iter().skip_while(is_env);
        let interpreter = named.next().filter(|_| !is_shell(&words))?;
        Some((JobIndex(index), interpreter.clone()))
    });
    named.collect()
}

/// The interpreter's words: those of its key, else of a `#!` line, else of the default.
fn interpreter_words(script: &JobScript) -> Vec<String> {
    if !script.interpreter.is_empty() {
        let words = script.interpreter.iter();
        return words.map(|word| word.text.clone()).collect();
    }
    let first = script.text.text.lines().next().unwrap_or("");
    let named = first.strip_prefix("#!").map(str::split_whitespace);
    let words: Vec<String> = named.into_iter().flatten().map(str::to_owned).collect();
    match words.is_empty() {
        true => DEFAULT_INTERPRETER.map(str::to_owned).to_vec(),
        false => words,
    }
}

/// Whether the interpreter is a shell, perhaps found by `env`.
fn is_shell(words: &[String]) -> bool {
    let name = |word: &String| word.rsplit('/').next().unwrap_or("").to_owned();
    let mut names = words.iter().map(name);
    let first = names.next().unwrap_or_default();
    let chosen = match first == "env" {
        true => names.next().unwrap_or_default(),
        false => first,
    };
    SHELLS.contains(&chosen.as_str())
}

/// A directory that no other job sees, and no volume covers.
fn private_directory(job: &Job) -> Option<&'static str> {
    let is_free = |directory: &&str| {
        let is_covered =
            |mount: &Mount| !mount.is_root() && path::is_inside(directory, &mount.path);
        let shared = &job.command.shared_directories;
        !shared.iter().any(|path| path == directory) && !job.mounts.iter().any(is_covered)
    };
    SCRIPT_DIRECTORIES.into_iter().find(is_free)
}

fn report_no_private_directory(
    job: &Job,
    interpreter: &str,
    at: SourceLocation,
    diagnostics: &mut Diagnostics,
) {
    let message = format!(
        "no private directory is left for the script of job '{}', which '{interpreter}' reads \
         from a file",
        job.name
    );
    let hint = "leave one of /tmp, /var/tmp and /dev/shm neither shared nor mounted";
    diagnostics.error_hint(at, message, hint);
}
