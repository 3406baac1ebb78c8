//! Lists that a loop goes through: the lines of a file, the rows of a table, the files that match a
//! pattern. Each is read once.

use std::collections::BTreeMap;
use std::rc::Rc;

use super::ast::Word;
use super::diagnostic::Diagnostics;
use super::glob_pattern::PathPattern;
use super::limits::{LIST_BYTES_MAX, LIST_ITEMS_MAX};
use super::sources::{Sources, resolve_path};
use super::spelling::find_nearest;

/// What makes a list of its one argument.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum ListKind {
    Lines,
    Table,
    Glob,
}

const LIST_KINDS: [(&str, ListKind); 3] = [
    ("lines", ListKind::Lines),
    ("table", ListKind::Table),
    ("glob", ListKind::Glob),
];

/// A list as it is written.
pub(super) struct ListCall<'t> {
    kind: ListKind,
    argument: &'t str,
}

/// A table with its rows in the order of its file.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) columns: Vec<String>,
    pub(super) rows: Vec<Vec<String>>,
}

/// What a list holds.
#[derive(Debug, Clone)]
pub(super) enum List {
    Texts(Rc<Vec<String>>),
    Rows(Rc<Table>),
}

/// All lists that were read.
pub(super) struct Lists<'s> {
    sources: &'s dyn Sources,
    /// None for one that cannot be read, which is told once.
    known: BTreeMap<(ListKind, String), Option<List>>,
}

/// What a list cannot be read for, and what to do about it.
type ListError = (String, String);

impl<'t> ListCall<'t> {
    /// The list that a word of a loop calls for, if it does. A quoted word never does.
    pub(super) fn parse(word: &'t Word, diagnostics: &mut Diagnostics) -> Option<Self> {
        let text = word.text.as_str();
        let (name, rest) = text.split_once('(').filter(|_| word.quote.is_none())?;
        let argument = rest.strip_suffix(')')?.trim();
        let known = LIST_KINDS.iter().find(|(known, _)| *known == name);
        if let Some(&(_, kind)) = known {
            return Some(Self { kind, argument });
        }
        if let Some(near) = find_nearest(name, LIST_KINDS.map(|(known, _)| known)) {
            let message = format!("unknown list '{name}'");
            let hint = format!("did you mean '{near}'? quote the word if it is no list");
            diagnostics.error_hint(word.location, message, hint);
        }
        None
    }
}

impl<'s> Lists<'s> {
    pub(super) fn new(sources: &'s dyn Sources) -> Self {
        Self {
            sources,
            known: BTreeMap::new(),
        }
    }

    /// The list of a call in a file of `directory`; none when it cannot be read or is empty, which
    /// is reported.
    pub(super) fn load(
        &mut self,
        call: &ListCall<'_>,
        directory: &str,
        at: &Word,
        diagnostics: &mut Diagnostics,
    ) -> Option<List> {
        let key = (call.kind, resolve_path(directory, call.argument));
        if let Some(known) = self.known.get(&key) {
            return known.clone();
        }
        let list = self.read(call, directory, &key.1);
        let list = list.map_err(|(message, hint)| {
            diagnostics.error_hint(at.location, message, hint);
        });
        let list = list.ok();
        self.known.insert(key, list.clone());
        list
    }

    fn read(&self, call: &ListCall<'_>, directory: &str, path: &str) -> Result<List, ListError> {
        let argument = call.argument;
        if argument.is_empty() {
            let hint = "write lines(\"FILE\"), table(\"FILE\") or glob(\"PATTERN\")";
            return Err(("this list has no name".to_owned(), hint.to_owned()));
        }
        let list = match call.kind {
            ListKind::Glob => List::Texts(Rc::new(self.read_glob(argument, directory)?)),
            ListKind::Lines => List::Texts(Rc::new(split_lines(&self.read_text(path)?))),
            ListKind::Table => List::Rows(Rc::new(parse_table(path, &self.read_text(path)?)?)),
        };
        let (what, advice) = match call.kind {
            ListKind::Glob => ("nothing matches", "compare the pattern with a listing"),
            ListKind::Lines => ("no line with content is in", "write one value in each line"),
            ListKind::Table => ("no row is in", "write one row below the column names"),
        };
        match list.len() {
            0 => Err((format!("{what} '{path}'"), advice.to_owned())),
            count if count > LIST_ITEMS_MAX => {
                let message = format!("'{path}' gives {count} values; a list has {LIST_ITEMS_MAX}");
                Err((message, "split the workflow into several".to_owned()))
            }
            _ => Ok(list),
        }
    }

    fn read_text(&self, path: &str) -> Result<String, ListError> {
        let hint = || "paths of lists are relative to the file that names them".to_owned();
        if path.contains("://") {
            let message = format!("'{path}' is a URL, and a list is a file beside the workflow");
            return Err((message, hint()));
        }
        let text = self.sources.read(path, LIST_BYTES_MAX);
        let text = text.map_err(|why| (format!("cannot read the list '{path}': {why}"), hint()))?;
        match text.len() > LIST_BYTES_MAX {
            true => {
                let mib = LIST_BYTES_MAX >> 20;
                Err((format!("'{path}' is larger than {mib} MiB"), hint()))
            }
            false => Ok(text),
        }
    }

    fn read_glob(&self, argument: &str, directory: &str) -> Result<Vec<String>, ListError> {
        let pattern = PathPattern::parse(argument).map_err(|why| {
            let hint = "write for example glob(\"reads/*_1.fq\")".to_owned();
            (format!("'{argument}' is no pattern: {why}"), hint)
        })?;
        let place = resolve_path(directory, &pattern.directory);
        let enters = |path: &str| pattern.enters(path);
        let listed = self.sources.list(&place, pattern.depth, &enters);
        let entries = listed.map_err(|why| {
            let shown = if place.is_empty() { "." } else { &place };
            let hint = "the part of a pattern before its first wildcard is a directory".to_owned();
            (format!("cannot list '{shown}': {why}"), hint)
        })?;
        Ok(pattern.select(entries))
    }
}

impl List {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Texts(texts) => texts.len(),
            Self::Rows(table) => table.rows.len(),
        }
    }
}

impl Table {
    /// The value of a row in a column.
    ///
    /// # Errors
    /// There is no such column; what to write instead.
    pub(super) fn value(&self, row: usize, column: &str) -> Result<&str, String> {
        if let Some(at) = self.columns.iter().position(|known| known == column) {
            return Ok(&self.rows[row][at]);
        }
        let names = || self.columns.iter().map(String::as_str);
        Err(match find_nearest(column, names()) {
            Some(near) => format!("did you mean '{near}'?"),
            None => format!("the columns are {}", names().collect::<Vec<_>>().join(", ")),
        })
    }
}

/// Lines with content; one that begins with `#` is a comment.
fn split_lines(text: &str) -> Vec<String> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let lines = text.lines().map(str::trim);
    let lines = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(str::to_owned).collect()
}

/// A table with its names in the first row: separated by commas in a `.csv` file, else by tabs.
fn parse_table(path: &str, text: &str) -> Result<Table, ListError> {
    let is_csv = path.to_ascii_lowercase().ends_with(".csv");
    let separator = if is_csv { b',' } else { b'\t' };
    let mut reader = csv::ReaderBuilder::new()
        .delimiter(separator)
        .comment(Some(b'#'))
        .trim(csv::Trim::All)
        .from_reader(text.strip_prefix('\u{feff}').unwrap_or(text).as_bytes());
    let form = || match is_csv {
        true => "columns of a .csv file are separated by commas".to_owned(),
        false => "columns are separated by tabs, or by commas in a file named .csv".to_owned(),
    };
    let wrong = |error: &csv::Error| {
        let line = error.position().map_or(1, csv::Position::line);
        let message = match error.kind() {
            csv::ErrorKind::UnequalLengths {
                expected_len, len, ..
            } => format!(
                "line {line} of '{path}' does not have {expected_len} columns as its first line \
                 has, but {len}"
            ),
            _ => format!("line {line} of '{path}' is no row of a table"),
        };
        (message, form())
    };
    let headers = reader.headers().map_err(|error| wrong(&error))?;
    let columns: Vec<String> = headers.iter().map(str::to_owned).collect();
    for (at, column) in columns.iter().enumerate() {
        if column.is_empty() || columns[..at].contains(column) {
            let message = match column.is_empty() {
                true => format!("column {} of '{path}' has no name", at + 1),
                false => format!("two columns of '{path}' are named '{column}'"),
            };
            return Err((message, "the first line names each column once".to_owned()));
        }
    }
    let mut rows = Vec::new();
    for record in reader.records() {
        let record = record.map_err(|error| wrong(&error))?;
        rows.push(record.iter().map(str::to_owned).collect());
    }
    Ok(Table { columns, rows })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_leave_out_blanks_and_comments() {
        assert_eq!(split_lines("\u{feff}a\r\n\n # b\n  c d \n"), ["a", "c d"]);
    }

    #[test]
    fn tables_are_split_by_tabs_or_commas() {
        let tabs = parse_table("s.tsv", "sample\treads\nA\t\"x\ty\"\n# no\nB\t\n").expect("rows");
        assert_eq!(tabs.columns, ["sample", "reads"]);
        assert_eq!(tabs.rows, [["A", "x\ty"], ["B", ""]]);
        let commas = parse_table("s.CSV", "a,b\n1, 2\n").expect("rows");
        assert_eq!(commas.value(0, "b"), Ok("2"));
        assert_eq!(commas.value(0, "c"), Err("the columns are a, b".to_owned()));
    }

    #[test]
    fn ragged_rows_are_named_by_their_line() {
        let (message, _) = parse_table("s.csv", "a,b\n1,2\n3\n").expect_err("ragged");
        assert!(
            message.starts_with("line 3 of 's.csv' does not have 2"),
            "{message}"
        );
        assert!(parse_table("s.csv", "a,a\n").is_err());
        assert!(parse_table("s.csv", "a,,b\n").is_err());
    }
}
