//! The files of uploads on disk: written, sealed, given the names of their targets. Decides nothing
//! and knows no table.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bafs_proto::hash::DigestHasher;
use bafs_proto::path::{check_result_path, to_bytes};
use bafs_proto::{Error, ErrorCode, Result};
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, StatxFlags, fchmod, fsync, renameat, statat, statx,
};
use rustix::io::Errno;

use super::export::{Export, ExportEntry, OWN_DIRECTORY, file_type, system_error};
use super::upload::{Content, FileIdentity, StagedData};
use crate::errors::disk_error;

/// Where the bytes of uploads are, in the home's own directory.
pub(super) const DATA: &str = "data";

/// Bytes that are hashed at once.
const HASH_CHUNK_BYTES: usize = 1 << 20;

/// Whether a caller may write at a path: the one that it gave, and the one where links in the
/// export lead.
pub(super) type AllowPath<'a> = &'a dyn Fn(&str) -> Result<()>;

/// The directory of the last target: files of one directory follow each other.
pub(super) type LastParent = Option<(String, ExportEntry)>;

/// The files of all uploads to an export.
#[derive(Debug)]
pub(super) struct UploadFiles {
    pub(super) export: Arc<Export>,
    /// The home's own directory in the export.
    pub(super) directory: PathBuf,
}

/// A file of ours that is removed unless it is kept.
#[derive(Debug)]
pub(super) struct StagedFile {
    pub(super) path: PathBuf,
    pub(super) is_kept: bool,
}

impl UploadFiles {
    pub(super) fn new(export: Arc<Export>) -> Self {
        let directory = export.root_path().join(OWN_DIRECTORY);
        Self { export, directory }
    }

    pub(super) fn data_directory(&self) -> PathBuf {
        self.directory.join(DATA)
    }

    /// Where the bytes of an upload are.
    pub(super) fn data_path(&self, name: &str) -> PathBuf {
        self.data_directory().join(name)
    }

    /// Makes the names of staged files durable that there are by now.
    ///
    /// # Errors
    /// What the disk does not do.
    pub(super) fn sync_names(&self) -> Result<()> {
        sync_directory(&self.data_directory())
    }

    /// Checks that a file may have a name in the export, and makes the directories above it.
    /// Returns the path to which links lead.
    ///
    /// # Errors
    /// As [`Export::make_directory`]; what `allow` answers; `BadPath` for the home's own directory;
    /// `WrongState` when a directory has that name.
    pub(super) fn check_target(&self, path: &str, allow: AllowPath<'_>) -> Result<String> {
        let (above, name) = split_parent(path);
        let parent = self.export.make_directory(above, allow)?;
        self.check_destination(&parent, path, allow)?;
        let there = statat(&parent.fd, &*to_bytes(name), AtFlags::SYMLINK_NOFOLLOW);
        match there.is_ok_and(|there| file_type(&there) == FileType::Directory) {
            true => Err(system_error(path, Errno::ISDIR)),
            false => Ok(parent.child_path(name)),
        }
    }

    /// The directory of a target, made if it is missing, where the target may have its name.
    ///
    /// # Errors
    /// As [`Self::check_target`].
    pub(super) fn open_parent<'a>(
        &self,
        path: &str,
        allow: AllowPath<'_>,
        last: &'a mut LastParent,
    ) -> Result<&'a ExportEntry> {
        let (above, _) = split_parent(path);
        let parent = match last.take() {
            Some((known, parent)) if known == above => parent,
            _ => self.export.make_directory(above, allow)?,
        };
        let (_, parent) = last.insert((above.to_owned(), parent));
        self.check_destination(parent, path, allow)?;
        Ok(parent)
    }

    /// Gives a staged file the name of its target. Where the target is that file already, nothing
    /// happens. Returns whether the target is the file; otherwise its bytes are lost.
    ///
    /// # Errors
    /// What the system says.
    pub(super) fn rename(
        &self,
        parent: &ExportEntry,
        path: &str,
        content: Content,
        data: &StagedData,
    ) -> Result<bool> {
        let source = self.data_path(&data.name);
        // What was checked was sealed: another length means that somebody changed it since.
        let length = fs::symlink_metadata(&source).map(|found| found.len());
        if length.is_ok_and(|length| length != content.size) {
            let _ = fs::remove_file(&source);
            return Ok(false);
        }
        let name = to_bytes(split_parent(path).1);
        match renameat(CWD, &source, &parent.fd, &*name) {
            Ok(()) => Ok(true),
            Err(Errno::NOENT) if fs::symlink_metadata(&source).is_err() => {
                match identity_at(&parent.fd, &name, AtFlags::SYMLINK_NOFOLLOW) {
                    Ok(there) => Ok(there == data.identity),
                    Err(Errno::NOENT) => Ok(false),
                    Err(error) => Err(system_error(path, error)),
                }
            }
            Err(error) => Err(system_error(path, error)),
        }
    }

    /// Makes the names in a directory of the export durable.
    ///
    /// # Errors
    /// As [`Export::find`].
    pub(super) fn sync_parent(&self, above: &str) -> Result<()> {
        let parent = self.export.find(above)?.open_directory()?;
        fsync(parent).map_err(|error| system_error(above, error))
    }

    /// Checks that a file may have its name in the directory to which its path led.
    fn check_destination(
        &self,
        parent: &ExportEntry,
        path: &str,
        allow: AllowPath<'_>,
    ) -> Result<()> {
        let (_, name) = split_parent(path);
        let place = parent.child_path(name);
        allow(&place).map_err(|error| self.export.redirected_error(path, &place, error))?;
        match self.export.is_own_name(&parent.stat, name) {
            true => Err(bad_target_error(path)),
            false => Ok(()),
        }
    }
}

impl StagedFile {
    /// Makes a file with this content, not durably.
    pub(super) fn write(path: PathBuf, data: &[u8]) -> Result<Self> {
        let file = Self {
            path,
            is_kept: false,
        };
        let mut options = OpenOptions::new();
        options.write(true).create_new(true).mode(0o600);
        let opened = options.open(&file.path);
        let written = opened.and_then(|mut opened| opened.write_all(data));
        written.map_err(|error| fault(&file.path, error))?;
        Ok(file)
    }

    /// Gives it its bits, makes its content durable, and tells which file it is. Until then its
    /// owner may open it, whatever they are.
    pub(super) fn seal(&self, mode: u32) -> Result<FileIdentity> {
        let file = File::open(&self.path);
        let sealed = file.and_then(|file| seal_file(&file, mode));
        sealed.map_err(|error| fault(&self.path, error))
    }
}

impl Drop for StagedFile {
    fn drop(&mut self) {
        if !self.is_kept {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Gives a file its bits, makes it durable, and tells which file it is.
pub(super) fn seal_file(file: &File, mode: u32) -> io::Result<FileIdentity> {
    fchmod(file, Mode::from_raw_mode(mode & 0o777))?;
    file.sync_all()?;
    Ok(identity_at(file, b"", AtFlags::EMPTY_PATH)?)
}

/// Which file there is. A number alone may soon be that of another one.
fn identity_at(at: impl AsFd, name: &[u8], flags: AtFlags) -> rustix::io::Result<FileIdentity> {
    let found = statx(at, name, flags, StatxFlags::INO | StatxFlags::BTIME)?;
    let born = found.stx_btime;
    let second_ns = u64::try_from(born.tv_sec)
        .unwrap_or(0)
        .saturating_mul(1_000_000_000);
    Ok(FileIdentity {
        inode: found.stx_ino,
        born_ns: second_ns.saturating_add(born.tv_nsec.into()),
    })
}

/// Opens the bytes of an upload, also where they have the bits of a result that its owner may not
/// write: what was interrupted after those were given goes on.
pub(super) fn open_data(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    options.mode(0o600);
    match options.open(path) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
            options.open(path)
        }
        opened => opened,
    }
}

/// Size and digest of a file; stops soon after `size_max` bytes.
pub(super) fn digest_of(mut file: &File, size_max: u64) -> io::Result<Content> {
    let mut hasher = DigestHasher::new();
    let mut buffer = vec![0; HASH_CHUNK_BYTES];
    let mut size = 0;
    loop {
        let count = file.read(&mut buffer)?;
        hasher.update(&buffer[..count]);
        size += count as u64;
        if count == 0 || size > size_max {
            let digest = hasher.digest();
            return Ok(Content { size, digest });
        }
    }
}

/// Checks the path of a target, before anything is looked up.
///
/// # Errors
/// `BadPath`.
pub(super) fn check_target_path(path: &str) -> Result<()> {
    check_result_path(path)?;
    match path.is_empty() || path.split('/').next() == Some(OWN_DIRECTORY) {
        true => Err(bad_target_error(path)),
        false => Ok(()),
    }
}

fn bad_target_error(path: &str) -> Error {
    Error::new(ErrorCode::BadPath, format!("'{path}' cannot be a file"))
}

/// The directory above a path, and the name in it.
pub(super) fn split_parent(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

pub(super) fn sync_directory(path: &Path) -> Result<()> {
    File::open(path)
        .and_then(|file| file.sync_all())
        .map_err(|error| fault(path, error))
}

/// What the disk does not do. What does not pass by itself is told as such: a full disk, and one
/// that nobody may write.
pub(super) fn fault(path: &Path, error: impl Into<io::Error>) -> Error {
    let error = error.into();
    let doing = format!("the home server fails at {}", path.display());
    match error.kind() {
        io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied => {
            Error::new(ErrorCode::RightMissing, format!("{doing}: {error}"))
        }
        _ => disk_error(doing, &error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};

    use super::*;

    /// Who sends would try it for an hour, and the user would hear nothing.
    #[test]
    fn a_full_disk_is_a_permanent_refusal() {
        let refused = |errno: Errno| fault(Path::new("f"), errno);
        let full = refused(Errno::NOSPC);
        assert_eq!(full.code, ErrorCode::NoSpaceBytes);
        assert_eq!(refused(Errno::ROFS).code, ErrorCode::RightMissing);
        assert!(refused(Errno::IO).is_transient());
        let export = system_error("f", Errno::NOSPC);
        assert_eq!(export.code, ErrorCode::NoSpaceBytes);
    }

    #[test]
    fn a_file_unreadable_to_its_owner_becomes_durable() {
        let root = tempfile::tempdir().expect("directory");
        let path = root.path().join("t");
        let made = path.clone();
        // As anybody but root.
        let act = move || {
            let mut own = capabilities(None).expect("capabilities");
            let all = CapabilitySet::DAC_OVERRIDE | CapabilitySet::DAC_READ_SEARCH;
            own.effective.remove(all);
            set_capabilities(None, own).expect("give up");
            let mut staged = StagedFile::write(made, b"x").expect("write");
            staged.is_kept = true;
            staged.seal(0o200)
        };
        let sealed = std::thread::spawn(act).join().expect("join");
        let found = fs::metadata(path).expect("there");
        assert_eq!(sealed.expect("it is on disk").inode, found.ino());
        assert_eq!(found.permissions().mode() & 0o777, 0o200);
    }
}
