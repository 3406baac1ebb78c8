//! A tree in this process: operations run in the calling thread, without any message.

use std::cell::Cell;

use bafs_proto::file_op::{Caller, FileOp, FileResult};

use super::completion::Completion;

/// Runs an operation on a tree; takes what a write writes, gives what a read read.
type RunOperation = dyn Fn(Caller, &FileOp, &[u8], &mut Vec<u8>) -> FileResult + Send + Sync;

/// A tree of this process.
pub struct LocalTree(Box<RunOperation>);

impl std::fmt::Debug for LocalTree {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LocalTree")
    }
}

thread_local! {
    /// Data of the last read, kept so that reads do not allocate a mebibyte each.
    static DATA: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

impl LocalTree {
    /// Shows the tree on which `run` runs operations, usually a session's method of that name.
    pub fn new(
        run: impl Fn(Caller, &FileOp, &[u8], &mut Vec<u8>) -> FileResult + Send + Sync + 'static,
    ) -> Self {
        Self(Box::new(run))
    }

    pub(super) fn run(&self, caller: Caller, op: &FileOp, data: &[u8], done: Completion) {
        let mut read = DATA.take();
        read.clear();
        let result = (self.0)(caller, op, data, &mut read);
        done(result, &read);
        DATA.set(read);
    }
}
