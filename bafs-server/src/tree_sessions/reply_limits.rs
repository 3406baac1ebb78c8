//! What the reply to a batch has room for.

use bafs_proto::file_op::FileOp;
use bafs_proto::limits::{
    BODY_BYTES_MAX, DIRECTORY_PAGE_BYTES_MAX, HEAD_BYTES_MAX, PATH_BYTES_MAX, XATTR_BYTES_MAX,
};

/// Most bytes of names and values in one reply; the other half of its header has room for the rest
/// of as many results as a batch can have.
const NAME_BYTES_MAX: usize = HEAD_BYTES_MAX as usize / 2;

/// Bytes that a batch reads at most, as far as they fit a reply.
pub(super) fn read_bytes_max(ops: &[FileOp]) -> usize {
    let bytes: u64 = ops
        .iter()
        .map(|op| match op {
            FileOp::Read { length, .. }
            | FileOp::ReadFile {
                bytes_max: length, ..
            } => u64::from(*length),
            _ => 0,
        })
        .sum();
    bytes.min(u64::from(BODY_BYTES_MAX)) as usize
}

/// Whether the most that `op` can answer still fits the reply, beside the bytes in its body and
/// the names and values in its header.
pub(super) fn has_room_for(op: &FileOp, body_bytes: usize, named_bytes: usize) -> bool {
    let more = match op {
        FileOp::Read { length, .. }
        | FileOp::ReadFile {
            bytes_max: length, ..
        } => {
            return body_bytes + *length as usize <= BODY_BYTES_MAX as usize;
        }
        FileOp::ReadDirectory { .. } | FileOp::ListDirectory { .. } => {
            DIRECTORY_PAGE_BYTES_MAX as usize
        }
        FileOp::GetXattr { .. } | FileOp::ListXattr { .. } => XATTR_BYTES_MAX,
        FileOp::ReadLink { .. } => PATH_BYTES_MAX,
        _ => return true,
    };
    named_bytes + more <= NAME_BYTES_MAX
}
