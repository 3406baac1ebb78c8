//! Which attempts are on a node, and which read a part of a cache: known without a look at all
//! attempts, of which there are as many as slots. Starts and ends none.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::ids::{ServerId, VolumeId};
use bafs_workflow::JobIndex;

/// Jobs with an attempt under way. Empty sets are not kept.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct UnderWay {
    on: BTreeMap<ServerId, BTreeSet<JobIndex>>,
    readers: BTreeMap<VolumeId, BTreeSet<JobIndex>>,
}

impl UnderWay {
    /// An attempt begins that reads these parts of caches.
    pub(crate) fn begin(
        &mut self,
        job: JobIndex,
        server: ServerId,
        caches: impl Iterator<Item = VolumeId>,
    ) {
        self.on.entry(server).or_default().insert(job);
        for id in caches {
            self.readers.entry(id).or_default().insert(job);
        }
    }

    /// It has ended.
    pub(crate) fn end(
        &mut self,
        job: JobIndex,
        server: ServerId,
        caches: impl Iterator<Item = VolumeId>,
    ) {
        take(&mut self.on, server, job);
        for id in caches {
            take(&mut self.readers, id, job);
        }
    }

    /// Jobs of attempts on a node.
    pub(crate) fn on(&self, server: ServerId) -> Vec<JobIndex> {
        self.on
            .get(&server)
            .into_iter()
            .flatten()
            .copied()
            .collect()
    }

    /// Jobs of attempts that read a part of a cache.
    pub(crate) fn readers(&self, id: VolumeId) -> Vec<JobIndex> {
        let readers = self.readers.get(&id).into_iter().flatten();
        readers.copied().collect()
    }
}

fn take<K: Ord>(jobs: &mut BTreeMap<K, BTreeSet<JobIndex>>, key: K, job: JobIndex) {
    let Some(there) = jobs.get_mut(&key) else {
        return;
    };
    there.remove(&job);
    if there.is_empty() {
        jobs.remove(&key);
    }
}
