//! Amounts and times for people.

use bafs_proto::message::{JobOutcome, JobReport};
use bafs_workflow::FILES_MAX;

use crate::space::Space;
use crate::state::progress::describe_signal;

pub(crate) fn bytes_of(spaces: impl Iterator<Item = Space>) -> u64 {
    let bytes = spaces.map(|space| space.bytes);
    bytes.fold(0, u64::saturating_add)
}

pub(crate) fn bytes_only(bytes: u64) -> Space {
    Space { bytes, files: 0 }
}

/// An amount for people: three digits and a decimal unit, and files.
pub(crate) fn describe(space: Space) -> String {
    let (bytes, files) = (describe_bytes(space), space.files);
    match files > FILES_MAX {
        true => format!("{bytes} (and no limit of files)"),
        false => format!("{bytes} and {files} files"),
    }
}

/// What is lacking, for people.
pub(crate) fn describe_lack(space: Space) -> String {
    match space {
        Space { files: 0, .. } => describe_bytes(space),
        Space { bytes: 0, files } => format!("{files} files"),
        Space { .. } => describe(space),
    }
}

/// The bytes of an amount for people.
pub(crate) fn describe_bytes(space: Space) -> String {
    const UNITS: [(&str, u64); 4] = [
        ("TB", 1_000_000_000_000),
        ("GB", 1_000_000_000),
        ("MB", 1_000_000),
        ("kB", 1_000),
    ];
    match UNITS.iter().find(|(_, unit)| space.bytes >= *unit) {
        Some((name, unit)) => {
            let tenths = u128::from(space.bytes) * 10 / u128::from(*unit);
            format!("{}.{} {name}", tenths / 10, tenths % 10)
        }
        None => format!("{} bytes", space.bytes),
    }
}

/// A time for people, in the largest unit that it has one of.
pub(crate) fn describe_ms(ms: u64) -> String {
    const UNITS: [(&str, u64); 3] = [("h", 3_600_000), ("min", 60_000), ("s", 1_000)];
    let unit = UNITS.iter().find(|(_, unit)| ms >= *unit);
    unit.map_or_else(
        || format!("{ms} ms"),
        |(name, unit)| format!("{} {name}", ms / unit),
    )
}

/// Deletions of a volume that fail before the user is told, and it is not waited for any more.
pub(crate) const DELETE_FAULTS_TOLD: u32 = 10;

/// Volumes of a node that are named when the run could not delete them.
pub(crate) const LEFT_SHOWN: usize = 3;

/// Seconds with tenths.
pub(crate) fn format_seconds(ms: u64) -> String {
    format!("{}.{:01}", ms / 1_000, ms % 1_000 / 100)
}

/// How an attempt ended, as the rest of a sentence that begins with its name.
pub(crate) fn describe_end(report: &JobReport) -> String {
    let after = format!("after {} s", format_seconds(report.wall_ms));
    match &report.outcome {
        JobOutcome::Exited(0) => format!("is done {after}"),
        JobOutcome::Exited(code) => format!("exits with code {code} {after}"),
        JobOutcome::Signaled(signal) => {
            format!("is killed by {} {after}", describe_signal(*signal))
        }
        JobOutcome::NotStarted(why) => format!("cannot start: {why}"),
        // Its agent ended before it could say how long it took.
        JobOutcome::EnvironmentFailed(error) if report.wall_ms == 0 => {
            format!("fails with its environment: {error}")
        }
        JobOutcome::EnvironmentFailed(error) => format!(
            "fails with its environment {after}: \
            {error}"
        ),
        JobOutcome::Killed => format!("is killed {after}"),
    }
}
