//! A home server of ours, asked over QUIC. It checks rights, ranges and changes itself.

use bafs_proto::Result;
use bafs_proto::message::{ListSource, ReadSource, SourceData, SourcePage};
use bafs_proto::net::BoxFuture;
use bafs_proto::net::pool::Pool;
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bytes::Bytes;

use super::Home;

/// A home server.
pub(super) struct BafsHome {
    pool: Pool,
    address: String,
}

impl BafsHome {
    pub(super) fn new(pool: Pool, address: &str) -> Self {
        let address = address.to_owned();
        Self { pool, address }
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
}
