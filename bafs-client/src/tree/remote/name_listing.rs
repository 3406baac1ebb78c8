//! Lists all names of a directory for the one writer of a volume, who then knows which names are
//! free. A directory of too many pages is left to its server.

use std::collections::{BTreeMap, BTreeSet};

use bafs_proto::file_op::{
    Attr, Caller, DirectoryEntry, END_COOKIE, Errno, FileOp, FileReply, FileResult,
};
use bafs_proto::ids::{Epoch, InodeNo};
use bafs_proto::limits::DIRECTORY_PAGE_BYTES_MAX;
use bytes::Bytes;
use nix::libc;

use super::RemoteSession;
use super::delegation::SessionDelegation;
use crate::limits::{DIRECTORY_PAGES_MAX, LISTED_FILES_MAX};
use crate::logic::inflight_queries::InflightQuery;
use crate::logic::sibling_read_ahead::Fetched;

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
        let names = match self.list_files(own, directory).await {
            Some(names) => Some(names),
            None => self.list_names(own, directory).await,
        };
        let image = &mut own.lock_state().delegation.metadata;
        image.end_listing(directory, begun, names);
    }

    /// Lists names, and looks all of their files up: who asks for one name mostly asks for the
    /// next.
    async fn list_files(
        &self,
        own: &SessionDelegation,
        directory: InodeNo,
    ) -> Option<BTreeSet<Vec<u8>>> {
        let (mut names, mut cookie) = (BTreeSet::new(), 0);
        for _ in 0..DIRECTORY_PAGES_MAX {
            let listed_count = own.lock_state().delegation.metadata.listed_count();
            if listed_count >= LISTED_FILES_MAX {
                return None;
            }
            let op = FileOp::ListDirectory {
                ino: directory,
                cookie,
                bytes_max: DIRECTORY_PAGE_BYTES_MAX,
            };
            let entries = self.list_page(own, directory, op).await?;
            let last = entries.last().map(|last| last.cookie);
            names.extend(entries.into_iter().map(|entry| entry.name));
            match last {
                None | Some(END_COOKIE) => return Some(names),
                Some(next) => cookie = next,
            }
        }
        None
    }

    /// Lists names only, by a stream.
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
                plus: false,
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

    /// Learns the attributes of a file that an operation needs.
    pub(super) async fn learn_attr(
        &self,
        own: &SessionDelegation,
        (caller, op): (Caller, &FileOp),
        ino: InodeNo,
    ) {
        // The kernel believes what it is told, unless it sends a change meanwhile.
        let busy = own.lock_state().delegation.log.last_position_of(ino);
        self.wait_for_position(own, busy.unwrap_or(0)).await;
        let attr = self.fetch_attr(own, caller, ino).await;
        let delegation = &mut own.lock_state().delegation;
        delegation.set_listed_attr(op, ino, attr);
    }

    /// The attributes of a file as the server has them.
    pub(super) async fn fetch_attr(
        &self,
        own: &SessionDelegation,
        caller: Caller,
        ino: InodeNo,
    ) -> Option<Attr> {
        let op = FileOp::GetAttr { ino, handle: None };
        own.lock_state().delegation.reserve_space(&op);
        let question = self.begin_query(own, &op, false).await;
        let (mut result, _) = self.run_operation(caller, op.clone(), Bytes::new()).await;
        self.end_query(own, (caller, &op, question), &mut result);
        match result {
            Ok(FileReply::Attr(attr)) => Some(attr),
            _ => None,
        }
    }

    /// One page of a directory.
    async fn list_page(
        &self,
        own: &SessionDelegation,
        directory: InodeNo,
        op: FileOp,
    ) -> Option<Vec<DirectoryEntry>> {
        let question = own
            .lock_state()
            .delegation
            .begin_query(&self.inode_map(), &op);
        let (result, _) = self
            .run_operation(Caller::default(), op.clone(), Bytes::new())
            .await;
        self.end_page(own, directory, (&op, question), result)
    }

    /// A page has come. Its files keep the reference that the listing gave them until the kernel
    /// asks for them, or forgets their directory.
    fn end_page(
        &self,
        own: &SessionDelegation,
        directory: InodeNo,
        (op, question): (&FileOp, InflightQuery),
        mut result: FileResult,
    ) -> Option<Vec<DirectoryEntry>> {
        let mut state = own.lock_state();
        let ended = (Caller::default(), op, question);
        state
            .delegation
            .end_query(&self.inode_map(), ended, &mut result);
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

    /// Lists directories by one call. One that is too large is left to whoever looks into it.
    pub(super) async fn list_directories(&self, own: &SessionDelegation, directories: &[InodeNo]) {
        let link = self.link();
        let epoch = link.tree_session.epoch;
        let (listings, ops) = self.begin_listings(own, epoch, directories);
        let mut results = Vec::new();
        if !ops.is_empty() {
            let (caller, deadline) = (Caller::default(), self.server.deadline());
            let (batch, nothing) = ((ops, link.unordered_numbers()), Bytes::new());
            let ran = self.run_batch(&link, caller, batch, &nothing, deadline);
            // A failure that matters beyond these directories is recorded where it is found.
            results = ran.await.map(|(results, _)| results).unwrap_or_default();
        }
        let mut results = results.into_iter();
        let mut fetched: BTreeMap<_, _> = directories
            .iter()
            .map(|directory| (*directory, Fetched::No))
            .collect();
        for listing in listings {
            let result = results.next().unwrap_or(Err(Errno(libc::EIO)));
            let directory = listing.directory;
            fetched.insert(directory, self.end_listing(own, epoch, listing, result));
        }
        let fetched = fetched.into_iter().collect();
        own.lock_state().delegation.end_directories(fetched);
    }

    /// A directory was listed whole, or not.
    fn end_listing(
        &self,
        own: &SessionDelegation,
        epoch: Epoch,
        listing: InflightListing,
        result: FileResult,
    ) -> Fetched {
        let InflightListing {
            directory,
            begun,
            op,
            question,
        } = listing;
        let has_no_room = result == Err(Errno(libc::E2BIG));
        let result = self.translate_result(epoch, &op, result);
        let result = result.unwrap_or(Err(Errno(libc::ESTALE)));
        let entries = self.end_page(own, directory, (&op, question), result);
        let metadata = &mut own.lock_state().delegation.metadata;
        match entries {
            Some(entries) if entries.last().is_some_and(|last| last.cookie == END_COOKIE) => {
                let names = entries.into_iter().map(|entry| entry.name).collect();
                metadata.end_listing(directory, begun, Some(names));
                Fetched::Yes
            }
            _ => {
                metadata.cancel_listing(directory);
                match has_no_room {
                    true => Fetched::NoRoom,
                    false => Fetched::No,
                }
            }
        }
    }

    /// Begins to list the directories of which the server knows all, with an operation for each.
    fn begin_listings(
        &self,
        own: &SessionDelegation,
        epoch: Epoch,
        directories: &[InodeNo],
    ) -> (Vec<InflightListing>, Vec<FileOp>) {
        let delegation = &mut own.lock_state().delegation;
        let known = self.inode_map();
        let (mut listings, mut ops) = (Vec::new(), Vec::new());
        for &directory in directories {
            let op = FileOp::ListDirectory {
                ino: directory,
                cookie: 0,
                bytes_max: DIRECTORY_PAGE_BYTES_MAX,
            };
            let is_settled = delegation.log.last_position_of(directory).is_none();
            if known.epoch() != epoch || !is_settled {
                continue;
            }
            if let Ok(translated) = known.translate(&op) {
                ops.push(translated);
                let begun = delegation.metadata.begin_listing(directory);
                let question = delegation.begin_query(&known, &op);
                listings.push(InflightListing {
                    directory,
                    begun,
                    op,
                    question,
                });
            }
        }
        (listings, ops)
    }
}

/// A directory that is being listed.
struct InflightListing {
    directory: InodeNo,
    /// What [`MetadataCache::begin_listing`](crate::logic::metadata_cache::MetadataCache) gave.
    begun: u64,
    op: FileOp,
    question: InflightQuery,
}
