//! What crossed the link more than once as a cache is too small for what its jobs read: the user is
//! told, and nothing is decided.

use bafs_proto::ids::VolumeId;

use crate::describe::{bytes_only, describe_bytes};
use crate::state::observed_access::RunWarning;
use crate::state::scheduler_state::State;

/// So many thousandths of a cache may come once more before anybody is told.
const AGAIN_PERMILLE: u64 = 50;

impl State {
    /// A part of a cache got so many bytes once more since its node started.
    pub(crate) fn note_again(&mut self, id: VolumeId, bytes: u64) {
        let Some(volume) = self.volumes.get(id).map(|instance| instance.volume) else {
            return;
        };
        let again = self.skew.again.note(volume, id, bytes);
        let declared = self.size_of(volume).bytes;
        if again <= declared / 1000 * AGAIN_PERMILLE {
            return;
        }
        self.skew.again.parts.remove(&volume);
        self.skew.again.told.insert(volume);
        let text = format!(
            "{} of volume '{}' crossed the home link again: a cache of {} is too small and evicts \
             blocks that jobs read again; declare a size 10 % above that of its source",
            describe_bytes(bytes_only(again)),
            self.graph.workflow.volume(volume).name,
            describe_bytes(bytes_only(declared)),
        );
        self.tell(RunWarning {
            job: None,
            volume: Some(volume),
            node: None,
            text,
        });
    }
}
