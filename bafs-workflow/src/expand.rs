//! Runs the loops and the includes: substitutes variables and hands every statement on, turn by
//! turn. It does not know what a statement means.

use super::ast::{Keyword, Loop, Statement, SyntaxNode, Word};
use super::declarations::DeclarationBuilder;
use super::diagnostic::{Diagnostics, SourceLocation};
use super::includes::Includes;
use super::limits::{DECLARED_BYTES_MAX, LOOP_DEPTH_MAX};
use super::lists::{ListCall, Lists};
use super::parse::Parser;
use super::scope::{Value, VariableScope};
use super::sources::resolve_path;

/// There are too many statements; an error tells so.
struct TooManyStatements;

/// Takes every statement of a text, which is file 0, to `declarer`: loops unrolled, and includes in
/// their place.
pub(super) fn expand_text(
    file: &str,
    text: &str,
    declarer: &mut DeclarationBuilder<'_>,
    diagnostics: &mut Diagnostics,
) {
    let mut parser = Parser::new(0, text);
    let mut expander = Expander {
        lists: Lists::new(declarer.sources()),
        statements_max: declarer.sources().statements_max(),
        statements_left: declarer.sources().statements_max(),
        declarer,
        diagnostics,
        scope: VariableScope::default(),
        includes: Includes::new(file),
    };
    while let Some(node) = parser.next_node(expander.diagnostics) {
        if expander.node(&node).is_err() {
            expander.declarer.declarations.is_partial = true;
            return;
        }
    }
}

struct Expander<'e, 'r> {
    declarer: &'e mut DeclarationBuilder<'r>,
    diagnostics: &'e mut Diagnostics,
    scope: VariableScope,
    lists: Lists<'r>,
    includes: Includes,
    statements_max: u64,
    statements_left: u64,
}

impl Expander<'_, '_> {
    fn node(&mut self, node: &SyntaxNode) -> Result<(), TooManyStatements> {
        match node {
            SyntaxNode::Statement(statement) => self.statement(statement),
            SyntaxNode::Loop(repeated) => self.expand_loop(repeated),
        }
    }

    fn statement(&mut self, statement: &Statement) -> Result<(), TooManyStatements> {
        self.count_statement(statement.words[0].location)?;
        let words = self
            .scope
            .substitute_all(&statement.words, self.diagnostics);
        let Some(words) = words else {
            self.declarer.declarations.is_partial = true;
            return Ok(());
        };
        if statement.keyword == Keyword::Include {
            return self.include(&words);
        }
        let inline = statement.inline.as_ref();
        self.declarer.declare_statement(
            statement.keyword,
            &words,
            inline,
            &self.scope,
            self.diagnostics,
        );
        if self.declarer.bytes > DECLARED_BYTES_MAX {
            let gib = DECLARED_BYTES_MAX >> 30;
            let message = format!("loops make more than {gib} GiB of this file");
            let hint = "split the workflow into several, or put a job between many and many";
            let at = statement.words[0].location;
            self.diagnostics.error_hint(at, message, hint);
            return Err(TooManyStatements);
        }
        Ok(())
    }

    fn expand_loop(&mut self, repeated: &Loop) -> Result<(), TooManyStatements> {
        // A slip of the pen must not fill the memory before it is found.
        if least_statements(&repeated.items, &repeated.body, LOOP_DEPTH_MAX) > self.statements_left
        {
            return Err(self.refuse_more(repeated.location));
        }
        let items = self.scope.substitute_all(&repeated.items, self.diagnostics);
        if items.is_none() || repeated.items.is_empty() || repeated.variable.text.is_empty() {
            self.declarer.declarations.is_partial = true;
            return Ok(());
        }
        self.scope.open_loop(&repeated.variable.text);
        for item in items.iter().flatten() {
            if let Some(call) = ListCall::parse(item, self.diagnostics) {
                self.expand_list(repeated, item, &call)?;
                continue;
            }
            match parse_range(item, self.diagnostics) {
                Ok(None) => self.expand_iteration(repeated, Value::Text(item.text.clone()))?,
                Ok(Some((first, last))) => {
                    let item = std::slice::from_ref(item);
                    if least_statements(item, &repeated.body, LOOP_DEPTH_MAX) > self.statements_left
                    {
                        return Err(self.refuse_more(repeated.location));
                    }
                    for number in first..=last {
                        self.expand_iteration(repeated, Value::Text(number.to_string()))?;
                    }
                }
                Err(RangeError) => self.declarer.declarations.is_partial = true,
            }
        }
        self.scope.close_loop();
        Ok(())
    }

    fn expand_list(
        &mut self,
        repeated: &Loop,
        item: &Word,
        call: &ListCall<'_>,
    ) -> Result<(), TooManyStatements> {
        let directory = self.declarer.directory(item.location.file).to_owned();
        let list = self.lists.load(call, &directory, item, self.diagnostics);
        let Some(list) = list else {
            self.declarer.declarations.is_partial = true;
            return Ok(());
        };
        (0..list.len()).try_for_each(|at| self.expand_iteration(repeated, list.value(at)))
    }

    /// Takes the statements of another file, with the variables that are in force here.
    fn include(&mut self, words: &[Word]) -> Result<(), TooManyStatements> {
        let included = match words {
            [_, file] => {
                let directory = self.declarer.directory(file.location.file);
                let path = resolve_path(directory, &file.text);
                self.includes
                    .open(&path, file, self.declarer, self.diagnostics)
            }
            _ => {
                let at = words.get(2).unwrap_or(&words[0]).location;
                let hint = Keyword::Include.syntax();
                self.diagnostics
                    .error_hint(at, "'include' takes one file", hint);
                None
            }
        };
        let Some(nodes) = included else {
            self.declarer.declarations.is_partial = true;
            return Ok(());
        };
        let expanded = nodes.iter().try_for_each(|node| self.node(node));
        self.includes.close();
        expanded
    }

    fn expand_iteration(&mut self, repeated: &Loop, value: Value) -> Result<(), TooManyStatements> {
        // Turns count too, or a long loop around nothing would run for ever.
        self.count_statement(repeated.location)?;
        self.scope.set_loop_value(value);
        repeated.body.iter().try_for_each(|node| self.node(node))
    }

    fn count_statement(&mut self, at: SourceLocation) -> Result<(), TooManyStatements> {
        if self.statements_left == 0 {
            return Err(self.refuse_more(at));
        }
        self.statements_left -= 1;
        Ok(())
    }

    fn refuse_more(&mut self, at: SourceLocation) -> TooManyStatements {
        let most = self.statements_max;
        let message = format!("loops make more than {most} statements of this file");
        let hint = "split the workflow into several";
        self.diagnostics.error_hint(at, message, hint);
        TooManyStatements
    }
}

/// Statements that a loop makes at least, its turns included: those of items that are known before
/// variables have values. Loops more than `depth` levels below it do not count: a text with so many
/// is refused, and to count them at each level would take the square of their number.
fn least_statements(items: &[Word], body: &[SyntaxNode], depth: usize) -> u64 {
    let turns = items.iter().map(|item| match item.text.split_once("..") {
        _ if item.text.contains(['$', '(']) => 0,
        Some((first, last)) if item.quote.is_none() => {
            match (parse_bound(first), parse_bound(last)) {
                (Some(first), Some(last)) if first <= last => (last - first).saturating_add(1),
                _ => 0,
            }
        }
        _ => 1,
    });
    let each = body.iter().map(|node| match node {
        SyntaxNode::Statement(_) => 1,
        SyntaxNode::Loop(_) if depth == 0 => 0,
        SyntaxNode::Loop(inner) => least_statements(&inner.items, &inner.body, depth - 1),
    });
    let each = each.fold(1, u64::saturating_add);
    turns.fold(0, u64::saturating_add).saturating_mul(each)
}

/// An error was found and reported.
struct RangeError;

/// The bounds, both included, when an item of a loop is a range. A quoted item never is one.
fn parse_range(
    item: &Word,
    diagnostics: &mut Diagnostics,
) -> Result<Option<(u64, u64)>, RangeError> {
    let text = item.text.as_str();
    let Some((first, last)) = text.split_once("..").filter(|_| item.quote.is_none()) else {
        return Ok(None);
    };
    let bounds = (parse_bound(first), parse_bound(last));
    let (message, hint) = match bounds {
        (Some(first), Some(last)) if first <= last => return Ok(Some((first, last))),
        (Some(first), Some(last)) => (
            format!("the range '{text}' is empty: it ends before it begins"),
            format!("write {last}..{first}; the order of jobs comes from 'parent'"),
        ),
        _ if first.is_empty() || last.is_empty() => (
            format!("the range '{text}' has only one bound"),
            "write both bounds, without blanks: 1..64".to_owned(),
        ),
        _ if last.starts_with('=') => (
            format!("'{text}' is not a range"),
            format!("ranges include both bounds: write {first}..{}", &last[1..]),
        ),
        _ if is_padded(first) || is_padded(last) => (
            format!("the bounds of '{text}' have leading zeros"),
            format!(
                "write plain numbers, and $(name:0{}) for leading zeros",
                last.len()
            ),
        ),
        _ => (
            format!("'{text}' is not a range of whole numbers"),
            format!("write FIRST..LAST, or quote a word that contains dots: '{text}'"),
        ),
    };
    diagnostics.error_hint(item.location, message, hint);
    Err(RangeError)
}

fn parse_bound(text: &str) -> Option<u64> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    if digits && !is_padded(text) {
        text.parse().ok()
    } else {
        None
    }
}

fn is_padded(text: &str) -> bool {
    text.len() > 1 && text.starts_with('0') && text.bytes().all(|byte| byte.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sources::DescriptionSource;

    #[test]
    fn endless_loops_are_refused_before_their_first_turn() {
        let none = |path: &str| Err(path.to_owned());
        let inner = "job a$(i)_$(j) {\nexecutable = x\n}\n";
        for (outer, nested) in [
            ("1..99999999999", "1..1"),
            ("1..10000", "1..10000"),
            ("1..1", "$(i)..9999999"),
        ] {
            let text = format!("for i in {outer}\nfor j in {nested}\n{inner}end\nend\n");
            let mut diagnostics = Diagnostics::new("w.bafs");
            let source = DescriptionSource(&none);
            let mut declarer = DeclarationBuilder::new("w.bafs", &source);
            expand_text("w.bafs", &text, &mut declarer, &mut diagnostics);
            assert!(diagnostics.has_errors(), "{text}");
            assert_eq!(declarer.declarations.jobs.len(), 0, "{text}");
        }
    }

    #[test]
    fn expansion_stops_at_the_memory_limit() {
        let none = |path: &str| Err(path.to_owned());
        let text = "for i in 1..5\njob a$(i) {\nexecutable = x\n}\nend\n";
        for (bytes, jobs) in [(0, 5), (DECLARED_BYTES_MAX - 1, 1)] {
            let mut diagnostics = Diagnostics::new("w.bafs");
            let source = DescriptionSource(&none);
            let mut declarer = DeclarationBuilder::new("w.bafs", &source);
            declarer.bytes = bytes;
            expand_text("w.bafs", text, &mut declarer, &mut diagnostics);
            assert_eq!(declarer.declarations.jobs.len(), jobs);
            assert_eq!(diagnostics.has_errors(), jobs < 5);
        }
    }
}
