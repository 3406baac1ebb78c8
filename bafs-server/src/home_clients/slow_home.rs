//! A home for tests that takes everything and needs its time to put it in place. Keeps no data.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use bafs_proto::hash::Digest;
use bafs_proto::message::{
    ListSource, PutProgress, PutReceipt, ReadSource, SourceData, SourcePage,
};
use bafs_proto::net::BoxFuture;
use bafs_proto::net::memory::MemoryNetwork;
use bafs_proto::net::pool::Pool;
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;

use super::HomeClients;
use super::home_backend::HomeBackend;
use super::home_upload::HomeUpload;

/// Time that a commit takes, in milliseconds.
pub(crate) const COMMIT_MS: u64 = 1_000;

/// The home.
#[derive(Default)]
pub(crate) struct SlowHome {
    received_bytes: AtomicU64,
    commits: AtomicU64,
}

impl SlowHome {
    /// Commits that were begun.
    pub(crate) fn commits(&self) -> u64 {
        self.commits.load(Ordering::Relaxed)
    }
}

/// Homes of which the one at `address` is slow.
pub(crate) fn slow_homes(address: &str) -> (Arc<HomeClients>, Arc<SlowHome>) {
    let homes = HomeClients::home_servers_only(Pool::new(MemoryNetwork::new().dialer("test")));
    let slow = Arc::new(SlowHome::default());
    let mut known = homes
        .backends
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    known.insert((address.to_owned(), None), slow.clone());
    drop(known);
    (homes, slow)
}

fn unsupported<'a, T: Send + 'a>() -> BoxFuture<'a, Result<T>> {
    let error = Error::new(ErrorCode::Unsupported, "it accepts only files");
    Box::pin(async move { Err(error) })
}

impl HomeBackend for SlowHome {
    fn list<'a>(
        &'a self,
        _: &'a Token,
        _: ListSource,
        _: Deadline,
    ) -> BoxFuture<'a, Result<SourcePage>> {
        unsupported()
    }

    fn read<'a>(
        &'a self,
        _: &'a Token,
        _: ReadSource,
        _: Deadline,
    ) -> BoxFuture<'a, Result<(SourceData, Bytes)>> {
        unsupported()
    }

    fn begin<'a>(&'a self, _: &'a HomeUpload, _: Deadline) -> BoxFuture<'a, Result<PutProgress>> {
        Box::pin(async move {
            Ok(PutProgress {
                received_bytes: self.received_bytes.load(Ordering::Relaxed),
                receipt: None,
            })
        })
    }

    fn write<'a>(
        &'a self,
        _: &'a HomeUpload,
        offset: u64,
        data: Bytes,
        _: Deadline,
    ) -> BoxFuture<'a, Result<PutProgress>> {
        Box::pin(async move {
            let received_bytes = offset + data.len() as u64;
            self.received_bytes.store(received_bytes, Ordering::Relaxed);
            Ok(PutProgress {
                received_bytes,
                receipt: None,
            })
        })
    }

    fn commit<'a>(
        &'a self,
        put: &'a HomeUpload,
        digest: Digest,
        _: Deadline,
    ) -> BoxFuture<'a, Result<PutReceipt>> {
        Box::pin(async move {
            self.commits.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(COMMIT_MS)).await;
            Ok(PutReceipt {
                extraction: put.extract,
                path: put.path.clone(),
                size: put.size,
                digest,
            })
        })
    }
}
