//! A node of this process that is like any other, but sends its peers other bytes than home has,
//! with digests that fit them.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Result, anyhow};
use bafs_proto::attributes::Attributes;
use bafs_proto::hash::Digest;
use bafs_proto::identity::Identity;
use bafs_proto::message::{BlockData, CacheRef, Reply, Request, Role};
use bafs_proto::net::channel::Listener;
use bafs_proto::net::{BoxFuture, IncomingRequest, Service};
use bafs_server::counters::Metrics;
use bafs_server::home_clients::HomeSettings;
use bafs_server::node::{Node, NodeConfig};
use bafs_server::serving::{RunningServer, pool};
use bytes::Bytes;

/// The node. It stops when it is dropped with its runtime.
#[derive(Debug)]
pub(super) struct LyingNode {
    server: RunningServer,
    service: Arc<Liar>,
}

#[derive(Debug)]
struct Liar {
    node: Arc<Node>,
    lies: AtomicU64,
}

impl LyingNode {
    /// Starts the node with a store. Must be called within a runtime.
    pub(super) async fn start(identity: &Path, catalog: &str, store: &Path) -> Result<Self> {
        let identity = Identity::load(&identity.join("server"), Role::Server)?;
        let listener = Listener::bind("127.0.0.1:0", &identity)?;
        let address = listener.local_address()?.to_string();
        let pool = pool(&identity)?;
        let config = NodeConfig {
            catalog_timeout: None,
            listen: address.clone(),
            identity,
            store: store.to_owned(),
            capacity_bytes: 200 << 20,
            capacity_files: 10_000,
            catalog: Some(catalog.to_owned()),
            group: String::new(),
            name: "liar".to_owned(),
            slots: 0,
            agent_program: "/bin/false".into(),
            agent_identity: "/nowhere".into(),
            agent_memory_bytes: None,
            temporary_bytes: None,
            shared_memory_bytes: None,
            homes: HomeSettings::default(),
            trusts_peers: false,
            attributes: Attributes::default(),
            lifetime: None,
            grace: Duration::ZERO,
        };
        let node = Node::open(config, address, pool).await;
        let node = node.map_err(|error| anyhow!("the lying node: {error}"))?;
        let service = Arc::new(Liar {
            node: node.clone(),
            lies: AtomicU64::new(0),
        });
        let figures = Arc::new(Metrics::default);
        let mut server = RunningServer::start(listener, service.clone(), figures)?;
        for task in node.start_background_tasks() {
            server.add_task(task);
        }
        Ok(Self { server, service })
    }

    /// Where it listens.
    pub(super) fn address(&self) -> String {
        self.server.address().to_string()
    }

    /// False blocks that it has sent.
    pub(super) fn lies(&self) -> u64 {
        self.service.lies.load(Ordering::Relaxed)
    }
}

impl Liar {
    /// Flips a bit of each block.
    fn falsify(&self, blocks: &mut BlockData, body: &mut Bytes, block_bytes: usize) {
        let mut other = body.to_vec();
        let digests = blocks.digests.iter_mut().filter(|it| !it.is_of_no_bytes());
        for (block, digest) in other.chunks_mut(block_bytes).zip(digests) {
            block[0] ^= 1;
            *digest = Digest::of(block);
            self.lies.fetch_add(1, Ordering::Relaxed);
        }
        *body = other.into();
    }
}

impl Service for Liar {
    fn serve(
        self: Arc<Self>,
        incoming: IncomingRequest,
    ) -> BoxFuture<'static, bafs_proto::Result<(Reply, Bytes)>> {
        // Its own readers get what home has.
        let is_peer = |cache: &CacheRef| matches!(cache, CacheRef::Cooperative(_));
        let is_asked = match &incoming.request {
            Request::ReadBlocks(call) => is_peer(&call.range.cache),
            Request::Probe(call) => is_peer(&call.range.cache),
            _ => false,
        };
        Box::pin(async move {
            let (mut reply, mut body) = self.node.clone().serve(incoming).await?;
            if let Reply::ReadBlocks(blocks) | Reply::Probe(blocks) = &mut reply
                && is_asked
            {
                self.falsify(blocks, &mut body, super::integrity::BLOCK_BYTES);
            }
            Ok((reply, body))
        })
    }
}
