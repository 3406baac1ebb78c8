//! The cache volumes of a node, and its part in cooperative caches. Checks no right and knows no
//! reservation: the node does.
//!
//! Reading order: `manifest` (what the source is), `disk` and `journal` (which blocks are here),
//! `flights` (which are coming), `peers`, `route` and `fetch` (from where), `flight` and `heirs`
//! (how they come, and what spares home), `read` (all together), `near` and `hand_over` (what
//! agents read without asking), `volume` (one volume and its generations).

mod ahead;
mod arrival;
mod bring;
mod classes;
mod disk;
mod fetch;
mod flight;
mod flights;
mod from_home;
mod from_peers;
mod gate;
mod hand_over;
mod heirs;
mod joining;
mod journal;
mod keep;
mod manifest;
mod meter;
mod near;
mod peers;
mod pins;
mod read;
mod route;
mod run;
mod show;
mod volume;
mod warm;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bafs_proto::hash::Digest;
use bafs_proto::ids::{BlockIndex, FileIndex, ServerId, VolumeId};
use bafs_proto::limits::BODY_BYTES_MAX;
use bafs_proto::message::{
    Advert, BlockData, CacheAdvert, CacheRef, ManifestPage, ReadBlocks, ReadKind, ReadManifest,
};
use bafs_proto::source_warning::SourceWarnings;
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::volume::VolumeSpec;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;

use self::disk::Run;
use self::fetch::{Fetcher, Generation};
use self::from_peers::{told_to_agents, told_to_peers};
use self::heirs::others_for;
use self::manifest::Manifest;
use self::read::Errand;
use self::volume::{CacheKind, CacheVolume};
use crate::clock;
use crate::counters::Counters;
use crate::home_clients::HomeClients;
use crate::logic::blocks::BlockKey;

/// Names of directories that are being removed begin so.
const REMOVED_PREFIX: &str = "removed-";

/// All cache volumes of a node.
pub struct Caches {
    directory: PathBuf,
    fetcher: Arc<Fetcher>,
    counters: Counters,
    volumes: Mutex<BTreeMap<VolumeId, Arc<CacheVolume>>>,
    /// Bytes that all of them leave free on the disk; 0 until jobs found that full.
    spare: AtomicU64,
    /// Held while a volume is made or renewed: each id by one call at a time.
    changing: Mutex<BTreeMap<VolumeId, Arc<tokio::sync::Mutex<()>>>>,
}

impl std::fmt::Debug for Caches {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Caches({} volumes)", self.lock().len())
    }
}

impl Caches {
    /// Opens the cache volumes in `directory`, made if it is not there. Volumes keep the blocks of
    /// an earlier life; what is damaged beyond use is removed and told in the log.
    ///
    /// `token` is the server's own capability: it shows it to its peers, which reach it at
    /// `address`. When there are cooperative caches, nobody goes home for their blocks before
    /// [`Caches::set_peers`], or three seconds, so that a restart costs home nothing.
    ///
    /// # Errors
    /// `ServerFault` when the disk does not do it.
    pub fn open(
        directory: PathBuf,
        homes: Arc<HomeClients>,
        token: Token,
        (server, address): (ServerId, String),
        counters: Counters,
    ) -> Result<Arc<Self>> {
        let broken = |e| fault("open the cache volumes", &directory, e);
        std::fs::create_dir_all(&directory).map_err(broken)?;
        let mut volumes = BTreeMap::new();
        for entry in std::fs::read_dir(&directory).map_err(broken)? {
            let path = entry.map_err(broken)?.path();
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            let Ok(id) = name.parse::<VolumeId>() else {
                if name.starts_with(REMOVED_PREFIX) {
                    std::fs::remove_dir_all(&path).map_err(broken)?;
                }
                continue;
            };
            match CacheVolume::load(path.clone(), &counters) {
                Ok(volume) => drop(volumes.insert(id, Arc::new(volume))),
                Err(error) => {
                    tracing::warn!(%id, %error, "a cache volume is damaged and removed");
                    std::fs::remove_dir_all(&path).map_err(broken)?;
                }
            }
        }
        let fetcher = Arc::new(Fetcher::new(homes, token, server, address));
        if volumes.values().any(|volume| is_shared(volume)) {
            fetcher.unsettle();
        }
        let (volumes, changing) = (Mutex::new(volumes), Mutex::default());
        Ok(Arc::new(Self {
            directory,
            fetcher,
            counters,
            volumes,
            spare: AtomicU64::new(0),
            changing,
        }))
    }

    /// Makes a cache volume: lists its source at home. Repeating it is harmless and brings a
    /// fresher `source_token`. Returns the digest of the manifest.
    ///
    /// # Errors
    /// `Conflict` when the id is in use with another specification; what home answers; the errors
    /// of a wrong specification; `ServerFault`.
    pub async fn create(
        &self,
        spec: &VolumeSpec,
        source_token: Token,
        deadline: Deadline,
    ) -> Result<Digest> {
        let kind = CacheKind::of(spec)?;
        let changing = self.changing(spec.id);
        let _one_at_a_time = changing.lock().await;
        if let Ok(volume) = self.volume(spec.id) {
            if volume.spec() != *spec {
                let text = format!("volume {} exists with another specification", spec.id);
                return Err(Error::new(ErrorCode::Conflict, text));
            }
            let digest = volume.generation().manifest.digest();
            blocking(move || volume.refresh_token(source_token)).await??;
            return Ok(digest);
        }
        let homes = self.fetcher.homes();
        let block_bytes = kind.block_bytes;
        let listed =
            Manifest::list(homes, kind.source, block_bytes, &source_token, deadline).await?;
        let digest = listed.0.digest();
        let (directory, spec, id) = (self.place(spec.id), spec.clone(), spec.id);
        let counters = self.counters.clone();
        let volume = blocking(move || {
            // What a failed attempt left; the id is not in use.
            let _ = std::fs::remove_dir_all(&directory);
            CacheVolume::create(directory, &spec, source_token, listed, &counters)
        })
        .await??;
        let volume = Arc::new(volume);
        self.lock().insert(id, volume.clone());
        self.introduce(&volume.generation()).await;
        Ok(digest)
    }

    /// Lists the source again. If it changed, a new generation begins: files that did not change
    /// keep their blocks, and readers of the old manifest get `SourceChanged`. Returns the digest
    /// of the present manifest.
    ///
    /// # Errors
    /// `VolumeLost`; what home answers; `ServerFault`. After an error the old generation goes on.
    pub async fn invalidate(
        &self,
        id: VolumeId,
        source_token: Token,
        deadline: Deadline,
    ) -> Result<Digest> {
        let changing = self.changing(id);
        let _one_at_a_time = changing.lock().await;
        let volume = self.volume(id)?;
        let kind = CacheKind::of(&volume.spec())?;
        let homes = self.fetcher.homes();
        let block_bytes = kind.block_bytes;
        let listed =
            Manifest::list(homes, kind.source, block_bytes, &source_token, deadline).await?;
        let digest = listed.0.digest();
        let (old, renewed) = (volume.generation(), volume.clone());
        let is_same = old.manifest.digest() == digest;
        if !is_same {
            old.take_back(source_changed()).await?;
        }
        let made = blocking(move || {
            renewed.refresh_token(source_token)?;
            if is_same {
                return Ok(());
            }
            renewed.renew(listed)
        });
        made.await
            .and_then(|made| made)
            .inspect_err(|_| old.go_on())?;
        self.introduce(&volume.generation()).await;
        Ok(digest)
    }

    /// Removes a volume with its blocks. Reads that are under way end by themselves.
    pub async fn remove(&self, id: VolumeId) {
        self.changing
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&id);
        let Some(volume) = self.lock().remove(&id) else {
            return;
        };
        let place = self.place(id);
        let gone = self
            .directory
            .join(format!("{REMOVED_PREFIX}{}", VolumeId::random()));
        let generation = volume.generation();
        if let Err(error) = generation.take_back(lost(id)).await {
            tracing::warn!(%id, %error, "a cache volume is removed under its readers");
        }
        let removed = blocking(move || {
            generation.disk.retire();
            generation.disk.empty_files();
            std::fs::rename(&place, &gone).and_then(|()| std::fs::remove_dir_all(&gone))
        });
        let removed = removed.await;
        let fault = |e| fault("remove the blocks", &self.place(id), e);
        if let Err(error) = removed.and_then(|removed| removed.map_err(fault)) {
            tracing::warn!(%id, %error, "blocks of a removed cache volume are still on disk");
        }
    }

    /// The volumes that are here.
    pub fn volume_ids(&self) -> Vec<VolumeId> {
        self.lock().keys().copied().collect()
    }

    /// Bytes and files that a volume keeps now.
    pub fn usage(&self, id: VolumeId) -> Option<(u64, u64)> {
        let generation = self.volume(id).ok()?.generation();
        let table = generation.disk.table();
        Some((table.used_bytes(), table.used_files()))
    }

    /// What a volume does not have as its source has it.
    pub fn warnings(&self, id: VolumeId) -> SourceWarnings {
        self.volume(id)
            .map_or_else(|_| SourceWarnings::default(), |volume| volume.warnings())
    }

    /// The cooperative caches that this server shares, for its advert.
    pub fn adverts(&self) -> Vec<CacheAdvert> {
        let shared = |(volume, cache): (&VolumeId, &Arc<CacheVolume>)| {
            let generation = cache.generation();
            let used_bytes = generation.disk.table().used_bytes();
            (!generation.cooperative.is_empty()).then(|| CacheAdvert {
                cooperative: generation.cooperative.clone(),
                volume: *volume,
                manifest: generation.manifest.digest(),
                capacity_bytes: generation.capacity_bytes,
                used_bytes,
            })
        };
        self.lock().iter().filter_map(shared).collect()
    }

    /// Takes the live nodes of the group, this one included or not. When they are the first since
    /// this server started, it tells them at once which caches it still has. Must be called within
    /// a tokio runtime.
    pub fn set_peers(self: &Arc<Self>, adverts: Vec<Advert>) {
        self.fetcher.peers().set(adverts, clock::monotonic_ms());
        if self.fetcher.is_settled() {
            return;
        }
        let this = self.clone();
        tokio::spawn(async move {
            let volumes: Vec<_> = this.lock().values().cloned().collect();
            for volume in volumes {
                this.introduce(&volume.generation()).await;
            }
            this.fetcher.settle();
        });
    }

    /// A page of a volume's manifest.
    ///
    /// # Errors
    /// `VolumeLost`.
    pub async fn read_manifest(&self, call: ReadManifest) -> Result<ManifestPage> {
        Ok(self
            .volume(call.volume)?
            .generation()
            .manifest
            .page(call.first))
    }

    /// Reads blocks from here, from a peer or from home, as the kind of reader permits. Blocks
    /// past the end of the file are left out.
    ///
    /// # Errors
    /// `VolumeLost` when the cache is not here; `SourceChanged` when the reader works with another
    /// state of the source, or home says that the file changed; `Malformed`; `DeadlineExceeded`;
    /// what home answers.
    pub async fn read_blocks(
        &self,
        call: ReadBlocks,
        deadline: Deadline,
    ) -> Result<(BlockData, Bytes)> {
        let generation = self.find(&call.cache, call.manifest)?;
        let blocks = (call.file, call.first, call.count);
        if let (ReadKind::PeerProbe(member), CacheRef::Cooperative(_)) = (&call.kind, &call.cache) {
            self.fetcher.meet(&generation, member);
        }
        let is_read = !matches!(
            call.kind,
            ReadKind::Expedite | ReadKind::CheckPresence | ReadKind::Touch
        );
        if call.must_verify
            && is_read
            && let Some(run) = run_of(&generation, blocks)?
        {
            generation.disk.doubt(&run);
        }
        let (digests, bytes) =
            read_for(&self.fetcher, &generation, blocks, &call.kind, deadline).await?;
        if call.kind != ReadKind::Agent {
            let bytes = bytes.len() as u64;
            generation.meter.add("cache_served_to_peers_bytes", bytes);
        }
        let others = match &call.kind {
            ReadKind::PeerProbe(heir) => {
                let (file, block) = (call.file, call.first);
                let first = BlockKey { file, block };
                let lacking = (first, &*digests);
                let others = others_for(&self.fetcher, &generation, lacking, heir.server);
                // Only a hint: what was found is given all the same.
                others.await.unwrap_or_default()
            }
            _ => Vec::new(),
        };
        let blocks = BlockData {
            digests,
            other_holders: others,
            home_silence_ms: from_peers::home_ago_ms(&self.fetcher, &generation, &call.kind),
        };
        Ok((blocks, bytes))
    }

    fn find(&self, cache: &CacheRef, manifest: Digest) -> Result<Arc<Generation>> {
        let generation = match cache {
            CacheRef::Volume(id) => self.volume(*id)?.generation(),
            CacheRef::Cooperative(name) => {
                let volumes = self.lock();
                let named = volumes.values().map(|volume| volume.generation());
                let mut named: Vec<_> = named.filter(|g| g.cooperative == *name).collect();
                let same = named.iter().position(|g| g.manifest.digest() == manifest);
                if name.is_empty() || named.is_empty() {
                    let text = format!("this server is not a member of cooperative cache '{name}'");
                    return Err(Error::new(ErrorCode::VolumeLost, text));
                }
                named.swap_remove(same.unwrap_or(0))
            }
        };
        if generation.manifest.digest() != manifest {
            return Err(source_changed());
        }
        Ok(generation)
    }

    fn volume(&self, id: VolumeId) -> Result<Arc<CacheVolume>> {
        self.lock().get(&id).cloned().ok_or_else(|| lost(id))
    }

    fn changing(&self, id: VolumeId) -> Arc<tokio::sync::Mutex<()>> {
        let mut changing = self.changing.lock().unwrap_or_else(PoisonError::into_inner);
        changing.entry(id).or_default().clone()
    }

    fn place(&self, id: VolumeId) -> PathBuf {
        self.directory.join(id.to_string())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<VolumeId, Arc<CacheVolume>>> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn is_shared(volume: &CacheVolume) -> bool {
    !volume.generation().cooperative.is_empty()
}

/// Reads blocks, given by file, first one and number, as the kind of reader permits.
async fn read_for(
    fetcher: &Arc<Fetcher>,
    generation: &Arc<Generation>,
    blocks: (FileIndex, BlockIndex, u32),
    reader: &ReadKind,
    deadline: Deadline,
) -> Result<read::Read> {
    let Some(run) = run_of(generation, blocks)? else {
        return Ok((Vec::new(), Bytes::new()));
    };
    let (fetcher, generation) = (fetcher.clone(), generation.clone());
    match reader {
        ReadKind::PeerProbe(member) => {
            let heir = member.server;
            heirs::read_for_heir(&fetcher, &generation, run, heir, deadline)
                .await
                .map_err(|error| told_to_peers(&fetcher, &generation, error))
        }
        ReadKind::CheckPresence => Ok(heirs::look(&generation, &run)),
        ReadKind::Touch => {
            generation.disk.use_all(&run);
            Ok((Vec::new(), Bytes::new()))
        }
        ReadKind::Expedite => {
            read::hurry(&generation, &run);
            Ok((Vec::new(), Bytes::new()))
        }
        ReadKind::Agent => {
            ahead::follow(&fetcher, &generation, &run);
            let (asked, by) = (generation.clone(), fetcher.clone());
            let (began, deadline) = (clock::monotonic_us(), deadline.with_reply_margin());
            let read = read::read(fetcher, generation, run, Errand::of(reader), deadline);
            read.await
                .map_err(|error| told_to_agents(&by, &asked, &run, began, error))
        }
        ReadKind::Peer | ReadKind::ReadAhead | ReadKind::Relay => {
            let (asked, by) = (generation.clone(), fetcher.clone());
            let read = read::read(fetcher, generation, run, Errand::of(reader), deadline);
            read.await
                .map_err(|error| told_to_peers(&by, &asked, error))
        }
    }
}

/// Brings blocks, given by file, first one and number, to an agent on this machine.
async fn bring_for(
    fetcher: &Arc<Fetcher>,
    generation: &Arc<Generation>,
    blocks: (FileIndex, BlockIndex, u32),
    deadline: Deadline,
) -> Result<bring::Brought> {
    let Some(run) = run_of(generation, blocks)? else {
        return Ok(bring::Brought::Bytes((Vec::new(), Bytes::new())));
    };
    ahead::follow(fetcher, generation, &run);
    bring::bring(fetcher, generation, run, deadline).await
}

/// The blocks that are asked for, as far as the file goes; `None` when these are none.
fn run_of(
    generation: &Generation,
    (file, first, count): (FileIndex, BlockIndex, u32),
) -> Result<Option<Run>> {
    if count == 0 {
        return Ok(None);
    }
    let manifest = &generation.manifest;
    let block_bytes = manifest.block_bytes();
    if u64::from(count) * u64::from(block_bytes) > u64::from(BODY_BYTES_MAX) {
        let text = format!("{count} blocks of {block_bytes} bytes do not fit a reply");
        return Err(Error::new(ErrorCode::Malformed, text));
    }
    let entry = manifest.file(file)?;
    let blocks = manifest.blocks_of(entry);
    let count = blocks.saturating_sub(first.0).min(u64::from(count));
    if count == 0 {
        return Ok(None);
    }
    let last = BlockIndex(first.0 + count - 1);
    Ok(Some(Run {
        file,
        first: first.0,
        count: count as usize,
        last_bytes: manifest.length_of(entry, last),
        block_bytes,
    }))
}

fn lost(id: VolumeId) -> Error {
    let text = format!("cache volume {id} does not exist on this server");
    Error::new(ErrorCode::VolumeLost, text)
}

fn source_changed() -> Error {
    let text = "the source changed: the cache volume has another generation than the reader; start \
                the job again";
    Error::new(ErrorCode::SourceChanged, text)
}

/// Runs what waits for the disk where it may wait.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(|error| {
        Error::new(
            ErrorCode::ServerFault,
            format!("an operation on a cache volume failed: {error}"),
        )
    })
}

/// The error of a disk that does not do what it should.
fn fault(doing: &str, path: &Path, error: std::io::Error) -> Error {
    crate::errors::disk_error(format!("cannot {doing} ({})", path.display()), &error)
}
