//! Homes that speak HTTP: web servers, and object stores. The only user of opendal.
//!
//! A file is what its size, its time and its ETag say. The ETag has no field of its own in an
//! identity: its digest stands for the fraction of the second of the time, which HTTP does not
//! tell. So an identity needs no table beside it and survives a restart.

use bafs_proto::hash::Digest;
use bafs_proto::message::{ListSource, ReadSource, SourceData, SourceIdentity, SourcePage};
use bafs_proto::net::{BoxFuture, use_ring};
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::{Bytes, BytesMut};
use futures_util::TryStreamExt;
use opendal::services::Http;
use opendal::{ErrorKind, HttpTransporter, Metadata, Operator};
use opendal_http_transport_reqwest::ReqwestTransport;

use super::Home;
use super::listing::{changed, digests, file, page};

const NANOSECONDS: i64 = 1_000_000_000;

/// A web server.
pub(super) struct Objects {
    operator: Operator,
    address: String,
}

impl Objects {
    /// The web server at `address`, a URL without a path.
    ///
    /// # Errors
    /// `Malformed` when that is no address.
    pub(super) fn web(address: &str) -> Result<Self> {
        let this = |error| fault(address, "", &error);
        let operator = Operator::new(Http::default().endpoint(address)).map_err(this)?;
        Ok(Self {
            operator: with_transport(operator),
            address: address.to_owned(),
        })
    }

    async fn list(&self, call: ListSource) -> Result<SourcePage> {
        let fault = |error| fault(&self.address, &call.path, &error);
        let found = self.operator.stat(&call.path).await.map_err(fault)?;
        page(vec![file("", self.identity(&call.path, &found)?)])
    }

    async fn read(&self, call: ReadSource) -> Result<(SourceData, Bytes)> {
        let path = &call.path;
        let fault = |error: opendal::Error| match error.kind() {
            ErrorKind::NotFound => changed(path, "it is gone"),
            ErrorKind::RangeNotSatisfied => changed(path, "it became shorter"),
            _ => fault(&self.address, path, &error),
        };
        let left = call.identity.size.saturating_sub(call.offset);
        let length = left.min(u64::from(call.length));
        let mut data = BytesMut::with_capacity(usize::try_from(length).unwrap_or(0));
        if length > 0 {
            let range = call.offset..call.offset + length;
            let reader = self.operator.reader(path).await.map_err(fault)?;
            let mut stream = reader.into_stream(range).await.map_err(fault)?;
            // Of the same answer as the data, so nothing can come between them.
            let found = stream.metadata().await.map_err(fault)?;
            if self.identity(path, &found)? != call.identity {
                return Err(changed(path, "size, time or ETag differ"));
            }
            while let Some(piece) = stream.try_next().await.map_err(fault)? {
                for piece in piece {
                    data.extend_from_slice(&piece);
                }
                if data.len() as u64 > length {
                    let text = format!(
                        "{} sends more of '{path}' than was asked for: it cannot serve ranges; \
                         serve the files by another server",
                        self.address
                    );
                    return Err(Error::new(ErrorCode::Unsupported, text));
                }
            }
        }
        if data.len() as u64 != length {
            let text = format!("{} sent too little of '{path}'", self.address);
            return Err(Error::new(ErrorCode::Unreachable, text));
        }
        let digests = digests(&data, call.block_bytes);
        Ok((SourceData { digests }, data.freeze()))
    }

    fn identity(&self, path: &str, found: &Metadata) -> Result<SourceIdentity> {
        let time = found.last_modified();
        if time.is_none() && found.etag().is_none() {
            let text = format!(
                "{} tells neither ETag nor Last-Modified of '{path}', so that a change would not \
                 be noticed; serve it by a server that does",
                self.address
            );
            return Err(Error::new(ErrorCode::Unsupported, text));
        }
        let seconds = time.map_or(0, |time| time.into_inner().as_second());
        let fraction = found.etag().map_or(0, |etag| fraction(etag.as_bytes()));
        Ok(SourceIdentity {
            size: found.content_length(),
            mtime_ns: seconds.saturating_mul(NANOSECONDS).saturating_add(fraction),
        })
    }
}

impl Home for Objects {
    fn list<'a>(
        &'a self,
        _token: &'a Token,
        call: ListSource,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<SourcePage>> {
        Box::pin(self.list(call))
    }

    fn read<'a>(
        &'a self,
        _token: &'a Token,
        call: ReadSource,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<(SourceData, Bytes)>> {
        Box::pin(self.read(call))
    }
}

fn with_transport(operator: Operator) -> Operator {
    use_ring();
    let transport = HttpTransporter::new(ReqwestTransport::default());
    let context = operator.base_context().with_http_transport(transport);
    operator.with_context(context)
}

/// Nanoseconds of a second that stand for an ETag.
fn fraction(etag: &[u8]) -> i64 {
    let digest = Digest::of(etag);
    let mut first = [0; 8];
    first.copy_from_slice(&digest.0[..8]);
    i64::try_from(u64::from_le_bytes(first) % NANOSECONDS as u64).unwrap_or(0)
}

/// What a failed request means to the caller.
fn fault(address: &str, path: &str, error: &opendal::Error) -> Error {
    let code = match error.kind() {
        ErrorKind::NotFound => {
            let text = format!("{address} has no '{path}'");
            return Error::new(ErrorCode::NotFound, text);
        }
        ErrorKind::PermissionDenied => ErrorCode::RightMissing,
        ErrorKind::ConfigInvalid => ErrorCode::Malformed,
        ErrorKind::RateLimited => ErrorCode::Busy,
        _ if error.is_temporary() => ErrorCode::Unreachable,
        _ => ErrorCode::ServerFault,
    };
    Error::new(code, format!("{address} at '{path}': {error}"))
}
