//! What arrives from elsewhere is compared with its digests before anyone sees it. Fetches nothing.

use std::sync::Arc;

use bafs_proto::hash::Digest;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;

use super::blocking;
use super::disk::Run;
use super::fetch::Generation;
use super::flights::Block;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum BlockOrigin {
    Home,
    Peer,
}

impl Generation {
    /// Cuts a body into blocks and compares each with its digest, and with what this server
    /// remembers of it unless it comes from home.
    pub(super) async fn check(
        self: &Arc<Self>,
        run: &Run,
        digests: Vec<Digest>,
        body: Bytes,
        origin: BlockOrigin,
    ) -> Result<Vec<Option<Block>>> {
        let (generation, run) = (self.clone(), *run);
        let checked = blocking(move || {
            let wrong = |why: &str| {
                Err(Error::new(
                    ErrorCode::DigestMismatch,
                    format!("blocks from {origin:?}: {why}"),
                ))
            };
            if digests.len() != run.count {
                return wrong("their number is not what was asked for");
            }
            let mut blocks = Vec::with_capacity(run.count);
            let mut start = 0;
            for (n, digest) in digests.into_iter().enumerate() {
                if [Digest::ABSENT, Digest::EVICTED].contains(&digest) {
                    blocks.push(None);
                    continue;
                }
                let end = start + run.length(n);
                if end > body.len() {
                    return wrong("there are too few bytes");
                }
                let bytes = body.slice(start..end);
                start = end;
                if Digest::of(&bytes) != digest {
                    return wrong("the bytes do not match the digest");
                }
                let known = generation.disk.table().digest_of(run.key(n));
                if origin == BlockOrigin::Peer && known.is_some_and(|known| known != digest) {
                    return wrong("the digest is not the one that home once sent");
                }
                blocks.push(Some((bytes, digest)));
            }
            if start != body.len() {
                return wrong("there are too many bytes");
            }
            Ok(blocks)
        })
        .await?;
        checked.map_err(|error| {
            self.meter.add("cache_digest_failures", 1);
            match origin {
                BlockOrigin::Peer => error,
                // The caller may ask again: the bytes at home may be good.
                BlockOrigin::Home => Error::new(ErrorCode::ServerFault, error.detail),
            }
        })
    }
}
