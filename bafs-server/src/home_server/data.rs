//! Files of uploads: opened, sealed, read again. Knows no upload.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use bafs_proto::hash::{Digest, DigestHasher};
use rustix::fs::{Mode, fchmod};

/// Bytes that are hashed at once.
const HASH_CHUNK_BYTES: usize = 1 << 20;

/// Gives a file its bits and makes it durable.
pub(super) fn seal_file(file: &File, mode: u32) -> io::Result<()> {
    fchmod(file, Mode::from_raw_mode(mode))?;
    file.sync_all()
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
pub(super) fn digest_of(mut file: &File, size_max: u64) -> io::Result<(u64, Digest)> {
    let mut hasher = DigestHasher::new();
    let mut buffer = vec![0; HASH_CHUNK_BYTES];
    let mut size = 0;
    loop {
        let count = file.read(&mut buffer)?;
        hasher.update(&buffer[..count]);
        size += count as u64;
        if count == 0 || size > size_max {
            return Ok((size, hasher.digest()));
        }
    }
}
