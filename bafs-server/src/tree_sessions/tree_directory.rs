//! The directory that trees are in, and what an operation is worth that finds nothing while that is
//! gone. Opens no tree.

use std::path::PathBuf;

use bafs_proto::file_op::{Errno, FileResult};
use bafs_proto::{Error, ErrorCode};

use super::batch_replay::BatchReply;
use crate::storage::is_path_missing;

/// What must exist as long as what operations do not find is really not there; nothing for trees
/// that may come and go.
#[derive(Debug, Default)]
pub(crate) struct TreeDirectory(pub(crate) Option<PathBuf>);

impl TreeDirectory {
    /// An answer; that something is not there is none when all is gone. Blocks.
    pub(super) fn reject_if_gone(&self, answer: BatchReply) -> BatchReply {
        let missing = Errno(nix::errno::Errno::ENOENT as i32);
        let is_missing = |result: &FileResult| result.as_ref().err() == Some(&missing);
        let is_any = answer
            .as_ref()
            .is_ok_and(|(results, _)| results.iter().any(is_missing));
        match &self.0 {
            Some(root) if is_any && is_path_missing(root) => {
                let text = format!("{} was removed while it was served", root.display());
                Err(Error::new(ErrorCode::StoreLost, text))
            }
            _ => answer,
        }
    }
}

#[cfg(test)]
mod tests {
    use bafs_proto::file_op::FileReply;
    use bytes::Bytes;

    use super::*;

    #[test]
    fn a_missing_root_means_a_lost_store() {
        let directory = tempfile::tempdir().unwrap();
        let root = TreeDirectory(Some(directory.path().to_owned()));
        let missing = Err(Errno(nix::errno::Errno::ENOENT as i32));
        let answer = || Ok((vec![Ok(FileReply::Done), missing.clone()], Bytes::new()));
        assert!(root.reject_if_gone(answer()).is_ok());
        drop(directory);
        let error = root.reject_if_gone(answer()).unwrap_err();
        assert_eq!(error.code, ErrorCode::StoreLost);
        let done = Ok((vec![Ok(FileReply::Done)], Bytes::new()));
        assert!(root.reject_if_gone(done).is_ok(), "it was done");
    }
}
