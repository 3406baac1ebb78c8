//! What crossed the link more than once as a cache is too small for what its jobs read: the user is
//! told, and nothing is decided.

use bafs_workflow::VolumeIndex;

use crate::describe::{bytes_only, describe_bytes};
use crate::policy::View;

/// So many thousandths of a cache may come once more before anybody is told.
const REFETCHED_PERMILLE: u64 = 50;

impl View<'_> {
    /// What the user is told of a cache of which so many bytes came once more; nothing where they
    /// are few.
    pub(crate) fn describe_refetch(&self, volume: VolumeIndex, bytes: u64) -> Option<String> {
        let declared = self.size_of(volume).bytes;
        (bytes > declared / 1000 * REFETCHED_PERMILLE).then(|| {
            format!(
                "{} of volume '{}' crossed the home link again: a cache of {} is too small and \
                 evicts blocks that jobs read again; declare a size 10 % above that of its source",
                describe_bytes(bytes_only(bytes)),
                self.graph.workflow.volume(volume).name,
                describe_bytes(bytes_only(declared)),
            )
        })
    }
}
