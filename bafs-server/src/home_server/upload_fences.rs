//! The order of uploads to one target (redb): which epochs were issued, and the fence of the file
//! at each target. Works within the transactions of `upload_table.rs`; moves no file.
//!
//! **Rule.** A file is never replaced by one with an earlier fence. So an upload that its scheduler
//! gave up cannot overwrite a later result, however late it comes.
//!
//! * **Epochs** are issued from one sequence for all processes that serve the directory. A process
//!   takes a block of them when it opens the table, and drops the rest when it closes it. The start
//!   of a block is at least the time, so a table that was moved away is followed by later epochs.
//! * **A target** is known by the digest of its path. Below the directory of a set, the manifest's
//!   fence counts too: files of an older set do not come back.
//! * **The oldest rows go.** Epochs up to the last of them are refused from then on, as are epochs
//!   that this table did not issue. A sender that is still wanted asks for a new one.

use bafs_proto::file_set::MANIFEST_NAME;
use bafs_proto::hash::Digest;
use bafs_proto::ids::{ExtractionId, UploadEpoch};
use bafs_proto::message::UploadFence;
use bafs_proto::time::Time;
use bafs_proto::{Error, ErrorCode, Result};
use redb::{ReadableTable, ReadableTableMetadata, Table, TableDefinition, WriteTransaction};

/// By the digest of the path: epoch and order of the fence, and the upload.
const TARGETS: TableDefinition<'_, u128, (u64, u64, u128)> = TableDefinition::new("targets");
const NUMBERS: TableDefinition<'_, &str, u64> = TableDefinition::new("numbers");

/// The first epoch that no process has taken.
const NEXT: &str = "next epoch";

/// The first epoch that is accepted.
const FLOOR: &str = "first accepted epoch";

/// Bits of an epoch below its milliseconds.
const ORDER_BITS: u32 = 20;

/// Epochs that a process takes at once: those of one millisecond.
const BLOCK_EPOCHS: u64 = 1 << ORDER_BITS;

/// A target's fence is kept for so long, in milliseconds. It bounds the table only: later uploads
/// with an older epoch are refused as well.
const TARGET_MS_MAX: u64 = 30 * 24 * 3600 * 1000;

/// Most targets, of about 50 bytes each. When there are more, the older half goes.
const TARGETS_MAX: usize = 2_000_000;

/// Where an upload shall be, and its place in the order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FencedTarget {
    /// Path below the export, where links have led.
    pub(super) place: String,
    /// `None`: after all others.
    pub(super) fence: Option<UploadFence>,
}

/// Epochs that a process may issue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct EpochBlock {
    next: u64,
    end: u64,
}

/// The tables within one transaction.
pub(super) struct FenceRows<'a> {
    targets: Table<'a, u128, (u64, u64, u128)>,
    numbers: Table<'a, &'static str, u64>,
    pub(super) block: EpochBlock,
    pub(super) is_changed: bool,
}

impl<'a> FenceRows<'a> {
    /// Opens the tables, for a process that has a block of epochs left.
    ///
    /// # Errors
    /// What the disk does not do.
    pub(super) fn open(
        writing: &'a WriteTransaction,
        block: EpochBlock,
    ) -> Result<Self, redb::TableError> {
        Ok(Self {
            targets: writing.open_table(TARGETS)?,
            numbers: writing.open_table(NUMBERS)?,
            block,
            is_changed: false,
        })
    }

    /// An epoch later than all before. It may be told when the transaction is durable.
    ///
    /// # Errors
    /// What the disk does not do.
    pub(super) fn issue(&mut self, now: Time) -> Result<UploadEpoch> {
        let (floor, next) = self.accepted()?;
        if self.block.next == self.block.end || self.block.next < floor {
            let start = next.max(floor).max(now.0 << ORDER_BITS);
            if next == 0 {
                // What an earlier table issued is not known here.
                self.set_number(FLOOR, start)?;
            }
            self.block = EpochBlock {
                next: start,
                end: start + BLOCK_EPOCHS,
            };
            self.set_number(NEXT, self.block.end)?;
        }
        self.block.next += 1;
        Ok(UploadEpoch(self.block.next - 1))
    }

    /// The fence of an upload that may be given without one.
    ///
    /// # Errors
    /// As [`Self::issue`].
    pub(super) fn fence_or_last(
        &mut self,
        fence: Option<UploadFence>,
        now: Time,
    ) -> Result<UploadFence> {
        match fence {
            Some(fence) => Ok(fence),
            None => Ok(UploadFence {
                epoch: self.issue(now)?,
                order: 0,
            }),
        }
    }

    /// Checks that no later upload was put at a path, or began a set above it.
    ///
    /// # Errors
    /// `UploadFenced`; what the disk does not do.
    pub(super) fn check(&self, place: &str, fence: UploadFence) -> Result<()> {
        let (floor, next) = self.accepted()?;
        if !(floor..next).contains(&fence.epoch.0) {
            let text = format!(
                "the home no longer knows the order of this upload of '{place}'; it must begin anew"
            );
            return Err(Error::new(ErrorCode::UploadFenced, text));
        }
        if self.fence_at(place)?.is_some_and(|there| there > fence) {
            let text = format!("a later upload was put at '{place}'; this one does not replace it");
            return Err(Error::new(ErrorCode::UploadFenced, text));
        }
        for manifest in manifests_above(place) {
            if self.fence_at(&manifest)?.is_some_and(|there| there > fence) {
                let text = format!(
                    "a later set of files was begun at '{manifest}'; '{place}' does not join it"
                );
                return Err(Error::new(ErrorCode::UploadFenced, text));
            }
        }
        Ok(())
    }

    /// The upload that was put at a path last.
    ///
    /// # Errors
    /// What the disk does not do.
    pub(super) fn latest(&self, place: &str) -> Result<Option<ExtractionId>> {
        let row = self.targets.get(target_key(place)).map_err(table_error)?;
        Ok(row.map(|row| ExtractionId(row.value().2)))
    }

    /// Notes an upload that passed [`Self::check`].
    ///
    /// # Errors
    /// What the disk does not do.
    pub(super) fn insert(
        &mut self,
        place: &str,
        fence: UploadFence,
        extract: ExtractionId,
        now: Time,
    ) -> Result<()> {
        let row = (fence.epoch.0, fence.order, extract.0);
        let key = target_key(place);
        self.targets.insert(key, row).map_err(table_error)?;
        self.is_changed = true;
        match self.targets.len().map_err(table_error)? > TARGETS_MAX as u64 {
            true => self.sweep(now),
            false => Ok(()),
        }
    }

    /// Forgets targets of old uploads.
    ///
    /// # Errors
    /// What the disk does not do.
    pub(super) fn sweep(&mut self, now: Time) -> Result<()> {
        self.sweep_to(now, TARGETS_MAX)
    }

    /// As [`Self::sweep`]; where there are more than `targets_max`, the older half goes.
    fn sweep_to(&mut self, now: Time, targets_max: usize) -> Result<()> {
        let mut floor = now.0.saturating_sub(TARGET_MS_MAX) << ORDER_BITS;
        if self.targets.len().map_err(table_error)? > targets_max as u64 {
            let mut epochs = Vec::new();
            for row in self.targets.iter().map_err(table_error)? {
                epochs.push(row.map_err(table_error)?.1.value().0);
            }
            let middle = epochs.len() / 2;
            let (_, last, _) = epochs.select_nth_unstable(middle);
            floor = floor.max(*last + 1);
        }
        if floor <= self.accepted()?.0 {
            return Ok(());
        }
        self.set_number(FLOOR, floor)?;
        let is_young = |_: u128, (epoch, _, _): (u64, u64, u128)| epoch >= floor;
        self.targets.retain(is_young).map_err(table_error)
    }

    /// The first epoch that is accepted, and the first that was not issued.
    fn accepted(&self) -> Result<(u64, u64)> {
        let number = |name: &'static str| -> Result<u64> {
            let row = self.numbers.get(name).map_err(table_error)?;
            Ok(row.map_or(0, |row| row.value()))
        };
        Ok((number(FLOOR)?, number(NEXT)?))
    }

    fn set_number(&mut self, name: &'static str, number: u64) -> Result<()> {
        self.numbers.insert(name, number).map_err(table_error)?;
        self.is_changed = true;
        Ok(())
    }

    fn fence_at(&self, place: &str) -> Result<Option<UploadFence>> {
        let row = self.targets.get(target_key(place)).map_err(table_error)?;
        Ok(row.map(|row| {
            let (epoch, order, _) = row.value();
            let epoch = UploadEpoch(epoch);
            UploadFence { epoch, order }
        }))
    }
}

/// The manifests of sets to which a path may belong.
fn manifests_above(place: &str) -> impl Iterator<Item = String> {
    let ends = place.match_indices('/').map(|(at, _)| at);
    let below = ends.map(|end| format!("{}/{MANIFEST_NAME}", &place[..end]));
    std::iter::once(MANIFEST_NAME.to_owned()).chain(below)
}

fn target_key(place: &str) -> u128 {
    let digest = Digest::of(place.as_bytes());
    let (key, _) = digest.0.split_at(size_of::<u128>());
    u128::from_le_bytes(key.try_into().expect("a half of a digest"))
}

/// As the disk fails here within a transaction, its end fails, too.
pub(super) fn table_error(error: impl Into<redb::Error>) -> Error {
    match error.into() {
        redb::Error::Io(error) => crate::errors::disk_error("the table of uploads", &error),
        error => Error::new(ErrorCode::ServerFault, error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use redb::Database;
    use redb::backends::InMemoryBackend;

    const NOW: Time = Time(2 * TARGET_MS_MAX);

    fn database() -> Database {
        let backend = InMemoryBackend::new();
        Database::builder()
            .create_with_backend(backend)
            .expect("a table")
    }

    /// Does something in a transaction of a process that has no epochs yet.
    fn transact<T>(database: &Database, act: impl FnOnce(&mut FenceRows<'_>) -> T) -> T {
        let writing = database.begin_write().expect("begin");
        let mut rows = FenceRows::open(&writing, EpochBlock::default()).expect("open");
        let done = act(&mut rows);
        drop(rows);
        writing.commit().expect("commit");
        done
    }

    fn issue(rows: &mut FenceRows<'_>, now: Time) -> UploadFence {
        let issued = rows.fence_or_last(None, now);
        issued.expect("an epoch")
    }

    #[test]
    fn epochs_grow_though_clocks_go_back() {
        let database = database();
        let first = transact(&database, |rows| issue(rows, NOW));
        let later = transact(&database, |rows| {
            let second = issue(rows, Time(5));
            assert!(second > first);
            rows.check("f", first).expect("nothing is there");
            issue(rows, Time(5))
        });
        let unknown = UploadFence {
            epoch: UploadEpoch(later.epoch.0 + BLOCK_EPOCHS),
            order: 0,
        };
        let refused = transact(&database, |rows| rows.check("f", unknown));
        assert!(refused.is_err(), "it was not issued here");
    }

    #[test]
    fn forgotten_targets_refuse_old_epochs() {
        let database = database();
        let insert = |rows: &mut FenceRows<'_>, number: u128| {
            let fence = issue(rows, NOW);
            let place = format!("f{number}");
            rows.insert(&place, fence, ExtractionId(number), NOW)
                .expect("insert");
            fence
        };
        let fences = transact(&database, |rows| {
            [1, 2, 3, 4].map(|number| insert(rows, number))
        });
        transact(&database, |rows| {
            rows.sweep_to(NOW, 4).expect("sweep");
            rows.check("f2", fences[0])
                .expect_err("a later one is there");
            rows.check("g", fences[0]).expect("nothing is there");
            rows.sweep_to(NOW, 3).expect("sweep");
            assert_eq!(rows.targets.len().expect("count"), 1);
            rows.check("g", fences[2])
                .expect_err("it is too old by now");
            rows.check("f4", fences[3]).expect("it is the latest");
            let later = NOW.plus_ms(TARGET_MS_MAX + 1);
            rows.sweep_to(later, 3).expect("sweep");
            assert_eq!(rows.targets.len().expect("count"), 0);
            rows.check("g", fences[3])
                .expect_err("it is too old by now");
            let fence = issue(rows, later);
            rows.check("g", fence).expect("it is new");
        });
    }

    #[test]
    fn a_set_covers_what_is_below_its_directory() {
        let above: Vec<_> = manifests_above("a/b/c").collect();
        let expected = ["", "a/", "a/b/"].map(|above| format!("{above}{MANIFEST_NAME}"));
        assert_eq!(above, expected);
    }
}
