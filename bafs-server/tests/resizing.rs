//! Volumes that change their size, and writers that yield to others.

use crate::test_nodes::{A, NodeCluster, from_home, populated_home, spec, tree};
use bafs_proto::ErrorCode;
use bafs_proto::error::Result;
use bafs_proto::file_op::{BodyRange, Caller, FileOp, FileReply};
use bafs_proto::ids::{AgentId, InodeNo, VolumeId};
use bafs_proto::message::{CloseTree, GetVolume, OpenTree, RunFileOps, TreeRef, TreeSession};
use bafs_proto::volume::{ReplacementPolicy, ResizeVolume, VolumeKind, VolumeSpec, VolumeStatus};

const TREE: TreeRef = TreeRef::Volume(VolumeId(1));

async fn resize(world: &NodeCluster, id: u128, bytes: u64) -> Result<VolumeStatus> {
    let call = ResizeVolume {
        volume: VolumeId(id),
        size_bytes: bytes,
        size_files: None,
    };
    world.call(A, call).await
}

async fn open(world: &NodeCluster, agent: u64, yields: bool) -> Result<TreeSession> {
    let call = OpenTree {
        tree: TREE,
        agent: AgentId(agent),
        writable: true,
        yields,
        resumed_incarnation: None,
    };
    world.call(A, call).await
}

#[tokio::test(flavor = "multi_thread")]
async fn resized_volumes_are_reserved_exactly() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let config = world.config(store.path());
    let all = config.capacity_bytes;
    let node = world.node(A, config).await;
    let free = || node.advert().free_bytes;
    let sized = |id, bytes| VolumeSpec {
        size_bytes: bytes,
        ..spec(id, None)
    };
    world.create(A, sized(1, all / 2)).await.expect("create");
    world.create(A, sized(2, all / 4)).await.expect("create");
    assert_eq!(free(), all - all / 2 - all / 4);
    let refused = resize(&world, 1, all)
        .await
        .expect_err("there is too little");
    assert_eq!(refused.code, ErrorCode::NoSpaceBytes);
    assert_eq!(free(), all - all / 2 - all / 4);
    // Repeating it changes nothing.
    for _ in 0..2 {
        let smaller = resize(&world, 1, all / 4).await.expect("smaller");
        assert_eq!(smaller.spec.size_bytes, all / 4);
    }
    assert_eq!(free(), all - 2 * (all / 4));
    resize(&world, 1, all - all / 4).await.expect("larger");
    assert_eq!(free(), 0);
    for id in [1, 2] {
        let volume = VolumeId(id);
        world
            .call(A, bafs_proto::message::DeleteVolume { volume })
            .await
            .expect("delete");
    }
    for _ in 0..100 {
        if free() == all {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
    panic!("{} of {all} bytes are free", free());
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_see_the_new_size_at_once() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let _node = world.node(A, world.config(store.path())).await;
    let small = VolumeSpec {
        size_bytes: 64 << 10,
        ..spec(1, None)
    };
    world.create(A, small).await.expect("create");
    let epoch = open(&world, 1, false).await.expect("open").epoch;
    let run = |sequence, op| {
        let call = RunFileOps {
            tree: TREE,
            epoch,
            sequence,
            after_sequence: None,
            caller: Caller::default(),
            ops: vec![op],
            assigned_numbers: Vec::new(),
        };
        world.call(A, call)
    };
    let room = async |sequence| {
        let told = run(sequence, FileOp::StatFs).await.expect("statfs").results;
        match &told[0] {
            Ok(FileReply::StatFs(stat)) => stat.size_bytes,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(room(1).await, 64 << 10);
    resize(&world, 1, 1 << 20).await.expect("larger");
    assert_eq!(room(2).await, 1 << 20);
    let create = FileOp::Create {
        parent: InodeNo::ROOT,
        name: b"f".to_vec(),
        mode: 0o600,
        flags: 2,
    };
    let made = run(3, create).await.expect("create").results;
    let Ok(FileReply::Opened { handle, .. }) = made[0] else {
        panic!("{made:?}")
    };
    let allocate = FileOp::Allocate {
        handle,
        mode: 0,
        offset: 0,
        length: 512 << 10,
    };
    assert!(run(4, allocate).await.expect("allocate").results[0].is_ok());
    let refused = resize(&world, 1, 256 << 10)
        .await
        .expect_err("it holds more");
    assert_eq!(refused.code, ErrorCode::WrongState);
    assert_eq!(room(5).await, 1 << 20);
    // No room is left behind by what was refused.
    let data = BodyRange {
        start: 0,
        length: 0,
    };
    let write = FileOp::Write {
        handle,
        offset: 0,
        data,
        append: false,
    };
    assert!(run(6, write).await.expect("write").results[0].is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn caches_keep_their_new_size() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let _home = populated_home(&world);
    let _node = world.node(A, world.config(store.path())).await;
    let cache = VolumeSpec {
        kind: VolumeKind::Cache {
            source: from_home("in").expect("a source"),
            cooperative: "c".to_owned(),
            replacement: ReplacementPolicy::Lru,
            block_bytes: 64 << 10,
        },
        ..spec(2, None)
    };
    let before = cache.size_bytes;
    world.create(A, cache.clone()).await.expect("create");
    let resized = resize(&world, 2, before / 2).await.expect("smaller");
    assert_eq!(resized.spec.size_bytes, before / 2);
    // What was made is found again only as it is now.
    let old = world.create(A, cache.clone()).await.expect_err("another");
    assert_eq!(old.code, ErrorCode::Conflict);
    world.create(A, resized.spec).await.expect("the same");
}

#[tokio::test(flavor = "multi_thread")]
async fn yielding_writers_fence_nobody() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let _node = world.node(A, world.config(store.path())).await;
    world.create(A, spec(1, None)).await.expect("create");
    let first = open(&world, 1, true).await.expect("nobody else writes");
    let refused = open(&world, 2, true).await.expect_err("one writes");
    assert_eq!(refused.code, ErrorCode::LeaseHeld);
    let alive = RunFileOps {
        tree: TREE,
        epoch: first.epoch,
        sequence: 1,
        after_sequence: None,
        caller: Caller::default(),
        ops: vec![FileOp::StatFs],
        assigned_numbers: Vec::new(),
    };
    world.call(A, alive.clone()).await.expect("not fenced");
    // A job goes first.
    open(&world, 3, false).await.expect("a job opens it");
    let fenced = RunFileOps {
        sequence: 2,
        ..alive
    };
    let fenced = world.call(A, fenced).await.expect_err("a job writes");
    assert_eq!(fenced.code, ErrorCode::Fenced);
    let refused = open(&world, 2, true).await.expect_err("the job writes");
    assert_eq!(refused.code, ErrorCode::LeaseHeld);
    let job = open(&world, 3, false).await.expect("again");
    let close = CloseTree {
        tree: TREE,
        epoch: job.epoch,
        lifetime_ms_min: 0,
    };
    world.call(A, close).await.expect("close");
    open(&world, 2, true).await.expect("the job has ended");
    let volume = VolumeId(1);
    world.call(A, GetVolume { volume }).await.expect("it lives");
    assert!(tree(store.path(), 1).exists());
}
