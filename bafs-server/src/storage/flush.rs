//! Has the disk write a large file while more of it arrives: what is left until its end would be
//! waited for then, at the speed of the disk alone.

use std::fs::File;
use std::sync::Arc;

use bafs_proto::Result;
use tokio::task::JoinSet;

use super::volume_errors::fill_disk_error;
use crate::errors::{join_result, run_blocking};

/// So much is written before the disk is asked for it: few calls, each of them worth one.
const FLUSH_BYTES: u64 = 64 << 20;

/// One file that grows.
pub(super) struct FileFlush {
    file: Arc<File>,
    path: Arc<str>,
    /// At most one. Its failure is told once by the kernel, so it must not be missed.
    pending_sync: JoinSet<Result<()>>,
    requested_bytes: u64,
}

impl FileFlush {
    pub(super) fn new(file: Arc<File>, path: &str) -> Self {
        Self {
            file,
            path: path.into(),
            pending_sync: JoinSet::new(),
            requested_bytes: 0,
        }
    }

    /// So many bytes of the file have been written in all.
    pub(super) fn note_written(&mut self, bytes: u64) -> Result<()> {
        if let Some(done) = self.pending_sync.try_join_next() {
            join_result(done)?;
        }
        if bytes - self.requested_bytes < FLUSH_BYTES || !self.pending_sync.is_empty() {
            return Ok(());
        }
        self.requested_bytes = bytes;
        let (file, path) = (self.file.clone(), self.path.clone());
        self.pending_sync.spawn(run_blocking(move || {
            file.sync_data().map_err(|e| fill_disk_error(&path, &e))
        }));
        Ok(())
    }

    /// Waits for what the disk was asked for last.
    pub(super) async fn end(mut self) -> Result<()> {
        while let Some(done) = self.pending_sync.join_next().await {
            join_result(done)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that refuses to be flushed.
    fn refusing() -> FileFlush {
        let file = File::open("/dev/null").unwrap();
        FileFlush::new(Arc::new(file), "large")
    }

    #[tokio::test]
    async fn flush_errors_are_reported_at_the_end() {
        let mut flush = refusing();
        flush.note_written(FLUSH_BYTES).unwrap();
        let told = flush.end().await.unwrap_err();
        assert!(told.to_string().contains("'large'"), "{told}");
    }

    #[tokio::test]
    async fn small_files_are_not_flushed_while_written() {
        let mut flush = refusing();
        flush.note_written(FLUSH_BYTES - 1).unwrap();
        flush.end().await.unwrap();
    }
}
