//! A volume behind a small server, with a delegation.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bafs_client::sandbox::Access;
use bafs_client::tree::{Durability, RemoteTree, Tree};
use bafs_client::usage::VolumeUsage;
use bafs_client::volume::{Ownership, Volume, VolumeMode};
use bafs_client::volume_health::{VolumeHealth, VolumeLoss};
use bafs_proto::file_op::{Caller, FileOp, FileResult};
use bafs_proto::ids::AgentId;
use bafs_proto::message::TreeRef;
use bafs_tree::Limit;
use tokio::sync::{mpsc, oneshot};

use crate::test_server::{FakeServer, VOLUME};

pub(crate) struct DelegationFixture {
    pub(crate) server: Arc<FakeServer>,
    pub(crate) volume: Arc<Volume>,
    _losses: mpsc::UnboundedReceiver<VolumeLoss>,
    pub(crate) directory: tempfile::TempDir,
}

impl DelegationFixture {
    pub(crate) async fn new(durability: Durability) -> Self {
        Self::with_limit(durability, None).await
    }

    pub(crate) async fn with_limit(durability: Durability, limit: Option<Limit>) -> Self {
        Self::with_files(durability, limit, |_| {}).await
    }

    /// One in whose directory there are files that `make` makes.
    pub(crate) async fn with_files(
        durability: Durability,
        limit: Option<Limit>,
        make: impl FnOnce(&Path),
    ) -> Self {
        Self::with_access(Access::ReadWrite, Some(durability), limit, make).await
    }

    /// One that is only read.
    pub(crate) async fn read_only(make: impl FnOnce(&Path)) -> Self {
        Self::with_access(Access::ReadOnly, None, None, make).await
    }

    async fn with_access(
        access: Access,
        durability: Option<Durability>,
        limit: Option<Limit>,
        make: impl FnOnce(&Path),
    ) -> Self {
        let directory = tempfile::tempdir().unwrap();
        make(directory.path());
        let is_writable = access == Access::ReadWrite;
        let server = FakeServer::with_limit(directory.path(), limit);
        let (sender, losses) = mpsc::unbounded_channel();
        let health = VolumeHealth::new("work", sender);
        let (called, agent) = (server.server(5_000), AgentId::random());
        let name = TreeRef::Volume(VOLUME);
        let tree = RemoteTree::open(called, name, agent, is_writable, health.clone());
        let tree = tree.await.unwrap();
        if let Some(durability) = durability {
            tree.delegate(durability).await;
        }
        let (mode, ownership) = (VolumeMode::scratch(access), Ownership::AsStored);
        let tree = Tree::Remote(tree);
        let volume = Volume::new("work", tree, mode, ownership, health, VolumeUsage::new());
        Self {
            server,
            volume: Arc::new(volume),
            _losses: losses,
            directory,
        }
    }

    pub(crate) async fn run(&self, op: FileOp, data: &[u8]) -> (FileResult, Vec<u8>) {
        let (send, receive) = oneshot::channel();
        let done = move |result, data: &[u8]| drop(send.send((result, data.to_vec())));
        self.volume.run(Caller::default(), op, data, Box::new(done));
        let answered = tokio::time::timeout(Duration::from_secs(20), receive).await;
        answered.expect("it is answered").unwrap()
    }

    pub(crate) async fn flush(&self) {
        self.run(FileOp::StatFs, &[]).await.0.unwrap();
    }
}
