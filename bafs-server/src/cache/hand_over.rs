//! What of a cache volume is handed over to an agent on the same machine; opens no socket.

use bafs_proto::hash::Digest;
use bafs_proto::ids::VolumeId;
use bafs_proto::{Error, ErrorCode, Result};

use super::Caches;
use crate::door::Grant;

impl Caches {
    /// What makes the hand-over of a cache volume, when its agent is at the door.
    ///
    /// # Errors
    /// `VolumeLost`, `SourceChanged` when the volume shows another state of its source,
    /// `Unsupported` when nothing is handed over.
    pub fn grant(&self, volume: VolumeId, manifest: Digest) -> Result<Grant> {
        if self.volume(volume)?.generation().manifest.digest() != manifest {
            let text = format!("volume {volume} shows another state of its source by now");
            return Err(Error::new(ErrorCode::SourceChanged, text));
        }
        let text = "this node hands no cache volume over; use the network";
        Err(Error::new(ErrorCode::Unsupported, text))
    }
}
