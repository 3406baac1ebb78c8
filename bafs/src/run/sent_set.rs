//! Whether a set of results is at home as it was sent: its manifest, and each file that it names.

use bafs_proto::file_set::{MANIFEST_NAME, SetManifest};
use bafs_proto::source::{SourceEntry, SourceIdentity, SourceKind};
use bafs_sched::earlier_work::FoundResult;

/// Bytes of a manifest that are read: that of a set with as many files as one may have.
pub(super) const MANIFEST_BYTES_MAX: u64 = 64 << 20;

/// What is found of a set, when these entries are below its directory and its manifest has these
/// bytes. The manifest is written last, so what changed after it was changed by others.
pub(super) fn find_set(
    entries: &[SourceEntry],
    manifest: SourceIdentity,
    bytes: &[u8],
) -> FoundResult {
    let Ok(told) = serde_json::from_slice::<SetManifest>(bytes) else {
        return FoundResult::SetChanged(MANIFEST_NAME.to_owned());
    };
    let find = |path: &str| {
        let position = entries.binary_search_by(|entry| order(&entry.path).cmp(order(path)));
        position.ok().map(|at| &entries[at])
    };
    let is_as_sent = |entry: &SourceEntry, bytes: u64| {
        let is_told = entry.identity.ctime_ns != 0 && manifest.ctime_ns != 0;
        entry.kind == SourceKind::File
            && entry.identity.size == bytes
            && (!is_told || entry.identity.ctime_ns <= manifest.ctime_ns)
    };
    let mut files = told.files.iter();
    let changed = files.find(|file| {
        let found = find(&file.path);
        !found.is_some_and(|entry| is_as_sent(entry, file.bytes))
    });
    match changed {
        Some(file) => FoundResult::SetChanged(file.path.clone()),
        None => FoundResult::Present(manifest),
    }
}

/// Paths are in the order of their components.
fn order(path: &str) -> std::str::Split<'_, char> {
    path.split('/')
}

/// The manifest among the entries below a set's directory.
pub(super) fn find_manifest(entries: &[SourceEntry]) -> Option<SourceIdentity> {
    let mut entries = entries.iter();
    let found = entries.find(|entry| entry.path == MANIFEST_NAME)?;
    (found.kind == SourceKind::File).then_some(found.identity)
}

#[cfg(test)]
mod tests {
    use bafs_proto::file_set::{MANIFEST_VERSION, ManifestFile};

    use super::*;

    fn identity(size: u64, ctime_ns: i64) -> SourceIdentity {
        SourceIdentity {
            size,
            mtime_ns: 1,
            ctime_ns,
        }
    }

    fn entry(path: &str, size: u64, ctime_ns: i64) -> SourceEntry {
        SourceEntry {
            path: path.to_owned(),
            kind: SourceKind::File,
            identity: identity(size, ctime_ns),
            mode: 0o644,
        }
    }

    /// The file of a set of three that is not as it was sent, if one is not.
    fn changed(entries: &[SourceEntry]) -> Option<String> {
        let file = |path: &str, bytes| ManifestFile {
            path: path.to_owned(),
            bytes,
            blake3: String::new(),
        };
        let manifest = SetManifest {
            version: MANIFEST_VERSION,
            complete: true,
            extraction: String::new(),
            bytes: 6,
            files: vec![file("a", 1), file("d/b", 2), file("d.x", 3)],
        };
        let bytes = serde_json::to_vec(&manifest).expect("it is JSON");
        match find_set(entries, identity(9, 50), &bytes) {
            FoundResult::Present(found) => {
                assert_eq!(found, identity(9, 50));
                None
            }
            FoundResult::SetChanged(path) => Some(path),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn set_is_compared_file_by_file() {
        let sent = [entry("a", 1, 10), entry("d/b", 2, 11), entry("d.x", 3, 50)];
        assert_eq!(changed(&sent), None);
        assert_eq!(changed(&sent[..2]), Some("d.x".to_owned()));
        let with = |at: usize, entry: SourceEntry| {
            let mut entries = sent.clone();
            entries[at] = entry;
            changed(&entries)
        };
        assert_eq!(with(1, entry("d/b", 3, 11)), Some("d/b".to_owned()));
        // Of the same size, and written after the manifest.
        assert_eq!(with(0, entry("a", 1, 51)), Some("a".to_owned()));
        // The home tells no such time.
        assert_eq!(with(0, entry("a", 1, 0)), None);
    }
}
