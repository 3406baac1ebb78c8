//! Watches what volumes hold whose limit is not enforced operation by operation: looks at the tree
//! now and then, warns, and ends the writer's session past the limit. Counts no operation.
//!
//! A look is a walk of the whole tree, and counts files without a name that are open. It is taken
//! when the file system has lost so much free space that the volume could have come near its limit,
//! and now and then anyway; a tree that takes long to walk is looked at less often, so that at most
//! a twentieth of one processor goes into it.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bafs_proto::ids::VolumeId;
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode, Result};
use bafs_tree::{Limit, measure_use};
use rustix::fs::statvfs;

use super::scratch_trees::ScratchTrees;
use super::tree_owner::VolumeTree;
use super::unlinked_survey::UnlinkedSurvey;
use crate::clock;
use crate::errors::{disk_error, run_blocking};

/// How often the free space of the file system is looked at for a volume near its limit,
const FREE_SPACE_POLL: Duration = Duration::from_millis(5);

/// and for one that is far from it, in milliseconds.
const FREE_SPACE_POLL_MS_MAX: u64 = 20;

/// What jobs may write in a millisecond, in bytes and files: twice what two processors wrote.
const GROWTH_PER_MS_MAX: (u64, u64) = (8 << 20, 500);

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
    next_look: Time,
    next_walk: Time,
    has_warned: bool,
}

impl VolumeUsageSample {
    /// Begins one, unless one goes on or it is too early.
    fn begin(&mut self, now: Time) -> bool {
        now >= self.next_look && !std::mem::replace(&mut self.is_running, true)
    }
}

/// The last looks.
type VolumeUsageSamples = Mutex<BTreeMap<VolumeId, VolumeUsageSample>>;

/// Watches volumes, for ever. A long walk of one keeps no look at another waiting.
pub(super) async fn watch_usage(trees: Arc<ScratchTrees>) {
    let samples = Arc::new(VolumeUsageSamples::default());
    let unlinked = Arc::new(UnlinkedSurvey::default());
    loop {
        tokio::time::sleep(FREE_SPACE_POLL).await;
        let now = clock::now();
        let volumes = trees.watched_volumes();
        let ids: BTreeSet<_> = volumes.iter().map(|volume| volume.id()).collect();
        lock(&samples).retain(|id, _| ids.contains(id));
        for volume in volumes {
            if !lock(&samples).entry(volume.id()).or_default().begin(now) {
                continue;
            }
            let (samples, unlinked) = (samples.clone(), unlinked.clone());
            tokio::spawn(async move {
                let looked = sample_usage(&samples, &unlinked, &volume).await;
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
async fn sample_usage(
    samples: &VolumeUsageSamples,
    unlinked: &Arc<UnlinkedSurvey>,
    volume: &VolumeTree,
) -> Result<()> {
    let (id, limit, root) = (volume.id(), volume.limit(), volume.root().to_owned());
    let last = lock(samples).get(&id).copied().unwrap_or_default();
    // Whoever has it when the walk is over may be another agent.
    let Some((epoch, allowed)) = volume.agent_hold() else {
        return Ok(());
    };
    let free = free_space(&root)?;
    let room = Room {
        bytes: limit.bytes.saturating_sub(last.used.0),
        files: limit.files.saturating_sub(last.used.1),
    };
    let taken = Room {
        bytes: last.free.0.saturating_sub(free.0),
        files: last.free.1.saturating_sub(free.1),
    };
    let start = clock::now();
    if start < last.next_walk && !taken.is_near(room) {
        if let Some(sample) = lock(samples).get_mut(&id) {
            sample.next_look = start.plus_ms(room.look_pause_ms(taken));
        }
        return Ok(());
    }
    let unlinked = unlinked.clone();
    let used = run_blocking(move || {
        let used = measure_with_unlinked(&root, &unlinked, allowed);
        used.map_err(|e| disk_error(format!("walk of volume {id}"), &e))
    })
    .await?;
    let took = clock::now().ms_since(start);
    volume.note_usage(epoch, used);
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
            next_look: Time::default(),
            next_walk: next,
            has_warned: percent >= WARN_PERCENT,
        },
    );
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
        volume.end_writer(epoch, Error::new(code, text)).await;
    }
    Ok(())
}

/// Bytes and files below the root of a volume, with those that have no name and are open.
fn measure_with_unlinked(
    root: &Path,
    unlinked: &UnlinkedSurvey,
    allowed: Limit,
) -> io::Result<(u64, u64)> {
    let sum = |walked: (u64, u64), held: (u64, u64)| (walked.0 + held.0, walked.1 + held.1);
    let used = sum(measure_use(root)?, unlinked.measure(root)?);
    if used.0 <= allowed.bytes && used.1 <= allowed.files {
        return Ok(used);
    }
    // A file that was closed meanwhile may have made room for another: only those count that were
    // open before and after the walk.
    let before = unlinked.measure_now(root)?;
    let walked = measure_use(root)?;
    let after = unlinked.measure_now(root)?;
    Ok(sum(walked, (before.0.min(after.0), before.1.min(after.1))))
}

/// Bytes and files, of the room in a volume or of what the file system lost meanwhile.
#[derive(Debug, Clone, Copy)]
struct Room {
    bytes: u64,
    files: u64,
}

impl Room {
    /// Whether a volume may have come near its limit, which had this room when so much was lost.
    fn is_near(self, room: Self) -> bool {
        self.bytes > room.bytes / 2 || self.files > room.files / 2
    }

    /// Time until the next look at a volume with this room, of which so much may be taken, in
    /// milliseconds: half of what it takes to come near the limit.
    fn look_pause_ms(self, taken: Self) -> u64 {
        let left = |room: u64, taken: u64, per_ms: u64| (room / 2).saturating_sub(taken) / per_ms;
        let bytes = left(self.bytes, taken.bytes, GROWTH_PER_MS_MAX.0);
        let files = left(self.files, taken.files, GROWTH_PER_MS_MAX.1);
        (bytes.min(files) / 2).min(FREE_SPACE_POLL_MS_MAX)
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn volumes_near_their_limit_are_looked_at_often() {
        let room = |bytes: u64, files: u64| Room { bytes, files };
        let (large, files) = (room(100 << 30, 1 << 20), 1 << 20);
        let none = room(0, 0);
        assert_eq!(large.look_pause_ms(none), FREE_SPACE_POLL_MS_MAX);
        assert_eq!(room(64 << 20, files).look_pause_ms(none), 2);
        assert_eq!(room(100 << 30, 1_000).look_pause_ms(none), 0);
        assert_eq!(large.look_pause_ms(room(50 << 30, 0)), 0);
        assert!(room(51 << 30, 0).is_near(large) && !room(49 << 30, 0).is_near(large));
    }
}
