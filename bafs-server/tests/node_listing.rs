//! Lists of volumes: whose, page by page, and while others are deleted.

use crate::node::call_node;
use crate::test_nodes::{ALL, FOREVER, NodeCluster, spec, tree};
use bafs_proto::ids::VolumeId;
use bafs_proto::message::{DeleteVolume, ListVolumes, Reply};
use bafs_proto::token::{Resource, Token};
use bafs_proto::volume::VolumeSpec;
use bafs_server::clock;
use futures_util::future::join_all;

#[tokio::test(flavor = "multi_thread")]
async fn listings_show_only_volumes_of_the_token() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let node = world.node("a:1", world.config(store.path())).await;
    for id in 1..=3 {
        world.create("a:1", spec(id, None)).await.expect("create");
    }
    let resources = [Resource::Volume(VolumeId(1)), Resource::Volume(VolumeId(3))];
    let token = world
        .authority
        .signer()
        .grant(&resources, &ALL, FOREVER)
        .expect("grant");
    for (token, expected) in [(token, vec![1, 3]), (Token::none(), vec![])] {
        let Ok(Reply::ListVolumes(list)) =
            call_node(&node, &token, ListVolumes::default().into()).await
        else {
            panic!("no list");
        };
        let ids: Vec<u128> = list.volumes.iter().map(|status| status.spec.id.0).collect();
        assert_eq!(ids, expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_deletions_hide_no_other_volumes() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let _node = world.node("a:1", world.config(store.path())).await;
    let small = |id| VolumeSpec {
        size_bytes: 4096,
        size_files: 10,
        ..spec(id, None)
    };
    let kept: Vec<u128> = vec![1, 1_000];
    for id in &kept {
        world.create("a:1", small(*id)).await.expect("create");
    }
    let (mut beside, mut id) = (0, 2);
    while id < 260 {
        let fresh = id..id + 8;
        for id in fresh.clone() {
            world.create("a:1", small(id)).await.expect("create");
        }
        let deleting = fresh.clone().map(|id| {
            let call = DeleteVolume {
                volume: VolumeId(id),
            };
            world.call("a:1", call)
        });
        let listing = (0..8).map(|_| world.call("a:1", ListVolumes::default()));
        let (deleted, listed) = tokio::join!(join_all(deleting), join_all(listing));
        for done in deleted {
            done.expect("deleted");
        }
        for list in listed {
            let volumes = list.expect("no listing fails").volumes;
            let ids: Vec<u128> = volumes.iter().map(|it| it.spec.id.0).collect();
            assert!(kept.iter().all(|id| ids.contains(id)), "{ids:?}");
            beside += ids.len() - kept.len();
        }
        id = fresh.end;
    }
    assert!(beside > 0, "nothing was listed beside what stays");
}

/// As after a kill of the node, with agents of its jobs that hang.
#[tokio::test(flavor = "multi_thread")]
async fn hanging_agents_delay_no_listing() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let _node = world.node("a:1", world.config(store.path())).await;
    for id in 1..=9 {
        let small = VolumeSpec {
            size_bytes: 4096,
            size_files: 10,
            ..spec(id, None)
        };
        world.create("a:1", small).await.expect("create");
    }
    let after = tempfile::tempdir().expect("store");
    let copied = std::process::Command::new("cp")
        .arg("-a")
        .arg(format!("{}/.", store.path().display()))
        .arg(after.path())
        .status();
    assert!(copied.expect("cp").success());
    let held = (1..=8).map(|id| {
        let lock = tree(after.path(), id).with_file_name("lock");
        let lock = std::fs::File::create(lock).expect("a lock");
        lock.try_lock().expect("it is nobody's");
        lock
    });
    let held: Vec<_> = held.collect();
    let _again = world.node("b:1", world.config(after.path())).await;
    let began = clock::now();
    let listed = world.call("b:1", ListVolumes::default()).await;
    let listed = listed.expect("a list").volumes;
    let took_ms = clock::now().ms_since(began);
    // Each of them alone is waited for three seconds.
    assert!(took_ms < 6_000, "{took_ms} ms");
    let measured = listed.iter().filter(|it| it.error.is_none());
    let measured: Vec<_> = measured.map(|it| it.spec.id.0).collect();
    assert_eq!((listed.len(), measured), (9, vec![9]));
    drop(held);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_listing_comes_in_pages() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let node = world.node("a:1", world.config(store.path())).await;
    for id in 1..=130 {
        let small = VolumeSpec {
            size_bytes: 4096,
            size_files: 1,
            ..spec(id, None)
        };
        world.create("a:1", small).await.expect("create");
    }
    let first = world
        .call("a:1", ListVolumes::default())
        .await
        .expect("list");
    assert_eq!(
        (first.volumes.len(), first.next),
        (128, Some(VolumeId(128)))
    );
    let rest = ListVolumes { after: first.next };
    let second = world.call("a:1", rest).await.expect("list");
    assert_eq!((second.volumes.len(), second.next), (2, None));
    // A token that sees nothing of the first page is led on all the same.
    let resources = [Resource::Volume(VolumeId(130))];
    let token = world
        .authority
        .signer()
        .grant(&resources, &ALL, FOREVER)
        .expect("grant");
    let list = call_node(&node, &token, ListVolumes::default().into()).await;
    let Ok(Reply::ListVolumes(list)) = list else {
        panic!("no list")
    };
    assert_eq!((list.volumes.len(), list.next), (0, Some(VolumeId(128))));
}
