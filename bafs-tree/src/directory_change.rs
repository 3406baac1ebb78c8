//! Changes of directories under the limit: room for a name is sure before the name is made.

use std::mem::MaybeUninit;
use std::sync::MutexGuard;

use rustix::fs::{Mode, OFlags, RawDir, Stat, openat};

use crate::account::{Account, SpaceDecision};
use crate::errno::Outcome;
use crate::file_reference::FileReference;

/// Most that one new name adds to a directory of ext4: a leaf, and two blocks when the directory
/// becomes or deepens a tree.
const NAME_BLOCKS_MAX: u64 = 3;

/// Directories under change, locked; settles their charges when dropped.
pub(crate) struct DirectoryChange<'a> {
    account: Option<&'a Account>,
    locked: Vec<(MutexGuard<'a, u64>, &'a FileReference)>,
    reserved: u64,
    adds_name: bool,
}

impl<'a> DirectoryChange<'a> {
    /// Locks the directories against other changes of their names, in an order that cannot block
    /// for ever.
    pub(crate) fn begin(directories: &[&'a FileReference]) -> Self {
        let mut states: Vec<_> = directories
            .iter()
            .filter_map(|file_reference| {
                file_reference
                    .account_entry()
                    .map(|(_, state)| (state, *file_reference))
            })
            .collect();
        states.sort_by_key(|(state, _)| state.id);
        states.dedup_by_key(|(state, _)| state.id);
        let locked = states
            .into_iter()
            .map(|(state, file_reference)| (state.lock(), file_reference))
            .collect();
        let account = directories
            .first()
            .and_then(|file_reference| file_reference.tree().account());
        Self {
            account,
            locked,
            reserved: 0,
            adds_name: false,
        }
    }

    /// Makes sure of space for one more name in `directory`, and for `blocks` more.
    pub(crate) fn reserve(
        &mut self,
        directory: &FileReference,
        name: &[u8],
        blocks: u64,
    ) -> Outcome<()> {
        let Some(account) = self.account else {
            return Ok(());
        };
        self.adds_name = true;
        let block_bytes = directory.tree().block_bytes();
        let sure = (blocks + NAME_BLOCKS_MAX) * block_bytes;
        if account.try_reserve_worst_case(sure) {
            self.reserved += sure;
            return Ok(());
        }
        let needed = match fits_without_growth(directory, name.len()) {
            true => blocks * block_bytes,
            false => sure,
        };
        let own = self.reserved;
        account.reserve_exactly(|free, may_settle| match may_settle && own == 0 {
            _ if needed <= free => SpaceDecision::Reserve(needed, ()),
            true => SpaceDecision::Wait,
            false => SpaceDecision::Refuse,
        })?;
        self.reserved += needed;
        Ok(())
    }

    /// Charges one of the directories what it has now, and lets others change it; its attributes.
    pub(crate) fn settle(&mut self, directory: &FileReference) -> Outcome<Stat> {
        let stat = directory.stat()?;
        let mut locked = self.locked.iter();
        let at = locked.position(|(_, file_reference)| std::ptr::eq(*file_reference, directory));
        if let (Some(account), Some(at)) = (self.account, at) {
            let (mut charged, _) = self.locked.swap_remove(at);
            let now = directory.tree().charge_bytes(&stat);
            self.reserved -= charge_directory(account, &mut charged, now, self.reserved);
        }
        Ok(stat)
    }

    /// Charges a file that was just made from what is reserved.
    pub(crate) fn charge_new(&mut self, made: &FileReference, bytes: u64) {
        if let Some((account, state)) = made.account_entry() {
            let part = bytes.min(self.reserved);
            account.settle(&mut state.lock(), bytes, part);
            self.reserved -= part;
        }
    }
}

impl Drop for DirectoryChange<'_> {
    fn drop(&mut self) {
        let Some(account) = self.account else { return };
        for (charged, anchor) in &mut self.locked {
            if !self.adds_name && anchor.tree().is_ext4() {
                // There a directory never takes less than before.
                continue;
            }
            if let Ok(stat) = anchor.stat() {
                let now = anchor.tree().charge_bytes(&stat);
                self.reserved -= charge_directory(account, charged, now, self.reserved);
            }
        }
        account.settle(&mut 0, 0, std::mem::take(&mut self.reserved));
    }
}

/// Charges what a directory has `now`; how much of `reserved` that took.
fn charge_directory(account: &Account, charged: &mut u64, now: u64, reserved: u64) -> u64 {
    let part = reserved.min(now.saturating_sub(*charged));
    account.settle(charged, now, part);
    part
}

/// Whether one more name surely fits the blocks that a directory has. Only small directories of
/// ext4 give a sure answer: one block, entries of `8 + name` bytes rounded up to 4, each followed
/// by unused space. If the unused space of all `n` entries is more than `n` times what would
/// still be too little, then one of them has enough.
fn fits_without_growth(directory: &FileReference, name_length: usize) -> bool {
    let Ok(shown) = directory.path_descriptor() else {
        return false;
    };
    const CHECKSUM_BYTES: usize = 12;
    let record = |length: usize| (8 + length).next_multiple_of(4);
    let size = directory.stat().map_or(0, |stat| stat.st_size);
    let block_bytes = directory.tree().block_bytes();
    if !directory.tree().is_ext4() || u64::try_from(size).ok() != Some(block_bytes) {
        return false;
    }
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(fd) = openat(&shown, c".", flags, Mode::empty()) else {
        return false;
    };
    let mut buffer = [MaybeUninit::<u8>::uninit(); 8 << 10];
    let mut entries = RawDir::new(&fd, &mut buffer);
    let (mut used, mut count) = (CHECKSUM_BYTES, 0);
    while let Some(entry) = entries.next() {
        let Ok(entry) = entry else { return false };
        used += record(entry.file_name().to_bytes().len());
        count += 1;
    }
    let unused = usize::try_from(block_bytes)
        .unwrap_or(0)
        .saturating_sub(used);
    unused > count * (record(name_length) - 4)
}
