//! A home for tests that takes everything and needs its time to put it in place. Keeps no data.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use bafs_proto::hash::Digest;
use bafs_proto::message::{
    ListSource, PutProgress, PutReceipt, ReadSource, SourceData, SourcePage,
};
use bafs_proto::net::BoxFuture;
use bafs_proto::net::mem::Network;
use bafs_proto::net::pool::Pool;
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;

use super::{Home, Homes, Put};

/// Time that a commit takes, in milliseconds.
pub(crate) const COMMITS_MS: u64 = 1_000;

/// The home.
#[derive(Default)]
pub(crate) struct Slow {
    received_bytes: AtomicU64,
    commits: AtomicU64,
}

impl Slow {
    /// Commits that were begun.
    pub(crate) fn commits(&self) -> u64 {
        self.commits.load(Ordering::Relaxed)
    }
}

/// Homes of which the one at `address` is slow.
pub(crate) fn homes(address: &str) -> (Arc<Homes>, Arc<Slow>) {
    let homes = Homes::servers_only(Pool::new(Network::new().dialer("test")));
    let slow = Arc::new(Slow::default());
    let mut known = homes.known.lock().unwrap_or_else(PoisonError::into_inner);
    known.insert((address.to_owned(), None), slow.clone());
    drop(known);
    (homes, slow)
}

fn nothing<'a, T: Send + 'a>() -> BoxFuture<'a, Result<T>> {
    let error = Error::new(ErrorCode::Unsupported, "it only takes files");
    Box::pin(async move { Err(error) })
}

impl Home for Slow {
    fn list<'a>(
        &'a self,
        _: &'a Token,
        _: ListSource,
        _: Deadline,
    ) -> BoxFuture<'a, Result<SourcePage>> {
        nothing()
    }

    fn read<'a>(
        &'a self,
        _: &'a Token,
        _: ReadSource,
        _: Deadline,
    ) -> BoxFuture<'a, Result<(SourceData, Bytes)>> {
        nothing()
    }

    fn begin<'a>(&'a self, _: &'a Put, _: Deadline) -> BoxFuture<'a, Result<PutProgress>> {
        Box::pin(async move {
            Ok(PutProgress {
                received_bytes: self.received_bytes.load(Ordering::Relaxed),
                receipt: None,
            })
        })
    }

    fn write<'a>(
        &'a self,
        _: &'a Put,
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
        put: &'a Put,
        digest: Digest,
        _: Deadline,
    ) -> BoxFuture<'a, Result<PutReceipt>> {
        Box::pin(async move {
            self.commits.fetch_add(1, Ordering::Relaxed);
            tokio::time::sleep(Duration::from_millis(COMMITS_MS)).await;
            Ok(PutReceipt {
                extract: put.extract,
                path: put.path.clone(),
                size: put.size,
                digest,
            })
        })
    }
}
