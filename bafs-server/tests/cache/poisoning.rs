//! Peers that send other bytes than home has, from the first time on.

use std::sync::atomic::Ordering;

use bafs_proto::ErrorCode;
use bafs_proto::cache::{Pinning, WarmingState};
use bafs_proto::ids::VolumeId;
use bafs_proto::message::PeerCheck;
use bafs_proto::volume::ReplacementPolicy;

use super::faults::{BLOCKS, ID, LARGE, cluster};
use super::test_cluster::{BLOCK, CacheCluster, HOME, cache, content};

/// Reads all blocks one by one. Those that differ from what home has.
async fn count_wrong_blocks(world: &CacheCluster, bytes: &[u8]) -> usize {
    let mut wrong = 0;
    for (block, right) in bytes.chunks(BLOCK as usize).enumerate() {
        let read = world.nodes[0].read(ID, 0, block as u64, 1).await;
        wrong += usize::from(read.expect("read") != right);
    }
    wrong
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_first_reader_poisons_nobody() {
    let (world, bytes) = cluster(2).await;
    world.nodes[1].false_replies.store(1, Ordering::Relaxed);
    assert_eq!(count_wrong_blocks(&world, &bytes).await, 0);
    let node = &world.nodes[0];
    assert!(node.counter("cache_digest_failures") > 0);
    let shown = node.status(ID).peers;
    assert!(shown[0].counters["digest_failures"] > 0, "it is named");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_that_trust_peers_believe_them() {
    let (world, bytes) = cluster(2).await;
    world.nodes[0].caches.trust_peers();
    world.nodes[1].false_replies.store(1, Ordering::Relaxed);
    let wrong = count_wrong_blocks(&world, &bytes).await;
    assert!(wrong > 0, "else the other test shows nothing");
    assert_eq!(world.nodes[0].counter("cache_digest_calls"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_homes_leave_the_first_reader_trusted() {
    let (world, bytes) = cluster(2).await;
    world.home.knows_no_digests.store(true, Ordering::Relaxed);
    assert_eq!(count_wrong_blocks(&world, &bytes).await, 0);
    assert_eq!(world.home_bytes(), bytes.len() as u64);
    assert_eq!(world.nodes[0].status(ID).peer_check, PeerCheck::FirstReader);
    assert_eq!(world.nodes[0].counter("cache_digest_calls"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn digests_of_neighbouring_blocks_come_together() {
    let (world, bytes) = cluster(2).await;
    world.nodes[1]
        .read(ID, 0, 0, BLOCKS as u32)
        .await
        .expect("read");
    assert_eq!(count_wrong_blocks(&world, &bytes).await, 0);
    let calls = world.nodes[0].counter("cache_digest_calls");
    assert!((1..=4).contains(&calls), "{calls}");
    assert_eq!(world.nodes[0].status(ID).peer_check, PeerCheck::Home);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn digests_of_small_files_come_together() {
    const FILES: u64 = 400;
    let world = CacheCluster::new(2);
    for n in 0..FILES {
        world.home.put(&format!("db/{n:04}"), content(n, 100), 1);
    }
    world.create(&cache(1, LARGE, ReplacementPolicy::Lru)).await;
    world.announce_nodes();
    for node in world.nodes.iter().rev() {
        for n in 0..FILES {
            let read = node.read(ID, n as u32, 0, 1).await.expect("read");
            assert!(read == content(n, 100), "{n}");
        }
    }
    let calls = world.counter_sum("cache_digest_calls");
    assert!((2..=20).contains(&calls), "{calls} calls for {FILES} files");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unverified_blocks_wait_for_home() {
    let (world, bytes) = cluster(2).await;
    world.nodes[1]
        .read(ID, 0, 0, BLOCKS as u32)
        .await
        .expect("read");
    world.network.kill(HOME);
    let mut waiting = 0;
    for (block, right) in bytes.chunks(BLOCK as usize).enumerate() {
        match world.nodes[0].read(ID, 0, block as u64, 1).await {
            // Of these it is the primary node: it has them from home.
            Ok(read) => assert!(read == right, "{block}"),
            Err(error) => {
                assert!(error.is_transient(), "{error}");
                assert_ne!(error.code, ErrorCode::DigestMismatch);
                waiting += 1;
            }
        }
    }
    assert!(
        (1..BLOCKS).contains(&waiting),
        "{waiting} blocks of the other node"
    );
    world.network.listen(HOME, world.home.clone());
    assert_eq!(count_wrong_blocks(&world, &bytes).await, 0);
    assert_eq!(world.home_bytes(), bytes.len() as u64);
    let suspected = world.nodes[0].status(ID).peers;
    assert!(suspected.iter().all(|peer| !peer.is_unresponsive));
}

/// It knows what home said before, so blocks of the other node can be checked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restarted_node_without_home_reads_from_peers() {
    let (mut world, bytes) = cluster(2).await;
    for node in &world.nodes {
        let warmed = node.warm(ID, "large", Pinning::FetchOnly).await;
        assert_eq!(warmed, WarmingState::Done);
    }
    drop(world.kill(0));
    world.start(1);
    world.announce_nodes();
    world.network.kill(HOME);
    let node = &world.nodes[1];
    for (block, right) in bytes.chunks(BLOCK as usize).enumerate() {
        let read = node.read(ID, 0, block as u64, 1).await;
        assert!(read.expect("read") == right, "{block}");
    }
    assert!(
        node.counter("cache_hit_peer_bytes") > 0,
        "not all is its own"
    );
    assert_eq!(node.counter("cache_digest_calls"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cache_of_its_own_asks_for_no_digests() {
    let world = CacheCluster::new(1);
    let bytes = content(1, 40 * BLOCK as usize);
    world.home.put("db/large", bytes.clone(), 1);
    let spec = cache(1, LARGE, ReplacementPolicy::Lru);
    world.create(&spec).await;
    let read = world.nodes[0].read(VolumeId(1), 0, 0, 40).await;
    assert!(read.expect("read") == bytes);
    assert_eq!(world.counter_sum("cache_digest_calls"), 0);
}
