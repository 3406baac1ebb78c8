//! A host that holds a home and knows nothing of rights and deadlines, as a home: whose address
//! is named in what goes wrong.

use bafs_proto::hash::Digest;
use bafs_proto::message::{
    ListSource, PutProgress, PutReceipt, ReadSource, SourceData, SourceIdentity, SourcePage,
};
use bafs_proto::net::BoxFuture;
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::{Error, Result};
use bytes::Bytes;

use super::home_backend::HomeBackend;
use super::home_upload::HomeUpload;

/// What is asked of a host; each as in [`HomeBackend`].
pub(super) trait PlainHost: Send + Sync {
    fn list(&self, path: &str) -> impl Future<Output = Result<SourcePage>> + Send;

    fn read(&self, call: &ReadSource) -> impl Future<Output = Result<(SourceData, Bytes)>> + Send;

    /// The file at a path, if there is one.
    fn identify(&self, path: &str) -> impl Future<Output = Result<Option<SourceIdentity>>> + Send;

    fn begin(&self, put: &HomeUpload) -> impl Future<Output = Result<PutProgress>> + Send;

    fn write(
        &self,
        put: &HomeUpload,
        offset: u64,
        data: &[u8],
    ) -> impl Future<Output = Result<PutProgress>> + Send;

    fn commit(
        &self,
        put: &HomeUpload,
        digest: Digest,
    ) -> impl Future<Output = Result<PutReceipt>> + Send;
}

/// A host at an address.
pub(super) struct HostHome<H> {
    address: String,
    host: H,
}

impl<H: PlainHost> HostHome<H> {
    pub(super) fn new(address: &str, host: H) -> Self {
        Self {
            address: address.to_owned(),
            host,
        }
    }

    fn name_address(&self, path: &str) -> impl Fn(Error) -> Error {
        let at = format!("{}, '{path}'", self.address);
        move |error| error.context(&at)
    }
}

impl<H: PlainHost> HomeBackend for HostHome<H> {
    fn list<'a>(
        &'a self,
        _token: &'a Token,
        call: ListSource,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<SourcePage>> {
        Box::pin(async move {
            let listed = self.host.list(&call.path).await;
            listed.map_err(self.name_address(&call.path))
        })
    }

    fn read<'a>(
        &'a self,
        _token: &'a Token,
        call: ReadSource,
        _deadline: Deadline,
    ) -> BoxFuture<'a, Result<(SourceData, Bytes)>> {
        Box::pin(async move {
            let read = self.host.read(&call).await;
            read.map_err(self.name_address(&call.path))
        })
    }

    fn begin<'a>(&'a self, put: &'a HomeUpload, _: Deadline) -> BoxFuture<'a, Result<PutProgress>> {
        Box::pin(async move {
            let begun = async {
                put.replaced.note(self.host.identify(&put.path).await?);
                self.host.begin(put).await
            };
            begun.await.map_err(self.name_address(&put.path))
        })
    }

    fn write<'a>(
        &'a self,
        put: &'a HomeUpload,
        offset: u64,
        data: Bytes,
        _: Deadline,
    ) -> BoxFuture<'a, Result<PutProgress>> {
        Box::pin(async move {
            let written = self.host.write(put, offset, &data).await;
            written.map_err(self.name_address(&put.path))
        })
    }

    fn commit<'a>(
        &'a self,
        put: &'a HomeUpload,
        digest: Digest,
        _: Deadline,
    ) -> BoxFuture<'a, Result<PutReceipt>> {
        Box::pin(async move {
            let committed = self.host.commit(put, digest).await;
            committed.map_err(self.name_address(&put.path))
        })
    }
}
