//! Whether a workflow reads from a home what it sends there itself. Nothing orders the two: a first
//! run reads what is not there yet, a later one what the run before left.

use std::collections::BTreeMap;

use super::diagnostic::{Diagnostics, SourceLocation};
use super::model::{VolumeIndex, VolumeKind, Workflow};
use super::url::{Scheme, Url};

/// Where a file goes: the volume that it comes from, and where that is declared.
pub(super) type LocatedTarget = (VolumeIndex, SourceLocation);

/// Refuses caches, and volumes filled from a home, whose source is a target of an extract, or lies
/// above or below one. What comes back to the place that its own volume was filled from is right:
/// it is filled before, always. `places` are those of the volumes.
pub(super) fn check_overlaps(
    workflow: &Workflow,
    targets: &BTreeMap<Url, LocatedTarget>,
    places: &[SourceLocation],
    diagnostics: &mut Diagnostics,
) {
    if targets.is_empty() {
        return;
    }
    let mut by_key: BTreeMap<HomePathKey, Vec<(&Url, LocatedTarget)>> = BTreeMap::new();
    for (url, target) in targets {
        by_key
            .entry(home_path_key(url))
            .or_default()
            .push((url, *target));
    }
    for (position, (volume, place)) in workflow.volumes.iter().zip(places).enumerate() {
        let (source, is_cache) = match &volume.kind {
            VolumeKind::Cache { source, .. } => (source, true),
            VolumeKind::Scratch { fill: Some(source) } => (source, false),
            VolumeKind::Scratch { fill: None } => continue,
        };
        let is_own =
            |(_, (from, _)): &(&Url, LocatedTarget)| !is_cache && from.as_usize() == position;
        let Some((target, (from, at))) = find_overlapping(&by_key, source, is_own) else {
            continue;
        };
        let (name, from) = (&volume.name, &workflow.volume(from).name);
        let (declared, verb) = match is_cache {
            true => ("a cache of", "shows"),
            false => ("filled from", "holds"),
        };
        let message = format!(
            "volume '{name}' is {declared} '{source}', where {} extracts '{target}': what it \
             {verb} of that depends on chance, and on earlier runs",
            diagnostics.describe_location(at)
        );
        let hint = format!(
            "mount '{from}' 'ro' in the jobs that read what it holds, or extract to a place apart"
        );
        diagnostics.error_hint(*place, message, hint);
    }
}

/// A home, and a path there by its parts, so that what is below a path comes right behind it.
type HomePathKey = (Scheme, String, Vec<String>);

fn home_path_key(url: &Url) -> HomePathKey {
    let path = match url.scheme {
        // Behind a `?` is no path, but of what is in front of it.
        Scheme::Http | Scheme::Https => url.path.split('?').next().unwrap_or_default(),
        _ => &url.path,
    };
    let parts = path.split('/').filter(|part| !part.is_empty());
    let parts = parts.map(str::to_owned).collect();
    (url.scheme, host_of(url), parts)
}

/// The host without a port that is the usual one.
fn host_of(url: &Url) -> String {
    let usual = match url.scheme {
        Scheme::Ftp => ":21",
        Scheme::Sftp => ":22",
        Scheme::Http => ":80",
        Scheme::Https => ":443",
        Scheme::Bafs | Scheme::File | Scheme::S3 => return url.host.clone(),
    };
    url.host.strip_suffix(usual).unwrap_or(&url.host).to_owned()
}

/// The first target that is this place, or lies above or below it.
fn find_overlapping<'u>(
    targets: &BTreeMap<HomePathKey, Vec<(&'u Url, LocatedTarget)>>,
    source: &Url,
    is_own: impl Fn(&(&'u Url, LocatedTarget)) -> bool,
) -> Option<(&'u Url, LocatedTarget)> {
    let of_another =
        |all: &Vec<(&'u Url, LocatedTarget)>| all.iter().find(|it| !is_own(it)).copied();
    let whole = home_path_key(source);
    let mut above = whole.clone();
    while above.2.pop().is_some() {
        if let Some(found) = targets.get(&above).and_then(of_another) {
            return Some(found);
        }
    }
    let below = targets.range(whole.clone()..);
    let mut below = below.take_while(|((scheme, host, parts), _)| {
        *scheme == whole.0 && *host == whole.1 && parts.starts_with(&whole.2)
    });
    below.find_map(|(_, all)| of_another(all))
}
