//! Data of sources that no volume shows any more. They stay on disk, take only space that nobody
//! reserved, and the next volume of their source begins with them. Those unused for longest go
//! first.

use std::path::{Path, PathBuf};
use std::sync::MutexGuard;
use std::time::SystemTime;

use bafs_proto::Result;
use bafs_proto::cache::RetainedSource;
use bafs_proto::hash::Digest;
use bafs_proto::ids::VolumeId;

use super::caches::{Caches, REMOVED_PREFIX};
use super::errors::{disk_fault, run_blocking};
use super::record::{CacheRecord, RECORD};
use super::volume::{CacheKind, CacheVolume};
use crate::cache::locks::lock;
use crate::logic::space::Amount;

/// Data that wait for a volume of their source. Nothing of them is in memory.
#[derive(Debug)]
pub(super) struct RetainedData {
    directory: PathBuf,
    kind: CacheKind,
    manifest: Digest,
    used: Amount,
    last_used: SystemTime,
}

impl RetainedData {
    /// What a directory has that an earlier life of the node left (waits for the disk).
    ///
    /// # Errors
    /// As [`CacheKind::of`]; `ServerFault` when the disk fails.
    pub(super) fn find(directory: &Path, record: &CacheRecord) -> Result<Self> {
        let blocks = directory.join(record.generation.to_string()).join("blocks");
        let broken = |e| disk_fault("measure the blocks", &blocks, e);
        let mut used = Amount::default();
        for entry in std::fs::read_dir(&blocks).map_err(broken)? {
            let found = entry.and_then(|entry| entry.metadata()).map_err(broken)?;
            used.bytes += std::os::unix::fs::MetadataExt::blocks(&found) * 512;
            used.files += 1;
        }
        Ok(Self {
            directory: directory.to_owned(),
            kind: CacheKind::of(&record.spec)?,
            manifest: record.manifest,
            used,
            last_used: find_last_use(directory),
        })
    }

    /// What the last volume left, which nobody writes any more.
    ///
    /// # Errors
    /// As [`CacheKind::of`].
    pub(super) fn of(volume: &CacheVolume) -> Result<Self> {
        let generation = volume.generation();
        let table = generation.store.disk.table();
        Ok(Self {
            directory: volume.directory().to_owned(),
            kind: volume.kind()?,
            manifest: generation.store.manifest.digest(),
            used: Amount {
                bytes: table.used_bytes(),
                files: table.used_files(),
            },
            last_used: find_last_use(volume.directory()),
        })
    }

    /// Where they are.
    pub(super) fn into_directory(self) -> PathBuf {
        self.directory
    }

    fn is_of(&self, path: Option<&str>) -> bool {
        path.is_none_or(|path| self.kind.source.path == path)
    }

    fn describe(&self) -> RetainedSource {
        let used_at = self.last_used.duration_since(SystemTime::UNIX_EPOCH);
        RetainedSource {
            address: self.kind.source.address.clone(),
            path: self.kind.source.path.clone(),
            bytes: self.used.bytes,
            files: self.used.files,
            used_at: used_at.map_or(0, |since| since.as_secs()),
        }
    }
}

/// The record is written when the last volume leaves.
fn find_last_use(directory: &Path) -> SystemTime {
    let written = directory.join(RECORD).metadata();
    let written = written.and_then(|found| found.modified());
    written.unwrap_or(SystemTime::UNIX_EPOCH)
}

impl Caches {
    /// What data that no volume shows take on the disk.
    pub fn retained(&self) -> Amount {
        let retained = self.retained_data();
        retained.iter().fold(Amount::default(), |sum, data| Amount {
            bytes: sum.bytes.saturating_add(data.used.bytes),
            files: sum.files.saturating_add(data.used.files),
        })
    }

    /// Names of the cooperative caches of such data, those used last first.
    pub fn retained_names(&self) -> Vec<String> {
        let retained = self.retained_data();
        let mut data: Vec<_> = retained.iter().collect();
        data.sort_by_key(|data| std::cmp::Reverse(data.last_used));
        let mut names: Vec<String> = Vec::new();
        for data in data {
            if !names.contains(&data.kind.cooperative) {
                names.push(data.kind.cooperative.clone());
            }
        }
        names
    }

    /// Removes data that no volume shows, those unused for longest first, until the rest take at
    /// most `free`: what nobody reserved.
    pub async fn limit_retained(&self, free: Amount) {
        loop {
            let sum = self.retained();
            if sum.bytes <= free.bytes && sum.files <= free.files {
                return;
            }
            if !self.remove_oldest_retained().await {
                return;
            }
        }
    }

    /// Describes such data: those of the source with this path, or all.
    pub fn retained_sources(&self, path: Option<&str>) -> Vec<RetainedSource> {
        let retained = self.retained_data();
        let wanted = retained.iter().filter(|data| data.is_of(path));
        wanted.map(RetainedData::describe).collect()
    }

    /// Removes such data: those of the source with this path, or all. Answers what they were.
    pub async fn drop_retained(&self, path: Option<&str>) -> Vec<RetainedSource> {
        let dropped: Vec<_> = {
            let mut retained = self.retained_data();
            retained.extract_if(.., |data| data.is_of(path)).collect()
        };
        let described = dropped.iter().map(RetainedData::describe).collect();
        for data in dropped {
            self.remove_directory(data.directory).await;
        }
        described
    }

    /// Tells whether there were any.
    pub(super) async fn remove_oldest_retained(&self) -> bool {
        let oldest = {
            let mut retained = self.retained_data();
            let places = retained.iter().enumerate();
            let oldest = places.min_by_key(|(_, data)| data.last_used);
            let oldest = oldest.map(|(place, _)| place);
            oldest.map(|place| retained.swap_remove(place))
        };
        let Some(data) = oldest else {
            return false;
        };
        tracing::info!(
            source = data.kind.source.path,
            bytes = data.used.bytes,
            "cached data that no volume shows give up their space"
        );
        self.counters
            .add("cache_retained_removed_bytes", data.used.bytes);
        self.remove_directory(data.directory).await;
        true
    }

    /// Takes out data of this kind, best those with this manifest, else the latest.
    pub(super) fn take_retained(&self, kind: &CacheKind, manifest: Digest) -> Option<RetainedData> {
        let mut retained = self.retained_data();
        let places = retained.iter().enumerate();
        let same = places.filter(|(_, data)| data.kind == *kind);
        let best = same.max_by_key(|(_, data)| (data.manifest == manifest, data.last_used));
        let place = best.map(|(place, _)| place);
        place.map(|place| retained.swap_remove(place))
    }

    /// Removes a directory of data; what stays on disk goes at the next start.
    pub(super) async fn remove_directory(&self, directory: PathBuf) {
        let gone = self
            .directory
            .join(format!("{REMOVED_PREFIX}{}", VolumeId::random()));
        let (from, name) = (directory.clone(), directory);
        let removed = run_blocking(move || {
            std::fs::rename(&from, &gone).and_then(|()| std::fs::remove_dir_all(&gone))
        });
        let failed = |e| disk_fault("remove the blocks", &name, e);
        if let Err(error) = removed.await.and_then(|removed| removed.map_err(failed)) {
            tracing::warn!(%error, "blocks of removed cache data are still on disk");
        }
    }

    pub(super) fn retained_data(&self) -> MutexGuard<'_, Vec<RetainedData>> {
        lock(&self.retained)
    }
}
