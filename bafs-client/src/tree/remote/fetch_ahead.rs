//! Fetches what programs will probably ask for next. Nobody waits for that; whoever needs the same
//! meanwhile does.

use std::sync::Arc;

use super::RemoteSession;
use super::delegation::SessionDelegation;
use crate::logic::small_files::FetchAhead;

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
