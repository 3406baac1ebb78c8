//! Nodes that come, go and come back while others read.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bafs_proto::ids::VolumeId;
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::volume::Replacement;
use tokio::task::JoinSet;

use crate::world::{BLOCK, Node, World, cache, content};

const LARGE: u64 = 64 << 20;
const BLOCKS: u64 = 300;
const ID: VolumeId = VolumeId(1);

async fn world(nodes: u64) -> (World, Arc<Vec<u8>>) {
    let world = World::new(nodes);
    let bytes = content(1, BLOCKS as usize * BLOCK as usize - 9);
    world.home.put("db/large", bytes.clone(), 1);
    world.create(&cache(1, LARGE, Replacement::Lru)).await;
    world.tell();
    (world, Arc::new(bytes))
}

async fn scan(node: &Node, bytes: &[u8]) {
    for first in (0..BLOCKS).step_by(10) {
        let read = node.read(ID, 0, first, 10).await.expect("read");
        let start = first as usize * BLOCK as usize;
        assert!(read == bytes[start..start + read.len()], "from {first}");
    }
}

async fn create_on(node: &Node) {
    let deadline = Deadline::after_ms(30_000);
    let spec = cache(1, LARGE, Replacement::Lru);
    let made = node.caches.create(&spec, Token::none(), deadline).await;
    made.expect("create");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_starts_again_is_known_at_once_and_costs_home_nothing() {
    let (mut world, bytes) = world(3).await;
    scan(&world.nodes[0], &bytes).await;
    assert_eq!(world.home_bytes(), bytes.len() as u64);
    let gone = world.kill(2);
    // The others learn that it is gone, and take over its share.
    world.tell();
    scan(&world.nodes[1], &bytes).await;
    let before = world.home_bytes();
    let lost = gone.count("cache_home_bytes");
    assert!(before <= bytes.len() as u64 + lost);
    drop(gone);
    world.start(3);
    // Nobody told the others; it introduces itself before it goes home for anything.
    scan(&world.nodes[2], &bytes).await;
    assert_eq!(world.home_bytes(), before);
    for node in &world.nodes {
        assert_eq!(node.show(ID).peers.len(), 2, "{}", node.address);
    }
    let fallbacks = world.total("cache_fallbacks");
    scan(&world.nodes[0], &bytes).await;
    assert_eq!(
        (world.home_bytes(), world.total("cache_fallbacks")),
        (before, fallbacks)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copies_change_their_class_with_the_peers() {
    let (mut world, bytes) = world(1).await;
    scan(&world.nodes[0], &bytes).await;
    world.kept(ID, BLOCKS).await;
    let classes = |node: &Node| {
        let shown = node.show(ID);
        (shown.primary_bytes, shown.secondary_bytes)
    };
    let whole = BLOCKS * u64::from(BLOCK);
    assert_eq!(classes(&world.nodes[0]), (whole, 0));
    world.start(2);
    world.tell();
    create_on(&world.nodes[1]).await;
    world.tell();
    world.nodes[0].caches.tick().await;
    let (primary, secondary) = classes(&world.nodes[0]);
    assert_eq!(primary + secondary, whole);
    assert!(
        (0.4..0.6).contains(&(primary as f64 / whole as f64)),
        "{primary}"
    );
    drop(world.kill(1));
    world.tell();
    world.nodes[0].caches.tick().await;
    assert_eq!(classes(&world.nodes[0]), (whole, 0));
    // What was changed is still so after a restart.
    drop(world.kill(0));
    world.start(1);
    assert_eq!(classes(&world.nodes[0]), (whole, 0));
    assert_eq!(world.home_bytes(), bytes.len() as u64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_byte_is_wrong_while_nodes_come_and_go() {
    let (mut world, bytes) = world(4).await;
    world.home.read_ms.store(1, Ordering::Relaxed);
    let (done, scans) = (
        Arc::new(AtomicBool::new(false)),
        Arc::new(AtomicU64::new(0)),
    );
    let mut readers = JoinSet::new();
    for reader in 0..8 {
        // The first three stay; what is read there must be right at any time.
        let node = world.nodes[reader % 3].clone();
        let (bytes, done, scans) = (bytes.clone(), done.clone(), scans.clone());
        readers.spawn(async move {
            while !done.load(Ordering::Relaxed) {
                scan(&node, &bytes).await;
                scans.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let mut number = 4;
    let mut changes = 0u64;
    for _ in 0..6 {
        tokio::time::sleep(Duration::from_millis(60)).await;
        // One dies, of which the catalog tells later; another one comes.
        let dead = world.kill(3);
        tokio::time::sleep(Duration::from_millis(60)).await;
        world.tell();
        drop(dead);
        number += 1;
        world.start(number);
        create_on(world.nodes.last().expect("node")).await;
        world.tell();
        for node in &world.nodes {
            node.caches.tick().await;
        }
        changes += 2;
    }
    done.store(true, Ordering::Relaxed);
    while let Some(reader) = readers.join_next().await {
        reader.expect("reader");
    }
    assert!(scans.load(Ordering::Relaxed) >= 8);
    // Each dead node takes at most its share with it: a quarter of all.
    let ratio = world.home_bytes() as f64 / bytes.len() as f64;
    println!("home ratio {ratio:.3} with {changes} changes");
    assert!(ratio <= 1.0 + 6.0 * 0.3, "{ratio}");
    assert_eq!(world.total("cache_digest_failures"), 0);
}
