//! Results on standard output, for people or for machines.

use std::io::{self, Write};
use std::path::Path;

use anyhow::{Error, Result};
use serde::Serialize;

use crate::visible;

/// How to print results.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    json: bool,
}

/// Whoever read standard output has gone, as `head` does: there is nothing to complain of.
#[derive(Debug)]
pub(crate) struct ReaderGone;

impl std::fmt::Display for ReaderGone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("nobody reads standard output any more")
    }
}

impl std::error::Error for ReaderGone {}

impl Output {
    /// Prints JSON if `json`, text otherwise.
    pub(crate) fn new(json: bool) -> Self {
        Self { json }
    }

    /// Whether it prints JSON.
    pub(crate) fn is_json(self) -> bool {
        self.json
    }

    /// Prints a result in the chosen form, and at once (readers may wait for the line).
    pub(crate) fn say(self, text: &str, value: &impl Serialize) -> Result<()> {
        let mut line = if self.json {
            serde_json::to_vec(value)?
        } else {
            visible::lines(text).into_bytes()
        };
        line.push(b'\n');
        print(&line)
    }

    /// Prints text for people only.
    pub(crate) fn remark(self, text: &str) -> Result<()> {
        if self.json {
            return Ok(());
        }
        print(format!("{}\n", visible::lines(text)).as_bytes())
    }
}

/// Whether a path stands for standard output.
pub(crate) fn is_standard(path: &Path) -> bool {
    path == Path::new("-")
}

/// Prints bytes as they are, and at once.
pub(crate) fn print(bytes: &[u8]) -> Result<()> {
    let mut out = io::stdout().lock();
    let printed = out.write_all(bytes).and_then(|()| out.flush());
    printed.map_err(|error| match error.kind() {
        io::ErrorKind::BrokenPipe => ReaderGone.into(),
        _ => Error::new(error).context("cannot write to standard output"),
    })
}
