//! The usual layout of a workflow file: indentation, one blank between words, columns below each
//! other. It changes no word, no comment and no script.

use super::ast::Keyword;
use super::diagnostic::{Diagnostics, WorkflowRejected};
use super::lex::Lexer;

/// Blanks for each level.
const INDENT: &str = "  ";

/// Blanks before a comment behind a statement.
const COMMENT_GAP: usize = 2;

/// A longer word widens no column.
const COLUMN_WIDTH_MAX: usize = 40;

/// A comment behind a longer line stands apart from those of its neighbours.
const LINE_WIDTH_MAX: usize = 100;

/// A line of the result.
struct Line<'t> {
    kind: LineKind<'t>,
    depth: usize,
    /// With its `#`.
    comment: Option<&'t str>,
}

enum LineKind<'t> {
    Blank,
    /// A comment alone.
    Comment,
    /// Words, of which the first ones stand in columns.
    Statement {
        words: Vec<&'t str>,
        columns: usize,
    },
    /// A key with what follows the `=`.
    Entry {
        key: &'t str,
        values: Vec<&'t str>,
    },
    /// Text that stays as it is, depth apart when it says so.
    Kept {
        text: &'t str,
        is_indented: bool,
    },
}

/// A workflow or description file in the usual layout. Its meaning is the same.
///
/// # Errors
/// Words that cannot be told apart, such as an open quote.
pub fn format_workflow(file: &str, text: &str) -> Result<String, WorkflowRejected> {
    let mut diagnostics = Diagnostics::new(file);
    let mut reader = LineReader {
        lexer: Lexer::new(0, text),
        depth: 0,
        lines: Vec::new(),
    };
    while !reader.lexer.rest().is_empty() {
        reader.read_line(&mut diagnostics);
    }
    let lines = reader.lines;
    diagnostics.finish()?;
    Ok(write_lines(&lines))
}

struct LineReader<'t> {
    lexer: Lexer<'t>,
    depth: usize,
    lines: Vec<Line<'t>>,
}

impl<'t> LineReader<'t> {
    fn read_line(&mut self, diagnostics: &mut Diagnostics) {
        let start = self.lexer.rest();
        self.lexer.skip_blanks();
        let content = self.lexer.rest();
        let begins_later = start[..start.len() - content.len()].contains('\n');
        match self.lexer.peek() {
            // A lone `\` at the end of a line: nothing is lost with it.
            _ if begins_later => {}
            None | Some('\n') => self.push(LineKind::Blank, self.depth, None),
            Some('#') => {
                let comment = self.take_comment();
                self.push(LineKind::Comment, self.depth, comment);
            }
            Some(_) => self.read_statement(diagnostics),
        }
        if self.lexer.peek() == Some('\n') {
            self.lexer.advance();
        }
    }

    fn push(&mut self, kind: LineKind<'t>, depth: usize, comment: Option<&'t str>) {
        self.lines.push(Line {
            kind,
            depth,
            comment,
        });
    }

    fn read_statement(&mut self, diagnostics: &mut Diagnostics) {
        let start = self.lexer.rest();
        let key = self.lexer.key().map(|word| &start[..word.text.len()]);
        if key.is_some_and(|key| key.eq_ignore_ascii_case("script")) {
            let header = self.lexer.clone();
            if self.lexer.script(diagnostics).is_some() {
                return self.push_script(key, header.rest());
            }
        }
        let mut words = Vec::new();
        while let Some(word) = self.lexer.raw_word(diagnostics) {
            words.push(word);
        }
        let end = self.lexer.rest();
        let comment = self.take_comment();
        let written = &start[..start.len() - end.len()];
        let (before, after) = self.depths(key, &words);
        self.depth = after;
        if written.trim_end().contains('\n') {
            return self.push_continued(start, before);
        }
        let kind = match key {
            Some(key) => LineKind::Entry { key, values: words },
            None => {
                let columns = column_count(words[0]);
                LineKind::Statement { words, columns }
            }
        };
        self.push(kind, before, comment);
    }

    /// Levels of a line and of those after it.
    fn depths(&self, key: Option<&str>, words: &[&str]) -> (usize, usize) {
        let (first, last) = (words.first().copied(), words.last().copied());
        let keyword = first.and_then(Keyword::from_word).filter(|_| key.is_none());
        let closes = keyword == Some(Keyword::End) || (key.is_none() && first == Some("}"));
        let opens = keyword == Some(Keyword::For) || (key.is_none() && last == Some("{"));
        let before = self.depth.saturating_sub(usize::from(closes));
        (before, before + usize::from(opens))
    }

    /// A statement over several lines: each is indented, unless a quote goes on in it.
    fn push_continued(&mut self, start: &'t str, depth: usize) {
        let whole = &start[..start.len() - self.lexer.rest().len()];
        let mut is_first = true;
        let mut quote = None;
        for line in whole.split('\n') {
            let is_inside = quote.is_some();
            quote = open_quote(line, quote);
            let text = line.trim_end_matches('\r');
            let text = if is_inside { text } else { text.trim() };
            let level = depth + if is_first { 0 } else { 2 };
            let kind = LineKind::Kept {
                text,
                is_indented: !is_inside,
            };
            self.push(kind, level, None);
            is_first = false;
        }
    }

    fn push_script(&mut self, key: Option<&'t str>, after_key: &'t str) {
        let whole = &after_key[..after_key.len() - self.lexer.rest().len()];
        let mut lines = whole.split('\n');
        let header = lines.next().unwrap_or("").trim();
        let entry = LineKind::Entry {
            key: key.unwrap_or("script"),
            values: vec![header],
        };
        self.push(entry, self.depth, None);
        let mut rest: Vec<&str> = lines.collect();
        let end = rest.pop().unwrap_or("");
        for text in rest {
            let kind = LineKind::Kept {
                text: text.trim_end_matches('\r'),
                is_indented: false,
            };
            self.push(kind, 0, None);
        }
        let end = LineKind::Kept {
            text: end.trim(),
            is_indented: true,
        };
        self.push(end, self.depth, None);
    }

    fn take_comment(&mut self) -> Option<&'t str> {
        let start = self.lexer.rest();
        self.lexer.skip_comment();
        let comment = start[..start.len() - self.lexer.rest().len()].trim_end();
        Some(comment).filter(|comment| comment.starts_with('#'))
    }
}

/// Words of a statement, its keyword among them, that stand below those of its neighbours.
fn column_count(keyword: &str) -> usize {
    match Keyword::from_word(keyword) {
        Some(Keyword::Mount | Keyword::Extract) => 3,
        Some(Keyword::Volume | Keyword::Retry | Keyword::Share | Keyword::Root) => 2,
        _ => 1,
    }
}

/// The quote that is open after a line which begins inside `open`.
fn open_quote(line: &str, mut open: Option<char>) -> Option<char> {
    let mut characters = line.chars();
    while let Some(c) = characters.next() {
        match (c, open) {
            ('\\', None | Some('"')) => _ = characters.next(),
            ('\'' | '"', None) => open = Some(c),
            (_, Some(quote)) if c == quote => open = None,
            _ => {}
        }
    }
    open
}

fn write_lines(lines: &[Line<'_>]) -> String {
    let mut texts: Vec<String> = Vec::with_capacity(lines.len());
    let mut at = 0;
    while at < lines.len() {
        let length = run_length(&lines[at..]);
        let run = &lines[at..at + length];
        let widths = column_widths(run);
        texts.extend(run.iter().map(|line| write_line(line, &widths)));
        at += length;
    }
    add_comments(lines, &mut texts);
    let mut result = String::new();
    let mut blanks = 0;
    for (line, text) in lines.iter().zip(&texts) {
        let is_script = matches!(
            line.kind,
            LineKind::Kept {
                is_indented: false,
                ..
            }
        );
        if text.is_empty() && !is_script {
            blanks = 1;
            continue;
        }
        if blanks > 0 && !result.is_empty() {
            result.push('\n');
        }
        blanks = 0;
        result += text;
        result.push('\n');
    }
    result
}

/// How many lines from the first one on have their columns in common.
fn run_length(lines: &[Line<'_>]) -> usize {
    let first = &lines[0];
    let mut length = 1;
    for line in &lines[1..] {
        let is_alike = match (&first.kind, &line.kind) {
            (LineKind::Entry { .. }, LineKind::Entry { .. }) => true,
            // Part of a script or of a long entry, whose neighbours are one group with it.
            (LineKind::Entry { .. }, LineKind::Kept { .. } | LineKind::Comment) => true,
            (LineKind::Statement { words: a, columns }, LineKind::Statement { words: b, .. }) => {
                *columns > 1 && a[0].eq_ignore_ascii_case(b[0])
            }
            _ => false,
        };
        if !is_alike || (line.depth != first.depth && !matches!(line.kind, LineKind::Kept { .. })) {
            break;
        }
        length += 1;
    }
    length
}

fn column_widths(run: &[Line<'_>]) -> Vec<usize> {
    let mut widths: Vec<usize> = Vec::new();
    for line in run {
        let words: Vec<&str> = match &line.kind {
            LineKind::Entry { key, .. } => vec![key],
            LineKind::Statement { words, columns } => {
                words.iter().copied().take(*columns).collect()
            }
            _ => continue,
        };
        for (at, word) in words.iter().enumerate() {
            let width = Some(word.chars().count()).filter(|width| *width <= COLUMN_WIDTH_MAX);
            let width = width.unwrap_or(0);
            match widths.get_mut(at) {
                Some(known) => *known = width.max(*known),
                None => widths.push(width),
            }
        }
    }
    widths
}

fn write_line(line: &Line<'_>, widths: &[usize]) -> String {
    let indent = INDENT.repeat(line.depth);
    let text = match &line.kind {
        LineKind::Blank => String::new(),
        LineKind::Comment => format!("{indent}{}", line.comment.unwrap_or("")),
        LineKind::Kept { text, is_indented } => match is_indented {
            true => format!("{indent}{text}"),
            false => return (*text).to_owned(),
        },
        LineKind::Entry { key, values } => {
            let width = widths.first().copied().unwrap_or(0);
            format!("{indent}{} = {}", pad(key, width), values.join(" "))
        }
        LineKind::Statement { words, .. } => {
            let mut text = indent;
            for (at, word) in words.iter().enumerate() {
                let width = widths.get(at).copied().unwrap_or(0);
                text += &pad(word, width);
                text.push(' ');
            }
            text
        }
    };
    text.trim_end().to_owned()
}

/// A text with blanks up to a width.
fn pad(text: &str, width: usize) -> String {
    let blanks = width.saturating_sub(text.chars().count());
    format!("{text}{}", " ".repeat(blanks))
}

/// Puts the comments of neighbouring lines below each other.
fn add_comments(lines: &[Line<'_>], texts: &mut [String]) {
    let comment = |at: usize| match &lines[at].kind {
        LineKind::Comment => None,
        _ => lines[at].comment,
    };
    let mut at = 0;
    while at < lines.len() {
        let end = (at..lines.len()).find(|&next| comment(next).is_none());
        let end = end.unwrap_or(lines.len());
        let widths = texts[at..end].iter().map(|text| text.chars().count());
        let width = widths.filter(|width| *width <= LINE_WIDTH_MAX).max();
        let width = width.unwrap_or(0) + COMMENT_GAP;
        for (next, text) in texts.iter_mut().enumerate().take(end).skip(at) {
            let padded = pad(text, width.max(text.chars().count() + COMMENT_GAP));
            *text = padded + comment(next).unwrap_or("");
        }
        at = end + 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn format(text: &str) -> String {
        let formatted = format_workflow("w.bafs", text).expect("it is right");
        assert_eq!(
            format_workflow("w.bafs", &formatted).expect("again"),
            formatted
        );
        formatted
    }

    #[test]
    fn statements_stand_in_columns() {
        let text = "\n\nfor i   in 1..3 # turns\nvolume a$(i) scratch 1 MB#x\n\
                    mount  a$(i) j /w  # one\n\
                    mount longer$(i) job-2  /w ro # two\n\n\n\njob j {\nexecutable=sh\n\
                    arguments = -c 'a  b'   \"c d\"\n} \nend\n\n";
        let expected = "\
for i in 1..3  # turns
  volume a$(i) scratch 1 MB#x
  mount a$(i)      j     /w     # one
  mount longer$(i) job-2 /w ro  # two

  job j {
    executable = sh
    arguments  = -c 'a  b' \"c d\"
  }
end
";
        assert_eq!(format(text), expected);
    }

    #[test]
    fn scripts_and_quotes_stay_as_they_are() {
        let text = "job a {\n# why\nscript = <<END   # here\n    if x\n\n\n\
                    \x20 then\t \nEND\nretry=1\n\
                    arguments = a \\\n b \"c \\\n   d\" \\\n  e\n}\n";
        let expected = "\
job a {
  # why
  script = <<END   # here
    if x


  then\t\x20
  END
  retry  = 1
  arguments = a \\
      b \"c \\
   d\" \\
      e
}
";
        assert_eq!(format(text), expected);
    }

    #[test]
    fn open_quotes_are_rejected() {
        assert!(format_workflow("w.bafs", "job a {\nexecutable = 'x\n}\n").is_err());
    }
}
