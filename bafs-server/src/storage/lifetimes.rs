//! How long volumes live: whose interest puts off their end, and which give way to others.

use std::collections::BTreeSet;
use std::sync::Arc;

use bafs_proto::ids::VolumeId;
use bafs_proto::message::{RenewVolumes, RenewVolumesReply};
use bafs_proto::volume::{VolumeKind, VolumeSpec};
use bafs_proto::{Error, ErrorCode, Result};

use super::Storage;
use super::database::{TableChange, VolumeRecord};
use super::lifecycle::LIFETIME_MS_MAX;
use crate::clock;

impl Storage {
    /// Deletes volumes that give way, so that a new one has room soon.
    pub(super) fn evict_for(self: &Arc<Self>, spec: &VolumeSpec) {
        let evicted = self.volumes().choose_evictions(spec);
        for id in evicted {
            tracing::info!(volume = %id, "a kept volume gives way");
            tokio::spawn(self.clone().end_volume(id));
        }
    }

    /// Deletes all volumes that give way: the node is to be empty soon.
    pub(crate) fn evict_kept(self: &Arc<Self>) {
        let evicted: Vec<VolumeId> = self.volumes().giving_way().collect();
        for id in evicted {
            tracing::info!(volume = %id, "a kept volume is deleted, as the node drains");
            tokio::spawn(self.clone().end_volume(id));
        }
    }

    /// Whether there is a scratch volume that does not give way.
    pub(crate) fn has_wanted_scratch(&self) -> bool {
        let volumes = self.volumes();
        let kept: BTreeSet<VolumeId> = volumes.giving_way().collect();
        volumes.rows().any(|row| {
            let is_scratch = matches!(row.spec.kind, VolumeKind::Scratch { .. });
            is_scratch && !kept.contains(&row.spec.id)
        })
    }

    /// Puts off the end of life of volumes, and names those that are gone.
    ///
    /// # Errors
    /// `ServerFault` when a longer lifetime cannot be made durable.
    pub async fn renew(self: &Arc<Self>, call: RenewVolumes) -> Result<RenewVolumesReply> {
        let asked = call.volumes.iter().copied();
        let (lost, changed): (Vec<VolumeId>, Vec<VolumeId>) = {
            let (now, mut volumes) = (clock::now(), self.volumes());
            let renewed = |id: &VolumeId| !volumes.renew(now, *id);
            let lost = asked.clone().filter(renewed).collect();
            let changes = |id: &VolumeId| volumes.set_giving_way(now, *id, call.gives_way);
            (lost, asked.clone().filter(changes).collect())
        };
        // A disk that refuses must not end what was put off.
        let mut kept = Ok(());
        for id in changed {
            let gives_way = call.gives_way;
            let change = TableChange::SetGivingWay { id, gives_way };
            kept = kept.and(self.database.write(change).await);
        }
        for id in asked {
            kept = kept.and(self.extend_lifetime(id, call.lifetime_ms).await);
        }
        kept.map(|()| RenewVolumesReply { lost_volumes: lost })
    }

    /// Sees to it that the lifetime of a volume is at least so long, also after a restart.
    ///
    /// # Errors
    /// `ServerFault` when that cannot be made durable; repeat it then.
    pub(super) async fn extend_lifetime(
        self: &Arc<Self>,
        id: VolumeId,
        lifetime_ms: u64,
    ) -> Result<()> {
        let lifetime_ms = lifetime_ms.min(LIFETIME_MS_MAX);
        if self
            .volumes()
            .plan_lifetime_extension(id, lifetime_ms)
            .is_none()
        {
            return Ok(());
        }
        let this = self.clone();
        // Not tied to the caller: what is written down must be known.
        let kept = tokio::spawn(async move {
            let _turn = this.lock_volume(id).await;
            let Some((spec, manifest)) = this.volumes().plan_lifetime_extension(id, lifetime_ms)
            else {
                return Ok(());
            };
            let record = VolumeRecord { spec, manifest };
            this.database.write(TableChange::PutVolume(record)).await?;
            this.volumes()
                .extend_lifetime(clock::now(), id, lifetime_ms);
            Ok(())
        });
        kept.await
            .unwrap_or_else(|e| Err(Error::new(ErrorCode::ServerFault, format!("keep: {e}"))))
    }
}
