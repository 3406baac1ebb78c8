//! Agents of an earlier life of the node may still read its blocks. A node that starts leaves their
//! files to them, and forgets those blocks.
//!
//! An agent with a block map holds a lock on the file `users` of the generation. An agent with a
//! whole file holds a lock on that file; so does the kernel for a program whose agent is dead.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use bafs_proto::Result;
use bafs_proto::ids::FileIndex;

use super::block_files::{is_unlocked, open_blocks};
use crate::cache::errors::disk_fault;

/// File whose lock every agent with a map holds.
const USERS: &str = "users";

/// How long a node that starts waits for agents of its former life, which end with it.
const FORMER_AGENTS_MS: u64 = 2_000;
const FORMER_AGENTS_PAUSE: Duration = Duration::from_millis(20);

/// Opens the file whose lock says that an agent uses the generation in `directory`.
pub(super) fn open_users(directory: &Path) -> std::io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    options.open(directory.join(USERS))
}

/// Makes sure that no agent of a former life reads what this life may change, in the directory of a
/// generation (waits for the disk). Returns the files that are left to those agents, and so are not
/// here any more.
///
/// # Errors
/// `ServerFault` when the disk fails.
pub(super) fn leave_files_to_former_agents(directory: &Path) -> Result<BTreeSet<FileIndex>> {
    let broken = |e| disk_fault("look for readers of a former life", directory, e);
    let (blocks, left) = (directory.join("blocks"), directory.join("left"));
    let forget = || remove(std::fs::remove_file, &directory.join("journal"));
    // A former start ended in the middle of what follows.
    if std::fs::symlink_metadata(&left).is_ok() {
        forget()
            .and_then(|()| std::fs::create_dir_all(&blocks))
            .and_then(|()| remove(std::fs::remove_dir_all, &left))
            .map_err(broken)?;
    }
    if !have_agents_ended(directory).map_err(broken)? {
        tracing::warn!(directory = %directory.display(),
            "agents of a former life still read the cache: they keep its blocks, and they are \
             fetched again when they are needed");
        // Only the names go: an agent keeps the directory and the files that it has open.
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
        if !is_unlocked(file.as_fd()) {
            std::fs::remove_file(entry.path()).map_err(broken)?;
            let name = entry.file_name().to_string_lossy().into_owned();
            left.extend(name.parse().map(FileIndex));
        }
    }
    Ok(left)
}

/// Waits a while until no agent of a former life has a map.
fn have_agents_ended(directory: &Path) -> std::io::Result<bool> {
    if !directory.join(USERS).exists() {
        return Ok(true);
    }
    let users = open_users(directory)?;
    for _ in 0..FORMER_AGENTS_MS / FORMER_AGENTS_PAUSE.as_millis() as u64 {
        if is_unlocked(users.as_fd()) {
            return Ok(true);
        }
        std::thread::sleep(FORMER_AGENTS_PAUSE);
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
