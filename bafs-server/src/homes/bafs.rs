//! A home server of ours, asked over the network. It checks rights, ranges and changes itself.

use std::sync::Arc;

use bafs_proto::Result;
use bafs_proto::hash::Digest;
use bafs_proto::limits::{IO_BYTES_MAX, PUT_AHEAD_BYTES_MAX};
use bafs_proto::message::{
    BeginPut, Call, CommitPut, ListSource, PutFile, PutProgress, PutRange, PutReceipt, ReadSource,
    SourceData, SourcePage,
};
use bafs_proto::net::BoxFuture;
use bafs_proto::net::pool::Pool;
use bafs_proto::replica::ReadSources;
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bytes::Bytes;

use super::packs::Packs;
use super::{Home, Put};

/// A home server.
pub(super) struct BafsHome {
    pool: Pool,
    address: String,
    packs: Arc<Packs>,
}

impl BafsHome {
    pub(super) fn new(pool: Pool, address: &str) -> Self {
        let packs = Packs::new(pool.clone(), address);
        let address = address.to_owned();
        Self {
            pool,
            address,
            packs,
        }
    }

    /// Makes a call of an upload with bytes of its file.
    fn send<'a, C: Call + 'a>(
        &'a self,
        put: &'a Put,
        call: C,
        data: Bytes,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<C::Reply>> {
        let (address, token) = (&self.address, &put.token);
        let told = self
            .pool
            .call_with_body(address, token, call, data, deadline);
        Box::pin(async move { told.await.map(|(told, _)| told) })
    }
}

impl Home for BafsHome {
    fn list<'a>(
        &'a self,
        token: &'a Token,
        call: ListSource,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<SourcePage>> {
        Box::pin(self.pool.call(&self.address, token, call, deadline))
    }

    fn read<'a>(
        &'a self,
        token: &'a Token,
        call: ReadSource,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<(SourceData, Bytes)>> {
        let body = Bytes::new();
        let asked = self
            .pool
            .call_with_body(&self.address, token, call, body, deadline);
        Box::pin(asked)
    }

    fn packs(&self) -> bool {
        true
    }

    fn read_files<'a>(
        &'a self,
        token: &'a Token,
        call: ReadSources,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<(SourceData, Bytes)>> {
        let body = Bytes::new();
        let asked = self
            .pool
            .call_with_body(&self.address, token, call, body, deadline);
        Box::pin(asked)
    }

    fn begin<'a>(&'a self, put: &'a Put, deadline: Deadline) -> BoxFuture<'a, Result<PutProgress>> {
        let call = BeginPut {
            extract: put.extract,
            path: put.path.clone(),
            mode: put.mode,
        };
        Box::pin(self.pool.call(&self.address, &put.token, call, deadline))
    }

    fn pieces_max(&self) -> usize {
        (PUT_AHEAD_BYTES_MAX / IO_BYTES_MAX) as usize
    }

    fn write<'a>(
        &'a self,
        put: &'a Put,
        offset: u64,
        data: Bytes,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<PutProgress>> {
        let call = PutRange {
            extract: put.extract,
            offset,
        };
        self.send(put, call, data, deadline)
    }

    fn commit<'a>(
        &'a self,
        put: &'a Put,
        digest: Digest,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<PutReceipt>> {
        let call = CommitPut {
            extract: put.extract,
            size: put.size,
            digest,
        };
        Box::pin(self.pool.call(&self.address, &put.token, call, deadline))
    }

    fn put<'a>(
        &'a self,
        put: &'a Put,
        data: Bytes,
        digest: Digest,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<PutReceipt>> {
        let call = PutFile {
            extract: put.extract,
            path: put.path.clone(),
            mode: put.mode,
            digest,
        };
        let (packs, token) = (Arc::clone(&self.packs), put.token.clone());
        Box::pin(packs.put(call, token, data, deadline))
    }
}
