//! What agents on this machine use without asking: the files of the blocks, the map that tells
//! which of them may be read, and files that stay whole while somebody has them open. Knows no
//! socket.
//!
//! Whoever got the map holds a lock on the generation (`users`); whoever has a whole file open, the
//! kernel on behalf of a dead agent included, holds a lock on that file. A later life of the node
//! frees no block under them.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::PoisonError;
use std::time::Duration;

use bafs_proto::hash::Digest;
use bafs_proto::ids::{BlockIndex, FileIndex};
use bafs_proto::{Error, ErrorCode, Result};
use bafs_tree::{BlockLayout, BlockMap};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use super::disk::{CacheDisk, open_blocks};
use super::fault;
use super::manifest::Manifest;
use crate::logic::blocks::{BlockChange, BlockKey};

/// File whose lock every agent with a map holds.
const USERS: &str = "users";

/// How long a node that starts waits for agents of its former life, which end with it.
const SURVIVORS_MS: u64 = 2_000;
const SURVIVORS_PAUSE: Duration = Duration::from_millis(20);

/// What agents are told of the blocks of one generation.
pub(super) struct NearMap {
    map: BlockMap,
    files: [OwnedFd; 2],
    /// What was read without asking when it was counted last, in KiB and in blocks.
    counted: [u32; 2],
}

impl NearMap {
    /// Tells of changes, in order.
    pub(super) fn tell(&self, changes: impl IntoIterator<Item = BlockChange>) {
        for (key, told) in changes {
            self.map.set_block(key.file.0, key.block.0, told);
        }
    }

    /// Whether an agent found other bytes in a block than there should be, since the last time.
    pub(super) fn take_doubt(&self, key: BlockKey) -> bool {
        self.map.take_mismatch(key.file.0, key.block.0)
    }

    /// Blocks that agents used since the last time.
    pub(super) fn take_uses(&self) -> Vec<BlockKey> {
        let key = |(file, block)| BlockKey {
            file: FileIndex(file),
            block: BlockIndex(block),
        };
        self.map.take_used_blocks().into_iter().map(key).collect()
    }
}

impl CacheDisk {
    /// What an agent on this machine needs to read blocks without asking: the directory of their
    /// files, the two files of the map, and its share of the lock (waits for the disk).
    ///
    /// # Errors
    /// `SourceChanged` when the generation is over, `Unsupported` when there are too many blocks
    /// for a map, `ServerFault` when the disk does not do it.
    pub(super) fn share(&self, manifest: &Manifest) -> Result<Vec<OwnedFd>> {
        let retired = self.retired();
        if *retired {
            return Err(super::source_changed());
        }
        let broken = |e| fault("share the blocks", &self.directory, e);
        let users = users(&self.directory).map_err(broken)?;
        flock(&users, FlockOperation::NonBlockingLockShared).map_err(|e| broken(e.into()))?;
        let directory = File::open(self.directory.join("blocks")).map_err(broken)?;
        let mut table = self.table();
        if table.near().is_none() {
            let near = NearMap::create(manifest)?;
            near.tell(table.start_change_log());
            *table.near() = Some(near);
        }
        let mut files = vec![OwnedFd::from(directory)];
        for file in table.near().iter().flat_map(|near| &near.files) {
            files.push(file.try_clone().map_err(broken)?);
        }
        files.push(users.into());
        Ok(files)
    }

    /// The open file of a file that is wholly here, which stays so until [`CacheDisk::let_go`]
    /// (waits for the disk); `None` when its bytes are to be compared before, by
    /// [`CacheDisk::compare`].
    ///
    /// # Errors
    /// `WrongState` when it is not wholly here, or not checked yet; `SourceChanged` when the
    /// generation is over; `ServerFault` when the disk does not do it.
    pub(super) fn hold(&self, manifest: &Manifest, file: FileIndex) -> Result<Option<OwnedFd>> {
        let retired = self.retired();
        if *retired {
            return Err(super::source_changed());
        }
        let _one_at_a_time = self.holding();
        let path = self.hold_blocks(manifest, file)?;
        let opened = open_blocks(OpenOptions::new().read(true), &path).and_then(|opened| {
            flock(&opened, FlockOperation::NonBlockingLockShared)?;
            let stamp = stamp_of(&opened)?;
            Ok((self.compared().get(&file) == Some(&stamp)).then_some(opened))
        });
        match opened {
            Ok(Some(opened)) => Ok(Some(opened.into())),
            Ok(None) => {
                self.table().release_file(file);
                Ok(None)
            }
            Err(error) => {
                self.table().release_file(file);
                Err(fault("hold a whole file", &path, error))
            }
        }
    }

    /// Has all blocks of a file stay until [`CacheDisk::let_go`], and tells where it is.
    ///
    /// # Errors
    /// `WrongState` when it is not wholly here, or not checked yet.
    pub(super) fn keep_whole(&self, manifest: &Manifest, file: FileIndex) -> Result<PathBuf> {
        let _one_at_a_time = self.holding();
        self.hold_blocks(manifest, file)
    }

    fn hold_blocks(&self, manifest: &Manifest, file: FileIndex) -> Result<PathBuf> {
        let entry = manifest.file(file)?;
        if entry.identity.size == 0 || !self.table().hold_file(file, manifest.blocks_of(entry)) {
            let text = "the file is not wholly here, or was not read since the node started";
            return Err(Error::new(ErrorCode::WrongState, text));
        }
        Ok(self.path_of(file))
    }

    /// Compares all blocks of a file that is kept whole at `path` with their digests, as long as
    /// `goes_on` says so (waits for the disk: a second for each gigabyte). Whoever gets the file
    /// sees no digest, so that is done although they were compared when they came, and again only
    /// if the file was written since.
    ///
    /// # Errors
    /// `ServerFault` when a block is not what it should be or the disk does not do it.
    pub(super) fn compare(
        &self,
        manifest: &Manifest,
        (file, path): (FileIndex, &Path),
        goes_on: impl Fn() -> bool,
    ) -> Result<()> {
        let size = manifest.file(file)?.identity.size;
        let compared = open_blocks(OpenOptions::new().read(true), path).and_then(|opened| {
            let stamp = stamp_of(&opened)?;
            if stamp.0 != size || !self.is_right(manifest, file, &opened, goes_on)? {
                return Err(std::io::ErrorKind::InvalidData.into());
            }
            if stamp_of(&opened)? == stamp {
                self.compared().insert(file, stamp);
            }
            Ok(())
        });
        compared.map_err(|error| fault("hold a whole file", path, error))
    }

    /// Whether all blocks of a file, which are here, are what they should be.
    fn is_right(
        &self,
        manifest: &Manifest,
        file: FileIndex,
        opened: &File,
        goes_on: impl Fn() -> bool,
    ) -> std::io::Result<bool> {
        let mut bytes = vec![0; manifest.block_bytes() as usize];
        let mut left = opened.metadata()?.len();
        for block in 0.. {
            let length = left.min(u64::from(manifest.block_bytes()));
            if length == 0 {
                break;
            }
            if !goes_on() {
                return Err(std::io::ErrorKind::Interrupted.into());
            }
            let bytes = &mut bytes[..length as usize];
            opened.read_exact_at(bytes, block * u64::from(manifest.block_bytes()))?;
            let block = BlockIndex(block);
            let digest = self.table().digest_of(BlockKey { file, block });
            if digest != Some(Digest::of(bytes)) {
                return Ok(false);
            }
            left -= length;
        }
        Ok(true)
    }

    /// Undoes [`CacheDisk::hold`], unless somebody still has the open file; says whether it did
    /// (waits for the disk).
    pub(super) fn let_go(&self, file: FileIndex) -> bool {
        let one_at_a_time = self.holding();
        if self.table().hold_count(file) <= 1 {
            // Without the file there is nothing to keep.
            let opened = open_blocks(OpenOptions::new().read(true), &self.path_of(file));
            let free = opened.map(|file| is_free(file.as_fd()));
            if !free.unwrap_or(true) {
                return false;
            }
        }
        self.table().release_file(file);
        // Whoever holds a file waits for this with the lock that is taken now.
        drop(one_at_a_time);
        if let Err(error) = self.tidy() {
            tracing::debug!(%error, "what a file had to keep is still on disk");
        }
        true
    }

    /// Whether nobody has a whole file open.
    ///
    /// # Errors
    /// `Busy` when somebody has.
    pub(super) fn check_unheld(&self) -> Result<()> {
        match self.table().held_file_count() {
            0 => Ok(()),
            held => {
                let text = format!("jobs still have {held} files of the old state open; try again");
                Err(Error::new(ErrorCode::Busy, text))
            }
        }
    }

    /// Gives the space of all files back that no other generation has, though agents may still have
    /// them open: nobody is told that there is anything in them any more.
    pub(super) fn empty_files(&self) {
        let files = std::fs::read_dir(self.directory.join("blocks"));
        for entry in files.into_iter().flatten().flatten() {
            let emptied = open_blocks(OpenOptions::new().write(true), &entry.path());
            let emptied = emptied.and_then(|file| match file.metadata()?.nlink() {
                1 if is_free(file.as_fd()) => file.set_len(0),
                _ => Ok(()),
            });
            if let Err(error) = emptied {
                tracing::debug!(path = %entry.path().display(), %error, "a file is not emptied");
            }
        }
    }

    /// Adds what agents read without asking to the counters.
    pub(super) fn count_near_reads(&self) {
        let mut table = self.table();
        if let Some(near) = table.near() {
            let now = near.map.read_counts();
            let before = std::mem::replace(&mut near.counted, now);
            let [kib, blocks] = [0, 1].map(|n| u64::from(now[n].wrapping_sub(before[n])));
            self.counters.add("cache_hit_local_bytes", kib << 10);
            self.counters.add("cache_hits_local", blocks);
        }
    }

    fn holding(&self) -> std::sync::MutexGuard<'_, ()> {
        self.holding.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl NearMap {
    fn create(manifest: &Manifest) -> Result<Self> {
        let places = BlockLayout::from_manifest(manifest.entries(), manifest.block_bytes());
        let places = places.ok_or_else(|| {
            let text = "the volume has too many blocks for a map";
            Error::new(ErrorCode::Unsupported, text)
        })?;
        let (map, files) = BlockMap::create(places)
            .map_err(|e| Error::new(ErrorCode::ServerFault, format!("make a block map: {e}")))?;
        Ok(Self {
            map,
            files,
            counted: [0; 2],
        })
    }
}

/// Sees to it that nothing of a former life of the node reads what this life may change, in the
/// directory of a generation (waits for the disk). Returns the files that are left to others and
/// no longer here.
///
/// # Errors
/// `ServerFault` when the disk does not do it.
pub(super) fn leave_survivors(directory: &Path) -> Result<BTreeSet<FileIndex>> {
    let broken = |e| fault("look for readers of a former life", directory, e);
    let (blocks, left) = (directory.join("blocks"), directory.join("left"));
    let forget = || remove(std::fs::remove_file, &directory.join("journal"));
    // A former start was ended while it did what follows.
    if std::fs::symlink_metadata(&left).is_ok() {
        forget()
            .and_then(|()| std::fs::create_dir_all(&blocks))
            .and_then(|()| remove(std::fs::remove_dir_all, &left))
            .map_err(broken)?;
    }
    if !are_gone(directory).map_err(broken)? {
        tracing::warn!(directory = %directory.display(),
            "agents of a former life still read the cache: they keep its blocks, and they are \
             fetched again when they are needed");
        // Emptied by name only: whoever has the directory or a file of it open keeps that.
        std::fs::rename(&blocks, &left)
            .and_then(|()| forget())
            .and_then(|()| std::fs::create_dir(&blocks))
            .and_then(|()| remove(std::fs::remove_file, &directory.join(USERS)))
            .and_then(|()| remove(std::fs::remove_dir_all, &left))
            .map_err(broken)?;
    }
    let mut left = BTreeSet::new();
    for entry in std::fs::read_dir(&blocks).map_err(broken)? {
        let entry = entry.map_err(broken)?;
        let file = match open_blocks(OpenOptions::new().read(true), &entry.path()) {
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => continue,
            file => file.map_err(broken)?,
        };
        if !is_free(file.as_fd()) {
            std::fs::remove_file(entry.path()).map_err(broken)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            left.extend(name.parse().map(FileIndex));
        }
    }
    Ok(left)
}

/// Waits a while until no agent of a former life has a map.
fn are_gone(directory: &Path) -> std::io::Result<bool> {
    if !directory.join(USERS).exists() {
        return Ok(true);
    }
    let users = users(directory)?;
    for _ in 0..SURVIVORS_MS / SURVIVORS_PAUSE.as_millis() as u64 {
        if is_free(users.as_fd()) {
            return Ok(true);
        }
        std::thread::sleep(SURVIVORS_PAUSE);
    }
    Ok(false)
}

fn remove<'a>(
    with: impl Fn(&'a Path) -> std::io::Result<()>,
    path: &'a Path,
) -> std::io::Result<()> {
    match with(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Size of a file and when it changed last, in seconds and nanoseconds: of its bytes, of anything.
pub(super) type Stamp = (u64, [i64; 4]);

fn stamp_of(file: &File) -> std::io::Result<Stamp> {
    let at = file.metadata()?;
    let times = [at.mtime(), at.mtime_nsec(), at.ctime(), at.ctime_nsec()];
    Ok((at.len(), times))
}

fn users(directory: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    options.open(directory.join(USERS))
}

/// Whether nobody else has a lock on an open file; none is left behind. Where there are no locks
/// nobody was given anything.
fn is_free(file: std::os::fd::BorrowedFd<'_>) -> bool {
    let locked = flock(file, FlockOperation::NonBlockingLockExclusive);
    let _ = flock(file, FlockOperation::Unlock);
    locked != Err(Errno::WOULDBLOCK)
}
