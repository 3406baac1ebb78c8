//! The forms between text and workflow: nodes as they are written, declarations as they are meant.
//! Data only; nothing in it is checked against anything else.

use std::rc::Rc;

use bafs_proto::volume::LimitKind;

use super::diagnostic::SourceLocation;
use super::model::VolumeKind;
use super::url::Url;

/// A word of the text, without its quotes.
#[derive(Debug, Clone)]
pub(super) struct Word {
    pub(super) text: String,
    pub(super) location: SourceLocation,
    /// The quote that the word begins with.
    pub(super) quote: Option<char>,
}

/// What a statement begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Keyword {
    Job,
    Parent,
    Volume,
    Mount,
    Extract,
    Retry,
    Share,
    Root,
    Program,
    Template,
    Include,
    For,
    End,
}

/// One statement, or a loop around some.
#[derive(Debug)]
pub(super) enum SyntaxNode {
    Statement(Statement),
    Loop(Loop),
}

/// A statement as it is written.
#[derive(Debug)]
pub(super) struct Statement {
    pub(super) keyword: Keyword,
    /// All words with the keyword; never empty.
    pub(super) words: Vec<Word>,
    /// What stands between the braces of an inline job or a template.
    pub(super) inline: Option<Rc<Description>>,
}

/// A loop as it is written.
#[derive(Debug)]
pub(super) struct Loop {
    pub(super) location: SourceLocation,
    pub(super) variable: Word,
    /// Words and ranges that the variable goes through.
    pub(super) items: Vec<Word>,
    pub(super) body: Vec<SyntaxNode>,
}

/// A key of a job description.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DescriptionKey {
    Executable,
    Arguments,
    Environment,
    RequestCpus,
    RequestMemory,
    RequestDisk,
    Runtime,
    MaxRuntime,
    Output,
    Error,
    Directory,
    Retry,
    Priority,
    Share,
    Script,
    Interpreter,
    Requires,
    Produces,
}

/// A job description before loop variables are substituted: each key at most once.
#[derive(Debug, Default, Clone)]
pub(super) struct Description {
    pub(super) entries: Vec<DescriptionEntry>,
    /// Whether a line was refused, so that a key that is missing may have been meant by it.
    pub(super) has_rejected_lines: bool,
}

/// What words take in memory, about.
pub(super) fn bytes_of(words: &[Word]) -> u64 {
    let one = |word: &Word| word.text.len() + size_of::<Word>();
    words.iter().map(one).sum::<usize>() as u64
}

/// A line `key = words` of a job description.
#[derive(Debug, Clone)]
pub(super) struct DescriptionEntry {
    pub(super) key: DescriptionKey,
    pub(super) location: SourceLocation,
    pub(super) values: Vec<Word>,
}

/// Everything that a workflow file declares, by kind, each in the order of the text.
#[derive(Debug, Default)]
pub(super) struct Declarations {
    pub(super) jobs: Vec<JobDeclaration>,
    pub(super) volumes: Vec<VolumeDeclaration>,
    pub(super) parents: Vec<ParentDeclaration>,
    pub(super) mounts: Vec<MountDeclaration>,
    pub(super) extracts: Vec<ExtractDeclaration>,
    pub(super) retries: Vec<RetryDeclaration>,
    pub(super) shares: Vec<SharedDirectoryDeclaration>,
    pub(super) roots: Vec<RootDeclaration>,
    pub(super) programs: Vec<ProgramDeclaration>,
    /// Whether an error kept some declarations out, so that a name may be missing for that reason.
    pub(super) is_partial: bool,
}

#[derive(Debug)]
pub(super) struct JobDeclaration {
    pub(super) name: Word,
    pub(super) settings: JobSettings,
    /// Whether a description was read and mentions neither an executable nor a script.
    pub(super) is_missing_executable: bool,
}

/// What a job description says, once loop variables are substituted.
#[derive(Debug, Default)]
pub(super) struct JobSettings {
    pub(super) executable: Option<Word>,
    pub(super) arguments: Vec<String>,
    pub(super) environment: Vec<(String, String)>,
    pub(super) directory: Option<Word>,
    pub(super) stdout: Option<Word>,
    pub(super) stderr: Option<Word>,
    pub(super) cpus: Option<u32>,
    /// Ascending; each but the first is for another try.
    pub(super) memory_bytes: Vec<u64>,
    pub(super) temporary_bytes: Option<u64>,
    pub(super) runtime_s: Option<u64>,
    pub(super) runtime_s_max: Option<u64>,
    pub(super) retries: Option<(u32, SourceLocation)>,
    pub(super) priority: Option<i32>,
    pub(super) script: Option<Word>,
    pub(super) interpreter: Option<Vec<Word>>,
    /// Files that are there when the job starts.
    pub(super) required_files: Vec<Word>,
    /// Files that are there when the job has succeeded.
    pub(super) produced_files: Vec<Word>,
    /// Directories of the host, ascending, each once.
    pub(super) shared_directories: Vec<String>,
}

#[derive(Debug)]
pub(super) struct VolumeDeclaration {
    pub(super) name: Word,
    pub(super) kind: VolumeKind,
    /// Nothing when it is to be measured.
    pub(super) size_bytes: Option<u64>,
    pub(super) size_location: SourceLocation,
    pub(super) size_files: Option<u64>,
    /// As the workflow says; nothing where its size decides.
    pub(super) limit: Option<LimitKind>,
}

#[derive(Debug)]
pub(super) struct ParentDeclaration {
    pub(super) parents: Vec<Word>,
    pub(super) children: Vec<Word>,
}

#[derive(Debug)]
pub(super) struct MountDeclaration {
    pub(super) volume: Word,
    pub(super) job: Word,
    pub(super) path: Word,
    /// Whether `ro`, `rw` or `write-back` is written, and where.
    pub(super) access: Option<(Access, SourceLocation)>,
}

/// How a volume is mounted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Access {
    ReadOnly,
    ReadWrite,
    /// To write to, and the kernel may collect the writes.
    WriteBack,
}

#[derive(Debug)]
pub(super) struct ExtractDeclaration {
    pub(super) volume: Word,
    /// At least one.
    pub(super) paths: Vec<Word>,
    pub(super) target: Url,
    /// Whether the target was written as a directory, with a `/` at its end.
    pub(super) is_directory: bool,
    pub(super) target_location: SourceLocation,
}

#[derive(Debug)]
pub(super) struct RetryDeclaration {
    pub(super) job: Word,
    pub(super) retries: u32,
}

/// Jobs whose whole root directory is a volume.
#[derive(Debug)]
pub(super) struct RootDeclaration {
    pub(super) volume: Word,
    /// At least one.
    pub(super) jobs: Vec<Word>,
}

/// A program that a cache volume brings to the jobs that run it.
#[derive(Debug)]
pub(super) struct ProgramDeclaration {
    /// What jobs call it.
    pub(super) name: Word,
    pub(super) source: Url,
    pub(super) size_bytes: u64,
    /// The absolute path where jobs have it.
    pub(super) path: String,
}

/// Jobs that see the host's directory of this name.
#[derive(Debug)]
pub(super) struct SharedDirectoryDeclaration {
    pub(super) path: String,
    pub(super) jobs: Vec<Word>,
}
