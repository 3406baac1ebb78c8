//! Text to nodes: statements, inline job bodies and loops, recovered after each error so that the
//! rest of the file is read too. What the words of a statement mean is `declarations.rs`.

use std::rc::Rc;

use super::ast::{Keyword, Loop, Statement, SyntaxNode, Word};
use super::diagnostic::{Diagnostics, SourceLocation};
use super::job_description::{DescriptionLine, DescriptionReader};
use super::keywords::KEYWORDS;
use super::lex::Lexer;
use super::limits::LOOP_DEPTH_MAX;
use super::spelling::find_nearest;

/// Reads a workflow text node by node, so that a large file is never held as nodes.
pub(super) struct Parser<'t> {
    lexer: Lexer<'t>,
    /// Loops that are open, outermost first. A stack on the heap, as a text may nest at will.
    open_loops: Vec<Loop>,
}

impl<'t> Parser<'t> {
    /// A parser of the file that is number `file` in diagnostics.
    pub(super) fn new(file: u32, text: &'t str) -> Self {
        Self {
            lexer: Lexer::new(file, text),
            open_loops: Vec::new(),
        }
    }

    /// The next statement or whole loop of the outermost level; none at the end of the text.
    pub(super) fn next_node(&mut self, diagnostics: &mut Diagnostics) -> Option<SyntaxNode> {
        while self.lexer.skip_to_content() {
            let words = self.lexer.words(diagnostics);
            let Some(keyword) = keyword(&words, diagnostics) else {
                continue;
            };
            let node = match keyword {
                Keyword::For => {
                    self.open_loop(words, diagnostics);
                    None
                }
                Keyword::End => self.close_loop(&words, diagnostics),
                _ => self.statement(keyword, words, diagnostics),
            };
            if let Some(node) = node.and_then(|node| self.attach(node)) {
                return Some(node);
            }
        }
        self.close_at_end(diagnostics)
    }

    /// Puts a node into the innermost open loop, or returns it when there is none.
    fn attach(&mut self, node: SyntaxNode) -> Option<SyntaxNode> {
        match self.open_loops.last_mut() {
            Some(outer) => {
                outer.body.push(node);
                None
            }
            None => Some(node),
        }
    }

    fn open_loop(&mut self, words: Vec<Word>, diagnostics: &mut Diagnostics) {
        let place = words[0].location;
        let mut words = words.into_iter().skip(1);
        let variable = words.next();
        let is_in = words
            .next()
            .is_some_and(|word| word.text.eq_ignore_ascii_case("in"));
        let form = Keyword::For.syntax();
        let variable = match variable {
            Some(variable) if is_in => variable,
            _ => {
                diagnostics.error_hint(place, "expected a variable and 'in' after 'for'", form);
                Word {
                    text: String::new(),
                    location: place,
                    quote: None,
                }
            }
        };
        self.check_variable(&variable, diagnostics);
        let items: Vec<Word> = words.collect();
        if is_in && items.is_empty() {
            diagnostics.error_hint(place, "this loop has no values", form);
        }
        if self.open_loops.len() == LOOP_DEPTH_MAX {
            diagnostics.error(place, format!("more than {LOOP_DEPTH_MAX} nested loops"));
        }
        self.open_loops.push(Loop {
            location: place,
            variable,
            items,
            body: Vec::new(),
        });
    }

    fn check_variable(&self, variable: &Word, diagnostics: &mut Diagnostics) {
        let name = &variable.text;
        let is_letter = |c: char| c.is_ascii_alphanumeric() || c == '_';
        if name.starts_with(|c: char| c.is_ascii_digit()) || !name.chars().all(is_letter) {
            let hint = "use letters, digits and '_', not beginning with a digit";
            let message = format!("'{name}' cannot be the name of a loop variable");
            diagnostics.error_hint(variable.location, message, hint);
        }
        let taken = |outer: &&Loop| !name.is_empty() && outer.variable.text == *name;
        if let Some(outer) = self.open_loops.iter().take(LOOP_DEPTH_MAX).find(taken) {
            let of = diagnostics.describe_location(outer.location);
            let message = format!("'{name}' is already the variable of the loop in {of}");
            diagnostics.error(variable.location, message);
        }
    }

    fn close_loop(&mut self, words: &[Word], diagnostics: &mut Diagnostics) -> Option<SyntaxNode> {
        if let Some(extra) = words.get(1) {
            let message = format!("unexpected '{}' after 'end'", extra.text);
            diagnostics.error_hint(extra.location, message, Keyword::End.syntax());
        }
        if self.open_loops.is_empty() {
            diagnostics.error(words[0].location, "'end' without 'for'");
        }
        self.pop_loop()
    }

    /// The innermost loop, unless it is nested too deep to be walked by recursion.
    fn pop_loop(&mut self) -> Option<SyntaxNode> {
        let closed = self.open_loops.pop()?;
        (self.open_loops.len() < LOOP_DEPTH_MAX).then_some(SyntaxNode::Loop(closed))
    }

    fn close_at_end(&mut self, diagnostics: &mut Diagnostics) -> Option<SyntaxNode> {
        while let Some(unclosed) = self.open_loops.last() {
            let hint = "close the loop with a line 'end'";
            diagnostics.error_hint(unclosed.location, "'for' without 'end'", hint);
            if let Some(node) = self.pop_loop().and_then(|node| self.attach(node)) {
                return Some(node);
            }
        }
        None
    }

    fn statement(
        &mut self,
        keyword: Keyword,
        mut words: Vec<Word>,
        diagnostics: &mut Diagnostics,
    ) -> Option<SyntaxNode> {
        let is_brace = |word: &Word| word.text == "{" && word.quote.is_none();
        let has_body = keyword.has_body();
        let is_bare = words.len() == 2 || words.get(2).is_some_and(|word| word.text == "from");
        let is_open = keyword == Keyword::Template || is_bare;
        if has_body && is_open && !words.last().is_some_and(is_brace) {
            self.brace_on_next_line(&mut words, diagnostics);
        }
        let inline = match words.last() {
            Some(last) if has_body && is_brace(last) => {
                Some(Rc::new(self.inline_body(last.location, diagnostics)))
            }
            _ => None,
        };
        Some(SyntaxNode::Statement(Statement {
            keyword,
            words,
            inline,
        }))
    }

    /// Some people write the brace so; there is nothing else that it could mean.
    fn brace_on_next_line(&mut self, words: &mut Vec<Word>, diagnostics: &mut Diagnostics) {
        let line_start = self.lexer.clone();
        if self.lexer.skip_to_content() && self.lexer.peek() == Some('{') {
            words.extend(self.lexer.words(diagnostics));
        } else {
            self.lexer = line_start;
        }
    }

    fn inline_body(
        &mut self,
        open: SourceLocation,
        diagnostics: &mut Diagnostics,
    ) -> super::ast::Description {
        let mut reader = DescriptionReader::default();
        loop {
            if !self.lexer.skip_to_content() {
                let hint = "close the job with a line '}'";
                diagnostics.error_hint(open, "this '{' is never closed", hint);
                break;
            }
            let line_start = self.lexer.clone();
            let DescriptionLine::Other(words) = reader.read_line(&mut self.lexer, diagnostics)
            else {
                continue;
            };
            let Some(first) = words.first() else { continue };
            if first.text == "}" {
                if let Some(extra) = words.get(1) {
                    let message = format!("unexpected '{}' after '}}'", extra.text);
                    diagnostics.error(extra.location, message);
                }
                break;
            }
            if Keyword::from_word(&first.text).is_some() {
                let job = diagnostics.describe_location(open);
                let message = format!("a statement inside the job that is opened in {job}");
                diagnostics.error_hint(
                    first.location,
                    message,
                    "close the job with a line '}' before",
                );
                self.lexer = line_start;
                break;
            }
            reader.reject_line(first, diagnostics);
        }
        reader.finish()
    }
}

/// What a statement is. A keyword with a slip of the pen is reported and then taken as what it
/// was meant to be, so that one slip does not make every later use of a name an error.
fn keyword(words: &[Word], diagnostics: &mut Diagnostics) -> Option<Keyword> {
    let first = words.first()?;
    if let Some(keyword) = Keyword::from_word(&first.text) {
        return Some(keyword);
    }
    let message = format!("unknown statement '{}'", first.text);
    let has_equals = words.get(1).is_some_and(|word| word.text.starts_with('='));
    let hint = match first.text.as_str() {
        "{" => "'{' belongs at the end of the 'job' line".to_owned(),
        "}" => "there is no '{' that this closes".to_owned(),
        text if has_equals || text.contains('=') => {
            "'key = value' lines belong between 'job NAME {' and '}'".to_owned()
        }
        text => match find_nearest(text, KEYWORDS.iter().map(|(name, _)| *name)) {
            Some(name) => {
                diagnostics.error_hint(first.location, message, format!("did you mean '{name}'?"));
                return Keyword::from_word(name);
            }
            None => {
                let names = KEYWORDS.map(|(name, _)| name);
                let (last, others) = names.split_last().unwrap_or((&"", &[]));
                format!("a line begins with {} or {last}", others.join(", "))
            }
        },
    };
    diagnostics.error_hint(first.location, message, hint);
    None
}
