//! The cache volumes of a node: opens, makes, renews and removes them. Volumes of one source share
//! their data, which stay after the last of them. Checks no right and knows no reservation: the
//! node does.

use std::collections::{BTreeMap, BTreeSet};
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
use super::record::{CacheRecord, CacheUser};
use super::retained_data::RetainedData;
use super::store::manifest::{HomeSource, Manifest};
use super::volume::{CacheKind, CacheVolume};
use crate::cache::locks::lock;
use crate::clock;
use crate::counters::Counters;
use crate::home_clients::HomeClients;

/// Names of directories that are being removed begin so.
pub(super) const REMOVED_PREFIX: &str = "removed-";

/// All cache volumes of a node.
pub struct Caches {
    pub(super) directory: PathBuf,
    pub(super) fetcher: Arc<Fetcher>,
    pub(super) counters: Counters,
    /// The data that each volume shows; several volumes may show the same.
    volumes: Mutex<BTreeMap<VolumeId, Arc<CacheVolume>>>,
    /// Data that no volume shows.
    pub(super) retained: Mutex<Vec<RetainedData>>,
    /// Held while a volume gets its data, and while data lose a volume: two volumes of one source
    /// that come at once get the same.
    attaching: tokio::sync::Mutex<()>,
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
        let mut retained = Vec::new();
        for entry in std::fs::read_dir(&directory).map_err(broken)? {
            let path = entry.map_err(broken)?.path();
            let name = path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into_owned();
            if name.parse::<VolumeId>().is_err() {
                if name.starts_with(REMOVED_PREFIX) {
                    std::fs::remove_dir_all(&path).map_err(broken)?;
                }
                continue;
            }
            let found = CacheRecord::read(&path).and_then(|record| {
                if record.users.is_empty() {
                    retained.push(RetainedData::find(&path, &record)?);
                    return Ok(());
                }
                let volume = Arc::new(CacheVolume::load(path.clone(), &counters)?);
                let ids = record.users.iter().map(|user| user.spec.id);
                volumes.extend(ids.map(|id| (id, volume.clone())));
                Ok(())
            });
            if let Err(error) = found {
                tracing::warn!(name, %error, "cached data are damaged and removed");
                std::fs::remove_dir_all(&path).map_err(broken)?;
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
            retained: Mutex::new(retained),
            attaching: tokio::sync::Mutex::default(),
            free_bytes_min: AtomicU64::new(0),
            changing,
        }))
    }

    /// From now on, blocks of other nodes are taken without asking home what they are.
    pub fn trust_peers(&self) {
        self.fetcher.trust_peers();
    }

    /// Makes a cache volume: lists its source at home, which proves the right to read it. It shows
    /// the data of that source that are here, or data of its own. Repeating it is harmless and
    /// brings a fresher `source_token`. Returns the digest of the manifest.
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
            if volume.spec_of(spec.id).as_ref() != Some(spec) {
                let text = format!("volume {} exists with another specification", spec.id);
                return Err(Error::new(ErrorCode::Conflict, text));
            }
            let (digest, id) = (volume.generation().store.manifest.digest(), spec.id);
            run_blocking(move || volume.refresh_token(id, source_token)).await??;
            return Ok(digest);
        }
        let source = kind.source.clone();
        let listed = self
            .list_source(source, kind.block_bytes, &source_token, deadline)
            .await?;
        let digest = listed.0.digest();
        let user = CacheUser {
            spec: spec.clone(),
            source_token,
        };
        self.attach(kind, user, listed).await?;
        Ok(digest)
    }

    /// Gives a volume its data: those of its source that other volumes show, else those that no
    /// volume shows any more, else none.
    async fn attach(
        &self,
        kind: CacheKind,
        user: CacheUser,
        listed: (Manifest, SourceWarnings),
    ) -> Result<()> {
        let _one_at_a_time = self.attaching.lock().await;
        let (id, manifest) = (user.spec.id, listed.0.digest());
        let shown = self.all_volumes().into_iter().find(|volume| {
            let is_same = volume.generation().store.manifest.digest() == manifest;
            kind.is_shared() && is_same && volume.kind().is_ok_and(|other| other == kind)
        });
        if let Some(volume) = shown {
            let attached = volume.clone();
            run_blocking(move || attached.add_user(user)).await??;
            self.lock().insert(id, volume);
            return Ok(());
        }
        let retained = match kind.is_shared() {
            true => self.take_retained(&kind, manifest),
            false => None,
        };
        let volume = match retained.map(RetainedData::into_directory) {
            Some(directory) => self.adopt(directory, user, listed).await?,
            None => self.make(user, listed).await?,
        };
        let volume = Arc::new(volume);
        self.lock().insert(id, volume.clone());
        self.announce(&volume.generation()).await;
        Ok(())
    }

    async fn make(
        &self,
        user: CacheUser,
        listed: (Manifest, SourceWarnings),
    ) -> Result<CacheVolume> {
        let (mut directory, counters) = (self.place(user.spec.id), self.counters.clone());
        if directory.exists() {
            // Others show the data that a volume of this id had, or an attempt failed.
            directory = self.place(VolumeId::random());
        }
        run_blocking(move || CacheVolume::create(directory, user, listed, &counters)).await?
    }

    /// Data that cannot be taken up are removed, and others begin.
    async fn adopt(
        &self,
        directory: PathBuf,
        user: CacheUser,
        listed: (Manifest, SourceWarnings),
    ) -> Result<CacheVolume> {
        let (place, counters) = (directory.clone(), self.counters.clone());
        let adopting = user.clone();
        let adopted = run_blocking(move || CacheVolume::adopt(place, adopting, &counters)).await?;
        match adopted {
            Ok(volume) => {
                run_blocking(move || {
                    let known = volume.generation().store.manifest.digest();
                    if known != listed.0.digest() || volume.has_unsettled_files() {
                        volume.renew(listed)?;
                    }
                    Ok(volume)
                })
                .await?
            }
            Err(error) => {
                tracing::warn!(%error, "cached data without a volume cannot be used");
                self.remove_directory(directory).await;
                self.make(user, listed).await
            }
        }
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
        let spec = volume.spec_of(id).ok_or_else(|| volume_lost(id))?;
        let kind = CacheKind::of(&spec)?;
        let source = kind.source.clone();
        let listed = self
            .list_source(source, kind.block_bytes, &source_token, deadline)
            .await?;
        let digest = listed.0.digest();
        let (old, renewed) = (volume.generation(), volume.clone());
        let is_same = old.store.manifest.digest() == digest;
        if !is_same && volume.user_ids().len() > 1 {
            // The others go on with the state that they opened.
            let user = CacheUser { spec, source_token };
            self.attach(kind, user, listed).await?;
            run_blocking(move || volume.remove_user(id)).await??;
            return Ok(digest);
        }
        if !is_same {
            old.store.recall_agents(source_changed()).await?;
        }
        let made = run_blocking(move || {
            renewed.refresh_token(id, source_token)?;
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

    /// A volume keeps at most so many bytes and files from now on. What is over that leaves as new
    /// blocks come.
    ///
    /// # Errors
    /// `VolumeLost`, `ServerFault`; then nothing changed.
    pub async fn resize(&self, id: VolumeId, bytes: u64, files: u64) -> Result<()> {
        let changing = self.changing(id);
        let _one_at_a_time = changing.lock().await;
        let volume = self.volume(id)?;
        run_blocking(move || volume.resize_user(id, bytes, files)).await?
    }

    /// Removes a volume. Its data stay as long as another volume shows them, or nobody wants their
    /// space; those of a volume that shares with nobody go. Reads that are under way end by
    /// themselves.
    pub async fn remove(&self, id: VolumeId) {
        let _one_at_a_time = self.attaching.lock().await;
        lock(&self.changing).remove(&id);
        let Some(volume) = self.lock().remove(&id) else {
            return;
        };
        if volume.user_ids().len() > 1 {
            let left = run_blocking(move || volume.remove_user(id)).await;
            if let Err(error) = left.and_then(|left| left) {
                tracing::warn!(%id, %error, "cached data still name a removed volume");
            }
            return;
        }
        let generation = volume.generation();
        if let Err(error) = generation.store.recall_agents(volume_lost(id)).await {
            tracing::warn!(%id, %error, "a cache volume is removed under its readers");
        }
        let is_shared = generation.membership.is_shared();
        if is_shared {
            generation.inflight.wait_until_stored().await;
        }
        let directory = volume.directory().to_owned();
        let retained = run_blocking(move || {
            generation.store.disk.retire();
            let has_blocks = generation.store.disk.table().used_bytes() > 0;
            if is_shared && has_blocks {
                volume.remove_user(id)?;
                return RetainedData::of(&volume).map(Some);
            }
            generation.store.disk.empty_files();
            Ok(None)
        });
        match retained.await.and_then(|retained| retained) {
            Ok(Some(retained)) => self.retained_data().push(retained),
            Ok(None) => self.remove_directory(directory).await,
            Err(error) => {
                tracing::warn!(%id, %error, "the data of a removed cache volume are given up");
                self.remove_directory(directory).await;
            }
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
        let shared = |cache: Arc<CacheVolume>| {
            let volume = *cache.user_ids().first()?;
            let generation = cache.generation();
            let used_bytes = generation.store.disk.table().used_bytes();
            let membership = &generation.membership;
            membership.is_shared().then(|| CacheAdvert {
                cooperative: membership.cooperative().to_owned(),
                volume,
                manifest: generation.store.manifest.digest(),
                capacity_bytes: generation.store.capacity_bytes(),
                used_bytes,
            })
        };
        self.all_volumes().into_iter().filter_map(shared).collect()
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
        source: HomeSource,
        block_bytes: u32,
        token: &Token,
        deadline: Deadline,
    ) -> Result<(Manifest, SourceWarnings)> {
        let homes = &self.fetcher.homes;
        Manifest::list(homes, source, block_bytes, token, deadline).await
    }

    /// A volume's present generation, by the name that an agent or a peer uses.
    ///
    /// # Errors
    /// `VolumeLost`; `SourceChanged` when it has another manifest.
    pub(super) fn find(&self, cache: &CacheRef, manifest: Digest) -> Result<Arc<Generation>> {
        let generation = match cache {
            CacheRef::Volume(id) => self.volume(*id)?.generation(),
            CacheRef::Cooperative(name) => {
                let volumes = self.all_volumes();
                let named = volumes.iter().map(|volume| volume.generation());
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

    /// The data of all volumes, each once.
    pub(super) fn all_volumes(&self) -> Vec<Arc<CacheVolume>> {
        let mut seen = BTreeSet::new();
        let volumes = self.lock();
        let volumes = volumes.values();
        let volumes = volumes.filter(|volume| seen.insert(Arc::as_ptr(volume)));
        volumes.cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<VolumeId, Arc<CacheVolume>>> {
        lock(&self.volumes)
    }
}
