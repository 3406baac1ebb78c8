//! Reads small files of a server whole, several by one call and without a handle, and keeps them
//! for the programs. Which ones is decided in `logic/small_files.rs`.

use bafs_proto::file_op::{Caller, FileOp, FileReply};
use bafs_proto::ids::InodeNo;
use bytes::Bytes;

use super::RemoteSession;
use super::delegation::SessionDelegation;
use crate::logic::small_files::{FilesToRead, SmallFile};

impl RemoteSession {
    /// Reads files; those that the server cannot read are left to whoever asks for them.
    pub(super) async fn read_files(&self, own: &SessionDelegation, files: FilesToRead) {
        let (query, settled) = {
            let delegation = &mut own.lock_state().delegation;
            let query = delegation.begin_reads();
            let settled: Vec<_> = delegation.settled_files(&files).collect();
            (query, settled)
        };
        let contents = self.read_contents(&settled).await;
        let delegation = &mut own.lock_state().delegation;
        delegation.end_reads(query, &files, contents);
    }

    /// The contents of those that the server can read.
    pub(super) async fn read_contents(&self, files: &[SmallFile]) -> Vec<(InodeNo, Bytes)> {
        let link = self.link();
        let (mut asked, mut ops) = (Vec::new(), Vec::new());
        {
            let known = self.inode_map();
            if known.epoch() != link.tree_session.epoch {
                return Vec::new();
            }
            for &SmallFile { ino, bytes } in files {
                let bytes_max = bytes;
                if let Ok(op) = known.translate(&FileOp::ReadFile { ino, bytes_max }) {
                    ops.push(op);
                    asked.push(ino);
                }
            }
        }
        if ops.is_empty() {
            return Vec::new();
        }
        let (caller, deadline) = (Caller::default(), self.server.deadline());
        let nothing = Bytes::new();
        let batch = (ops, link.unordered_numbers());
        // A failure that matters beyond these files is recorded where it is found.
        let Ok((results, mut body)) = self
            .run_batch(&link, caller, batch, &nothing, deadline)
            .await
        else {
            return Vec::new();
        };
        let mut contents = Vec::new();
        for (ino, result) in asked.into_iter().zip(results) {
            if let Ok(FileReply::Read { length }) = result {
                let length = length as usize;
                if length > body.len() {
                    break;
                }
                // A part of the body would keep all of it in memory.
                contents.push((ino, Bytes::copy_from_slice(&body.split_to(length))));
            }
        }
        contents
    }
}
