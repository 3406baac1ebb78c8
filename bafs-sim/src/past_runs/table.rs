//! Text tables with a header: rows, named columns, and errors that name both. Knows no column.

use std::borrow::Cow;
use std::collections::BTreeMap;

use bafs_workflow::{QuantityError, parse_duration, parse_size};

use super::{JOBS_MAX, PastError};

/// Rows of a table at most: an accounting has a few for each job.
const ROWS_MAX: usize = 8 * JOBS_MAX;

/// How cells are separated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TableFormat {
    /// By `|`, which no cell may hold.
    BarSeparated,
    /// By commas; a cell in double quotes may contain commas, and a doubled quote is one quote.
    CommaSeparated,
}

/// A table whose first line names its columns.
#[derive(Debug)]
pub(super) struct TextTable<'t> {
    /// The line of the header.
    header_line: usize,
    columns: BTreeMap<String, usize>,
    rows: Vec<(usize, Vec<Cow<'t, str>>)>,
}

/// One row.
#[derive(Debug, Clone, Copy)]
pub(super) struct Row<'t> {
    /// Its line in the file, from 1 on.
    pub(super) line: usize,
    columns: &'t BTreeMap<String, usize>,
    cells: &'t [Cow<'t, str>],
}

impl<'t> TextTable<'t> {
    /// Splits a text. Empty lines are ignored; every row has as many cells as the first.
    pub(super) fn parse(text: &'t str, form: TableFormat) -> Result<Self, PastError> {
        let text = text.strip_prefix('\u{feff}').unwrap_or(text);
        let lines = text.lines().enumerate().map(|(at, line)| (at + 1, line));
        let mut lines = lines.filter(|(_, line)| !line.trim().is_empty());
        let Some((first, head)) = lines.next() else {
            let message = "the file is empty; its first line must name the columns";
            return Err(PastError::Unusable(message.to_owned()));
        };
        let mut names = split_cells(first, head, form)?;
        // `--parsable` ends each line with a bar, `--parsable2` does not.
        let ends_with_bar = form == TableFormat::BarSeparated && head.ends_with('|');
        names.truncate(names.len() - usize::from(ends_with_bar));
        let mut columns = BTreeMap::new();
        for (at, name) in names.iter().enumerate() {
            if columns.insert(name.trim().to_owned(), at).is_some() {
                let message = format!("duplicate column '{name}'");
                return Err(PastError::at_line(first, message));
            }
        }
        let mut rows = Vec::new();
        for (line, text) in lines {
            let mut cells = split_cells(line, text, form)?;
            if ends_with_bar && text.ends_with('|') {
                cells.pop();
            }
            if cells.len() != names.len() {
                let message = format!(
                    "has {} cells, but the header names {}",
                    cells.len(),
                    names.len()
                );
                return Err(PastError::at_line(line, message));
            }
            if rows.len() == ROWS_MAX {
                let message = format!("is row {}; the limit is {ROWS_MAX}", ROWS_MAX + 1);
                return Err(PastError::at_line(line, message));
            }
            rows.push((line, cells));
        }
        Ok(Self {
            header_line: first,
            columns,
            rows,
        })
    }

    /// The names of the columns.
    pub(super) fn columns(&self) -> impl Iterator<Item = &str> {
        self.columns.keys().map(String::as_str)
    }

    pub(super) fn has_column(&self, column: &str) -> bool {
        self.columns.contains_key(column)
    }

    /// An error in the header.
    pub(super) fn header_error(&self, message: impl Into<String>) -> PastError {
        PastError::at_line(self.header_line, message)
    }

    /// Rejects columns that are not `known`, and a table without all `needed` columns.
    pub(super) fn check_columns(&self, known: &[&str], needed: &[&str]) -> Result<(), PastError> {
        if let Some(unknown) = self.columns().find(|name| !known.contains(name)) {
            let known = known.join(", ");
            let message = format!("unknown column '{unknown}'; the columns are {known}");
            return Err(self.header_error(message));
        }
        match needed.iter().find(|needed| !self.has_column(needed)) {
            Some(missing) => {
                let message = format!("the column '{missing}' is missing");
                Err(self.header_error(message))
            }
            None => Ok(()),
        }
    }

    pub(super) fn rows(&self) -> impl Iterator<Item = Row<'_>> {
        self.rows.iter().map(|(line, cells)| Row {
            line: *line,
            columns: &self.columns,
            cells,
        })
    }
}

impl<'t> Row<'t> {
    /// The trimmed cell of a column; empty without such a column.
    pub(super) fn text(&self, column: &str) -> &'t str {
        let cell = self.columns.get(column).map(|at| &self.cells[*at]);
        cell.map_or("", |cell| cell.trim())
    }

    pub(super) fn error(&self, column: &str, why: impl std::fmt::Display) -> PastError {
        let text = self.text(column);
        PastError::at_line(self.line, format!("{column} '{text}': {why}"))
    }

    /// A whole number from `least` to `most`.
    pub(super) fn number(&self, column: &str, least: u32, most: u32) -> Result<u32, PastError> {
        let number = self.text(column).parse().ok();
        let number = number.filter(|number| (least..=most).contains(number));
        let wrong = || {
            let why = format!("must be a whole number from {least} to {most}");
            self.error(column, why)
        };
        number.ok_or_else(wrong)
    }

    /// A size with a unit; digits alone mean bytes, nothing means 0.
    pub(super) fn size(&self, column: &str) -> Result<u64, PastError> {
        let text = self.text(column);
        let parsed = match text {
            "" => Ok(0),
            _ if is_digits(text) => parse_size(&format!("{text} B")),
            _ => parse_size(text),
        };
        parsed.map_err(|why: QuantityError| self.error(column, why))
    }

    /// A duration in microseconds, with a unit; a number alone means seconds.
    pub(super) fn duration_us(&self, column: &str) -> Result<u64, PastError> {
        let text = self.text(column);
        // Fractions of a second count here, unlike in workflows.
        if let Some((whole, part)) = text.split_once('.')
            && [whole, part].iter().all(|digits| is_digits(digits))
            && (1..=6).contains(&part.len())
            && let Ok(seconds) = parse_duration(whole)
        {
            let micros: u64 = format!("{part:0<6}").parse().unwrap_or(0);
            return Ok(seconds * 1_000_000 + micros);
        }
        let parsed = parse_duration(text);
        let parsed = parsed.map_err(|why: QuantityError| self.error(column, why));
        Ok(parsed? * 1_000_000)
    }
}

fn is_digits(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_digit())
}

fn split_cells(line: usize, text: &str, form: TableFormat) -> Result<Vec<Cow<'_, str>>, PastError> {
    if form == TableFormat::BarSeparated {
        return Ok(text.split('|').map(Cow::Borrowed).collect());
    }
    let mut cells = Vec::new();
    let mut rest = text;
    loop {
        let Some(quoted) = rest.trim_start().strip_prefix('"') else {
            match rest.split_once(',') {
                Some((cell, behind)) => {
                    cells.push(Cow::Borrowed(cell));
                    rest = behind;
                    continue;
                }
                None => {
                    cells.push(Cow::Borrowed(rest));
                    return Ok(cells);
                }
            }
        };
        let unclosed = || PastError::at_line(line, "a quote is not closed on its line");
        let mut cell = String::new();
        let mut tail = quoted;
        loop {
            let (part, behind) = tail.split_once('"').ok_or_else(unclosed)?;
            cell += part;
            tail = behind;
            match tail.strip_prefix('"') {
                Some(behind) => tail = behind,
                None => break,
            }
            cell.push('"');
        }
        cells.push(Cow::Owned(cell));
        let tail = tail.trim_start();
        match tail.strip_prefix(',') {
            Some(behind) => rest = behind,
            None if tail.is_empty() => return Ok(cells),
            None => {
                let message = format!("'{tail}' follows a closing quote: expected a comma");
                return Err(PastError::at_line(line, message));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quotes_hold_commas_and_errors_name_the_line() {
        let text = "a,b\n1,\"x, \"\"y\"\"\"\n\n2.5 , 3 KB\n";
        let table = TextTable::parse(text, TableFormat::CommaSeparated).unwrap();
        let rows: Vec<Row> = table.rows().collect();
        assert_eq!(rows[0].text("b"), "x, \"y\"");
        assert_eq!((rows[1].line, rows[1].size("b")), (4, Ok(3_000)));
        assert_eq!(rows[1].duration_us("a"), Ok(2_500_000));
        assert_eq!(rows[1].text("c"), "");
        for (text, expected) in [
            ("", "the file is empty"),
            ("a,a\n", "line 1: duplicate column 'a'"),
            ("a,b\n\n1\n", "line 3: has 1 cells, but the header names 2"),
            ("a\n\"1\n", "line 2: a quote is not closed"),
            ("a,b\n\"1\"2,3\n", "line 2: '2,3' follows a closing quote"),
        ] {
            let error = TextTable::parse(text, TableFormat::CommaSeparated)
                .unwrap_err()
                .to_string();
            assert!(error.contains(expected), "{error}");
        }
        let row = rows[0].number("a", 2, 5).unwrap_err().to_string();
        assert_eq!(row, "line 2: a '1': must be a whole number from 2 to 5");
    }

    #[test]
    fn only_seconds_may_have_fractions() {
        for (text, expected) in [("2.5", Some(2_500_000)), ("2 min", Some(120_000_000))] {
            assert_eq!(parse_duration_us(text).ok(), expected);
        }
        for text in ["1 h.5", "2 min.25", "1.2.5", ".5"] {
            let error = parse_duration_us(text).unwrap_err().to_string();
            assert!(error.starts_with("line 2: a"), "{error}");
        }
    }

    fn parse_duration_us(text: &str) -> Result<u64, PastError> {
        let text = format!("a\n{text}\n");
        let table = TextTable::parse(&text, TableFormat::CommaSeparated).unwrap();
        let row = table.rows().next().unwrap();
        row.duration_us("a")
    }
}
