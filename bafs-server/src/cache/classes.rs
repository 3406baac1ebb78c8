//! Keeps the classes of blocks right when peers come and go, and when paths are pinned: a bounded
//! number at a time, so that it never disturbs. Fetches and frees nothing.

use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};

use bafs_proto::Result;
use bafs_proto::ids::{BlockIndex, FileIndex};

use super::fetch::Generation;
use super::route::View;
use super::{Caches, blocking, warm};
use crate::logic::blocks::{BlockKey, CopyClass};

/// Most blocks that are looked at in one go, and while the table is held.
const LOOKS_MAX: u64 = 1 << 16;
const LOOKS_AT_ONCE_MAX: u64 = 1 << 12;

/// For what the classes are right, and how far the present pass is.
#[derive(Default)]
pub(crate) struct Sorting {
    view: Option<Arc<View>>,
    pins: u64,
    /// Where the pass goes on; `None` when it is over.
    next: Option<BlockKey>,
}

impl Caches {
    /// Goes on with what is done bit by bit: classes of blocks, warming of pinned paths. To be
    /// called every second or so.
    pub async fn tick(self: &Arc<Self>) {
        let volumes: Vec<_> = self.lock().values().cloned().collect();
        for volume in volumes {
            let (id, generation) = (volume.spec().id, volume.generation());
            let sorted = async {
                let view = self.fetcher.view(&generation).await?;
                let generation = generation.clone();
                blocking(move || {
                    if let Err(error) = generation.disk.tidy() {
                        tracing::warn!(%error, "space of dropped blocks is not free yet");
                    }
                    generation.sort(&view)
                })
                .await?
            };
            match sorted.await {
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

    /// Brings some classes up to date (waits for the disk). Tells whether this begins a pass over
    /// all blocks.
    ///
    /// # Errors
    /// `ServerFault` when the disk does not do it.
    pub(crate) fn sort(&self, view: &Arc<View>) -> Result<bool> {
        let mut sorting = self.sorting.lock().unwrap_or_else(PoisonError::into_inner);
        let pins = self.pins.version();
        let same = sorting.view.as_ref().is_some_and(|v| Arc::ptr_eq(v, view));
        let begins = !same || sorting.pins != pins;
        if begins {
            *sorting = Sorting {
                view: Some(view.clone()),
                pins,
                next: Some(first_of(FileIndex(0))),
            };
        }
        let mut looks = 0;
        while let Some(start) = sorting.next.filter(|_| looks < LOOKS_MAX) {
            let (held, next) = self.look_from(start);
            looks += LOOKS_AT_ONCE_MAX;
            let class = |key: &BlockKey| {
                let is_own = view.is_own(self, self.extent(*key));
                (*key, self.class_of(key.file, is_own))
            };
            let classes: Vec<_> = held.iter().map(class).collect();
            self.disk.reclassify(&classes)?;
            sorting.next = next;
        }
        Ok(begins)
    }

    /// Blocks that are here, from a place on; and where to look next.
    fn look_from(&self, start: BlockKey) -> (Vec<BlockKey>, Option<BlockKey>) {
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
                if table.holds(key) {
                    held.push(key);
                }
            }
        }
        (held, None)
    }
}

fn first_of(file: FileIndex) -> BlockKey {
    let block = BlockIndex(0);
    BlockKey { file, block }
}
