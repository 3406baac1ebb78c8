//! Reclassifies blocks when peers come and go, or paths are pinned: a bounded number at a time, so
//! that readers never notice. A block with another primary node now becomes a secondary copy when
//! that node has it. Fetches and frees nothing.

use std::collections::BTreeSet;
use std::sync::Arc;

use bafs_proto::Result;
use bafs_proto::cache::CacheMember;
use bafs_proto::hash::Digest;
use bafs_proto::ids::{BlockIndex, FileIndex};
use bafs_proto::message::{Probe, ProbePurpose};
use bafs_proto::time::Deadline;

use super::members::{ClassPass, Membership};
use super::placement_view::PlacementView;
use crate::cache::errors::run_blocking;
use crate::cache::fetch::fetcher::Fetcher;
use crate::cache::generation::Generation;
use crate::cache::locks::lock;
use crate::cache::store::block_store::BlockStore;
use crate::logic::blocks::{BlockKey, CopyClass};

/// Most blocks that are looked at in one go, and while the table is held.
const LOOKS_MAX: u64 = 1 << 16;
const LOOKS_AT_ONCE_MAX: u64 = 1 << 12;

/// In one go, about so many blocks with another primary node now are looked for there.
const ORPHANS_MAX: usize = 1 << 12;

/// Time for a server to say which blocks it has, in milliseconds.
const PROBE_MS_MAX: u64 = 1_000;

/// The result of one step of a pass.
#[derive(Default)]
struct ClassStep {
    /// The pass begins with it.
    begins: bool,
    /// Blocks that keep the class of a primary block, though another server is their primary node:
    /// it may lack them.
    orphans: Vec<BlockKey>,
}

impl Fetcher {
    /// Takes a step of the pass over all blocks. Tells whether the pass begins with it.
    ///
    /// # Errors
    /// `ServerFault` when the disk fails.
    pub(crate) async fn update_classes(&self, generation: &Arc<Generation>) -> Result<bool> {
        let view = self.view(generation).await?;
        let (store, membership) = (generation.store.clone(), generation.membership.clone());
        let seen = view.clone();
        let step = run_blocking(move || {
            if let Err(error) = store.disk.free_queued() {
                tracing::warn!(%error, "space of dropped blocks is not free yet");
            }
            membership.step_class_pass(&store, &seen)
        });
        let ClassStep { begins, orphans } = step.await??;
        let mut silent = BTreeSet::new();
        let extent = |key: &BlockKey| view.extent(*key);
        for keys in orphans.chunk_by(|one, next| extent(one) == extent(next)) {
            let owner = view.owner(extent(&keys[0]));
            let Some(peer) = view.peer(owner).filter(|_| !silent.contains(&owner)) else {
                continue;
            };
            match self.find_held_by(generation, peer, keys).await {
                Ok(held) => {
                    let classes = held.into_iter().map(|key| (key, CopyClass::Secondary));
                    generation.store.reclassify(classes.collect()).await?;
                }
                Err(error) => {
                    tracing::debug!(peer = %peer.address, %error, "a primary node is silent");
                    silent.insert(owner);
                }
            }
        }
        Ok(begins)
    }

    /// Which of these blocks of one extent a peer has.
    async fn find_held_by(
        &self,
        generation: &Generation,
        peer: &CacheMember,
        keys: &[BlockKey],
    ) -> Result<Vec<BlockKey>> {
        let (first, last) = (keys[0], keys[keys.len() - 1]);
        let count = last.block.0 - first.block.0 + 1;
        let run = generation.store.run(first.file, first.block.0, count)?;
        let probe = Probe {
            range: generation.range_of(&run),
            purpose: ProbePurpose::Presence,
            must_verify: false,
        };
        let deadline = Deadline::after_ms(PROBE_MS_MAX);
        let reply = self.pool.call(&peer.address, &self.token, probe, deadline);
        let digests = reply.await?.digests;
        let is_held = |key: &&BlockKey| {
            let digest = digests.get((key.block.0 - run.first) as usize);
            digest.is_some_and(|digest| *digest != Digest::ABSENT)
        };
        Ok(keys.iter().filter(is_held).copied().collect())
    }
}

impl Membership {
    /// Brings some classes up to date (waits for the disk).
    ///
    /// # Errors
    /// `ServerFault` when the disk fails.
    fn step_class_pass(&self, store: &BlockStore, view: &Arc<PlacementView>) -> Result<ClassStep> {
        let mut pass = lock(&self.class_pass);
        let pins = store.pins.version();
        let is_same = pass.view.as_ref().is_some_and(|v| Arc::ptr_eq(v, view));
        let mut step = ClassStep {
            begins: !is_same || pass.pins != pins,
            ..ClassStep::default()
        };
        if step.begins {
            *pass = ClassPass {
                view: Some(view.clone()),
                pins,
                next: Some(BlockKey {
                    file: FileIndex(0),
                    block: BlockIndex(0),
                }),
            };
        }
        let mut looks = 0;
        while let Some(start) = pass.next
            && looks < LOOKS_MAX
            && step.orphans.len() < ORPHANS_MAX
        {
            let (stored, next) = list_from(store, start);
            looks += LOOKS_AT_ONCE_MAX;
            let mut classes = Vec::with_capacity(stored.len());
            for (key, class) in stored {
                let is_primary = view.is_own(view.extent(key));
                let is_secondary = class == CopyClass::Secondary;
                if !is_primary && !is_secondary {
                    step.orphans.push(key);
                }
                // A block with another primary node now may be the only copy. It keeps its class
                // until that node has it.
                let class = store.class_of(key.file, is_primary || !is_secondary);
                classes.push((key, class));
            }
            store.disk.reclassify(&classes)?;
            pass.next = next;
        }
        Ok(step)
    }
}

/// Blocks that are here, from one block on; and the next block to look at.
fn list_from(
    store: &BlockStore,
    start: BlockKey,
) -> (Vec<(BlockKey, CopyClass)>, Option<BlockKey>) {
    let table = store.disk.table();
    let (mut stored, mut looks) = (Vec::new(), 0);
    for file in table.files_from(start.file) {
        let Ok(entry) = store.manifest.file(file) else {
            continue;
        };
        let first = if file == start.file { start.block.0 } else { 0 };
        looks += 1;
        for block in (first..store.manifest.blocks_of(entry)).map(BlockIndex) {
            let key = BlockKey { file, block };
            if looks >= LOOKS_AT_ONCE_MAX {
                return (stored, Some(key));
            }
            looks += 1;
            stored.extend(table.class_of(key).map(|class| (key, class)));
        }
    }
    (stored, None)
}
