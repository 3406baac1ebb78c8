//! What every kind of home can do: the trait of its backends. Knows no kind.

use bafs_proto::hash::Digest;
use bafs_proto::ids::UploadEpoch;
use bafs_proto::message::{
    ListSource, PutProgress, PutReceipt, ReadDigests, ReadSource, SourceData, SourceDigests,
    SourcePage,
};
use bafs_proto::net::BoxFuture;
use bafs_proto::replica::ReadSources;
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;

use super::home_upload::HomeUpload;

/// A home of some kind, at one address. Each call runs once, and its caller drops a late one.
pub(super) trait HomeBackend: Send + Sync {
    /// A page of what is below a path, in path order.
    fn list<'a>(
        &'a self,
        token: &'a Token,
        call: ListSource,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<SourcePage>>;

    /// A range of a file that is still what it was, with the digests of its pieces.
    fn read<'a>(
        &'a self,
        token: &'a Token,
        call: ReadSource,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<(SourceData, Bytes)>>;

    /// Whether it says what the digests of blocks are.
    fn knows_digests(&self) -> bool {
        false
    }

    /// What it says of blocks that other nodes send.
    fn read_digests<'a>(
        &'a self,
        _token: &'a Token,
        _call: ReadDigests,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<SourceDigests>> {
        let text = "this kind of home knows no digests of blocks";
        Box::pin(async move { Err(Error::new(ErrorCode::Unsupported, text)) })
    }

    /// Whether it gives many small files in one answer, and takes them with one call.
    fn has_packs(&self) -> bool {
        false
    }

    /// Small files that are still what they were, whole, with the digests of their pieces; from a
    /// home that packs.
    fn read_files<'a>(
        &'a self,
        _token: &'a Token,
        _call: ReadSources,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<(SourceData, Bytes)>> {
        let text = "this kind of home transfers files one by one";
        Box::pin(async move { Err(Error::new(ErrorCode::Unsupported, text)) })
    }

    /// An epoch later than those of all uploads that were decided before.
    fn issue_upload_epoch<'a>(
        &'a self,
        _token: &'a Token,
        _path: &'a str,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<UploadEpoch>> {
        let text = "this kind of home does not order uploads";
        Box::pin(async move { Err(Error::new(ErrorCode::Unsupported, text)) })
    }

    /// Begins an upload or shows where it is. Nothing is visible before the commit.
    fn begin<'a>(
        &'a self,
        put: &'a HomeUpload,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<PutProgress>>;

    /// Pieces of one upload that may be under way at once; only a home that puts them in order
    /// takes more than one.
    fn concurrent_chunks_max(&self) -> usize {
        1
    }

    /// Adds bytes that follow on what was received, or on what is under way.
    fn write<'a>(
        &'a self,
        put: &'a HomeUpload,
        offset: u64,
        data: Bytes,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<PutProgress>>;

    /// Puts an upload in place, whole and with this digest; the file is durable then.
    fn commit<'a>(
        &'a self,
        put: &'a HomeUpload,
        digest: Digest,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<PutReceipt>>;

    /// Puts a small file in place, as the three calls above do.
    fn put<'a>(
        &'a self,
        put: &'a HomeUpload,
        data: Bytes,
        digest: Digest,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<PutReceipt>> {
        Box::pin(async move {
            let progress = self.begin(put, deadline).await?;
            if let Some(receipt) = progress.receipt {
                return Ok(receipt);
            }
            let received = progress.received_bytes;
            let start = usize::try_from(received).unwrap_or(usize::MAX);
            if start > data.len() {
                let text = format!("home has {received} bytes of a file of {}", data.len());
                return Err(Error::new(ErrorCode::WrongState, text));
            }
            if start < data.len() {
                self.write(put, received, data.slice(start..), deadline)
                    .await?;
            }
            self.commit(put, digest, deadline).await
        })
    }
}
