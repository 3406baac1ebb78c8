//! Whether a workflow reads from a home what it sends there itself. Nothing orders the two: a first
//! run reads what is not there yet, a later one what the run before left.

use std::collections::BTreeMap;

use super::diagnostic::{Diagnostics, SourceLocation};
use super::model::{VolumeIndex, VolumeKind, Workflow};
use super::url::{Scheme, Url};

/// Where a file goes: the volume that it comes from, and where that is declared.
pub(super) type LocatedTarget = (VolumeIndex, SourceLocation);

/// A home, and a path there by its parts, so that what is below a path comes right behind it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct HomePathKey {
    /// What is equal for two URLs of one home.
    pub home: String,
    /// The path there.
    pub parts: Vec<String>,
}

/// Where an extract goes, and the volume that it comes from.
#[derive(Debug, Clone, Copy)]
pub struct ExtractTarget<'w> {
    /// The volume that it comes from.
    pub from: VolumeIndex,
    /// Where it goes.
    pub url: &'w Url,
}

/// A volume that shows or holds what an extract sends.
#[derive(Debug)]
pub struct Overlap<'w> {
    /// The volume.
    pub volume: VolumeIndex,
    /// What it shows, or was filled from.
    pub source: &'w Url,
    /// What an extract sends there.
    pub target: ExtractTarget<'w>,
}

/// Refuses caches, and volumes filled from a home, whose source is a target of an extract, or lies
/// above or below one. What comes back to the place that its own volume was filled from is right:
/// it is filled before, always. `places` are those of the volumes.
pub(super) fn check_overlaps(
    workflow: &Workflow,
    targets: &BTreeMap<Url, LocatedTarget>,
    places: &[SourceLocation],
    diagnostics: &mut Diagnostics,
) {
    let all = targets
        .iter()
        .map(|(url, (from, _))| ExtractTarget { from: *from, url });
    for overlap in find_overlaps(workflow, all, textual_key) {
        let volume = workflow.volume(overlap.volume);
        let (name, source, target) = (&volume.name, overlap.source, overlap.target.url);
        let from = &workflow.volume(overlap.target.from).name;
        let (declared, verb) = match volume.kind {
            VolumeKind::Cache { .. } => ("a cache of", "shows"),
            VolumeKind::Scratch { .. } => ("filled from", "holds"),
        };
        let (_, at) = targets[target];
        let message = format!(
            "volume '{name}' is {declared} '{source}', where {} extracts '{target}': what it \
             {verb} of that depends on chance, and on earlier runs",
            diagnostics.describe_location(at)
        );
        let place = places[overlap.volume.as_usize()];
        diagnostics.error_hint(place, message, overlap_hint(from));
    }
}

/// What to do about an overlap with what volume `from` holds.
pub fn overlap_hint(from: &str) -> String {
    format!("mount '{from}' 'ro' in the jobs that read what it holds, or extract to a place apart")
}

/// The first overlap of each volume. URLs are of one home when `key_of` says so; it is nothing for
/// one of which nobody knows where it is.
pub fn find_overlaps<'w>(
    workflow: &'w Workflow,
    targets: impl Iterator<Item = ExtractTarget<'w>>,
    key_of: impl Fn(&Url) -> Option<HomePathKey>,
) -> Vec<Overlap<'w>> {
    let mut by_key: BTreeMap<HomePathKey, Vec<ExtractTarget<'w>>> = BTreeMap::new();
    for target in targets {
        if let Some(key) = key_of(target.url) {
            by_key.entry(key).or_default().push(target);
        }
    }
    if by_key.is_empty() {
        return Vec::new();
    }
    let volumes = (0..).map(VolumeIndex).zip(&workflow.volumes);
    let overlaps = volumes.filter_map(|(index, volume)| {
        let (source, is_cache) = match &volume.kind {
            VolumeKind::Cache { source, .. } => (source, true),
            VolumeKind::Scratch { fill: Some(source) } => (source, false),
            VolumeKind::Scratch { fill: None } => return None,
        };
        let is_own = |target: &ExtractTarget<'_>| !is_cache && target.from == index;
        let target = find_overlapping(&by_key, &key_of(source)?, is_own)?;
        Some(Overlap {
            volume: index,
            source,
            target,
        })
    });
    overlaps.collect()
}

/// What two URLs have in common that name a place the same way.
pub fn textual_key(url: &Url) -> Option<HomePathKey> {
    Some(HomePathKey {
        home: format!("{}://{}", url.scheme.name(), host_of(url)),
        parts: path_parts(url),
    })
}

/// The path of a URL by its parts.
fn path_parts(url: &Url) -> Vec<String> {
    let path = match url.scheme {
        // Behind a `?` is no path, but of what is in front of it.
        Scheme::Http | Scheme::Https => url.path.split('?').next().unwrap_or_default(),
        _ => &url.path,
    };
    split_parts(path)
}

/// The parts of a path.
pub fn split_parts(path: &str) -> Vec<String> {
    let parts = path.split('/').filter(|part| !part.is_empty());
    parts.map(str::to_owned).collect()
}

/// The host without a port that is the usual one.
fn host_of(url: &Url) -> String {
    let usual = match url.scheme {
        Scheme::Ftp | Scheme::Ftps => ":21",
        Scheme::Sftp => ":22",
        Scheme::Http => ":80",
        Scheme::Https => ":443",
        Scheme::Bafs | Scheme::File | Scheme::S3 => return url.host.clone(),
    };
    url.host.strip_suffix(usual).unwrap_or(&url.host).to_owned()
}

/// The first target that is this place, or lies above or below it.
fn find_overlapping<'w>(
    targets: &BTreeMap<HomePathKey, Vec<ExtractTarget<'w>>>,
    whole: &HomePathKey,
    is_own: impl Fn(&ExtractTarget<'w>) -> bool,
) -> Option<ExtractTarget<'w>> {
    let of_another = |all: &Vec<ExtractTarget<'w>>| all.iter().find(|it| !is_own(it)).copied();
    let mut above = whole.clone();
    while above.parts.pop().is_some() {
        if let Some(found) = targets.get(&above).and_then(of_another) {
            return Some(found);
        }
    }
    let below = targets.range(whole.clone()..);
    let mut below =
        below.take_while(|(key, _)| key.home == whole.home && key.parts.starts_with(&whole.parts));
    below.find_map(|(_, all)| of_another(all))
}
