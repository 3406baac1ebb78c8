//! Changes the size of volumes, as the table decides. A volume has the old size or the new one,
//! also after a crash.

use std::sync::Arc;

use bafs_proto::volume::{ResizeVolume, VolumeKind, VolumeSpec, VolumeStatus};
use bafs_proto::{Error, ErrorCode, Result};
use bafs_tree::Limit;

use super::Storage;
use super::database::{TableChange, VolumeRecord};
use super::volume_errors::volume_lost_error;
use crate::clock;
use crate::errors::join_result;
use crate::logic::space::SpaceShortage;
use crate::logic::volumes::ResizeRefusal;

impl Storage {
    /// Gives a volume another size. Harmless to repeat.
    ///
    /// # Errors
    /// `VolumeLost`, `Busy` while it is being made, `NoSpaceBytes` and `NoSpaceFiles` with what is
    /// free, `WrongState` when a scratch volume holds more, `LeaseHeld` while an agent accounts for
    /// it, `Malformed` for a size of 0.
    pub async fn resize(self: &Arc<Self>, call: ResizeVolume) -> Result<VolumeStatus> {
        let id = call.volume;
        if call.size_bytes == 0 || call.size_files == Some(0) {
            let text = format!("the new size of volume {id} is 0");
            return Err(Error::new(ErrorCode::Malformed, text));
        }
        self.touch(id)?;
        let this = self.clone();
        // Not tied to the caller: what is reserved must be given back.
        let resizing = async move { this.resize_in_turn(call).await };
        join_result(tokio::spawn(resizing).await)?;
        self.get_volume(id).await
    }

    async fn resize_in_turn(&self, call: ResizeVolume) -> Result<()> {
        let id = call.volume;
        let _turn = self.lock_volume(id).await;
        let (before, after) = {
            let mut volumes = self.volumes();
            let row = volumes.get(id).cloned();
            let before = row.ok_or_else(|| volume_lost_error(id))?;
            let (bytes, files) = (call.size_bytes, call.size_files);
            let after = volumes.begin_resize(clock::now(), id, bytes, files);
            let after = after.map_err(|refusal| refusal_error(&call, refusal))?;
            let record = |spec| VolumeRecord {
                spec,
                manifest: before.manifest,
            };
            (record(before.spec.clone()), record(after))
        };
        // More room is durable before anybody uses it; less is in force before others get it.
        let grows = after.spec.size_bytes >= before.spec.size_bytes;
        let resized = match grows {
            true => self.record_size(&after, &before).await,
            false => self.apply_size(&before.spec, &after.spec).await,
        };
        let resized = match (resized, grows) {
            (Ok(()), true) => {
                let applied = self.apply_size(&before.spec, &after.spec).await;
                if applied.is_err() {
                    let _ = self.record_size(&before, &after).await;
                }
                applied
            }
            (Ok(()), false) => {
                let recorded = self.record_size(&after, &before).await;
                if recorded.is_err() {
                    let _ = self.apply_size(&after.spec, &before.spec).await;
                }
                recorded
            }
            (Err(error), _) => Err(error),
        };
        let is_done = resized.is_ok();
        self.volumes()
            .end_resize(clock::now(), &after.spec, is_done);
        self.limit_retained_data().await;
        self.notify();
        resized
    }

    async fn record_size(&self, after: &VolumeRecord, before: &VolumeRecord) -> Result<()> {
        let written = self
            .database
            .write(TableChange::PutVolume(after.clone()))
            .await;
        if written.is_err() {
            // It may be there or not after a restart; the old one is right either way.
            let _ = self
                .database
                .write(TableChange::PutVolume(before.clone()))
                .await;
        }
        written
    }

    async fn apply_size(&self, before: &VolumeSpec, after: &VolumeSpec) -> Result<()> {
        match &after.kind {
            VolumeKind::Scratch { .. } => {
                let limit = Limit {
                    bytes: after.size_bytes,
                    files: after.size_files,
                };
                self.trees.set_limit(before, limit).await
            }
            VolumeKind::Cache { .. } => {
                let (bytes, files) = (after.size_bytes, after.size_files);
                self.caches.resize(after.id, bytes, files).await
            }
        }
    }
}

fn refusal_error(call: &ResizeVolume, refusal: ResizeRefusal) -> Error {
    let id = call.volume;
    match refusal {
        ResizeRefusal::Absent => volume_lost_error(id),
        ResizeRefusal::NotReady => {
            let text = format!("volume {id} is still being created, or could not be");
            Error::new(ErrorCode::Busy, text)
        }
        ResizeRefusal::NoSpace(SpaceShortage::Bytes(free)) => {
            let text = format!(
                "volume {id} cannot have {} bytes: {free} more are free",
                call.size_bytes
            );
            Error::new(ErrorCode::NoSpaceBytes, text)
        }
        ResizeRefusal::NoSpace(SpaceShortage::Files(free)) => {
            let text = format!("volume {id} cannot have so many files: {free} more are free");
            Error::new(ErrorCode::NoSpaceFiles, text)
        }
    }
}
