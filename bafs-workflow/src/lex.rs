//! Splits text into words as a POSIX shell does (quotes, backslash, comments), each with its
//! place. It knows no statement, and it substitutes nothing.

use super::ast::Word;
use super::diagnostic::{Diagnostics, SourceLocation};
use super::reference::{find_reference_end, is_call};

/// A position in a text. Cloning it is cheap and marks a point to come back to.
#[derive(Clone)]
pub(super) struct Lexer<'t> {
    rest: &'t str,
    file: u32,
    line: u32,
    column: u32,
}

impl<'t> Lexer<'t> {
    pub(super) fn new(file: u32, text: &'t str) -> Self {
        // Editors of one well-known system put a byte order mark in front of UTF-8.
        let rest = text.strip_prefix('\u{feff}').unwrap_or(text);
        Self {
            rest,
            file,
            line: 1,
            column: 1,
        }
    }

    pub(super) fn location(&self) -> SourceLocation {
        SourceLocation {
            file: self.file,
            line: self.line,
            column: self.column,
            is_in_loop: false,
        }
    }

    /// The text that is not read yet.
    pub(super) fn rest(&self) -> &'t str {
        self.rest
    }

    /// The next word of the statement as it is written; none at its end or at a comment.
    pub(super) fn raw_word(&mut self, diagnostics: &mut Diagnostics) -> Option<&'t str> {
        self.skip_blanks();
        let start = self.rest;
        match self.peek() {
            None | Some('\n' | '#') => return None,
            Some(_) => self.word(diagnostics),
        };
        Some(&start[..start.len() - self.rest.len()])
    }

    pub(super) fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    /// Moves to the first character of the next line that says something; false at the end.
    pub(super) fn skip_to_content(&mut self) -> bool {
        loop {
            self.skip_blanks();
            match self.peek() {
                None => return false,
                Some('\n') => self.advance(),
                Some('#') => self.skip_comment(),
                Some(_) => return true,
            }
        }
    }

    /// Reads `key =` when the line goes on like this; else it does not move.
    pub(super) fn key(&mut self) -> Option<Word> {
        let start = self.clone();
        let is_key = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '+' | '-');
        let length = start.rest.find(|c| !is_key(c)).unwrap_or(start.rest.len());
        self.rest = &start.rest[length..];
        self.column += length as u32;
        self.skip_blanks();
        if length == 0 || self.peek() != Some('=') {
            *self = start;
            return None;
        }
        self.advance();
        let text = start.rest[..length].to_owned();
        Some(Word {
            text,
            location: start.location(),
            quote: None,
        })
    }

    /// The words up to the end of the statement: the line and its continuations.
    pub(super) fn words(&mut self, diagnostics: &mut Diagnostics) -> Vec<Word> {
        let mut words = Vec::new();
        loop {
            self.skip_blanks();
            match self.peek() {
                None | Some('\n') => return words,
                Some('#') => self.skip_comment(),
                Some(_) => words.push(self.word(diagnostics)),
            }
        }
    }

    /// The lines between `<<NAME` and a line `NAME`, without the indentation that all of them
    /// share, as a word that has a quote when the name has one; none when no `<<` comes next.
    pub(super) fn script(&mut self, diagnostics: &mut Diagnostics) -> Option<Word> {
        self.skip_blanks();
        let open = self.location();
        let behind = self.rest.strip_prefix("<<")?;
        let line_end = behind.find('\n').unwrap_or(behind.len());
        let header = behind[..line_end].trim();
        let name = header.split(char::is_whitespace).next().unwrap_or("");
        let comment = header[name.len()..].trim_start();
        let quote = name.chars().next().filter(|c| matches!(c, '\'' | '"'));
        let inner = quote.and_then(|quote| name.strip_prefix(quote)?.strip_suffix(quote));
        let end = inner.unwrap_or(name);
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if end.is_empty()
            || !end.chars().all(is_name)
            || !(comment.is_empty() || comment.starts_with('#'))
        {
            let hint = "write 'script = <<END', the lines of the script, and a line 'END'";
            diagnostics.error_hint(
                open,
                "expected a name after '<<' and the end of the line",
                hint,
            );
        }
        self.rest = &behind[line_end..];
        self.advance();
        let start = self.location();
        let mut lines = Vec::new();
        let is_closed = loop {
            let line_end = self.rest.find('\n').unwrap_or(self.rest.len());
            let line = self.rest[..line_end].trim_end_matches('\r');
            self.rest = &self.rest[line_end..];
            if line.trim() == end {
                break true;
            }
            lines.push(line);
            if self.rest.is_empty() {
                break false;
            }
            self.advance();
        };
        if !is_closed {
            let hint = format!("end it with a line '{end}'");
            diagnostics.error_hint(open, "this script is never closed", hint);
        }
        let (text, indent) = remove_indentation(&lines);
        if text.contains('\0') {
            diagnostics.error(start, "a script contains a NUL character");
        }
        Some(Word {
            text,
            location: SourceLocation {
                column: 1 + indent as u32,
                ..start
            },
            quote,
        })
    }

    fn word(&mut self, diagnostics: &mut Diagnostics) -> Word {
        let place = self.location();
        let quote = self.peek().filter(|c| matches!(c, '\'' | '"'));
        let mut text = String::new();
        while let Some(c) = self.peek() {
            match c {
                _ if c.is_whitespace() => break,
                '\'' | '"' => self.quoted(c, &mut text, diagnostics),
                '\\' if self.skip_continuation() => {}
                '\\' => {
                    self.advance();
                    self.escaped(&mut text);
                }
                '$' if self.take_call(&mut text) => {}
                _ => self.take_char(&mut text),
            }
        }
        if text.contains('\0') {
            diagnostics.error(place, "a word contains a NUL character");
        }
        Word {
            text,
            location: place,
            quote,
        }
    }

    fn quoted(&mut self, quote: char, text: &mut String, diagnostics: &mut Diagnostics) {
        let open = self.location();
        self.advance();
        loop {
            match self.peek() {
                None | Some('\n') => {
                    let hint = format!("close it with {quote} on the same line");
                    return diagnostics.error_hint(open, "this quote is never closed", hint);
                }
                Some(c) if c == quote => return self.advance(),
                Some('\\') if quote == '"' && self.skip_continuation() => {}
                Some('\\') if quote == '"' => {
                    self.advance();
                    match self.peek() {
                        Some('$' | '`' | '"' | '\\') => self.escaped(text),
                        _ => text.push('\\'),
                    }
                }
                Some('$') if quote == '"' && self.take_call(text) => {}
                Some(_) => self.take_char(text),
            }
        }
    }

    /// Takes a whole `$(NAME(...))`, in which blanks and quotes are the function's; false when none
    /// begins here.
    fn take_call(&mut self, text: &mut String) -> bool {
        if text.ends_with('$') || !is_call(self.rest) {
            return false;
        }
        let Some(length) = find_reference_end(self.rest) else {
            return false;
        };
        text.push_str(&self.rest[..length]);
        self.column += self.rest[..length].chars().count() as u32;
        self.rest = &self.rest[length..];
        true
    }

    /// The character behind a backslash. An escaped `$(` stays marked, as `$$(`, because loop
    /// variables are substituted after this.
    fn escaped(&mut self, text: &mut String) {
        if self.rest.starts_with("$(") {
            text.push('$');
        }
        self.take_char(text);
    }

    pub(super) fn skip_blanks(&mut self) {
        while let Some(c) = self.peek() {
            let blank = c.is_whitespace() && c != '\n';
            if blank {
                self.advance();
            } else if c != '\\' || !self.skip_continuation() {
                return;
            }
        }
    }

    /// Skips a backslash that ends its line, together with the line's end. Blanks between the two
    /// cannot be seen in an editor, so they do not count.
    fn skip_continuation(&mut self) -> bool {
        let Some(behind) = self.rest.strip_prefix('\\') else {
            return false;
        };
        let behind = behind.trim_start_matches(|c: char| c.is_whitespace() && c != '\n');
        if !(behind.is_empty() || behind.starts_with('\n')) {
            return false;
        }
        self.rest = behind;
        if !behind.is_empty() {
            self.advance();
        }
        true
    }

    pub(super) fn skip_comment(&mut self) {
        let length = self.rest.find('\n').unwrap_or(self.rest.len());
        self.rest = &self.rest[length..];
    }

    fn take_char(&mut self, text: &mut String) {
        text.extend(self.peek());
        self.advance();
    }

    pub(super) fn advance(&mut self) {
        let Some(c) = self.peek() else { return };
        self.rest = &self.rest[c.len_utf8()..];
        if c == '\n' {
            self.line += 1;
            self.column = 1;
        } else {
            self.column += 1;
        }
    }
}

/// Lines as one text without their common indentation, and how many characters that is. Blank lines
/// have none.
fn remove_indentation(lines: &[&str]) -> (String, usize) {
    let blank = |c: char| c == ' ' || c == '\t';
    let contents = || lines.iter().filter(|line| !line.trim().is_empty());
    let mut common = contents().next().map_or("", |line| {
        &line[..line.len() - line.trim_start_matches(blank).len()]
    });
    for line in contents() {
        let shared = common.bytes().zip(line.bytes());
        let length = shared.take_while(|(a, b)| a == b).count();
        common = &common[..length];
    }
    let mut text = String::new();
    for line in lines {
        text.push_str(line.strip_prefix(common).unwrap_or(""));
        text.push('\n');
    }
    (text, common.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(text: &str) -> Vec<String> {
        let mut diagnostics = Diagnostics::new("test");
        let words = Lexer::new(0, text).words(&mut diagnostics);
        assert!(!diagnostics.has_errors(), "{text}");
        words.into_iter().map(|word| word.text).collect()
    }

    #[test]
    fn lexer_splits_words_like_a_shell() {
        assert_eq!(words("a 'b c' \"d 'e'\"f"), ["a", "b c", "d 'e'f"]);
        assert_eq!(
            words(r#"a\ b "c\"d\e" 'f\g' "" ''"#),
            ["a b", r#"c"d\e"#, r"f\g", "", ""]
        );
        assert_eq!(words("a#b # c"), ["a#b"]);
        assert_eq!(words("a \\\n b\\  \r\nc"), ["a", "bc"]);
        assert_eq!(words("a\u{a0}b\r\n"), ["a", "b"]);
        assert_eq!(words(r#"\$(x) "\$(x)" $(x)"#), ["$$(x)", "$$(x)", "$(x)"]);
    }

    #[test]
    fn calls_are_part_of_their_word() {
        let call = r#"a$(replace(s, "_1", '_2')).fq"#;
        assert_eq!(words(&format!("{call} b")), [call, "b"]);
        assert_eq!(words(&format!("\"{call} b\"")), [format!("{call} b")]);
        assert_eq!(words("$$(f (x) y)"), ["$$(f", "(x)", "y)"]);
        assert_eq!(words("$(i x)"), ["$(i", "x)"]);
    }

    #[test]
    fn scripts_lose_their_common_indentation() {
        let read = |text: &str| {
            let mut diagnostics = Diagnostics::new("test");
            let mut lexer = Lexer::new(0, text);
            let script = lexer.script(&mut diagnostics).expect("a script");
            assert!(!diagnostics.has_errors(), "{text}");
            (
                script.text,
                script.quote,
                script.location.column,
                lexer.line,
            )
        };
        assert_eq!(
            read(" <<END # x\n  a\n\n    b\r\n  END\nc"),
            ("a\n\n  b\n".to_owned(), None, 3, 5)
        );
        assert_eq!(read("<<'E'\n\ta\nE"), ("a\n".to_owned(), Some('\''), 2, 3));
        assert_eq!(read("<<E\nE").0, "");
    }

    #[test]
    fn lexer_keeps_positions_across_continuations() {
        let mut diagnostics = Diagnostics::new("test");
        let words = Lexer::new(0, "ä b \\\n  c").words(&mut diagnostics);
        let places: Vec<_> = words
            .iter()
            .map(|w| (w.location.line, w.location.column))
            .collect();
        assert_eq!(places, [(1, 1), (1, 3), (2, 3)]);
    }
}
