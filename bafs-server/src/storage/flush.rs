//! Has the disk write a large file while more of it arrives: what is left until its end would be
//! waited for then, at the speed of the disk alone.

use std::fs::File;
use std::sync::Arc;

use bafs_proto::Result;
use tokio::task::JoinSet;

use super::fill::{blocking, disk, joined};

/// So much is written before the disk is asked for it: few calls, each of them worth one.
const FLUSH_BYTES: u64 = 64 << 20;

/// One file that grows.
pub(super) struct Flush {
    file: Arc<File>,
    path: Arc<str>,
    /// At most one. Its failure is told once by the kernel, so it must not be missed.
    under_way: JoinSet<Result<()>>,
    asked_bytes: u64,
}

impl Flush {
    pub(super) fn new(file: Arc<File>, path: &str) -> Self {
        Self {
            file,
            path: path.into(),
            under_way: JoinSet::new(),
            asked_bytes: 0,
        }
    }

    /// So many bytes of the file have been written in all.
    pub(super) fn written(&mut self, bytes: u64) -> Result<()> {
        if let Some(done) = self.under_way.try_join_next() {
            joined(done)?;
        }
        if bytes - self.asked_bytes < FLUSH_BYTES || !self.under_way.is_empty() {
            return Ok(());
        }
        self.asked_bytes = bytes;
        let (file, path) = (self.file.clone(), self.path.clone());
        self.under_way.spawn(blocking(move || {
            file.sync_data().map_err(|e| disk(&path, &e))
        }));
        Ok(())
    }

    /// Waits for what the disk was asked for last.
    pub(super) async fn end(mut self) -> Result<()> {
        while let Some(done) = self.under_way.join_next().await {
            joined(done)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that refuses to be flushed.
    fn refusing() -> Flush {
        let file = File::open("/dev/null").unwrap();
        Flush::new(Arc::new(file), "large")
    }

    #[tokio::test]
    async fn what_the_disk_refuses_is_told_at_the_end() {
        let mut flush = refusing();
        flush.written(FLUSH_BYTES).unwrap();
        let told = flush.end().await.unwrap_err();
        assert!(told.to_string().contains("'large'"), "{told}");
    }

    #[tokio::test]
    async fn a_small_file_is_not_flushed_on_its_way() {
        let mut flush = refusing();
        flush.written(FLUSH_BYTES - 1).unwrap();
        flush.end().await.unwrap();
    }
}
