//! Programs that a workflow brings to its jobs: each becomes a cache volume of one file, mounted in
//! the jobs that run it. Reads no file.

use bafs_proto::volume::LimitKind;

use super::ast::{ProgramDeclaration, Word};
use super::model::{CachePolicy, Mount, ProgramSpec, Volume, VolumeIndex, VolumeKind};
use super::script::JobScript;

/// What a program of a URL may take of a node when the workflow does not say: more than most
/// programs that are one file. A larger one works, but does not stay whole.
pub(super) const PROGRAM_BYTES_DEFAULT: u64 = 100_000_000;

/// What a cache of one file needs beside its blocks: a whole block at its end.
const BLOCK_BYTES: u64 = 64 << 10;

/// Programs whose first argument that is no option is the file of a program, which they only read.
/// Digits of a version may follow.
const INTERPRETERS: [&str; 14] = [
    "ash", "bash", "dash", "julia", "ksh", "lua", "node", "perl", "pypy", "python", "Rscript",
    "ruby", "sh", "zsh",
];

/// Options after which an interpreter runs a text, or a module, in place of a file.
const TEXT_OPTIONS: [&str; 3] = ["-c", "-e", "-m"];

/// Which of its arguments an interpreter takes for the file of a program.
pub(super) fn find_script_argument(executable: &str, arguments: &[String]) -> Option<usize> {
    let name = executable.rsplit('/').next().unwrap_or_default();
    let name = name.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.');
    if !INTERPRETERS.contains(&name) {
        return None;
    }
    let at = arguments.iter().position(|word| !word.starts_with('-'))?;
    let mut options = arguments[..at].iter();
    let has_text = options.any(|word| TEXT_OPTIONS.contains(&word.as_str()));
    (!has_text).then_some(at)
}

/// What a cache of a file of this size takes.
pub(super) fn cache_bytes_of(file_bytes: u64) -> u64 {
    (file_bytes / BLOCK_BYTES + 1).saturating_mul(BLOCK_BYTES)
}

/// The volume of a program, its name as a word, and where jobs see it.
pub(super) struct ProgramVolume {
    pub(super) name: Word,
    pub(super) volume: Volume,
    pub(super) path: String,
}

/// The volume that brings a program.
pub(super) fn cache_of_program(program: ProgramDeclaration) -> ProgramVolume {
    let ProgramDeclaration {
        name,
        source,
        size_bytes,
        path,
    } = program;
    let plain = |c: char| match c.is_ascii_alphanumeric() || "_.".contains(c) {
        true => c,
        false => '-',
    };
    let below: String = path.trim_start_matches('/').chars().map(plain).collect();
    let name = Word {
        text: below,
        ..name
    };
    let volume = Volume {
        name: name.text.clone(),
        kind: VolumeKind::Cache {
            source,
            policy: CachePolicy::Lru,
            is_warmed: false,
        },
        size_bytes,
        size_files: 1,
        limit: LimitKind::Exact,
        users: Vec::new(),
    };
    ProgramVolume { name, volume, path }
}

/// A mount that shows a volume as it is.
pub(super) fn read_only_mount(volume: VolumeIndex, path: String) -> Mount {
    Mount {
        volume,
        path,
        writable: false,
        write_back: false,
    }
}

/// Whether a job runs a program of this name: as its executable or interpreter, or as a word of its
/// script or arguments.
pub(super) fn is_run_by(name: &str, command: &ProgramSpec, script: Option<&JobScript>) -> bool {
    let is_word = |text: &str| text.split(|c| !is_name_letter(c)).any(|word| word == name);
    let in_script = |script: &JobScript| {
        let interpreter = script.interpreter.iter().map(|word| word.text.as_str());
        is_word(&script.text.text) || interpreter.into_iter().any(is_word)
    };
    command.executable == name
        || command.arguments.iter().any(|argument| is_word(argument))
        || script.is_some_and(in_script)
}

/// Letters of names and paths: what is beside them ends a word of a shell.
fn is_name_letter(c: char) -> bool {
    c.is_ascii_alphanumeric() || "_-./+@%~".contains(c) || !c.is_ascii()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnostic::SourceLocation;

    fn command(executable: &str, argument: &str) -> ProgramSpec {
        ProgramSpec {
            executable: executable.to_owned(),
            arguments: vec![argument.to_owned()],
            environment: Vec::new(),
            directory: "/".to_owned(),
            stdout: None,
            stderr: None,
            required_files: Vec::new(),
            produced_files: Vec::new(),
            shared_directories: Vec::new(),
        }
    }

    #[test]
    fn programs_are_found_as_words() {
        let is_run = |executable, argument| is_run_by("tool", &command(executable, argument), None);
        assert!(is_run("tool", ""));
        assert!(is_run("sh", "set -e; tool -x"));
        assert!(is_run("sh", "x=$(tool)"));
        for other in ["tools", "/usr/bin/tool", "my-tool", "tool.py", ""] {
            assert!(!is_run("sh", other), "{other}");
        }
        let script = JobScript {
            text: Word {
                text: "cat x | tool > y\n".to_owned(),
                location: SourceLocation::START,
                quote: None,
            },
            interpreter: Vec::new(),
        };
        assert!(is_run_by("tool", &command("", ""), Some(&script)));
    }

    #[test]
    fn script_of_an_interpreter_is_its_first_word() {
        let find = |executable: &str, arguments: &str| {
            let words: Vec<String> = arguments.split(' ').map(str::to_owned).collect();
            find_script_argument(executable, &words)
        };
        assert_eq!(find("python3", "count.py in out"), Some(0));
        assert_eq!(find("/usr/bin/python3.11", "-u ./count.py"), Some(1));
        assert_eq!(find("Rscript", "--vanilla x.R"), Some(1));
        assert_eq!(find("sort", "count.py"), None);
        assert_eq!(find("sh", "-c run.sh"), None);
        assert_eq!(find("python3", "-m json.tool"), None);
        assert_eq!(find("sh", "-x"), None);
    }

    #[test]
    fn caches_of_programs_hold_whole_blocks() {
        assert_eq!(cache_bytes_of(0), 65_536);
        assert_eq!(cache_bytes_of(65_536), 131_072);
        assert_eq!(cache_bytes_of(100_000), 131_072);
    }
}
