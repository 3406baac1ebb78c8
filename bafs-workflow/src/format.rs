//! The usual layout of a workflow file: indentation, one blank between words, columns below each
//! other. It changes no word, no comment and no script.

use std::collections::BTreeSet;

use super::ast::{Keyword, Word};
use super::diagnostic::{Diagnostics, WorkflowRejected};
use super::lex::Lexer;
use super::limits::LOOP_DEPTH_MAX;

/// Blanks for each level.
const INDENT: &str = "  ";

/// Deeper lines are no longer indented: no more levels than the language has, with a job in them
/// and a statement that goes on.
const INDENT_DEPTH_MAX: usize = LOOP_DEPTH_MAX + 3;

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
/// Words that cannot be told apart, such as an open quote; a text that would say something else.
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
    let formatted = write_lines(&lines);
    if !diagnostics.has_errors() && read_statements(&formatted) != read_statements(text) {
        let start = Lexer::new(0, text).location();
        let hint = "write its continued lines in another way; please report the file";
        diagnostics.error_hint(start, "the usual layout would change what it says", hint);
    }
    diagnostics.finish()?;
    Ok(formatted)
}

/// What a text says: the words of its statements with their quotes, and its scripts.
fn read_statements(text: &str) -> Vec<Vec<(String, Option<char>)>> {
    let mut diagnostics = Diagnostics::new("");
    let mut lexer = Lexer::new(0, text);
    let mut statements = Vec::new();
    while lexer.skip_to_content() {
        let key = lexer.key();
        let is_script = key.as_ref().is_some_and(is_script_key);
        let script = is_script.then(|| lexer.script(&mut diagnostics)).flatten();
        let words = match script {
            Some(script) => vec![script],
            None => lexer.words(&mut diagnostics),
        };
        let words = key.into_iter().chain(words);
        statements.push(words.map(|word| (word.text, word.quote)).collect());
    }
    statements
}

fn is_script_key(key: &Word) -> bool {
    key.text.eq_ignore_ascii_case("script")
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
        let (mut words, mut inner_lines) = (Vec::new(), BTreeSet::new());
        while let Some(word) = self.lexer.raw_word(diagnostics) {
            let begin = start.len() - self.lexer.rest().len() - word.len();
            let word = trim_continuation(word, self.lexer.rest().is_empty());
            let ends = word.match_indices('\n').map(|(at, _)| at);
            inner_lines.extend(ends.map(|at| begin + at + 1));
            words.push(word);
        }
        let end = self.lexer.rest();
        let comment = self.take_comment();
        let written = &start[..start.len() - end.len()];
        let (before, after) = self.depths(key, &words);
        self.depth = after;
        if trim_continuation(written, end.is_empty()).contains('\n') {
            return self.push_continued(start, before, &inner_lines);
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

    /// A statement over several lines: each is indented, unless it begins inside a word.
    fn push_continued(&mut self, start: &'t str, depth: usize, inner_lines: &BTreeSet<usize>) {
        let rest = self.lexer.rest();
        let whole = trim_continuation(&start[..start.len() - rest.len()], rest.is_empty());
        let mut at = 0;
        for line in whole.split('\n') {
            let is_inside = inner_lines.contains(&at);
            let text = line.trim_end_matches('\r');
            let text = if is_inside { text } else { text.trim() };
            let level = depth + if at == 0 { 0 } else { 2 };
            let kind = LineKind::Kept {
                text,
                is_indented: !is_inside,
            };
            self.push(kind, level, None);
            at += line.len() + 1;
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

/// A text without the `\` at the end of its last lines that joins it to nothing.
fn trim_continuation(mut text: &str, is_at_end_of_file: bool) -> &str {
    let mut is_at_end = is_at_end_of_file;
    loop {
        let line = text.trim_end();
        let joins = match text[line.len()..].contains('\n') {
            true => line.ends_with('\\'),
            // An even number of them says that backslashes are meant.
            false => {
                let backslashes = line.len() - line.trim_end_matches('\\').len();
                is_at_end && backslashes % 2 == 1
            }
        };
        if !joins {
            return text;
        }
        // What is in front of it is no end any more: a `\` there stands for its blank.
        is_at_end = false;
        text = &line[..line.len() - 1];
    }
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
    let indent = INDENT.repeat(line.depth.min(INDENT_DEPTH_MAX));
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
    fn continued_words_stay_whole() {
        let text = "job a {\nexecutable = sh\noutput = /w/m\\\neans.csv\n\
                    arguments = a\\ \\\nb c\\\n d\n}\n";
        let expected = "\
job a {
  executable = sh
  output = /w/m\\
eans.csv
  arguments = a\\ \\
b c\\
      d
}
";
        assert_eq!(format(text), expected);
    }

    #[test]
    fn continuation_to_nothing_joins_no_statements() {
        let expected = "job a {\n  executable = sh\n\n  arguments  = -c x\n}\n";
        let empty = "job a {\nexecutable = sh\\\n\narguments = -c x\n}\n";
        assert_eq!(format(empty), expected.replace("\n\n", "\n"));
        let comment = "job a {\nexecutable = sh\\\n # c\narguments = -c \\\n x\\\n\n}\n";
        let expected = "job a {\n  executable = sh  # c\n  arguments = -c \\\n      x\n}\n";
        assert_eq!(format(comment), expected);
        for (text, expected) in [
            ("include a\\", "include a\n"),
            ("include a\\\\", "include a\\\\\n"),
            ("include a\\\n \\\n\ninclude b\n", "include a\ninclude b\n"),
        ] {
            assert_eq!(format(text), expected);
        }
    }

    #[test]
    fn random_layout_keeps_every_statement() {
        // A linear congruential generator (Knuth, MMIX): the same texts in every run.
        let mut state = 1u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005);
            state = state.wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) as usize % below
        };
        let pieces = [
            "job a {",
            "}",
            "executable",
            "=",
            "x",
            " ",
            "  ",
            "\\\n",
            "\\ x",
            "\n",
            "\n\n",
            "# c",
            "\"a b\"",
            "'c'",
            "\"d\\\ne\"",
            "mount",
            "for i in 1..3",
            "end",
            "\\\\",
            "\t",
            "\r\n",
            "script = <<E\n  y\n E\n",
            "$(i)",
            "\u{a0}",
        ];
        for _ in 0..20_000 {
            let length = 1 + random(12);
            let text: String = (0..length).map(|_| pieces[random(pieces.len())]).collect();
            let formatted = match format_workflow("w.bafs", &text) {
                Ok(formatted) => formatted,
                // A quote that is open behind a comment, for instance.
                Err(rejected) => {
                    let told = rejected.to_string();
                    assert!(!told.contains("usual layout"), "{text:?}");
                    continue;
                }
            };
            let again = format_workflow("w.bafs", &formatted).expect("again");
            assert_eq!(again, formatted, "{text:?}");
        }
    }

    #[test]
    fn open_quotes_are_rejected() {
        assert!(format_workflow("w.bafs", "job a {\nexecutable = 'x\n}\n").is_err());
    }
}
