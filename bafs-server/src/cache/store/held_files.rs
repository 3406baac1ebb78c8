//! Whole files that agents or the kernel have open. The node frees none of their blocks. They are
//! verified before, because their readers see no digests. Opens no socket.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::MutexGuard;

use bafs_proto::hash::Digest;
use bafs_proto::ids::{BlockIndex, FileIndex};
use bafs_proto::{Error, ErrorCode, Result};
use rustix::fs::{FlockOperation, flock};

use super::block_files::{file_stamp, is_unlocked, open_blocks};
use super::disk::CacheDisk;
use super::manifest::Manifest;
use crate::cache::errors::{disk_fault, source_changed};
use crate::cache::locks::lock;
use crate::logic::blocks::BlockKey;

impl CacheDisk {
    /// Opens a file that is wholly here. It stays so until [`CacheDisk::release_file`] (waits for
    /// the disk). `None` means that [`CacheDisk::verify_file`] must run first.
    ///
    /// # Errors
    /// `WrongState` when blocks are absent or not verified since the start; `SourceChanged` when
    /// the generation has ended; `ServerFault` when the disk fails.
    pub(super) fn open_whole(
        &self,
        manifest: &Manifest,
        file: FileIndex,
    ) -> Result<Option<OwnedFd>> {
        let retired = self.retired();
        if *retired {
            return Err(source_changed());
        }
        let _one_at_a_time = self.hold_changes();
        let path = self.hold_blocks(manifest, file)?;
        let opened = open_blocks(OpenOptions::new().read(true), &path).and_then(|opened| {
            flock(&opened, FlockOperation::NonBlockingLockShared)?;
            let stamp = file_stamp(&opened)?;
            Ok((self.verified_files().get(&file) == Some(&stamp)).then_some(opened))
        });
        match opened {
            Ok(Some(opened)) => Ok(Some(opened.into())),
            Ok(None) => {
                self.table().release_file(file);
                Ok(None)
            }
            Err(error) => {
                self.table().release_file(file);
                Err(disk_fault("hold a whole file", &path, error))
            }
        }
    }

    /// Keeps all blocks of a file until [`CacheDisk::release_file`], and returns its path.
    ///
    /// # Errors
    /// `WrongState` when blocks are absent or not verified since the start.
    pub(super) fn hold_file(&self, manifest: &Manifest, file: FileIndex) -> Result<PathBuf> {
        let _one_at_a_time = self.hold_changes();
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

    /// Compares all blocks of a held file at `path` with their digests, as long as `goes_on` says
    /// so (waits for the disk: a second for each gigabyte). The blocks were verified when they
    /// came; but the next reader sees no digests. The file is verified again only after a write.
    ///
    /// # Errors
    /// `ServerFault` when a block is wrong or the disk fails.
    pub(super) fn verify_file(
        &self,
        manifest: &Manifest,
        file: FileIndex,
        path: &Path,
        goes_on: impl Fn() -> bool,
    ) -> Result<()> {
        let size = manifest.file(file)?.identity.size;
        let verified = open_blocks(OpenOptions::new().read(true), path).and_then(|opened| {
            let stamp = file_stamp(&opened)?;
            if stamp.0 != size || !self.has_right_bytes(manifest, file, &opened, goes_on)? {
                return Err(std::io::ErrorKind::InvalidData.into());
            }
            if file_stamp(&opened)? == stamp {
                self.verified_files().insert(file, stamp);
            }
            Ok(())
        });
        verified.map_err(|error| disk_fault("hold a whole file", path, error))
    }

    fn has_right_bytes(
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

    /// Undoes one [`CacheDisk::hold_file`], unless it is the last and a reader still has the file
    /// open. Says whether it did (waits for the disk).
    pub(super) fn release_file(&self, file: FileIndex) -> bool {
        let one_at_a_time = self.hold_changes();
        if self.table().hold_count(file) <= 1 {
            // Without the file there is nothing to keep.
            let opened = open_blocks(OpenOptions::new().read(true), &self.path_of(file));
            let is_free = opened.map(|file| is_unlocked(file.as_fd()));
            if !is_free.unwrap_or(true) {
                return false;
            }
        }
        self.table().release_file(file);
        // `free_queued` may take long, and the next reader that holds a file needs this lock.
        drop(one_at_a_time);
        if let Err(error) = self.free_queued() {
            tracing::debug!(%error, "blocks of a released file are still on disk");
        }
        true
    }

    /// Checks that no reader has a whole file open.
    ///
    /// # Errors
    /// `Busy` when one has.
    pub(crate) fn check_no_held_files(&self) -> Result<()> {
        match self.table().held_file_count() {
            0 => Ok(()),
            held => {
                let text = format!("jobs still have {held} files of the old state open; try again");
                Err(Error::new(ErrorCode::Busy, text))
            }
        }
    }

    /// Gives back the space of all files that no other generation has. Agents may still have them
    /// open, but the map names no block of them any more.
    pub(crate) fn empty_files(&self) {
        let files = std::fs::read_dir(self.directory.join("blocks"));
        for entry in files.into_iter().flatten().flatten() {
            let emptied = open_blocks(OpenOptions::new().write(true), &entry.path());
            let emptied = emptied.and_then(|file| match file.metadata()?.nlink() {
                1 if is_unlocked(file.as_fd()) => file.set_len(0),
                _ => Ok(()),
            });
            if let Err(error) = emptied {
                tracing::debug!(path = %entry.path().display(), %error, "a file is not emptied");
            }
        }
    }

    fn hold_changes(&self) -> MutexGuard<'_, ()> {
        lock(&self.hold_changes)
    }
}
