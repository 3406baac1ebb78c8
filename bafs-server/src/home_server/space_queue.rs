//! Uploads that a full disk refused: who wants how much of it, and whose turn it is. Does nothing
//! to the disk.
//!
//! Of several that hold a part each none might ever be whole. So the one that holds most goes on;
//! the others give up what they hold, and wait. One that gets no further while others want the room
//! is too large for now: it gives way, too, and comes after those that did not.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bafs_proto::ids::ExtractionId;
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode, Result};

use crate::clock;

/// An upload that nobody continued for so long gives its room to others on a full disk, in
/// milliseconds: whoever still wants the file asks again earlier, and sends it anew else.
pub(super) const STALE_MS: u64 = 600_000;

/// Who was refused, or went on, no longer ago than this still wants its room, in milliseconds:
/// whoever sends asks again after ten seconds at most.
pub(super) const WANTED_MS: u64 = 60_000;

/// An upload that was too large so often gives way only to those that were less often, as all of it
/// is sent again each time.
const TOO_LARGE_MAX: u32 = 3;

/// What is known of an upload that the disk refused, or that a former server left.
#[derive(Debug, Clone, Default)]
struct UploadRefusal {
    /// Where the file shall be.
    target: String,
    /// Why its last bytes were refused.
    why: Option<Error>,
    /// When that was, or when it went on; never for what a former server left.
    at: Time,
    held_bytes: u64,
    /// Whether somebody has continued it since.
    goes_on: bool,
    /// Whether it got no further than when it was refused before.
    is_stuck: bool,
    /// How often it gave way as it was stuck.
    too_large: u32,
}

impl UploadRefusal {
    fn is_recent(&self, now: Time) -> bool {
        is_recent(self.at, now)
    }

    /// Who comes first has the larger one.
    fn rank(&self, extract: ExtractionId) -> (Reverse<u32>, u64, ExtractionId) {
        (Reverse(self.too_large), self.held_bytes, extract)
    }
}

/// Uploads that the disk refused since this server began, and those that it found unfinished then.
#[derive(Debug, Default)]
pub(super) struct SpaceQueue {
    list: Mutex<BTreeMap<ExtractionId, UploadRefusal>>,
    /// When the disk refused anything of which no bytes are here, in milliseconds.
    wanted_ms: AtomicU64,
    /// Uploads that came to their end since the disk refused any.
    done: AtomicU64,
    /// When the log said last that the disk is full, in milliseconds.
    told_ms: AtomicU64,
}

impl SpaceQueue {
    /// Why the last bytes of an upload were refused, unless it goes on.
    pub(super) fn why(&self, extract: ExtractionId) -> Option<Error> {
        let list = self.list();
        let refusal = list.get(&extract).filter(|refusal| !refusal.goes_on)?;
        refusal.why.clone()
    }

    /// Notes that the disk refused bytes of an upload of which so many are there.
    pub(super) fn note(
        &self,
        extract: ExtractionId,
        target: String,
        error: &Error,
        held_bytes: u64,
    ) {
        let mut list = self.list();
        let refusal = list.entry(extract).or_default();
        refusal.target = target;
        if refusal.goes_on {
            refusal.is_stuck = held_bytes <= refusal.held_bytes;
        }
        refusal.why = Some(error.clone());
        refusal.at = clock::now();
        refusal.held_bytes = held_bytes;
        refusal.goes_on = false;
        self.done.store(0, Ordering::Relaxed);
    }

    /// Notes that the disk refused what has no bytes here: a beginning, an end, a small file.
    pub(super) fn note_wanted(&self) {
        self.wanted_ms.store(clock::now().0, Ordering::Relaxed);
    }

    /// Notes what a former server left: nobody continues it yet.
    pub(super) fn note_left(&self, extract: ExtractionId, target: String) {
        let left = UploadRefusal {
            target,
            ..UploadRefusal::default()
        };
        self.list().insert(extract, left);
    }

    /// It goes on.
    pub(super) fn resume(&self, extract: ExtractionId) {
        if let Some(refusal) = self.list().get_mut(&extract) {
            refusal.at = clock::now();
            refusal.goes_on = true;
        }
    }

    /// Why an upload of which nothing is here must wait, if others come first: of those, one for
    /// each that came to its end since the disk refused any may go on beside the first. Whoever is
    /// told so asks again.
    pub(super) fn must_wait(&self, extract: ExtractionId, now: Time) -> Option<Error> {
        let mut list = self.list();
        let mine = list.get(&extract)?;
        let why = mine.why.clone()?;
        let comes_first = |(other, refusal): &(&ExtractionId, &UploadRefusal)| {
            refusal.is_recent(now) && refusal.rank(**other) > mine.rank(extract)
        };
        let ahead = list.iter().filter(comes_first).count() as u64;
        let waits =
            ahead > self.done.load(Ordering::Relaxed) || mine.too_large > 0 && self.is_wanted(now);
        if !waits {
            return None;
        }
        let mine = list.get_mut(&extract)?;
        mine.at = now;
        mine.goes_on = false;
        Some(why)
    }

    /// It has its name.
    pub(super) fn end(&self, extract: ExtractionId) {
        self.done.fetch_add(1, Ordering::Relaxed);
        self.forget(extract);
    }

    /// It is no more.
    pub(super) fn forget(&self, extract: ExtractionId) {
        self.list().remove(&extract);
    }

    /// Forgets those of which `exists` says that they are no more.
    pub(super) fn retain(&self, exists: impl Fn(ExtractionId) -> bool) {
        self.list().retain(|extract, _| exists(*extract));
    }

    /// Those to a place that nobody has continued since.
    pub(super) fn waiting(&self, target: &str) -> Vec<ExtractionId> {
        let list = self.list();
        let waiting = list
            .iter()
            .filter(|(_, it)| !it.goes_on && it.target == target);
        waiting.map(|(extract, _)| *extract).collect()
    }

    pub(super) fn is_waiting(&self, extract: ExtractionId) -> bool {
        let list = self.list();
        list.get(&extract).is_some_and(|refusal| !refusal.goes_on)
    }

    /// Whether an upload that was refused must drop what it holds: others that still come hold
    /// more, or it is stuck and others wait.
    pub(super) fn must_give_way(&self, extract: ExtractionId, now: Time) -> bool {
        let list = self.list();
        let Some(mine) = list.get(&extract) else {
            return false;
        };
        if mine.goes_on || mine.held_bytes == 0 {
            return false;
        }
        let mut others = list
            .iter()
            .filter(|(other, it)| **other != extract && it.is_recent(now));
        let comes_first =
            |(other, it): (&ExtractionId, &UploadRefusal)| it.rank(*other) > mine.rank(extract);
        if !mine.is_stuck {
            others.any(comes_first)
        } else if mine.too_large < TOO_LARGE_MAX {
            self.is_wanted(now) || others.any(|other| !other.1.goes_on || comes_first(other))
        } else {
            self.is_wanted(now) || others.any(|(_, other)| other.too_large < mine.too_large)
        }
    }

    /// It dropped what it held.
    pub(super) fn gave_way(&self, extract: ExtractionId) {
        if let Some(refusal) = self.list().get_mut(&extract) {
            refusal.too_large += u32::from(refusal.is_stuck);
            refusal.held_bytes = 0;
            refusal.is_stuck = false;
        }
    }

    /// Whether nobody continues an upload any more to which nothing came for so long. Whoever wants
    /// one that the disk refused asks again soon.
    pub(super) fn is_stale(&self, extract: ExtractionId, idle_ms: u64, now: Time) -> bool {
        match self.list().get(&extract) {
            Some(it) if it.why.is_some() && !it.goes_on => !it.is_recent(now),
            Some(it) => idle_ms > STALE_MS && now.ms_since(it.at) > STALE_MS,
            None => idle_ms > STALE_MS,
        }
    }

    /// Whether the log should say again that the disk is full; then it says so.
    pub(super) fn is_time_to_tell(&self, now: Time) -> bool {
        let told = Time(self.told_ms.load(Ordering::Relaxed));
        let is_time = !is_recent(told, now);
        if is_time {
            self.told_ms.store(now.0, Ordering::Relaxed);
        }
        is_time
    }

    /// Whether anything of which no bytes are here wants room.
    fn is_wanted(&self, now: Time) -> bool {
        is_recent(Time(self.wanted_ms.load(Ordering::Relaxed)), now)
    }

    #[cfg(test)]
    pub(super) fn set_at(&self, extract: ExtractionId, at: Time) {
        if let Some(refusal) = self.list().get_mut(&extract) {
            refusal.at = at;
        }
    }

    fn list(&self) -> MutexGuard<'_, BTreeMap<ExtractionId, UploadRefusal>> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_recent(at: Time, now: Time) -> bool {
    at != Time::default() && now.ms_since(at) <= WANTED_MS
}

/// Whether the disk had no room for what was asked.
pub(super) fn is_full<T>(result: &Result<T>) -> bool {
    let error = result.as_ref().err();
    error.is_some_and(|error| error.code == ErrorCode::NoSpaceBytes)
}

#[cfg(test)]
mod tests {
    use bafs_proto::ErrorCode;

    use super::*;

    /// Uploads of so many units to a disk with so much room, all sent at once, unit by unit, by
    /// senders that never give up; which come to their end, and how much was sent in all.
    fn arrive(sizes: &[u64], room: u64) -> (Vec<bool>, u64) {
        let (refused, full) = (
            SpaceQueue::default(),
            Error::new(ErrorCode::NoSpaceBytes, "full"),
        );
        let (mut held, mut free, mut sent) = (vec![0; sizes.len()], room, 0);
        let turns = (0..4_000).flat_map(|_| 0..sizes.len());
        for at in turns {
            if held[at] == sizes[at] {
                continue;
            }
            let (extract, now) = (ExtractionId(at as u128 + 1), clock::now());
            refused.resume(extract);
            if held[at] == 0 && refused.must_wait(extract, now).is_some() {
                continue;
            }
            if free > 0 {
                (free, held[at], sent) = (free - 1, held[at] + 1, sent + 1);
                refused.resume(extract);
                if held[at] == sizes[at] {
                    refused.end(extract);
                }
                continue;
            }
            refused.note(extract, "f".to_owned(), &full, held[at]);
            if refused.must_give_way(extract, now) {
                free += std::mem::take(&mut held[at]);
                refused.gave_way(extract);
            }
        }
        let ended = held.iter().zip(sizes).map(|(held, size)| held == size);
        (ended.collect(), sent)
    }

    fn ended((ended, _): (Vec<bool>, u64)) -> usize {
        ended.into_iter().filter(|ended| *ended).count()
    }

    #[test]
    fn competing_uploads_complete_as_far_as_they_fit() {
        assert_eq!(ended(arrive(&[5; 10], 52)), 10);
        assert_eq!(ended(arrive(&[5; 10], 12)), 2);
        assert_eq!(ended(arrive(&[7; 14], 30)), 4);
        assert_eq!(ended(arrive(&[3, 9, 5, 8, 2, 7, 4], 38)), 7);
    }

    #[test]
    fn an_oversized_upload_does_not_starve_others() {
        let (ended, _) = arrive(&[100, 5, 5, 5], 20);
        assert_eq!(ended, [false, true, true, true]);
        let (ended, sent) = arrive(&[100, 100, 5, 100], 20);
        assert_eq!(ended, [false, false, true, false]);
        assert!(
            sent < 20 * 3 * (u64::from(TOO_LARGE_MAX) + 1),
            "{sent} units"
        );
    }
}
