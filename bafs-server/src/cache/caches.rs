//! The cache volumes of a node: opens, makes, renews and removes them. Checks no right and knows no
//! reservation: the node does.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use bafs_proto::cache::{JoinCache, JoinCacheReply};
use bafs_proto::hash::Digest;
use bafs_proto::ids::{ServerId, VolumeId};
use bafs_proto::message::{Advert, CacheAdvert, CacheRef};
use bafs_proto::source_warning::SourceWarnings;
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::volume::VolumeSpec;
use bafs_proto::{Error, ErrorCode, Result};

use super::errors::{disk_fault, run_blocking, source_changed, volume_lost};
use super::fetch::fetcher::Fetcher;
use super::generation::Generation;
use super::store::manifest::Manifest;
use super::volume::{CacheKind, CacheVolume};
use crate::cache::locks::lock;
use crate::clock;
use crate::counters::Counters;
use crate::home_clients::HomeClients;

/// Names of directories that are being removed begin so.
const REMOVED_PREFIX: &str = "removed-";

/// All cache volumes of a node.
pub struct Caches {
    directory: PathBuf,
    pub(super) fetcher: Arc<Fetcher>,
    counters: Counters,
    volumes: Mutex<BTreeMap<VolumeId, Arc<CacheVolume>>>,
    /// Bytes that all of them leave free on the disk; 0 until jobs found that full.
    pub(super) free_bytes_min: AtomicU64,
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
    /// an earlier life. Damaged volumes are removed, with a warning.
    ///
    /// `token` is the server's own capability: it shows it to its peers, which reach it at
    /// `address`. A node with cooperative caches asks home for no block before
    /// [`Caches::set_peers`], or for three seconds, so that a restart causes no request to home.
    ///
    /// # Errors
    /// `ServerFault` when the disk fails.
    pub fn open(
        directory: PathBuf,
        homes: Arc<HomeClients>,
        token: Token,
        (server, address): (ServerId, String),
        counters: Counters,
    ) -> Result<Arc<Self>> {
        let broken = |e| disk_fault("open the cache volumes", &directory, e);
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
        if volumes
            .values()
            .any(|volume| volume.generation().membership.is_shared())
        {
            fetcher.set_knows_peers(false);
        }
        let (volumes, changing) = (Mutex::new(volumes), Mutex::default());
        Ok(Arc::new(Self {
            directory,
            fetcher,
            counters,
            volumes,
            free_bytes_min: AtomicU64::new(0),
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
            let digest = volume.generation().store.manifest.digest();
            run_blocking(move || volume.refresh_token(source_token)).await??;
            return Ok(digest);
        }
        let listed = self.list_source(kind, &source_token, deadline).await?;
        let digest = listed.0.digest();
        let (directory, spec, id) = (self.place(spec.id), spec.clone(), spec.id);
        let counters = self.counters.clone();
        let volume = run_blocking(move || {
            // A failed attempt may have left files; the id is not in use.
            let _ = std::fs::remove_dir_all(&directory);
            CacheVolume::create(directory, &spec, source_token, listed, &counters)
        })
        .await??;
        let volume = Arc::new(volume);
        self.lock().insert(id, volume.clone());
        self.announce(&volume.generation()).await;
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
        let listed = self.list_source(kind, &source_token, deadline).await?;
        let digest = listed.0.digest();
        let (old, renewed) = (volume.generation(), volume.clone());
        let is_same = old.store.manifest.digest() == digest;
        if !is_same {
            old.store.recall_agents(source_changed()).await?;
        }
        let made = run_blocking(move || {
            renewed.refresh_token(source_token)?;
            if is_same {
                return Ok(());
            }
            renewed.renew(listed)
        });
        made.await
            .and_then(|made| made)
            .inspect_err(|_| old.store.end_recall())?;
        self.announce(&volume.generation()).await;
        Ok(digest)
    }

    /// Removes a volume with its blocks. Reads that are under way end by themselves.
    pub async fn remove(&self, id: VolumeId) {
        lock(&self.changing).remove(&id);
        let Some(volume) = self.lock().remove(&id) else {
            return;
        };
        let place = self.place(id);
        let gone = self
            .directory
            .join(format!("{REMOVED_PREFIX}{}", VolumeId::random()));
        let generation = volume.generation();
        if let Err(error) = generation.store.recall_agents(volume_lost(id)).await {
            tracing::warn!(%id, %error, "a cache volume is removed under its readers");
        }
        let removed = run_blocking(move || {
            generation.store.disk.retire();
            generation.store.disk.empty_files();
            std::fs::rename(&place, &gone).and_then(|()| std::fs::remove_dir_all(&gone))
        });
        let removed = removed.await;
        let failed = |e| disk_fault("remove the blocks", &self.place(id), e);
        if let Err(error) = removed.and_then(|removed| removed.map_err(failed)) {
            tracing::warn!(%id, %error, "blocks of a removed cache volume are still on disk");
        }
    }

    /// The volumes that are here.
    pub fn volume_ids(&self) -> Vec<VolumeId> {
        self.lock().keys().copied().collect()
    }

    /// Bytes and files that a volume stores now.
    pub fn usage(&self, id: VolumeId) -> Option<(u64, u64)> {
        let generation = self.volume(id).ok()?.generation();
        let table = generation.store.disk.table();
        Some((table.used_bytes(), table.used_files()))
    }

    /// Differences between a volume and its source.
    pub fn warnings(&self, id: VolumeId) -> SourceWarnings {
        self.volume(id)
            .map_or_else(|_| SourceWarnings::default(), |volume| volume.warnings())
    }

    /// The cooperative caches that this server shares, for its advert.
    pub fn adverts(&self) -> Vec<CacheAdvert> {
        let shared = |(volume, cache): (&VolumeId, &Arc<CacheVolume>)| {
            let generation = cache.generation();
            let used_bytes = generation.store.disk.table().used_bytes();
            let membership = &generation.membership;
            membership.is_shared().then(|| CacheAdvert {
                cooperative: membership.cooperative().to_owned(),
                volume: *volume,
                manifest: generation.store.manifest.digest(),
                capacity_bytes: generation.store.capacity_bytes,
                used_bytes,
            })
        };
        self.lock().iter().filter_map(shared).collect()
    }

    /// Takes the live nodes of the group, with or without this one. The first time since its start,
    /// this server announces its caches to them. Must be called within a tokio runtime.
    pub fn set_peers(self: &Arc<Self>, adverts: Vec<Advert>) {
        self.fetcher.peers().set(adverts, clock::monotonic_ms());
        if self.fetcher.knows_peers() {
            return;
        }
        let this = self.clone();
        tokio::spawn(async move {
            for volume in this.all_volumes() {
                this.announce(&volume.generation()).await;
            }
            this.fetcher.set_knows_peers(true);
        });
    }

    /// Another server shares a cache from now on. Returns what it must know of the cache.
    ///
    /// # Errors
    /// `VolumeLost` when this server does not share it, `SourceChanged` when it shows another state
    /// of the source.
    pub fn join(&self, call: JoinCache) -> Result<JoinCacheReply> {
        let cache = CacheRef::Cooperative(call.cooperative);
        let generation = self.find(&cache, call.manifest)?;
        let reply = self.fetcher.join_reply(&generation, &call.member);
        self.fetcher.add_peer(&generation, call.member);
        Ok(reply)
    }

    /// Announces a cache to the other nodes of the group. It leaves as many bytes free as the other
    /// caches here.
    async fn announce(&self, generation: &Arc<Generation>) {
        let free_bytes_min = self.free_bytes_min.load(Ordering::Relaxed);
        generation.store.disk.set_free_bytes_min(free_bytes_min);
        let addresses = self.fetcher.peers().addresses();
        self.fetcher.announce(generation, addresses).await;
    }

    async fn list_source(
        &self,
        kind: CacheKind,
        token: &Token,
        deadline: Deadline,
    ) -> Result<(Manifest, SourceWarnings)> {
        let homes = &self.fetcher.homes;
        Manifest::list(homes, kind.source, kind.block_bytes, token, deadline).await
    }

    /// A volume's present generation, by the name that an agent or a peer uses.
    ///
    /// # Errors
    /// `VolumeLost`; `SourceChanged` when it has another manifest.
    pub(super) fn find(&self, cache: &CacheRef, manifest: Digest) -> Result<Arc<Generation>> {
        let generation = match cache {
            CacheRef::Volume(id) => self.volume(*id)?.generation(),
            CacheRef::Cooperative(name) => {
                let volumes = self.lock();
                let named = volumes.values().map(|volume| volume.generation());
                let mut named: Vec<_> = named
                    .filter(|g| g.membership.cooperative() == name)
                    .collect();
                let same = named
                    .iter()
                    .position(|g| g.store.manifest.digest() == manifest);
                if name.is_empty() || named.is_empty() {
                    let text = format!("this server is not a member of cooperative cache '{name}'");
                    return Err(Error::new(ErrorCode::VolumeLost, text));
                }
                named.swap_remove(same.unwrap_or(0))
            }
        };
        if generation.store.manifest.digest() != manifest {
            return Err(source_changed());
        }
        Ok(generation)
    }

    pub(super) fn volume(&self, id: VolumeId) -> Result<Arc<CacheVolume>> {
        self.lock().get(&id).cloned().ok_or_else(|| volume_lost(id))
    }

    /// Held while a volume is made or renewed.
    pub(super) fn changing(&self, id: VolumeId) -> Arc<tokio::sync::Mutex<()>> {
        let mut changing = lock(&self.changing);
        changing.entry(id).or_default().clone()
    }

    fn place(&self, id: VolumeId) -> PathBuf {
        self.directory.join(id.to_string())
    }

    /// All volumes.
    pub(super) fn all_volumes(&self) -> Vec<Arc<CacheVolume>> {
        self.lock().values().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<VolumeId, Arc<CacheVolume>>> {
        lock(&self.volumes)
    }
}
