//! Where a fill reads: a home or a volume of another server. Checks every digest and asks again for
//! what came damaged. Writes nothing.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use bafs_proto::hash::Digest;
use bafs_proto::ids::VolumeId;
use bafs_proto::limits::{BODY_BYTES_MAX, IO_BYTES_MAX};
use bafs_proto::message::{ListSource, ReadSource, SourceEntry, SourceKind};
use bafs_proto::net::pool::Pool;
use bafs_proto::path::join;
use bafs_proto::replica::{
    DataRange, FileMap, ListVolumeTree, ListedFile, MapVolumeFile, ReadSources, ReadVolumeFile,
    ReadVolumeFiles, TreePage,
};
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::volume::VolumeSource;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;

use super::base_copy::{self, KnownRange};
use super::tree_listing::CHUNK_BYTES;
use crate::counters::Counters;
use crate::home_clients::{HomeAddress, HomeClients};

/// Bytes of one range: as much as one read of a file operation.
pub(super) const RANGE_BYTES: u32 = IO_BYTES_MAX;

/// Time for one page, range or pack, repetitions included, in milliseconds: a range takes 8 s on a
/// home link of 1 MB/s that it shares with seven others, and home may restart meanwhile.
const CALL_TIMEOUT_MS: u64 = 120_000;

/// What arrives damaged is asked for so many times.
const DAMAGED_ATTEMPTS_MAX: u32 = 3;

/// The source of a fill.
pub(super) struct FillSource {
    pub(super) homes: Arc<HomeClients>,
    pub(super) token: Token,
    pub(super) source: VolumeSource,
    pub(super) counters: Counters,
    /// What of files came over the network.
    pub(super) received_bytes: AtomicU64,
}

impl fmt::Debug for FillSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Origin({:?})", self.source)
    }
}

impl FillSource {
    /// Whether the source is at a home, which does not say where its files have holes.
    pub(super) fn is_home(&self) -> bool {
        matches!(self.source, VolumeSource::Home { .. })
    }

    /// Whether who may read a file is the matter of that file, as on a file system. Elsewhere a
    /// refusal is mostly of all.
    pub(super) fn has_per_file_rights(&self) -> bool {
        let is_store = |address: &str| {
            let schemes = ["s3://", "http://", "https://"];
            schemes.iter().any(|scheme| address.starts_with(scheme))
        };
        matches!(&self.source, VolumeSource::Home { address, .. } if !is_store(address))
    }

    /// Most bytes of small files that the source gives in one answer; `None` if it gives them one
    /// by one. Of a home no more than with any other call: its link may be slow.
    pub(super) fn pack_bytes_max(&self) -> Option<u64> {
        match &self.source {
            VolumeSource::Volume { .. } => Some(u64::from(BODY_BYTES_MAX)),
            VolumeSource::Home { address, id, .. } => {
                let packs = self.homes.has_packs(HomeAddress { address, id: *id });
                packs.then_some(u64::from(RANGE_BYTES))
            }
        }
    }

    /// Where an entry goes: a source that is one file comes under its own name.
    pub(super) fn target_path(&self, entry: &SourceEntry) -> Result<String> {
        if !entry.path.is_empty() || entry.kind == SourceKind::Directory {
            return Ok(entry.path.clone());
        }
        match &self.source {
            VolumeSource::Home { path, .. } if !path.is_empty() => {
                Ok(path.rsplit('/').next().unwrap_or(path).to_owned())
            }
            _ => Err(Error::new(
                ErrorCode::BadPath,
                "the root of the source is no directory",
            )),
        }
    }

    /// A page of the listing.
    pub(super) async fn list(&self, after: Option<String>) -> Result<TreePage> {
        match &self.source {
            VolumeSource::Home { address, path, id } => {
                let call = ListSource {
                    path: path.clone(),
                    after,
                };
                let deadline = Deadline::after_ms(CALL_TIMEOUT_MS);
                let at = HomeAddress { address, id: *id };
                let page = self.homes.list(at, &self.token, call, deadline).await;
                let page = page.map_err(|e| e.context(format!("'{path}' of home {address}")))?;
                // A home does not say which names are of one file.
                let links = Vec::new();
                Ok(TreePage { page, links })
            }
            VolumeSource::Volume { address, volume } => {
                let volume = *volume;
                let call = ListVolumeTree { volume, after };
                let page = self.call_server(address, volume, call).await;
                page.map(|(page, _)| page)
            }
        }
    }

    /// Where a file has data, from a place on. Only what takes more than one range is worth asking.
    pub(super) async fn map_file(&self, entry: &SourceEntry, from: u64) -> Result<FileMap> {
        let size = entry.identity.size;
        match &self.source {
            VolumeSource::Volume { address, volume } if size > u64::from(RANGE_BYTES) => {
                let call = MapVolumeFile {
                    volume: *volume,
                    file: to_listed_file(entry),
                    start_offset: from,
                };
                let (map, _) = self.call_server(address, *volume, call).await?;
                let goes_on = map.next.is_none_or(|next| next > from && next < size);
                if goes_on && map.ranges.iter().all(|data| data.is_within(from..size)) {
                    return Ok(map);
                }
                let text = format!("the map of '{}' leads out of it", entry.path);
                Err(Error::new(ErrorCode::Malformed, text))
            }
            _ => Ok(FileMap {
                ranges: vec![DataRange {
                    offset: from,
                    length: size - from,
                }],
                next: None,
            }),
        }
    }

    /// A range of a file, of at most [`RANGE_BYTES`], checked; what is known of it does not travel.
    pub(super) async fn read(
        &self,
        entry: &SourceEntry,
        range: DataRange,
        known: &KnownRange,
    ) -> Result<Bytes> {
        let length = u32::try_from(range.length).unwrap_or(u32::MAX);
        let asked = || self.fetch(entry, range.offset, length, &known.digests);
        let checked = |digests: &[Digest], data: &Bytes| {
            base_copy::join_ranges([(range.length, known)].into_iter(), digests, data)
        };
        let what = || format!("'{}' at byte {}", entry.path, range.offset);
        self.fetch_checked(asked, checked, what).await
    }

    /// Small files, one after the other, checked; what is known of each does not travel.
    pub(super) async fn read_files(
        &self,
        files: &[(String, SourceEntry)],
        known: &[KnownRange],
    ) -> Result<Bytes> {
        let listed: Vec<_> = files
            .iter()
            .map(|(_, entry)| to_listed_file(entry))
            .collect();
        let asked = || self.fetch_files(&listed, known);
        let checked = |digests: &[Digest], data: &Bytes| {
            let sizes = files.iter().map(|(_, entry)| entry.identity.size);
            base_copy::join_ranges(sizes.zip(known), digests, data)
        };
        let what = || format!("'{}' and files after it", files[0].1.path);
        self.fetch_checked(asked, checked, what).await
    }

    /// Takes note of a file that was copied.
    pub(super) fn count_file(&self, bytes: u64) {
        self.counters.add("fill_files", 1);
        self.counters.add("fill_bytes", bytes);
    }

    /// The whole of data that agree with their digests, asked for again if they do not.
    async fn fetch_checked<F: Future<Output = Result<(Vec<Digest>, Bytes)>>>(
        &self,
        asked: impl Fn() -> F,
        checked: impl Fn(&[Digest], &Bytes) -> Option<Bytes>,
        what: impl Fn() -> String,
    ) -> Result<Bytes> {
        for _ in 0..DAMAGED_ATTEMPTS_MAX {
            let (digests, data) = asked().await?;
            self.received_bytes.fetch_add(data.len() as u64, Relaxed);
            self.counters.add("fill_received_bytes", data.len() as u64);
            if let Some(whole) = checked(&digests, &data) {
                return Ok(whole);
            }
            self.counters.add("fill_digest_failures", 1);
        }
        let text = format!(
            "{} arrived damaged {DAMAGED_ATTEMPTS_MAX} times; check the disk and memory of the \
             source",
            what()
        );
        Err(Error::new(ErrorCode::DigestMismatch, text))
    }

    async fn fetch(
        &self,
        entry: &SourceEntry,
        offset: u64,
        length: u32,
        known: &[Digest],
    ) -> Result<(Vec<Digest>, Bytes)> {
        let result = match &self.source {
            VolumeSource::Home {
                address,
                path: base,
                id,
            } => {
                let call = ReadSource {
                    path: join(base, &entry.path),
                    identity: entry.identity,
                    offset,
                    length,
                    block_bytes: CHUNK_BYTES,
                };
                let (at, deadline) = (
                    HomeAddress { address, id: *id },
                    Deadline::after_ms(CALL_TIMEOUT_MS),
                );
                let data = self.homes.read_with_retry(at, &self.token, call, deadline);
                data.await.map_err(|e| e.context(format!("home {address}")))
            }
            VolumeSource::Volume { address, volume } => {
                let call = ReadVolumeFile {
                    volume: *volume,
                    path: entry.path.clone(),
                    identity: entry.identity,
                    offset,
                    length,
                    known_digests: known.to_vec(),
                };
                self.call_server(address, *volume, call).await
            }
        };
        result.map(|(data, body)| (data.digests, body))
    }

    async fn fetch_files(
        &self,
        files: &[ListedFile],
        known: &[KnownRange],
    ) -> Result<(Vec<Digest>, Bytes)> {
        let files = files.to_vec();
        let result = match &self.source {
            VolumeSource::Home { address, path, id } => {
                let call = ReadSources {
                    path: path.clone(),
                    files,
                    block_bytes: CHUNK_BYTES,
                };
                let (at, deadline) = (
                    HomeAddress { address, id: *id },
                    Deadline::after_ms(CALL_TIMEOUT_MS),
                );
                let homes = &self.homes;
                let data = homes.read_files_with_retry(at, &self.token, call, deadline);
                data.await.map_err(|e| e.context(format!("home {address}")))
            }
            VolumeSource::Volume { address, volume } => {
                let call = ReadVolumeFiles {
                    volume: *volume,
                    files,
                    known_digests: known.iter().map(|known| known.digests.clone()).collect(),
                };
                self.call_server(address, *volume, call).await
            }
        };
        result.map(|(data, body)| (data.digests, body))
    }

    /// Asks the server of a volume.
    async fn call_server<C: bafs_proto::message::Call + Clone>(
        &self,
        address: &str,
        volume: VolumeId,
        call: C,
    ) -> Result<(C::Reply, Bytes)> {
        let (pool, deadline): (&Pool, _) = (self.homes.pool(), Deadline::after_ms(CALL_TIMEOUT_MS));
        let asked = pool.call_with_retries(address, &self.token, call, Bytes::new(), deadline);
        let answer = asked.await;
        answer.map_err(|e| e.context(format!("volume {volume} of {address}")))
    }
}

fn to_listed_file(entry: &SourceEntry) -> ListedFile {
    ListedFile {
        path: entry.path.clone(),
        identity: entry.identity,
    }
}
