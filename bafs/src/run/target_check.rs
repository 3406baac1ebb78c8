//! Whether results can go where the workflow sends them, before the first job runs: no time mends a
//! directory where a file is to be. A few calls, many at once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anyhow::{Result, bail};
use bafs_proto::message::{SourceKind, StatSource};
use bafs_workflow::{Extract, JobIndex, Scheme, Url, Workflow};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::home_state::CALLS_MAX;
use crate::finding::{Finding, FindingKind};
use crate::home_view::{ClusterView, HomeView};

/// Places that are looked at: a call for each takes a millisecond, and nobody waits minutes.
const PLACES_MAX: usize = 20_000;

/// Refuses a run whose jobs would send results to places that cannot take them.
///
/// # Errors
/// There are such places, told with the remedy.
pub(super) fn check_targets(
    view: &HomeView,
    workflow: &Workflow,
    running: &BTreeSet<JobIndex>,
) -> Result<()> {
    let is_made = |extract: &&Extract| {
        let users = workflow.volume(extract.volume).users.iter();
        let mut running = users.filter(|user| running.contains(user));
        running.any(|user| {
            let mut mounts = workflow.job(*user).mounts.iter();
            mounts.any(|mount| mount.volume == extract.volume && mount.writable)
        })
    };
    let extracts: Vec<&Extract> = workflow.extracts.iter().filter(is_made).collect();
    let targets = extracts.iter().map(|extract| extract.target.clone());
    let above = extracts
        .iter()
        .filter_map(|extract| parent_of(&extract.target));
    let places: BTreeSet<Url> = targets.chain(above).take(PLACES_MAX).collect();
    let found = match view {
        HomeView::Directory(_) | HomeView::Beside { .. } => {
            let stat = |url: Url| {
                let found = view.stat(&url).ok()?;
                Some((url, found.is_directory))
            };
            places.into_iter().filter_map(stat).collect()
        }
        HomeView::Cluster(cluster) => stat_all(cluster, places)?,
    };
    let mut blocked: BTreeMap<FindingKind, Vec<String>> = BTreeMap::new();
    for extract in extracts {
        if let Some(kind) = find_objection(extract, &found) {
            let target = extract.target.to_string();
            blocked.entry(kind).or_default().push(target);
        }
    }
    if blocked.is_empty() {
        return Ok(());
    }
    let told = blocked.into_iter();
    let told = told.map(|(kind, places)| Finding::new(kind, places).describe());
    bail!(
        "nothing was run: results have no place\n{}",
        told.collect::<Vec<_>>().join("\n")
    )
}

/// Why a result cannot go where it should, by which places are directories.
fn find_objection(extract: &Extract, is_directory: &BTreeMap<Url, bool>) -> Option<FindingKind> {
    let at = |url: &Url| is_directory.get(url).copied();
    match (at(&extract.target), extract.is_set()) {
        (Some(true), false) => return Some(FindingKind::TargetIsDirectory),
        (Some(false), true) => return Some(FindingKind::TargetIsFile),
        _ => {}
    }
    let above = parent_of(&extract.target)?;
    (at(&above) == Some(false)).then_some(FindingKind::TargetBelowFile)
}

/// The directory of a target, unless that is the home itself.
fn parent_of(target: &Url) -> Option<Url> {
    let (parent, _) = target.path.trim_end_matches('/').rsplit_once('/')?;
    (!parent.is_empty()).then(|| Url {
        path: parent.to_owned(),
        ..target.clone()
    })
}

/// Which places at homes of a cluster are directories. Of a home that does not answer nothing is
/// known: the run says what it waits for.
fn stat_all(cluster: &ClusterView, places: BTreeSet<Url>) -> Result<BTreeMap<Url, bool>> {
    let places = places.into_iter().filter(|url| url.scheme == Scheme::Bafs);
    let places = places.filter_map(|url| Some((cluster.address(&url).ok()?, url)));
    let places: Vec<(String, Url)> = places.collect();
    let client = cluster.client().clone();
    cluster.run(async move {
        let permits = Arc::new(Semaphore::new(CALLS_MAX));
        let mut asking = JoinSet::new();
        for (address, url) in places {
            let (client, permits) = (client.clone(), Arc::clone(&permits));
            asking.spawn(async move {
                let _permit = permits.acquire_owned().await;
                let path = url.path.trim_matches('/').to_owned();
                let found = client.call(&address, StatSource { path }).await.ok()?;
                let is_directory = matches!(
                    found.kind,
                    SourceKind::Directory | SourceKind::UnreadableDirectory
                );
                Some((url, is_directory))
            });
        }
        Ok(asking.join_all().await.into_iter().flatten().collect())
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use bafs_workflow::parse_workflow;

    use super::*;

    #[test]
    fn run_is_refused_where_results_have_no_place() {
        let home = tempfile::tempdir().expect("a directory");
        fs::create_dir(home.path().join("r")).expect("mkdir");
        fs::write(home.path().join("file"), "x").expect("write");
        let check = |target: &str, running: &[u32]| {
            let text = format!(
                "volume w scratch 1 MB\nmount w a /w\njob a {{\nexecutable = sh\n}}\n\
                 extract w x {target}\n"
            );
            let none = |path: &str| Err(path.to_owned());
            let parsed = parse_workflow("w.bafs", &text, &none).expect("it is right");
            let view = HomeView::Directory(home.path().to_owned());
            let running = running.iter().copied().map(JobIndex).collect();
            let checked = check_targets(&view, &parsed.workflow, &running);
            checked.map_err(|error| error.to_string())
        };
        let told = check("bafs://home/r", &[0]).expect_err("a directory");
        assert!(
            told.contains("1 extract would replace a directory\n  bafs://home/r\n  to do: "),
            "{told}"
        );
        assert!(
            check("bafs://home/file/", &[0]).is_err(),
            "a set is a directory"
        );
        assert!(check("bafs://home/file/x", &[0]).is_err(), "below a file");
        assert_eq!(check("bafs://home/r/x", &[0]), Ok(()));
        assert_eq!(check("bafs://home/new/x", &[0]), Ok(()));
        assert_eq!(check("bafs://home/r", &[]), Ok(()), "it sends nothing");
    }
}
