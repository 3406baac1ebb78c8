//! What a server keeps of itself in its directory: the id of all its lives and the number of this
//! one. Knows no other file of the server.

use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use bafs_proto::ids::ServerId;

use crate::errors::is_no_space;

const SERVER_ID_FILE: &str = "server-id";
const COUNTER_FILE: &str = "lives";
const LOCK_FILE: &str = "lives.lock";

/// How often, and with which pause, the lock is tried: a life is begun within milliseconds.
const LOCK_TRIES: u32 = 500;
const LOCK_PAUSE: Duration = Duration::from_millis(10);

/// A life of a server, from a start to the end of the process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Incarnation {
    /// The server, the same in every life.
    pub(crate) server: ServerId,
    /// Number of this life, from 1.
    pub(crate) number: u32,
}

impl Incarnation {
    /// Begins the next life of the server of `directory`; the first one makes its id. When this
    /// returns, it is durable, so that no later life has the same number. Blocks.
    ///
    /// # Errors
    /// What the system says; `InvalidData` when a file is damaged.
    pub(crate) fn begin(directory: &Path) -> io::Result<Self> {
        let _turn = lock_directory(directory)?;
        let server = if let Some(id) = read_number(&directory.join(SERVER_ID_FILE))? {
            id
        } else {
            let id = ServerId::random();
            replace_file(
                &directory.join(SERVER_ID_FILE),
                format!("{id}\n").as_bytes(),
            )?;
            id
        };
        let before: u32 = read_number(&directory.join(COUNTER_FILE))?.unwrap_or(0);
        let number = before
            .checked_add(1)
            .ok_or_else(|| damaged_file_error(COUNTER_FILE, &"no number is left"))?;
        let (path, content) = (directory.join(COUNTER_FILE), format!("{number}\n"));
        match replace_file(&path, content.as_bytes()) {
            // A server whose disk is full must still show what is there.
            Err(error) if is_no_space(&error) && before > 0 => {
                overwrite(&path, content.as_bytes())?
            }
            written => written?,
        }
        Ok(Self { server, number })
    }
}

/// Waits until no other server begins a life in this directory, as several homes may export it.
/// Where no file can be made or locked, as on a full disk, it is as if there were no other.
fn lock_directory(directory: &Path) -> io::Result<Option<File>> {
    let path = directory.join(LOCK_FILE);
    let Ok(file) = File::options().create(true).append(true).open(path) else {
        return Ok(None);
    };
    for _ in 0..LOCK_TRIES {
        match file.try_lock() {
            Ok(()) => return Ok(Some(file)),
            Err(TryLockError::Error(_)) => return Ok(None),
            Err(TryLockError::WouldBlock) => std::thread::sleep(LOCK_PAUSE),
        }
    }
    let text = format!("another process has '{LOCK_FILE}' locked; `fuser` says which: end it");
    Err(io::Error::new(io::ErrorKind::WouldBlock, text))
}

/// Writes over the beginning of a file, durably, which needs no new block but where the file
/// system writes all anew (btrfs, ZFS). A disk writes a sector as a whole, so the few bytes of a
/// number are never mixed.
fn overwrite(path: &Path, content: &[u8]) -> io::Result<()> {
    let file = File::options().write(true).open(path)?;
    file.write_all_at(content, 0)?;
    file.sync_all()
}

/// Names the present life of this machine, from the start of its kernel to the end; `None` when the
/// kernel does not tell.
pub(crate) fn boot_id() -> Option<u64> {
    let id = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits: String = id.chars().filter(char::is_ascii_hexdigit).collect();
    u64::from_str_radix(digits.get(..16)?, 16).ok()
}

/// Replaces a small file as a whole, durably.
pub(crate) fn replace_file(path: &Path, content: &[u8]) -> io::Result<()> {
    let fresh = path.with_extension("new");
    let mut file = File::create(&fresh)?;
    file.write_all(content)?;
    file.sync_all()?;
    fs::rename(&fresh, path)?;
    File::open(path.parent().unwrap_or(path))?.sync_all()
}

fn read_number<T: std::str::FromStr<Err: std::fmt::Display>>(path: &Path) -> io::Result<Option<T>> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    match fs::read_to_string(path) {
        Ok(text) => text
            .trim()
            .parse()
            .map(Some)
            .map_err(|error| damaged_file_error(&name, &error)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn damaged_file_error(name: &str, why: &dyn std::fmt::Display) -> io::Error {
    let text = format!("'{name}' is damaged: {why}; restore it from a copy of this server");
    io::Error::new(io::ErrorKind::InvalidData, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn incarnations_are_numbered_and_share_a_server_id() {
        let directory = tempfile::tempdir().expect("directory");
        let first = Incarnation::begin(directory.path()).expect("first");
        let second = Incarnation::begin(directory.path()).expect("second");
        assert_eq!((first.number, second.number), (1, 2));
        assert_eq!(first.server, second.server);
    }

    #[test]
    fn concurrent_starts_get_distinct_incarnation_numbers() {
        let directory = tempfile::tempdir().expect("directory");
        let begin = || Incarnation::begin(directory.path()).expect("a life");
        let lives: Vec<Incarnation> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..16).map(|_| scope.spawn(begin)).collect();
            let lives = threads.into_iter().map(|thread| thread.join());
            lives.map(|life| life.expect("joined")).collect()
        });
        let mut numbers: Vec<u32> = lives.iter().map(|life| life.number).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, (1..=16).collect::<Vec<_>>());
        assert!(lives.iter().all(|life| life.server == lives[0].server));
    }

    #[test]
    fn begin_fails_while_another_process_holds_the_lock() {
        let directory = tempfile::tempdir().expect("directory");
        let held = lock_directory(directory.path())
            .expect("free")
            .expect("a lock");
        let refused = Incarnation::begin(directory.path()).expect_err("locked");
        assert!(refused.to_string().contains(LOCK_FILE), "{refused}");
        drop(held);
        Incarnation::begin(directory.path()).expect("free again");
    }

    #[test]
    fn a_server_starts_although_the_disk_is_full() {
        let directory = tempfile::tempdir().expect("directory");
        Incarnation::begin(directory.path()).expect("first");
        let fresh = directory.path().join(COUNTER_FILE).with_extension("new");
        let fill = || std::os::unix::fs::symlink("/dev/full", &fresh).expect("link");
        fill();
        let second = Incarnation::begin(directory.path()).expect("second");
        assert_eq!(second.number, 2);
        fs::remove_file(&fresh).expect("remove");
        assert_eq!(
            Incarnation::begin(directory.path()).expect("third").number,
            3
        );
    }

    #[test]
    fn a_damaged_incarnation_file_is_reported() {
        for name in [SERVER_ID_FILE, COUNTER_FILE] {
            let directory = tempfile::tempdir().expect("directory");
            Incarnation::begin(directory.path()).expect("first");
            fs::write(directory.path().join(name), b"\0\0").expect("write");
            let error = Incarnation::begin(directory.path())
                .expect_err("damaged")
                .to_string();
            assert!(error.contains(name), "{error}");
        }
    }
}
