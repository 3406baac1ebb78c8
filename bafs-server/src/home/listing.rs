//! Lists what is below a home path, in path order, page by page. Follows no link on the way.

use std::cmp::Ordering;
use std::os::fd::{AsFd, BorrowedFd};

use bafs_proto::limits::{PAGE_ENTRIES_MAX, PATH_BYTES_MAX};
use bafs_proto::message::{SourceEntry, SourceKind, SourcePage};
use bafs_proto::path::check_relative;
use bafs_proto::{Error, ErrorCode, Result};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, fstat, openat, readlinkat, statat};
use rustix::io::Errno;

use super::export::{Export, Found, kind, refuse};
use crate::source::{PAGE_BYTES_MAX, entry, entry_bytes};

struct Page<'a> {
    export: &'a Export,
    entries: Vec<SourceEntry>,
    bytes: usize,
}

/// A page of the listing of `top`, after the entry `after`; and its size in bytes, about.
///
/// # Errors
/// `NotFound`, `BadPath`; an error, never a gap, when a directory cannot be read.
pub(crate) fn list(
    export: &Export,
    top: &Found,
    after: Option<&str>,
) -> Result<(SourcePage, usize)> {
    let mut page = Page {
        export,
        entries: Vec::new(),
        bytes: 0,
    };
    if after.is_none() {
        let this = entry("", &top.stat, || Err(Errno::INVAL)).map_err(|e| refuse(&top.path, e))?;
        let this = this.ok_or_else(|| {
            let text = format!("'{}' is neither a file nor a directory", top.path);
            Error::new(ErrorCode::WrongState, text)
        })?;
        page.add(this);
    }
    let mut more = false;
    if kind(&top.stat) == FileType::Directory {
        let after = after.unwrap_or("");
        check_relative(after)?;
        let after: Vec<_> = after.split('/').filter(|name| !name.is_empty()).collect();
        more = page.walk(top.open_directory()?.as_fd(), "", &after)?;
    }
    let bytes = page.bytes;
    Ok((
        SourcePage {
            entries: page.entries,
            more,
        },
        bytes,
    ))
}

impl Page<'_> {
    fn add(&mut self, entry: SourceEntry) {
        self.bytes += entry_bytes(&entry);
        self.entries.push(entry);
    }

    /// Adds what is in a directory and below, after the components `after`; says whether the page
    /// was full before the end.
    fn walk(&mut self, directory: BorrowedFd<'_>, prefix: &str, after: &[&str]) -> Result<bool> {
        for name in self.names(directory, prefix)? {
            let mut below: &[&str] = &[];
            let mut is_new = true;
            if let Some((first, rest)) = after.split_first() {
                match name.as_str().cmp(first) {
                    Ordering::Less => continue,
                    Ordering::Equal => (below, is_new) = (rest, false),
                    Ordering::Greater => {}
                }
            }
            let path = if prefix.is_empty() {
                name.clone()
            } else {
                format!("{prefix}/{name}")
            };
            if path.len() > PATH_BYTES_MAX {
                continue;
            }
            let Some(found) = describe(directory, &name, &path)? else {
                continue;
            };
            let descends = found.kind == SourceKind::Directory;
            if is_new {
                let full = self.entries.len() >= PAGE_ENTRIES_MAX
                    || self.bytes + entry_bytes(&found) > PAGE_BYTES_MAX;
                if full {
                    return Ok(true);
                }
                self.add(found);
            }
            if descends && self.descend(directory, &name, &path, below)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn descend(
        &mut self,
        parent: BorrowedFd<'_>,
        name: &str,
        path: &str,
        after: &[&str],
    ) -> Result<bool> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match openat(parent, name, flags, Mode::empty()) {
            Ok(fd) => self.walk(fd.as_fd(), path, after),
            // It went, or became something else, since it was looked at.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(false),
            Err(error) => Err(refuse(path, error)),
        }
    }

    /// The names in a directory, in order. A name that is no text cannot travel and is left out.
    fn names(&self, directory: BorrowedFd<'_>, path: &str) -> Result<Vec<String>> {
        let fail = |error| refuse(path, error);
        let stat = fstat(directory).map_err(fail)?;
        let mut names = Vec::new();
        for found in Dir::read_from(directory).map_err(fail)? {
            let found = found.map_err(fail)?;
            match found.file_name().to_str() {
                Ok("." | "..") => {}
                Ok(name) if self.export.is_own_name(&stat, name) => {}
                Ok(name) => names.push(name.to_owned()),
                Err(_) => tracing::warn!(path, "a name that is not UTF-8 is left out of a listing"),
            }
        }
        names.sort_unstable();
        Ok(names)
    }
}

/// One name as an entry; `None` when it is gone or has no content.
fn describe(directory: BorrowedFd<'_>, name: &str, path: &str) -> Result<Option<SourceEntry>> {
    let described = statat(directory, name, AtFlags::SYMLINK_NOFOLLOW).and_then(|stat| {
        let target = || Ok(readlinkat(directory, name, Vec::new())?.into_bytes());
        entry(path, &stat, target)
    });
    match described {
        Ok(found) => Ok(found),
        Err(Errno::NOENT | Errno::INVAL) => Ok(None),
        Err(error) => Err(refuse(path, error)),
    }
}
