//! Bounds of one job and one volume that servers and agents have, so that none is met only when the
//! job is to run. The bounds of texts are where texts are read.

use super::diagnostic::{Diagnostics, SourceLocation};
use super::limits::{CACHE_FILES_MAX, MOUNT_BYTES_MAX, MOUNTS_MAX};
use super::model::{Job, Volume, VolumeKind};

/// Refuses more mounts of a job than an agent takes. `places` are those of its mounts.
pub(super) fn check_mount_count(
    job: &Job,
    places: &[SourceLocation],
    volumes: &[Volume],
    diagnostics: &mut Diagnostics,
) {
    let count = job.mounts.len();
    if let (true, Some(first)) = (count > MOUNTS_MAX, places.get(MOUNTS_MAX)) {
        let message = format!(
            "job '{}' has {count} mounts; a job may have {MOUNTS_MAX}",
            job.name
        );
        let hint = "gather in steps: let several jobs each merge some of these volumes into one, \
                    and a last job merge the results";
        return diagnostics.error_hint(*first, message, hint);
    }
    let (mut bytes, mut is_told) = (0, false);
    for (mount, place) in job.mounts.iter().zip(places) {
        bytes += mount.path.len() + volumes[mount.volume.as_usize()].name.len();
        if bytes > MOUNT_BYTES_MAX && !is_told {
            let message = format!(
                "the mounts of job '{}' have names and paths of more than {MOUNT_BYTES_MAX} bytes",
                job.name
            );
            diagnostics.error_hint(*place, message, "give them shorter paths");
            is_told = true;
        }
    }
}

/// Refuses a cache of more files than a node takes.
pub(super) fn check_cache_files(
    volume: &Volume,
    location: SourceLocation,
    diagnostics: &mut Diagnostics,
) {
    let is_cache = matches!(volume.kind, VolumeKind::Cache { .. });
    if is_cache && volume.size_files > CACHE_FILES_MAX {
        let message = format!(
            "volume '{}' is a cache of {} files; one may have {CACHE_FILES_MAX}",
            volume.name, volume.size_files
        );
        let hint = "give the number of its source's files with 'files', or split it into several \
                    volumes";
        diagnostics.error_hint(location, message, hint);
    }
}
