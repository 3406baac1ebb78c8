//! Functions of a name that `$(...)` may apply: text in, text out.

/// How many arguments a function takes, and what it does with them.
pub(super) struct NameFunction {
    pub(super) name: &'static str,
    /// How it is written.
    pub(super) form: &'static str,
    pub(super) arguments: usize,
    pub(super) apply: fn(&[String]) -> String,
}

/// All functions by their name.
pub(super) const NAME_FUNCTIONS: [NameFunction; 10] = [
    NameFunction {
        name: "basename",
        form: "basename(x)",
        arguments: 1,
        apply: |words| basename(&words[0]).to_owned(),
    },
    NameFunction {
        name: "dirname",
        form: "dirname(x)",
        arguments: 1,
        apply: |words| dirname(&words[0]).to_owned(),
    },
    NameFunction {
        name: "extension",
        form: "extension(x)",
        arguments: 1,
        apply: |words| split_extension(basename(&words[0])).1.to_owned(),
    },
    NameFunction {
        name: "lower",
        form: "lower(x)",
        arguments: 1,
        apply: |words| words[0].to_lowercase(),
    },
    NameFunction {
        name: "quote",
        form: "quote(x)",
        arguments: 1,
        apply: |words| quote_for_shell(&words[0]),
    },
    NameFunction {
        name: "remove_prefix",
        form: "remove_prefix(x, \"TEXT\")",
        arguments: 2,
        apply: |words| {
            let rest = words[0].strip_prefix(&words[1]);
            rest.unwrap_or(&words[0]).to_owned()
        },
    },
    NameFunction {
        name: "remove_suffix",
        form: "remove_suffix(x, \"TEXT\")",
        arguments: 2,
        apply: |words| {
            let rest = words[0].strip_suffix(&words[1]);
            rest.unwrap_or(&words[0]).to_owned()
        },
    },
    NameFunction {
        name: "replace",
        form: "replace(x, \"OLD\", \"NEW\")",
        arguments: 3,
        // Nothing is between all letters, and that is never meant.
        apply: |words| match words[1].is_empty() {
            true => words[0].clone(),
            false => words[0].replace(&words[1], &words[2]),
        },
    },
    NameFunction {
        name: "stem",
        form: "stem(x)",
        arguments: 1,
        apply: |words| split_extension(basename(&words[0])).0.to_owned(),
    },
    NameFunction {
        name: "upper",
        form: "upper(x)",
        arguments: 1,
        apply: |words| words[0].to_uppercase(),
    },
];

fn basename(path: &str) -> &str {
    let path = path.trim_end_matches('/');
    path.rsplit_once('/').map_or(path, |(_, name)| name)
}

/// As `dirname` of POSIX; of a URL what is before its last name.
fn dirname(path: &str) -> &str {
    let is_absolute = path.starts_with('/');
    let path = path.trim_end_matches('/');
    match path.rsplit_once('/') {
        Some((directory, _)) if !directory.is_empty() => directory.trim_end_matches('/'),
        Some(_) => "/",
        None if is_absolute => "/",
        None => ".",
    }
}

/// Name and last ending, without the dot. A name that begins with its only dot has no ending.
fn split_extension(name: &str) -> (&str, &str) {
    match name.rsplit_once('.') {
        Some((stem, extension)) if !stem.is_empty() => (stem, extension),
        _ => (name, ""),
    }
}

/// One word of a POSIX shell.
pub(super) fn quote_for_shell(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./:=@%+,".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn apply(name: &str, words: &[&str]) -> String {
        let found = NAME_FUNCTIONS.iter().find(|it| it.name == name);
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        (found.expect("a function").apply)(&words)
    }

    #[test]
    fn functions_take_paths_apart() {
        assert_eq!(apply("basename", &["bafs://home/r/a_1.fq"]), "a_1.fq");
        assert_eq!(apply("basename", &["r/a/"]), "a");
        assert_eq!(apply("dirname", &["bafs://home/r/a"]), "bafs://home/r");
        assert_eq!(apply("dirname", &["a"]), ".");
        assert_eq!(apply("dirname", &["/a"]), "/");
        assert_eq!(apply("stem", &["r/a.fastq.gz"]), "a.fastq");
        assert_eq!(apply("stem", &[".profile"]), ".profile");
        assert_eq!(apply("extension", &["r.d/a"]), "");
        assert_eq!(apply("extension", &["a.fastq.gz"]), "gz");
    }

    #[test]
    fn editors_grammar_has_all_functions() {
        let grammar = include_str!("../../integrations/textmate/bafs.tmLanguage.json");
        for function in NAME_FUNCTIONS {
            assert!(grammar.contains(function.name), "{}", function.name);
        }
    }

    #[test]
    fn functions_change_texts() {
        assert_eq!(apply("replace", &["a_1.fq", "_1", "_2"]), "a_2.fq");
        assert_eq!(apply("replace", &["ab", "", "x"]), "ab");
        assert_eq!(apply("remove_suffix", &["a_1.fq", "_1.fq"]), "a");
        assert_eq!(apply("remove_suffix", &["a", "_1.fq"]), "a");
        assert_eq!(apply("remove_prefix", &["run-7", "run-"]), "7");
        assert_eq!(apply("upper", &["aé"]), "AÉ");
        assert_eq!(apply("quote", &["it's"]), r"'it'\''s'");
        assert_eq!(apply("quote", &["a.fq"]), "a.fq");
    }
}
