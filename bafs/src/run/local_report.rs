//! What a run on a throw-away cluster tells otherwise than one on a cluster that stays: options
//! have other names there, and what nodes keep goes with them. Starts nothing.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::Result;
use bafs_proto::ids::VolumeId;
use bafs_sched::Outcome;
use bafs_sched::report::{RunReport, UnsentResult};
use bafs_workflow::{Scheme, Url, Volume, VolumeKind, Workflow};

use crate::args::UsageError;
use crate::units::format_bytes;

/// Most places of results that are named.
const RESULT_PATHS_SHOWN_MAX: usize = 5;

/// Where results are that could not be sent and that nodes of the cluster in `directory` hold.
pub(super) fn unsent_result_paths(report: &RunReport, directory: &Path) -> BTreeSet<PathBuf> {
    let results = report.unsent_results.iter();
    let paths = results.filter_map(|result| result_path(result, directory));
    paths.collect()
}

/// Where a node of the cluster in `directory` has a result, if it still has it.
fn result_path(result: &UnsentResult, directory: &Path) -> Option<PathBuf> {
    let (node, volume) = result.place.as_ref()?;
    Some(volume_path(directory, node, *volume)).filter(|path| path.is_dir())
}

/// Where a node of the cluster in `directory` keeps the files of a volume.
fn volume_path(directory: &Path, node: &str, volume: VolumeId) -> PathBuf {
    let volumes = directory.join(node).join("volumes");
    volumes.join(volume.to_string()).join("tree")
}

/// Where what jobs print is kept: nowhere if it would change what the home of the cluster shows to
/// them. Says so then.
pub(super) fn choose_logs_directory(
    directory: PathBuf,
    export: &Path,
    workflow: &Workflow,
) -> Option<PathBuf> {
    let place = std::path::absolute(&directory).ok()?;
    let parent = place.parent().and_then(|parent| parent.canonicalize().ok());
    let place = parent?.join(place.file_name()?);
    let shown = |volume: &&Volume| {
        let source = match &volume.kind {
            VolumeKind::Cache { source, .. } => source,
            VolumeKind::Scratch { fill: Some(source) } => source,
            VolumeKind::Scratch { fill: None } => return false,
        };
        match source.scheme {
            Scheme::File => place.starts_with(&source.path),
            Scheme::Bafs => place.starts_with(export.join(source.path.trim_start_matches('/'))),
            _ => false,
        }
    };
    if let Some(volume) = workflow.volumes.iter().find(shown) {
        eprintln!(
            "warning: job output is not kept: {} would be inside the source of volume '{}'; name a \
             journal elsewhere with --journal",
            directory.display(),
            volume.name
        );
        return None;
    }
    Some(directory)
}

/// The only home of a throw-away cluster.
const LOCAL_HOME: &str = "home";

/// Checks that the workflow names no home that a throw-away cluster cannot have.
pub(super) fn check_home_names(workflow: &Workflow) -> Result<()> {
    let is_other = |url: &&Url| url.scheme == Scheme::Bafs && url.host != LOCAL_HOME;
    let Some(url) = workflow.urls().find(is_other) else {
        return Ok(());
    };
    Err(UsageError::from_reason(format!(
        "'{}' of {url} is no home of a throw-away cluster, which has '{LOCAL_HOME}' only: write \
         bafs://{LOCAL_HOME}{}, or run it on a cluster that has that home",
        url.host, url.path
    )))
}

/// Says what stays of the cluster in `directory`, and where.
pub(super) fn describe_kept_results(places: &BTreeSet<PathBuf>, directory: &Path) -> String {
    let shown = places.iter().take(RESULT_PATHS_SHOWN_MAX);
    let shown: Vec<String> = shown.map(|place| place.display().to_string()).collect();
    let more = match places.len().saturating_sub(RESULT_PATHS_SHOWN_MAX) {
        0 => String::new(),
        more => format!(", and {more} more beside them"),
    };
    format!(
        "the temporary cluster ends, but unsent results remain in its files, in {}{more}; copy \
         them, then remove {}",
        shown.join(", "),
        directory.display()
    )
}

/// Says of each result that could not be sent what becomes of it when the cluster is gone, whose
/// files are in `kept` if they stay.
pub(super) fn rewrite_report(report: &mut RunReport, kept: Option<&Path>) {
    let mut texts: Vec<&mut String> = report.warnings.iter_mut().collect();
    if let Outcome::Failed { messages, .. } = &mut report.outcome {
        texts.extend(messages);
    }
    for result in &report.unsent_results {
        let told = texts.iter_mut().filter(|text| ***text == result.message);
        told.for_each(|text| **text = describe_end(result, kept));
    }
}

/// What failed of a result, and what becomes of it.
fn describe_end(result: &UnsentResult, kept: Option<&Path>) -> String {
    let failure = &result.failure;
    match kept.and_then(|kept| result_path(result, kept)) {
        Some(path) => format!("{failure}; it is in {}", path.display()),
        None => format!("{failure}; it is lost with the temporary cluster"),
    }
}

/// What is wrong with nodes of this size beside each other on the disk of a directory, if
/// something is; `disk_bytes` is all that the disk has.
pub(super) fn oversubscription_message(
    nodes: u32,
    size_bytes: u64,
    place: &Path,
    disk_bytes: u64,
) -> Option<String> {
    let offered = u128::from(nodes) * u128::from(size_bytes);
    let all = u128::from(disk_bytes);
    (offered > all).then(|| {
        format!(
            "the nodes together offer {}, but the disk of {} has only {} in all: jobs may find it \
             full; give a smaller --node-size, or set TMPDIR to a directory on a larger disk",
            format_bytes(offered),
            place.display(),
            format_bytes(all)
        )
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use bafs_proto::ids::RunId;
    use bafs_sched::Progress;

    use super::*;

    #[test]
    fn local_run_rejects_homes_it_cannot_have() {
        let check = |url: &str| {
            let text = format!(
                "volume w scratch 1 MB\njob j {{\nexecutable = x\n}}\nmount w j /w\n\
                 extract w o {url}\n"
            );
            let none = |_: &str| Err("no files".to_owned());
            let parsed = bafs_workflow::parse_workflow("w.bafs", &text, &none);
            check_home_names(&parsed.expect("a workflow").workflow)
        };
        for right in ["bafs://home/o", "bafs://HOME/o", "ftp://h/o", "file:///w/o"] {
            assert!(check(right).is_ok(), "{right}");
        }
        let error = check("bafs://hom/d/o").expect_err("no such home");
        assert!(
            error.to_string().contains("write bafs://home/d/o"),
            "{error}"
        );
        assert!(check("bafs://h:1/o").is_err());
    }

    /// A result in a volume of node `n2`.
    fn unsent_result(volume: u128) -> UnsentResult {
        let failure = "file 'out' of volume 'w' failed to reach bafs://home/out: no";
        UnsentResult {
            message: format!("{failure}; it stays on node n2"),
            failure: failure.to_owned(),
            place: Some(("n2".to_owned(), VolumeId(volume))),
        }
    }

    /// The directory of a cluster whose node `n2` has the volume 3, and where its files are.
    fn test_cluster_directory() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().expect("a directory");
        let place = volume_path(directory.path(), "n2", VolumeId(3));
        fs::create_dir_all(&place).expect("a directory");
        (directory, place)
    }

    fn cancelled_report(unsent_results: Vec<UnsentResult>) -> RunReport {
        let told = unsent_results.iter().map(|it| it.message.clone());
        let warnings = std::iter::once("something else".to_owned()).chain(told);
        RunReport {
            run: RunId(1),
            workflow: "w".to_owned(),
            outcome: Outcome::Cancelled,
            wall_ms: 0,
            totals: Progress::default(),
            jobs: Vec::new(),
            warnings: warnings.collect(),
            warnings_omitted: 0,
            unsent_results,
        }
    }

    #[test]
    fn kept_result_is_located_in_the_cluster_directory() {
        let (directory, place) = test_cluster_directory();
        let end_of = |volume, kept| {
            let mut report = cancelled_report(vec![unsent_result(volume)]);
            rewrite_report(&mut report, kept);
            assert_eq!(report.warnings[0], "something else");
            report.warnings[1].clone()
        };
        let failure = unsent_result(3).failure;
        let kept = end_of(3, Some(directory.path()));
        assert_eq!(kept, format!("{failure}; it is in {}", place.display()));
        let lost = end_of(3, None);
        assert_eq!(
            lost,
            format!("{failure}; it is lost with the temporary cluster")
        );
        // Its node lost the volume at the end.
        assert_eq!(end_of(4, Some(directory.path())), lost);
    }

    #[test]
    fn only_existing_results_keep_the_cluster_directory() {
        let (directory, here) = test_cluster_directory();
        let found = |volumes: &[u128]| {
            let results = volumes.iter().copied().map(unsent_result);
            unsent_result_paths(&cancelled_report(results.collect()), directory.path())
        };
        assert!(found(&[]).is_empty());
        assert!(found(&[4]).is_empty());
        let kept = found(&[4, 3]);
        assert_eq!(kept, BTreeSet::from([here.clone()]));
        let said = describe_kept_results(&kept, directory.path());
        assert!(said.contains(&here.display().to_string()), "{said}");
    }

    #[test]
    fn local_nodes_may_not_exceed_the_disk() {
        let offered = |nodes, size| oversubscription_message(nodes, size, Path::new("/tmp"), 1_000);
        assert_eq!(offered(2, 500), None);
        let told = offered(3, 500).expect("too much");
        assert!(
            told.contains("1.500 KB") && told.contains("--node-size"),
            "{told}"
        );
    }
}
