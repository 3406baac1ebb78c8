//! Volumes of one source share their data, which outlive them as long as nobody wants their space.

use std::sync::atomic::Ordering;

use bafs_proto::ids::VolumeId;
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::volume::{ReplacementPolicy, VolumeKind, VolumeSpec};
use bafs_server::logic::space::Amount;

use super::test_cluster::{BLOCK, CacheCluster, CacheNode, cache, content};

const LARGE: u64 = 64 << 20;
/// Blocks of the source.
const BLOCKS: u64 = 40;
const BYTES: u64 = BLOCKS * BLOCK as u64;

fn lru(number: u128) -> VolumeSpec {
    cache(number, LARGE, ReplacementPolicy::Lru)
}

fn fill(cluster: &CacheCluster) -> Vec<u8> {
    let bytes = content(1, BYTES as usize);
    cluster.home.put("db/f", bytes.clone(), 1);
    bytes
}

async fn read_all(node: &CacheNode, volume: u128) -> Vec<u8> {
    let blocks = u32::try_from(BLOCKS).expect("few blocks");
    let read = node.read(VolumeId(volume), 0, 0, blocks).await;
    read.expect("the volume is read").to_vec()
}

/// Each node reads all of a volume.
async fn read_everywhere(cluster: &CacheCluster, volume: u128, expected: &[u8]) {
    for node in &cluster.nodes {
        assert!(read_all(node, volume).await == expected, "{}", node.address);
    }
}

async fn remove(cluster: &CacheCluster, volume: u128) {
    for node in &cluster.nodes {
        node.caches.remove(VolumeId(volume)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn second_run_reads_nothing_from_home() {
    let cluster = CacheCluster::new(3);
    let bytes = fill(&cluster);
    cluster.create(&lru(1)).await;
    read_everywhere(&cluster, 1, &bytes).await;
    assert_eq!(cluster.home_bytes(), BYTES);
    remove(&cluster, 1).await;
    cluster.create(&lru(2)).await;
    read_everywhere(&cluster, 2, &bytes).await;
    assert_eq!(cluster.home_bytes(), BYTES);
    assert_eq!(cluster.counter_sum("cache_home_bytes"), BYTES);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retained_data_survive_a_restart() {
    let mut cluster = CacheCluster::new(1);
    let bytes = fill(&cluster);
    cluster.create(&lru(1)).await;
    read_everywhere(&cluster, 1, &bytes).await;
    remove(&cluster, 1).await;
    let retained = cluster.nodes[0].caches.retained();
    assert_eq!((retained.bytes, retained.files), (BYTES, 1));
    cluster.kill(0);
    cluster.start(1);
    cluster.announce_nodes();
    assert_eq!(cluster.nodes[0].caches.retained(), retained);
    cluster.create(&lru(2)).await;
    read_everywhere(&cluster, 2, &bytes).await;
    assert_eq!(cluster.home_bytes(), BYTES);
    assert_eq!(cluster.nodes[0].caches.retained(), Amount::default());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_volumes_of_a_node_fetch_once() {
    let cluster = CacheCluster::new(2);
    let bytes = fill(&cluster);
    cluster.home.read_ms.store(2, Ordering::Relaxed);
    let (first, second) = (lru(1), lru(2));
    // At once, as two users come.
    tokio::join!(cluster.create(&first), cluster.create(&second));
    tokio::join!(
        read_everywhere(&cluster, 1, &bytes),
        read_everywhere(&cluster, 2, &bytes)
    );
    assert_eq!(cluster.home_bytes(), BYTES);
    assert_eq!(cluster.home.duplicate_blocks.load(Ordering::Relaxed), 0);
    let node = &cluster.nodes[0];
    assert_eq!(node.caches.adverts().len(), 1, "one store is told of once");
    // One user goes, the other reads on.
    remove(&cluster, 1).await;
    assert!(node.read(VolumeId(1), 0, 0, 1).await.is_err());
    read_everywhere(&cluster, 2, &bytes).await;
    assert_eq!(cluster.home_bytes(), BYTES);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn counters_of_a_volume_begin_with_it() {
    let cluster = CacheCluster::new(1);
    let bytes = fill(&cluster);
    cluster.create(&lru(1)).await;
    read_everywhere(&cluster, 1, &bytes).await;
    cluster.create(&lru(2)).await;
    read_everywhere(&cluster, 2, &bytes).await;
    let home = |volume| {
        let counters = cluster.nodes[0].status(VolumeId(volume)).counters;
        counters.get("cache_home_bytes").copied().unwrap_or(0)
    };
    assert_eq!((home(1), home(2)), (BYTES, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn retained_data_give_up_space_oldest_first() {
    let cluster = CacheCluster::new(1);
    let bytes = fill(&cluster);
    cluster.home.put("other/f", content(2, BLOCK as usize), 1);
    let mut other = lru(2);
    if let VolumeKind::Cache { source, .. } = &mut other.kind {
        *source = bafs_proto::volume::VolumeSource::Home {
            address: super::test_cluster::HOME.to_owned(),
            path: "other".to_owned(),
            id: None,
        };
    }
    let node = &cluster.nodes[0];
    cluster.create(&lru(1)).await;
    read_everywhere(&cluster, 1, &bytes).await;
    cluster.create(&other).await;
    node.read(VolumeId(2), 0, 0, 1).await.expect("it is read");
    remove(&cluster, 1).await;
    remove(&cluster, 2).await;
    let amount = |bytes| Amount { bytes, files: 100 };
    assert_eq!(node.caches.retained().bytes, BYTES + u64::from(BLOCK));
    node.caches.limit_retained(amount(BYTES + 5)).await;
    assert_eq!(node.caches.retained().bytes, u64::from(BLOCK));
    node.caches.limit_retained(amount(0)).await;
    assert_eq!(node.caches.retained(), Amount::default());
    let left = std::fs::read_dir(&node.directory).expect("a directory");
    assert_eq!(left.count(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_files_alone_are_fetched_again() {
    let cluster = CacheCluster::new(1);
    let bytes = fill(&cluster);
    cluster.home.put("db/g", content(3, BLOCK as usize), 1);
    cluster.create(&lru(1)).await;
    read_everywhere(&cluster, 1, &bytes).await;
    let node = &cluster.nodes[0];
    node.read(VolumeId(1), 1, 0, 1).await.expect("it is read");
    remove(&cluster, 1).await;
    let changed = content(4, BLOCK as usize);
    cluster.home.put("db/g", changed.clone(), 2);
    cluster.create(&lru(2)).await;
    read_everywhere(&cluster, 2, &bytes).await;
    let read = node.read(VolumeId(2), 1, 0, 1).await.expect("it is read");
    assert!(read == changed);
    assert_eq!(cluster.home_bytes(), BYTES + 2 * u64::from(BLOCK));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn young_files_are_fetched_again() {
    let cluster = CacheCluster::new(1);
    let bytes = fill(&cluster);
    // Two contents of one size within the second that the home tells.
    let now = i64::try_from(bafs_server::clock::now().0 * 1_000_000).expect("before 2262");
    cluster.home.put("db/g", content(3, BLOCK as usize), now);
    cluster.create(&lru(1)).await;
    read_everywhere(&cluster, 1, &bytes).await;
    let node = &cluster.nodes[0];
    node.read(VolumeId(1), 1, 0, 1).await.expect("it is read");
    remove(&cluster, 1).await;
    let changed = content(4, BLOCK as usize);
    cluster.home.put("db/g", changed.clone(), now);
    cluster.create(&lru(2)).await;
    let read = node.read(VolumeId(2), 1, 0, 1).await.expect("it is read");
    assert!(read == changed, "the content of before");
    read_everywhere(&cluster, 2, &bytes).await;
    let expected = BYTES + 2 * u64::from(BLOCK);
    assert_eq!(cluster.home_bytes(), expected, "old files stay here");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_source_leaves_other_readers_alone() {
    let cluster = CacheCluster::new(1);
    let bytes = fill(&cluster);
    cluster.create(&lru(1)).await;
    cluster.create(&lru(2)).await;
    let node = &cluster.nodes[0];
    read_everywhere(&cluster, 1, &bytes).await;
    let changed = content(9, BYTES as usize);
    cluster.home.put("db/f", changed.clone(), 2);
    let deadline = Deadline::after_ms(30_000);
    let renewed = node.caches.invalidate(VolumeId(2), Token::none(), deadline);
    renewed.await.expect("the volume shows the new state");
    assert!(read_all(node, 2).await == changed);
    assert!(read_all(node, 1).await == bytes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn smaller_reservation_shrinks_shared_data() {
    let cluster = CacheCluster::new(1);
    let bytes = fill(&cluster);
    let small = cache(2, BYTES / 2, ReplacementPolicy::Lru);
    cluster.create(&lru(1)).await;
    cluster.create(&small).await;
    read_everywhere(&cluster, 1, &bytes).await;
    let node = &cluster.nodes[0];
    remove(&cluster, 1).await;
    let (used, _) = node.caches.usage(VolumeId(2)).expect("the volume is there");
    assert!(used > 0 && used <= BYTES / 2, "{used} bytes are kept");
    assert!(read_all(node, 2).await == bytes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn volume_that_shares_with_nobody_leaves_nothing() {
    let cluster = CacheCluster::new(1);
    let bytes = fill(&cluster);
    let mut alone = lru(1);
    if let VolumeKind::Cache { cooperative, .. } = &mut alone.kind {
        cooperative.clear();
    }
    cluster.create(&alone).await;
    read_everywhere(&cluster, 1, &bytes).await;
    remove(&cluster, 1).await;
    assert_eq!(cluster.nodes[0].caches.retained(), Amount::default());
}
