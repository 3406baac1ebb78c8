//! What a node keeps: over restarts, within its limits, and in which order it lets go.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bafs_proto::ErrorCode;
use bafs_proto::ids::{FileIndex, VolumeId};
use bafs_proto::message::ReadManifest;
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::volume::ReplacementPolicy;
use tokio::task::JoinSet;

use super::test_cluster::{BLOCK, CacheCluster, CacheNode, cache, content};

const LARGE: u64 = 64 << 20;
const ID: VolumeId = VolumeId(1);

async fn cluster(blocks: usize, size_bytes: u64) -> (CacheCluster, Vec<u8>) {
    let world = CacheCluster::new(1);
    let bytes = content(1, blocks * BLOCK as usize - 77);
    world.home.put("db/file", bytes.clone(), 1);
    world
        .create(&cache(1, size_bytes, ReplacementPolicy::Lru))
        .await;
    (world, bytes)
}

fn blocks_of(node: &CacheNode) -> std::path::PathBuf {
    node.directory.join(ID.to_string()).join("1/blocks")
}

/// Bytes that the files below take on disk.
fn disk_bytes(directory: &Path) -> u64 {
    let files = std::fs::read_dir(directory).expect("directory");
    files
        .map(|file| file.expect("file").metadata().expect("metadata").blocks() * 512)
        .sum()
}

fn restart(world: &mut CacheCluster) {
    drop(world.kill(0));
    world.start(1);
    world.announce_nodes();
}

#[tokio::test]
async fn a_restarted_node_serves_its_blocks_at_once() {
    let (mut world, bytes) = cluster(20, LARGE).await;
    world.nodes[0].read(ID, 0, 0, 12).await.expect("read");
    world.wait_for_blocks(ID, 12).await;
    restart(&mut world);
    world.network.kill(super::test_cluster::HOME);
    let read = world.nodes[0].read(ID, 0, 0, 12).await.expect("read");
    assert!(read == bytes[..12 * BLOCK as usize]);
    assert_eq!(world.nodes[0].counter("cache_digest_failures"), 0);
    assert_eq!(
        world.nodes[0].caches.usage(ID),
        Some((12 * u64::from(BLOCK), 1))
    );
}

#[tokio::test]
async fn a_block_damaged_on_disk_is_refetched() {
    let (mut world, bytes) = cluster(20, LARGE).await;
    world.nodes[0].read(ID, 0, 0, 20).await.expect("read");
    world.wait_for_blocks(ID, 20).await;
    let path = blocks_of(&world.nodes[0]).join("0");
    drop(world.kill(0));
    let mut on_disk = std::fs::read(&path).expect("read");
    for block in [3usize, 7] {
        on_disk[block * BLOCK as usize + 99] ^= 4;
    }
    std::fs::write(&path, &on_disk).expect("write");
    world.start(1);
    for _ in 0..2 {
        assert!(world.nodes[0].read(ID, 0, 0, 20).await.expect("read") == bytes);
        world.wait_for_blocks(ID, 20).await;
        assert_eq!(world.nodes[0].counter("cache_digest_failures"), 2);
        assert_eq!(
            world.nodes[0].counter("cache_home_bytes"),
            2 * u64::from(BLOCK)
        );
    }
    // Cut short: the last block is missing altogether.
    drop(world.kill(0));
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .expect("open");
    file.set_len(bytes.len() as u64 - 1).expect("cut");
    world.start(1);
    assert!(world.nodes[0].read(ID, 0, 0, 20).await.expect("read") == bytes);
    assert_eq!(world.nodes[0].counter("cache_digest_failures"), 1);
}

#[tokio::test]
async fn unreadable_blocks_are_not_treated_as_damaged() {
    let (world, bytes) = cluster(8, LARGE).await;
    let node = &world.nodes[0];
    node.read(ID, 0, 0, 8).await.expect("read");
    world.wait_for_blocks(ID, 8).await;
    // As when there are no descriptors: the system refuses, and the block is as good as ever.
    let (path, aside) = (blocks_of(node).join("0"), blocks_of(node).join("aside"));
    std::fs::rename(&path, &aside).expect("aside");
    std::fs::create_dir(&path).expect("in the way");
    let refused = node.read(ID, 0, 0, 8).await.expect_err("nothing to read");
    assert_eq!(refused.code, ErrorCode::ServerFault);
    std::fs::remove_dir(&path).expect("out of the way");
    std::fs::rename(&aside, &path).expect("back");
    let before = world.home_bytes();
    assert!(node.read(ID, 0, 0, 8).await.expect("read") == bytes);
    assert_eq!(world.home_bytes(), before);
    assert_eq!(node.counter("cache_digest_failures"), 0);
}

#[tokio::test]
async fn a_crash_causes_no_wrong_bytes_or_leaks() {
    let (mut world, bytes) = cluster(8, LARGE).await;
    world.nodes[0].read(ID, 0, 0, 8).await.expect("read");
    world.wait_for_blocks(ID, 8).await;
    let journal = world.nodes[0]
        .directory
        .join(ID.to_string())
        .join("1/journal");
    let whole = std::fs::read(&journal).expect("journal");
    for end in (0..whole.len()).step_by(29) {
        drop(world.kill(0));
        std::fs::write(&journal, &whole[..end]).expect("cut");
        world.start(1);
        let used = world.nodes[0].caches.usage(ID).expect("used").0;
        assert!(
            disk_bytes(&blocks_of(&world.nodes[0])) <= used + 4096,
            "cut at {end}"
        );
        assert!(
            world.nodes[0].read(ID, 0, 0, 8).await.expect("read") == bytes,
            "cut at {end}"
        );
        world.wait_for_blocks(ID, 8).await;
    }
    // Data lost, journal kept: as after a power failure.
    drop(world.kill(0));
    std::fs::write(blocks_of_first(&world).join("0"), vec![0; bytes.len()]).expect("zero");
    world.start(1);
    assert!(world.nodes[0].read(ID, 0, 0, 8).await.expect("read") == bytes);
    assert_eq!(world.nodes[0].counter("cache_digest_failures"), 8);
}

fn blocks_of_first(world: &CacheCluster) -> std::path::PathBuf {
    world.root().join("1").join(ID.to_string()).join("1/blocks")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_limit_holds_under_many_readers() {
    for replacement in [ReplacementPolicy::Lru, ReplacementPolicy::Mru] {
        let mut world = CacheCluster::new(2);
        let bytes = Arc::new(content(1, 200 * BLOCK as usize));
        world.home.put("db/file", bytes.to_vec(), 1);
        let limit = 20 * u64::from(BLOCK) + 1000;
        world.create(&cache(1, limit, replacement)).await;
        let nodes = Arc::new(std::mem::take(&mut world.nodes));
        let done = Arc::new(AtomicBool::new(false));
        let watched = (nodes.clone(), done.clone());
        let watch = tokio::task::spawn_blocking(move || {
            let mut most = 0;
            while !watched.1.load(Ordering::Relaxed) {
                for node in watched.0.iter() {
                    let used = node.caches.usage(ID).expect("used").0;
                    most = most.max(used).max(disk_bytes(&blocks_of(node)));
                }
            }
            most
        });
        let mut readers = JoinSet::new();
        for reader in 0..64u64 {
            let (nodes, bytes) = (nodes.clone(), bytes.clone());
            readers.spawn(async move {
                for step in 0..40u64 {
                    let first = (reader * 37 + step * (1 + reader % 3) * 5) % 195;
                    let node = &nodes[reader as usize % 2];
                    let read = node.read(ID, 0, first, 5).await.expect("read");
                    let start = first as usize * BLOCK as usize;
                    assert!(
                        read == bytes[start..start + read.len()],
                        "blocks from {first}"
                    );
                }
            });
        }
        while let Some(done) = readers.join_next().await {
            done.expect("reader");
        }
        done.store(true, Ordering::Relaxed);
        let most = watch.await.expect("watch");
        assert!(most > 10 * u64::from(BLOCK), "it kept something: {most}");
        // The map of a sparse file's extents takes some of the file system's own blocks.
        assert!(most <= limit + 4 * 4096, "{most} > {limit}");
        let sum = |name| nodes.iter().map(|node| node.counter(name)).sum::<u64>();
        assert!(sum("cache_evicted_secondary") + sum("cache_evicted_primary") > 0);
        assert_eq!(sum("cache_digest_failures"), 0);
    }
}

#[tokio::test]
async fn a_tiny_cache_passes_blocks_through() {
    let (world, bytes) = cluster(8, 100).await;
    assert!(world.nodes[0].read(ID, 0, 0, 8).await.expect("read") == bytes);
    // They are counted after the reader has them.
    while world.nodes[0].counter("cache_bypassed_blocks") < 8 {
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    assert_eq!(world.nodes[0].counter("cache_bypassed_blocks"), 8);
    assert_eq!(world.nodes[0].caches.usage(ID), Some((0, 0)));
}

#[tokio::test]
async fn the_file_limit_bounds_the_cached_files() {
    let world = CacheCluster::new(1);
    let files: Vec<_> = (0..10).map(|n| content(n, 2 * BLOCK as usize)).collect();
    for (n, bytes) in files.iter().enumerate() {
        world.home.put(&format!("db/{n}"), bytes.clone(), 1);
    }
    let mut spec = cache(1, LARGE, ReplacementPolicy::Lru);
    spec.size_files = 4;
    world.create(&spec).await;
    let node = &world.nodes[0];
    for (n, bytes) in files.iter().enumerate() {
        assert!(node.read(ID, n as u32, 0, 2).await.expect("read") == *bytes);
        let evicted = 2 * (n as u64 + 1).saturating_sub(4);
        while node.counter("cache_evicted_primary") < evicted {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
        world.wait_for_blocks(ID, 2 * (n as u64 + 1).min(4)).await;
        let on_disk = std::fs::read_dir(blocks_of(node)).expect("directory");
        assert!(on_disk.count() <= 4, "file {n}");
        assert_eq!(
            node.caches.usage(ID).expect("used").1,
            (n as u64 + 1).min(4)
        );
    }
    assert_eq!(node.counter("cache_bypassed_blocks"), 0);
    world.network.kill(super::test_cluster::HOME);
    for n in 6..10 {
        let read = node.read(ID, n, 0, 2).await.expect("it is here");
        assert!(read == files[n as usize], "file {n}");
    }
}

#[tokio::test]
async fn mru_keeps_part_of_a_scan_unlike_lru() {
    for (replacement, home_blocks) in [(ReplacementPolicy::Lru, 24), (ReplacementPolicy::Mru, 14)] {
        let world = CacheCluster::new(1);
        world
            .home
            .put("db/file", content(1, 12 * BLOCK as usize), 1);
        world
            .create(&cache(1, 11 * u64::from(BLOCK), replacement))
            .await;
        for round in 0..2 {
            for block in 0..12 {
                world.nodes[0].read(ID, 0, block, 1).await.expect("read");
                let kept = if round == 0 { (block + 1).min(11) } else { 11 };
                world.wait_for_blocks(ID, kept).await;
            }
        }
        let blocks = world.home_bytes() / u64::from(BLOCK);
        assert!(blocks <= home_blocks, "{replacement:?}: {blocks}");
        assert_eq!(
            replacement == ReplacementPolicy::Lru,
            blocks == 24,
            "{replacement:?}: {blocks}"
        );
    }
}

#[tokio::test]
async fn invalidation_keeps_unchanged_files_and_survives_restarts() {
    let mut world = CacheCluster::new(1);
    for (n, path) in ["db/a", "db/b", "db/c"].into_iter().enumerate() {
        world
            .home
            .put(path, content(n as u64, 3 * BLOCK as usize), 1);
    }
    world.create(&cache(1, LARGE, ReplacementPolicy::Lru)).await;
    for file in 0..3 {
        world.nodes[0].read(ID, file, 0, 3).await.expect("read");
    }
    world.wait_for_blocks(ID, 9).await;
    world.home.put("db/b", content(9, 2 * BLOCK as usize), 2);
    world.home.put("db/0-before-all", content(8, 5), 2);
    let deadline = Deadline::after_ms(9_000);
    let before = world.home_bytes();
    let caches = world.nodes[0].caches.clone();
    let fresh = caches
        .invalidate(ID, Token::none(), deadline)
        .await
        .expect("invalidate");
    assert_eq!(
        caches.invalidate(ID, Token::none(), deadline).await,
        Ok(fresh),
        "no news"
    );
    drop(caches);
    for restarted in [false, true] {
        if restarted {
            restart(&mut world);
        }
        for (file, seed, blocks) in [(1, 0, 3), (2, 9, 2), (3, 2, 3)] {
            let read = world.nodes[0].read(ID, file, 0, 3).await.expect("read");
            assert!(
                read == content(seed, blocks * BLOCK as usize),
                "file {file}"
            );
        }
        world.wait_for_blocks(ID, 8).await;
        assert_eq!(world.home_bytes(), before + 2 * u64::from(BLOCK));
    }
    let places = std::fs::read_dir(world.nodes[0].directory.join(ID.to_string()));
    assert_eq!(
        places.expect("directory").count(),
        2,
        "record and one generation"
    );
}

#[tokio::test]
async fn cache_creation_is_idempotent_and_removal_final() {
    let (world, _) = cluster(4, LARGE).await;
    let node = &world.nodes[0];
    let deadline = Deadline::after_ms(9_000);
    node.read(ID, 0, 0, 4).await.expect("read");
    world.wait_for_blocks(ID, 4).await;
    let spec = cache(1, LARGE, ReplacementPolicy::Lru);
    let fresher = Token::from_bytes(vec![1]);
    node.caches
        .create(&spec, fresher, deadline)
        .await
        .expect("again");
    assert_eq!(node.caches.usage(ID), Some((4 * u64::from(BLOCK), 1)));
    let other = cache(1, LARGE, ReplacementPolicy::Mru);
    let conflict = node.caches.create(&other, Token::none(), deadline).await;
    assert_eq!(conflict.map_err(|e| e.code), Err(ErrorCode::Conflict));
    node.forget(ID).await;
    node.forget(ID).await;
    let gone = node
        .caches
        .read_manifest(ReadManifest {
            volume: ID,
            first: FileIndex(0),
        })
        .await;
    assert_eq!(gone.map_err(|e| e.code), Err(ErrorCode::VolumeLost));
    assert_eq!(
        std::fs::read_dir(&node.directory)
            .expect("directory")
            .count(),
        0
    );
    assert_eq!(node.caches.adverts(), []);
}

#[tokio::test]
async fn ten_thousand_files_come_in_pages() {
    let mut world = CacheCluster::new(1);
    for n in 0..10_000 {
        world
            .home
            .put(&format!("db/{n:05}-{}", "x".repeat(200)), vec![7; n % 3], 1);
    }
    world.create(&cache(1, LARGE, ReplacementPolicy::Lru)).await;
    restart(&mut world);
    let mut entries = Vec::new();
    loop {
        let first = FileIndex(entries.len() as u32);
        let call = ReadManifest { volume: ID, first };
        let page = world.nodes[0]
            .caches
            .read_manifest(call)
            .await
            .expect("page");
        assert!(bafs_proto::codec::encode(&page).is_ok());
        entries.extend(page.entries);
        if !page.has_more {
            break;
        }
    }
    assert_eq!(entries.len(), 10_000);
    assert_eq!(
        world.nodes[0].read(ID, 9_998, 0, 1).await.expect("read"),
        vec![7; 9_998 % 3]
    );
}
