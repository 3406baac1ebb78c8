//! Results on standard output, for people or for machines.

use std::io::Write;

use anyhow::Result;
use serde::Serialize;

use crate::visible;

/// How to print results.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Output {
    json: bool,
}

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
        let mut out = std::io::stdout().lock();
        if self.json {
            serde_json::to_writer(&mut out, value)?;
            writeln!(out)?;
        } else {
            writeln!(out, "{}", visible::lines(text))?;
        }
        Ok(out.flush()?)
    }

    /// Prints text for people only.
    pub(crate) fn remark(self, text: &str) -> Result<()> {
        if !self.json {
            writeln!(std::io::stdout().lock(), "{}", visible::lines(text))?;
        }
        Ok(())
    }
}
