//! A home server of ours, asked over the network. It checks rights, ranges and changes itself.

use std::sync::Arc;

use bafs_proto::Result;
use bafs_proto::hash::Digest;
use bafs_proto::ids::ServerId;
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

/// Where a home server is, and which one must be there. Cheap to clone.
#[derive(Clone)]
pub(super) struct Place {
    pool: Pool,
    address: Arc<str>,
    id: Option<ServerId>,
}

impl Place {
    pub(super) fn new(pool: Pool, address: &str, id: Option<ServerId>) -> Self {
        let address = address.into();
        Self { pool, address, id }
    }

    /// Makes a call with raw data, once, and to no other server.
    pub(super) async fn call<C: Call>(
        &self,
        token: &Token,
        call: C,
        body: Bytes,
        deadline: Deadline,
    ) -> Result<(C::Reply, Bytes)> {
        let there = self.pool.connection_to(self.id, &self.address, deadline);
        let there = there.await?;
        there.call_with_body(token, call, body, deadline).await
    }
}

/// A home server.
pub(super) struct BafsHome {
    place: Place,
    packs: Arc<Packs>,
}

impl BafsHome {
    pub(super) fn new(place: Place) -> Self {
        let packs = Packs::new(place.clone());
        Self { place, packs }
    }

    /// Makes a call whose answer has no raw data.
    fn tell<'a, C: Call + 'a>(
        &'a self,
        token: &'a Token,
        call: C,
        body: Bytes,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<C::Reply>> {
        let told = self.place.call(token, call, body, deadline);
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
        self.tell(token, call, Bytes::new(), deadline)
    }

    fn read<'a>(
        &'a self,
        token: &'a Token,
        call: ReadSource,
        deadline: Deadline,
    ) -> BoxFuture<'a, Result<(SourceData, Bytes)>> {
        Box::pin(self.place.call(token, call, Bytes::new(), deadline))
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
        Box::pin(self.place.call(token, call, Bytes::new(), deadline))
    }

    fn begin<'a>(&'a self, put: &'a Put, deadline: Deadline) -> BoxFuture<'a, Result<PutProgress>> {
        let call = BeginPut {
            extract: put.extract,
            path: put.path.clone(),
            mode: put.mode,
        };
        self.tell(&put.token, call, Bytes::new(), deadline)
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
        self.tell(&put.token, call, data, deadline)
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
        self.tell(&put.token, call, Bytes::new(), deadline)
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
