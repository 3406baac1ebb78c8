//! Keeps the classes of blocks right when peers come and go, and when paths are pinned: a bounded
//! number at a time, so that it never disturbs. What has another primary now becomes a copy when
//! that one has it. Fetches and frees nothing.

use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use bafs_proto::Result;
use bafs_proto::hash::Digest;
use bafs_proto::ids::{BlockIndex, FileIndex};
use bafs_proto::message::ReadKind;
use bafs_proto::time::Deadline;

use super::disk::Run;
use super::fetch::{Fetcher, Generation};
use super::peers::PeerCache;
use super::route::View;
use super::{Caches, blocking, warm};
use crate::logic::blocks::{BlockKey, CopyClass};

/// Most blocks that are looked at in one go, and while the table is held.
const LOOKS_MAX: u64 = 1 << 16;
const LOOKS_AT_ONCE_MAX: u64 = 1 << 12;

/// About so many blocks that have another primary now are asked for in one go.
const ORPHANS_MAX: usize = 1 << 12;

/// Time for a server to say which blocks it has, in milliseconds.
const LOOK_MS_MAX: u64 = 1_000;

/// For what the classes are right, and how far the present pass is.
#[derive(Default)]
pub(crate) struct Sorting {
    view: Option<Arc<View>>,
    pins: u64,
    /// Where the pass goes on; `None` when it is over.
    next: Option<BlockKey>,
}

/// What a step of a pass came to.
#[derive(Default)]
pub(crate) struct Sorted {
    /// The pass begins with it.
    begins: bool,
    /// Blocks that stay as if this server were their primary, though another one is: it may not
    /// have them yet.
    orphans: Vec<BlockKey>,
}

impl Caches {
    /// Has caches leave so many bytes free on the disk from now on: jobs found it full, and other
    /// volumes were promised what caches have.
    pub async fn reserve_free_space(self: &Arc<Self>, bytes: u64) {
        if self.spare.fetch_max(bytes, Ordering::Relaxed) < bytes {
            tracing::warn!(bytes, "the disk is full: caches leave so much of it free");
        }
        self.yield_disk().await;
    }

    async fn yield_disk(self: &Arc<Self>) {
        let spare = self.spare.load(Ordering::Relaxed);
        if spare == 0 {
            return;
        }
        let volumes: Vec<_> = self.lock().values().cloned().collect();
        let yielding = move || {
            let disks = volumes.iter().map(|volume| volume.generation());
            disks.for_each(|generation| generation.disk.leave_free(spare));
        };
        if let Err(error) = tokio::task::spawn_blocking(yielding).await {
            tracing::warn!(%error, "caches do not leave the disk to others");
        }
    }

    /// Goes on with what is done bit by bit: classes of blocks, warming of pinned paths. To be
    /// called every second or so.
    pub async fn maintain(self: &Arc<Self>) {
        self.yield_disk().await;
        let volumes: Vec<_> = self.lock().values().cloned().collect();
        for volume in volumes {
            let (id, generation) = (volume.spec().id, volume.generation());
            match self.fetcher.sort(&generation).await {
                Ok(true) if !generation.pins.paths().is_empty() => {
                    let pins = generation.pins.paths();
                    warm::go_on(self.fetcher.clone(), volume.clone(), pins);
                }
                Ok(_) => {}
                Err(error) => tracing::warn!(%error, "classes of blocks are not up to date"),
            }
            if generation.disk.hurt.swap(false, Ordering::Relaxed) {
                let changing = self.changing(id);
                tokio::spawn(async move {
                    let _one_at_a_time = changing.lock().await;
                    // Who reads an earlier state is told so already.
                    if Arc::ptr_eq(&volume.generation(), &generation) {
                        generation.take_back_hurt().await;
                    }
                });
            }
        }
    }
}

impl Fetcher {
    /// A step of the pass over all blocks. Tells whether the pass begins with it.
    async fn sort(&self, generation: &Arc<Generation>) -> Result<bool> {
        let view = self.view(generation).await?;
        let (sorter, seen) = (generation.clone(), view.clone());
        let sorted = blocking(move || {
            if let Err(error) = sorter.disk.tidy() {
                tracing::warn!(%error, "space of dropped blocks is not free yet");
            }
            sorter.sort(&seen)
        });
        let Sorted { begins, orphans } = sorted.await??;
        let mut silent = BTreeSet::new();
        let extent = |key: &BlockKey| generation.extent(*key);
        for keys in orphans.chunk_by(|one, next| extent(one) == extent(next)) {
            let owner = view.owner(generation, extent(&keys[0]));
            let Some(peer) = view.peer(owner).filter(|_| !silent.contains(&owner)) else {
                continue;
            };
            match self.look(generation, peer, keys).await {
                Ok(classes) => {
                    let generation = generation.clone();
                    blocking(move || generation.disk.reclassify(&classes)).await??;
                }
                Err(error) => {
                    tracing::debug!(peer = %peer.address, %error, "a primary is silent");
                    silent.insert(owner);
                }
            }
        }
        Ok(begins)
    }

    /// Which of these blocks of one extent their primary has: here they are copies.
    async fn look(
        &self,
        generation: &Arc<Generation>,
        peer: &PeerCache,
        keys: &[BlockKey],
    ) -> Result<Vec<(BlockKey, CopyClass)>> {
        let (first, last) = (keys[0], keys[keys.len() - 1]);
        let entry = generation.manifest.file(first.file)?;
        let run = Run {
            file: first.file,
            first: first.block.0,
            count: (last.block.0 - first.block.0 + 1) as usize,
            last_bytes: generation.manifest.length_of(entry, last.block),
            block_bytes: generation.manifest.block_bytes(),
        };
        let call = generation.ask_for(Some(&run), ReadKind::CheckPresence);
        let deadline = Deadline::after_ms(LOOK_MS_MAX);
        let told = self.pool.call(&peer.address, &self.token, call, deadline);
        let digests = told.await?.digests;
        let is_there = |key: &&BlockKey| {
            let told = digests.get((key.block.0 - run.first) as usize);
            told.is_some_and(|told| *told != Digest::ABSENT)
        };
        let there = keys.iter().filter(is_there);
        Ok(there.map(|key| (*key, CopyClass::Secondary)).collect())
    }
}

impl Generation {
    /// Why a block of a file is here.
    pub(crate) fn class_of(&self, file: FileIndex, is_own: bool) -> CopyClass {
        let entry = self.manifest.entries().get(file.0 as usize);
        match is_own {
            true if entry.is_some_and(|entry| self.pins.cover(&entry.path)) => CopyClass::Pinned,
            true => CopyClass::Primary,
            false => CopyClass::Secondary,
        }
    }

    /// Why a block that is here stays, if it is of this class now. One that has another primary now
    /// may be the only one: it stays what it is until that one has it.
    fn class_from(&self, key: BlockKey, class: CopyClass, is_own: bool) -> CopyClass {
        match (is_own, class) {
            (false, CopyClass::Secondary) => CopyClass::Secondary,
            _ => self.class_of(key.file, true),
        }
    }

    /// Brings some classes up to date (waits for the disk).
    ///
    /// # Errors
    /// `ServerFault` when the disk does not do it.
    fn sort(&self, view: &Arc<View>) -> Result<Sorted> {
        let mut sorting = self.sorting.lock().unwrap_or_else(PoisonError::into_inner);
        let pins = self.pins.version();
        let same = sorting.view.as_ref().is_some_and(|v| Arc::ptr_eq(v, view));
        let mut sorted = Sorted {
            begins: !same || sorting.pins != pins,
            ..Sorted::default()
        };
        if sorted.begins {
            *sorting = Sorting {
                view: Some(view.clone()),
                pins,
                next: Some(first_of(FileIndex(0))),
            };
        }
        let mut looks = 0;
        while let Some(start) = sorting.next
            && looks < LOOKS_MAX
            && sorted.orphans.len() < ORPHANS_MAX
        {
            let (held, next) = self.look_from(start);
            looks += LOOKS_AT_ONCE_MAX;
            let mut classes = Vec::with_capacity(held.len());
            for (key, class) in held {
                let is_own = view.is_own(self, self.extent(key));
                if !is_own && class != CopyClass::Secondary {
                    sorted.orphans.push(key);
                }
                classes.push((key, self.class_from(key, class, is_own)));
            }
            self.disk.reclassify(&classes)?;
            sorting.next = next;
        }
        Ok(sorted)
    }

    /// Blocks that are here, from a place on; and where to look next.
    fn look_from(&self, start: BlockKey) -> (Vec<(BlockKey, CopyClass)>, Option<BlockKey>) {
        let table = self.disk.table();
        let (mut held, mut looks) = (Vec::new(), 0);
        for file in table.files_from(start.file) {
            let Ok(entry) = self.manifest.file(file) else {
                continue;
            };
            let first = if file == start.file { start.block.0 } else { 0 };
            looks += 1;
            for block in (first..self.manifest.blocks_of(entry)).map(BlockIndex) {
                let key = BlockKey { file, block };
                if looks >= LOOKS_AT_ONCE_MAX {
                    return (held, Some(key));
                }
                looks += 1;
                held.extend(table.class_of(key).map(|class| (key, class)));
            }
        }
        (held, None)
    }
}

fn first_of(file: FileIndex) -> BlockKey {
    let block = BlockIndex(0);
    BlockKey { file, block }
}
