//! Fetches what programs will probably ask for next. Nobody waits for that; whoever needs the same
//! meanwhile does.

use std::sync::Arc;

use bafs_proto::ids::InodeNo;

use super::RemoteSession;
use super::delegation::SessionDelegation;
use crate::logic::small_files::FilesToRead;

/// What to fetch.
#[derive(Debug)]
pub(super) enum FetchAhead {
    /// The content of these files.
    Files(FilesToRead),
    /// The names in these directories.
    Directories(Vec<InodeNo>),
}

impl FetchAhead {
    fn is_empty(&self) -> bool {
        match self {
            Self::Files(files) => files.is_empty(),
            Self::Directories(directories) => directories.is_empty(),
        }
    }
}

impl RemoteSession {
    /// Fetches in the runtime.
    pub(super) fn fetch_ahead(self: &Arc<Self>, own: &SessionDelegation, wanted: FetchAhead) {
        if wanted.is_empty() {
            return;
        }
        let turn = Arc::clone(&own.fetch_lock).try_lock_owned();
        let session = Arc::clone(self);
        own.runtime.spawn(async move {
            let _turn = turn;
            let Some(own) = session.delegation.get() else {
                return;
            };
            match wanted {
                FetchAhead::Files(files) => session.read_files(own, files).await,
                FetchAhead::Directories(directories) => {
                    session.list_directories(own, &directories).await;
                }
            }
        });
    }
}
