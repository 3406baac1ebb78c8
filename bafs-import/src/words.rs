//! Words for a shell, words for the workflow language, and names.

use std::collections::BTreeSet;

/// Longest name of a job or volume in bytes.
const NAME_BYTES_MAX: usize = 200;

/// A word as a POSIX shell reads it back.
pub(crate) fn quote_shell(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./:=,+@%".contains(c);
    match !word.is_empty() && word.chars().all(is_plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

/// A word as the workflow language reads it back.
pub(crate) fn quote_word(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "_-./:=,+@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    let mut text = String::from("\"");
    for c in word.chars() {
        if matches!(c, '"' | '\\' | '$' | '`') {
            text.push('\\');
        }
        text.push(c);
    }
    text.push('"');
    text
}

/// Gives each thing a name of its own that jobs and volumes may have.
#[derive(Debug, Default)]
pub(crate) struct NameTable {
    taken: BTreeSet<String>,
}

impl NameTable {
    /// A free name that resembles `wanted`.
    pub(crate) fn name(&mut self, wanted: &str) -> String {
        let allowed = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
        let mut name: String = wanted
            .chars()
            .map(|c| if allowed(c) { c } else { '_' })
            .take(NAME_BYTES_MAX)
            .collect();
        if !name.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_') {
            name.insert(0, '_');
        }
        let mut free = name.clone();
        let mut number = 1;
        while !self.taken.insert(free.clone()) {
            number += 1;
            free = format!("{name}.{number}");
        }
        free
    }
}

/// The last name of a path or URL.
pub(crate) fn base_name(path: &str) -> &str {
    let path = path.trim_end_matches('/');
    path.rsplit('/').next().unwrap_or(path)
}

/// A relative path without `.`, `..` and doubled slashes; nothing if it leaves its directory.
pub(crate) fn normalise_path(path: &str) -> Option<String> {
    let mut parts: Vec<&str> = Vec::new();
    for part in path.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            part => parts.push(part),
        }
    }
    let root = if path.starts_with('/') { "/" } else { "" };
    (!parts.is_empty()).then(|| format!("{root}{}", parts.join("/")))
}

/// A size such as `2G`, `500 MB` or `2048`; a plain number counts in `unit_bytes`.
pub(crate) fn parse_size(text: &str, unit_bytes: u64) -> Option<u64> {
    let text = text.trim().trim_matches('"');
    let end = text
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(text.len());
    let number: f64 = text[..end].parse().ok()?;
    let unit = text[end..].trim().to_ascii_uppercase();
    let factor = match unit.trim_end_matches('B').trim_end_matches('I') {
        "" if unit.is_empty() => unit_bytes,
        "" => 1,
        "K" => 1 << 10,
        "M" => 1 << 20,
        "G" => 1 << 30,
        "T" => 1 << 40,
        _ => return None,
    };
    let bytes = number * factor as f64;
    (0.0..1e18).contains(&bytes).then_some(bytes as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_where_needed() {
        assert_eq!(quote_shell("a/b-1"), "a/b-1");
        assert_eq!(quote_shell("it's $1"), r"'it'\''s $1'");
        assert_eq!(quote_word("a b$(c)"), r#""a b\$(c)""#);
    }

    #[test]
    fn names_are_valid_and_unique() {
        let mut names = NameTable::default();
        assert_eq!(names.name("a b"), "a_b");
        assert_eq!(names.name("a+b"), "a_b.2");
        assert_eq!(names.name("-x"), "_-x");
    }

    #[test]
    fn paths_never_leave_their_directory() {
        assert_eq!(normalise_path("./a//b/../c").as_deref(), Some("a/c"));
        assert_eq!(normalise_path("../a"), None);
        assert_eq!(normalise_path("/x/./y").as_deref(), Some("/x/y"));
    }

    #[test]
    fn sizes_have_units_or_a_default() {
        assert_eq!(parse_size("2", 1 << 20), Some(2 << 20));
        assert_eq!(parse_size("1.5 GB", 1), Some(3 << 29));
        assert_eq!(parse_size("10 KiB", 1), Some(10 << 10));
        assert_eq!(parse_size("ten", 1), None);
    }
}
