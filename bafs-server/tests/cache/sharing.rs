//! Every shared byte crosses the home link once, whoever asks, comes or goes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bafs_proto::volume::ReplacementPolicy;
use tokio::task::JoinSet;

use super::test_cluster::{BLOCK, CacheCluster, cache, content};

const LARGE: u64 = 64 << 20;

/// Files of all awkward sizes; by path order.
fn files() -> BTreeMap<String, Vec<u8>> {
    let block = BLOCK as usize;
    let sizes = [0, 1, block - 1, block, block + 1, 3 * block, 41 * block + 7];
    let named = sizes.iter().enumerate();
    named
        .map(|(n, size)| (format!("db/f{n}"), content(n as u64, *size)))
        .collect()
}

fn fill(world: &CacheCluster) -> Vec<Vec<u8>> {
    for (path, bytes) in files() {
        world.home.put(&path, bytes, 1);
    }
    files().into_values().collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_cold_readers_fetch_each_byte_once() {
    let mut world = CacheCluster::new(8);
    let files = Arc::new(fill(&world));
    let spec = cache(1, LARGE, ReplacementPolicy::Lru);
    world.create(&spec).await;
    world.announce_nodes();
    world.home.read_ms.store(2, Ordering::Relaxed);
    let nodes = Arc::new(std::mem::take(&mut world.nodes));
    let mut readers = JoinSet::new();
    for reader in 0..1_000usize {
        let (nodes, files) = (nodes.clone(), files.clone());
        readers.spawn(async move {
            let node = &nodes[reader % nodes.len()];
            // Each begins elsewhere, and reads pieces of its own length.
            for step in 0..files.len() {
                let file = (reader / 8 + step) % files.len();
                let count = 1 + reader as u64 % 9;
                let blocks = files[file].len().div_ceil(BLOCK as usize) as u64;
                let mut whole = Vec::new();
                for first in (0..blocks).step_by(count as usize) {
                    let read = node
                        .read(
                            bafs_proto::ids::VolumeId(1),
                            file as u32,
                            first,
                            count as u32,
                        )
                        .await;
                    whole.extend(read.expect("read"));
                }
                assert!(whole == files[file], "file {file}");
            }
        });
    }
    while let Some(done) = readers.join_next().await {
        done.expect("reader");
    }
    let unique: usize = files.iter().map(Vec::len).sum();
    assert_eq!(world.home_bytes(), unique as u64);
    assert_eq!(world.home.duplicate_blocks.load(Ordering::Relaxed), 0);
    let sum = |name| nodes.iter().map(|node| node.counter(name)).sum::<u64>();
    assert_eq!(sum("cache_home_bytes"), unique as u64);
    assert_eq!(sum("cache_fallbacks"), 0);
    assert!(sum("cache_joined_fetches") > 0);
    assert!(sum("cache_hit_peer_bytes") > 0);
    // What was fetched ahead is asked for again, as urgent, when somebody begins to wait for it.
    assert!(sum("cache_hit_peer_bytes") <= sum("cache_served_to_peers_bytes"));
    assert_eq!(sum("cache_home_unique_bytes"), unique as u64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_read_is_local() {
    let world = CacheCluster::new(4);
    let files = fill(&world);
    let spec = cache(1, LARGE, ReplacementPolicy::Lru);
    world.create(&spec).await;
    let node = &world.nodes[0];
    for round in 0..2 {
        let (calls, home) = (world.network.call_count(), world.home_bytes());
        assert_eq!(node.read(spec.id, 6, 0, 42).await.expect("read"), files[6]);
        world.wait_for_blocks(spec.id, 42).await;
        if round == 1 {
            assert_eq!(
                (calls, home),
                (world.network.call_count(), world.home_bytes())
            );
            assert_eq!(node.counter("cache_hit_local_bytes"), files[6].len() as u64);
        }
    }
    assert!(
        node.counter("cache_hit_peer_bytes") > 0,
        "some blocks are secondary copies"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_peers_are_known_before_their_adverts() {
    let world = CacheCluster::new(4);
    fill(&world);
    let spec = cache(1, LARGE, ReplacementPolicy::Lru);
    // All at once, and nobody tells of their adverts.
    let made = world.nodes.iter().map(|node| {
        let (caches, spec) = (node.caches.clone(), spec.clone());
        tokio::spawn(async move {
            let deadline = bafs_proto::time::Deadline::after_ms(30_000);
            caches
                .create(&spec, bafs_proto::token::Token::none(), deadline)
                .await
        })
    });
    for made in made.collect::<Vec<_>>() {
        made.await.expect("task").expect("create");
    }
    let all = world.nodes.iter().map(|node| node.read(spec.id, 6, 0, 42));
    for read in all {
        read.await.expect("read");
    }
    assert_eq!(world.home_bytes(), 41 * u64::from(BLOCK) + 7);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_joiners_take_over_without_home_reads() {
    let mut world = CacheCluster::new(2);
    let files = fill(&world);
    let spec = cache(1, LARGE, ReplacementPolicy::Lru);
    world.create(&spec).await;
    world.nodes[0].read(spec.id, 6, 0, 42).await.expect("read");
    let before = world.home_bytes();
    for number in 3..=5 {
        world.start(number);
        world.announce_nodes();
        world.create(&spec).await;
        world.announce_nodes();
        for node in &world.nodes {
            assert_eq!(node.read(spec.id, 6, 0, 42).await.expect("read"), files[6]);
        }
    }
    assert_eq!(world.home_bytes(), before);
    assert_eq!(world.counter_sum("cache_fallbacks"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_are_spread_in_proportion_to_capacity() {
    let world = CacheCluster::new(4);
    world
        .home
        .put("db/large", content(3, 800 * BLOCK as usize), 1);
    for (index, node) in world.nodes.iter().enumerate() {
        let size = if index == 0 { 3 * LARGE } else { LARGE };
        let deadline = bafs_proto::time::Deadline::after_ms(30_000);
        let spec = cache(1, size, ReplacementPolicy::Lru);
        node.caches
            .create(&spec, bafs_proto::token::Token::none(), deadline)
            .await
            .expect("create");
    }
    world.announce_nodes();
    for first in (0..800).step_by(50) {
        world.nodes[1]
            .read(bafs_proto::ids::VolumeId(1), 0, first, 50)
            .await
            .expect("read");
    }
    let blocks = |index: usize| world.nodes[index].counter("cache_home_bytes") / u64::from(BLOCK);
    // Expected shares are 400, 133, 133, 133 blocks.
    assert!((340..460).contains(&blocks(0)), "{}", blocks(0));
    for index in 1..4 {
        assert!((95..175).contains(&blocks(index)), "{}", blocks(index));
    }
}
