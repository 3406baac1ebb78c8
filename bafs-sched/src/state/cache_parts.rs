//! The least part of a cache that lets a node run its readers.

use crate::space::Space;

/// The least part of a cooperative cache that lets a node run its readers, in bytes: a few blocks,
/// as the others come from its peers. A smaller cache is kept whole.
pub(crate) const PART_BYTES_MIN: u64 = 256 << 10;

/// The least part of a cache of this size that a node can have.
pub(crate) fn floor(size: Space) -> Space {
    Space {
        bytes: size.bytes.min(PART_BYTES_MIN),
        ..size
    }
}

/// What a part of a cache has beyond the least part.
pub(crate) fn beyond_least(part: Space) -> Space {
    Space {
        files: 0,
        ..part.saturating_sub(floor(part))
    }
}
