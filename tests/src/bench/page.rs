//! What the tests of the page and of the HTTP API say, as figures of `bench service`.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use serde_json::Value;

/// The tests, which need Chromium and PyPI.
const PAGE_TESTS: &str = "integrations/page/run.sh";

/// What the tests of the page say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageFigures {
    /// Tests of the page in a browser that passed.
    pub page_tests: u64,
    /// Those that failed.
    pub page_failures: u64,
    /// Runs of the fuzzer over all routes that found a failure; nothing if it did not run.
    pub api_fuzz_failures: Option<u64>,
}

/// Runs the tests of the page with a program. Nothing where they cannot run; they say why.
///
/// # Errors
/// When they cannot be started, or their figures cannot be read.
pub fn measure_page(checkout: &Path, program: &Path) -> Result<Option<PageFigures>> {
    let directory = tempfile::tempdir()?;
    let result = directory.path().join("page.json");
    // That tests fail is a figure.
    let _ = Command::new(checkout.join(PAGE_TESTS))
        .env("BAFS_BIN", program)
        .env("BAFS_PAGE_RESULT", &result)
        .status()
        .with_context(|| format!("start {PAGE_TESTS}"))?;
    if !result.exists() {
        return Ok(None);
    }
    let text = std::fs::read_to_string(&result)?;
    let figures: Value = serde_json::from_str(&text).context("figures of the page")?;
    let count = |name: &str| figures[name].as_u64();
    Ok(Some(PageFigures {
        page_tests: count("page_tests").context("page_tests is missing")?,
        page_failures: count("page_failures").context("page_failures is missing")?,
        api_fuzz_failures: count("api_fuzz_failures"),
    }))
}
