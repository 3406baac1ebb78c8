//! Listings of homes that do not make them as ours do: adds the directories that are only names,
//! puts everything in path order, refuses what is no tree. Asks nobody.

use std::collections::BTreeMap;

use bafs_proto::hash::Digest;
use bafs_proto::limits::{MANIFEST_ENTRIES_MAX, PATH_BYTES_MAX};
use bafs_proto::message::{SourceEntry, SourceIdentity, SourceKind, SourcePage};
use bafs_proto::path::{check_relative, to_bytes};
use bafs_proto::source_warning::{SourceWarnings, WarningReason};
use bafs_proto::{Error, ErrorCode, Result};

/// Permission bits where a home knows none. Its files may be programs, and none is set-user-id.
pub(super) const FILE_MODE: u32 = 0o755;
pub(super) const DIRECTORY_MODE: u32 = 0o755;

/// A file as a home without permissions shows it; the empty path is what was asked for itself.
pub(super) fn file_entry(path: &str, identity: SourceIdentity) -> SourceEntry {
    SourceEntry {
        path: path.to_owned(),
        kind: SourceKind::File,
        identity,
        mode: FILE_MODE,
    }
}

/// A directory as a home shows it that knows nothing but its name.
pub(super) fn directory_entry(path: &str) -> SourceEntry {
    SourceEntry {
        path: path.to_owned(),
        kind: SourceKind::Directory,
        identity: SourceIdentity {
            size: 0,
            mtime_ns: 0,
            ctime_ns: 0,
        },
        mode: DIRECTORY_MODE,
    }
}

/// Entries in any order as the only page of a listing, with what was left out of them. Paths that
/// are too long are left out as well.
///
/// # Errors
/// `BadPath` when a name cannot be that of a file here, `Malformed` when a file has others below
/// it or there are too many: an error, never a gap.
pub(super) fn make_page(
    entries: Vec<SourceEntry>,
    mut warnings: SourceWarnings,
) -> Result<SourcePage> {
    let mut tree: BTreeMap<Vec<String>, SourceEntry> = BTreeMap::new();
    let parts = |path: &str| -> Vec<String> {
        let parts = path.split('/').filter(|part| !part.is_empty());
        parts.map(str::to_owned).collect()
    };
    for entry in entries {
        if to_bytes(&entry.path).len() > PATH_BYTES_MAX {
            warnings.add(&entry.path, WarningReason::PathTooLong);
            continue;
        }
        check_relative(&entry.path)?;
        let place = parts(&entry.path);
        let is_other = |known: &SourceEntry| known.kind != entry.kind;
        if tree.get(&place).is_some_and(is_other) {
            return Err(not_a_tree_error(
                &entry.path,
                "is both a file and a directory",
            ));
        }
        for depth in (0..place.len()).rev() {
            let above = tree.entry(place[..depth].to_vec());
            let above = above.or_insert_with(|| directory_entry(&place[..depth].join("/")));
            if above.kind != SourceKind::Directory {
                return Err(not_a_tree_error(
                    &above.path,
                    "is a file, but other files are below it",
                ));
            }
        }
        tree.insert(place, entry);
        if tree.len() > MANIFEST_ENTRIES_MAX {
            return Err(not_a_tree_error(
                "",
                "has more files than a volume may have",
            ));
        }
    }
    Ok(SourcePage {
        entries: tree.into_values().collect(),
        warnings,
        has_more: false,
    })
}

/// What is in a directory of a listing; `None` where the home may not read it, which is noted. The
/// top must be readable.
///
/// # Errors
/// Any other.
pub(super) fn note_unreadable<T>(
    inside: Result<T>,
    directory: &mut SourceEntry,
    warnings: &mut SourceWarnings,
) -> Result<Option<T>> {
    match inside {
        Err(error) if error.code == ErrorCode::RightMissing && !directory.path.is_empty() => {
            directory.kind = SourceKind::UnreadableDirectory;
            warnings.add(&directory.path, WarningReason::UnreadableDirectory);
            Ok(None)
        }
        inside => inside.map(Some),
    }
}

/// Digests of the pieces of a range.
pub(super) fn chunk_digests(data: &[u8], block_bytes: u32) -> Vec<Digest> {
    data.chunks(block_bytes as usize).map(Digest::of).collect()
}

/// How a home says that a file is another one now.
pub(super) fn changed_error(path: &str, why: &str) -> Error {
    let text = format!("'{path}' changed: {why}");
    Error::new(ErrorCode::SourceChanged, text)
}

fn not_a_tree_error(path: &str, why: &str) -> Error {
    let text = format!("cannot map the home to files: '{path}' {why}");
    Error::new(ErrorCode::Malformed, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(path: &str) -> SourceEntry {
        let identity = SourceIdentity {
            size: 1,
            mtime_ns: 2,
            ctime_ns: 0,
        };
        file_entry(path, identity)
    }

    fn only(entries: Vec<SourceEntry>) -> Result<SourcePage> {
        make_page(entries, SourceWarnings::default())
    }

    #[test]
    fn long_paths_are_skipped_with_a_warning() {
        let long = ["x"; 2_500].join("/");
        let page = only(vec![named("a"), named(&long)]).expect("a tree");
        let paths: Vec<_> = page.entries.iter().map(|e| e.path.as_str()).collect();
        assert_eq!(paths, ["", "a"]);
        let [warning] = &page.warnings.warnings[..] else {
            panic!("{:?}", page.warnings);
        };
        assert_eq!(warning.reason, WarningReason::PathTooLong);
    }

    #[test]
    fn a_listing_adds_parent_directories_in_path_order() {
        let page = only(vec![named("a/c"), named("a.b"), named("a/b/d")]).expect("a tree");
        let paths: Vec<_> = page.entries.iter().map(|e| e.path.as_str()).collect();
        assert_eq!(paths, ["", "a", "a/b", "a/b/d", "a/c", "a.b"]);
        assert!(!page.has_more);
    }

    #[test]
    fn inconsistent_listings_are_refused() {
        for (entries, code) in [
            (vec![named("a"), named("a/b")], ErrorCode::Malformed),
            (vec![named("a/b"), named("a")], ErrorCode::Malformed),
            (vec![named("a//b")], ErrorCode::BadPath),
            (vec![named("../b")], ErrorCode::BadPath),
        ] {
            assert_eq!(only(entries).expect_err("no tree").code, code);
        }
    }

    #[test]
    fn a_single_file_is_listed_as_itself() {
        let page = only(vec![named("")]).expect("a file");
        assert_eq!(page.entries, [named("")]);
    }
}
