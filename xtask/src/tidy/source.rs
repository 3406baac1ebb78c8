//! Looks at Rust text: what is code, what is a word. A lexer for these two questions, no parser.

/// The text with comments and the contents of literals blanked out; lines stay where they were.
pub(crate) fn blank_non_code(text: &str) -> String {
    blank_parts(text, |_| true)
}

/// The text with comments blanked out; literals and lines stay as they were.
pub(crate) fn blank_comments(text: &str) -> String {
    blank_parts(text, |first| first == '/')
}

/// Blanks out the comments and literals that begin with such a character.
fn blank_parts(text: &str, is_blanked: impl Fn(char) -> bool) -> String {
    let characters: Vec<char> = text.chars().collect();
    let mut code = String::with_capacity(text.len());
    let mut at = 0;
    while at < characters.len() {
        let end = match find_literal_or_comment_end(&characters, at) {
            Some(end) => {
                match is_blanked(characters[at]) {
                    true => push_blanks(&characters[at..end], &mut code),
                    false => code.extend(&characters[at..end]),
                }
                end
            }
            None => {
                code.push(characters[at]);
                at + 1
            }
        };
        at = end;
    }
    code
}

fn push_blanks(characters: &[char], code: &mut String) {
    code.extend(
        characters
            .iter()
            .map(|&c| if c == '\n' { '\n' } else { ' ' }),
    );
}

/// Where the comment or literal that starts here ends, if one does.
fn find_literal_or_comment_end(text: &[char], at: usize) -> Option<usize> {
    let next = text.get(at + 1).copied();
    match text[at] {
        '/' if next == Some('/') => Some(find_character(text, at, |c| c == '\n')),
        '/' if next == Some('*') => Some(block_comment_end(text, at)),
        '"' => Some(quoted_end(text, at, '"')),
        'r' if !is_after_word(text, at) => raw_string_end(text, at + 1),
        'b' | 'c' if next == Some('r') && !is_after_word(text, at) => raw_string_end(text, at + 2),
        '\'' => character_end(text, at),
        _ => None,
    }
}

fn find_character(text: &[char], from: usize, wanted: impl Fn(char) -> bool) -> usize {
    text[from..]
        .iter()
        .position(|&c| wanted(c))
        .map_or(text.len(), |offset| from + offset)
}

fn block_comment_end(text: &[char], start: usize) -> usize {
    let mut depth = 0_usize;
    let mut at = start;
    while at + 1 < text.len() {
        match (text[at], text[at + 1]) {
            ('/', '*') => depth += 1,
            ('*', '/') => depth -= 1,
            _ => {
                at += 1;
                continue;
            }
        }
        at += 2;
        if depth == 0 {
            return at;
        }
    }
    text.len()
}

fn quoted_end(text: &[char], start: usize, quote: char) -> usize {
    let mut at = start + 1;
    while at < text.len() {
        match text[at] {
            '\\' => at += 2,
            c if c == quote => return at + 1,
            _ => at += 1,
        }
    }
    text.len()
}

/// `at` is behind the `r`: hashes and a quote make it a raw string, anything else a name.
fn raw_string_end(text: &[char], at: usize) -> Option<usize> {
    let quote = find_character(text, at, |c| c != '#');
    if text.get(quote) != Some(&'"') {
        return None;
    }
    let hashes = quote - at;
    let mut end = quote + 1;
    while end < text.len() {
        end = find_character(text, end, |c| c == '"') + 1;
        if text.len() >= end + hashes && text[end..end + hashes].iter().all(|&c| c == '#') {
            return Some(end + hashes);
        }
    }
    Some(text.len())
}

/// A quote starts a character if it closes at once, else a lifetime.
fn character_end(text: &[char], at: usize) -> Option<usize> {
    match text.get(at + 1) {
        Some('\\') => Some(quoted_end(text, at, '\'')),
        Some(_) if text.get(at + 2) == Some(&'\'') => Some(at + 3),
        _ => None,
    }
}

fn is_after_word(text: &[char], at: usize) -> bool {
    at > 0 && is_word(text[at - 1])
}

fn is_word(character: char) -> bool {
    character.is_alphanumeric() || character == '_'
}

/// Where these words stand in the line as words of their own.
pub(super) fn find_word_starts(line: &str, words: &str) -> Vec<usize> {
    let stands_alone = |&(start, _): &(usize, &str)| {
        let before = line[..start].chars().next_back();
        let after = line[start + words.len()..].chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    };
    line.match_indices(words)
        .filter(stands_alone)
        .map(|(start, _)| start)
        .collect()
}

/// Whether the line has these words as words of their own.
pub(crate) fn has_word(line: &str, words: &str) -> bool {
    !find_word_starts(line, words).is_empty()
}

/// The part that ships: everything before the first `#[cfg(test)]`.
pub(crate) fn strip_tests(text: &str) -> &str {
    let mut length = 0;
    for line in text.split_inclusive('\n') {
        if line.trim_start().starts_with("#[cfg(test)]") {
            break;
        }
        length += line.len();
    }
    &text[..length]
}

/// Lines before the tests that are neither blank nor comments.
pub(crate) fn count_code_lines(text: &str) -> usize {
    let lines = strip_tests(text).lines().map(str::trim);
    let is_code = |line: &&str| !line.is_empty() && !line.starts_with("//");
    lines.filter(is_code).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn comments_and_literals_are_blanked() {
        let cases = [
            ("a // unsafe\nb", "a          \nb"),
            ("a /* x /* y */ z */ b", "a                   b"),
            (r#"f("un\"safe") + 1"#, "f(          ) + 1"),
            ("r#\"a\"b\"# + r", "         + r"),
            ("br\"x\"; bar", "     ; bar"),
            ("'a' '\\'' &'a str", "         &'a str"),
            ("for\"x\"", "for   "),
        ];
        for (text, expected) in cases {
            assert_eq!(blank_non_code(text), expected, "{text}");
        }
    }

    #[test]
    fn comments_are_blanked_beside_literals() {
        let text = "a \"// b\" // c\n/* d */ 'e'";
        assert_eq!(blank_comments(text), "a \"// b\"     \n        'e'");
    }

    #[test]
    fn blanking_preserves_line_numbers() {
        let text = "a\n/* b\nc */ d\n\"e\nf\" g\n";
        assert_eq!(blank_non_code(text).lines().count(), text.lines().count());
        assert!(
            blank_non_code(text)
                .lines()
                .nth(2)
                .is_some_and(|line| line.contains('d'))
        );
    }

    #[test]
    fn an_unfinished_literal_ends_with_the_text() {
        for text in ["\"abc", "/* abc", "r#\"abc", "'\\", "'"] {
            assert_eq!(
                blank_non_code(text).chars().count(),
                text.chars().count(),
                "{text}"
            );
        }
    }

    #[test]
    fn only_whole_words_match() {
        assert!(has_word("use rand::Rng;", "rand"));
        assert!(!has_word("operand + random", "rand"));
        assert!(has_word("Instant::now()", "Instant::now"));
        assert!(!has_word("unsafe_code", "unsafe"));
    }

    #[test]
    fn test_modules_are_cut_off() {
        assert_eq!(strip_tests("a\n#[cfg(test)]\nmod tests {}\n"), "a\n");
        assert_eq!(strip_tests("a\nb"), "a\nb");
    }
}
