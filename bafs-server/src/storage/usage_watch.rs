//! Watches what volumes hold whose limit is not enforced operation by operation: looks at the tree
//! now and then, warns, and ends the writer's session past the limit. Counts no operation.
//!
//! A look is a walk of the whole tree. It is taken when the file system has lost so much free space
//! that the volume could have come near its limit, and now and then anyway; a tree that takes long
//! to walk is looked at less often, so that at most a twentieth of one processor goes into it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bafs_proto::ids::VolumeId;
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode, Result};
use bafs_tree::measure_use;
use rustix::fs::statvfs;

use super::scratch_trees::ScratchTrees;
use super::tree_owner::VolumeTree;
use crate::clock;
use crate::errors::{disk_error, run_blocking};

/// How often the free space of the file system is looked at.
const FREE_SPACE_POLL: Duration = Duration::from_millis(20);

/// Shortest time between two walks of a volume whose use cannot have grown much, in milliseconds.
const WALK_MS_MIN: u64 = 2_000;

/// A walk that took a time is repeated after so many times that,
const WALK_PAUSE_FACTOR: u64 = 20;

/// but after so many milliseconds in any case: other volumes may free what this one takes.
const WALK_MS_MAX: u64 = 30_000;

/// Part of the limit at which the log warns, in percent.
const WARN_PERCENT: u64 = 90;

/// What was seen at the last look at a volume.
#[derive(Debug, Clone, Copy, Default)]
struct VolumeUsageSample {
    is_running: bool,
    /// Bytes and files.
    used: (u64, u64),
    free: (u64, u64),
    next_walk: Time,
    has_warned: bool,
}

impl VolumeUsageSample {
    /// Begins one, unless one goes on.
    fn begin(&mut self) -> bool {
        !std::mem::replace(&mut self.is_running, true)
    }
}

/// The last looks.
type VolumeUsageSamples = Mutex<BTreeMap<VolumeId, VolumeUsageSample>>;

/// Watches volumes, for ever. A long walk of one keeps no look at another waiting.
pub(super) async fn watch_usage(trees: Arc<ScratchTrees>) {
    let samples = Arc::new(VolumeUsageSamples::default());
    loop {
        tokio::time::sleep(FREE_SPACE_POLL).await;
        let volumes = trees.watched_volumes();
        let ids: BTreeSet<_> = volumes.iter().map(|volume| volume.id()).collect();
        lock(&samples).retain(|id, _| ids.contains(id));
        for volume in volumes {
            if !lock(&samples).entry(volume.id()).or_default().begin() {
                continue;
            }
            let samples = samples.clone();
            tokio::spawn(async move {
                let looked = sample_usage(&samples, &volume).await;
                let mut looks = lock(&samples);
                let look = looks.entry(volume.id()).or_default();
                look.is_running = false;
                if let Err(error) = looked {
                    tracing::warn!(volume = %volume.id(), %error, "volume not watched");
                    look.free = (0, 0);
                    look.next_walk = clock::now().plus_ms(WALK_MS_MIN);
                }
            });
        }
    }
}

fn lock(samples: &VolumeUsageSamples) -> MutexGuard<'_, BTreeMap<VolumeId, VolumeUsageSample>> {
    samples.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Looks at one volume, if it is time.
async fn sample_usage(samples: &VolumeUsageSamples, volume: &VolumeTree) -> Result<()> {
    let (id, limit, root) = (volume.id(), volume.limit(), volume.root().to_owned());
    let last = lock(samples).get(&id).copied().unwrap_or_default();
    let free = free_space(&root)?;
    let is_near = |limit: u64, used: u64, before: u64, now: u64| {
        before.saturating_sub(now) > limit.saturating_sub(used) / 2
    };
    let grew = is_near(limit.bytes, last.used.0, last.free.0, free.0)
        || is_near(limit.files, last.used.1, last.free.1, free.1);
    let start = clock::now();
    if start < last.next_walk && !grew {
        return Ok(());
    }
    let used = run_blocking(move || {
        measure_use(&root).map_err(|e| disk_error(format!("walk of volume {id}"), &e))
    })
    .await?;
    let took = clock::now().ms_since(start);
    volume.note_usage(used);
    let percent = used.0.saturating_mul(100) / limit.bytes.max(1);
    if percent >= WARN_PERCENT && !last.has_warned {
        tracing::warn!(volume = %id, used_bytes = used.0, percent, "volume is nearly full");
    }
    let next = start.plus_ms(walk_pause_ms(took));
    lock(samples).insert(
        id,
        VolumeUsageSample {
            is_running: true,
            used,
            free,
            next_walk: next,
            has_warned: percent >= WARN_PERCENT,
        },
    );
    let allowed = volume.allowed_limit();
    if used.0 > allowed.bytes || used.1 > allowed.files {
        let code = if used.0 > allowed.bytes {
            ErrorCode::NoSpaceBytes
        } else {
            ErrorCode::NoSpaceFiles
        };
        let text = format!(
            "volume {id} holds {} bytes in {} files, but its limit is {} in {}; make it larger",
            used.0, used.1, limit.bytes, limit.files
        );
        volume.end_writer(Error::new(code, text)).await;
    }
    Ok(())
}

/// Time until the next walk, after one that took so long, both in milliseconds.
fn walk_pause_ms(took: u64) -> u64 {
    let share = took.saturating_mul(WALK_PAUSE_FACTOR);
    share.clamp(WALK_MS_MIN, WALK_MS_MAX.max(took))
}

/// Bytes and files that the file system has free.
fn free_space(root: &Path) -> Result<(u64, u64)> {
    let stat = statvfs(root).map_err(|e| disk_error("store", &e.into()))?;
    Ok((stat.f_bfree.saturating_mul(stat.f_frsize), stat.f_ffree))
}
