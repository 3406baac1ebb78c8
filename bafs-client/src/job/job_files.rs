//! Files that a job declares: those that must be there before its program starts, and those that a
//! successful one leaves. It opens none of them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use bafs_proto::message::JobCommand;

use super::{JobInterruption, JobVolume, is_success};
use crate::sandbox::{NotStarted, NotStartedReason, SandboxOutcome, SandboxReport};

/// Paths that a message names.
const PATHS_SHOWN_MAX: usize = 5;

/// What a job counts as that did not leave its files.
const EXIT_CODE_MISSING: i32 = 1;

/// A volume of a job: where it is here, and where the job sees it.
pub(super) struct VolumePlace {
    pub(super) source: PathBuf,
    pub(super) path: PathBuf,
}

/// Makes a job fail that ended with 0 and did not leave what it is to produce.
pub(super) async fn check_produced_files(
    ended: &mut Result<SandboxReport, JobInterruption>,
    command: &JobCommand,
    mounts: &[JobVolume],
) {
    if is_success(ended)
        && let Ok(report) = ended
    {
        let produced = &command.produced_files;
        let missing = find_missing(produced, volume_places(mounts)).await;
        fail_without_files(report, &missing);
    }
}

/// Where the volumes of a job are.
pub(super) fn volume_places(mounts: &[JobVolume]) -> Vec<VolumePlace> {
    let place = |bound: &JobVolume| VolumePlace {
        source: bound.binding.source.clone(),
        path: bound.binding.path.clone(),
    };
    mounts.iter().map(place).collect()
}

/// Those of a job's paths at which nothing is. A path in no volume is looked for on this machine.
pub(super) async fn find_missing(paths: &[String], places: Vec<VolumePlace>) -> Vec<String> {
    if paths.is_empty() {
        return Vec::new();
    }
    let paths = paths.to_vec();
    // The kernel asks this process for what is in the volumes.
    let looked = tokio::task::spawn_blocking(move || {
        let is_missing = |path: &String| !is_there(Path::new(path), &places);
        paths.into_iter().filter(is_missing).collect()
    });
    looked.await.unwrap_or_default()
}

/// The end of a job whose program is not started for lack of files.
pub(super) fn refuse_start(missing: &[String]) -> SandboxReport {
    let message = format!("{} before the job", describe_missing(missing, "requires"));
    SandboxReport {
        outcome: SandboxOutcome::NotStarted(NotStarted {
            reason: NotStartedReason::Refused,
            errno: None,
            message,
        }),
        usage: None,
        wall: Duration::ZERO,
        notes: Vec::new(),
        warnings: Vec::new(),
    }
}

/// A successful end as a failure, when files are missing.
fn fail_without_files(report: &mut SandboxReport, missing: &[String]) {
    if missing.is_empty() {
        return;
    }
    report.outcome = SandboxOutcome::Exited(EXIT_CODE_MISSING);
    let text = describe_missing(missing, "produces");
    report.warnings.push(format!(
        "{text} after the job: its program ended with 0, and this counts as exit code \
         {EXIT_CODE_MISSING}"
    ));
}

fn describe_missing(missing: &[String], key: &str) -> String {
    let more = missing.len().saturating_sub(PATHS_SHOWN_MAX);
    let mut shown = missing[..missing.len() - more].join(", ");
    if more > 0 {
        shown += &format!(" and {more} more");
    }
    format!("nothing is at {shown}, which '{key}' names,")
}

fn is_there(path: &Path, places: &[VolumePlace]) -> bool {
    let inner = places.iter().filter(|place| path.starts_with(&place.path));
    let inner = inner.max_by_key(|place| place.path.as_os_str().len());
    let Some((place, below)) = inner.and_then(|it| Some((it, path.strip_prefix(&it.path).ok()?)))
    else {
        return path.symlink_metadata().is_ok();
    };
    let mut here = place.source.clone();
    for name in below {
        here.push(name);
        match here.symlink_metadata() {
            // Where the job's links lead cannot be told from outside.
            Ok(found) if found.is_symlink() => return true,
            Ok(_) => {}
            Err(_) => return false,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn missing_files_are_found_in_volumes() {
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(directory.path().join("out")).expect("mkdir");
        std::fs::write(directory.path().join("out/a"), "x").expect("write");
        std::os::unix::fs::symlink("/w/out", directory.path().join("link")).expect("link");
        let paths = [
            "/w/out/a",
            "/w/out/b",
            "/w/link/c",
            "/w/out",
            "/no/such/file",
        ];
        let places = vec![VolumePlace {
            source: directory.path().to_owned(),
            path: "/w".into(),
        }];
        let missing = find_missing(&paths.map(str::to_owned), places).await;
        assert_eq!(missing, ["/w/out/b", "/no/such/file"]);
    }

    #[test]
    fn missing_results_fail_a_successful_job() {
        let mut report = refuse_start(&["/w/in".to_owned()]);
        let SandboxOutcome::NotStarted(refusal) = &report.outcome else {
            panic!("{report:?}")
        };
        assert!(refusal.message.contains("/w/in, which 'requires' names"));
        report.outcome = SandboxOutcome::Exited(0);
        fail_without_files(&mut report, &[]);
        assert_eq!(report.outcome, SandboxOutcome::Exited(0));
        let many: Vec<String> = (0..7).map(|at| format!("/w/{at}")).collect();
        fail_without_files(&mut report, &many);
        assert_eq!(report.outcome, SandboxOutcome::Exited(1));
        assert!(report.warnings[0].contains("/w/4 and 2 more"), "{report:?}");
    }
}
