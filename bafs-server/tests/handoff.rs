//! Trees handed over to agents: rights, who accounts for what, fencing, deletion, restarts.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use crate::test_nodes::{FOREVER, NodeCluster, spec};
use bafs_proto::fd_passing::{
    GetHandoffTicket, HandoffCall, HandoffHello, HandoffHelloReply, HandoffMessage, HandoffRequest,
    HandoffTarget,
};
use bafs_proto::file_op::{Caller, FileOp};
use bafs_proto::ids::{AgentId, Epoch, VolumeId};
use bafs_proto::message::{CloseTree, DeleteVolume, GetVolume, OpenTree, RunFileOps, TreeRef};
use bafs_proto::net::packets::PacketSocket;
use bafs_proto::time::Deadline;
use bafs_proto::token::{Resource, Right};
use bafs_proto::volume::{LimitKind, VolumeSpec};
use bafs_proto::{ErrorCode, PROTOCOL_VERSION, Result, codec};
use bafs_server::node::{Node, NodeConfig};
use tempfile::TempDir;
use tokio::task::JoinHandle;

const A: &str = "node:1";
const V: VolumeId = VolumeId(1);

struct NodeFixture {
    world: NodeCluster,
    store: TempDir,
    node: Arc<Node>,
    tasks: Vec<JoinHandle<()>>,
}

struct ReceivedHandoff {
    packets: PacketSocket,
    opening: HandoffHelloReply,
    files: Vec<OwnedFd>,
}

impl NodeFixture {
    async fn new() -> Self {
        Self::with_limit(LimitKind::Exact).await
    }

    async fn with_limit(limit: LimitKind) -> Self {
        let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("directory"));
        let config = NodeConfig {
            capacity_bytes: 1 << 30,
            capacity_files: 100_000,
            ..world.config(store.path())
        };
        let node = world.node(A, config).await;
        let tasks = node.start_background_tasks();
        let spec = VolumeSpec {
            limit,
            ..spec(1, None)
        };
        world.create(A, spec).await.expect("volume");
        Self {
            world,
            store,
            node,
            tasks,
        }
    }

    async fn open(&self, writable: bool) -> Result<Epoch> {
        let (tree, agent) = (TreeRef::Volume(V), AgentId(1));
        let call = OpenTree {
            tree,
            agent,
            writable,
            yields: false,
            resumed_incarnation: None,
        };
        Ok(self.world.call_for(A, call, 1_000).await?.epoch)
    }

    /// Shows a ticket for the tree, once the door is open.
    async fn receive_tree(&self, epoch: Epoch) -> Result<ReceivedHandoff> {
        let ticket = loop {
            let tree = TreeRef::Volume(V);
            let what = HandoffTarget::Tree { tree, epoch };
            match self.world.call(A, GetHandoffTicket { target: what }).await {
                Err(error) if error.code == ErrorCode::Unsupported => {
                    tokio::task::yield_now().await;
                }
                ticket => break ticket?,
            }
        };
        let packets = PacketSocket::connect(Path::new(&ticket.socket)).expect("connect");
        let hello = HandoffHello {
            version: PROTOCOL_VERSION,
            secret: ticket.secret,
        };
        let bytes = codec::encode(&hello).expect("encode");
        packets.send(&bytes, &[]).await.expect("send");
        let (bytes, files) = packets.receive().await.expect("receive").expect("answer");
        let opening = codec::decode(&bytes).expect("decode");
        Ok(ReceivedHandoff {
            packets,
            opening,
            files,
        })
    }

    async fn run(&self, epoch: Epoch, ops: Vec<FileOp>) -> Result<()> {
        let call = RunFileOps {
            tree: TreeRef::Volume(V),
            epoch,
            sequence: 1,
            after_sequence: None,
            caller: Caller::default(),
            ops,
            assigned_numbers: Vec::new(),
        };
        self.world.call(A, call).await.map(drop)
    }

    fn tree(&self) -> std::path::PathBuf {
        let volume = self.store.path().join("volumes").join(V.to_string());
        volume.join("tree")
    }
}

impl ReceivedHandoff {
    async fn next_message(&self) -> HandoffMessage {
        let (bytes, _) = self
            .packets
            .receive()
            .await
            .expect("receive")
            .expect("word");
        codec::decode(&bytes).expect("decode")
    }

    async fn wait_for_end(&self) -> ErrorCode {
        match self.next_message().await {
            HandoffMessage::Revoke { reason: why } => why.code,
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_handed_off_writer_keeps_its_server_lease() {
    let served = NodeFixture::new().await;
    let epoch = served.open(true).await.expect("open");
    let handed = served.receive_tree(epoch).await.expect("ticket");
    handed.opening.as_ref().expect("opened");
    assert_eq!(handed.files.len(), 2);
    // The lease goes on; operations are the agent's own.
    served.run(epoch, Vec::new()).await.expect("a sign of life");
    let refused = served.run(epoch, vec![FileOp::StatFs]).await;
    assert_eq!(
        refused.expect_err("not here").code,
        ErrorCode::SessionUnknown
    );
    // What the agent tells is shown, and counted anew once it is gone.
    let (number, request) = (1, HandoffRequest::ReportUse { bytes: 5, files: 6 });
    let bytes = codec::encode(&HandoffCall { number, request }).expect("encode");
    handed.packets.send(&bytes, &[]).await.expect("send");
    handed.next_message().await;
    let show = GetVolume { volume: V };
    let shown = served.world.call(A, show).await.expect("show");
    assert_eq!((shown.used_bytes, shown.used_files), (5, 6));
    std::fs::write(served.tree().join("f"), [7; 10_000]).expect("write");
    drop(handed);
    loop {
        let shown = served.world.call(A, show).await.expect("show");
        if (shown.used_bytes, shown.used_files) == (12_288, 1) {
            break;
        }
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_handoff_needs_the_rights_of_its_session() {
    let served = NodeFixture::new().await;
    let epoch = served.open(true).await.expect("open");
    let (tree, signer) = (TreeRef::Volume(V), served.world.authority.signer());
    for (resource, right) in [
        (Resource::Volume(V), Right::Read),
        (Resource::Volume(VolumeId(2)), Right::Write),
    ] {
        let token = signer.grant(&[resource], &[right], FOREVER);
        let (token, deadline) = (token.expect("token"), Deadline::after_ms(2_000));
        let what = HandoffTarget::Tree {
            tree: tree.clone(),
            epoch,
        };
        let pool = &served.world.pool;
        let refused = pool
            .call(A, &token, GetHandoffTicket { target: what }, deadline)
            .await;
        assert_eq!(refused.expect_err("refused").code, ErrorCode::RightMissing);
    }
}

#[tokio::test]
async fn shared_or_active_writers_are_not_handed_off() {
    let served = NodeFixture::new().await;
    let reader = served.open(false).await.expect("open");
    let writer = served.open(true).await.expect("open");
    let refused = served.receive_tree(writer).await.expect("ticket").opening;
    assert_eq!(refused.expect_err("company").code, ErrorCode::WrongState);
    served
        .run(writer, vec![FileOp::StatFs])
        .await
        .expect("still good");
    let (tree, epoch) = (TreeRef::Volume(V), reader);
    let close = CloseTree {
        tree,
        epoch,
        lifetime_ms_min: 0,
    };
    served.world.call(A, close).await.expect("close");
    let refused = served.receive_tree(writer).await.expect("ticket").opening;
    assert_eq!(refused.expect_err("begun").code, ErrorCode::WrongState);
}

#[tokio::test]
async fn the_next_writer_waits_for_the_lock() {
    let served = NodeFixture::new().await;
    let first = served.open(true).await.expect("open");
    let mut handed = served.receive_tree(first).await.expect("ticket");
    handed.opening.as_ref().expect("opened");
    let busy = served.open(true).await.expect_err("kept out");
    assert_eq!(busy.code, ErrorCode::Busy);
    assert_eq!(handed.wait_for_end().await, ErrorCode::Fenced);
    let fenced = served.run(first, Vec::new()).await.expect_err("fenced");
    assert_eq!(fenced.code, ErrorCode::Fenced);
    // The connection alone is not what counts: the lock is.
    let lock = handed.files.pop().expect("lock");
    drop(handed);
    assert_eq!(
        served.open(true).await.expect_err("kept").code,
        ErrorCode::Busy
    );
    drop(lock);
    let second = served.open(true).await.expect("free");
    served
        .run(second, vec![FileOp::StatFs])
        .await
        .expect("runs");
}

#[tokio::test]
async fn only_killed_agents_leave_mounts_to_search() {
    let served = NodeFixture::with_limit(LimitKind::Watched).await;
    for (is_closed, searches) in [(true, 0), (true, 0), (false, 0), (true, 1), (true, 1)] {
        let epoch = served.open(true).await.expect("open");
        assert_eq!(served.world.counter(A, "mount_searches").await, searches);
        let handed = served.receive_tree(epoch).await.expect("ticket");
        handed.opening.as_ref().expect("opened");
        drop(handed);
        let call = CloseTree {
            tree: TreeRef::Volume(V),
            epoch,
            lifetime_ms_min: 0,
        };
        if is_closed {
            served.world.call(A, call).await.expect("close");
        }
    }
}

#[tokio::test]
async fn a_restarted_server_waits_for_earlier_writers() {
    let served = NodeFixture::new().await;
    let first = served.open(true).await.expect("open");
    let handed = served.receive_tree(first).await.expect("ticket");
    handed.opening.as_ref().expect("opened");
    let NodeFixture {
        world,
        store,
        node,
        tasks,
    } = served;
    tasks.iter().for_each(JoinHandle::abort);
    world.network.kill(A);
    drop(node);
    for task in tasks {
        let _ = task.await;
    }
    let node = world.node(A, world.config(store.path())).await;
    let tasks = node.start_background_tasks();
    let served = NodeFixture {
        world,
        store,
        node,
        tasks,
    };
    assert_eq!(
        served.open(true).await.expect_err("kept").code,
        ErrorCode::Busy
    );
    assert_eq!(
        served.open(false).await.expect_err("kept").code,
        ErrorCode::Busy
    );
    drop(handed);
    served.open(true).await.expect("free");
}

#[tokio::test]
async fn deleting_a_volume_recalls_all_handoffs() {
    let served = NodeFixture::new().await;
    let writer = served.open(true).await.expect("open");
    let writer = served.receive_tree(writer).await.expect("ticket");
    let reader = served.open(false).await.expect("open");
    let reader = served.receive_tree(reader).await.expect("ticket");
    assert_eq!(reader.files.len(), 1, "a reader gets no lock");
    let delete = DeleteVolume { volume: V };
    let deleting = served.world.call(A, delete);
    let giving_back = async {
        for handed in [writer, reader] {
            assert_eq!(handed.wait_for_end().await, ErrorCode::VolumeLost);
            assert!(
                served.tree().exists(),
                "nothing goes before all have let go"
            );
        }
    };
    let (deleted, ()) = tokio::join!(deleting, giving_back);
    deleted.expect("deleted");
    assert!(!served.tree().exists());
}
