//! How the result of an operation comes back. Runs none.

use bafs_proto::file_op::FileResult;

/// Receives the result of one operation, with the data of a read. It is called once, by any thread.
pub type Completion = Box<dyn FnOnce(FileResult, &[u8]) + Send>;
