//! The data of one source in their directory: the record, the generations, and the volumes that
//! show them. Knows no other data and reads no block.
//!
//! A directory holds `record` and one directory for the generation that the record names. A change
//! replaces the record by renaming, so it is the old one or the new one. A start removes other
//! generations.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, RwLock};
use std::time::SystemTime;

use bafs_proto::ids::{FileIndex, VolumeId};
use bafs_proto::limits::{BLOCK_BYTES_MAX, BLOCK_BYTES_MIN};
use bafs_proto::message::{SourceIdentity, SourceKind};
use bafs_proto::source_warning::SourceWarnings;
use bafs_proto::token::Token;
use bafs_proto::volume::{ReplacementPolicy, VolumeKind, VolumeSource, VolumeSpec};
use bafs_proto::{Error, ErrorCode, Result};

use super::errors::disk_fault;
use super::fetch::home_digests::HomeDigests;
use super::fetch::inflight::BlockFetches;
use super::generation::Generation;
use super::membership::members::Membership;
use super::record::{CacheRecord, CacheUser, RECORD};
use super::statistics::{Statistics, VolumeCounters};
use super::store::block_store::BlockStore;
use super::store::manifest::{HomeSource, Manifest};
use super::store::pins::{PINS, Pins};
use super::warming::Warmer;
use crate::cache::locks::{lock, read_lock, write_lock};
use crate::counters::Counters;
use crate::logic::blocks::BlockTable;

/// Whole seconds are all that a home without ctimes tells of a file, in nanoseconds.
const SECOND_NS: i64 = 1_000_000_000;

/// So long after its time may a file at such a home change unseen, in nanoseconds: until its second
/// ends, and one second more because two clocks are compared.
const UNSETTLED_NS: i64 = 2 * SECOND_NS;

/// The data of a source, as one cache volume or several of this node show them.
pub(crate) struct CacheVolume {
    directory: PathBuf,
    record: RwLock<CacheRecord>,
    generation: RwLock<Arc<Generation>>,
    parts: VolumeParts,
    warmer: Warmer,
    /// What the counters were when each volume came.
    first_counts: Mutex<BTreeMap<VolumeId, BTreeMap<String, u64>>>,
}

/// The fields of a cache volume's specification. Volumes for which they are equal share their data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CacheKind {
    pub(crate) source: HomeSource,
    pub(crate) cooperative: String,
    pub(crate) replacement: ReplacementPolicy,
    pub(crate) block_bytes: u32,
}

impl CacheKind {
    /// Whether it shares its data with other volumes.
    pub(crate) fn is_shared(&self) -> bool {
        !self.cooperative.is_empty()
    }

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
        user: CacheUser,
        (manifest, warnings): (Manifest, SourceWarnings),
        counters: &Counters,
    ) -> Result<Self> {
        let source_token = user.source_token.clone();
        let record = CacheRecord::new(user, manifest.digest(), manifest.is_file(), warnings);
        let place = directory.join("1");
        std::fs::create_dir_all(&place).map_err(|e| disk_fault("make the directory", &place, e))?;
        manifest.save(&place.join("manifest"))?;
        let parts = VolumeParts::new(&directory, source_token, counters);
        let statistics = Statistics::new(parts.counters.clone());
        let generation = parts.start(place, &record, manifest, statistics)?;
        record.write(&directory)?;
        Ok(Self::new(directory, record, generation, parts))
    }

    fn new(
        directory: PathBuf,
        record: CacheRecord,
        generation: Generation,
        parts: VolumeParts,
    ) -> Self {
        Self {
            directory,
            record: RwLock::new(record),
            generation: RwLock::new(Arc::new(generation)),
            parts,
            warmer: Warmer::default(),
            first_counts: Mutex::default(),
        }
    }

    /// Takes up data that no volume shows, for this one (waits for the disk).
    ///
    /// # Errors
    /// As [`Self::load`].
    pub(crate) fn adopt(directory: PathBuf, user: CacheUser, counters: &Counters) -> Result<Self> {
        let record = CacheRecord {
            spec: user.spec.clone(),
            users: vec![user],
            ..CacheRecord::read(&directory)?
        };
        record.write(&directory)?;
        Self::load(directory, counters)
    }

    /// Loads the volume in `directory` (waits for the disk).
    ///
    /// # Errors
    /// `ServerFault`, `Malformed` or `DigestMismatch` when it cannot be used any more.
    pub(crate) fn load(directory: PathBuf, counters: &Counters) -> Result<Self> {
        let record = CacheRecord::read(&directory)?;
        let present = record.generation.to_string();
        remove_others(&directory, &[RECORD, PINS, &present])?;
        let kind = CacheKind::of(&record.spec)?;
        let place = directory.join(present);
        let manifest = Manifest::load(
            &place.join("manifest"),
            kind.source,
            kind.block_bytes,
            record.is_file,
            record.manifest,
        )?;
        let token = record.users.last().map(|user| user.source_token.clone());
        let token = token.unwrap_or_else(Token::none);
        let parts = VolumeParts::new(&directory, token, counters);
        let statistics = Statistics::new(parts.counters.clone());
        let generation = parts.start(place, &record, manifest, statistics)?;
        let table = generation.store.disk.table();
        generation.statistics.count_recovered(&table);
        drop(table);
        Ok(Self::new(directory, record, generation, parts))
    }

    /// Where they are.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// The volumes that show them.
    pub(crate) fn user_ids(&self) -> Vec<VolumeId> {
        let record = read_lock(&self.record);
        record.users.iter().map(|user| user.spec.id).collect()
    }

    /// A volume that shows them, as it was asked for.
    pub(crate) fn spec_of(&self, id: VolumeId) -> Option<VolumeSpec> {
        let record = read_lock(&self.record);
        record.user(id).map(|user| user.spec.clone())
    }

    /// What they are of.
    ///
    /// # Errors
    /// As [`CacheKind::of`].
    pub(crate) fn kind(&self) -> Result<CacheKind> {
        CacheKind::of(&read_lock(&self.record).spec)
    }

    /// Lets one volume more show them (waits for the disk).
    ///
    /// # Errors
    /// `ServerFault` when the disk fails.
    pub(crate) fn add_user(&self, user: CacheUser) -> Result<()> {
        let (id, token) = (user.spec.id, user.source_token.clone());
        self.change_users(|users| users.push(user))?;
        let counts = self.parts.counters.all().snapshot();
        lock(&self.first_counts).insert(id, counts);
        *write_lock(&self.parts.source_token) = token;
        Ok(())
    }

    /// A volume shows them no more. Answers how many others do (waits for the disk).
    ///
    /// # Errors
    /// `ServerFault` when the disk fails; then nothing changed.
    pub(crate) fn remove_user(&self, id: VolumeId) -> Result<usize> {
        self.change_users(|users| users.retain(|user| user.spec.id != id))?;
        lock(&self.first_counts).remove(&id);
        let record = read_lock(&self.record);
        if let Some(last) = record.users.last() {
            *write_lock(&self.parts.source_token) = last.source_token.clone();
        }
        Ok(record.users.len())
    }

    fn change_users(&self, change: impl FnOnce(&mut Vec<CacheUser>)) -> Result<()> {
        let mut record = write_lock(&self.record);
        let mut fresh = record.clone();
        change(&mut fresh.users);
        fresh.write(&self.directory)?;
        if !fresh.users.is_empty() && fresh.capacity() != record.capacity() {
            let (bytes, files) = fresh.capacity();
            self.generation().store.set_capacity(bytes, files);
        }
        *record = fresh;
        Ok(())
    }

    /// A volume keeps at most so many bytes and files from now on (waits for the disk).
    ///
    /// # Errors
    /// `ServerFault` when the disk fails; then nothing changed.
    pub(crate) fn resize_user(&self, id: VolumeId, bytes: u64, files: u64) -> Result<()> {
        self.change_users(|users| {
            for user in users.iter_mut().filter(|user| user.spec.id == id) {
                user.spec.size_bytes = bytes;
                user.spec.size_files = files;
            }
        })
    }

    /// The counters since a volume shows them.
    pub(crate) fn counters_of(&self, id: VolumeId) -> BTreeMap<String, u64> {
        let mut counts = self.parts.counters.all().snapshot();
        if let Some(first) = lock(&self.first_counts).get(&id) {
            for (name, count) in &mut counts {
                *count = count.saturating_sub(first.get(name).copied().unwrap_or(0));
            }
        }
        counts
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

    /// Takes a fresher capability of a volume for the source (waits for the disk).
    ///
    /// # Errors
    /// `ServerFault` when the disk fails.
    pub(crate) fn refresh_token(&self, id: VolumeId, source_token: Token) -> Result<()> {
        let known = read_lock(&self.record)
            .user(id)
            .is_some_and(|user| user.source_token == source_token);
        if known {
            return Ok(());
        }
        self.change_users(|users| {
            for user in users.iter_mut().filter(|user| user.spec.id == id) {
                user.source_token = source_token.clone();
            }
        })?;
        *write_lock(&self.parts.source_token) = source_token;
        Ok(())
    }

    /// Whether a file may have changed since its blocks came, and still look the same (waits for
    /// the disk).
    pub(crate) fn has_unsettled_files(&self) -> bool {
        let generation = self.generation();
        let number = read_lock(&self.record).generation.to_string();
        let since = find_first_fetch(&self.directory.join(number));
        let entries = generation.store.manifest.entries();
        let mut files = entries
            .iter()
            .filter(|entry| entry.kind == SourceKind::File);
        files.any(|file| !is_settled(file.identity, since))
    }

    /// Replaces the present generation by one with this manifest; files that did not change keep
    /// their blocks, unless a change could not be seen (waits for the disk). Not to be called twice
    /// at once.
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
            let unchanged =
                find_unchanged(&old.store.manifest, find_first_fetch(&old_place), &manifest);
            old.store.disk.link_unchanged(&place, &unchanged)?;
            let statistics = old.statistics.successor(&unchanged);
            let generation = self
                .parts
                .start(place.clone(), &fresh, manifest, statistics)?;
            fresh.write(&self.directory)?;
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
        record: &CacheRecord,
        manifest: Manifest,
        statistics: Statistics,
    ) -> Result<Generation> {
        let kind = CacheKind::of(&record.spec)?;
        let (bytes, files) = record.capacity();
        let table = BlockTable::new(bytes, files, kind.replacement);
        let table = table.with_source_bytes(manifest.source_bytes());
        let digests = HomeDigests::open(&place);
        let store = BlockStore::open(
            place,
            manifest,
            table,
            bytes,
            self.pins.clone(),
            self.counters.all().clone(),
        )?;
        let membership = Membership::new(store.manifest.clone(), kind.cooperative);
        Ok(Generation {
            store: Arc::new(store),
            inflight: BlockFetches::new(self.source_token.clone()),
            digests,
            membership: Arc::new(membership),
            statistics,
        })
    }
}

/// Numbers in the old manifest of unchanged files, with their numbers in the new one. Blocks of the
/// old one came from `since` on.
fn find_unchanged(old: &Manifest, since: i64, new: &Manifest) -> BTreeMap<FileIndex, FileIndex> {
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
        .filter(|((_, identity), _)| is_settled(*identity, since))
        .filter_map(|(file, n)| Some((n, *new.get(&file)?)));
    kept.collect()
}

/// When the first block of a generation came at the earliest, in nanoseconds since the Unix epoch:
/// its manifest was written just before. Blocks of an older generation are among them only if no
/// change of their files could stay unseen.
fn find_first_fetch(place: &Path) -> i64 {
    let written = place.join("manifest").metadata();
    let written = written.and_then(|found| found.modified()).ok();
    let since = written.and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
    since.map_or(0, |since| {
        i64::try_from(since.as_nanos()).unwrap_or(i64::MAX)
    })
}

/// Whether a file that was fetched from `since` on has another identity after each later change.
/// Where the home tells no ctime, its time counts whole seconds.
fn is_settled(identity: SourceIdentity, since: i64) -> bool {
    let second = identity.mtime_ns.div_euclid(SECOND_NS);
    let settled = second
        .saturating_mul(SECOND_NS)
        .saturating_add(UNSETTLED_NS);
    identity.ctime_ns != 0 || settled <= since
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
