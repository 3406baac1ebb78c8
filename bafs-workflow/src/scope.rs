//! The variables that are in force at a statement, and their substitution in words and scripts. It
//! reads no file and knows no statement.

use std::rc::Rc;

use super::ast::Word;
use super::diagnostic::{Diagnostics, SourceLocation};
use super::limits::PAD_WIDTH_MAX;
use super::lists::{List, Table};
use super::reference::{
    Expression, ReferenceError, find_reference_end, is_plain_variable, parse_reference, root_name,
};
use super::spelling::find_nearest;

/// What a variable stands for.
#[derive(Debug, Clone)]
pub(super) enum Value {
    Text(String),
    /// A row of a table, by its position.
    Row(Rc<Table>, usize),
}

/// The variables with their values: those of loops, outermost first, then a template's parameters.
#[derive(Default, Clone)]
pub(super) struct VariableScope {
    bindings: Vec<(String, Value)>,
}

/// Whose words are substituted.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Notation {
    /// Every `$(` is a reference.
    Words,
    /// A `$(` without a known variable belongs to the shell.
    Script,
}

impl VariableScope {
    /// Adds the variable of a loop, inside those that are there.
    pub(super) fn open_loop(&mut self, name: &str) {
        let none = Value::Text(String::new());
        self.bindings.push((name.to_owned(), none));
    }

    /// Gives the innermost variable its next value.
    pub(super) fn set_loop_value(&mut self, value: Value) {
        if let Some(innermost) = self.bindings.last_mut() {
            innermost.1 = value;
        }
    }

    /// Removes the innermost variable.
    pub(super) fn close_loop(&mut self) {
        self.bindings.pop();
    }

    /// Whether any variable is in force.
    pub(super) fn is_empty(&self) -> bool {
        self.bindings.is_empty()
    }

    /// The same with more variables, which win over those of the same name.
    pub(super) fn with_parameters(&self, parameters: Vec<(String, String)>) -> Self {
        let mut bindings = self.bindings.clone();
        let texts = parameters.into_iter();
        bindings.extend(texts.map(|(name, text)| (name, Value::Text(text))));
        Self { bindings }
    }

    /// The place, marked when it is inside a loop.
    pub(super) fn locate(&self, at: SourceLocation) -> SourceLocation {
        SourceLocation {
            is_in_loop: at.is_in_loop || !self.bindings.is_empty(),
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
            results.push(self.substitute(word, Notation::Words, diagnostics));
        }
        results.into_iter().collect()
    }

    /// A script with its variables substituted, unless its end is quoted; none when one of them has
    /// an error.
    pub(super) fn substitute_script(
        &self,
        script: &Word,
        diagnostics: &mut Diagnostics,
    ) -> Option<Word> {
        match script.quote {
            Some(_) => Some(script.clone()),
            None => self.substitute(script, Notation::Script, diagnostics),
        }
    }

    fn substitute(
        &self,
        word: &Word,
        notation: Notation,
        diagnostics: &mut Diagnostics,
    ) -> Option<Word> {
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
            let consumed = word.text.len() - reference.len();
            let at = match notation {
                Notation::Words => place,
                Notation::Script => locate_in_text(place, &word.text[..consumed]),
            };
            let found = match notation {
                Notation::Words => self.reference_of_words(reference),
                Notation::Script => self.reference_of_script(reference),
            };
            match found {
                Ok(Some((value, length))) => {
                    text.push_str(&value);
                    rest = &reference[length..];
                }
                Ok(None) => {
                    text.push_str("$(");
                    rest = &reference[2..];
                }
                Err((message, hint)) => {
                    diagnostics.error_hint(at, message, hint);
                    return None;
                }
            }
        }
        text.push_str(rest);
        Some(Word {
            text,
            location: place,
            quote: word.quote,
        })
    }

    /// The value of the reference that a text begins with, and the reference's length.
    fn reference_of_words(&self, text: &str) -> Result<Option<(String, usize)>, ReferenceError> {
        let Some(length) = find_reference_end(text) else {
            let hint = "write $$( for a '$(' that is no variable".to_owned();
            return Err(("this '$(' is never closed".to_owned(), hint));
        };
        Ok(Some((self.value(&text[2..length - 1])?, length)))
    }

    /// The same in a script; none of what belongs to the shell. What is nearly a variable is an
    /// error: a shell would put nothing in its place.
    fn reference_of_script(&self, text: &str) -> Result<Option<(String, usize)>, ReferenceError> {
        let Some(length) = find_reference_end(text) else {
            return Ok(None);
        };
        let inside = &text[2..length - 1];
        let Some(root) = root_name(inside) else {
            return Ok(None);
        };
        let is_known = self.bindings.iter().any(|(name, _)| name == root);
        let is_call = super::reference::is_call(text);
        if is_known && (is_call || is_plain_variable(inside)) {
            return Ok(Some((self.value(inside)?, length)));
        }
        let names = self.bindings.iter().map(|(name, _)| name.as_str());
        match find_nearest(root, names).filter(|_| is_call || is_plain_variable(inside)) {
            Some(near) if near != root => {
                let message = format!("'$({inside})' is no variable, but nearly one");
                let hint =
                    format!("did you mean '$({near})'? write $$( for a command of the shell");
                Err((message, hint))
            }
            _ => Ok(None),
        }
    }

    /// The value of what stands between `$(` and `)`, or a message with a hint.
    fn value(&self, inside: &str) -> Result<String, ReferenceError> {
        let reference = parse_reference(inside)?;
        let value = self.evaluate(&reference.expression, inside)?;
        let Some(format) = reference.format else {
            return Ok(value);
        };
        let name = inside.strip_suffix(format).unwrap_or(inside);
        let name = name.strip_suffix(':').unwrap_or(name);
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
                Err((format!("unknown format ':{format}' in '$({inside})'"), hint))
            }
        }
    }

    fn evaluate(&self, expression: &Expression<'_>, whole: &str) -> Result<String, ReferenceError> {
        match expression {
            Expression::Text(text) => Ok((*text).to_owned()),
            Expression::Variable { name, column } => self.variable(name, *column, whole),
            Expression::Call {
                function,
                arguments,
            } => {
                let mut words = Vec::with_capacity(arguments.len());
                for argument in arguments {
                    words.push(self.evaluate(argument, whole)?);
                }
                Ok((function.apply)(&words))
            }
        }
    }

    fn variable(
        &self,
        name: &str,
        column: Option<&str>,
        whole: &str,
    ) -> Result<String, ReferenceError> {
        let Some((_, value)) = self.bindings.iter().rev().find(|(known, _)| known == name) else {
            return Err((format!("unknown variable '$({whole})'"), self.known_names()));
        };
        match (value, column) {
            (Value::Text(text), None) => Ok(text.clone()),
            (Value::Row(table, row), Some(column)) => {
                let found = table.value(*row, column).map(str::to_owned);
                found.map_err(|hint| (format!("no column '{column}' in the table"), hint))
            }
            (Value::Row(table, _), None) => {
                let first = table.columns.first().map_or("", String::as_str);
                Err((
                    format!("'{name}' is a row of a table, and no text"),
                    format!("name a column, such as $({name}.{first})"),
                ))
            }
            (Value::Text(_), Some(column)) => Err((
                format!("'{name}' is no row of a table, so it has no column '{column}'"),
                format!("write $({name}), or take its values from table(\"FILE\")"),
            )),
        }
    }

    fn known_names(&self) -> String {
        let known: Vec<String> = self
            .bindings
            .iter()
            .map(|(known, _)| format!("$({known})"))
            .collect();
        match known.as_slice() {
            [] => "no loop is open here; write $$( for a '$(' that is no variable".to_owned(),
            _ => format!("the variables here are {}", known.join(", ")),
        }
    }
}

impl List {
    /// The value at a position.
    pub(super) fn value(&self, at: usize) -> Value {
        match self {
            Self::Texts(texts) => Value::Text(texts[at].clone()),
            Self::Rows(table) => Value::Row(Rc::clone(table), at),
        }
    }
}

/// The place behind a part of a text that begins at `start`.
fn locate_in_text(start: SourceLocation, before: &str) -> SourceLocation {
    let lines = before.matches('\n').count() as u32;
    let last = before.rsplit('\n').next().unwrap_or("");
    SourceLocation {
        line: start.line + lines,
        column: start.column + last.chars().count() as u32,
        ..start
    }
}
