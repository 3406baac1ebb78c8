//! Copies of volumes on other nodes, made by the node that gets them.

use bafs_proto::ids::VolumeId;
use bafs_proto::message::CreateVolume;
use bafs_proto::time::Time;
use bafs_proto::token::{Resource, Right};
use bafs_proto::volume::{VolumeKind as Kind, VolumeSource};
use bafs_proto::{Error, ErrorCode};

use super::servers::{ServerAddress, Servers, created_events};
use crate::{Event, MountedVolume, Space};

/// A copy of a volume that is to be made.
#[derive(Debug)]
pub(crate) struct CopyRequest {
    pub(crate) id: VolumeId,
    pub(crate) source: MountedVolume,
    /// Who has it; `None` with remote I/O.
    pub(crate) source_address: Option<ServerAddress>,
    /// Where the copy goes.
    pub(crate) target_address: ServerAddress,
    pub(crate) size: Space,
    /// An older copy there.
    pub(crate) base_copy: Option<VolumeId>,
}

impl Servers {
    /// Copies a volume from its holder to another node.
    pub(crate) async fn copy_volume(&self, now: Time, copying: CopyRequest) -> Vec<Event> {
        let CopyRequest {
            id,
            source,
            source_address: holder,
            target_address: place,
            size,
            base_copy: base,
        } = copying;
        let copied = async {
            let gone = || Error::new(ErrorCode::VolumeLost, "the source volume no longer exists");
            let holder = holder.ok_or_else(gone)?;
            let source_token =
                self.issue_token(now, Resource::Volume(source.id), &[Right::Read])?;
            let fill = Some(VolumeSource::Volume {
                address: holder.address,
                volume: source.id,
            });
            let spec = self.volume_spec(id, source.volume, size, Kind::Scratch { fill });
            let call = CreateVolume {
                spec,
                server: Some(place.server),
                base,
                source_token,
            };
            self.call_create(&place, call).await
        };
        match copied.await {
            Ok(status) => {
                let copied = Event::VolumeCopied {
                    volume: id,
                    received_bytes: status.received_bytes,
                };
                created_events(status.warnings, id, copied)
            }
            Err(error) => vec![Event::VolumeCreateFailed { volume: id, error }],
        }
    }
}
