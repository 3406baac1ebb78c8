//! Patterns of paths: which directory to list, and which of its entries match. It lists nothing.

use glob::{MatchOptions, Pattern};

use super::sources::ListedEntry;

/// As in a shell: a wildcard matches within one name, and no dot at its beginning.
const MATCH_OPTIONS: MatchOptions = MatchOptions {
    case_sensitive: true,
    require_literal_separator: true,
    require_literal_leading_dot: true,
};

/// A pattern of paths.
pub(super) struct PathPattern {
    /// The part without wildcards, with its trailing slash, or nothing.
    pub(super) directory: String,
    /// Names of the pattern below that.
    pub(super) depth: usize,
    wants_directories: bool,
    pattern: Pattern,
    /// Those of the single names.
    names: Vec<Pattern>,
}

impl PathPattern {
    /// Reads a pattern; one that ends with a slash matches directories, any other files.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let wildcard = text.find(['*', '?', '[']).unwrap_or(text.len());
        let directory = &text[..text[..wildcard].rfind('/').map_or(0, |slash| slash + 1)];
        let below = &text[directory.len()..];
        let names = below.trim_end_matches('/');
        if names.contains("**") {
            return Err("'**' is no part of a pattern here; name each level".to_owned());
        }
        if names.is_empty() {
            return Err("it names no file".to_owned());
        }
        let read = |text: &str| Pattern::new(text).map_err(|error| error.msg.to_owned());
        let each: Result<Vec<Pattern>, String> = names.split('/').map(read).collect();
        Ok(Self {
            directory: directory.to_owned(),
            depth: names.split('/').count(),
            wants_directories: below.ends_with('/'),
            pattern: read(names)?,
            names: each?,
        })
    }

    /// Whether something in this directory below the pattern's may match.
    pub(super) fn enters(&self, directory: &str) -> bool {
        let mut names = self.names.iter();
        let mut is_match = |name| {
            let wanted = names.next();
            wanted.is_some_and(|wanted| wanted.matches_with(name, MATCH_OPTIONS))
        };
        directory.split('/').all(&mut is_match) && names.next().is_some()
    }

    /// The paths that match, with the pattern's directory in front, in bytewise order.
    pub(super) fn select(&self, entries: Vec<ListedEntry>) -> Vec<String> {
        let matching = entries.into_iter().filter(|entry| {
            entry.is_directory == self.wants_directories
                && self.pattern.matches_with(&entry.path, MATCH_OPTIONS)
        });
        let mut paths: Vec<String> = matching
            .map(|entry| format!("{}{}", self.directory, entry.path))
            .collect();
        paths.sort();
        paths.dedup();
        paths
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn select(pattern: &str, paths: &[&str]) -> Vec<String> {
        let entry = |path: &&str| ListedEntry {
            path: path.trim_end_matches('/').to_owned(),
            is_directory: path.ends_with('/'),
        };
        let parsed = PathPattern::parse(pattern).expect("a pattern");
        parsed.select(paths.iter().map(entry).collect())
    }

    #[test]
    fn patterns_match_names_of_one_level() {
        let found = select(
            "r/*_1.fq",
            &["b_1.fq", "a_1.fq", "x/c_1.fq", ".d_1.fq", "a_2.fq"],
        );
        assert_eq!(found, ["r/a_1.fq", "r/b_1.fq"]);
        let found = select("bafs://home/*/s[12].fq", &["a/s1.fq", "b/s3.fq", "b/s2.fq"]);
        assert_eq!(found, ["bafs://home/a/s1.fq", "bafs://home/b/s2.fq"]);
        assert_eq!(select("r/*/", &["a/", "b", "c/"]), ["r/a", "r/c"]);
        assert_eq!(select("r/*", &["a/", "b", "c/"]), ["r/b"]);
    }

    #[test]
    fn patterns_enter_matching_directories() {
        let pattern = PathPattern::parse("/proc/*/task/[0-9]*/x").expect("a pattern");
        for (directory, enters) in [
            ("1", true),
            (".1", false),
            ("1/task", true),
            ("1/fd", false),
            ("1/task/12", true),
            ("1/task/x", false),
            ("1/task/12/x", false),
        ] {
            assert_eq!(pattern.enters(directory), enters, "{directory}");
        }
    }

    #[test]
    fn malformed_patterns_are_rejected() {
        assert!(PathPattern::parse("r/[a").is_err());
        assert!(PathPattern::parse("r/**/x").is_err());
        assert!(PathPattern::parse("r/").is_err());
        assert_eq!(PathPattern::parse("x").expect("a name").directory, "");
    }
}
