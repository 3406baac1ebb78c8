//! Volumes that a start makes.

use bafs_proto::ids::ServerId;
use bafs_workflow::VolumeIndex;

use crate::space::Space;

/// A volume to create: which, where, how large.
pub(crate) type Create = (VolumeIndex, Option<ServerId>, Space);

/// Whether a start may leave pipelines that wait for each other's space.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Care {
    /// Never.
    Safe,
    /// Where nothing else goes on, and nobody knows of a better place.
    None,
}
