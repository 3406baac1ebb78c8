//! The map in shared memory from which agents on this machine learn which blocks they may read.
//! Opens no socket.

use std::fs::File;
use std::os::fd::OwnedFd;

use bafs_proto::ids::{BlockIndex, FileIndex};
use bafs_proto::{Error, ErrorCode, Result};
use bafs_tree::{BlockLayout, BlockMap};
use rustix::fs::{FlockOperation, flock};

use super::disk::CacheDisk;
use super::former_agents::open_users;
use super::manifest::Manifest;
use crate::cache::errors::{disk_fault, source_changed};
use crate::logic::blocks::{BlockChange, BlockKey};

/// The map of the blocks of one generation, and what agents report in it.
pub(super) struct AgentMap {
    map: BlockMap,
    files: [OwnedFd; 2],
    /// What agents had read without a request at the last count, in KiB and in blocks.
    counted: [u32; 2],
}

impl AgentMap {
    fn create(manifest: &Manifest) -> Result<Self> {
        let layout = BlockLayout::from_manifest(manifest.entries(), manifest.block_bytes());
        let layout = layout.ok_or_else(|| {
            let text = "the volume has too many blocks for a map";
            Error::new(ErrorCode::Unsupported, text)
        })?;
        let (map, files) = BlockMap::create(layout)
            .map_err(|e| Error::new(ErrorCode::ServerFault, format!("make a block map: {e}")))?;
        Ok(Self {
            map,
            files,
            counted: [0; 2],
        })
    }

    /// Publishes changes, in order.
    pub(super) fn publish(&self, changes: impl IntoIterator<Item = BlockChange>) {
        for (key, change) in changes {
            self.map.set_block(key.file.0, key.block.0, change);
        }
    }

    /// Whether an agent found wrong bytes in a block since the last call.
    pub(super) fn take_mismatch(&self, key: BlockKey) -> bool {
        self.map.take_mismatch(key.file.0, key.block.0)
    }

    /// Blocks that agents used since the last call.
    pub(super) fn take_uses(&self) -> Vec<BlockKey> {
        let key = |(file, block)| BlockKey {
            file: FileIndex(file),
            block: BlockIndex(block),
        };
        self.map.take_used_blocks().into_iter().map(key).collect()
    }
}

impl CacheDisk {
    /// What an agent on this machine needs to read blocks without a request: the directory of their
    /// files, the two files of the map, and its share of the users' lock (waits for the disk).
    ///
    /// # Errors
    /// `SourceChanged` when the generation has ended, `Unsupported` when there are too many blocks
    /// for a map, `ServerFault` when the disk fails.
    pub(crate) fn open_for_agent(&self, manifest: &Manifest) -> Result<Vec<OwnedFd>> {
        let retired = self.retired();
        if *retired {
            return Err(source_changed());
        }
        let broken = |e| disk_fault("share the blocks", &self.directory, e);
        let users = open_users(&self.directory).map_err(broken)?;
        flock(&users, FlockOperation::NonBlockingLockShared).map_err(|e| broken(e.into()))?;
        let directory = File::open(self.directory.join("blocks")).map_err(broken)?;
        let mut table = self.table();
        if table.agent_map().is_none() {
            let map = AgentMap::create(manifest)?;
            map.publish(table.start_change_log());
            *table.agent_map() = Some(map);
        }
        let mut files = vec![OwnedFd::from(directory)];
        for file in table.agent_map().iter().flat_map(|map| &map.files) {
            files.push(file.try_clone().map_err(broken)?);
        }
        files.push(users.into());
        Ok(files)
    }

    /// Adds what agents read without a request to the counters.
    pub(crate) fn count_agent_reads(&self) {
        let mut table = self.table();
        if let Some(agents) = table.agent_map() {
            let now = agents.map.read_counts();
            let before = std::mem::replace(&mut agents.counted, now);
            let [kib, blocks] = [0, 1].map(|n| u64::from(now[n].wrapping_sub(before[n])));
            self.counters.add("cache_hit_local_bytes", kib << 10);
            self.counters.add("cache_hits_local", blocks);
        }
    }
}
