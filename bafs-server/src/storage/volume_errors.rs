//! What the work on a volume says when it fails. Decides nothing.

use bafs_proto::ids::VolumeId;
use bafs_proto::{Error, ErrorCode};

use crate::errors::disk_error;

/// A volume that was deleted, or never made.
pub(super) fn volume_lost_error(id: VolumeId) -> Error {
    let text = format!("volume {id} does not exist here");
    Error::new(ErrorCode::VolumeLost, text)
}

/// A disk that refuses a part of what a volume is filled with.
pub(super) fn fill_disk_error(path: &str, error: &std::io::Error) -> Error {
    disk_error(format!("cannot make '{path}' in the store"), error)
}
