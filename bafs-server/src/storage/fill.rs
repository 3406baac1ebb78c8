//! Fills a scratch volume from a home path or from a volume of another server: lists, reads many
//! ranges at once, checks every digest, makes everything durable. Decides nothing about states.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use bafs_proto::hash::Digest;
use bafs_proto::ids::VolumeId;
use bafs_proto::limits::IO_BYTES_MAX;
use bafs_proto::message::{
    ListSource, ListVolumeTree, ReadSource, ReadVolumeFile, SourceEntry, SourceKind, SourcePage,
};
use bafs_proto::path::check_relative;
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::volume::Source;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;
use tokio::sync::Semaphore;
use tokio::task::{JoinError, JoinSet};

use super::beneath::{self, Beneath};
use super::listing::PIECE_BYTES;
use crate::counters::Counters;
use crate::homes::Homes;
use crate::logic::space::Amount;

/// Bytes of one range: as much as one read of a file operation.
const RANGE_BYTES: u32 = IO_BYTES_MAX;

/// Ranges under way at once: fills a link of 1 Gbit/s at 60 ms.
const RANGES_MAX: usize = 8;

/// Files under way at once, so that small files overlap too.
const FILES_MAX: usize = 8;

/// Time for one page or one range, repetitions included, in milliseconds: a range takes 8 s on a
/// home link of 1 MB/s that it shares with seven others, and home may restart meanwhile.
const CALL_MS: u64 = 120_000;

/// A range that arrives damaged is asked for so many times.
const DAMAGED_MAX: u32 = 3;

/// So many files are made durable one by one; if there are more, the whole file system is, which
/// costs the dirty data of others too but is one call.
const SYNC_EACH_MAX: u64 = 64;

/// What fills a volume, and how much it may hold.
#[derive(Debug, Clone)]
pub(super) struct Fill {
    pub(super) homes: Arc<Homes>,
    pub(super) token: Token,
    pub(super) source: Source,
    pub(super) limit: Amount,
    pub(super) counters: Counters,
}

/// Where a fill is.
struct Progress {
    root: Arc<Beneath>,
    used: Amount,
    directories: Vec<SourceEntry>,
    files: JoinSet<Result<()>>,
    made: u64,
}

/// A file that is being copied.
struct Copy {
    root: Arc<Beneath>,
    path: String,
    entry: Arc<SourceEntry>,
    ranges: Arc<Semaphore>,
    sync: Sync,
}

/// Whether a file is made durable by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Sync {
    Now,
    WithAll,
}

impl Fill {
    /// Fills the empty directory `tree`; when this returns, its content is durable. Dropping the
    /// future stops the work.
    ///
    /// # Errors
    /// `NoSpaceBytes` and `NoSpaceFiles` when the source is larger than the limit; what the source
    /// answered; `DigestMismatch`; `ServerFault` when the disk refuses.
    pub(super) async fn run(self, tree: &Path) -> Result<()> {
        let root = Arc::new(Beneath::open(tree).map_err(|e| disk("tree", &e))?);
        let this = Arc::new(self);
        let ranges = Arc::new(Semaphore::new(RANGES_MAX));
        let mut progress = Progress {
            root,
            used: Amount::default(),
            directories: Vec::new(),
            files: JoinSet::new(),
            made: 0,
        };
        let mut after = None;
        loop {
            let page = this.list(after).await?;
            for entry in &page.entries {
                this.take(entry, &ranges, &mut progress).await?;
            }
            if !page.more {
                break;
            }
            after = page.entries.last().map(|entry| entry.path.clone());
            if after.is_none() {
                let text = "the source sends empty pages; it is of another version or damaged";
                return Err(Error::new(ErrorCode::Malformed, text));
            }
        }
        while let Some(done) = progress.files.join_next().await {
            joined(done)?;
        }
        let Progress {
            root,
            directories,
            made,
            ..
        } = progress;
        blocking(move || finish_all(&root, &directories, made)).await
    }

    /// Makes one entry, or has it made.
    async fn take(
        self: &Arc<Self>,
        entry: &SourceEntry,
        ranges: &Arc<Semaphore>,
        progress: &mut Progress,
    ) -> Result<()> {
        check_relative(&entry.path)?;
        let is_root = entry.path.is_empty() && entry.kind == SourceKind::Directory;
        if !is_root {
            self.reserve(entry, &mut progress.used)?;
        }
        let path = self.target(entry)?;
        let root = progress.root.clone();
        match &entry.kind {
            SourceKind::Directory => {
                progress.directories.push(entry.clone());
                if is_root {
                    return Ok(());
                }
                blocking(move || root.create_directory(&path).map_err(|e| disk(&path, &e))).await
            }
            SourceKind::Symlink(target) => {
                let (target, mtime_ns) = (target.clone(), entry.identity.mtime_ns);
                blocking(move || {
                    root.create_symlink(&path, &target, mtime_ns)
                        .map_err(|e| disk(&path, &e))
                })
                .await
            }
            SourceKind::File => {
                if progress.files.len() >= FILES_MAX
                    && let Some(done) = progress.files.join_next().await
                {
                    joined(done)?;
                }
                progress.made += 1;
                let sync = if progress.made <= SYNC_EACH_MAX {
                    Sync::Now
                } else {
                    Sync::WithAll
                };
                let (entry, ranges) = (Arc::new(entry.clone()), ranges.clone());
                let copy = Copy {
                    root,
                    path,
                    entry,
                    ranges,
                    sync,
                };
                progress.files.spawn(self.clone().copy_file(copy));
                Ok(())
            }
        }
    }

    fn reserve(&self, entry: &SourceEntry, used: &mut Amount) -> Result<()> {
        used.files += 1;
        used.bytes = used.bytes.saturating_add(entry.identity.size);
        if used.files > self.limit.files {
            let text = format!(
                "the source has more files than the volume may hold ({}); give it more",
                self.limit.files
            );
            return Err(Error::new(ErrorCode::NoSpaceFiles, text));
        }
        if used.bytes > self.limit.bytes {
            let text = format!(
                "the source has more bytes than the volume may hold ({}; '{}' makes {}); \
                 give it more",
                self.limit.bytes, entry.path, used.bytes
            );
            return Err(Error::new(ErrorCode::NoSpaceBytes, text));
        }
        Ok(())
    }

    /// Where an entry goes: a source that is one file comes under its own name.
    fn target(&self, entry: &SourceEntry) -> Result<String> {
        if !entry.path.is_empty() || entry.kind == SourceKind::Directory {
            return Ok(entry.path.clone());
        }
        match &self.source {
            Source::Home { path, .. } if !path.is_empty() => {
                Ok(path.rsplit('/').next().unwrap_or(path).to_owned())
            }
            _ => Err(Error::new(
                ErrorCode::BadPath,
                "the root of the source is no directory",
            )),
        }
    }

    async fn copy_file(self: Arc<Self>, copy: Copy) -> Result<()> {
        let Copy {
            root,
            path,
            entry,
            ranges,
            sync,
        } = copy;
        let (size, shown) = (entry.identity.size, path.clone());
        let file = blocking(move || {
            let file = root.create_file(&path).map_err(|e| disk(&path, &e))?;
            file.set_len(size).map_err(|e| disk(&path, &e))?;
            Ok(Arc::new(file))
        })
        .await?;
        let mut under_way = JoinSet::new();
        let mut offset = 0;
        while offset < size {
            let stopped = |_| Error::new(ErrorCode::ServerFault, "the fill was stopped");
            let permit = ranges.clone().acquire_owned().await.map_err(stopped)?;
            while let Some(done) = under_way.try_join_next() {
                joined(done)?;
            }
            let (this, entry, file) = (self.clone(), entry.clone(), file.clone());
            under_way.spawn(async move {
                let _permit = permit;
                let data = this.read(&entry, offset).await?;
                blocking(move || {
                    write_range(&file, offset, &data).map_err(|e| disk(&entry.path, &e))
                })
                .await
            });
            offset += u64::from(RANGE_BYTES);
        }
        while let Some(done) = under_way.join_next().await {
            joined(done)?;
        }
        self.counters.add("fill.files", 1);
        self.counters.add("fill.bytes", size);
        blocking(move || {
            beneath::finish(&*file, entry.mode, entry.identity.mtime_ns)
                .and_then(|()| {
                    if sync == Sync::Now {
                        file.sync_all()
                    } else {
                        Ok(())
                    }
                })
                .map_err(|e| disk(&shown, &e))
        })
        .await
    }

    async fn list(&self, after: Option<String>) -> Result<SourcePage> {
        let deadline = Deadline::after_ms(CALL_MS);
        let (homes, token) = (&self.homes, &self.token);
        match &self.source {
            Source::Home { address, path } => {
                let call = ListSource {
                    path: path.clone(),
                    after,
                };
                let page = homes.list(address, token, call, deadline).await;
                page.map_err(|e| e.context(format!("'{path}' of home {address}")))
            }
            Source::Volume { address, volume } => {
                let call = ListVolumeTree {
                    volume: *volume,
                    after,
                };
                let body = Bytes::new();
                let page = homes
                    .pool()
                    .call_until(address, token, call, body, deadline);
                let page = page.await.map(|(page, _)| page);
                page.map_err(|e| e.context(of_volume(*volume, address)))
            }
        }
    }

    /// The range of a file that starts at `offset`, checked.
    async fn read(&self, entry: &SourceEntry, offset: u64) -> Result<Bytes> {
        let left = entry.identity.size - offset;
        let length = u32::try_from(left).unwrap_or(u32::MAX).min(RANGE_BYTES);
        let mut damaged = 0;
        loop {
            let (digests, data) = self.fetch(entry, offset, length).await?;
            let found: Vec<Digest> = data.chunks(PIECE_BYTES as usize).map(Digest::of).collect();
            if data.len() == length as usize && found == digests {
                return Ok(data);
            }
            damaged += 1;
            self.counters.add("fill.damaged", 1);
            if damaged == DAMAGED_MAX {
                let text = format!(
                    "'{}' arrived damaged {DAMAGED_MAX} times at byte {offset}; check the disk \
                     and memory of the source",
                    entry.path
                );
                return Err(Error::new(ErrorCode::DigestMismatch, text));
            }
        }
    }

    async fn fetch(
        &self,
        entry: &SourceEntry,
        offset: u64,
        length: u32,
    ) -> Result<(Vec<Digest>, Bytes)> {
        let deadline = Deadline::after_ms(CALL_MS);
        let (homes, token, identity) = (&self.homes, &self.token, entry.identity);
        let result = match &self.source {
            Source::Home {
                address,
                path: base,
            } => {
                let path = match (base.as_str(), entry.path.as_str()) {
                    (base, "") => base.to_owned(),
                    ("", path) => path.to_owned(),
                    (base, path) => format!("{base}/{path}"),
                };
                let block_bytes = PIECE_BYTES;
                let call = ReadSource {
                    path,
                    identity,
                    offset,
                    length,
                    block_bytes,
                };
                let data = homes.read_until(address, token, call, deadline).await;
                data.map_err(|e| e.context(format!("home {address}")))
            }
            Source::Volume { address, volume } => {
                let (volume, path) = (*volume, entry.path.clone());
                let call = ReadVolumeFile {
                    volume,
                    path,
                    identity,
                    offset,
                    length,
                };
                let body = Bytes::new();
                let data = homes
                    .pool()
                    .call_until(address, token, call, body, deadline);
                data.await
                    .map_err(|e| e.context(of_volume(volume, address)))
            }
        };
        result.map(|(data, body)| (data.digests, body))
    }
}

fn of_volume(volume: VolumeId, address: &str) -> String {
    format!("volume {volume} of {address}")
}

/// Writes a range, but leaves pieces of zeros as the holes they are.
fn write_range(file: &File, offset: u64, data: &[u8]) -> io::Result<()> {
    let mut at = offset;
    for piece in data.chunks(PIECE_BYTES as usize) {
        if piece.iter().any(|&byte| byte != 0) {
            file.write_all_at(piece, at)?;
        }
        at += piece.len() as u64;
    }
    Ok(())
}

/// Directories get their times and bits last, inside out: filling them changes both.
fn finish_all(root: &Beneath, directories: &[SourceEntry], files: u64) -> Result<()> {
    for entry in directories.iter().rev() {
        // The root stays ours to write, whatever it was at the source.
        let mode = if entry.path.is_empty() {
            entry.mode | 0o700
        } else {
            entry.mode
        };
        root.finish_directory(&entry.path, mode, entry.identity.mtime_ns)
            .map_err(|e| disk(&entry.path, &e))?;
    }
    let top = root.directory("").map_err(|e| disk("tree", &e))?;
    let synced = if files > SYNC_EACH_MAX {
        rustix::fs::syncfs(&top)
    } else {
        rustix::fs::fsync(&top)
    };
    synced.map_err(|e| disk("tree", &e.into()))
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    joined(tokio::task::spawn_blocking(work).await)
}

fn joined<T>(done: Result<Result<T>, JoinError>) -> Result<T> {
    done.unwrap_or_else(|e| Err(Error::new(ErrorCode::ServerFault, format!("fill: {e}"))))
}

fn disk(path: &str, error: &io::Error) -> Error {
    crate::fault::of_disk(format!("cannot make '{path}' in the store"), error)
}
