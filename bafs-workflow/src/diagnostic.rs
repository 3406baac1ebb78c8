//! What the reader of a workflow file is told: errors and warnings with their place, and the
//! bounded list that collects them. It does not decide what is wrong.

use std::collections::BTreeMap;
use std::fmt;

use bafs_proto::path::is_control_or_bidirectional;
use serde::{Deserialize, Serialize};

use super::limits::DIAGNOSTICS_MAX;

/// Columns of a source line that are shown around the caret.
const EXCERPT_COLUMNS_MAX: usize = 100;

/// Characters of a message; words of the text are quoted in it, and they may be of any length.
const MESSAGE_CHARS_MAX: usize = 500;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Severity {
    /// The workflow is refused.
    Error,
    /// The workflow runs; the user probably meant something else.
    Warning,
}

/// One thing to tell, with its place.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Diagnostic {
    /// The workflow file or job description file, as the caller and the workflow name it.
    pub file: String,
    /// The line, from 1.
    pub line: u32,
    /// The column in characters, from 1.
    pub column: u32,
    /// Whether the workflow is refused for it.
    pub severity: Severity,
    /// What is wrong, in one line.
    pub message: String,
    /// What to do about it.
    pub hint: Option<String>,
}

/// Why a workflow was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkflowRejected {
    /// Errors and warnings ordered by file (the workflow first), line and column; at least one is
    /// an error.
    pub diagnostics: Vec<Diagnostic>,
    /// Errors found beyond the ones listed.
    pub errors_omitted: u64,
}

impl fmt::Display for Severity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Error => "error",
            Self::Warning => "warning",
        })
    }
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write_head(f)?;
        self.write_hint(f)
    }
}

impl Diagnostic {
    /// The same as `Display`, with the line of `text` that it is about and a caret below; `text`
    /// is the content of [`Diagnostic::file`].
    pub fn with_source(&self, text: &str) -> String {
        DiagnosticWithSource {
            diagnostic: self,
            text,
        }
        .to_string()
    }

    fn write_head(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            file,
            line,
            column,
            severity,
            message,
            ..
        } = self;
        write!(f, "{file}:{line}:{column}: {severity}: {message}")
    }

    fn write_hint(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.hint {
            Some(hint) => write!(f, "\n  hint: {hint}"),
            None => Ok(()),
        }
    }
}

struct DiagnosticWithSource<'a> {
    diagnostic: &'a Diagnostic,
    text: &'a str,
}

impl fmt::Display for DiagnosticWithSource<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Diagnostic { line, column, .. } = *self.diagnostic;
        self.diagnostic.write_head(f)?;
        if let Some(source) = self.text.lines().nth(line.saturating_sub(1) as usize) {
            let before = (column as usize).saturating_sub(1);
            let skipped = before.saturating_sub(EXCERPT_COLUMNS_MAX / 2);
            let shown = source.trim_start_matches('\u{feff}').chars().skip(skipped);
            let shown: String = shown
                .take(EXCERPT_COLUMNS_MAX)
                .map(escape_control)
                .collect();
            // Tabs stay tabs, so that the caret stands below its character in any terminal.
            let blank = |c| if c == '\t' { '\t' } else { ' ' };
            let margin: String = shown.chars().take(before - skipped).map(blank).collect();
            let number = line.to_string();
            let gutter = " ".repeat(number.len());
            write!(
                f,
                "\n {number} | {}\n {gutter} | {margin}^",
                shown.trim_end()
            )?;
        }
        self.diagnostic.write_hint(f)
    }
}

impl fmt::Display for WorkflowRejected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, diagnostic) in self.diagnostics.iter().enumerate() {
            let gap = if number == 0 { "" } else { "\n" };
            write!(f, "{gap}{diagnostic}")?;
        }
        match self.describe_omitted() {
            Some(text) => write!(f, "\n{text}"),
            None => Ok(()),
        }
    }
}

impl WorkflowRejected {
    /// How many errors are not listed, in words, if there are any.
    pub fn describe_omitted(&self) -> Option<String> {
        match self.errors_omitted {
            0 => None,
            1 => Some("and 1 more error".to_owned()),
            more => Some(format!("and {more} more errors")),
        }
    }
}

impl std::error::Error for WorkflowRejected {}

/// Where a word stands. The order is the order in which diagnostics are listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct SourceLocation {
    /// Index of the file in [`Diagnostics`]; 0 is the workflow file.
    pub(super) file: u32,
    pub(super) line: u32,
    pub(super) column: u32,
    /// Whether a loop repeats this word, so that one error there stands for all turns.
    pub(super) is_in_loop: bool,
}

impl SourceLocation {
    /// The beginning of the workflow file, for what is about the whole of it.
    pub(super) const START: Self = Self {
        file: 0,
        line: 1,
        column: 1,
        is_in_loop: false,
    };
}

/// Collects diagnostics and keeps the first ones by place, however many arrive.
pub(super) struct Diagnostics {
    files: Vec<String>,
    errors: DiagnosticList,
    warnings: DiagnosticList,
}

#[derive(Default)]
struct DiagnosticList {
    /// The second part of the key tells apart two messages at one place; it is empty in a loop.
    entries: BTreeMap<(SourceLocation, String), (String, Option<String>)>,
    omitted: u64,
}

impl Diagnostics {
    pub(super) fn new(file: &str) -> Self {
        Self {
            files: vec![escape_controls(file)],
            errors: DiagnosticList::default(),
            warnings: DiagnosticList::default(),
        }
    }

    /// Adds a file that places can be in.
    pub(super) fn add_file(&mut self, file: &str) -> u32 {
        self.files.push(escape_controls(file));
        (self.files.len() - 1) as u32
    }

    pub(super) fn error(&mut self, at: SourceLocation, message: impl Into<String>) {
        self.errors.insert(at, message.into(), None);
    }

    pub(super) fn error_hint(
        &mut self,
        at: SourceLocation,
        message: impl Into<String>,
        hint: impl Into<String>,
    ) {
        self.errors.insert(at, message.into(), Some(hint.into()));
    }

    pub(super) fn warn(
        &mut self,
        at: SourceLocation,
        message: impl Into<String>,
        hint: impl Into<String>,
    ) {
        self.warnings.insert(at, message.into(), Some(hint.into()));
    }

    /// Whether an error at this place would be listed, asked before a costly hint is made.
    pub(super) fn has_room_for_error(&self, at: SourceLocation) -> bool {
        let repeated = at.is_in_loop && self.errors.entries.contains_key(&(at, String::new()));
        let last = self
            .errors
            .entries
            .last_key_value()
            .map(|((place, _), _)| *place);
        !repeated && (self.errors.entries.len() < DIAGNOSTICS_MAX || last.is_none_or(|l| at < l))
    }

    pub(super) fn has_errors(&self) -> bool {
        !self.errors.entries.is_empty()
    }

    /// How a message names a place that it does not stand at.
    pub(super) fn describe_location(&self, at: SourceLocation) -> String {
        match at.file {
            0 => format!("line {}", at.line),
            file => format!("{}:{}", self.files[file as usize], at.line),
        }
    }

    /// The warnings when there is no error, else everything.
    pub(super) fn finish(self) -> Result<Vec<Diagnostic>, WorkflowRejected> {
        let Self {
            files,
            errors,
            warnings,
        } = self;
        let refused = !errors.entries.is_empty();
        let errors_omitted = errors.omitted;
        let all = [(Severity::Error, errors), (Severity::Warning, warnings)];
        let mut placed: Vec<(SourceLocation, Diagnostic)> = Vec::new();
        for (severity, shelf) in all {
            placed.extend(shelf.entries.into_iter().map(|((at, _), (message, hint))| {
                let file = files[at.file as usize].clone();
                let SourceLocation { line, column, .. } = at;
                (
                    at,
                    Diagnostic {
                        file,
                        line,
                        column,
                        severity,
                        message,
                        hint,
                    },
                )
            }));
        }
        placed.sort_by_key(|(at, diagnostic)| (*at, diagnostic.severity));
        let diagnostics = placed
            .into_iter()
            .map(|(_, diagnostic)| diagnostic)
            .collect();
        if refused {
            Err(WorkflowRejected {
                diagnostics,
                errors_omitted,
            })
        } else {
            Ok(diagnostics)
        }
    }
}

impl DiagnosticList {
    fn insert(&mut self, at: SourceLocation, message: String, hint: Option<String>) {
        let (message, hint) = (
            escape_controls(&message),
            hint.as_deref().map(escape_controls),
        );
        let apart = if at.is_in_loop {
            String::new()
        } else {
            message.clone()
        };
        self.entries.entry((at, apart)).or_insert((message, hint));
        if self.entries.len() > DIAGNOSTICS_MAX {
            self.entries.pop_last();
            self.omitted += 1;
        }
    }
}

/// Text that a terminal shows and does not obey: a workflow may come from a stranger.
fn escape_controls(text: &str) -> String {
    let mut shown: String = text
        .chars()
        .take(MESSAGE_CHARS_MAX)
        .map(escape_control)
        .collect();
    if text.chars().nth(MESSAGE_CHARS_MAX).is_some() {
        shown.push_str("...");
    }
    shown
}

fn escape_control(c: char) -> char {
    if is_control_or_bidirectional(c) && c != '\t' {
        char::REPLACEMENT_CHARACTER
    } else {
        c
    }
}
