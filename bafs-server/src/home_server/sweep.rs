//! Removes what is left of uploads that nobody needs any more. Makes no room for others: a full
//! disk is the matter of `unfinished.rs`.

use std::fs;
use std::time::Duration;

use bafs_proto::Result;
use bafs_proto::ids::ExtractionId;
use bafs_proto::time::Time;

use super::puts::{DATA, Phase, Puts, STATE, fault};
use super::receipts::{RECEIPT_MS_MAX, RECEIPT_MS_MIN, RECEIPTS_MAX};

/// An upload that nobody continued for so long is removed.
pub(super) const IDLE_MS_MAX: u64 = 7 * 24 * 3600 * 1000;

impl Puts {
    /// Removes uploads that nobody continued and receipts that nobody needs any more.
    pub(crate) fn sweep(&self, now: Time) {
        self.sweep_to(now, RECEIPTS_MAX);
    }

    /// As [`Self::sweep`], to so many receipts.
    pub(super) fn sweep_to(&self, now: Time, receipts_max: usize) {
        let mut receipts = Vec::new();
        let Ok(places) = fs::read_dir(&self.directory) else {
            return;
        };
        for place in places.flatten() {
            let Some(extract) = place
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok())
            else {
                continue;
            };
            match self.sweep_one(extract, now, RECEIPT_MS_MAX) {
                Ok(Some(age_ms)) => receipts.push((age_ms, extract)),
                Ok(None) => {}
                Err(error) => tracing::warn!(%extract, %error, "an old upload stays"),
            }
        }
        self.refused.retain(|extract| self.place(extract).exists());
        receipts.sort_unstable();
        for (_, extract) in receipts.into_iter().skip(receipts_max) {
            if let Err(error) = self.sweep_one(extract, now, RECEIPT_MS_MIN) {
                tracing::warn!(%extract, %error, "an old receipt stays");
            }
        }
        match self.receipts() {
            Ok(Some(small)) => small.sweep(now, receipts_max),
            Ok(None) => {}
            Err(error) => tracing::warn!(%error, "old receipts of small files stay"),
        }
    }

    /// Removes an upload that nobody continued, or that was done so long ago; returns the age of a
    /// receipt that stays.
    fn sweep_one(&self, extract: ExtractionId, now: Time, done_ms_max: u64) -> Result<Option<u64>> {
        self.arrivals.locked(extract, |slot| {
            let (age_ms, is_done) = self.upload_age(extract, now)?;
            if age_ms <= if is_done { done_ms_max } else { IDLE_MS_MAX } {
                return Ok(is_done.then_some(age_ms));
            }
            let path = self.place(extract);
            fs::remove_dir_all(&path).map_err(|error| fault(&path, error))?;
            *slot = None;
            self.refused.forget(extract);
            Ok(None)
        })
    }

    /// How long ago anything happened to an upload, in milliseconds, and whether it is done.
    fn upload_age(&self, extract: ExtractionId, now: Time) -> Result<(u64, bool)> {
        let path = self.place(extract);
        let done = match self.load(extract) {
            Ok(upload) => upload.is_some_and(|upload| upload.phase != Phase::Receiving),
            Err(_) => false,
        };
        let changed = |name: &str| fs::metadata(path.join(name)).and_then(|found| found.modified());
        let changed = changed(DATA).or_else(|_| changed(STATE));
        let changed = changed.or_else(|_| fs::metadata(&path).and_then(|found| found.modified()));
        let changed = changed.map_err(|error| fault(&path, error))?;
        let since = changed
            .duration_since(std::time::UNIX_EPOCH)
            .unwrap_or_default();
        Ok((now.ms_since(Time(milliseconds(since))), done))
    }
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
