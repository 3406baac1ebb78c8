//! Submit files of HTCondor: keys, macros, and the two forms of arguments. Reads no files.

use std::collections::{BTreeMap, BTreeSet};

use crate::sources::ImportError;

/// Depth of macros in macros; deeper ones name themselves.
const MACRO_DEPTH_MAX: usize = 20;

/// Keys that say nothing about what a job does, or that BAFS does by itself.
const IGNORED_KEYS: &[&str] = &[
    "universe",
    "log",
    "notification",
    "notify_user",
    "should_transfer_files",
    "when_to_transfer_output",
    "queue",
    "rank",
    "leave_in_queue",
    "batch_name",
    "jobbatchname",
    "stream_output",
    "stream_error",
    "accounting_group",
    "accounting_group_user",
    "preserve_relative_paths",
    "run_as_owner",
    "copy_to_spool",
    "max_idle",
    "nice_user",
    "description",
    "allowed_execute_duration",
    "hold",
    "transfer_output",
    "transfer_error",
    "success_exit_code",
    "job_lease_duration",
    "keep_claim_idle",
    "transfer_input",
    "stream_input",
    "email_attributes",
    "on_exit_remove",
];

/// Keys that change what a job does.
const KNOWN_KEYS: &[&str] = &[
    "executable",
    "transfer_executable",
    "arguments",
    "environment",
    "env",
    "input",
    "output",
    "error",
    "initialdir",
    "initial_dir",
    "transfer_input_files",
    "transfer_output_files",
    "transfer_output_remaps",
    "request_cpus",
    "request_memory",
    "request_disk",
    "max_retries",
    "priority",
];

/// Macros that each job has. A job of BAFS has no cluster: the first one stands for it.
const OWN_MACROS: [(&str, &str); 6] = [
    ("process", "0"),
    ("procid", "0"),
    ("step", "0"),
    ("item", ""),
    ("cluster", "1"),
    ("clusterid", "1"),
];

/// The description of one job, with all macros replaced.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Submission {
    values: BTreeMap<String, String>,
    /// Keys that BAFS does not know, for a remark.
    pub(crate) unknown_keys: Vec<String>,
    /// Macros without a value, for a remark.
    pub(crate) unset_macros: BTreeSet<String>,
}

impl Submission {
    /// Reads a submit file. `variables` are those of the node (VARS), in the order of the file.
    pub(crate) fn parse(text: &str, variables: &[(String, String)]) -> Result<Self, ImportError> {
        let mut macros: BTreeMap<String, String> = BTreeMap::new();
        for (name, value) in OWN_MACROS {
            macros.insert(name.to_owned(), value.to_owned());
        }
        let given = variables.iter();
        macros.extend(given.map(|(name, value)| (name.to_ascii_lowercase(), value.clone())));
        let fixed: Vec<_> = variables
            .iter()
            .map(|(name, _)| name.to_ascii_lowercase())
            .collect();
        for (line, text) in join_lines(text) {
            let lower = text.to_ascii_lowercase();
            if let Some(rest) = lower
                .strip_prefix("queue")
                .filter(|rest| !rest.contains('='))
            {
                check_queue(line, rest.trim())?;
                // What follows describes further jobs, of which a node of a DAG has none.
                break;
            }
            if ["if ", "elif ", "include ", "include:", "use "]
                .iter()
                .any(|it| lower.starts_with(it))
            {
                let why = format!("'{text}' is not supported; write out what it stands for");
                return Err(ImportError::at(line, why));
            }
            let Some((key, value)) = text.split_once('=') else {
                return Err(ImportError::at(
                    line,
                    format!("'{text}' is neither KEY = VALUE nor queue"),
                ));
            };
            let key = key.trim().to_ascii_lowercase();
            if !fixed.contains(&key) {
                macros.insert(key, value.trim().to_owned());
            }
        }
        let mut found = Self::default();
        for (key, value) in &macros {
            if KNOWN_KEYS.contains(&key.as_str()) || key == "universe" {
                let value = expand(value, &macros, &mut found.unset_macros, 0)?;
                found.values.insert(key.clone(), value);
            } else if is_unknown(key, &macros, &fixed) {
                found.unknown_keys.push(key.clone());
            }
        }
        Ok(found)
    }

    /// Whether the file has a key, perhaps without a value.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.values.contains_key(key)
    }

    /// The value of a key, unless it is empty.
    pub(crate) fn get(&self, key: &str) -> Option<&str> {
        let value = self.values.get(key).map(String::as_str);
        value.filter(|value| !value.is_empty())
    }

    /// The parts of a list between commas.
    pub(crate) fn list(&self, key: &str) -> Vec<&str> {
        let parts = self
            .get(key)
            .unwrap_or_default()
            .trim_matches('"')
            .split(',');
        parts
            .map(str::trim)
            .filter(|part| !part.is_empty())
            .collect()
    }

    /// The words of `arguments`.
    pub(crate) fn arguments(&self) -> Result<Vec<String>, ImportError> {
        self.get("arguments")
            .map_or(Ok(Vec::new()), split_arguments)
    }

    /// The variables of `environment`.
    pub(crate) fn environment(&self) -> Result<Vec<(String, String)>, ImportError> {
        let text = self.get("environment").or_else(|| self.get("env"));
        let Some(text) = text else {
            return Ok(Vec::new());
        };
        let words = match text.starts_with('"') {
            true => split_arguments(text)?,
            false => text.split(';').map(str::to_owned).collect(),
        };
        let pairs = words.iter().filter_map(|word| word.split_once('='));
        Ok(pairs
            .map(|(name, value)| (name.trim().to_owned(), value.to_owned()))
            .collect())
    }

    /// New names of outputs: `name=path`.
    pub(crate) fn remaps(&self) -> BTreeMap<String, String> {
        let text = self
            .get("transfer_output_remaps")
            .unwrap_or_default()
            .trim_matches('"');
        let pairs = text.split(';').filter_map(|pair| pair.split_once('='));
        pairs
            .map(|(from, to)| (from.trim().to_owned(), to.trim().to_owned()))
            .collect()
    }
}

/// Whether nothing says what a key is for: it is no macro of another value, either.
fn is_unknown(key: &str, macros: &BTreeMap<String, String>, fixed: &[String]) -> bool {
    let is_macro = |name: &str| {
        let named = [format!("$({name})"), format!("$({name}:")];
        macros.values().any(|value| {
            let value = value.to_ascii_lowercase();
            named.iter().any(|name| value.contains(name.as_str()))
        })
    };
    let is_attribute = key.starts_with('+') || key.starts_with("my.");
    let is_own = OWN_MACROS.iter().any(|(name, _)| *name == key);
    !IGNORED_KEYS.contains(&key)
        && !is_attribute
        && !is_own
        && !fixed.iter().any(|it| it == key)
        && !is_macro(key)
}

fn check_queue(line: usize, count: &str) -> Result<(), ImportError> {
    match count {
        "" | "1" => Ok(()),
        _ => Err(ImportError::at(
            line,
            format!("'queue {count}': a node of a DAG has one job here; make a node for each job"),
        )),
    }
}

/// Lines with their numbers, without comments; a backslash at the end continues a line.
pub(crate) fn join_lines(text: &str) -> Vec<(usize, String)> {
    let mut joined: Vec<(usize, String)> = Vec::new();
    let mut open: Option<(usize, String)> = None;
    for (index, line) in text.lines().enumerate() {
        let (number, mut whole) = open.take().unwrap_or((index + 1, String::new()));
        if whole.is_empty() && line.trim_start().starts_with('#') {
            continue;
        }
        match line.trim_end().strip_suffix('\\') {
            Some(part) => {
                whole.push_str(part);
                open = Some((number, whole));
            }
            None => {
                whole.push_str(line);
                joined.push((number, whole.trim().to_owned()));
            }
        }
    }
    joined.extend(open.map(|(number, whole)| (number, whole.trim().to_owned())));
    joined.retain(|(_, line)| !line.is_empty());
    joined
}

/// Replaces `$(name)` and `$(name:default)`; notes the names that have neither value nor default.
fn expand(
    text: &str,
    macros: &BTreeMap<String, String>,
    unset: &mut BTreeSet<String>,
    depth: usize,
) -> Result<String, ImportError> {
    if depth > MACRO_DEPTH_MAX {
        return Err(ImportError::new(format!("'{text}' has macros in a circle")));
    }
    let mut done = String::new();
    let mut rest = text;
    while let Some(start) = rest.find('$') {
        let behind = &rest[start + 1..];
        done.push_str(&rest[..start]);
        check_function(behind)?;
        let inner = behind.strip_prefix('(');
        let Some((name, after)) = inner.and_then(|inner| inner.split_once(')')) else {
            done.push('$');
            rest = behind;
            continue;
        };
        let (name, default) = match name.split_once(':') {
            Some((name, default)) => (name, Some(default)),
            None => (name, None),
        };
        let name = name.trim().to_ascii_lowercase();
        let value = macros.get(&name).map(String::as_str).or(default);
        if value.is_none() {
            unset.insert(name);
        }
        done.push_str(&expand(
            value.unwrap_or_default(),
            macros,
            unset,
            depth + 1,
        )?);
        rest = after;
    }
    done.push_str(rest);
    Ok(done)
}

/// `$ENV(x)`, `$F(x)`, `$INT(x)` and others compute; `$$(x)` depends on the machine.
fn check_function(behind: &str) -> Result<(), ImportError> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '$';
    let end = behind.find(|c| !is_part(c)).unwrap_or(behind.len());
    if end > 0 && behind[end..].starts_with('(') {
        let name = &behind[..end];
        return Err(ImportError::new(format!(
            "${name}(…) is not supported; write its value into the submit file"
        )));
    }
    Ok(())
}

/// The words of arguments: between double quotes in the new form, else in the old one.
fn split_arguments(text: &str) -> Result<Vec<String>, ImportError> {
    let text = text.trim();
    let inner = text
        .strip_prefix('"')
        .and_then(|rest| rest.strip_suffix('"'));
    let Some(inner) = inner.filter(|_| text.len() > 1) else {
        let words = text.split_whitespace();
        return Ok(words.map(|word| word.replace("\\\"", "\"")).collect());
    };
    let (mut words, mut word, mut is_open) = (Vec::new(), None::<String>, false);
    let mut characters = inner.chars().peekable();
    while let Some(c) = characters.next() {
        let is_double = characters.peek() == Some(&c);
        match c {
            '"' if is_double => {
                characters.next();
                word.get_or_insert_default().push('"');
            }
            '\'' if is_open && is_double => {
                characters.next();
                word.get_or_insert_default().push('\'');
            }
            '\'' => {
                is_open = !is_open;
                word.get_or_insert_default();
            }
            c if c.is_whitespace() && !is_open => words.extend(word.take()),
            c => word.get_or_insert_default().push(c),
        }
    }
    if is_open {
        return Err(ImportError::new(format!(
            "{text} has a quote that never closes"
        )));
    }
    words.extend(word);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        split_arguments(text).expect("valid arguments")
    }

    #[test]
    fn both_forms_of_arguments_are_split() {
        assert_eq!(words(r#"-a "b"#), ["-a", "\"b"]);
        assert_eq!(words(r#"-c \"x\""#), ["-c", "\"x\""]);
        assert_eq!(
            words(r#""one 'two three' it''s ""q"" ''""#),
            ["one", "two three", "its", "\"q\"", ""]
        );
        assert_eq!(words(r#""'it''s'""#), ["it's"]);
        assert!(split_arguments(r#""'open""#).is_err());
    }

    #[test]
    fn macros_are_replaced_with_defaults() {
        let text =
            "base = run$(n)\nExecutable = $(base).sh\narguments = $(n) $(k:7) $(none)\nqueue\n";
        let found = Submission::parse(text, &[("N".into(), "3".into())]).expect("valid");
        assert_eq!(found.get("executable"), Some("run3.sh"));
        assert_eq!(found.arguments().expect("words"), ["3", "7"]);
        assert_eq!(found.unknown_keys, Vec::<String>::new());
    }

    #[test]
    fn variables_of_the_node_override_the_file() {
        let found = Submission::parse("n = 1\narguments = $(n)", &[("n".into(), "2".into())]);
        assert_eq!(found.expect("valid").get("arguments"), Some("2"));
    }

    #[test]
    fn constructs_without_a_meaning_are_refused() {
        for (text, expected) in [
            ("queue 5", "a node of a DAG has one job"),
            ("queue name in (a b)", "a node of a DAG has one job"),
            ("if true\nendif", "is not supported"),
            ("executable", "neither KEY = VALUE"),
        ] {
            let said = Submission::parse(text, &[]).expect_err(text);
            assert!(said.message.contains(expected), "{said}");
        }
    }

    #[test]
    fn macros_without_a_value_are_noted() {
        let text = "arguments = $(none) $(k:7) $5 $\nexecutable = x\n";
        let found = Submission::parse(text, &[]).expect("valid");
        assert_eq!(found.arguments().expect("words"), ["7", "$5", "$"]);
        assert_eq!(found.unset_macros, BTreeSet::from(["none".to_owned()]));
        for text in [
            "arguments = $ENV(HOME)",
            "executable = $Fn(x)",
            "arguments = $$(Arch)",
        ] {
            let said = Submission::parse(text, &[]).expect_err(text);
            assert!(
                said.message.contains("is not supported; write its value"),
                "{said}"
            );
        }
    }

    #[test]
    fn unknown_keys_are_listed() {
        let found = Submission::parse("frobnicate = 1\n+Project = 2\nlog = x\n", &[]);
        assert_eq!(found.expect("valid").unknown_keys, ["frobnicate"]);
    }
}
