//! What every home that speaks HTTP has in common: guarded reads. The only user of opendal.
//!
//! A file is what its size, its time and its ETag say. The ETag has no field of its own in an
//! identity: its digest stands for the fraction of the second of the time, which HTTP does not
//! tell. So an identity needs no table beside it and survives a restart.

mod bucket;
mod uploads;
mod web;

use std::borrow::Cow;
use std::time::Duration;

use bafs_proto::hash::Digest;
use bafs_proto::message::{ReadSource, SourceData, SourceIdentity};
use bafs_proto::net::install_crypto_provider;
use bafs_proto::path::to_bytes;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::{Bytes, BytesMut};
use futures_util::TryStreamExt;
use opendal::{ErrorKind, HttpTransporter, Metadata, Operator, Writer};
use opendal_http_transport_reqwest::ReqwestTransport;

use super::listing::{changed_error, chunk_digests};

pub(super) use bucket::BucketHome;
pub(super) use web::WebHome;

const NANOSECONDS: i64 = 1_000_000_000;

/// Questions about single files under way at once: fills a wide-area link without a flood.
const CONCURRENT_STATS_MAX: usize = 16;

/// Characters of what a server says that are passed on.
const MESSAGE_CHARACTERS_MAX: usize = 600;

const ACCESS_REFUSED_TEXT: &str =
    "permission denied; check the path and the credentials in the node's homes.toml";

/// A service with its name for messages.
struct ObjectStore {
    operator: Operator,
    address: String,
}

impl ObjectStore {
    fn new(address: &str, service: impl opendal::Builder) -> Result<Self> {
        install_crypto_provider();
        let operator = Operator::new(service).map_err(|e| store_error(address, "", &e))?;
        let transport = HttpTransporter::new(ReqwestTransport::default());
        let context = operator.base_context().with_http_transport(transport);
        Ok(Self {
            operator: operator.with_context(context),
            address: address.to_owned(),
        })
    }

    async fn stat(&self, path: &str) -> Result<SourceIdentity> {
        let found = self.operator.stat(&self.object_key(path)?).await;
        self.identity(path, &found.map_err(|e| self.store_error(path, &e))?)
    }

    /// The object at a path, if there is one.
    async fn find_identity(&self, path: &str) -> Result<Option<SourceIdentity>> {
        match self.stat(path).await {
            Ok(found) => Ok(Some(found)),
            Err(error) if error.code == ErrorCode::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// What a path is called here.
    ///
    /// # Errors
    /// `BadPath` for bytes that are no text, which HTTP cannot name.
    fn object_key<'a>(&self, path: &'a str) -> Result<Cow<'a, str>> {
        let key = match to_bytes(path) {
            Cow::Borrowed(_) => return Ok(Cow::Borrowed(path)),
            Cow::Owned(bytes) => String::from_utf8(bytes),
        };
        key.map(Cow::Owned).map_err(|_| {
            let text = format!("{} accepts only names in UTF-8, not '{path}'", self.address);
            Error::new(ErrorCode::BadPath, text)
        })
    }

    async fn read(&self, call: ReadSource) -> Result<(SourceData, Bytes)> {
        let path = &call.path;
        let fault = |error: opendal::Error| match error.kind() {
            ErrorKind::NotFound => changed_error(path, "it no longer exists"),
            ErrorKind::RangeNotSatisfied => changed_error(path, "it became shorter"),
            _ => self.store_error(path, &error),
        };
        let left = call.identity.size.saturating_sub(call.offset);
        let length = left.min(u64::from(call.length));
        let mut data = BytesMut::with_capacity(usize::try_from(length).unwrap_or(0));
        if length > 0 {
            let range = call.offset..call.offset + length;
            let reader = self
                .operator
                .reader(&self.object_key(path)?)
                .await
                .map_err(fault)?;
            let mut stream = reader.into_stream(range).await.map_err(fault)?;
            // Of the same answer as the data, so nothing can come between them.
            let found = stream.metadata().await.map_err(fault)?;
            if self.identity(path, &found)? != call.identity {
                return Err(changed_error(path, "size, time or ETag differ"));
            }
            while let Some(piece) = stream.try_next().await.map_err(fault)? {
                piece.for_each(|piece| data.extend_from_slice(&piece));
                if data.len() as u64 > length {
                    let text = format!(
                        "{} sends more of '{path}' than requested, so it does not support ranges; \
                         use another server",
                        self.address
                    );
                    return Err(Error::new(ErrorCode::Unsupported, text));
                }
            }
        }
        if data.len() as u64 != length {
            let text = format!("{} sent too few bytes of '{path}'", self.address);
            return Err(Error::new(ErrorCode::Unreachable, text));
        }
        let digests = chunk_digests(&data, call.block_bytes);
        Ok((SourceData { digests }, data.freeze()))
    }

    fn identity(&self, path: &str, found: &Metadata) -> Result<SourceIdentity> {
        let time = found.last_modified();
        if time.is_none() && found.etag().is_none() {
            let text = format!(
                "{} sends neither ETag nor Last-Modified for '{path}', so BAFS cannot detect \
                 changes; use a server that sends them",
                self.address
            );
            return Err(Error::new(ErrorCode::Unsupported, text));
        }
        // A listing may tell the fraction, but the answer to a read never does.
        let seconds = time.map_or(0, |time| time.into_inner().as_second());
        let fraction = found.etag().map_or(0, etag_fraction);
        Ok(SourceIdentity {
            size: found.content_length(),
            mtime_ns: seconds.saturating_mul(NANOSECONDS).saturating_add(fraction),
            ctime_ns: 0,
        })
    }

    /// What a request of the store gives, within so many milliseconds: a store that hangs must not
    /// hold an upload for ever.
    async fn with_timeout<T>(
        &self,
        ms: u64,
        path: &str,
        asked: impl Future<Output = opendal::Result<T>>,
    ) -> Result<T> {
        let late = |_| {
            let text = format!("{} did not answer in time for '{path}'", self.address);
            Error::new(ErrorCode::DeadlineExceeded, text)
        };
        let answer = tokio::time::timeout(Duration::from_millis(ms), asked).await;
        answer
            .map_err(late)?
            .map_err(|e| self.store_error(path, &e))
    }

    fn store_error(&self, path: &str, error: &opendal::Error) -> Error {
        store_error(&self.address, path, error)
    }
}

/// Nanoseconds of a second that stand for an ETag.
fn etag_fraction(etag: &str) -> i64 {
    let Digest(digest) = Digest::of(etag.trim_matches('"').as_bytes());
    let mut first = [0; 8];
    first.copy_from_slice(&digest[..8]);
    i64::try_from(u64::from_le_bytes(first) % NANOSECONDS.unsigned_abs()).unwrap_or(0)
}

/// What a failed request means to the caller.
fn store_error(address: &str, path: &str, error: &opendal::Error) -> Error {
    // The context names the status, and the answer itself may be a whole page.
    let said: String = error
        .to_string()
        .chars()
        .take(MESSAGE_CHARACTERS_MAX)
        .collect();
    let is_login = said.contains("status: 401");
    let (code, why) = match error.kind() {
        ErrorKind::NotFound => (ErrorCode::NotFound, "there is no such file"),
        ErrorKind::PermissionDenied => (ErrorCode::RightMissing, ACCESS_REFUSED_TEXT),
        _ if is_login => (ErrorCode::RightMissing, ACCESS_REFUSED_TEXT),
        ErrorKind::ConfigInvalid => (ErrorCode::Malformed, "the settings are invalid"),
        ErrorKind::RateLimited => (ErrorCode::Busy, "it limits the request rate"),
        ErrorKind::ConditionNotMatch | ErrorKind::Conflict => {
            (ErrorCode::Conflict, "another client changed it")
        }
        _ if error.is_temporary() => (ErrorCode::Unreachable, "it sent an unexpected reply"),
        _ => (ErrorCode::Unsupported, "it does not support the operation"),
    };
    Error::new(code, format!("{address}, '{path}': {why} ({said})"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etags_map_to_fractions_regardless_of_quotes() {
        assert_eq!(etag_fraction("\"a\""), etag_fraction("a"));
        assert_ne!(etag_fraction("a"), etag_fraction("b"));
        assert!((0..NANOSECONDS).contains(&etag_fraction("a")));
    }
}
