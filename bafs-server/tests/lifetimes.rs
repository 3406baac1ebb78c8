//! How long volumes live: whose interest puts off their end, and what they hold.

use crate::test_nodes::{A, NodeCluster, spec, tree};
use bafs_proto::ErrorCode;
use bafs_proto::ids::{AgentId, Epoch, ServerId, VolumeId};
use bafs_proto::message::{
    CloseTree, CreateVolume, DeleteVolume, DrainNode, GetVolume, OpenTree, RenewVolumes, TreeRef,
};
use bafs_proto::token::Token;
use bafs_proto::volume::{VolumeSpec, VolumeState};

const B: &str = "b:1";

fn get_volume(id: u128) -> GetVolume {
    let volume = VolumeId(id);
    GetVolume { volume }
}

#[tokio::test(flavor = "multi_thread")]
async fn volumes_expire_unless_renewed() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let node = world.node(A, world.config(store.path())).await;
    let tasks = node.start_background_tasks();
    let short = |id| VolumeSpec {
        lifetime_ms: 1_500,
        ..spec(id, None)
    };
    world.create(A, short(1)).await.expect("create");
    world.create(A, short(2)).await.expect("create");
    let volumes = vec![VolumeId(1), VolumeId(9)];
    let mut lost = Vec::new();
    for _ in 0..20 {
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
        lost = world
            .call(
                A,
                RenewVolumes {
                    volumes: volumes.clone(),
                    lifetime_ms: 0,
                    gives_way: false,
                },
            )
            .await
            .expect("renew")
            .lost_volumes;
    }
    assert_eq!(lost, [VolumeId(9)]);
    assert_eq!(
        world.call(A, get_volume(1)).await.expect("renewed").state,
        VolumeState::Ready
    );
    assert_eq!(
        world
            .call(A, get_volume(2))
            .await
            .expect_err("expired")
            .code,
        ErrorCode::VolumeLost
    );
    assert!(!tree(store.path(), 2).exists());
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
}

/// As on a disk that is full for a while.
#[tokio::test(flavor = "multi_thread")]
async fn failed_deletions_are_retried_and_free_their_space() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let config = world.config(store.path());
    let all = config.capacity_bytes;
    let node = world.node(A, config).await;
    let tasks = node.start_background_tasks();
    let large = |id| VolumeSpec {
        size_bytes: all,
        ..spec(id, None)
    };
    world.create(A, large(1)).await.expect("create");
    let trash = store.path().join("trash");
    std::fs::remove_dir(&trash).expect("remove");
    std::fs::write(&trash, "in the way").expect("write");
    let delete = DeleteVolume {
        volume: VolumeId(1),
    };
    world.call(A, delete).await.expect_err("no trash");
    assert!(tree(store.path(), 1).exists());
    std::fs::remove_file(&trash).expect("remove");
    std::fs::create_dir(&trash).expect("create");
    // Whoever needs the room waits for it.
    world.create(A, large(2)).await.expect("create");
    assert!(!tree(store.path(), 1).exists());
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test(flavor = "multi_thread")]
async fn kept_volume_gives_way_also_after_a_restart() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let config = world.config(store.path());
    let most = config.capacity_bytes / 10 * 6;
    let _node = world.node(A, config).await;
    let large = |id| VolumeSpec {
        size_bytes: most,
        ..spec(id, None)
    };
    let renew = |id, gives_way| RenewVolumes {
        volumes: vec![VolumeId(id)],
        lifetime_ms: 3_600_000,
        gives_way,
    };
    world.create(A, large(1)).await.expect("create");
    world.call(A, renew(1, true)).await.expect("renew");
    let after = tempfile::tempdir().expect("store");
    copy_store(store.path(), after.path());
    // Its run comes back, and another one finds no room.
    world.call(A, renew(1, false)).await.expect("renew");
    let refused = world.create(A, large(2)).await.expect_err("no room");
    assert_eq!(refused.code, ErrorCode::NoSpaceBytes);
    assert!(tree(store.path(), 1).exists());
    let _again = world.node(B, world.config(after.path())).await;
    world.create(B, large(2)).await.expect("it gives way");
    assert!(!tree(after.path(), 1).exists());
    let lost = world.call(B, renew(1, false)).await.expect("renew");
    assert_eq!(lost.lost_volumes, [VolumeId(1)]);
}

#[tokio::test(flavor = "multi_thread")]
async fn draining_node_deletes_kept_volumes_only() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let _node = world.node(A, world.config(store.path())).await;
    for id in [1, 2] {
        world.create(A, spec(id, None)).await.expect("create");
    }
    let kept = RenewVolumes {
        volumes: vec![VolumeId(1)],
        lifetime_ms: 3_600_000,
        gives_way: true,
    };
    world.call(A, kept).await.expect("renew");
    world.call(A, DrainNode).await.expect("drain");
    let mut found = world.call(A, get_volume(1)).await;
    for _ in 0..50 {
        if found.is_err() {
            break;
        }
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        found = world.call(A, get_volume(1)).await;
    }
    assert!(found.is_err(), "{found:?}");
    world.call(A, get_volume(2)).await.expect("a run wants it");
}

/// What a kill leaves behind at this moment.
fn copy_store(from: &std::path::Path, to: &std::path::Path) {
    let from = format!("{}/.", from.display());
    let copied = std::process::Command::new("cp")
        .args(["-a", &from])
        .arg(to)
        .status();
    assert!(copied.expect("cp").success());
}

#[tokio::test(flavor = "multi_thread")]
async fn results_extend_a_volumes_lifetime_across_restarts() {
    const RESULT_MS: u64 = 3 * 24 * 3_600_000;
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let _node = world.node(A, world.config(store.path())).await;
    for id in 1..=5 {
        world.create(A, spec(id, None)).await.expect("create");
    }
    let usual_ms = spec(1, None).lifetime_ms;
    assert!(usual_ms < RESULT_MS, "the test needs a longer one");
    // A writer says so when it closes, a scheduler by a call; a reader must not.
    for (id, writable) in [(1, true), (2, false)] {
        let tree = TreeRef::Volume(VolumeId(id.into()));
        let open = OpenTree {
            tree: tree.clone(),
            agent: AgentId(id),
            writable,
            yields: false,
            resumed_incarnation: None,
        };
        let epoch = world.call(A, open).await.expect("open").epoch;
        let keep_ms = RESULT_MS;
        let close = CloseTree {
            tree,
            epoch,
            lifetime_ms_min: keep_ms,
        };
        world.call(A, close).await.expect("close");
    }
    // It says so again when the answer was lost, or the node restarted meanwhile.
    let again = CloseTree {
        tree: TreeRef::Volume(VolumeId(5)),
        epoch: Epoch(7),
        lifetime_ms_min: RESULT_MS,
    };
    world.call(A, again).await.expect("close");
    let renew = |lifetime_ms| RenewVolumes {
        volumes: vec![VolumeId(3)],
        lifetime_ms,
        gives_way: false,
    };
    world.call(A, renew(RESULT_MS)).await.expect("renew");
    world.call(A, renew(0)).await.expect("renew");
    let expected = [RESULT_MS, usual_ms, RESULT_MS, usual_ms, RESULT_MS];
    let lifetimes = async |at| {
        let mut found = Vec::new();
        for id in 1..=5 {
            let status = world.call(at, get_volume(id)).await.expect("show");
            found.push(status.spec.lifetime_ms);
        }
        found
    };
    assert_eq!(lifetimes(A).await, expected);
    let again = world.create(A, spec(1, None)).await.expect("asked again");
    assert_eq!(again.spec.lifetime_ms, RESULT_MS);
    let after = tempfile::tempdir().expect("store");
    copy_store(store.path(), after.path());
    let _again = world.node(B, world.config(after.path())).await;
    assert_eq!(lifetimes(B).await, expected, "after a restart");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_refuses_volumes_meant_for_another() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let node = world.node(A, world.config(store.path())).await;
    // Whoever was here before lost its store.
    for (server, is_made) in [(ServerId(9), false), (node.advert().id, true)] {
        let call = CreateVolume {
            spec: spec(1, None),
            server: Some(server),
            base: None,
            source_token: Token::none(),
        };
        let made = world.call(A, call).await;
        assert_eq!(made.is_ok(), is_made, "{made:?}");
        let code = made.err().map(|error| error.code);
        assert!(is_made || code == Some(ErrorCode::StoreLost));
    }
}
