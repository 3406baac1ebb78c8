//! What a run that ends before its work is done leaves on its nodes for the next one: for how long,
//! and how that is told.

use anyhow::{Context, Result};
use bafs_sched::Outcome;
use bafs_sched::driver::EarlierRun;
use bafs_sched::report::RunReport;

use crate::args::{RunArgs, UsageError};
use crate::units::format_bytes;

/// For so long when nobody says otherwise, in milliseconds. Whoever finds a failure in the morning
/// has a day to mend it. Other runs do not wait for the space.
const KEEP_MS_DEFAULT: u64 = 2 * 24 * 3_600_000;

/// How long finished volumes outlive a run that fails or is cancelled, in milliseconds.
///
/// # Errors
/// The option is no time.
pub(super) fn parse_keep_ms(args: &RunArgs) -> Result<u64> {
    let Some(text) = &args.keep else {
        // Nodes of a temporary cluster or of a pool end with the run.
        let nodes_end = args.has_own_cluster() || args.pool.is_some();
        return Ok(if nodes_end { 0 } else { KEEP_MS_DEFAULT });
    };
    let seconds = bafs_workflow::parse_duration(text);
    let seconds = seconds.map_err(|error| UsageError::from_reason(format!("--keep: {error}")));
    seconds
        .map(|seconds| seconds.saturating_mul(1000))
        .context("how long volumes are kept")
}

/// The lines on what a run kept, how long, and how to be rid of it; nothing if it kept nothing.
pub(super) fn describe_kept(args: &RunArgs, report: &RunReport) -> String {
    if args.has_own_cluster() || report.outcome == Outcome::Complete {
        return String::new();
    }
    let Ok(Some(run)) = EarlierRun::read(&args.journal_path()) else {
        return String::new();
    };
    let bytes: u128 = run
        .kept
        .iter()
        .map(|kept| u128::from(kept.size.bytes))
        .sum();
    let named = args.journal.as_ref().unwrap_or(&args.workflow).display();
    describe_volumes(run.kept.len(), bytes, run.keep_ms, &named.to_string())
}

fn describe_volumes(count: usize, bytes: u128, keep_ms: u64, run: &str) -> String {
    let (noun, it) = match count {
        0 => return String::new(),
        1 => ("volume", "it"),
        _ => ("volumes", "them"),
    };
    let size = format_bytes(bytes);
    let time = describe_time(keep_ms);
    format!(
        "\nkept for the next run: {count} finished {noun} ({size}), for {time}, or until another \
         run wants the space; to delete {it} now: bafs volume delete --kept {run}"
    )
}

/// A time in the largest unit that it is a whole number of.
fn describe_time(ms: u64) -> String {
    const UNITS: [(&str, u64); 3] = [("d", 24 * 3_600_000), ("h", 3_600_000), ("min", 60_000)];
    let unit = UNITS
        .iter()
        .find(|(_, unit)| ms >= *unit && ms.is_multiple_of(*unit));
    unit.map_or_else(
        || format!("{} s", ms / 1_000),
        |(name, unit)| format!("{} {name}", ms / unit),
    )
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::{Cli, CliCommand};

    fn keep_ms(options: &[&str]) -> Result<u64> {
        let words = [&["bafs", "run", "a.bafs"], options].concat();
        match Cli::try_parse_from(words)
            .expect("it is understood")
            .command
        {
            CliCommand::Run(args) => parse_keep_ms(&args),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn failed_runs_keep_volumes_for_two_days() {
        let kept = |options: &[&str]| keep_ms(options).expect("a time");
        assert_eq!(kept(&[]), 172_800_000);
        assert_eq!(kept(&["--keep", "1h"]), 3_600_000);
        assert_eq!(kept(&["--keep", "0"]), 0);
        assert_eq!(kept(&["--local", "2"]), 0, "its nodes end with it");
        assert!(keep_ms(&["--keep", "long"]).is_err());
    }

    #[test]
    fn kept_volumes_are_told_with_their_time() {
        assert_eq!(describe_volumes(0, 0, KEEP_MS_DEFAULT, "w.bafs"), "");
        let told = describe_volumes(1, 2_000_000, KEEP_MS_DEFAULT, "w.bafs");
        let expected = "\nkept for the next run: 1 finished volume (2.000 MB), for 2 d, or until \
                        another run wants the space; to delete it now: bafs volume delete --kept \
                        w.bafs";
        assert_eq!(told, expected);
        let told = describe_volumes(3, 5, 5_400_000, "w.bafs");
        assert!(
            told.contains("3 finished volumes (5 B), for 90 min"),
            "{told}"
        );
    }
}
