//! Job descriptions in the style of an HTCondor submit file: which keys there are and what their
//! values mean. Where the text comes from, and in which job it ends up, is `declarations.rs`.

use super::ast::{Description, DescriptionEntry, DescriptionKey, JobSettings, Word};
use super::diagnostic::{Diagnostics, SourceLocation};
use super::lex::Lexer;
use super::limits::{CPUS_MAX, PRIORITY_MAX, RETRIES_MAX};
use super::model::SHARED_DIRECTORIES;
use super::quantities::{QuantityError, parse_duration, parse_size};
use super::scope::VariableScope;
use super::spelling::find_nearest;

const KEYS: [(&str, DescriptionKey); 18] = [
    ("executable", DescriptionKey::Executable),
    ("arguments", DescriptionKey::Arguments),
    ("environment", DescriptionKey::Environment),
    ("request_cpus", DescriptionKey::RequestCpus),
    ("request_memory", DescriptionKey::RequestMemory),
    ("request_disk", DescriptionKey::RequestDisk),
    ("runtime", DescriptionKey::Runtime),
    ("max_runtime", DescriptionKey::MaxRuntime),
    ("output", DescriptionKey::Output),
    ("error", DescriptionKey::Error),
    ("directory", DescriptionKey::Directory),
    ("retry", DescriptionKey::Retry),
    ("priority", DescriptionKey::Priority),
    ("share", DescriptionKey::Share),
    ("script", DescriptionKey::Script),
    ("interpreter", DescriptionKey::Interpreter),
    ("requires", DescriptionKey::Requires),
    ("produces", DescriptionKey::Produces),
];

/// Keys of HTCondor that mean nothing here, and what takes their place.
const IGNORED_KEYS: [(&str, &str); 6] = [
    ("universe", "every job runs as an ordinary program"),
    ("log", "the scheduler's journal records what happens"),
    (
        "queue",
        "one 'job' statement is one job; use 'for' to make many",
    ),
    (
        "should_transfer_files",
        "files reach a job through 'volume' and 'mount'",
    ),
    (
        "when_to_transfer_output",
        "files leave a job through 'extract'",
    ),
    (
        "notification",
        "use 'bafs status' to see the progress of a workflow",
    ),
];

/// Keys of HTCondor that a user would miss silently, so they are errors with advice.
const FOREIGN_KEYS: [(&str, &str); 6] = [
    ("initialdir", "use 'directory'"),
    ("max_retries", "use 'retry'"),
    (
        "input",
        "standard input is empty; name the file in 'arguments'",
    ),
    ("transfer_input_files", "declare a 'volume' and 'mount' it"),
    (
        "transfer_output_files",
        "write into a scratch volume and 'extract' the file",
    ),
    ("requirements", "use 'request_cpus'"),
];

/// Most values of `request_memory`.
const MEMORY_VALUES_MAX: usize = 8;

/// What one line of a description was.
pub(super) enum DescriptionLine {
    /// A `key = value` line, or one that is ignored; the reader dealt with it.
    Handled,
    /// Something else, for the caller to judge.
    Other(Vec<Word>),
}

/// Collects the lines of one description.
#[derive(Default)]
pub(super) struct DescriptionReader {
    description: Description,
}

impl DescriptionReader {
    /// Reads one line that has content.
    pub(super) fn read_line(
        &mut self,
        lexer: &mut Lexer<'_>,
        diagnostics: &mut Diagnostics,
    ) -> DescriptionLine {
        let key = lexer.key();
        let takes_script = key.as_ref().is_some_and(is_script_key);
        let words = match takes_script.then(|| lexer.script(diagnostics)).flatten() {
            Some(script) => vec![script],
            None if takes_script => {
                let rest = lexer.words(diagnostics);
                self.reject_script(key.as_ref(), rest.first(), diagnostics);
                return DescriptionLine::Handled;
            }
            None => lexer.words(diagnostics),
        };
        match (key, words.first()) {
            (Some(key), _) => self.add_entry(&key, words, diagnostics),
            // The only line of a submit file that has no `=`.
            (None, Some(first)) if first.text.eq_ignore_ascii_case("queue") => {
                self.add_entry(&first.clone(), words, diagnostics);
            }
            (None, _) => return DescriptionLine::Other(words),
        }
        DescriptionLine::Handled
    }

    fn reject_script(
        &mut self,
        key: Option<&Word>,
        first: Option<&Word>,
        diagnostics: &mut Diagnostics,
    ) {
        self.description.has_rejected_lines = true;
        let Some(at) = first.or(key) else { return };
        let hint = "write 'script = <<END', the lines of the script, and a line 'END'; a program \
                    is an 'executable'";
        diagnostics.error_hint(at.location, "a script begins with '<<' and a name", hint);
    }

    /// Reports a line that has no place in a description.
    pub(super) fn reject_line(&mut self, first: &Word, diagnostics: &mut Diagnostics) {
        self.description.has_rejected_lines = true;
        let message = format!("expected 'key = value', not '{}'", first.text);
        let hint = match find_nearest(&first.text, KEYS.iter().map(|(name, _)| *name)) {
            Some(name) => format!("write '{name} = ...'"),
            None => format!("the keys are {}", list_keys()),
        };
        diagnostics.error_hint(first.location, message, hint);
    }

    /// The description, complete.
    pub(super) fn finish(self) -> Description {
        self.description
    }

    fn add_entry(&mut self, word: &Word, values: Vec<Word>, diagnostics: &mut Diagnostics) {
        let name = word.text.to_ascii_lowercase();
        if let Some((_, why)) = IGNORED_KEYS.iter().find(|(ignored, _)| *ignored == name) {
            return diagnostics.warn(word.location, format!("'{name}' is ignored"), *why);
        }
        let Some(&(_, key)) = KEYS.iter().find(|(known, _)| *known == name) else {
            self.description.has_rejected_lines = true;
            let foreign = FOREIGN_KEYS.iter().find(|(foreign, _)| *foreign == name);
            let hint = match (
                foreign,
                find_nearest(&name, KEYS.iter().map(|(known, _)| *known)),
            ) {
                (Some((_, advice)), _) => (*advice).to_owned(),
                (None, Some(near)) => format!("did you mean '{near}'?"),
                (None, None) => format!("the keys are {}", list_keys()),
            };
            return diagnostics.error_hint(
                word.location,
                format!("unknown key '{}'", word.text),
                hint,
            );
        };
        if let Some(first) = self
            .description
            .entries
            .iter()
            .find(|entry| entry.key == key)
        {
            let before = diagnostics.describe_location(first.location);
            let message = format!("'{name}' is given twice, first in {before}");
            return diagnostics.error(word.location, message);
        }
        self.description.entries.push(DescriptionEntry {
            key,
            location: word.location,
            values,
        });
    }
}

fn is_script_key(key: &Word) -> bool {
    let name = key.text.to_ascii_lowercase();
    KEYS.contains(&(name.as_str(), DescriptionKey::Script))
}

/// The directory of the host that a word names, if it is one that a job may share.
pub(super) fn parse_shared_directory(word: &Word, diagnostics: &mut Diagnostics) -> Option<String> {
    let path = word.text.trim_end_matches('/');
    if SHARED_DIRECTORIES.contains(&path) {
        return Some(path.to_owned());
    }
    let message = format!("'{}' cannot be shared", word.text);
    let hint = "only /tmp, /var/tmp and /dev/shm are private; a job sees all other directories of \
                the host";
    diagnostics.error_hint(word.location, message, hint);
    None
}

/// Reads a whole description file.
pub(super) fn parse_description(
    file: u32,
    text: &str,
    diagnostics: &mut Diagnostics,
) -> Description {
    let mut lexer = Lexer::new(file, text);
    let mut reader = DescriptionReader::default();
    while lexer.skip_to_content() {
        if let DescriptionLine::Other(words) = reader.read_line(&mut lexer, diagnostics)
            && let Some(first) = words.first()
        {
            reader.reject_line(first, diagnostics);
        }
    }
    reader.finish()
}

/// What a description says for one job, with the variables of that job.
pub(super) fn build_settings(
    entries: &[&DescriptionEntry],
    scope: &VariableScope,
    diagnostics: &mut Diagnostics,
) -> JobSettings {
    let mut settings = JobSettings::default();
    for entry in entries {
        let words = match (entry.key, entry.values.as_slice()) {
            (DescriptionKey::Script, [script]) => {
                let script = scope.substitute_script(script, diagnostics);
                script.map(|script| vec![script])
            }
            (_, values) => scope.substitute_all(values, diagnostics),
        };
        if let Some(words) = words {
            let place = scope.locate(entry.location);
            DescriptionValue {
                key: entry.key,
                location: place,
                words,
            }
            .apply_to(&mut settings, diagnostics);
        }
    }
    settings
}

/// One `key = words` line of one job.
struct DescriptionValue {
    key: DescriptionKey,
    location: SourceLocation,
    words: Vec<Word>,
}

impl DescriptionValue {
    fn apply_to(self, settings: &mut JobSettings, diagnostics: &mut Diagnostics) {
        match self.key {
            DescriptionKey::Executable => settings.executable = self.single_word(diagnostics),
            DescriptionKey::Output => settings.stdout = self.single_word(diagnostics),
            DescriptionKey::Error => settings.stderr = self.single_word(diagnostics),
            DescriptionKey::Directory => settings.directory = self.single_word(diagnostics),
            DescriptionKey::Arguments => settings.arguments = self.arguments(diagnostics),
            DescriptionKey::Environment => settings.environment = self.environment(diagnostics),
            DescriptionKey::RequestCpus => {
                settings.cpus = self.integer(1, CPUS_MAX, diagnostics);
            }
            DescriptionKey::Retry => {
                let retries = self.integer(0, RETRIES_MAX, diagnostics);
                settings.retries = retries.map(|retries| (retries, self.location));
            }
            DescriptionKey::Priority => settings.priority = self.priority(diagnostics),
            DescriptionKey::Share => settings.shared_directories = self.share(diagnostics),
            DescriptionKey::Script => settings.script = self.words.into_iter().next(),
            DescriptionKey::Interpreter => {
                settings.interpreter = Some(self.some_words(diagnostics));
            }
            DescriptionKey::Requires => settings.required_files = self.some_words(diagnostics),
            DescriptionKey::Produces => settings.produced_files = self.some_words(diagnostics),
            DescriptionKey::RequestMemory => settings.memory_bytes = self.memory(diagnostics),
            DescriptionKey::RequestDisk => {
                settings.temporary_bytes = self.quantity(parse_size, "10 MB", diagnostics);
            }
            DescriptionKey::MaxRuntime => {
                settings.runtime_s_max = self.quantity(parse_duration, "5 min", diagnostics);
            }
            DescriptionKey::Runtime => {
                settings.runtime_s = self.quantity(parse_duration, "5 min", diagnostics);
            }
        }
    }

    fn name(&self) -> &'static str {
        KEYS.iter()
            .find(|(_, key)| *key == self.key)
            .map_or("", |(name, _)| name)
    }

    fn single_word(mut self, diagnostics: &mut Diagnostics) -> Option<Word> {
        let name = self.name();
        if let Some(extra) = self.words.get(1) {
            let message = format!("'{name}' takes one word, '{}' is a second one", extra.text);
            let hint = match self.key {
                DescriptionKey::Executable => {
                    "put arguments into 'arguments'; quote a name with blanks"
                }
                _ => "quote a name with blanks",
            };
            diagnostics.error_hint(extra.location, message, hint);
        }
        match self.words.first() {
            Some(word) if !word.text.is_empty() => Some(self.words.swap_remove(0)),
            _ => {
                diagnostics.error(self.location, format!("'{name}' has no value"));
                None
            }
        }
    }

    fn some_words(self, diagnostics: &mut Diagnostics) -> Vec<Word> {
        if self.words.iter().all(|word| word.text.is_empty()) {
            diagnostics.error(self.location, format!("'{}' has no value", self.name()));
        }
        self.words
    }

    fn arguments(self, diagnostics: &mut Diagnostics) -> Vec<String> {
        self.warn_of_whole_quotes("is one argument with blanks", diagnostics);
        self.words.into_iter().map(|word| word.text).collect()
    }

    fn environment(self, diagnostics: &mut Diagnostics) -> Vec<(String, String)> {
        self.warn_of_whole_quotes("sets one variable", diagnostics);
        let mut environment: Vec<(String, String)> = Vec::new();
        for word in &self.words {
            let Some((name, value)) = word.text.split_once('=') else {
                let message = format!("expected NAME=VALUE, not '{}'", word.text);
                let hint = "separate variables by blanks; quote values with blanks: A=1 B=\"x y\"";
                diagnostics.error_hint(word.location, message, hint);
                continue;
            };
            let is_letter = |c: char| c.is_ascii_alphanumeric() || c == '_';
            let begins = !name.is_empty() && !name.starts_with(|c: char| c.is_ascii_digit());
            if !(begins && name.chars().all(is_letter)) {
                let message = format!("'{name}' cannot be the name of an environment variable");
                diagnostics.error(word.location, message);
            } else if environment.iter().any(|(known, _)| known == name) {
                diagnostics.error(word.location, format!("the variable '{name}' is set twice"));
            } else {
                environment.push((name.to_owned(), value.to_owned()));
            }
        }
        environment
    }

    /// HTCondor puts double quotes around the whole list and splits inside them; a shell, and we,
    /// take them as one word. Whoever copied such a line must know.
    fn warn_of_whole_quotes(&self, meaning: &str, diagnostics: &mut Diagnostics) {
        if let [only] = self.words.as_slice()
            && only.quote == Some('"')
            && only.text.contains(char::is_whitespace)
        {
            let message = format!("the quoted text {meaning}");
            diagnostics.warn(
                only.location,
                message,
                "leave out the outer quotes to split it",
            );
        }
    }

    fn integer(&self, min: u64, max: u64, diagnostics: &mut Diagnostics) -> Option<u32> {
        match self.words.as_slice() {
            [word] => {
                parse_integer(word, min, max, self.name(), diagnostics).map(|value| value as u32)
            }
            _ => {
                let message = format!("'{}' takes one number", self.name());
                diagnostics.error(self.location, message);
                None
            }
        }
    }

    fn share(&self, diagnostics: &mut Diagnostics) -> Vec<String> {
        if self.words.is_empty() {
            diagnostics.error(self.location, format!("'{}' has no value", self.name()));
        }
        let shared = self.words.iter();
        let mut shared: Vec<_> = shared
            .filter_map(|word| parse_shared_directory(word, diagnostics))
            .collect();
        shared.sort();
        shared.dedup();
        shared
    }

    fn priority(&self, diagnostics: &mut Diagnostics) -> Option<i32> {
        let bounds = -PRIORITY_MAX..=PRIORITY_MAX;
        let value = match self.words.as_slice() {
            [word] => word
                .text
                .parse()
                .ok()
                .filter(|value| bounds.contains(value)),
            _ => None,
        };
        if value.is_none() {
            let message = format!(
                "'priority' takes one whole number from {} to {PRIORITY_MAX}",
                -PRIORITY_MAX
            );
            diagnostics.error(self.location, message);
        }
        value
    }

    /// Sizes between commas, each larger than the one before.
    fn memory(&self, diagnostics: &mut Diagnostics) -> Vec<u64> {
        let Some(first) = self.words.first() else {
            self.quantity(parse_size, "2 GB", diagnostics);
            return Vec::new();
        };
        let texts: Vec<&str> = self.words.iter().map(|word| word.text.as_str()).collect();
        let text = texts.join(" ");
        let mut sizes: Vec<u64> = Vec::new();
        for part in text.split(',').map(str::trim) {
            let last = sizes.last().copied().unwrap_or(0);
            match parse_size(part) {
                Ok(0) => {
                    diagnostics.error(first.location, format!("'{}' is zero", self.name()));
                }
                Ok(size) if size > last => sizes.push(size),
                Ok(_) => {
                    let message = format!("'{part}' is no more than the value before it");
                    let hint = "each value is for another try with more memory: 2 GB, 8 GB";
                    diagnostics.error_hint(first.location, message, hint);
                }
                Err(error) => error.report(first.location, diagnostics),
            }
        }
        if sizes.len() > MEMORY_VALUES_MAX {
            let message = format!("'{}' has more than {MEMORY_VALUES_MAX} values", self.name());
            diagnostics.error(first.location, message);
        }
        sizes
    }

    fn quantity(
        &self,
        parse: fn(&str) -> Result<u64, QuantityError>,
        example: &str,
        diagnostics: &mut Diagnostics,
    ) -> Option<u64> {
        let name = self.name();
        let Some(first) = self.words.first() else {
            let hint = format!("write for example '{name} = {example}'");
            diagnostics.error_hint(self.location, format!("'{name}' has no value"), hint);
            return None;
        };
        let texts: Vec<&str> = self.words.iter().map(|word| word.text.as_str()).collect();
        match parse(&texts.join(" ")) {
            Ok(0) => diagnostics.error(first.location, format!("'{name}' is zero")),
            Ok(value) => return Some(value),
            Err(error) => error.report(first.location, diagnostics),
        }
        None
    }
}

/// A whole number between two bounds.
pub(super) fn parse_integer(
    word: &Word,
    min: u64,
    max: u64,
    what: &str,
    diagnostics: &mut Diagnostics,
) -> Option<u64> {
    let digits = word.text.bytes().all(|byte| byte.is_ascii_digit());
    match word.text.parse::<u64>() {
        Ok(value) if digits && (min..=max).contains(&value) => Some(value),
        _ => {
            let message = format!(
                "expected a whole number from {min} to {max} for {what}, not '{}'",
                word.text
            );
            diagnostics.error(word.location, message);
            None
        }
    }
}

impl QuantityError {
    /// Reports the error at the place where the quantity stands.
    pub(super) fn report(self, at: SourceLocation, diagnostics: &mut Diagnostics) {
        match self.hint {
            Some(hint) => diagnostics.error_hint(at, self.message, hint),
            None => diagnostics.error(at, self.message),
        }
    }
}

fn list_keys() -> String {
    KEYS.map(|(name, _)| name).join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn editors_grammar_has_all_keys() {
        let grammar = include_str!("../../integrations/textmate/bafs.tmLanguage.json");
        for (key, _) in KEYS {
            assert!(grammar.contains(key), "{key}");
        }
    }
}
