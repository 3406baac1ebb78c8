//! Epochs that homes issue to this run. Each upload has a fence of an epoch and its order in the
//! run, and no home replaces a file by one with an earlier fence. So a node that the run gave up
//! cannot overwrite a later result, however late it goes on. Sends no file.
//!
//! A home server is asked once, by the first node that sends something there. It is asked again
//! when it refuses an upload, because another run was later. A directory that nodes reach by
//! themselves is asked for each upload. Other homes know no order.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use bafs_proto::ids::{ExtractionId, UploadEpoch};
use bafs_proto::message::{IssueUploadEpoch, UploadFence};
use bafs_proto::{Error, ErrorCode, Result};

use super::homes::HomePath;
use super::servers::{ServerAddress, Servers};

/// A node has so long for the answer of a home, in milliseconds. It gives up a home that is silent
/// for 20 s, and says so.
const EPOCH_TIMEOUT_MS: u64 = 30_000;

/// Epochs by home, for all tasks of a run.
#[derive(Debug, Default)]
pub(crate) struct UploadEpochs(Mutex<BTreeMap<String, HomeEpoch>>);

/// The epoch of a run at one home.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HomeEpoch {
    epoch: UploadEpoch,
    /// Uploads from this one on may have it.
    first_order: u64,
    /// The last upload that has it.
    last_order: u64,
    /// The home refused an upload that has it.
    is_refused: bool,
}

/// What an upload does with the epoch of its home.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum EpochUse {
    Reuse(UploadEpoch),
    Renew,
    /// A later upload of this run has an epoch already, which this one must not exceed.
    Overtaken,
}

impl HomeEpoch {
    /// The epoch that an upload was issued, after a former one.
    fn after(former: Option<Self>, epoch: UploadEpoch, order: u64) -> Self {
        Self {
            epoch,
            // What an earlier scheduler of the run sent has an earlier epoch.
            first_order: former.map_or(0, |former| former.last_order + 1),
            last_order: order,
            is_refused: false,
        }
    }

    fn use_for(&mut self, order: u64) -> EpochUse {
        if order < self.first_order || (self.is_refused && order <= self.last_order) {
            return EpochUse::Overtaken;
        }
        if self.is_refused {
            return EpochUse::Renew;
        }
        self.last_order = self.last_order.max(order);
        EpochUse::Reuse(self.epoch)
    }
}

impl UploadEpochs {
    /// What an upload does, which was issued an epoch if none was there before.
    fn use_for(&self, home: &HomePath, order: u64, issued: Option<UploadEpoch>) -> EpochUse {
        let mut homes = self.homes();
        let known = homes.get_mut(&home_key(home));
        let (known, choice) = match known {
            Some(known) => (Some(*known), known.use_for(order)),
            None => (None, EpochUse::Renew),
        };
        let is_later = |epoch: &UploadEpoch| known.is_none_or(|known| *epoch > known.epoch);
        match issued.filter(is_later) {
            // Others may have asked meanwhile, and were first.
            Some(epoch) if choice == EpochUse::Renew => {
                homes.insert(home_key(home), HomeEpoch::after(known, epoch, order));
                EpochUse::Reuse(epoch)
            }
            _ => choice,
        }
    }

    /// Notes that a home refused an upload with this fence.
    pub(super) fn refuse(&self, home: &HomePath, fence: Option<UploadFence>) {
        if let (Some(known), Some(fence)) = (self.homes().get_mut(&home_key(home)), fence)
            && known.epoch == fence.epoch
        {
            known.is_refused = true;
        }
    }

    fn homes(&self) -> MutexGuard<'_, BTreeMap<String, HomeEpoch>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Servers {
    /// The fence of an upload that the run has decided, if its home knows an order.
    ///
    /// # Errors
    /// `HomeUnreachable`; `UploadFenced` when a later upload of this run was first; what home and
    /// node answer.
    pub(super) async fn upload_fence(
        &self,
        home: &HomePath,
        node: &ServerAddress,
        extract: ExtractionId,
    ) -> Result<Option<UploadFence>> {
        let order = extract.counter();
        let epoch = match home.is_server() {
            true => Some(self.home_epoch(home, node, order).await?),
            false => match self.issue_epoch(home, node).await {
                Err(error) if error.code == ErrorCode::Unsupported => None,
                issued => Some(issued?),
            },
        };
        Ok(epoch.map(|epoch| UploadFence { epoch, order }))
    }

    async fn home_epoch(
        &self,
        home: &HomePath,
        node: &ServerAddress,
        order: u64,
    ) -> Result<UploadEpoch> {
        let mut issued = None;
        loop {
            match self.upload_epochs.use_for(home, order, issued) {
                EpochUse::Reuse(epoch) => return Ok(epoch),
                EpochUse::Renew => issued = Some(self.issue_epoch(home, node).await?),
                EpochUse::Overtaken => {
                    let text = "a later upload of this run was first";
                    return Err(Error::new(ErrorCode::UploadFenced, text));
                }
            }
        }
    }

    async fn issue_epoch(&self, home: &HomePath, node: &ServerAddress) -> Result<UploadEpoch> {
        let call = IssueUploadEpoch {
            home_address: Some(home.address.clone()),
            home_id: home.id,
            path: home.path.clone(),
        };
        let issued = self.call_until(&node.address, call, EPOCH_TIMEOUT_MS);
        Ok(issued.await?.epoch)
    }
}

fn home_key(home: &HomePath) -> String {
    match home.id {
        Some(id) => id.to_string(),
        None => home.address.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn later_uploads_never_get_earlier_epochs() {
        let mut known = HomeEpoch::after(None, UploadEpoch(5), 10);
        for order in [12, 9] {
            assert_eq!(known.use_for(order), EpochUse::Reuse(UploadEpoch(5)));
        }
        known.is_refused = true;
        assert_eq!(known.use_for(11), EpochUse::Overtaken, "12 has the epoch");
        assert_eq!(known.use_for(14), EpochUse::Renew);
        let mut known = HomeEpoch::after(Some(known), UploadEpoch(6), 14);
        assert_eq!(known.use_for(12), EpochUse::Overtaken);
        assert_eq!(known.use_for(13), EpochUse::Reuse(UploadEpoch(6)));
    }

    #[test]
    fn the_first_issued_epoch_serves_all() {
        let home = HomePath {
            address: "home:1".to_owned(),
            path: "x".to_owned(),
            id: None,
        };
        let epochs = UploadEpochs::default();
        let use_for =
            |order, issued: Option<u64>| epochs.use_for(&home, order, issued.map(UploadEpoch));
        assert_eq!(use_for(1, None), EpochUse::Renew);
        assert_eq!(use_for(2, Some(6)), EpochUse::Reuse(UploadEpoch(6)));
        // Its answer came later, but it was decided before.
        assert_eq!(use_for(1, Some(7)), EpochUse::Reuse(UploadEpoch(6)));
        let fence = UploadFence {
            epoch: UploadEpoch(6),
            order: 2,
        };
        epochs.refuse(&home, Some(fence));
        assert_eq!(use_for(3, Some(5)), EpochUse::Renew, "it is earlier");
        assert_eq!(use_for(3, Some(8)), EpochUse::Reuse(UploadEpoch(8)));
        epochs.refuse(&home, Some(fence));
        assert_eq!(use_for(4, None), EpochUse::Reuse(UploadEpoch(8)));
    }
}
