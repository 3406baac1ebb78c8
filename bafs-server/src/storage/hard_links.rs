//! Files of a source that have several names: each is copied once, and gets its other names when
//! all files are there. Reads nothing.

use std::collections::BTreeMap;

use bafs_proto::message::{SourceEntry, SourceIdentity};
use bafs_proto::path::check_relative;
use bafs_proto::{Error, ErrorCode, Result};

use super::confined_directory::ConfinedDirectory;
use super::volume_errors::fill_disk_error;

/// Most memory for the names in one volume, in bytes: some two million usual ones. No limit of a
/// volume counts further names.
const NAMES_BYTES_MAX: usize = 256 << 20;

/// What a name takes besides its letters.
const NAME_BYTES: usize = 64;

/// The names of such files. No more than the volume may hold files are copied.
#[derive(Debug, Default)]
pub(super) struct HardLinks {
    /// By their numbers at the source.
    first_names: BTreeMap<u64, FirstName>,
    /// Further names, with the numbers of their files.
    further_names: Vec<(String, u64)>,
    /// What all of this takes in memory.
    bytes: usize,
}

/// The name under which a file is copied, and what it must be under its other names too.
#[derive(Debug)]
struct FirstName {
    path: String,
    identity: SourceIdentity,
    mode: u32,
}

impl HardLinks {
    /// Whether an entry is the first name of its file, and must be copied.
    ///
    /// # Errors
    /// `SourceChanged` when the file was another one under its first name; `BadPath`.
    pub(super) fn is_first(&mut self, entry: &SourceEntry, file: u64) -> Result<bool> {
        check_relative(&entry.path)?;
        self.bytes += entry.path.len() + NAME_BYTES;
        if self.bytes > NAMES_BYTES_MAX {
            let text = format!(
                "the names of files that have several take more than {} MiB of memory; fill \
                 several volumes, each with a part of the source",
                NAMES_BYTES_MAX >> 20
            );
            return Err(Error::new(ErrorCode::TooLarge, text));
        }
        let Some(copied) = self.first_names.get(&file) else {
            let copied = FirstName {
                path: entry.path.clone(),
                identity: entry.identity,
                mode: entry.mode,
            };
            self.first_names.insert(file, copied);
            return Ok(true);
        };
        if (copied.identity, copied.mode) != (entry.identity, entry.mode) {
            let text = format!(
                "'{}' and '{}' are one file, which changed while the volume was listed; copy it \
                 when its writer ended",
                copied.path, entry.path
            );
            return Err(Error::new(ErrorCode::SourceChanged, text));
        }
        self.further_names.push((entry.path.clone(), file));
        Ok(false)
    }

    /// Gives the files, which are all made, their other names. Blocks.
    pub(super) fn make_links(&self, root: &ConfinedDirectory) -> Result<()> {
        for (path, file) in &self.further_names {
            let made = root.hard_link(&self.first_names[file].path, path);
            made.map_err(|e| fill_disk_error(path, &e))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use bafs_proto::message::SourceKind;

    fn entry(path: &str, size: u64) -> SourceEntry {
        SourceEntry {
            path: path.to_owned(),
            kind: SourceKind::File,
            identity: SourceIdentity {
                size,
                mtime_ns: 1,
                ctime_ns: 2,
            },
            mode: 0o644,
        }
    }

    #[test]
    fn a_hard_linked_file_is_copied_once() {
        let directory = tempfile::tempdir().expect("directory");
        let root = ConfinedDirectory::open(directory.path()).expect("root");
        let mut links = HardLinks::default();
        assert_eq!(links.is_first(&entry("a", 5), 70), Ok(true));
        assert_eq!(links.is_first(&entry("b", 6), 71), Ok(true));
        assert_eq!(links.is_first(&entry("c", 5), 70), Ok(false));
        std::fs::write(directory.path().join("a"), "aaaaa").expect("write");
        links.make_links(&root).expect("make");
        let read = std::fs::read(directory.path().join("c"));
        assert_eq!(read.expect("read"), b"aaaaa");
    }

    #[test]
    fn the_link_table_is_bounded_by_name_length() {
        let mut links = HardLinks::default();
        let path = |number: usize| format!("{}/{number}", "x".repeat(200 - NAME_BYTES - 2));
        assert_eq!(links.is_first(&entry(&path(0), 5), 70), Ok(true));
        assert_eq!(links.bytes, 200);
        // Room for one name more.
        links.bytes = NAMES_BYTES_MAX - 200;
        assert_eq!(links.is_first(&entry(&path(1), 5), 70), Ok(false));
        let refused = links.is_first(&entry(&path(2), 5), 70);
        let refused = refused.expect_err("no room is left");
        assert_eq!(refused.code, ErrorCode::TooLarge);
        assert!(refused.detail.contains("several volumes"), "{refused}");
    }

    #[test]
    fn contradictory_link_claims_are_refused() {
        let mut links = HardLinks::default();
        assert_eq!(links.is_first(&entry("a", 5), 70), Ok(true));
        let code = |made: Result<bool>| made.expect_err("refused").code;
        let other = links.is_first(&entry("b", 6), 70);
        assert_eq!(code(other), ErrorCode::SourceChanged);
        let outside = links.is_first(&entry("../a", 5), 70);
        assert_eq!(code(outside), ErrorCode::BadPath);
        // Names of what was never made, or twice the same name, fail and harm nothing.
        let directory = tempfile::tempdir().expect("directory");
        let root = ConfinedDirectory::open(directory.path()).expect("root");
        assert_eq!(links.is_first(&entry("b", 5), 70), Ok(false));
        assert_eq!(
            links.make_links(&root).expect_err("no file").code,
            ErrorCode::ServerFault
        );
    }
}
