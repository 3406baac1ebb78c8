//! Copies of volumes on other nodes, made by the node that gets them.

use bafs_proto::ids::VolumeId;
use bafs_proto::message::CreateVolume;
use bafs_proto::time::Time;
use bafs_proto::token::{Resource, Right};
use bafs_proto::volume::{VolumeSource, VolumeKind as Kind};
use bafs_proto::{Error, ErrorCode};

use super::servers::{Place, Servers, made};
use crate::logic::{Event, MountedVolume, Space};

/// A copy of a volume that is to be made.
#[derive(Debug)]
pub(crate) struct Copying {
    pub(crate) id: VolumeId,
    pub(crate) source: MountedVolume,
    /// Who has it; `None` with remote I/O.
    pub(crate) holder: Option<Place>,
    /// Where the copy goes.
    pub(crate) place: Place,
    pub(crate) size: Space,
    /// An older copy there.
    pub(crate) base: Option<VolumeId>,
}

impl Servers {
    /// Copies a volume from its holder to another node.
    pub(crate) async fn copy(&self, now: Time, copying: Copying) -> Vec<Event> {
        let Copying {
            id,
            source,
            holder,
            place,
            size,
            base,
        } = copying;
        let copied = async {
            let gone = || Error::new(ErrorCode::VolumeLost, "there is nothing to copy");
            let holder = holder.ok_or_else(gone)?;
            let source_token = self.give(now, Resource::Volume(source.id), &[Right::Read])?;
            let fill = Some(VolumeSource::Volume {
                address: holder.address,
                volume: source.id,
            });
            let spec = self.spec(id, source.volume, size, Kind::Scratch { fill });
            let call = CreateVolume {
                spec,
                server: Some(place.server),
                base,
                source_token,
            };
            self.make(&place, call).await
        };
        match copied.await {
            Ok(status) => {
                let copied = Event::VolumeCopied {
                    volume: id,
                    received_bytes: status.received_bytes,
                };
                made(status.warnings, id, copied)
            }
            Err(error) => vec![Event::VolumeCreateFailed { volume: id, error }],
        }
    }
}
