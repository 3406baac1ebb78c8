//! Copies of volumes on other nodes, made by the node that gets them.

use bafs_proto::message::CreateVolume;
use bafs_proto::time::Time;
use bafs_proto::token::{Resource, Right};
use bafs_proto::volume::{Source, VolumeKind as Kind};
use bafs_proto::{Error, ErrorCode};

use super::servers::{Place, Servers};
use crate::logic::{Action, Event};

impl Servers {
    /// Copies a volume from its holder to another node.
    pub(crate) async fn copy(
        &self,
        now: Time,
        action: &Action,
        holder: Option<Place>,
        place: &Place,
    ) -> Event {
        let &Action::CopyVolume {
            id,
            source,
            size,
            base,
            ..
        } = action
        else {
            unreachable!("only copies come here");
        };
        let copied = async {
            let gone = || Error::new(ErrorCode::VolumeLost, "there is nothing to copy");
            let holder = holder.ok_or_else(gone)?;
            let source_token = self.give(now, Resource::Volume(source.id), &[Right::Read])?;
            let fill = Some(Source::Volume {
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
            self.make(place, call).await
        };
        match copied.await {
            Ok(status) => Event::VolumeCopied {
                volume: id,
                received_bytes: status.received_bytes,
            },
            Err(error) => Event::VolumeCreateFailed { volume: id, error },
        }
    }
}
