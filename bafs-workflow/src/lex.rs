//! Splits text into words as a POSIX shell does (quotes, backslash, comments), each with its
//! place. It knows no statement, and it substitutes nothing.

use super::ast::Word;
use super::diagnostic::{Diagnostics, SourceLocation};

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
                Some(_) => self.take_char(text),
            }
        }
    }

    /// The character behind a backslash. An escaped `$(` stays marked, as `$$(`, because loop
    /// variables are substituted after this.
    fn escaped(&mut self, text: &mut String) {
        if self.rest.starts_with("$(") {
            text.push('$');
        }
        self.take_char(text);
    }

    fn skip_blanks(&mut self) {
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

    fn skip_comment(&mut self) {
        let length = self.rest.find('\n').unwrap_or(self.rest.len());
        self.rest = &self.rest[length..];
    }

    fn take_char(&mut self, text: &mut String) {
        text.extend(self.peek());
        self.advance();
    }

    fn advance(&mut self) {
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
