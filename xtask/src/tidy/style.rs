//! Rules about one file at a time: its header, its length, its lines, what nobody finished.

use super::files::SourceFile;
use super::source;
use super::violation::RuleViolation;

/// A file fits a sitting. It fails rather than warns, because the central file always grows.
const CODE_LINES_MAX: usize = 500;
const LINE_COLUMNS_MAX: usize = 100;

/// Marks of unfinished work, in two pieces, as this file is checked too.
const LEFTOVER_WORDS: [&str; 2] = [concat!("FIX", "ME"), concat!("X", "XX")];
const LEFTOVER_MACROS: [&str; 3] = ["todo!", "dbg!", "unimplemented!"];

/// Applies the rules to a file.
pub(super) fn check_style(file: &SourceFile) -> Vec<RuleViolation> {
    let mut findings = Vec::new();
    if ["rs", "toml", "md"]
        .iter()
        .any(|extension| file.has_extension(extension))
    {
        findings.extend(check_whitespace(file));
    }
    if file.has_extension("rs") {
        findings.extend(check_header(file));
        findings.extend(check_length(file));
        findings.extend(check_columns(file));
        findings.extend(check_leftovers(file));
    }
    findings
}

fn check_header(file: &SourceFile) -> Option<RuleViolation> {
    let first = file.text.lines().next().unwrap_or_default();
    let says_something = first
        .strip_prefix("//!")
        .is_some_and(|rest| !rest.trim().is_empty());
    let what = "the first line must be `//!` and say what the file is and what it does not do";
    (!says_something).then(|| RuleViolation::new(&file.path, 1, what))
}

fn check_length(file: &SourceFile) -> Option<RuleViolation> {
    let code = source::count_code_lines(&file.text);
    let what = format!("{code} lines of code; a file has at most {CODE_LINES_MAX}: split it");
    (code > CODE_LINES_MAX).then(|| RuleViolation::new(&file.path, 0, what))
}

fn check_columns(file: &SourceFile) -> Vec<RuleViolation> {
    let mut findings = Vec::new();
    for (index, line) in file.text.lines().enumerate() {
        let columns = line.chars().count();
        // An address cannot be broken.
        if columns > LINE_COLUMNS_MAX && !line.contains("://") {
            let what = format!("{columns} columns; a line has at most {LINE_COLUMNS_MAX}");
            findings.push(RuleViolation::new(&file.path, index + 1, what));
        }
    }
    findings
}

fn check_whitespace(file: &SourceFile) -> Vec<RuleViolation> {
    let mut findings = Vec::new();
    for (index, line) in file.text.split('\n').enumerate() {
        if line.contains('\t') {
            findings.push(RuleViolation::new(
                &file.path,
                index + 1,
                "a tab; use spaces",
            ));
        }
        if line.ends_with(char::is_whitespace) {
            findings.push(RuleViolation::new(
                &file.path,
                index + 1,
                "white space at the end",
            ));
        }
    }
    if !file.text.is_empty() && !file.text.ends_with('\n') {
        findings.push(RuleViolation::new(
            &file.path,
            0,
            "no line end at the end of the file",
        ));
    }
    findings
}

fn check_leftovers(file: &SourceFile) -> Vec<RuleViolation> {
    let mut findings = Vec::new();
    let code = source::blank_non_code(&file.text);
    for (index, (raw, code)) in file.text.lines().zip(code.lines()).enumerate() {
        let word = LEFTOVER_WORDS
            .iter()
            .find(|word| source::has_word(raw, word));
        let called = LEFTOVER_MACROS
            .iter()
            .find(|name| source::has_word(code, name));
        if let Some(mark) = word.or(called) {
            let what = format!("`{mark}` is left over: finish it or write an issue");
            findings.push(RuleViolation::new(&file.path, index + 1, what));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_text(path: &str, text: &str) -> Vec<usize> {
        let file = SourceFile {
            path: path.to_owned(),
            text: text.to_owned(),
        };
        check_style(&file)
            .iter()
            .map(|finding| finding.line)
            .collect()
    }

    #[test]
    fn a_good_file_has_no_findings() {
        assert!(check_text("a.rs", "//! A file.\n\nfn a() {}\n").is_empty());
        assert!(check_text("a.bin", "no header, \ttabs ").is_empty());
    }

    #[test]
    fn file_requires_a_header_comment() {
        assert_eq!(check_text("a.rs", "fn a() {}\n"), [1]);
        assert_eq!(check_text("a.rs", "//!\nfn a() {}\n"), [1]);
        assert_eq!(check_text("a.rs", ""), [1]);
    }

    #[test]
    fn length_counts_code_and_not_comments_or_tests() {
        let code = |lines: usize| format!("//! A.\n{}", "let a = 1;\n".repeat(lines));
        assert!(check_text("a.rs", &code(500)).is_empty());
        assert_eq!(check_text("a.rs", &code(501)), [0]);
        let beside = "// why\n\n".repeat(300);
        assert!(check_text("a.rs", &(code(500) + &beside)).is_empty());
        let tests = format!("{}#[cfg(test)]\n{}", code(500), "let b = 1;\n".repeat(300));
        assert!(check_text("a.rs", &tests).is_empty());
    }

    #[test]
    fn lines_are_short_and_clean() {
        let wide = "é".repeat(97);
        assert!(check_text("a.rs", &format!("//! A.\n// {wide}\n")).is_empty());
        assert_eq!(check_text("a.rs", &format!("//! A.\n// {wide}é\n")), [2]);
        assert!(check_text("a.rs", &format!("//! A.\n// https://a/{wide}\n")).is_empty());
        assert_eq!(check_text("a.rs", "//! A.\n\tlet a;\nlet b; \n"), [2, 3]);
        assert_eq!(check_text("a.md", "text"), [0]);
    }

    #[test]
    fn unfinished_work_is_found_in_code_and_comments() {
        assert_eq!(check_text("a.rs", "//! A.\nfn a() { todo!() }\n"), [2]);
        assert_eq!(
            check_text("a.rs", concat!("//! A.\n// FIX", "ME: later\n")),
            [2]
        );
        assert!(check_text("a.rs", "//! A.\nlet a = \"todo!\";\n").is_empty());
        assert!(check_text("a.rs", "//! A.\nlet a = \"nameXXXXXX\";\n").is_empty());
    }
}
