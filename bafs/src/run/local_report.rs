//! What a run on a throw-away cluster tells otherwise than one on a cluster that stays: options
//! have other names there, and what nodes keep goes with them. Starts nothing.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;
use bafs_sched::report::RunReport;
use bafs_sched::{FULL_DISK_HINT, INODES_EXHAUSTED_HINT, Outcome, RERUN_HINT};
use bafs_workflow::{Scheme, Url, Volume, VolumeKind, Workflow};

use crate::args::UsageError;
use crate::units::format_bytes;

/// What the scheduler advises for nodes that stay, and what helps here: the next run has another
/// cluster.
const ADVICE_REPLACEMENTS: [(&str, &str); 3] = [
    (
        FULL_DISK_HINT,
        "free some of it, or give a smaller --node-size",
    ),
    (
        INODES_EXHAUSTED_HINT,
        "remove files from it, or set TMPDIR to a directory on another disk",
    ),
    (RERUN_HINT, "run it again"),
];

/// Most places of results that are named.
const RESULT_PATHS_SHOWN_MAX: usize = 5;

/// What the scheduler says of a result on a node that stays, up to the name of the node.
const RESULT_NODE_PREFIX: &str = "it stays on node ";

/// What it then advises, up to the id of the volume, or says of a file that cannot be sent at all.
const RESULT_VOLUME_PREFIXES: [&str; 2] = ["bafs volume extract ", " after the run in volume "];

/// Where results are that could not be sent and that nodes of the cluster in `directory` hold.
pub(super) fn unsent_result_paths(report: &RunReport, directory: &Path) -> BTreeSet<PathBuf> {
    let messages = match &report.outcome {
        Outcome::Failed { messages, .. } => messages.as_slice(),
        Outcome::Complete | Outcome::Cancelled => &[],
    };
    let told = report.warnings.iter().chain(messages);
    let told = told.filter_map(|text| parse_result_location(text));
    let mut places: BTreeSet<PathBuf> = told
        .map(|(_, node, volume)| volume_path(directory, node, volume))
        .filter(|place| place.is_dir())
        .collect();
    if report.warnings_omitted > 0 && report.totals.extracts_failed > 0 {
        // A run that ends in order deletes all volumes but those with results.
        places.extend(volume_paths(directory));
    }
    places
}

/// Where a node of the cluster in `directory` keeps the files of a volume.
fn volume_path(directory: &Path, node: &str, volume: &str) -> PathBuf {
    directory
        .join(node)
        .join("volumes")
        .join(volume)
        .join("tree")
}

/// The same of all volumes that are there.
fn volume_paths(directory: &Path) -> impl Iterator<Item = PathBuf> {
    let entries = |path: PathBuf| fs::read_dir(path).into_iter().flatten().flatten();
    entries(directory.to_owned())
        .flat_map(move |node| entries(node.path().join("volumes")))
        .map(|volume| volume.path().join("tree"))
        .filter(|place| place.is_dir())
}

/// Where what jobs print is kept: nowhere if it would change what the home of the cluster shows to
/// them. Says so then.
pub(super) fn choose_logs_directory(
    directory: PathBuf,
    export: &Path,
    workflow: &Workflow,
) -> Option<PathBuf> {
    if let Some(volume) = find_showing_volume(&directory, export, workflow) {
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

/// The journal of a run on a throw-away cluster: none if it would change what the home of the
/// cluster shows to jobs, or its directory cannot be written. Says so then.
pub(super) fn choose_journal(
    journal: PathBuf,
    export: &Path,
    workflow: &Workflow,
) -> Option<PathBuf> {
    let why = if let Some(volume) = find_showing_volume(&journal, export, workflow) {
        format!("it would be inside the source of volume '{}'", volume.name)
    } else {
        let parent = journal.parent().filter(|it| !it.as_os_str().is_empty());
        let parent = parent.unwrap_or_else(|| Path::new("."));
        match nix::unistd::access(parent, nix::unistd::AccessFlags::W_OK) {
            Ok(()) => return Some(journal),
            Err(error) => format!("its directory cannot be written: {error}"),
        }
    };
    eprintln!(
        "warning: no journal is kept at {}, so the next run does everything again: {why}; name \
         one elsewhere with --journal",
        journal.display()
    );
    None
}

/// The first volume whose source shows a path of this machine to jobs.
fn find_showing_volume<'w>(
    path: &Path,
    export: &Path,
    workflow: &'w Workflow,
) -> Option<&'w Volume> {
    let place = std::path::absolute(path).ok()?;
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
    workflow.volumes.iter().find(shown)
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

/// Words a report as it is right when the cluster is gone, whose files are in `kept` if they stay.
pub(super) fn rewrite_report(report: &mut RunReport, kept: Option<&Path>) {
    let mut texts: Vec<&mut String> = report.warnings.iter_mut().collect();
    if let Outcome::Failed { jobs, messages } = &mut report.outcome {
        texts.extend(jobs.iter_mut().map(|job| &mut job.reason));
        texts.extend(messages);
    }
    for text in texts {
        *text = rewrite_message(text, kept);
    }
}

fn rewrite_message(text: &str, kept: Option<&Path>) -> String {
    if let Some((what, node, volume)) = parse_result_location(text) {
        let place = kept.map(|kept| volume_path(kept, node, volume));
        return match place.filter(|place| place.is_dir()) {
            Some(place) => format!("{what}it is in {}", place.display()),
            None => format!("{what}it is lost with the temporary cluster"),
        };
    }
    let here = |text: String, (there, here): (&str, &str)| text.replace(there, here);
    ADVICE_REPLACEMENTS.into_iter().fold(text.to_owned(), here)
}

/// What is told of a result before it is said where it stays, and on which node in which volume
/// that is.
fn parse_result_location(text: &str) -> Option<(&str, &str, &str)> {
    let at = text.find(RESULT_NODE_PREFIX)?;
    let (what, stays) = text.split_at(at);
    let (node, _) = stays
        .strip_prefix(RESULT_NODE_PREFIX)?
        .split_once(" for ")?;
    let mut volumes = RESULT_VOLUME_PREFIXES
        .iter()
        .filter_map(|fetch| stays.split_once(fetch));
    let (_, volume) = volumes.next()?;
    Some((what, node, volume.split(' ').next()?))
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

    #[test]
    fn remedy_names_the_option_of_this_command() {
        let told =
            format!("the disk of node n1 was full 9 times; {FULL_DISK_HINT}; then {RERUN_HINT}");
        let told = rewrite_message(&told, None);
        assert!(
            told.ends_with("free some of it, or give a smaller --node-size; then run it again"),
            "{told}"
        );
    }

    /// The beginning of what is told of a result, and the whole.
    fn result_message(volume: &str) -> (&'static str, String) {
        let before = "file 'out' of volume 'w' failed to reach bafs://home/out: no; ";
        let stays = "it stays on node n2 for 7 days after the run; correct the cause, then run: \
                     bafs volume extract";
        (
            before,
            format!("{before}{stays} {volume} out bafs://home/out"),
        )
    }

    /// The directory of a cluster whose node `n2` has the volume `0af3`, and where its files are.
    fn test_cluster_directory() -> (tempfile::TempDir, PathBuf) {
        let directory = tempfile::tempdir().expect("a directory");
        let place = volume_path(directory.path(), "n2", "0af3");
        fs::create_dir_all(&place).expect("a directory");
        (directory, place)
    }

    #[test]
    fn kept_result_is_located_in_the_cluster_directory() {
        let (directory, place) = test_cluster_directory();
        let (before, told) = result_message("0af3");
        let kept = rewrite_message(&told, Some(directory.path()));
        assert_eq!(kept, format!("{before}it is in {}", place.display()));
        let lost = rewrite_message(&told, None);
        assert_eq!(
            lost,
            format!("{before}it is lost with the temporary cluster")
        );
        // Its node lost the volume at the end.
        let gone = rewrite_message(&result_message("0af4").1, Some(directory.path()));
        assert_eq!(gone, lost);
        let fifo = format!("{before}it stays on node n2 for 7 days after the run in volume 0af3");
        assert_eq!(rewrite_message(&fifo, None), lost);
        assert_eq!(rewrite_message(&fifo, Some(directory.path())), kept);
    }

    #[test]
    fn only_existing_results_keep_the_cluster_directory() {
        let (directory, here) = test_cluster_directory();
        let another = volume_path(directory.path(), "n1", "0af5");
        let mut report = RunReport {
            run: RunId(1),
            workflow: "w".to_owned(),
            outcome: Outcome::Cancelled,
            wall_ms: 0,
            totals: Progress::default(),
            jobs: Vec::new(),
            warnings: Vec::new(),
            warnings_omitted: 0,
        };
        // Of a file that no job wrote nothing is told.
        report.totals.extracts_failed = 1;
        let found = |report: &RunReport| unsent_result_paths(report, directory.path());
        assert!(found(&report).is_empty());
        report.warnings.push(result_message("0af4").1);
        assert!(found(&report).is_empty());
        report.warnings.push(result_message("0af3").1);
        assert_eq!(found(&report), BTreeSet::from([here.clone()]));
        report.warnings_omitted = 1;
        fs::create_dir_all(&another).expect("a directory");
        let both = BTreeSet::from([another, here]);
        assert_eq!(found(&report), both);
        let said = describe_kept_results(&both, directory.path());
        assert!(
            both.iter()
                .all(|it| said.contains(&it.display().to_string())),
            "{said}"
        );
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
