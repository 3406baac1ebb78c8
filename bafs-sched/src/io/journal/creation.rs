//! How a journal comes to be, and that one process alone writes it.

use std::fs::{File, OpenOptions, Permissions, TryLockError};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use bafs_proto::{Error, ErrorCode, Result};

use super::format::begin_journal;
use super::header::{JournalHeader, io_error};

/// How often, and with which pause, a journal is tried that somebody has open.
const LOCK_TRIES: u32 = 10;
const LOCK_PAUSE: Duration = Duration::from_millis(20);

/// A journal is written whole before it gets its name: nobody does so for longer than this.
const DRAFT_AGE_MAX: Duration = Duration::from_secs(600);

/// The name of a run, with which drafts end, has so many characters.
const DRAFT_RUN_CHARS: usize = 16;

/// Mode of what holds the jobs' environments.
pub(crate) const OWNER_ONLY: u32 = 0o600;

/// Takes the journal for this process alone. Who only looks whether it is taken has it for a
/// moment.
pub(super) fn lock_file(file: &File) -> std::io::Result<bool> {
    for _ in 0..LOCK_TRIES {
        match file.try_lock() {
            Ok(()) => return Ok(true),
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_PAUSE),
            Err(TryLockError::Error(error)) => return Err(error),
        }
    }
    Ok(false)
}

pub(super) fn lock_error(name: &str, error: &std::io::Error) -> Error {
    let error = io_error("lock", name, error);
    let text = "; a journal needs file locks: name one with --journal on a file system that \
                supports locks";
    Error::new(error.code, error.detail + text)
}

/// Takes from everybody but the owner what they may do with a file, if it is the caller's.
pub(crate) fn restrict_to_owner(file: &File) -> std::io::Result<()> {
    let found = file.metadata()?;
    if found.mode() & 0o077 == 0 {
        return Ok(());
    }
    match file.set_permissions(Permissions::from_mode(OWNER_ONLY)) {
        // Another's journal that the group continues.
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => Ok(()),
        closed => closed,
    }
}

pub(super) fn create_journal(path: &Path, header: &JournalHeader) -> Result<()> {
    let name = path.display().to_string();
    let directory = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty());
    let directory = directory.unwrap_or_else(|| Path::new("."));
    let draft = path.with_extension(format!("draft-{}", header.run));
    // A run that should go on would begin anew where a path is misspelt.
    if !directory.is_dir() {
        let text = format!(
            "cannot create the journal {name}: directory {} does not exist; create it, or correct \
             the path",
            directory.display()
        );
        return Err(Error::new(ErrorCode::NotFound, text));
    }
    remove_drafts(path, directory);
    let bytes = begin_journal(header)?;
    let write = || {
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(OWNER_ONLY)
            .open(&draft)?;
        file.write_all(&bytes)?;
        file.sync_all()?;
        publish_draft(&draft, path)?;
        File::open(directory)?.sync_all()
    };
    write().map_err(|e| io_error("create", &name, &e))
}

/// Gives a draft its name, unless another scheduler that began at the same time was first: that
/// one's is the journal then.
fn publish_draft(draft: &Path, path: &Path) -> std::io::Result<()> {
    match std::fs::hard_link(draft, path) {
        // Some file systems have no links.
        Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => std::fs::rename(draft, path),
        _ => std::fs::remove_file(draft),
    }
}

/// Removes what is left of schedulers that were killed before their journals were whole. One that
/// cannot be removed does no harm.
fn remove_drafts(path: &Path, directory: &Path) {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let beginning = format!("{stem}.draft-");
    for entry in std::fs::read_dir(directory).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_draft = name.strip_prefix(&beginning).is_some_and(|run| {
            run.len() == DRAFT_RUN_CHARS && run.chars().all(|c| c.is_ascii_hexdigit())
        });
        let written = entry.metadata().and_then(|data| data.modified()).ok();
        let age = written.and_then(|at| at.elapsed().ok());
        if is_draft && age.is_some_and(|age| age > DRAFT_AGE_MAX) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}
