//! One cache volume in its directory: its record and its generations. Knows no other volume and
//! reads no block.
//!
//! A directory holds `record` and one directory for the generation that the record names. A change
//! replaces the record by renaming, so it is the old one or the new one. A start removes other
//! generations.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, RwLock};

use bafs_proto::hash::Digest;
use bafs_proto::ids::FileIndex;
use bafs_proto::limits::{BLOCK_BYTES_MAX, BLOCK_BYTES_MIN};
use bafs_proto::message::SourceKind;
use bafs_proto::source_warning::SourceWarnings;
use bafs_proto::token::Token;
use bafs_proto::volume::{ReplacementPolicy, VolumeKind, VolumeSource, VolumeSpec};
use bafs_proto::{Error, ErrorCode, Result, codec};
use serde::{Deserialize, Serialize};

use super::errors::disk_fault;
use super::fetch::inflight::BlockFetches;
use super::generation::Generation;
use super::membership::members::Membership;
use super::statistics::{Statistics, VolumeCounters};
use super::store::block_store::BlockStore;
use super::store::manifest::{HomeSource, Manifest};
use super::store::pins::{PINS, Pins};
use super::warming::Warmer;
use crate::cache::locks::{read_lock, write_lock};
use crate::counters::Counters;
use crate::logic::blocks::BlockTable;

const RECORD_VERSION: u32 = 4;

/// What outlives the process, beside manifest, pins and blocks.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct CacheRecord {
    version: u32,
    spec: VolumeSpec,
    source_token: Token,
    generation: u64,
    manifest: Digest,
    is_file: bool,
    warnings: SourceWarnings,
}

/// A cache volume.
pub(crate) struct CacheVolume {
    directory: PathBuf,
    record: RwLock<CacheRecord>,
    generation: RwLock<Arc<Generation>>,
    parts: VolumeParts,
    warmer: Warmer,
}

/// The fields of a cache volume's specification.
pub(crate) struct CacheKind {
    pub(crate) source: HomeSource,
    pub(crate) cooperative: String,
    pub(crate) replacement: ReplacementPolicy,
    pub(crate) block_bytes: u32,
}

impl CacheKind {
    /// Takes them out of a specification.
    ///
    /// # Errors
    /// `WrongState` when it is of another kind, `Unsupported` for a source that is no home,
    /// `Malformed` for a block size out of its range.
    pub(crate) fn of(spec: &VolumeSpec) -> Result<Self> {
        let VolumeKind::Cache {
            source,
            cooperative,
            replacement,
            block_bytes,
        } = &spec.kind
        else {
            let text = format!("volume '{}' is no cache volume", spec.name);
            return Err(Error::new(ErrorCode::WrongState, text));
        };
        let VolumeSource::Home { address, path, id } = source else {
            let text = "a cache volume shows a path of a home server, not a volume";
            return Err(Error::new(ErrorCode::Unsupported, text));
        };
        bafs_proto::path::check_relative(path)?;
        let range = BLOCK_BYTES_MIN..=BLOCK_BYTES_MAX;
        if !range.contains(block_bytes) || !block_bytes.is_power_of_two() {
            let text = format!(
                "a block size of {block_bytes} bytes: it must be a power of two from \
                 {BLOCK_BYTES_MIN} to {BLOCK_BYTES_MAX}"
            );
            return Err(Error::new(ErrorCode::Malformed, text));
        }
        Ok(Self {
            source: HomeSource {
                address: address.clone(),
                path: path.clone(),
                id: *id,
            },
            cooperative: cooperative.clone(),
            replacement: *replacement,
            block_bytes: *block_bytes,
        })
    }
}

impl CacheVolume {
    /// Makes a volume in `directory`, which must not exist (waits for the disk).
    ///
    /// # Errors
    /// `ServerFault` when the disk fails; then nothing is left.
    pub(crate) fn create(
        directory: PathBuf,
        spec: &VolumeSpec,
        source_token: Token,
        (manifest, warnings): (Manifest, SourceWarnings),
        counters: &Counters,
    ) -> Result<Self> {
        let record = CacheRecord {
            version: RECORD_VERSION,
            spec: spec.clone(),
            source_token: source_token.clone(),
            generation: 1,
            manifest: manifest.digest(),
            is_file: manifest.is_file(),
            warnings,
        };
        let place = directory.join("1");
        std::fs::create_dir_all(&place).map_err(|e| disk_fault("make the directory", &place, e))?;
        manifest.save(&place.join("manifest"))?;
        let parts = VolumeParts::new(&directory, source_token, counters);
        let statistics = Statistics::new(parts.counters.clone());
        let generation = parts.start(place, spec, manifest, statistics)?;
        write_record(&directory, &record)?;
        Ok(Self {
            directory,
            record: RwLock::new(record),
            generation: RwLock::new(Arc::new(generation)),
            parts,
            warmer: Warmer::default(),
        })
    }

    /// Loads the volume in `directory` (waits for the disk).
    ///
    /// # Errors
    /// `ServerFault`, `Malformed` or `DigestMismatch` when it cannot be used any more.
    pub(crate) fn load(directory: PathBuf, counters: &Counters) -> Result<Self> {
        let path = directory.join("record");
        let bytes = std::fs::read(&path).map_err(|e| disk_fault("read the record", &path, e))?;
        let record: CacheRecord = codec::decode(&bytes)?;
        if record.version != RECORD_VERSION {
            let text = format!("a cache volume of version {}", record.version);
            return Err(Error::new(ErrorCode::VersionMismatch, text));
        }
        let present = record.generation.to_string();
        remove_others(&directory, &["record", PINS, &present])?;
        let kind = CacheKind::of(&record.spec)?;
        let place = directory.join(present);
        let manifest = Manifest::load(
            &place.join("manifest"),
            kind.source,
            kind.block_bytes,
            record.is_file,
            record.manifest,
        )?;
        let parts = VolumeParts::new(&directory, record.source_token.clone(), counters);
        let statistics = Statistics::new(parts.counters.clone());
        let generation = parts.start(place, &record.spec, manifest, statistics)?;
        let table = generation.store.disk.table();
        generation.statistics.count_recovered(&table);
        drop(table);
        Ok(Self {
            directory,
            record: RwLock::new(record),
            generation: RwLock::new(Arc::new(generation)),
            parts,
            warmer: Warmer::default(),
        })
    }

    /// As it was asked for.
    pub(crate) fn spec(&self) -> VolumeSpec {
        read_lock(&self.record).spec.clone()
    }

    /// Differences between it and its source.
    pub(crate) fn warnings(&self) -> SourceWarnings {
        let record = read_lock(&self.record);
        record.warnings.clone()
    }

    /// The present state of the source.
    pub(crate) fn generation(&self) -> Arc<Generation> {
        read_lock(&self.generation).clone()
    }

    /// Its warming.
    pub(crate) fn warmer(&self) -> &Warmer {
        &self.warmer
    }

    /// Takes a fresher capability for the source (waits for the disk).
    ///
    /// # Errors
    /// `ServerFault` when the disk fails.
    pub(crate) fn refresh_token(&self, source_token: Token) -> Result<()> {
        let mut record = write_lock(&self.record);
        if record.source_token == source_token {
            return Ok(());
        }
        let fresh = CacheRecord {
            source_token: source_token.clone(),
            ..record.clone()
        };
        write_record(&self.directory, &fresh)?;
        *record = fresh;
        *write_lock(&self.parts.source_token) = source_token;
        Ok(())
    }

    /// Replaces the present generation by one with this manifest; files that did not change keep
    /// their blocks (waits for the disk). Not to be called twice at once.
    ///
    /// # Errors
    /// `Busy` while an agent has a whole file of the old one open; `ServerFault` when the disk
    /// fails; then the old generation goes on.
    pub(crate) fn renew(&self, (manifest, warnings): (Manifest, SourceWarnings)) -> Result<()> {
        let old = self.generation();
        let mut record = write_lock(&self.record);
        let fresh = CacheRecord {
            generation: record.generation + 1,
            manifest: manifest.digest(),
            is_file: manifest.is_file(),
            warnings,
            ..record.clone()
        };
        let old_place = self.directory.join(record.generation.to_string());
        let place = self.directory.join(fresh.generation.to_string());
        old.store.disk.retire();
        let made = || {
            old.store.disk.check_no_held_files()?;
            std::fs::create_dir_all(&place)
                .map_err(|e| disk_fault("make the directory", &place, e))?;
            manifest.save(&place.join("manifest"))?;
            let unchanged = find_unchanged(&old.store.manifest, &manifest);
            old.store.disk.link_unchanged(&place, &unchanged)?;
            let statistics = old.statistics.successor(&unchanged);
            let generation = self
                .parts
                .start(place.clone(), &fresh.spec, manifest, statistics)?;
            write_record(&self.directory, &fresh)?;
            Ok(generation)
        };
        let generation = made().inspect_err(|_| {
            let _ = std::fs::remove_dir_all(&place);
            old.store.disk.resume();
        })?;
        *record = fresh;
        // The old files go before the new generation grows, or both together could be too large.
        old.store.disk.empty_files();
        if let Err(error) = std::fs::remove_dir_all(&old_place) {
            tracing::warn!(%error, "an old cache generation stays until the next start");
        }
        *write_lock(&self.generation) = Arc::new(generation);
        Ok(())
    }
}

/// What the generations of a volume have in common.
struct VolumeParts {
    source_token: Arc<RwLock<Token>>,
    counters: Arc<VolumeCounters>,
    pins: Arc<Pins>,
}

impl VolumeParts {
    fn new(directory: &Path, source_token: Token, counters: &Counters) -> Self {
        Self {
            source_token: Arc::new(RwLock::new(source_token)),
            counters: Arc::new(VolumeCounters::new(counters)),
            pins: Arc::new(Pins::open(directory)),
        }
    }

    /// Starts a generation in its directory.
    fn start(
        &self,
        place: PathBuf,
        spec: &VolumeSpec,
        manifest: Manifest,
        statistics: Statistics,
    ) -> Result<Generation> {
        let kind = CacheKind::of(spec)?;
        let table = BlockTable::new(spec.size_bytes, spec.size_files, kind.replacement);
        let table = table.with_source_bytes(manifest.source_bytes());
        let store = BlockStore::open(
            place,
            manifest,
            table,
            spec.size_bytes,
            self.pins.clone(),
            self.counters.all().clone(),
        )?;
        let membership = Membership::new(store.manifest.clone(), kind.cooperative);
        Ok(Generation {
            store: Arc::new(store),
            inflight: BlockFetches::new(self.source_token.clone()),
            membership: Arc::new(membership),
            statistics,
        })
    }
}

/// Numbers in the old manifest of unchanged files, with their numbers in the new one.
fn find_unchanged(old: &Manifest, new: &Manifest) -> BTreeMap<FileIndex, FileIndex> {
    let files = |manifest: &Manifest| -> BTreeMap<_, _> {
        let numbered = (0..).map(FileIndex).zip(manifest.entries());
        numbered
            .filter(|(_, entry)| entry.kind == SourceKind::File)
            .map(|(n, entry)| ((manifest.home_path(entry), entry.identity), n))
            .collect()
    };
    let new = files(new);
    let kept = files(old)
        .into_iter()
        .filter_map(|(file, n)| Some((n, *new.get(&file)?)));
    kept.collect()
}

fn write_record(directory: &Path, record: &CacheRecord) -> Result<()> {
    let path = directory.join("record");
    let temporary = directory.join("record.new");
    let bytes = codec::encode(record)?;
    let written = private_file(&temporary)
        .and_then(|mut file| {
            std::io::Write::write_all(&mut file, &bytes)?;
            file.sync_all()
        })
        .and_then(|()| std::fs::rename(&temporary, &path))
        .and_then(|()| std::fs::File::open(directory)?.sync_all());
    written.map_err(|e| disk_fault("write the record", &path, e))
}

/// The record holds a capability: nobody else may read it.
fn private_file(path: &Path) -> std::io::Result<std::fs::File> {
    use std::os::unix::fs::OpenOptionsExt;
    let mut options = std::fs::OpenOptions::new();
    options
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)
}

fn remove_others(directory: &Path, keep: &[&str]) -> Result<()> {
    let broken = |e| disk_fault("tidy the directory", directory, e);
    for entry in std::fs::read_dir(directory).map_err(broken)? {
        let entry = entry.map_err(broken)?;
        if keep.iter().any(|name| entry.file_name() == *name) {
            continue;
        }
        let path = entry.path();
        let removed = if path.is_dir() {
            std::fs::remove_dir_all(&path)
        } else {
            std::fs::remove_file(&path)
        };
        removed.map_err(broken)?;
    }
    Ok(())
}
