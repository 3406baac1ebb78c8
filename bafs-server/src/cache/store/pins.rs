//! Which paths of a cache volume are pinned: their blocks stay. A file beside the volume's record
//! keeps them; a change replaces it by renaming. Moves no block.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::RwLock;
use std::sync::atomic::{AtomicU64, Ordering};

use bafs_proto::{Error, ErrorCode, Result, codec};

use crate::cache::errors::disk_fault;
use crate::cache::locks::{read_lock, write_lock};
use crate::incarnation::replace_file;

/// Name of the file.
pub(crate) const PINS: &str = "pins";

/// Most paths that are pinned at once.
const PINS_MAX: usize = 1024;

/// The pinned paths of a volume; they outlive its generations and the process.
#[derive(Debug)]
pub(crate) struct Pins {
    file: PathBuf,
    paths: RwLock<BTreeSet<String>>,
    version: AtomicU64,
}

impl Pins {
    /// Those of a volume that is kept in `directory`. An unreadable file counts as no pin, with a
    /// warning: a volume without pins is better than a volume that does not start.
    pub(crate) fn open(directory: &Path) -> Self {
        let file = directory.join(PINS);
        let paths = match std::fs::read(&file) {
            Ok(bytes) => codec::decode::<Vec<String>>(&bytes).unwrap_or_else(|error| {
                tracing::warn!(file = %file.display(), %error, "nothing is pinned any more");
                Vec::new()
            }),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Vec::new(),
            Err(error) => {
                tracing::warn!(file = %file.display(), %error, "nothing is pinned any more");
                Vec::new()
            }
        };
        Self {
            file,
            paths: RwLock::new(paths.into_iter().collect()),
            version: AtomicU64::new(1),
        }
    }

    /// Changes whenever the pins do.
    pub(crate) fn version(&self) -> u64 {
        self.version.load(Ordering::Acquire)
    }

    /// All of them.
    pub(crate) fn paths(&self) -> Vec<String> {
        let paths = read_lock(&self.paths);
        paths.iter().cloned().collect()
    }

    /// Whether a file is pinned.
    pub(crate) fn covers(&self, path: &str) -> bool {
        let paths = read_lock(&self.paths);
        paths.iter().any(|pin| is_below(path, pin))
    }

    /// Pins what is at and below a path (waits for the disk).
    ///
    /// # Errors
    /// `Busy` when there are too many pins, `ServerFault` when the disk fails.
    pub(crate) fn add(&self, path: &str) -> Result<()> {
        self.change(|paths| {
            paths.retain(|pin| !is_below(pin, path));
            if !paths.iter().any(|pin| is_below(path, pin)) {
                paths.insert(path.to_owned());
            }
            if paths.len() > PINS_MAX {
                let text =
                    format!("more than {PINS_MAX} pins; pin a directory instead of its files");
                return Err(Error::new(ErrorCode::Busy, text));
            }
            Ok(())
        })
    }

    /// Removes all pins at and below a path (waits for the disk).
    ///
    /// # Errors
    /// `WrongState` when the path is pinned as a part of another one, `ServerFault` when the disk
    /// fails.
    pub(crate) fn remove(&self, path: &str) -> Result<()> {
        self.change(|paths| {
            paths.retain(|pin| !is_below(pin, path));
            match paths.iter().find(|pin| is_below(path, pin)) {
                Some(pin) => {
                    let text = format!("'{path}' is pinned with all of '{pin}'; unpin that");
                    Err(Error::new(ErrorCode::WrongState, text))
                }
                None => Ok(()),
            }
        })
    }

    fn change(&self, change: impl FnOnce(&mut BTreeSet<String>) -> Result<()>) -> Result<()> {
        let mut paths = write_lock(&self.paths);
        let mut changed = paths.clone();
        change(&mut changed)?;
        if changed == *paths {
            return Ok(());
        }
        let all: Vec<&String> = changed.iter().collect();
        replace_file(&self.file, &codec::encode(&all)?)
            .map_err(|e| disk_fault("write the pins", &self.file, e))?;
        *paths = changed;
        self.version.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }
}

/// Whether `path` is `top` or below it; everything is below the empty path.
pub(crate) fn is_below(path: &str, top: &str) -> bool {
    top.is_empty()
        || path
            .strip_prefix(top)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pins_are_persistent_and_merged() {
        let directory = tempfile::tempdir().expect("directory");
        let pins = Pins::open(directory.path());
        let version = pins.version();
        for path in ["db/a", "db/a", "db/ab", "x"] {
            pins.add(path).expect("pin");
        }
        assert!(pins.version() > version);
        assert!(pins.covers("db/a") && pins.covers("db/a/b") && !pins.covers("db/abc"));
        assert_eq!(Pins::open(directory.path()).paths(), ["db/a", "db/ab", "x"]);
        pins.add("db").expect("pin");
        assert_eq!(pins.paths(), ["db", "x"]);
        let inside = pins.remove("db/a").map_err(|e| e.code);
        assert_eq!(inside, Err(ErrorCode::WrongState));
        pins.remove("").expect("unpin");
        assert_eq!(Pins::open(directory.path()).paths(), [] as [&str; 0]);
        std::fs::write(directory.path().join(PINS), b"garbage").expect("write");
        assert_eq!(Pins::open(directory.path()).paths(), [] as [&str; 0]);
    }
}
