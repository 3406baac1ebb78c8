//! Results on standard output, for people or for machines.

use std::io::{self, Write};
use std::path::Path;

use anyhow::{Error, Result};
use serde::Serialize;

use crate::terminal_text;

/// How to print results.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Printer {
    json: bool,
}

/// Whoever read standard output has gone, as `head` does: there is nothing to complain of.
#[derive(Debug)]
pub(crate) struct StdoutClosed;

impl std::fmt::Display for StdoutClosed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("standard output is closed")
    }
}

impl std::error::Error for StdoutClosed {}

/// Says something to who reads standard error; the terminal may have gone, and then nobody does.
pub(crate) fn print_notice(text: &str) {
    let _ = writeln!(io::stderr(), "bafs: {text}");
}

impl Printer {
    /// Prints JSON if `json`, text otherwise.
    pub(crate) fn new(json: bool) -> Self {
        Self { json }
    }

    /// Whether it prints JSON.
    pub(crate) fn is_json(self) -> bool {
        self.json
    }

    /// Prints a result in the chosen form, and at once (readers may wait for the line).
    pub(crate) fn print_result(self, text: &str, value: &impl Serialize) -> Result<()> {
        let mut line = if self.json {
            serde_json::to_vec(value)?
        } else {
            terminal_text::sanitize_lines(text).into_bytes()
        };
        line.push(b'\n');
        print_bytes(&line)
    }

    /// Prints text for people only.
    pub(crate) fn print_remark(self, text: &str) -> Result<()> {
        if self.json {
            return Ok(());
        }
        print_bytes(format!("{}\n", terminal_text::sanitize_lines(text)).as_bytes())
    }
}

/// Whether a path stands for standard output.
pub(crate) fn is_stdout(path: &Path) -> bool {
    path == Path::new("-")
}

/// Prints bytes as they are, and at once.
pub(crate) fn print_bytes(bytes: &[u8]) -> Result<()> {
    let mut out = io::stdout().lock();
    let printed = out.write_all(bytes).and_then(|()| out.flush());
    printed.map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => StdoutClosed.into(),
        _ => Error::new(error).context("cannot write to standard output"),
    })
}
