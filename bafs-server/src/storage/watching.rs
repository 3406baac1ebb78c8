//! Watches what volumes hold whose limit is not enforced operation by operation: looks at the tree
//! now and then, warns, and ends the writer's session past the limit. Counts no operation.
//!
//! A look is a walk of the whole tree. It is taken when the file system has lost so much free space
//! that the volume could have come near its limit, and now and then anyway; a tree that takes long
//! to walk is looked at less often, so that at most a twentieth of one processor goes into it.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use bafs_proto::ids::VolumeId;
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode, Result};
use rustix::fs::statvfs;

use super::holds::VolumeTree;
use super::{Storage, blocking};
use crate::clock;

/// How often the free space of the file system is looked at.
const TICK: Duration = Duration::from_millis(20);

/// Shortest time between two walks of a volume whose use cannot have grown much, in milliseconds.
const WALK_MS_MIN: u64 = 2_000;

/// A walk that took a time is repeated after so many times that.
const WALK_SHARE: u64 = 20;

/// Part of the limit at which the log warns, in percent.
const WARN_PERCENT: u64 = 90;

/// What was seen at the last look at a volume.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Look {
    used_bytes: u64,
    free_bytes: u64,
    next: Time,
    warned: bool,
}

/// The last looks.
pub(super) type Looks = std::sync::Mutex<BTreeMap<VolumeId, Look>>;

impl Storage {
    /// Watches volumes, for ever.
    pub async fn watch(self: Arc<Self>) {
        loop {
            tokio::time::sleep(TICK).await;
            for volume in self.trees.watched() {
                if let Err(error) = self.look(&volume).await {
                    tracing::warn!(volume = %volume.id(), %error, "volume not watched");
                }
            }
        }
    }

    /// Looks at one volume, if it is time.
    async fn look(&self, volume: &Arc<VolumeTree>) -> Result<()> {
        let (id, limit, root) = (volume.id(), volume.limit(), volume.root().to_owned());
        let looks = || self.looks.lock().unwrap_or_else(PoisonError::into_inner);
        let last = looks().get(&id).copied().unwrap_or_default();
        let free_bytes = free(&root)?;
        let taken = last.free_bytes.saturating_sub(free_bytes);
        let room = limit.bytes.saturating_sub(last.used_bytes);
        let start = clock::now();
        if start < last.next && taken <= room / 2 {
            return Ok(());
        }
        let used = blocking(move || Ok(walk(root))).await?;
        let took = clock::now().ms_since(start);
        volume.found(used);
        let percent = used.0.saturating_mul(100) / limit.bytes.max(1);
        if percent >= WARN_PERCENT && !last.warned {
            tracing::warn!(volume = %id, used_bytes = used.0, percent, "volume is nearly full");
        }
        let next = start.plus_ms(WALK_MS_MIN.max(took.saturating_mul(WALK_SHARE)));
        looks().insert(
            id,
            Look {
                used_bytes: used.0,
                free_bytes,
                next,
                warned: percent >= WARN_PERCENT,
            },
        );
        if used.0 > limit.bytes || used.1 > limit.files {
            let code = if used.0 > limit.bytes {
                ErrorCode::NoSpaceBytes
            } else {
                ErrorCode::NoSpaceFiles
            };
            let text = format!(
                "volume {id} holds {} bytes in {} files and may hold {} in {}; make it larger",
                used.0, used.1, limit.bytes, limit.files
            );
            volume.end_writer(Error::new(code, text)).await;
        }
        Ok(())
    }
}

fn free(root: &Path) -> Result<u64> {
    let stat = statvfs(root).map_err(|e| crate::fault::of_disk("store", &e.into()))?;
    Ok(stat.f_bfree.saturating_mul(stat.f_frsize))
}

/// Bytes and files below a directory. What comes and goes meanwhile, or is closed to this user,
/// may be missed.
fn walk(root: PathBuf) -> (u64, u64) {
    let (mut bytes, mut files, mut seen) = (0, 0, BTreeSet::new());
    let mut pending = vec![root];
    while let Some(directory) = pending.pop() {
        let Ok(entries) = std::fs::read_dir(&directory) else {
            continue;
        };
        for entry in entries.flatten() {
            let Ok(metadata) = entry.metadata() else {
                continue;
            };
            if metadata.is_dir() {
                pending.push(entry.path());
            } else if metadata.nlink() > 1 && !seen.insert(metadata.ino()) {
                continue;
            }
            bytes += metadata.blocks() * 512;
            files += 1;
        }
    }
    (bytes, files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_walk_counts_what_is_there_once() {
        let directory = tempfile::tempdir().expect("directory");
        let root = directory.path();
        std::fs::create_dir(root.join("d")).expect("directory");
        std::fs::write(root.join("d/f"), [1; 8192]).expect("write");
        std::fs::hard_link(root.join("d/f"), root.join("g")).expect("link");
        std::os::unix::fs::symlink("/", root.join("l")).expect("link");
        let (bytes, files) = walk(root.to_owned());
        assert_eq!(files, 3);
        assert!((8192..65_536).contains(&bytes), "{bytes}");
        assert_eq!(walk(root.join("absent")), (0, 0));
    }
}
