//! Which way the operations of a volume go. Takes none of them.

/// The path from the kernel to the files of a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DataPath {
    /// In this process, on the directory itself. Operations mostly end in the thread that began
    /// them.
    Inline,
    /// By calls to a server.
    Remote,
    /// By the kernel alone.
    BindMounted,
    /// Names from memory, data in blocks: of this machine, or by calls.
    Cached,
}
