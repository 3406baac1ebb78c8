//! The sizes of the scratch volumes of a workflow.

/// One scratch volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ScratchSize {
    pub(super) bytes: u64,
    pub(super) files: u64,
}

/// Volumes of one size, and how many there are; the largest size first.
pub(super) type ScratchSizes = Vec<(ScratchSize, u64)>;
