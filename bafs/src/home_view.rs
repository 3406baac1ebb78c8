//! Homes as a command looks at them before anything runs: a directory of this machine that stands
//! for `bafs://home/`, or the home servers of a cluster. It changes nothing there.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use anyhow::{Result, anyhow};
use bafs_proto::attributes::AttributeValue;
use bafs_proto::limits::PROGRAMS_MAX;
use bafs_proto::message::{Advert, FindPrograms, ListSource, ServerKind, SourceKind, StatSource};
use bafs_proto::volume::VolumeSource;
use bafs_proto::{Error, ErrorCode};
use bafs_server::executor::machine_memory_bytes;
use bafs_workflow::{ListedEntry, LocatedFile, Scheme, Url};
use tokio::runtime::Runtime;
use tokio::task::JoinSet;

use crate::beside_files::{BesideFiles, find_file};
use crate::client::ClusterClient;

/// The host of `bafs://home/`, the home of a throw-away cluster.
pub(crate) const LOCAL_HOME: &str = "home";

/// Entries of one listing that are held: those that a volume may have.
const ENTRIES_MAX: usize = bafs_proto::limits::MANIFEST_ENTRIES_MAX;

/// Nodes that are asked for programs: those of a large cluster are alike.
const NODES_ASKED_MAX: usize = 64;

/// What is at a place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct FoundPath {
    pub(crate) is_directory: bool,
    /// Permission bits.
    pub(crate) mode: u32,
}

/// What a node has for jobs, apart from volumes; nothing where it does not say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct NodeResources {
    pub(crate) memory_bytes: Option<u64>,
    pub(crate) temporary_bytes: Option<u64>,
}

/// How many nodes lack a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NodesWithout {
    All,
    Some,
}

/// Why nothing is known of a place, or nothing good.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LookupError {
    /// Nothing is there.
    Missing,
    /// Something is there that the home may not read.
    Unreadable,
    /// The home does not answer.
    Away,
    /// The home cannot be asked, and why.
    Unknown(String),
}

/// Where a command looks.
pub(crate) enum HomeView {
    /// The directory that a throw-away cluster exports, or would.
    Directory(PathBuf),
    /// The homes of a cluster.
    Cluster(Box<ClusterView>),
    /// None: only what travels with the workflow is looked at. Patterns find what is in the
    /// directory.
    Beside {
        /// That of the workflow.
        directory: PathBuf,
        /// What the workflow names of this machine.
        files: BesideFiles,
    },
}

/// Home servers with a runtime of their own: a command may ask from wherever it is.
pub(crate) struct ClusterView {
    client: ClusterClient,
    /// What the workflow names of this machine.
    beside: BesideFiles,
    /// `None` only while it is dropped.
    runtime: Option<Runtime>,
    /// Address and whether it is known, by the host of a URL.
    addresses: Mutex<BTreeMap<String, Result<String, String>>>,
    /// Names and addresses of homes, once the catalog was asked; nothing if it did not answer.
    listed: OnceLock<Option<Vec<(String, String)>>>,
}

impl HomeView {
    /// The directory of a workflow file stands for `bafs://home/`.
    pub(crate) fn beside(workflow: &Path) -> Self {
        let directory = workflow.parent().map(Path::to_owned).unwrap_or_default();
        Self::Directory(directory)
    }

    /// No home.
    pub(crate) fn without_homes(workflow: &Path) -> Self {
        Self::Beside {
            directory: workflow.parent().map(Path::to_owned).unwrap_or_default(),
            files: BesideFiles::of_workflow(workflow),
        }
    }

    /// The cluster that two variables name, else the directory of the workflow.
    pub(crate) fn from_environment(workflow: &Path) -> Self {
        let named = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let cluster = named("BAFS_IDENTITY").zip(named("BAFS_CATALOG"));
        let view = cluster
            .map(|(identity, catalog)| Self::of_cluster(Path::new(&identity), &catalog, workflow));
        view.and_then(Result::ok)
            .unwrap_or_else(|| Self::beside(workflow))
    }

    /// The homes of a cluster.
    ///
    /// # Errors
    /// The identity cannot be read.
    pub(crate) fn of_cluster(identity: &Path, catalog: &str, workflow: &Path) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()?;
        let connected = {
            let _entered = runtime.enter();
            ClusterClient::connect(identity, catalog)
        };
        match connected {
            Ok(client) => Ok(Self::Cluster(Box::new(ClusterView {
                client,
                beside: BesideFiles::of_workflow(workflow),
                runtime: Some(runtime),
                addresses: Mutex::default(),
                listed: OnceLock::new(),
            }))),
            Err(error) => {
                // To wait for its threads is not allowed in a runtime.
                runtime.shutdown_background();
                Err(error)
            }
        }
    }

    /// The directory of this machine that a URL names, if it is one.
    pub(crate) fn local_path(&self, url: &Url) -> Option<PathBuf> {
        match (self, url.scheme) {
            (Self::Directory(export), Scheme::Bafs) if url.host == LOCAL_HOME => {
                let path = export.join(url.path.trim_start_matches('/'));
                // The empty path is the working directory, which no call takes.
                Some(Path::new(".").join(path))
            }
            (Self::Directory(_), Scheme::File) => Some(PathBuf::from(&url.path)),
            (Self::Cluster(cluster), _) => cluster.beside.local_path(url),
            (Self::Beside { files, .. }, _) => files.local_path(url),
            _ => None,
        }
    }

    /// Whether a URL names a home that a throw-away cluster cannot have.
    pub(crate) fn lacks_home(&self, url: &Url) -> bool {
        let is_other = url.scheme == Scheme::Bafs && url.host != LOCAL_HOME;
        matches!(self, Self::Directory(_)) && is_other
    }

    /// Whether the catalog answers, and lists no home of the name in a URL.
    pub(crate) fn is_unlisted(&self, url: &Url) -> bool {
        let is_named = url.scheme == Scheme::Bafs && !url.host.contains(':');
        match self {
            Self::Cluster(cluster) if is_named && self.local_path(url).is_none() => {
                cluster.is_unlisted(&url.host)
            }
            _ => false,
        }
    }

    /// The name of the home that is listed at an address, as URLs have it.
    pub(crate) fn name_at(&self, address: &str) -> Option<String> {
        let Self::Cluster(cluster) = self else {
            return None;
        };
        let mut listed = cluster.listed_homes()?.iter();
        let found = listed.find(|(_, at)| at == address);
        found.map(|(name, _)| name.to_ascii_lowercase())
    }

    /// Where jobs find a file of this machine.
    ///
    /// # Errors
    /// It is no file, or no home has it: why, as a person is told.
    pub(crate) fn locate(&self, path: &Path) -> Result<LocatedFile, String> {
        let export = match self {
            Self::Cluster(cluster) => return cluster.beside.locate(path),
            Self::Beside { files, .. } => return files.locate(path),
            Self::Directory(export) => Path::new(".").join(export),
        };
        let (file, bytes) = find_file(path)?;
        let export = export.canonicalize().map_err(|error| error.to_string())?;
        let below = file.strip_prefix(&export).map_err(|_| {
            let (file, export) = (file.display(), export.display());
            format!("{file} is not in {export}, which is exported; give --export, or move it")
        })?;
        let url = Url {
            scheme: Scheme::Bafs,
            host: LOCAL_HOME.to_owned(),
            path: format!("/{}", below.to_string_lossy()),
        };
        Ok(LocatedFile { url, bytes })
    }

    /// What is at a place.
    ///
    /// # Errors
    /// See [`LookupError`].
    pub(crate) fn stat(&self, url: &Url) -> Result<FoundPath, LookupError> {
        if let Some(path) = self.local_path(url) {
            return stat_local(&path);
        }
        match self {
            Self::Cluster(cluster) if url.scheme == Scheme::Bafs => cluster.stat(url),
            _ => {
                let text = format!("{url} cannot be looked at from here");
                Err(LookupError::Unknown(text))
            }
        }
    }

    /// What the node has that has most of it; nothing if no node says so.
    pub(crate) fn largest_node(&self) -> Option<NodeResources> {
        match self {
            Self::Directory(_) => Some(NodeResources {
                memory_bytes: Some(machine_memory_bytes()),
                temporary_bytes: None,
            }),
            Self::Cluster(cluster) => cluster.largest_node(),
            Self::Beside { .. } => None,
        }
    }

    /// Programs that nodes lack, as far as they say so. A machine that runs jobs itself is asked
    /// directly.
    pub(crate) fn nodes_without(&self, programs: &[String]) -> BTreeMap<String, NodesWithout> {
        match self {
            Self::Directory(_) | Self::Beside { .. } => BTreeMap::new(),
            Self::Cluster(cluster) => cluster.nodes_without(programs),
        }
    }

    /// What is below a place, down to some levels, at least in the directories that `enters` names.
    ///
    /// # Errors
    /// Why it cannot be listed, as a person is told.
    pub(crate) fn list(
        &self,
        url: &Url,
        depth: usize,
        enters: &dyn Fn(&str) -> bool,
    ) -> Result<Vec<ListedEntry>, String> {
        if let Some(path) = self.local_path(url) {
            return list_local(&path, depth, enters);
        }
        match self {
            Self::Cluster(cluster) if url.scheme == Scheme::Bafs => {
                cluster.list(url).map_err(|error| format!("{error:#}"))
            }
            Self::Beside { directory, .. }
                if url.scheme == Scheme::Bafs && url.host == LOCAL_HOME =>
            {
                let path = directory.join(url.path.trim_start_matches('/'));
                list_local(&Path::new(".").join(path), depth, enters)
            }
            _ if url.scheme == Scheme::Bafs => Err(format!(
                "home '{}' is asked with --identity and --catalog",
                url.host
            )),
            _ => Err("only bafs: and file: homes are listed".to_owned()),
        }
    }
}

impl ClusterView {
    /// Programs and scripts of this machine that the workflow names.
    pub(crate) fn beside(&self) -> &BesideFiles {
        &self.beside
    }

    /// The connection to it.
    pub(crate) fn client(&self) -> &ClusterClient {
        &self.client
    }

    fn stat(&self, url: &Url) -> Result<FoundPath, LookupError> {
        let address = self.address(url).map_err(|_| LookupError::Away)?;
        let call = StatSource {
            path: url.path.trim_matches('/').to_owned(),
        };
        let found = self.run(async { self.client.call(&address, call).await });
        match found {
            Ok(entry) => match entry.kind {
                SourceKind::UnreadableDirectory => Err(LookupError::Unreadable),
                kind => Ok(FoundPath {
                    is_directory: kind == SourceKind::Directory,
                    mode: entry.mode,
                }),
            },
            Err(error) => Err(
                match error.downcast_ref::<Error>().map(|known| known.code) {
                    Some(ErrorCode::NotFound) => LookupError::Missing,
                    Some(ErrorCode::RightMissing) => LookupError::Unreadable,
                    Some(ErrorCode::Unreachable | ErrorCode::DeadlineExceeded) => LookupError::Away,
                    _ => LookupError::Unknown(format!("{error:#}")),
                },
            ),
        }
    }

    fn nodes_without(&self, programs: &[String]) -> BTreeMap<String, NodesWithout> {
        let asked = self.run(async {
            let nodes = self.client.list_servers(Some(ServerKind::Node)).await?;
            let nodes = nodes.into_iter().filter(|node| node.slots > 0);
            let mut asking = JoinSet::new();
            for node in nodes.take(NODES_ASKED_MAX) {
                let (client, programs) = (self.client.clone(), programs.to_vec());
                asking.spawn(async move {
                    let mut missing = BTreeSet::new();
                    for part in programs.chunks(PROGRAMS_MAX) {
                        let programs = part.to_vec();
                        let call = FindPrograms { programs };
                        missing.extend(client.call(&node.address, call).await?.programs);
                    }
                    Ok::<_, anyhow::Error>(missing)
                });
            }
            Ok(asking.join_all().await)
        });
        // Of a node that does not answer nothing is known.
        let known: Vec<BTreeSet<String>> =
            asked.unwrap_or_default().into_iter().flatten().collect();
        let lacking = programs.iter().filter_map(|program| {
            let count = known
                .iter()
                .filter(|missing| missing.contains(program))
                .count();
            match count {
                0 => None,
                count if count == known.len() => Some((program.clone(), NodesWithout::All)),
                _ => Some((program.clone(), NodesWithout::Some)),
            }
        });
        lacking.collect()
    }

    fn largest_node(&self) -> Option<NodeResources> {
        let nodes = self.run(self.client.list_servers(Some(ServerKind::Node)));
        let nodes = nodes.ok()?;
        let runs_jobs = |node: &&Advert| node.slots > 0;
        // One that does not say it may have any.
        let most = |name: &str| {
            let bytes = nodes
                .iter()
                .filter(runs_jobs)
                .map(|node| match node.attribute(name) {
                    Some(AttributeValue::Integer(bytes)) => u64::try_from(bytes).ok(),
                    _ => None,
                });
            bytes.collect::<Option<Vec<u64>>>()?.into_iter().max()
        };
        Some(NodeResources {
            memory_bytes: most("memory_bytes"),
            temporary_bytes: most("temporary_bytes"),
        })
    }

    fn list(&self, url: &Url) -> Result<Vec<ListedEntry>> {
        let address = self.address(url)?;
        let path = url.path.trim_matches('/').to_owned();
        self.run(async {
            let (mut entries, mut after) = (Vec::new(), None);
            loop {
                let call = ListSource {
                    path: path.clone(),
                    after: after.take(),
                };
                let page = self.client.call(&address, call).await?;
                after = page.entries.last().map(|entry| entry.path.clone());
                entries.extend(page.entries.into_iter().map(|entry| ListedEntry {
                    is_directory: matches!(
                        entry.kind,
                        SourceKind::Directory | SourceKind::UnreadableDirectory
                    ),
                    path: entry.path,
                }));
                if entries.len() > ENTRIES_MAX {
                    return Err(anyhow!("{url} has more than {ENTRIES_MAX} files below it"));
                }
                if !page.has_more || after.is_none() {
                    return Ok(entries);
                }
            }
        })
    }

    fn is_unlisted(&self, name: &str) -> bool {
        let is_it = |(listed, _): &(String, String)| listed.eq_ignore_ascii_case(name);
        self.listed_homes()
            .is_some_and(|listed| !listed.iter().any(is_it))
    }

    /// Names and addresses of the homes that the catalog lists, if it answers.
    fn listed_homes(&self) -> Option<&Vec<(String, String)>> {
        let listed = self.listed.get_or_init(|| {
            let homes = self.run(self.client.list_servers(Some(ServerKind::Home)));
            let homes = homes.ok()?.into_iter();
            Some(homes.map(|home| (home.name, home.address)).collect())
        });
        listed.as_ref()
    }

    /// Where the home server of a URL listens.
    ///
    /// # Errors
    /// There is none.
    pub(crate) fn address(&self, url: &Url) -> Result<String> {
        let known = self.addresses.lock();
        let mut known = known.unwrap_or_else(PoisonError::into_inner);
        let address = known.entry(url.host.clone()).or_insert_with(|| {
            let source = self.run(self.client.resolve_source(&url.to_string()));
            match source {
                Ok(VolumeSource::Home { address, .. }) => Ok(address),
                Ok(VolumeSource::Volume { .. }) => Err(format!("{url} is no home")),
                Err(error) => Err(format!("{error:#}")),
            }
        });
        address.clone().map_err(|text| anyhow!(text))
    }

    /// Waits on a thread of its own: the caller may be in a runtime, which must not block.
    ///
    /// # Errors
    /// Those of the work.
    pub(crate) fn run<T: Send>(&self, work: impl Future<Output = Result<T>> + Send) -> Result<T> {
        let Some(runtime) = &self.runtime else {
            return Err(anyhow!("the runtime has ended"));
        };
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| runtime.block_on(work));
            let ended = waiting.join();
            ended.unwrap_or_else(|_| Err(anyhow!("a call to a home failed")))
        })
    }
}

impl Drop for ClusterView {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // To wait for its threads is not allowed in a runtime.
            runtime.shutdown_background();
        }
    }
}

fn stat_local(path: &Path) -> Result<FoundPath, LookupError> {
    let metadata = fs::metadata(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => LookupError::Missing,
        io::ErrorKind::PermissionDenied => LookupError::Unreadable,
        _ => LookupError::Unknown(format!("{}: {error}", path.display())),
    })?;
    let is_readable = match metadata.is_dir() {
        true => fs::read_dir(path).is_ok(),
        false => !metadata.is_file() || fs::File::open(path).is_ok(),
    };
    match is_readable {
        true => Ok(FoundPath {
            is_directory: metadata.is_dir(),
            mode: metadata.permissions().mode() & 0o7777,
        }),
        false => Err(LookupError::Unreadable),
    }
}

/// What is below a directory of this machine, in the directories that `enters` names. A name that
/// is no UTF-8 matches no pattern, and is left out.
///
/// # Errors
/// Why it cannot be listed, as a person is told.
pub(crate) fn list_local(
    directory: &Path,
    depth: usize,
    enters: &dyn Fn(&str) -> bool,
) -> Result<Vec<ListedEntry>, String> {
    let mut entries = Vec::new();
    let mut open = vec![(directory.to_owned(), String::new(), depth)];
    while let Some((path, prefix, levels)) = open.pop() {
        let listed = match fs::read_dir(&path) {
            Ok(listed) => listed,
            // Below the top it may have gone, or be private: its names then match nothing.
            Err(_) if !prefix.is_empty() => continue,
            Err(error) => return Err(error.to_string()),
        };
        for entry in listed.flatten() {
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            let is_directory = entry.path().is_dir();
            let below = format!("{prefix}{name}");
            if is_directory && levels > 1 && enters(&below) {
                open.push((entry.path(), format!("{below}/"), levels - 1));
            }
            entries.push(ListedEntry {
                path: below,
                is_directory,
            });
            if entries.len() > ENTRIES_MAX {
                return Err(format!("it has more than {ENTRIES_MAX} files below it"));
            }
        }
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn url(text: &str) -> Url {
        text.parse().expect("a URL")
    }

    #[test]
    fn local_home_is_a_directory() {
        let directory = tempfile::tempdir().expect("a directory");
        let reads = directory.path().join("reads/deep");
        fs::create_dir_all(&reads).expect("mkdir");
        fs::write(reads.join("a.fq"), "x").expect("write");
        let view = HomeView::Directory(directory.path().to_owned());
        let found = view
            .stat(&url("bafs://home/reads/deep/a.fq"))
            .expect("a file");
        assert!(!found.is_directory && found.mode & 0o400 != 0);
        assert!(
            view.stat(&url("bafs://home/reads"))
                .expect("it")
                .is_directory
        );
        assert_eq!(
            view.stat(&url("bafs://home/none")),
            Err(LookupError::Missing)
        );
        let unknown = view.stat(&url("s3://bucket/x"));
        assert!(
            matches!(unknown, Err(LookupError::Unknown(_))),
            "{unknown:?}"
        );
        let all = |_: &str| true;
        let listed = |depth| {
            let listed = view.list(&url("bafs://home/reads"), depth, &all);
            listed.expect("a list")
        };
        assert_eq!(listed(1).len(), 1);
        assert_eq!(listed(2)[1].path, "deep/a.fq");
        let none = view.list(&url("bafs://home/reads"), 2, &|path| path != "deep");
        assert_eq!(
            none.expect("a list").len(),
            1,
            "only what is wanted is read"
        );
        assert!(view.list(&url("bafs://home/none"), 1, &all).is_err());
    }
}
