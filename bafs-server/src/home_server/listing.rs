//! Lists what is below a home path, in path order, page by page, and tells what it leaves out.
//! Follows no link on the way.

use std::cmp::Ordering;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bafs_proto::limits::{PAGE_ENTRIES_MAX, PATH_BYTES_MAX};
use bafs_proto::message::{SourceEntry, SourceKind, SourcePage};
use bafs_proto::path::{check_relative, from_bytes, join, to_bytes};
use bafs_proto::source_warning::{SourceWarnings, WarningReason};
use bafs_proto::{Error, ErrorCode, Result};
use rustix::fs::{AtFlags, Dir, FileType, fstat, readlinkat, statat};
use rustix::io::Errno;

use super::export::{Export, ExportEntry, file_type, system_error};
use crate::source::{OpenedDirectory, PAGE_BYTES_MAX, entry_bytes, open_directory, source_entry};

struct PageBuilder<'a> {
    export: &'a Export,
    entries: Vec<SourceEntry>,
    bytes: usize,
    /// Of what comes before the last entry.
    warnings: SourceWarnings,
    /// Of what comes after it: they belong to the page that has the next one.
    pending_warnings: Vec<(String, WarningReason)>,
}

/// A page of the listing of `top`, after the entry `after`; and its size in bytes, about.
///
/// # Errors
/// `NotFound`, `BadPath`; an error, never a gap, when the disk does not give what is there, or the
/// top may not be read.
pub(crate) fn list(
    export: &Export,
    top: &ExportEntry,
    after: Option<&str>,
) -> Result<(SourcePage, usize)> {
    let mut page = PageBuilder {
        export,
        entries: Vec::new(),
        bytes: 0,
        warnings: SourceWarnings::default(),
        pending_warnings: Vec::new(),
    };
    if after.is_none() {
        let this = source_entry("", &top.stat, || Err(Errno::INVAL))
            .map_err(|e| system_error(&top.path, e))?;
        let this = this.ok_or_else(|| {
            let text = format!("'{}' is neither a file nor a directory", top.path);
            Error::new(ErrorCode::WrongState, text)
        })?;
        page.add(this);
    }
    let mut more = false;
    if file_type(&top.stat) == FileType::Directory {
        let after = after.unwrap_or("");
        check_relative(after)?;
        let after: Vec<_> = after.split('/').filter(|name| !name.is_empty()).collect();
        more = page.walk(top.open_directory()?.as_fd(), "", &after)?;
    }
    if !more {
        page.emit_warnings();
    }
    let bytes = page.bytes;
    Ok((
        SourcePage {
            entries: page.entries,
            warnings: page.warnings,
            has_more: more,
        },
        bytes,
    ))
}

/// One name of a directory.
enum DirectoryItem {
    Entry(SourceEntry),
    /// As an entry, and opened.
    Directory(SourceEntry, OwnedFd),
    Skipped(WarningReason),
    /// It went since it was listed.
    Vanished,
}

impl PageBuilder<'_> {
    fn add(&mut self, entry: SourceEntry) {
        self.emit_warnings();
        if entry.kind == SourceKind::UnreadableDirectory {
            self.warnings
                .add(&entry.path, WarningReason::UnreadableDirectory);
        }
        self.bytes += entry_bytes(&entry);
        self.entries.push(entry);
    }

    /// Adds what is in a directory and below, after the components `after`; says whether the page
    /// was full before the end.
    fn walk(&mut self, directory: BorrowedFd<'_>, prefix: &str, after: &[&str]) -> Result<bool> {
        for name in self.sorted_names(directory, prefix)? {
            let mut below: &[&str] = &[];
            let mut is_new = true;
            if let Some((first, rest)) = after.split_first() {
                match name.as_str().cmp(first) {
                    Ordering::Less => continue,
                    Ordering::Equal => (below, is_new) = (rest, false),
                    Ordering::Greater => {}
                }
            }
            let path = join(prefix, &name);
            if to_bytes(&path).len() > PATH_BYTES_MAX {
                self.skip_entry(is_new, path, WarningReason::PathTooLong);
                continue;
            }
            let (found, inside) = match describe(directory, &name, &path)? {
                DirectoryItem::Entry(found) => (found, None),
                DirectoryItem::Directory(found, inside) => (found, Some(inside)),
                DirectoryItem::Skipped(reason) => {
                    self.skip_entry(is_new, path, reason);
                    continue;
                }
                DirectoryItem::Vanished => continue,
            };
            if is_new {
                let full = self.entries.len() >= PAGE_ENTRIES_MAX
                    || self.bytes + entry_bytes(&found) > PAGE_BYTES_MAX;
                if full {
                    return Ok(true);
                }
                self.add(found);
            }
            if let Some(inside) = inside
                && self.walk(inside.as_fd(), &path, below)?
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn skip_entry(&mut self, is_new: bool, path: String, reason: WarningReason) {
        if is_new {
            self.pending_warnings.push((path, reason));
        }
    }

    /// Warns of what was left out since the last entry.
    fn emit_warnings(&mut self) {
        for (path, reason) in std::mem::take(&mut self.pending_warnings) {
            self.warnings.add(&path, reason);
        }
    }

    /// The names in a directory, as texts, in order.
    fn sorted_names(&self, directory: BorrowedFd<'_>, path: &str) -> Result<Vec<String>> {
        let fail = |error| system_error(path, error);
        let stat = fstat(directory).map_err(fail)?;
        let mut names = Vec::new();
        for found in Dir::read_from(directory).map_err(fail)? {
            let name = from_bytes(found.map_err(fail)?.file_name().to_bytes());
            if name != "." && name != ".." && !self.export.is_own_name(&stat, &name) {
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    }
}

/// What a name in a directory is.
fn describe(directory: BorrowedFd<'_>, name: &str, path: &str) -> Result<DirectoryItem> {
    loop {
        match describe_once(directory, &to_bytes(name), path) {
            Ok(found) => return Ok(found),
            // It went since the directory was listed.
            Err(Errno::NOENT | Errno::INVAL) => return Ok(DirectoryItem::Vanished),
            // A directory became something else just now.
            Err(Errno::NOTDIR | Errno::LOOP) => {}
            Err(error) => return Err(system_error(path, error)),
        }
    }
}

fn describe_once(
    directory: BorrowedFd<'_>,
    name: &[u8],
    path: &str,
) -> rustix::io::Result<DirectoryItem> {
    let stat = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
    let target = || Ok(readlinkat(directory, name, Vec::new())?.into_bytes());
    let Some(found) = source_entry(path, &stat, target)? else {
        return Ok(DirectoryItem::Skipped(WarningReason::SpecialFile));
    };
    if found.kind != SourceKind::Directory {
        return Ok(DirectoryItem::Entry(found));
    }
    Ok(match open_directory(directory, name)? {
        OpenedDirectory::Readable(inside) => DirectoryItem::Directory(found, inside),
        OpenedDirectory::Unreadable => DirectoryItem::Entry(SourceEntry {
            kind: SourceKind::UnreadableDirectory,
            ..found
        }),
    })
}
