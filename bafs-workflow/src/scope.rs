//! The variables that are in force at a statement, and their substitution in words. It reads no
//! file and knows no statement.

use super::ast::Word;
use super::diagnostic::{Diagnostics, SourceLocation};
use super::limits::PAD_WIDTH_MAX;

/// The loop variables with their values, outermost first.
#[derive(Default)]
pub(super) struct VariableScope {
    bindings: Vec<(String, String)>,
}

impl VariableScope {
    /// Adds the variable of a loop, inside those that are there.
    pub(super) fn open_loop(&mut self, name: &str) {
        self.bindings.push((name.to_owned(), String::new()));
    }

    /// Gives the innermost variable its next value.
    pub(super) fn set_loop_value(&mut self, value: String) {
        if let Some(innermost) = self.bindings.last_mut() {
            innermost.1 = value;
        }
    }

    /// Removes the innermost variable.
    pub(super) fn close_loop(&mut self) {
        self.bindings.pop();
    }

    /// The place, marked when it is inside a loop.
    pub(super) fn locate(&self, at: SourceLocation) -> SourceLocation {
        SourceLocation {
            is_in_loop: !self.bindings.is_empty(),
            ..at
        }
    }

    /// All words with their variables substituted; none when one of them has an error.
    pub(super) fn substitute_all(
        &self,
        words: &[Word],
        diagnostics: &mut Diagnostics,
    ) -> Option<Vec<Word>> {
        let mut results = Vec::with_capacity(words.len());
        for word in words {
            results.push(self.substitute(word, diagnostics));
        }
        results.into_iter().collect()
    }

    fn substitute(&self, word: &Word, diagnostics: &mut Diagnostics) -> Option<Word> {
        let place = self.locate(word.location);
        if !word.text.contains('$') {
            return Some(Word {
                location: place,
                ..word.clone()
            });
        }
        let mut text = String::with_capacity(word.text.len());
        let mut rest = word.text.as_str();
        while let Some(start) = rest.find("$(") {
            let (before, reference) = rest.split_at(start);
            if let Some(before) = before.strip_suffix('$') {
                text.push_str(before);
                text.push_str("$(");
                rest = &reference[2..];
                continue;
            }
            text.push_str(before);
            let Some(end) = reference.find(')') else {
                let hint = "write $$( for a '$(' that is no variable";
                diagnostics.error_hint(place, "this '$(' is never closed", hint);
                return None;
            };
            match self.value(&reference[2..end]) {
                Ok(value) => text.push_str(&value),
                Err((message, hint)) => {
                    diagnostics.error_hint(place, message, hint);
                    return None;
                }
            }
            rest = &reference[end + 1..];
        }
        text.push_str(rest);
        Some(Word {
            text,
            location: place,
            quote: word.quote,
        })
    }

    /// The value of what stands between `$(` and `)`, or a message with a hint.
    fn value(&self, reference: &str) -> Result<String, (String, String)> {
        let (name, format) = match reference.split_once(':') {
            Some((name, format)) => (name, Some(format)),
            None => (reference, None),
        };
        let Some((_, value)) = self.bindings.iter().rev().find(|(known, _)| known == name) else {
            let known: Vec<String> = self
                .bindings
                .iter()
                .map(|(known, _)| format!("$({known})"))
                .collect();
            let hint = match known.as_slice() {
                [] => "no loop is open here; write $$( for a '$(' that is no variable".to_owned(),
                _ => format!("the variables here are {}", known.join(", ")),
            };
            return Err((format!("unknown variable '$({reference})'"), hint));
        };
        let Some(format) = format else {
            return Ok(value.clone());
        };
        let width = format
            .strip_prefix('0')
            .and_then(|digits| digits.parse::<usize>().ok());
        match width {
            Some(width) if (1..=PAD_WIDTH_MAX).contains(&width) => {
                if value.bytes().all(|byte| byte.is_ascii_digit()) {
                    return Ok(format!("{value:0>width$}"));
                }
                let hint = format!("write $({name})");
                Err((
                    format!("'{value}' is not a number, and zeros cannot pad it"),
                    hint,
                ))
            }
            _ => {
                let hint = format!("write $({name}:03) for three digits; at most {PAD_WIDTH_MAX}");
                Err((
                    format!("unknown format ':{format}' in '$({reference})'"),
                    hint,
                ))
            }
        }
    }
}
