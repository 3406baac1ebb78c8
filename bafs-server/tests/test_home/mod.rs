//! A home server on a real directory within one process, and calls to it, for tests.

use std::fs;

use bafs_proto::ErrorCode;
use bafs_proto::error::Result;
use bafs_proto::hash::Digest;
use bafs_proto::ids::ExtractionId;
use bafs_proto::message::{
    BeginPut, Call, CommitPut, ListSource, PutFile, PutFiles, PutRange, PutReceipt, ReadCounters,
    ReadSource, SourceIdentity, StatSource,
};
use bafs_proto::net::memory::MemoryNetwork;
use bafs_proto::net::pool::Pool;
use bafs_proto::time::{Deadline, Time};
use bafs_proto::token::{Resource, Right, Signer, Token};
use bafs_server::home_server::HomeServer;
use bytes::Bytes;
use tempfile::TempDir;

pub(crate) const BLOCK: u32 = 4096;

/// When tokens expire.
const NEVER: Time = Time(u64::MAX >> 2);

pub(crate) struct HomeFixture {
    pub(crate) root: TempDir,
    pub(crate) signer: Signer,
    pub(crate) network: MemoryNetwork,
    pub(crate) pool: Pool,
    pub(crate) token: Token,
}

impl HomeFixture {
    pub(crate) fn new() -> Self {
        Self::with_limit(None)
    }

    pub(crate) fn with_limit(limit: Option<u64>) -> Self {
        let root = tempfile::tempdir().expect("directory");
        let signer = Signer::generate();
        let network = MemoryNetwork::new();
        let pool = Pool::new(network.dialer("agent"));
        let token = grant(&signer, "", &[Right::Read, Right::Write]);
        let world = Self {
            root,
            signer,
            network,
            pool,
            token,
        };
        world.start(limit);
        world
    }

    /// Starts the server, or starts it again as after a crash.
    pub(crate) fn start(&self, limit: Option<u64>) {
        let home = HomeServer::open(self.root.path(), self.signer.verifier(), limit).expect("home");
        self.network.listen("home", home);
    }

    pub(crate) fn file(&self, path: &str, content: &[u8]) {
        let path = self.root.path().join(path);
        fs::create_dir_all(path.parent().expect("parent")).expect("mkdir");
        fs::write(path, content).expect("write");
    }

    pub(crate) async fn call<C: Call>(&self, call: C) -> Result<C::Reply> {
        self.send(&self.token, call, b"")
            .await
            .map(|(reply, _)| reply)
    }

    pub(crate) async fn send<C: Call>(
        &self,
        token: &Token,
        call: C,
        body: &[u8],
    ) -> Result<(C::Reply, Bytes)> {
        let body = Bytes::copy_from_slice(body);
        self.pool
            .call_with_body("home", token, call, body, Deadline::after_ms(20_000))
            .await
    }

    pub(crate) async fn list(&self, path: &str) -> Vec<String> {
        let (mut paths, mut after) = (Vec::new(), None);
        loop {
            let call = ListSource {
                path: path.to_owned(),
                after,
            };
            let page = self.call(call).await.expect("list");
            paths.extend(page.entries.into_iter().map(|entry| entry.path));
            if !page.has_more {
                return paths;
            }
            after = paths.last().cloned();
        }
    }

    pub(crate) async fn identity(&self, path: &str) -> SourceIdentity {
        self.call(StatSource {
            path: path.to_owned(),
        })
        .await
        .expect("stat")
        .identity
    }

    pub(crate) async fn put_range(&self, id: u128, offset: u64, data: &[u8]) -> Result<u64> {
        let call = PutRange {
            extraction: ExtractionId(id),
            offset,
        };
        let (progress, _) = self.send(&self.token, call, data).await?;
        Ok(progress.received_bytes)
    }

    pub(crate) async fn put(&self, id: u128, path: &str, data: &[u8]) -> Result<CommitPut> {
        self.call(begin(id, path)).await?;
        self.put_range(id, 0, data).await?;
        let (extract, size) = (ExtractionId(id), data.len() as u64);
        Ok(CommitPut {
            extraction: extract,
            size,
            digest: Digest::of(data),
            fence: None,
        })
    }

    /// Uploads a small file with one call.
    pub(crate) async fn put_small(
        &self,
        id: u128,
        path: &str,
        digest: Digest,
        data: &[u8],
    ) -> Result<PutReceipt> {
        self.put_small_as(&self.token, id, path, digest, data).await
    }

    /// As [`Self::put_small`], with another token.
    pub(crate) async fn put_small_as(
        &self,
        token: &Token,
        id: u128,
        path: &str,
        digest: Digest,
        data: &[u8],
    ) -> Result<PutReceipt> {
        let file = PutFile {
            extraction: ExtractionId(id),
            path: path.to_owned(),
            mode: 0o640,
            size: data.len() as u32,
            digest,
            token: token.clone(),
            fence: None,
        };
        let call = PutFiles { files: vec![file] };
        let (mut told, _) = self.send(token, call, data).await?;
        told.results.remove(0)
    }

    pub(crate) async fn counter(&self, name: &str) -> u64 {
        let right = [Right::Read];
        let token = self.signer.grant(&[Resource::Catalog], &right, NEVER);
        let token = token.expect("grant");
        let (counters, _) = self
            .send(&token, ReadCounters, b"")
            .await
            .expect("counters");
        counters.values.get(name).copied().unwrap_or(0)
    }
}

pub(crate) fn begin(id: u128, path: &str) -> BeginPut {
    BeginPut {
        extraction: ExtractionId(id),
        path: path.to_owned(),
        mode: 0o640,
        fence: None,
    }
}

pub(crate) fn grant(signer: &Signer, path: &str, rights: &[Right]) -> Token {
    let resource = Resource::Home(path.to_owned());
    signer.grant(&[resource], rights, NEVER).expect("grant")
}

pub(crate) fn error_code<T: std::fmt::Debug>(result: Result<T>) -> ErrorCode {
    result.expect_err("must be refused").code
}

pub(crate) fn read(path: &str, identity: SourceIdentity, offset: u64, length: u32) -> ReadSource {
    ReadSource {
        path: path.to_owned(),
        identity,
        offset,
        length,
        block_bytes: BLOCK,
    }
}
