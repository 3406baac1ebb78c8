//! A home server of ours, asked over the network. It checks rights, ranges and changes itself.

use std::sync::Arc;

use bafs_proto::hash::Digest;
use bafs_proto::ids::UploadEpoch;
use bafs_proto::limits::{IO_BYTES_MAX, PUT_REORDER_BYTES_MAX};
use bafs_proto::message::{
    BeginPut, Call, CommitPut, IssueUploadEpoch, ListSource, PutFile, PutProgress, PutRange,
    PutReceipt, ReadDigests, ReadSource, SourceData, SourceDigests, SourcePage,
};
use bafs_proto::net::BoxFuture;
use bafs_proto::replica::ReadSources;
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::{Error, ErrorCode, Result};
use bytes::Bytes;

use super::home_backend::HomeBackend;
use super::home_locations::HomeServerLocation;
use super::home_upload::HomeUpload;
use super::pack_sender::PackSender;

/// A home server.
pub(super) struct ServerHome {
    location: HomeServerLocation,
    packs: Arc<PackSender>,
}

impl ServerHome {
    pub(super) fn new(place: HomeServerLocation) -> Self {
        let packs = PackSender::new(place.clone());
        Self {
            location: place,
            packs,
        }
    }

    /// Makes a call whose answer has no raw data.
    fn call_without_body<'a, C: Call + 'a>(
        &'a self,
        token: &'a Token,
        call: C,
        body: Bytes,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<C::Reply>> {
        let told = self.location.call(token, call, body, deadline);
        Box::pin(async move { told.await.map(|(told, _)| told) })
    }
}

impl HomeBackend for ServerHome {
    fn list<'a>(
        &'a self,
        token: &'a Token,
        call: ListSource,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<SourcePage>> {
        self.call_without_body(token, call, Bytes::new(), deadline)
    }

    fn read<'a>(
        &'a self,
        token: &'a Token,
        call: ReadSource,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<(SourceData, Bytes)>> {
        Box::pin(self.location.call(token, call, Bytes::new(), deadline))
    }

    fn knows_digests(&self) -> bool {
        true
    }

    fn read_digests<'a>(
        &'a self,
        token: &'a Token,
        call: ReadDigests,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<SourceDigests>> {
        self.call_without_body(token, call, Bytes::new(), deadline)
    }

    fn has_packs(&self) -> bool {
        true
    }

    fn read_files<'a>(
        &'a self,
        token: &'a Token,
        call: ReadSources,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<(SourceData, Bytes)>> {
        Box::pin(self.location.call(token, call, Bytes::new(), deadline))
    }

    fn issue_upload_epoch<'a>(
        &'a self,
        token: &'a Token,
        path: &'a str,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<UploadEpoch>> {
        let call = IssueUploadEpoch {
            home_address: None,
            home_id: None,
            path: path.to_owned(),
        };
        let issued = self.call_without_body(token, call, Bytes::new(), deadline);
        Box::pin(async move { Ok(issued.await?.epoch) })
    }

    fn begin<'a>(
        &'a self,
        put: &'a HomeUpload,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<PutProgress>> {
        let call = BeginPut {
            extraction: put.extract,
            path: put.path.clone(),
            mode: put.mode,
            fence: put.fence,
        };
        self.call_without_body(&put.token, call, Bytes::new(), deadline)
    }

    fn concurrent_chunks_max(&self) -> usize {
        (PUT_REORDER_BYTES_MAX / IO_BYTES_MAX) as usize
    }

    fn write<'a>(
        &'a self,
        put: &'a HomeUpload,
        offset: u64,
        data: Bytes,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<PutProgress>> {
        let call = PutRange {
            extraction: put.extract,
            offset,
        };
        self.call_without_body(&put.token, call, data, deadline)
    }

    fn commit<'a>(
        &'a self,
        put: &'a HomeUpload,
        digest: Digest,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<PutReceipt>> {
        let call = CommitPut {
            extraction: put.extract,
            size: put.size,
            digest,
            fence: put.fence,
        };
        self.call_without_body(&put.token, call, Bytes::new(), deadline)
    }

    fn put<'a>(
        &'a self,
        put: &'a HomeUpload,
        data: Bytes,
        digest: Digest,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<PutReceipt>> {
        let Ok(size) = u32::try_from(data.len()) else {
            let text = format!("'{}' is too large to go with one call", put.path);
            return Box::pin(async { Err(Error::new(ErrorCode::Malformed, text)) });
        };
        let file = PutFile {
            extraction: put.extract,
            path: put.path.clone(),
            mode: put.mode,
            size,
            digest,
            token: put.token.clone(),
            fence: put.fence,
        };
        Box::pin(Arc::clone(&self.packs).put(file, data, deadline))
    }
}
