//! What uploads leave behind: finished at a start, removed when nobody needs it any more. Makes no
//! room for others: a full disk is the matter of `unfinished.rs`.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use bafs_proto::ids::ExtractionId;
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode, Result};

use super::upload::UploadRecord;
use super::upload_files::{AllowPath, fault};
use super::upload_table::{HELD_MAX, RECEIPT_MS_MAX, RECEIPTS_MAX};
use super::uploads::Uploads;

/// An upload that nobody continued for so long is removed.
pub(super) const IDLE_MS_MAX: u64 = 7 * 24 * 3600 * 1000;

impl Uploads {
    /// Finishes what a former server left: decided files get their names, staged files without a
    /// row are removed.
    pub(super) fn recover(&self) -> Result<()> {
        let found = self.table.run(|rows| rows.open_uploads())?;
        let data = self.files.data_directory();
        let mut orphans = BTreeSet::new();
        for file in fs::read_dir(&data).map_err(|error| fault(&data, error))? {
            let name = file.map_err(|error| fault(&data, error))?.file_name();
            orphans.extend(name.into_string());
        }
        let mut decided = Vec::new();
        for (extract, record) in found {
            let is_there = orphans.remove(&record.data_name(extract));
            if !record.is_receiving() {
                decided.push((extract, record));
            } else if is_there {
                self.queue.note_left(extract, record.path);
            }
        }
        for orphan in orphans {
            let _ = fs::remove_file(self.files.data_path(&orphan));
        }
        // Nobody shows a right now: what links lead away waits for who does.
        let allow = |(_, record): &(_, UploadRecord)| {
            let path = record.path.clone();
            move |place: &str| match place == path {
                true => Ok(()),
                false => Err(Error::new(ErrorCode::RightMissing, "a link leads away")),
            }
        };
        let allowed: Vec<_> = decided.iter().map(allow).collect();
        let decided = decided.into_iter().zip(&allowed);
        let decided =
            decided.map(|((extract, record), allow)| (extract, record, allow as AllowPath<'_>));
        let told = self.publish_all(decided.collect());
        for error in told.into_iter().filter_map(Result::err) {
            tracing::warn!(%error, "a file waits to be asked for again");
        }
        Ok(())
    }

    /// Removes uploads that nobody continued and receipts that nobody needs any more.
    pub(crate) fn sweep(&self, now: Time) {
        if let Err(error) = self.sweep_to(now, RECEIPTS_MAX) {
            tracing::warn!(%error, "old uploads and receipts stay");
        }
    }

    /// As [`Self::sweep`], to so many receipts.
    pub(super) fn sweep_to(&self, now: Time, receipts_max: usize) -> Result<()> {
        self.occupy()?;
        let mut known = BTreeSet::new();
        for (extract, record) in self.table.run(|rows| rows.open_uploads())? {
            let name = record.data_name(extract);
            let path = self.files.data_path(&name);
            let (since, is_receiving) = (record.stamp.time(), record.is_receiving());
            let is_old = || match is_receiving {
                true => {
                    let last = changed_at(&path).unwrap_or_default().max(since);
                    now.ms_since(last) > IDLE_MS_MAX
                }
                false => now.ms_since(since) > RECEIPT_MS_MAX,
            };
            if !is_old() || !self.remove(extract, record, is_old)? {
                known.insert(name);
            }
        }
        self.queue
            .retain(|extract| known.contains(&extract.to_string()));
        self.remove_orphans(&known, now);
        self.table.run(move |rows| {
            rows.sweep_fences(now)?;
            rows.sweep_receipts(now, receipts_max, HELD_MAX)
        })
    }

    /// Removes an upload that is not published, if it may be and nothing has happened to it since;
    /// whether it did.
    pub(super) fn remove(
        &self,
        extract: ExtractionId,
        old: UploadRecord,
        may_be: impl FnOnce() -> bool,
    ) -> Result<bool> {
        self.arrivals.locked(extract, |slot| {
            if !may_be() {
                return Ok(false);
            }
            let path = self.files.data_path(&old.data_name(extract));
            let is_same = self.table.run(move |rows| {
                let is_same = rows.get(extract)? == Some(old);
                if is_same {
                    rows.remove(extract)?;
                }
                Ok(is_same)
            })?;
            if is_same {
                *slot = None;
                // Only now: a decided upload without a file would count as renamed.
                let _ = fs::remove_file(path);
                self.queue.forget(extract);
            }
            Ok(is_same)
        })
    }

    /// Removes old files of which the table does not know, as of a server that was killed beside
    /// another one.
    fn remove_orphans(&self, known: &BTreeSet<String>, now: Time) {
        let found = fs::read_dir(self.files.data_directory());
        for file in found.into_iter().flatten().flatten() {
            let name = file.file_name().to_string_lossy().into_owned();
            let idle_ms = changed_at(&file.path()).map_or(0, |at| now.ms_since(at));
            if idle_ms > IDLE_MS_MAX && !known.contains(&name) {
                let _ = fs::remove_file(file.path());
            }
        }
    }
}

/// When a file was last written.
pub(super) fn changed_at(path: &Path) -> Option<Time> {
    let changed = fs::metadata(path).and_then(|found| found.modified()).ok()?;
    let since = changed
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    Some(Time(u64::try_from(since.as_millis()).unwrap_or(u64::MAX)))
}
