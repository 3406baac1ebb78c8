//! Whether a run reads from a home what it sends there itself, where its URLs name one home in
//! several ways. Homes are asked who they are, as only they know.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::PoisonError;

use bafs_proto::ids::ServerId;
use bafs_proto::message::ReadCounters;
use bafs_proto::time::Deadline;
use bafs_proto::{Error, ErrorCode, Result};
use bafs_workflow::{
    Extract, ExtractTarget, HomePathKey, Overlap, Scheme, Url, VolumeKind, Workflow, find_overlaps,
    overlap_hint, split_parts, textual_key,
};

use super::homes::FileHome;
use super::servers::Servers;

/// A home says within so long who it is, in milliseconds; it is asked again.
const IDENTITY_TIMEOUT_MS: u64 = 3_000;

/// Which home servers the hosts of a workflow's URLs are.
#[derive(Debug, Default)]
pub(crate) struct HomeAliases {
    /// What asks for nothing more: a home that does not say who it is has its address only.
    by_host: BTreeMap<String, Option<ServerId>>,
}

impl Servers {
    /// Whether homes can be compared: with one name for all, or when the catalog told of them.
    pub(crate) fn can_compare_homes(&self) -> bool {
        let homes = self.homes.lock().unwrap_or_else(PoisonError::into_inner);
        homes.is_listed() || hosts_of(&self.workflow, homes.file_home()).len() < 2
    }

    /// Whether all homes of the workflow are known, after asking those that were not; those that
    /// no URL names in another way need not be.
    ///
    /// # Errors
    /// `Conflict` when the workflow reads what it sends home.
    pub(crate) async fn check_home_aliases(&self, aliases: &mut HomeAliases) -> Result<bool> {
        let (hosts, file_home) = {
            let homes = self.homes.lock().unwrap_or_else(PoisonError::into_inner);
            (
                hosts_of(&self.workflow, homes.file_home()),
                homes.file_home().cloned(),
            )
        };
        // With one name for all the text of the workflow shows every overlap.
        if hosts.len() < 2 {
            return Ok(true);
        }
        let mut is_complete = true;
        for host in hosts {
            if !aliases.by_host.contains_key(&host) {
                is_complete &= self.identify_host(host, aliases).await;
            }
        }
        check_overlaps(&self.workflow, |url| {
            aliases.key_of(url, file_home.as_ref())
        })?;
        Ok(is_complete)
    }

    /// Finds out which home server a host is; answers whether that is known.
    async fn identify_host(&self, host: String, aliases: &mut HomeAliases) -> bool {
        let listed = {
            let homes = self.homes.lock().unwrap_or_else(PoisonError::into_inner);
            homes.server_of_host(&host)
        };
        let found = match listed {
            Some(server) => Ok(Some(server)),
            // A name that no home has yet.
            None if !host.contains(':') => return false,
            None => {
                let deadline = Deadline::after_ms(IDENTITY_TIMEOUT_MS);
                let said = self.call_once(&host, ReadCounters, deadline).await;
                said.map(|said| Some(said.server))
            }
        };
        let server = match found {
            Err(error) if error.is_transient() => return false,
            Err(_) => None,
            Ok(server) => server,
        };
        aliases.by_host.insert(host, server);
        true
    }
}

impl HomeAliases {
    /// The place of a URL, equal for all ways to name it.
    fn key_of(&self, url: &Url, file_home: Option<&FileHome>) -> Option<HomePathKey> {
        let (host, path) = home_server_path(url, file_home)?;
        let Some(host) = host else {
            return textual_key(url);
        };
        let home = match self.by_host.get(host).copied().flatten() {
            Some(server) => format!("server {server}"),
            None => format!("bafs://{host}"),
        };
        Some(HomePathKey {
            home,
            parts: split_parts(path),
        })
    }
}

/// The host of the home server that a URL names, if it names one, and the path there. Nothing for
/// a file that no home shows.
fn home_server_path<'u>(
    url: &'u Url,
    file_home: Option<&'u FileHome>,
) -> Option<(Option<&'u str>, &'u str)> {
    match (url.scheme, file_home) {
        (Scheme::Bafs, _) => Some((Some(&url.host), &url.path)),
        (Scheme::File, Some(home)) => {
            let rest = url.path.strip_prefix(home.root.trim_end_matches('/'))?;
            let is_below = rest.is_empty() || rest.starts_with('/');
            is_below.then_some((Some(home.address.as_str()), rest))
        }
        _ => Some((None, &url.path)),
    }
}

/// The hosts of the home servers that the URLs of a workflow name.
fn hosts_of(workflow: &Workflow, file_home: Option<&FileHome>) -> BTreeSet<String> {
    let hosts = workflow
        .urls()
        .filter_map(|url| home_server_path(url, file_home)?.0);
    hosts.map(str::to_owned).collect()
}

fn check_overlaps(workflow: &Workflow, key_of: impl Fn(&Url) -> Option<HomePathKey>) -> Result<()> {
    let targets = workflow.extracts.iter().map(|extract| ExtractTarget {
        from: extract.volume,
        url: &extract.target,
    });
    match find_overlaps(workflow, targets, key_of).first() {
        Some(overlap) => Err(Error::new(
            ErrorCode::Conflict,
            describe_overlap(workflow, overlap),
        )),
        None => Ok(()),
    }
}

/// An overlap in words, with both statements.
fn describe_overlap(workflow: &Workflow, overlap: &Overlap<'_>) -> String {
    let volume = workflow.volume(overlap.volume);
    let is_sent = |extract: &&Extract| extract.target == *overlap.target.url;
    let path = workflow
        .extracts
        .iter()
        .find(is_sent)
        .map(|it| it.path.as_str());
    let from = &workflow.volume(overlap.target.from).name;
    let declared = match volume.kind {
        VolumeKind::Cache { .. } => "cache",
        VolumeKind::Scratch { .. } => "scratch from",
    };
    format!(
        "'volume {} {declared} {}' reads what 'extract {from} {} {}' sends: both name one place of \
         one home, so what a job reads depends on chance, and on earlier runs; {}",
        volume.name,
        overlap.source,
        path.unwrap_or_default(),
        overlap.target.url,
        overlap_hint(from)
    )
}
