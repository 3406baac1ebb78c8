//! How the kernel treats a volume: what it may keep, and whether it reads files by itself. The kind
//! of the volume and its access decide. Mounts nothing.

use std::time::Duration;

use crate::limits::ATTRIBUTE_TTL;
use crate::sandbox::Access;

/// What the kernel may keep of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KernelCache {
    /// Nothing, because others change the tree too. Each read and write is an operation.
    Uncached,
    /// Names, also absent ones, attributes and data: all changes come through this kernel. It sends
    /// each write at once.
    WriteThrough,
    /// As [`Self::WriteThrough`], and it may answer writes from its memory and send them later.
    WriteBack,
    /// As [`Self::WriteThrough`] of a tree that never changes, so files need not be opened: handles
    /// are inode numbers.
    Immutable,
}

impl KernelCache {
    /// How long the kernel may use names, present or absent, and attributes.
    pub(crate) fn attribute_ttl(self) -> Duration {
        match self.is_caching() {
            true => ATTRIBUTE_TTL,
            false => Duration::ZERO,
        }
    }

    /// Whether the kernel keeps anything.
    pub(crate) fn is_caching(self) -> bool {
        self != Self::Uncached
    }
}

/// Who reads the files of a volume for the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FileReads {
    /// The agent, request by request.
    Agent,
    /// The kernel itself, of files that are wholly on this machine, if it can (passthrough). These
    /// are opened, whatever the cache says.
    Passthrough,
}

/// How the kernel treats a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VolumeMode {
    /// Whether it may be written.
    pub access: Access,
    /// What the kernel may keep.
    pub kernel_cache: KernelCache,
    /// Who reads files.
    pub file_reads: FileReads,
}

impl VolumeMode {
    /// A scratch volume, which has one writer.
    pub fn scratch(access: Access) -> Self {
        Self::new(access, KernelCache::WriteThrough)
    }

    /// A scratch volume whose writes the kernel may collect.
    pub fn write_back() -> Self {
        Self::new(Access::ReadWrite, KernelCache::WriteBack)
    }

    /// A cache volume: nothing ever changes.
    pub fn cache() -> Self {
        Self::new(Access::ReadOnly, KernelCache::Immutable)
    }

    /// Remote I/O: others change the tree too.
    pub fn home(access: Access) -> Self {
        Self::new(access, KernelCache::Uncached)
    }

    fn new(access: Access, kernel_cache: KernelCache) -> Self {
        Self {
            access,
            kernel_cache,
            file_reads: FileReads::Agent,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_uncached_volumes_expire_attributes_at_once() {
        let ttl = |mode: VolumeMode| mode.kernel_cache.attribute_ttl();
        assert_eq!(ttl(VolumeMode::home(Access::ReadWrite)), Duration::ZERO);
        for mode in [
            VolumeMode::scratch(Access::ReadOnly),
            VolumeMode::write_back(),
            VolumeMode::cache(),
        ] {
            assert_eq!(ttl(mode), ATTRIBUTE_TTL, "{mode:?}");
        }
    }
}
