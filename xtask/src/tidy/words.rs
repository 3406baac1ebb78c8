//! The vocabulary of the project: words that are retired do not come back, and a name has one
//! meaning. The glossary in ARCHITECTURE.md has the terms to use instead.
//!
//! Two rules are checked here:
//! * An identifier has none of the [`RETIRED`] words, and no page of the book uses one in prose.
//! * A crate declares at most one type of each name that is visible outside its module.

use std::collections::BTreeMap;

use super::files::SourceFile;
use super::prose;
use super::source::blank_non_code;
use super::violation::RuleViolation;

/// Each retired word and the standard term that took its place.
const RETIRED: [(&str, &str); 35] = [
    ("allot", "set a quota"),
    ("allotment", "node quota"),
    ("allotments", "node quotas"),
    ("allotted", "within a quota"),
    ("beneath", "confined lookup"),
    ("blockade", "deadlock"),
    ("boarding", "fetch join"),
    ("crossings", "cross-pipeline dependencies"),
    ("deeds", "observed access"),
    ("deplore", "report data loss"),
    ("dice", "seeded random numbers"),
    ("door", "descriptor passing"),
    ("doors", "descriptor passing"),
    ("errand", "fetch scope"),
    ("fate", "volume health"),
    ("heed", "prioritise"),
    ("heeds", "prioritises"),
    ("heir", "peer probe"),
    ("heirloom", "peer copy"),
    ("heirs", "peer probes"),
    ("knock", "hand-off hello"),
    ("parcel", "hand-off"),
    ("passenger", "fetch waiter"),
    ("patience", "timeout"),
    ("pulse", "heartbeat"),
    ("pulses", "heartbeats"),
    ("shower", "mounter"),
    ("skew", "load imbalance"),
    ("speaker", "client"),
    ("strays", "orphaned executions"),
    ("trouble", "failure"),
    ("troubles", "failure history"),
    ("whereabouts", "address"),
    ("wish", "request"),
    ("wishes", "requests"),
];

/// Retired words in the code and in the book.
pub(super) fn check_retired(file: &SourceFile) -> Vec<RuleViolation> {
    if file.path == "xtask/src/tidy/words.rs" {
        return Vec::new();
    }
    if file.has_extension("rs") {
        let code = blank_non_code(&file.text);
        let lines = code.lines().enumerate();
        return lines
            .flat_map(|(at, line)| retired_in(&file.path, at + 1, line))
            .collect();
    }
    if prose::is_document(file) {
        let sentences = prose::find_sentences(&file.text).into_iter();
        return sentences
            .flat_map(|sentence| retired_in(&file.path, sentence.line, &sentence.text))
            .collect();
    }
    Vec::new()
}

fn retired_in(path: &str, line: usize, text: &str) -> Vec<RuleViolation> {
    // The kernel's own name of a flag of openat2(2).
    let text = text.replace("BENEATH", "");
    let found = words_of(&text).into_iter().filter_map(|word| {
        let (retired, term) = RETIRED.iter().find(|(retired, _)| *retired == word)?;
        let what = format!("`{retired}` is retired; the term is “{term}”");
        Some(RuleViolation::new(path, line, what))
    });
    found.collect()
}

/// Words of a text in lower case; an identifier falls into its parts.
fn words_of(text: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut was_lower = false;
    for c in text.chars() {
        let starts_word = !c.is_alphabetic() || (c.is_uppercase() && was_lower);
        if starts_word {
            words.push(String::new());
        }
        was_lower = c.is_lowercase();
        if c.is_alphabetic() {
            let word = words.last_mut().expect("never empty");
            word.extend(c.to_lowercase());
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

/// Types of one name in one crate, unless only one of them is seen outside its module.
pub(super) fn check_ambiguous(files: &[SourceFile]) -> Vec<RuleViolation> {
    let mut declared: BTreeMap<(&str, String), Vec<(&SourceFile, usize)>> = BTreeMap::new();
    for file in files.iter().filter(|file| file.has_extension("rs")) {
        let Some(unit) = unit_of(&file.path) else {
            continue;
        };
        for (at, line) in blank_non_code(&file.text).lines().enumerate() {
            if let Some(name) = declared_type(line) {
                let places = declared.entry((unit, name.to_owned())).or_default();
                places.push((file, at + 1));
            }
        }
    }
    let ambiguous = declared.into_iter().filter(|(_, places)| places.len() > 1);
    ambiguous
        .flat_map(|((unit, name), places)| {
            places.into_iter().skip(1).map(move |(file, line)| {
                let what = format!("a second type `{name}` in {unit}");
                RuleViolation::new(&file.path, line, what)
            })
        })
        .collect()
}

/// What is compiled as one: the sources of a crate, or one folder of its tests.
fn unit_of(path: &str) -> Option<&str> {
    let (folder, rest) = path.split_once('/')?;
    if rest.starts_with("src/") {
        return Some(folder);
    }
    let (tests, rest) = rest.split_once('/')?;
    let end = rest.find(['/', '.']).unwrap_or(rest.len());
    (tests == "tests").then(|| &path[..folder.len() + tests.len() + 2 + end])
}

/// The type that a line declares for more than its own module.
fn declared_type(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("pub")?;
    let rest = match rest.strip_prefix('(') {
        Some(scope) => scope.split_once(')')?.1,
        None => rest,
    };
    let mut words = rest.split_whitespace();
    let keyword = words.find(|word| *word != "unsafe")?;
    if !["struct", "enum", "trait", "union", "type"].contains(&keyword) {
        return None;
    }
    let name = words.next().filter(|name| !name.starts_with('$'))?;
    let end = name.find(|c: char| !c.is_alphanumeric() && c != '_');
    Some(&name[..end.unwrap_or(name.len())])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> SourceFile {
        SourceFile {
            path: path.to_owned(),
            text: text.to_owned(),
        }
    }

    #[track_caller]
    fn check_lines(path: &str, text: &str, expected: &[usize]) {
        let found = check_retired(&file(path, text));
        let lines: Vec<usize> = found.iter().map(|finding| finding.line).collect();
        assert_eq!(lines, expected);
    }

    #[test]
    fn retired_words_in_identifiers_are_found() {
        check_lines(
            "bafs/src/a.rs",
            "// a door\nlet x = \"door\";\nfn open_door() {}\nstruct JobPulse;\nlet outdoor = 1;\n",
            &[3, 4],
        );
    }

    #[test]
    fn retired_words_in_prose_are_found() {
        check_lines("docs/a.md", "A door.\n\n`door` is code.\n", &[1]);
    }

    #[test]
    fn second_public_type_of_a_name_is_found() {
        let files = [
            file("a/src/one.rs", "pub struct State;\nstruct Place;\n"),
            file("a/src/two.rs", "pub(crate) enum State<T> {\n"),
            file("b/src/one.rs", "pub type State = u8;\n"),
            file("a/tests/one.rs", "pub struct State;\n"),
        ];
        let found = check_ambiguous(&files);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].path.as_str(), found[0].line), ("a/src/two.rs", 1));
    }
}
