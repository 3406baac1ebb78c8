//! What homes and this machine have now of all that a workflow reads, runs and made, so that it can
//! be compared with what earlier runs saw. A few calls, many at once. Decides nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, bail};
use bafs_proto::file_set::MANIFEST_NAME;
use bafs_proto::message::{ListSource, SourceEntry, SourceKind, StatSource};
use bafs_proto::{Error, ErrorCode};
use bafs_sched::earlier_work::{
    FoundResult, HomeState, JobRecord, SourceListing, SourceState, source_of,
};
use bafs_server::home_server::DirectoryView;
use bafs_workflow::{Scheme, Url, Workflow};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use super::foreign_homes;
use super::host_files::find_host_files;
use super::sent_set::{MANIFEST_BYTES_MAX, find_manifest, find_set};
use crate::beside_files::BesideFiles;
use crate::client::ClusterClient;
use crate::home_view::{ClusterView, HomeView, LOCAL_HOME};

/// Calls to homes at once.
pub(super) const CALLS_MAX: usize = 32;

/// Entries of one listing that are held: those that a volume may have.
const ENTRIES_MAX: usize = bafs_proto::limits::MANIFEST_ENTRIES_MAX;

/// Looks at the sources and results of a workflow, and at its programs. `records` are those of its
/// jobs that ran.
///
/// # Errors
/// A home that records name cannot be reached.
pub(super) fn look_at_homes(
    view: &HomeView,
    workflow: &Workflow,
    records: &BTreeMap<String, JobRecord>,
) -> Result<HomeState> {
    let recorded = workflow
        .jobs
        .iter()
        .filter_map(|job| records.get(&job.name));
    let seen: BTreeSet<Url> = recorded
        .clone()
        .flat_map(|record| record.sources.iter().map(|it| it.source.clone()))
        .collect();
    let declared = workflow.volumes.iter();
    let declared = declared.filter_map(|volume| source_of(&volume.kind).cloned());
    let sources: BTreeSet<Url> = declared.chain(seen.iter().cloned()).collect();
    let sent = recorded.flat_map(|record| record.results.iter().map(|it| it.target.clone()));
    let sets = workflow.extracts.iter().filter(|extract| extract.is_set());
    let sets: BTreeSet<&Url> = sets.map(|extract| &extract.target).collect();
    let results: BTreeSet<Url> = sent.collect();
    let results = results.into_iter().map(|target| SentResult {
        is_set: sets.contains(&target),
        target,
    });
    let results = results.collect();
    let is_foreign = |url: &Url| !matches!(url.scheme, Scheme::Bafs | Scheme::File);
    let (foreign, sources): (BTreeSet<Url>, BTreeSet<Url>) =
        sources.into_iter().partition(is_foreign);
    let (mut sources, results) = match view {
        HomeView::Directory(directory) | HomeView::Beside { directory, .. } => {
            look_at_directory(directory, sources, results)
        }
        HomeView::Cluster(cluster) => {
            let (copied, others) = sources
                .into_iter()
                .partition(|url| cluster.beside().copy_of(url).is_some());
            let (mut listed, found) = look_at_cluster(cluster, others, results)?;
            listed.extend(look_at_copies(cluster.beside(), copied));
            (listed, found)
        }
    };
    sources.extend(foreign_homes::look_at_foreign_homes(foreign)?);
    // Of a home that is away nobody knows what changed; of one that no record names it may do.
    for (url, state) in &sources {
        if let SourceState::Unreadable(why) | SourceState::Unknown(why) = state
            && seen.contains(url)
            && url.scheme == Scheme::Bafs
        {
            bail!(
                "cannot see what changed at {url}: {why}; start that home, or run all jobs again \
                 with --forced"
            );
        }
    }
    let (programs, files) = find_host_files(workflow);
    Ok(HomeState {
        sources,
        results,
        programs,
        files,
    })
}

/// A result that went home.
struct SentResult {
    target: Url,
    /// It is a directory then, with a manifest.
    is_set: bool,
}

type Found = (BTreeMap<Url, SourceState>, BTreeMap<Url, FoundResult>);

pub(super) fn to_source(listed: Result<Vec<SourceEntry>, Error>) -> SourceState {
    match listed {
        Ok(entries) => SourceState::Listed(SourceListing::new(entries)),
        Err(error) => match error.code {
            ErrorCode::NotFound => SourceState::Missing,
            ErrorCode::RightMissing => SourceState::Unreadable(error.to_string()),
            _ => SourceState::Unknown(error.to_string()),
        },
    }
}

fn to_result(entry: SourceEntry) -> FoundResult {
    match entry.kind {
        SourceKind::File => FoundResult::Present(entry.identity),
        // What is there is no result.
        _ => FoundResult::Missing,
    }
}

fn to_missing(error: Error) -> FoundResult {
    match error.code {
        ErrorCode::NotFound => FoundResult::Missing,
        _ => FoundResult::Unknown(error.to_string()),
    }
}

/// Programs beside the workflow, as the home shows them that the run will serve.
fn look_at_copies(beside: &BesideFiles, sources: BTreeSet<Url>) -> Vec<(Url, SourceState)> {
    let listed = sources.into_iter().filter_map(|url| {
        let (directory, path) = beside.copy_of(&url)?;
        let listed = DirectoryView::open(directory).and_then(|view| view.list(&path));
        Some((url, to_source(listed)))
    });
    listed.collect()
}

/// The directory that a throw-away cluster exports, without the cluster.
fn look_at_directory(export: &Path, sources: BTreeSet<Url>, results: Vec<SentResult>) -> Found {
    let export = match export.as_os_str().is_empty() {
        true => Path::new("."),
        false => export,
    };
    let view = DirectoryView::open(export);
    let place = |url: &Url| -> Result<(&DirectoryView, String), Error> {
        let view = view.as_ref().map_err(Clone::clone)?;
        let elsewhere = || {
            let text = "it is not in the directory of this machine that is exported";
            Error::new(ErrorCode::Unsupported, text)
        };
        let below = match url.scheme {
            Scheme::Bafs if url.host == LOCAL_HOME => url.path.clone(),
            Scheme::File => {
                let root = export.canonicalize().map_err(|_| elsewhere())?;
                let below = Path::new(&url.path).strip_prefix(root);
                let below = below.map_err(|_| elsewhere())?;
                below.to_string_lossy().into_owned()
            }
            _ => return Err(elsewhere()),
        };
        Ok((view, below.trim_matches('/').to_owned()))
    };
    let listed = sources.into_iter().map(|url| {
        let listed = place(&url).and_then(|(view, path)| view.list(&path));
        (url, to_source(listed))
    });
    let found = results.into_iter().map(|sent| {
        let found = place(&sent.target).and_then(|(view, path)| match sent.is_set {
            true => find_set_in(view, &path),
            false => view.stat(&path).map(to_result),
        });
        (sent.target, found.unwrap_or_else(to_missing))
    });
    (listed.collect(), found.collect())
}

fn find_set_in(view: &DirectoryView, path: &str) -> Result<FoundResult, Error> {
    let entries = view.list(path)?;
    let Some(manifest) = find_manifest(&entries) else {
        return Ok(FoundResult::Missing);
    };
    let bytes = view.read(&format!("{path}/{MANIFEST_NAME}"), MANIFEST_BYTES_MAX)?;
    Ok(find_set(&entries, manifest, &bytes))
}

/// The homes of a cluster, with many calls at once.
fn look_at_cluster(
    cluster: &ClusterView,
    sources: BTreeSet<Url>,
    results: Vec<SentResult>,
) -> Result<Found> {
    let place = |url: &Url| -> Result<String, Error> {
        if url.scheme != Scheme::Bafs {
            let text = "only bafs: homes are looked at";
            return Err(Error::new(ErrorCode::Unsupported, text));
        }
        let address = cluster.address(url);
        address.map_err(|error| Error::new(ErrorCode::Unreachable, format!("{error:#}")))
    };
    let sources = sources.into_iter().map(|url| (place(&url), url));
    let sources: Vec<_> = sources.collect();
    let results = results.into_iter().map(|sent| (place(&sent.target), sent));
    let results: Vec<_> = results.collect();
    let client = cluster.client().clone();
    cluster.run(async move {
        let permits = Arc::new(Semaphore::new(CALLS_MAX));
        let mut listings = JoinSet::new();
        for (address, url) in sources {
            let (client, permits) = (client.clone(), Arc::clone(&permits));
            listings.spawn(async move {
                let _permit = permits.acquire_owned().await;
                let listed = match address {
                    Ok(address) => list_source(&client, &address, &url).await,
                    Err(error) => Err(error),
                };
                (url, to_source(listed))
            });
        }
        let mut stats = JoinSet::new();
        for (address, sent) in results {
            let (client, permits) = (client.clone(), Arc::clone(&permits));
            stats.spawn(async move {
                let _permit = permits.acquire_owned().await;
                let found = match address {
                    Ok(address) => find_result(&client, &address, &sent).await,
                    Err(error) => Err(error),
                };
                (sent.target, found.unwrap_or_else(to_missing))
            });
        }
        let listed = listings.join_all().await.into_iter().collect();
        Ok((listed, stats.join_all().await.into_iter().collect()))
    })
}

async fn find_result(
    client: &ClusterClient,
    address: &str,
    sent: &SentResult,
) -> Result<FoundResult, Error> {
    let path = sent.target.path.trim_matches('/').to_owned();
    if !sent.is_set {
        let found = call_home(client, address, StatSource { path }).await;
        return found.map(to_result);
    }
    let entries = list_source(client, address, &sent.target).await?;
    let Some(manifest) = find_manifest(&entries) else {
        return Ok(FoundResult::Missing);
    };
    let path = format!("{path}/{MANIFEST_NAME}");
    let bytes = client.read_source(address, &path, manifest).await;
    let bytes = bytes.map_err(to_known_error)?;
    Ok(find_set(&entries, manifest, &bytes))
}

async fn list_source(
    client: &ClusterClient,
    address: &str,
    url: &Url,
) -> Result<Vec<SourceEntry>, Error> {
    let (mut entries, mut after) = (Vec::new(), None);
    loop {
        let call = ListSource {
            path: url.path.trim_matches('/').to_owned(),
            after: after.take(),
        };
        let page = call_home(client, address, call).await?;
        after = page.entries.last().map(|entry| entry.path.clone());
        entries.extend(page.entries);
        if entries.len() > ENTRIES_MAX {
            let text = format!("it has more than {ENTRIES_MAX} files");
            return Err(Error::new(ErrorCode::Unsupported, text));
        }
        if !page.has_more || after.is_none() {
            return Ok(entries);
        }
    }
}

async fn call_home<C: bafs_proto::message::Call + Clone>(
    client: &ClusterClient,
    address: &str,
    call: C,
) -> Result<C::Reply, Error> {
    let answer = client.call(address, call).await;
    answer.map_err(to_known_error)
}

fn to_known_error(error: anyhow::Error) -> Error {
    match error.downcast::<Error>() {
        Ok(error) => error,
        Err(error) => Error::new(ErrorCode::Unreachable, format!("{error:#}")),
    }
}
