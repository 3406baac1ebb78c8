//! Lists all names of a directory for the one writer of a volume, who then knows which names are
//! free. A directory of too many pages is left to its server.

use std::collections::BTreeSet;

use bafs_proto::file_op::{Caller, DirectoryEntry, FileOp, FileReply};
use bafs_proto::ids::InodeNo;
use bafs_proto::limits::DIRECTORY_PAGE_BYTES_MAX;
use bytes::Bytes;

use super::RemoteSession;
use super::delegation::SessionDelegation;
use crate::limits::{DIRECTORY_PAGES_MAX, LISTED_FILES_MAX};

impl RemoteSession {
    /// Learns all names of a directory, if they are not too many.
    pub(super) async fn cache_names(&self, own: &SessionDelegation, directory: InodeNo) {
        let begun = loop {
            let position = {
                let delegation = &mut own.lock_state().delegation;
                // What is appended from now on is told to the listing.
                match delegation.log.last_position_of(directory) {
                    Some(position) if self.health.loss().is_none() => position,
                    _ => break delegation.metadata.begin_listing(directory),
                }
            };
            self.wait_for_position(own, position).await;
        };
        let names = self.list_names(own, directory).await;
        let image = &mut own.lock_state().delegation.metadata;
        image.end_listing(directory, begun, names);
    }

    /// Lists names, and looks up as many of their files as may be: who asks for one name mostly
    /// asks for the next.
    async fn list_names(
        &self,
        own: &SessionDelegation,
        directory: InodeNo,
    ) -> Option<BTreeSet<Vec<u8>>> {
        let ask = |op| self.run_operation(Caller::default(), op, Bytes::new());
        let op = FileOp::OpenDirectory { ino: directory };
        let Ok(FileReply::Opened { handle, .. }) = ask(op).await.0 else {
            return None;
        };
        let (mut names, mut cookie) = (BTreeSet::new(), 0);
        let mut is_whole = false;
        for _ in 0..DIRECTORY_PAGES_MAX {
            let op = FileOp::ReadDirectory {
                handle,
                cookie,
                bytes_max: DIRECTORY_PAGE_BYTES_MAX,
                plus: own.lock_state().delegation.metadata.listed_count() < LISTED_FILES_MAX,
            };
            let Some(entries) = self.list_page(own, directory, op).await else {
                break;
            };
            let Some(last) = entries.last() else {
                is_whole = true;
                break;
            };
            cookie = last.cookie;
            names.extend(entries.into_iter().map(|entry| entry.name));
        }
        let _ = ask(FileOp::ReleaseDirectory { handle }).await;
        is_whole.then_some(names)
    }

    /// One page, whose files keep the reference that the listing gave them until the kernel asks
    /// for them, or forgets their directory.
    async fn list_page(
        &self,
        own: &SessionDelegation,
        directory: InodeNo,
        op: FileOp,
    ) -> Option<Vec<DirectoryEntry>> {
        let caller = Caller::default();
        let question = own
            .lock_state()
            .delegation
            .begin_query(&self.inode_map(), &op);
        let (mut result, _) = self.run_operation(caller, op.clone(), Bytes::new()).await;
        let mut state = own.lock_state();
        state
            .delegation
            .end_query(&self.inode_map(), (caller, &op, question), &mut result);
        let Ok(FileReply::Entries(entries)) = result else {
            return None;
        };
        for ino in entries.iter().filter_map(|entry| Some(entry.attr?.ino)) {
            if !state.delegation.metadata.add_listed(directory, ino) {
                // It has one already.
                self.queue_forgets(&mut state, ino, 1);
            }
        }
        Some(entries)
    }
}
