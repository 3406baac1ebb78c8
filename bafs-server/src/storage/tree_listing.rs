//! A volume as a source for replicas: its tree in path order, page by page, and ranges of its
//! files with digests, or small files whole. Reads only; follows no symbolic link out of it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use bafs_proto::ids::VolumeId;
use bafs_proto::limits::{BLOCK_BYTES_DEFAULT, BODY_BYTES_MAX, PAGE_ENTRIES_MAX, PATH_BYTES_MAX};
use bafs_proto::message::{SourceData, SourceEntry, SourceIdentity, SourceKind, SourcePage};
use bafs_proto::path::{check_relative, join, to_bytes};
use bafs_proto::replica::{
    DataRange, FileMap, LinkedEntry, MapVolumeFile, ReadVolumeFile, ReadVolumeFiles, TreePage,
};
use bafs_proto::source_warning::{SourceWarnings, WarningReason};
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use rustix::fs::{SeekFrom, fstat, seek};
use rustix::io::Errno;

use super::base_copy;
use super::confined_directory::{ConfinedDirectory, EntryInfo};
use crate::source::{PAGE_BYTES_MAX, entry_bytes};

/// The digests of [`ReadVolumeFile`] cover pieces of this many bytes.
pub(super) const CHUNK_BYTES: u32 = BLOCK_BYTES_DEFAULT;

/// A directory on the way down: its path and the names in it that are still to come, last first.
struct DirectoryLevel {
    path: String,
    names: Vec<String>,
}

/// A page of the listing of the tree at `root`, after the path `after`. Blocks.
pub(super) fn list_tree(root: &Path, after: Option<&str>) -> Result<TreePage> {
    check_relative(after.unwrap_or_default())?;
    let confined =
        ConfinedDirectory::open(root).map_err(|e| listing_error("the volume's root", &e))?;
    let (mut entries, mut links) = (Vec::new(), Vec::new());
    if after.is_none() {
        let top = confined.find_entry("");
        let top = top.map_err(|e| listing_error("the volume's root", &e))?;
        entries.extend(top.map(|top| top.entry));
    }
    // What was left out since the last entry belongs to the page that has the next one.
    let (mut warnings, mut since) = (SourceWarnings::default(), Vec::new());
    let mut levels = Vec::new();
    descend(&confined, "", after.unwrap_or_default(), &mut levels)?;
    let mut bytes = 0;
    while let Some(level) = levels.last_mut() {
        let Some(name) = level.names.pop() else {
            levels.pop();
            continue;
        };
        if entries.len() >= PAGE_ENTRIES_MAX || bytes >= PAGE_BYTES_MAX {
            return Ok(make_page(entries, warnings, links, true));
        }
        let path = join(&level.path, &name);
        if to_bytes(&path).len() > PATH_BYTES_MAX {
            let text = format!("a path below '{}' is too long to be copied", level.path);
            return Err(Error::new(ErrorCode::BadPath, text));
        }
        let found = match confined.find_entry(&path) {
            // It vanished meanwhile: a volume in use may change under a listing.
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => None,
            found => {
                let found = found.map_err(|e| listing_error(&path, &e))?;
                if found.is_none() {
                    since.push(path.clone());
                }
                found
            }
        };
        let Some(EntryInfo {
            entry,
            file_number: file,
        }) = found
        else {
            continue;
        };
        warn_of_special(&mut warnings, &mut since);
        bytes += entry_bytes(&entry);
        if let Some(file) = file {
            let entry = u32::try_from(entries.len()).unwrap_or(u32::MAX);
            bytes += size_of::<LinkedEntry>();
            links.push(LinkedEntry {
                entry_index: entry,
                file_id: file,
            });
        }
        if entry.kind == SourceKind::Directory {
            let names = confined
                .sorted_names(&path)
                .map_err(|e| listing_error(&path, &e))?;
            levels.push(DirectoryLevel {
                path,
                names: names.into_iter().rev().collect(),
            });
        }
        entries.push(entry);
    }
    warn_of_special(&mut warnings, &mut since);
    Ok(make_page(entries, warnings, links, false))
}

fn warn_of_special(warnings: &mut SourceWarnings, paths: &mut Vec<String>) {
    for path in paths.drain(..) {
        warnings.add(&path, WarningReason::SpecialFile);
    }
}

fn make_page(
    entries: Vec<SourceEntry>,
    warnings: SourceWarnings,
    links: Vec<LinkedEntry>,
    more: bool,
) -> TreePage {
    let page = SourcePage {
        entries,
        warnings,
        has_more: more,
    };
    TreePage { page, links }
}

/// Opens the directories on the way to `after`, with the names in them that come after it. What
/// is inside of `after` comes after it too.
fn descend(
    confined: &ConfinedDirectory,
    path: &str,
    after: &str,
    levels: &mut Vec<DirectoryLevel>,
) -> Result<()> {
    let mut path = path.to_owned();
    let mut components = after.split('/').filter(|component| !component.is_empty());
    loop {
        let names = match confined.sorted_names(&path) {
            Ok(names) => names,
            Err(_) if !path.is_empty() => return Ok(()), // no directory, or gone: nothing inside
            Err(e) => return Err(listing_error("the volume's root", &e)),
        };
        let next = components.next();
        let later = |name: &String| next.is_none_or(|next| name.as_str() > next);
        let names = names.into_iter().rev().filter(later).collect();
        levels.push(DirectoryLevel {
            path: path.clone(),
            names,
        });
        let Some(next) = next else { return Ok(()) };
        path = join(&path, next);
    }
}

/// A range of a file of the tree at `root`. Blocks.
pub(super) fn read_range(root: &Path, call: &ReadVolumeFile) -> Result<(SourceData, Bytes)> {
    if call.length > BODY_BYTES_MAX {
        let text = format!("{} bytes are more than one reply carries", call.length);
        return Err(Error::new(ErrorCode::Malformed, text));
    }
    let confined =
        ConfinedDirectory::open(root).map_err(|e| listing_error("the volume's root", &e))?;
    let listed = ListedContent::open(&confined, call.volume, &call.path, call.identity)?;
    let left = call.identity.size.saturating_sub(call.offset);
    let length = left.min(u64::from(call.length));
    let mut data = vec![0; usize::try_from(length).unwrap_or(0)];
    listed.read(&mut data, call.offset)?;
    let whole = (data.len(), call.known_digests.as_slice());
    let (digests, body) = base_copy::split_unknown(data, [whole].into_iter());
    Ok((SourceData { digests }, body))
}

/// Small files of the tree at `root`, whole, one after the other. Blocks.
pub(super) fn read_files(root: &Path, call: &ReadVolumeFiles) -> Result<(SourceData, Bytes)> {
    let sizes = call.files.iter().map(|file| file.identity.size);
    let length = sizes.fold(0, u64::saturating_add);
    if length > u64::from(BODY_BYTES_MAX) || call.files.len() > PAGE_ENTRIES_MAX {
        let text = format!(
            "{length} bytes of {} files are more than one reply carries",
            call.files.len()
        );
        return Err(Error::new(ErrorCode::Malformed, text));
    }
    let confined =
        ConfinedDirectory::open(root).map_err(|e| listing_error("the volume's root", &e))?;
    let mut data = vec![0; usize::try_from(length).unwrap_or(0)];
    let (mut rest, mut ranges) = (data.as_mut_slice(), Vec::with_capacity(call.files.len()));
    for (number, file) in call.files.iter().enumerate() {
        let size = usize::try_from(file.identity.size).unwrap_or(0);
        let (own, after) = std::mem::take(&mut rest).split_at_mut(size);
        ListedContent::open(&confined, call.volume, &file.path, file.identity)?.read(own, 0)?;
        let known = call
            .known_digests
            .get(number)
            .map_or(&[][..], Vec::as_slice);
        ranges.push((size, known));
        rest = after;
    }
    let (digests, body) = base_copy::split_unknown(data, ranges.into_iter());
    Ok((SourceData { digests }, body))
}

/// Where a file of the tree at `root` has data. Blocks.
pub(super) fn map_file(root: &Path, call: &MapVolumeFile) -> Result<FileMap> {
    let size = call.file.identity.size;
    let confined =
        ConfinedDirectory::open(root).map_err(|e| listing_error("the volume's root", &e))?;
    let listed = ListedContent::open(&confined, call.volume, &call.file.path, call.file.identity)?;
    let (mut ranges, mut at) = (Vec::new(), call.start_offset);
    while at < size && ranges.len() < PAGE_ENTRIES_MAX {
        let Some(start) = listed.seek(SeekFrom::Data(at))? else {
            at = size;
            break;
        };
        // There is always a hole at the end, which may have moved.
        let end = listed
            .seek(SeekFrom::Hole(start))?
            .unwrap_or(size)
            .min(size);
        at = end.max(at + 1);
        if start < end {
            ranges.push(DataRange {
                offset: start,
                length: end - start,
            });
        }
    }
    listed.check_unchanged()?;
    let next = (at < size).then_some(at);
    Ok(FileMap { ranges, next })
}

/// A file that must be what a listing showed.
struct ListedContent<'a> {
    file: File,
    volume: VolumeId,
    path: &'a str,
    identity: SourceIdentity,
}

impl<'a> ListedContent<'a> {
    fn open(
        confined: &ConfinedDirectory,
        volume: VolumeId,
        path: &'a str,
        expected: SourceIdentity,
    ) -> Result<Self> {
        check_relative(path)?;
        let file = confined.open_file(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => {
                let text = format!("volume {volume} has no file '{path}'");
                Error::new(ErrorCode::NotFound, text)
            }
            _ => listing_error(path, &e),
        })?;
        let listed = Self {
            file,
            volume,
            path,
            identity: expected,
        };
        listed.check_unchanged()?;
        Ok(listed)
    }

    fn check_unchanged(&self) -> Result<()> {
        let stat = fstat(&self.file).map_err(|e| listing_error(self.path, &e.into()))?;
        let mut now = crate::source::source_identity(&stat);
        if stat.st_mode & 0o400 == 0 {
            // To open it, its bits may have been changed for a moment, and that time with them.
            now.ctime_ns = self.identity.ctime_ns;
        }
        if now == self.identity {
            return Ok(());
        }
        let text = format!("'{}' of volume {} has changed", self.path, self.volume);
        Err(Error::new(ErrorCode::SourceChanged, text))
    }

    /// Reads so much that is of the file as it was shown.
    fn read(&self, data: &mut [u8], offset: u64) -> Result<()> {
        let read = self.file.read_exact_at(data, offset);
        read.map_err(|e| listing_error(self.path, &e))?;
        self.check_unchanged()
    }

    /// The next data or hole; `None` when there is none any more.
    fn seek(&self, to: SeekFrom) -> Result<Option<u64>> {
        match seek(&self.file, to) {
            Ok(at) => Ok(Some(at)),
            Err(Errno::NXIO) => Ok(None),
            Err(e) => Err(listing_error(self.path, &e.into())),
        }
    }
}

fn listing_error(what: &str, error: &std::io::Error) -> Error {
    let code = match error.kind() {
        std::io::ErrorKind::InvalidInput | std::io::ErrorKind::InvalidData => ErrorCode::BadPath,
        _ if error.raw_os_error() == Some(Errno::XDEV.raw_os_error()) => ErrorCode::BadPath,
        _ => ErrorCode::ServerFault,
    };
    Error::new(code, format!("{what}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use bafs_proto::hash::Digest;
    use std::fs;

    fn tree() -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("directory");
        for directory in ["a", "a/b", "a-b", "empty"] {
            fs::create_dir(root.path().join(directory)).expect("directory");
        }
        for file in ["a/b/1", "a/c", "a-b/x", "b", "a.b"] {
            fs::write(root.path().join(file), file).expect("write");
        }
        std::os::unix::fs::symlink("/etc/passwd", root.path().join("out")).expect("link");
        root
    }

    const ORDER: [&str; 11] = [
        "", "a", "a/b", "a/b/1", "a/c", "a-b", "a-b/x", "a.b", "b", "empty", "out",
    ];

    #[test]
    fn listings_are_in_component_order_and_resumable() {
        let root = tree();
        let paths = |after: Option<&str>| -> Vec<String> {
            let TreePage { page, .. } = list_tree(root.path(), after).expect("list");
            assert!(!page.has_more);
            page.entries.into_iter().map(|entry| entry.path).collect()
        };
        assert_eq!(paths(None), ORDER);
        for (at, after) in ORDER.iter().enumerate() {
            assert_eq!(paths(Some(after)), ORDER[at + 1..], "after '{after}'");
        }
        assert_eq!(
            paths(Some("a/bb")),
            ORDER[4..],
            "a name that is not there (any more)"
        );
        assert!(list_tree(root.path(), Some("../x")).is_err());
    }

    #[test]
    fn long_listings_come_in_pages() {
        let root = tempfile::tempdir().expect("directory");
        let name = |number: usize| root.path().join(format!("{number:05}"));
        for number in 0..PAGE_ENTRIES_MAX + 10 {
            fs::write(name(number), b"").expect("write");
        }
        let last = PAGE_ENTRIES_MAX + 9;
        fs::remove_file(name(last)).expect("remove");
        fs::hard_link(name(7), name(last)).expect("link");
        let first = list_tree(root.path(), None).expect("list");
        let entries = &first.page.entries;
        assert!(first.page.has_more && entries.len() == PAGE_ENTRIES_MAX);
        let after = entries.last().map(|entry| entry.path.clone());
        let second = list_tree(root.path(), after.as_deref()).expect("list");
        assert!(!second.page.has_more);
        let count = second.page.entries.len();
        assert_eq!(entries.len() + count, PAGE_ENTRIES_MAX + 11);
        // The root comes before them; both pages say which file it is.
        let file = first.file_id_at(8);
        assert!(file.is_some() && file == second.file_id_at(count - 1));
        assert_eq!((first.links.len(), second.links.len()), (1, 1));
    }

    #[test]
    fn special_files_are_reported_once() {
        let root = tree();
        for name in ["a/fifo", "zfifo"] {
            let mode = rustix::fs::Mode::RUSR;
            let (path, kind) = (root.path().join(name), rustix::fs::FileType::Fifo);
            rustix::fs::mknodat(rustix::fs::CWD, path, kind, mode, 0).expect("mknod");
        }
        let told = |after| list_tree(root.path(), after).expect("list").page.warnings;
        let paths = |warnings: SourceWarnings| -> Vec<String> {
            warnings
                .warnings
                .into_iter()
                .map(|told| told.path)
                .collect()
        };
        assert_eq!(paths(told(None)), ["a/fifo", "zfifo"]);
        assert_eq!(paths(told(Some("a-b"))), ["zfifo"]);
    }

    #[test]
    fn reads_carry_digests_and_detect_changed_sources() {
        let root = tree();
        let content: Vec<u8> = (0..200_000u32).map(|i| (i % 251) as u8).collect();
        fs::write(root.path().join("big"), &content).expect("write");
        let file = File::open(root.path().join("big")).expect("open");
        let identity = crate::source::file_identity(&file).expect("identity");
        let call = |offset, length| ReadVolumeFile {
            volume: VolumeId(1),
            path: "big".to_owned(),
            identity,
            offset,
            length,
            known_digests: Vec::new(),
        };
        let (data, body) = read_range(root.path(), &call(100, 150_000)).expect("read");
        assert_eq!(body, content[100..150_100]);
        let pieces: Vec<_> = body.chunks(CHUNK_BYTES as usize).map(Digest::of).collect();
        assert_eq!(data.digests, pieces);
        assert_eq!(
            read_range(root.path(), &call(199_999, 9))
                .expect("read")
                .1
                .len(),
            1
        );
        assert!(
            read_range(root.path(), &call(u64::MAX, 9))
                .expect("read")
                .1
                .is_empty()
        );
        let code = |result: Result<(SourceData, Bytes)>| result.expect_err("refused").code;
        let other = ReadVolumeFile {
            path: "a/c".to_owned(),
            ..call(0, 1)
        };
        assert_eq!(
            code(read_range(root.path(), &other)),
            ErrorCode::SourceChanged
        );
        let missing = ReadVolumeFile {
            path: "no".to_owned(),
            ..call(0, 1)
        };
        assert_eq!(code(read_range(root.path(), &missing)), ErrorCode::NotFound);
        for path in ["out", "a", "../x"] {
            let outside = ReadVolumeFile {
                path: path.to_owned(),
                ..call(0, 1)
            };
            assert_eq!(
                code(read_range(root.path(), &outside)),
                ErrorCode::BadPath,
                "{path}"
            );
        }
        assert_eq!(
            code(read_range(root.path(), &call(0, u32::MAX))),
            ErrorCode::Malformed
        );
    }
}
