//! What the kernel may cache of a volume, by its kind. Decides nothing else.

use std::time::Duration;

use crate::limits::ATTRIBUTE_TTL;

/// What the kernel may cache, and for how long. The kind of the volume decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VolumeMode {
    /// How long names and attributes may be believed.
    pub attribute_ttl: Duration,
    /// Whether the absence of a name may be believed as long.
    pub has_negative_entries: bool,
    /// Whether the page cache keeps data; without it every read and write is an operation.
    pub has_page_cache: bool,
    /// Whether writing is impossible.
    pub is_read_only: bool,
    /// Whether files need not be opened: handles are inode numbers.
    pub is_stateless: bool,
    /// Whether they are opened all the same where the kernel can then read them by itself.
    pub has_passthrough: bool,
    /// Whether the kernel may answer writes from its memory, and send what it collected later.
    pub has_write_back: bool,
}

impl VolumeMode {
    /// A scratch volume: all changes come through this kernel, because it has one writer.
    pub fn scratch(writable: bool) -> Self {
        Self {
            attribute_ttl: ATTRIBUTE_TTL,
            has_negative_entries: true,
            has_page_cache: true,
            is_read_only: !writable,
            is_stateless: false,
            has_passthrough: false,
            has_write_back: false,
        }
    }

    /// A cache volume: nothing ever changes.
    pub fn cache() -> Self {
        Self {
            attribute_ttl: ATTRIBUTE_TTL,
            has_negative_entries: true,
            has_page_cache: true,
            is_read_only: true,
            is_stateless: true,
            has_passthrough: false,
            has_write_back: false,
        }
    }

    /// Remote I/O: others change the tree too, and nothing is kept.
    pub fn home(writable: bool) -> Self {
        Self {
            attribute_ttl: Duration::ZERO,
            has_negative_entries: false,
            has_page_cache: false,
            is_read_only: !writable,
            is_stateless: false,
            has_passthrough: false,
            has_write_back: false,
        }
    }
}
