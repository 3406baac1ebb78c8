//! Free space of a volume as its one writer counts it: an operation is answered early only if what
//! it may cost is there beside all that the log and the server's own operations may still take.

use bafs_proto::file_op::FileOp;

use super::attribute_updates::is_change;
use super::delegation::Delegation;
use super::operation_log::Space;

/// Nearer to the volume's limit every operation is left to the server, which counts exactly.
const SPACE_MARGIN: Space = Space {
    bytes: 1 << 20,
    files: 16,
};

impl Delegation {
    /// Whether space is sure for an operation beside all that is in the log.
    pub(super) fn has_space(&self, cost: Space) -> bool {
        let promised = self.log.promised_space();
        let bytes = promised.bytes + self.query_space.bytes + cost.bytes + SPACE_MARGIN.bytes;
        let files = promised.files + self.query_space.files + cost.files + SPACE_MARGIN.files;
        cost == Space::default()
            || (bytes <= self.free_space.bytes && files <= self.free_space.files)
    }

    /// The server will be asked something itself: from now on nobody is promised the space that it
    /// may take.
    pub fn reserve_space(&mut self, op: &FileOp) {
        let cost = space_cost(op);
        self.query_space.bytes += cost.bytes;
        self.query_space.files += cost.files;
    }

    /// The server has answered it: what was reserved is taken now.
    pub(super) fn end_reservation(&mut self, op: &FileOp) {
        let cost = space_cost(op);
        self.query_space.bytes -= cost.bytes;
        self.query_space.files -= cost.files;
        if cost != Space::default() {
            self.spend_space(cost);
            self.query_count += 1;
        }
    }

    /// What was free before may be taken now, until the server tells.
    pub(super) fn spend_space(&mut self, cost: Space) {
        self.free_space.bytes = self.free_space.bytes.saturating_sub(cost.bytes);
        self.free_space.files = self.free_space.files.saturating_sub(cost.files);
    }

    /// Counts the operations that took space without the log: what the server tells together with
    /// a batch includes those that this counted when the batch was sent.
    pub fn query_count(&self) -> u64 {
        self.query_count
    }

    /// The server told what is free, after all that is settled now; `spent` is the count when it
    /// was asked.
    pub fn set_free_space(&mut self, free_space: Space, spent: u64) {
        self.free_space = if spent == self.query_count {
            free_space
        } else {
            Space {
                bytes: free_space.bytes.min(self.free_space.bytes),
                files: free_space.files.min(self.free_space.files),
            }
        };
    }
}

/// The most space that an operation can take, other than by what is in the log.
fn space_cost(op: &FileOp) -> Space {
    /// Larger than what a name, a link's target or an attribute costs on any file system.
    const SOME_BYTES: u64 = 128 << 10;
    let bytes = match op {
        FileOp::Write { data, .. } => u64::from(data.length) + SOME_BYTES,
        FileOp::Allocate { length, .. } | FileOp::CopyRange { length, .. } => {
            length.saturating_add(SOME_BYTES).min(u64::MAX >> 8)
        }
        op if is_change(op) => SOME_BYTES,
        _ => 0,
    };
    let files = u64::from(is_change(op));
    Space { bytes, files }
}
