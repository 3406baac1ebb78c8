//! Files that take a while to be compared with their digests.

use bafs_proto::ids::VolumeId;
use bafs_proto::volume::ReplacementPolicy;

use super::local::{LocalAgent, read_whole, wait_until};
use super::test_cluster::{BLOCK, CacheCluster, cache, content};

const ID: VolumeId = VolumeId(1);

/// So often what must come some time is looked for.
const TRIES_MAX: u32 = 10_000;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_file_is_verified_once_complete() {
    const BLOCKS: u64 = (32 << 20) / BLOCK as u64;
    let world = CacheCluster::new(1);
    let bytes = content(1, BLOCKS as usize * BLOCK as usize);
    world.home.put("db/a", bytes.clone(), 1);
    world
        .create(&cache(1, 64 << 20, ReplacementPolicy::Lru))
        .await;
    let node = &world.nodes[0];
    let compared = || node.counter("cache_whole_files_verified");
    for first in (0..BLOCKS).step_by(64) {
        assert_eq!(compared(), 0, "it is not wholly here");
        node.read(ID, 0, first, 64).await.expect("read");
    }
    wait_until(|| compared() == 1).await;
    // Whoever asks for it again changes nothing.
    node.read(ID, 0, 0, 64).await.expect("read");
    let opened = LocalAgent::new(node)
        .await
        .hold(0)
        .await
        .expect("it is whole");
    assert!(read_whole(&opened, bytes.len()) == bytes);
    assert_eq!(compared(), 1, "nobody had to wait for that");
}

/// A cache a little too small: some blocks of the file are driven out, and come back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_verified_file_is_not_reverified_per_block() {
    const BLOCKS: u64 = (32 << 20) / BLOCK as u64;
    const OTHERS: u32 = 16;
    let world = CacheCluster::new(1);
    let bytes = content(1, BLOCKS as usize * BLOCK as usize);
    world.home.put("db/a", bytes, 1);
    world
        .home
        .put("db/b", content(2, 4 * OTHERS as usize * BLOCK as usize), 1);
    let room = (BLOCKS + 8) * u64::from(BLOCK);
    world.create(&cache(1, room, ReplacementPolicy::Lru)).await;
    let node = &world.nodes[0];
    let compared = || node.counter("cache_whole_files_verified");
    let read = async |file, first, count| {
        node.read(ID, file, first, count).await.expect("read");
    };
    for first in (0..BLOCKS).step_by(64) {
        read(0, first, 64).await;
    }
    wait_until(|| compared() == 1).await;
    for round in 1..=2 {
        let evicted = node.counter("cache_evicted_primary");
        let first = (round - 1) * u64::from(OTHERS);
        for tries in 0.. {
            if node.counter("cache_evicted_primary") > evicted {
                break;
            }
            assert!(tries < TRIES_MAX, "nothing of the file ever goes");
            // As long as it is being compared nothing of it goes.
            read(1, first, OTHERS).await;
        }
        // What comes back drives out what is older than the rest.
        for run in (0..BLOCKS / 16).rev() {
            read(0, run * 16, 16).await;
        }
    }
    assert_eq!(compared(), 1);
    // Whoever opens it once it is whole has it compared.
    let mut agent = LocalAgent::new(node).await;
    for tries in 0.. {
        if agent.hold(0).await.is_some() {
            break;
        }
        assert!(tries < TRIES_MAX, "it is never whole");
        for run in (0..BLOCKS / 16).rev() {
            read(0, run * 16, 16).await;
        }
    }
    assert_eq!(compared(), 2);
}
