//! The files of a volume: their list, `bafs volume ls`, and ranges of their bytes, checked against
//! their digests. Writes nothing.

use anyhow::Result;
use bafs_proto::hash::Digest;
use bafs_proto::ids::{BlockIndex, FileIndex, VolumeId};
use bafs_proto::limits::{BLOCK_BYTES_DEFAULT, BODY_BYTES_MAX};
use bafs_proto::message::{
    Advert, BlockRange, CacheRef, FetchPriority, FetchScope, ReadBlocks, ReadManifest, SourceEntry,
    SourceKind,
};
use bafs_proto::path::{check_relative, join, printable};
use bafs_proto::replica::{ListVolumeTree, ReadVolumeFile};
use bafs_proto::volume::{VolumeKind, VolumeStatus};
use bafs_proto::{Error, ErrorCode};
use bytes::Bytes;
use serde_json::{Value, json};

use super::connection::connect;
use crate::args::VolumeLsArgs;
use crate::client::ClusterClient;
use crate::output::Printer;

/// Time for a read, in milliseconds: a cache may fetch it from a slow home first.
const READ_TIMEOUT_MS: u64 = 60_000;

/// A volume whose files are read.
pub(super) struct VolumeFiles<'a> {
    client: &'a ClusterClient,
    node: Advert,
    volume: VolumeId,
    is_cache: bool,
}

/// A file, directory or link of a volume.
#[derive(Debug)]
pub(super) struct ListedEntry {
    pub(super) entry: SourceEntry,
    /// Where a cache has its blocks.
    cached: Option<CachedFile>,
}

/// A file of a cache volume, as its manifest has it.
#[derive(Debug, Clone, Copy)]
struct CachedFile {
    index: FileIndex,
    manifest: Digest,
    block_bytes: u32,
}

/// Runs `bafs volume ls`.
pub(super) async fn list_files(args: VolumeLsArgs, output: Printer) -> Result<()> {
    let client = connect(&args.client)?;
    let (node, status) = client.find_volume(&args.volume).await?;
    let files = VolumeFiles::new(&client, node, &status);
    let listed = files.list(&args.path).await?;
    let mut listed = listed.iter().map(|it| &it.entry);
    if output.is_json() {
        let shown: Vec<_> = listed.map(entry_json).collect();
        return output.print_result("", &shown);
    }
    listed.try_for_each(|entry| {
        let path = printable(&entry.path);
        let path: String = path.chars().flat_map(escape_control).collect();
        let suffix = match &entry.kind {
            SourceKind::Directory | SourceKind::UnreadableDirectory => "/".to_owned(),
            SourceKind::Symlink(target) => format!(" -> {}", target.escape_ascii()),
            SourceKind::File => String::new(),
        };
        output.print_remark(&format!("{:>14} {path}{suffix}", entry.identity.size))
    })
}

fn escape_control(c: char) -> Vec<char> {
    match c.is_control() {
        true => c.escape_default().collect(),
        false => vec![c],
    }
}

fn entry_json(entry: &SourceEntry) -> Value {
    let (kind, target) = match &entry.kind {
        SourceKind::File => ("file", None),
        SourceKind::Directory => ("directory", None),
        SourceKind::UnreadableDirectory => ("unreadable_directory", None),
        SourceKind::Symlink(target) => ("symlink", Some(bafs_proto::path::from_bytes(target))),
    };
    json!({
        "path": entry.path,
        "kind": kind,
        "bytes": entry.identity.size,
        "modified_ms": entry.identity.mtime_ns / 1_000_000,
        "mode": format!("{:04o}", entry.mode & 0o7777),
        "target": target,
    })
}

impl<'a> VolumeFiles<'a> {
    /// The files of a volume of a node.
    pub(super) fn new(client: &'a ClusterClient, node: Advert, status: &VolumeStatus) -> Self {
        Self {
            client,
            node,
            volume: status.spec.id,
            is_cache: matches!(status.spec.kind, VolumeKind::Cache { .. }),
        }
    }

    /// What is at a path and below it, in path order; for the whole volume without its root.
    ///
    /// # Errors
    /// `NotFound`, `BadPath`, what the node answers.
    pub(super) async fn list(&self, path: &str) -> Result<Vec<ListedEntry>> {
        let path = path.trim_matches('/');
        check_relative(path)?;
        let found = match self.is_cache {
            true => self.list_cache(path).await?,
            false => self.list_scratch(path).await?,
        };
        if found.is_empty() && !path.is_empty() {
            let text = format!("volume {} has no file '{path}'", self.volume);
            return Err(Error::new(ErrorCode::NotFound, text).into());
        }
        Ok(found)
    }

    async fn list_scratch(&self, path: &str) -> Result<Vec<ListedEntry>> {
        let (mut found, mut after) = (Vec::new(), start_before(path));
        loop {
            let call = ListVolumeTree {
                volume: self.volume,
                after: after.take(),
            };
            let page = self.client.call(&self.node.address, call).await?.page;
            let last = page.entries.last().map(|entry| entry.path.clone());
            let is_past = last.as_ref().is_some_and(|last| is_past(last, path));
            for entry in page.entries {
                check_relative(&entry.path)?;
                if is_within(&entry.path, path) && !entry.path.is_empty() {
                    let cached = None;
                    found.push(ListedEntry { entry, cached });
                }
            }
            after = last;
            if !page.has_more || is_past || after.is_none() {
                return Ok(found);
            }
        }
    }

    async fn list_cache(&self, path: &str) -> Result<Vec<ListedEntry>> {
        let (mut found, mut index) = (Vec::new(), 0_u32);
        loop {
            let call = ReadManifest {
                volume: self.volume,
                first: FileIndex(index),
            };
            let page = self.client.call(&self.node.address, call).await?;
            if page.entries.is_empty() {
                return Ok(found);
            }
            for entry in page.entries {
                check_relative(&entry.path)?;
                let cached = Some(CachedFile {
                    index: FileIndex(index),
                    manifest: page.manifest,
                    block_bytes: page.block_bytes.max(1),
                });
                index = index.saturating_add(1);
                let is_root = entry.path.is_empty() && entry.kind != SourceKind::File;
                if is_within(&entry.path, path) && !is_root {
                    found.push(ListedEntry { entry, cached });
                }
            }
            if !page.has_more {
                return Ok(found);
            }
        }
    }

    /// Bytes of a file from an offset on; as many as one call brings, and none at its end.
    ///
    /// # Errors
    /// `SourceChanged`, `DigestMismatch`, what the node answers.
    pub(super) async fn read(&self, file: &ListedEntry, offset: u64) -> Result<Bytes> {
        let size = file.entry.identity.size;
        if offset >= size {
            return Ok(Bytes::new());
        }
        let (address, ms) = (&self.node.address, READ_TIMEOUT_MS);
        let (digests, body, piece_bytes) = match file.cached {
            Some(cached) => {
                let block_bytes = u64::from(cached.block_bytes);
                let call = ReadBlocks {
                    range: BlockRange {
                        cache: CacheRef::Volume(self.volume),
                        manifest: cached.manifest,
                        file: cached.index,
                        first: BlockIndex(offset / block_bytes),
                        count: (BODY_BYTES_MAX / cached.block_bytes).max(1),
                    },
                    scope: FetchScope::AnyNode,
                    priority: FetchPriority::Urgent,
                    must_verify: false,
                };
                let read = self.client.call_with_data(address, call, Bytes::new(), ms);
                let (blocks, body) = read.await?;
                (blocks.digests, body, cached.block_bytes)
            }
            None => {
                let call = ReadVolumeFile {
                    volume: self.volume,
                    path: file.entry.path.clone(),
                    identity: file.entry.identity,
                    offset,
                    length: BODY_BYTES_MAX,
                    known_digests: Vec::new(),
                };
                let read = self.client.call_with_data(address, call, Bytes::new(), ms);
                let (data, body) = read.await?;
                (data.digests, body, BLOCK_BYTES_DEFAULT)
            }
        };
        let path = &file.entry.path;
        let pieces = body.chunks(piece_bytes as usize).map(Digest::of);
        if !pieces.eq(digests) {
            let text = format!("'{path}' arrived damaged at byte {offset}");
            return Err(Error::new(ErrorCode::DigestMismatch, text).into());
        }
        if body.is_empty() || body.len() as u64 > size - offset {
            let text = format!("'{path}' changed while it was read");
            return Err(Error::new(ErrorCode::SourceChanged, text).into());
        }
        Ok(body)
    }
}

/// A place of a listing after which `path` comes, with little between: its directory, and in it the
/// name without its last letter.
fn start_before(path: &str) -> Option<String> {
    if path.is_empty() {
        return None;
    }
    let (parent, name) = path.rsplit_once('/').unwrap_or(("", path));
    let mut shorter = name.to_owned();
    shorter.pop();
    Some(match shorter.as_str() {
        "" | "." | ".." => parent.to_owned(),
        shorter => join(parent, shorter),
    })
}

fn is_within(entry: &str, path: &str) -> bool {
    path.is_empty()
        || entry
            .strip_prefix(path)
            .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

/// Whether all of a path comes before an entry.
fn is_past(entry: &str, path: &str) -> bool {
    !is_within(entry, path) && entry.split('/').gt(path.split('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listings_start_just_before_a_path() {
        for (path, start) in [
            ("", None),
            ("a", Some("")),
            ("out/summary", Some("out/summar")),
            ("out/s", Some("out")),
            ("x/..a", Some("x")),
            ("é", Some("")),
        ] {
            assert_eq!(start_before(path).as_deref(), start, "{path}");
            if let Some(start) = start {
                assert!(check_relative(start).is_ok() && start.split('/').lt(path.split('/')));
            }
        }
    }

    #[test]
    fn paths_contain_only_what_is_below_them() {
        assert!(is_within("a/b", "a") && is_within("a", "a") && is_within("b", ""));
        assert!(!is_within("ab", "a") && !is_within("a-b/c", "a"));
        assert!(is_past("a-", "a") && is_past("b", "a/c") && !is_past("a/z", "a"));
        assert!(!is_past("a/b", "a/c"));
    }
}
