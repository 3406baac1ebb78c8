//! Tests that could not run for real here: reads what they announced and judges it.
//!
//! A test that skips itself prints `SKIPPED: <name>: <reason>` to standard error and appends the
//! same line to the file that `BAFS_SKIP_LOG` names, because runners hide the output of a test
//! that passes.

use std::collections::BTreeSet;
use std::path::Path;
use std::{env, fs};

use anyhow::{Context, Result, bail};

use crate::shell;

/// The environment variable by which a test finds the log.
pub(crate) const SKIP_LOG_VARIABLE: &str = "BAFS_SKIP_LOG";
const ALLOWED_SKIPS_FILE: &str = "xtask/allowed-skips.txt";

/// One test that announced that it did not run.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SkippedTest {
    /// The test.
    pub(crate) name: String,
    /// What the machine lacks.
    pub(crate) reason: String,
}

/// Reads the log; a log that nobody wrote is empty.
pub(crate) fn read_log(log: &Path) -> Result<Vec<SkippedTest>> {
    if !log.exists() {
        return Ok(Vec::new());
    }
    let text = fs::read_to_string(log).with_context(|| format!("read {}", log.display()))?;
    Ok(parse_log(&text))
}

fn parse_log(text: &str) -> Vec<SkippedTest> {
    let announced = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("SKIPPED: "));
    // The order of parallel tests means nothing; a set also drops what a retry repeats.
    announced
        .map(parse_entry)
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect()
}

/// `name: reason`; a name may contain `::`, so the space belongs to the separator.
fn parse_entry(entry: &str) -> SkippedTest {
    let (name, reason) = entry.split_once(": ").unwrap_or((entry, "no reason given"));
    SkippedTest {
        name: name.trim().to_owned(),
        reason: reason.trim().to_owned(),
    }
}

/// Prints the skips so that nobody overlooks them.
pub(crate) fn print_skips(skips: &[SkippedTest]) {
    if skips.is_empty() {
        return;
    }
    let rule = "!".repeat(100);
    println!(
        "\n{rule}\nNOT RUN for real on this machine: {} of the tests",
        skips.len()
    );
    for skip in skips {
        println!("  {}: {}", skip.name, skip.reason);
    }
    println!(
        "The runner counts them as passed; the last line below counts them as skipped.\n{rule}"
    );
}

/// Fails when this machine could have run a skipped test: in CI, as root, with FUSE.
pub(crate) fn check_skips(skips: &[SkippedTest]) -> Result<()> {
    let able = shell::is_root() && Path::new("/dev/fuse").exists();
    if env::var_os("CI").is_none() || !able {
        return Ok(());
    }
    let path = shell::checkout_root().join(ALLOWED_SKIPS_FILE);
    let text = fs::read_to_string(&path).with_context(|| format!("read {ALLOWED_SKIPS_FILE}"))?;
    let unexpected = find_unexpected(skips, &parse_allowed(&text)?);
    if !unexpected.is_empty() {
        bail!(
            "skipped although this is root with /dev/fuse, and not listed in \
             {ALLOWED_SKIPS_FILE}: {}",
            unexpected.join(", ")
        );
    }
    Ok(())
}

fn parse_allowed(text: &str) -> Result<BTreeSet<String>> {
    let lines = text.lines().map(str::trim);
    let entries = lines.filter(|line| !line.is_empty() && !line.starts_with('#'));
    entries
        .map(|entry| match entry.split_once(": ") {
            Some((name, reason)) if !reason.trim().is_empty() => Ok(name.trim().to_owned()),
            _ => bail!("{ALLOWED_SKIPS_FILE}: `{entry}` must be `<name>: <reason>`"),
        })
        .collect()
}

fn find_unexpected<'a>(skips: &'a [SkippedTest], allowed: &BTreeSet<String>) -> Vec<&'a str> {
    let names = skips.iter().map(|test_skip| test_skip.name.as_str());
    names.filter(|name| !allowed.contains(*name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn test_skip(name: &str, reason: &str) -> SkippedTest {
        SkippedTest {
            name: name.to_owned(),
            reason: reason.to_owned(),
        }
    }

    #[test]
    fn skip_log_is_deduplicated_and_sorted() {
        let log = "SKIPPED: mount::rename: no /dev/fuse\nnoise\n\
                   SKIPPED: cluster: no root: none at all\nSKIPPED: mount::rename: no /dev/fuse\n";
        let expected = [
            test_skip("cluster", "no root: none at all"),
            test_skip("mount::rename", "no /dev/fuse"),
        ];
        assert_eq!(parse_log(log), expected);
    }

    #[test]
    fn an_allowed_skip_needs_a_reason() {
        let allowed = parse_allowed("# why\n\nmount::quota: needs a store on XFS\n").unwrap();
        assert!(allowed.contains("mount::quota"));
        assert!(parse_allowed("mount::quota\n").is_err());
        assert!(parse_allowed("mount::quota: \n").is_err());
    }

    #[test]
    fn unlisted_skips_are_unexpected() {
        let skips = [test_skip("a", "x"), test_skip("b", "y")];
        let allowed = BTreeSet::from(["a".to_owned()]);
        assert_eq!(find_unexpected(&skips, &allowed), ["b"]);
        assert!(find_unexpected(&skips[..1], &allowed).is_empty());
    }
}
