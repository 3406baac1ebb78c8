//! Job templates: descriptions with declared parameters, and the jobs that are made of them.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::ast::{Description, DescriptionEntry, DescriptionKey, Word};
use super::diagnostic::{Diagnostics, SourceLocation};
use super::spelling::find_nearest;
use super::word_cursor::{ParseResult, ReportedError, WordCursor};

/// All templates that were declared so far, by name.
#[derive(Default)]
pub(super) struct Templates {
    known: BTreeMap<String, Rc<Template>>,
}

/// A job description with parameters.
pub(super) struct Template {
    location: SourceLocation,
    /// Each with its default, in the order of declaration.
    parameters: Vec<(String, Option<String>)>,
    pub(super) description: Rc<Description>,
}

/// A template with the values of its parameters.
pub(super) struct TemplateUse {
    pub(super) template: Rc<Template>,
    pub(super) values: Vec<(String, String)>,
}

impl Templates {
    /// Takes a `template` statement.
    pub(super) fn declare(
        &mut self,
        cursor: &mut WordCursor<'_, '_>,
        inline: Option<&Rc<Description>>,
        is_in_loop: bool,
    ) -> ParseResult<()> {
        let name = cursor.name("a template's name")?;
        let Some(description) = inline else {
            let last = cursor.words[cursor.words.len() - 1].location;
            return cursor.reject(last, "expected '{' at the end of the line".to_owned());
        };
        let mut parameters = Vec::new();
        for word in &cursor.words[2..cursor.words.len() - 1] {
            let (parameter, default) = match word.text.split_once('=') {
                Some((parameter, default)) => (parameter, Some(default.to_owned())),
                None => (word.text.as_str(), None),
            };
            check_parameter(parameter, word, &parameters, cursor)?;
            parameters.push((parameter.to_owned(), default));
        }
        if is_in_loop {
            let hint = "declare it before the loop, with the loop variable as a parameter";
            let message = format!("the template '{}' is inside a loop", name.text);
            cursor.diagnostics.error_hint(name.location, message, hint);
            return Err(ReportedError);
        }
        if let Some(first) = self.known.get(&name.text) {
            let before = cursor.diagnostics.describe_location(first.location);
            let message = format!(
                "template '{}' is declared twice, first in {before}",
                name.text
            );
            cursor.diagnostics.error(name.location, message);
            return Err(ReportedError);
        }
        let template = Template {
            location: name.location,
            parameters,
            description: Rc::clone(description),
        };
        self.known.insert(name.text, Rc::new(template));
        Ok(())
    }

    /// Reads what follows `from` in a job statement, up to the word at `end`.
    pub(super) fn find_use(
        &self,
        cursor: &mut WordCursor<'_, '_>,
        end: usize,
    ) -> ParseResult<TemplateUse> {
        let name = cursor.word("a template")?;
        let Some(template) = self.known.get(&name.text) else {
            let message = format!("unknown template '{}'", name.text);
            let names = self.known.keys().map(String::as_str);
            let hint = match find_nearest(&name.text, names) {
                Some(near) => format!("did you mean '{near}'?"),
                None => format!("declare it above with 'template {} {{'", name.text),
            };
            cursor.diagnostics.error_hint(name.location, message, hint);
            return Err(ReportedError);
        };
        let given = cursor.words.get(cursor.next..end).unwrap_or_default();
        cursor.next = end;
        let values = template.bind(&name, given, cursor.diagnostics)?;
        Ok(TemplateUse {
            template: Rc::clone(template),
            values,
        })
    }
}

impl Template {
    fn bind(
        &self,
        name: &Word,
        given: &[Word],
        diagnostics: &mut Diagnostics,
    ) -> ParseResult<Vec<(String, String)>> {
        let mut values: Vec<(String, String)> = Vec::new();
        let mut is_right = true;
        for word in given {
            let (parameter, value) = word.text.split_once('=').unwrap_or((&word.text, ""));
            let is_known = self.parameters.iter().any(|(known, _)| known == parameter);
            let message = if !word.text.contains('=') {
                format!("expected PARAMETER=VALUE, not '{}'", word.text)
            } else if !is_known {
                format!("template '{}' has no parameter '{parameter}'", name.text)
            } else if values.iter().any(|(other, _)| other == parameter) {
                format!("the parameter '{parameter}' is given twice")
            } else {
                values.push((parameter.to_owned(), value.to_owned()));
                continue;
            };
            is_right = false;
            let hint = self.describe_parameters(parameter);
            diagnostics.error_hint(word.location, message, hint);
        }
        for (parameter, default) in &self.parameters {
            if values.iter().any(|(given, _)| given == parameter) {
                continue;
            }
            match default {
                Some(default) => values.push((parameter.clone(), default.clone())),
                None if is_right => {
                    let message =
                        format!("template '{}' needs the parameter '{parameter}'", name.text);
                    let hint = format!("add {parameter}=VALUE");
                    diagnostics.error_hint(name.location, message, hint);
                    return Err(ReportedError);
                }
                None => {}
            }
        }
        is_right.then_some(values).ok_or(ReportedError)
    }

    fn describe_parameters(&self, meant: &str) -> String {
        let names = || self.parameters.iter().map(|(name, _)| name.as_str());
        match find_nearest(meant, names()) {
            Some(near) if near != meant => format!("did you mean '{near}'?"),
            _ if self.parameters.is_empty() => "it takes no parameters".to_owned(),
            _ => format!(
                "its parameters are {}",
                names().collect::<Vec<_>>().join(", ")
            ),
        }
    }
}

/// The entries of a template that a job's own do not replace, then those. A program replaces a
/// script, and a script a program.
pub(super) fn merge_entries<'d>(
    template: &'d Description,
    own: Option<&'d Description>,
) -> Vec<&'d DescriptionEntry> {
    let own = own.map_or(&[][..], |own| own.entries.as_slice());
    let has = |key| own.iter().any(|entry| entry.key == key);
    let is_replaced = |entry: &&DescriptionEntry| match entry.key {
        DescriptionKey::Executable if has(DescriptionKey::Script) => true,
        DescriptionKey::Script | DescriptionKey::Interpreter if has(DescriptionKey::Executable) => {
            true
        }
        key => has(key),
    };
    let kept = template.entries.iter().filter(|entry| !is_replaced(entry));
    kept.chain(own).collect()
}

fn check_parameter(
    parameter: &str,
    word: &Word,
    known: &[(String, Option<String>)],
    cursor: &mut WordCursor<'_, '_>,
) -> ParseResult<()> {
    let is_letter = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let begins = parameter.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    if !(begins && parameter.chars().all(is_letter)) {
        let message = format!("'{parameter}' cannot be the name of a parameter");
        return cursor.reject(word.location, message);
    }
    if known.iter().any(|(other, _)| other == parameter) {
        let message = format!("the parameter '{parameter}' is declared twice");
        return cursor.reject(word.location, message);
    }
    Ok(())
}
