//! What others do to the files of blocks on a node's disk while it runs.

use std::os::unix::fs::FileExt;
use std::time::Duration;

use bafs_proto::ids::FileIndex;
use bafs_proto::message::{ReadBlocks, ReadManifest};
use bafs_proto::time::Deadline;

use super::faults::{BLOCKS, ID, agent_read, cluster, read_all};
use super::test_cluster::{BLOCK, CacheNode};

/// Other bytes in each block of the only file of a node, as a disk that forgets has them: nothing
/// tells the node.
fn damage(node: &CacheNode) {
    let path = node.directory.join(ID.to_string()).join("1/blocks/0");
    let file = std::fs::OpenOptions::new().write(true).open(path);
    let file = file.expect("open");
    for block in 0..BLOCKS as u64 {
        file.write_all_at(b"damage", block * u64::from(BLOCK) + 5)
            .expect("damage");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_doubted_read_returns_good_blocks() {
    let (world, bytes) = cluster(1).await;
    let node = &world.nodes[0];
    assert!(read_all(&world, 0).await == bytes);
    world.wait_for_blocks(ID, BLOCKS as u64).await;
    damage(node);
    let before = world.home_bytes();
    let first = FileIndex(0);
    let page = ReadManifest { volume: ID, first };
    let page = node.caches.read_manifest(page).await.expect("manifest");
    let call = ReadBlocks {
        must_verify: true,
        ..agent_read(page.manifest, 3, 2)
    };
    let read = node.caches.read_blocks(call, Deadline::after_ms(9_000));
    let (_, read) = read.await.expect("read");
    let place = 3 * BLOCK as usize..5 * BLOCK as usize;
    assert!(read == bytes[place]);
    assert_eq!(node.counter("cache_digest_failures"), 2);
    assert_eq!(world.home_bytes() - before, 2 * u64::from(BLOCK));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_with_disk_damage_serves_good_blocks() {
    let (world, bytes) = cluster(2).await;
    let [one, two] = [&world.nodes[0], &world.nodes[1]];
    assert!(read_all(&world, 1).await == bytes);
    let copies = || two.status(ID).primary_bytes + two.status(ID).secondary_bytes;
    while copies() < bytes.len() as u64 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    damage(two);
    assert!(read_all(&world, 0).await == bytes);
    // It was told, has looked, and is trusted as before.
    assert!(two.counter("cache_digest_failures") > 0);
    assert_eq!(one.counter("cache_fallbacks"), 0);
    let shown = one.status(ID).peers;
    assert!(!shown[0].is_unresponsive && shown[0].counters["digest_failures"] > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn block_files_replaced_by_links_are_not_followed() {
    let (world, bytes) = cluster(1).await;
    let node = &world.nodes[0];
    assert!(read_all(&world, 0).await == bytes);
    world.wait_for_blocks(ID, BLOCKS as u64).await;
    let other = world.root().join("other");
    std::fs::write(&other, b"of somebody else").expect("write");
    let path = node.directory.join(ID.to_string()).join("1/blocks/0");
    for _ in 0..2 {
        std::fs::remove_file(&path).expect("remove");
        std::os::unix::fs::symlink(&other, &path).expect("link");
        assert!(read_all(&world, 0).await == bytes);
        world.wait_for_blocks(ID, BLOCKS as u64).await;
    }
    let left = std::fs::read(&other).expect("read");
    assert!(left == b"of somebody else", "{} bytes", left.len());
}

/// Whatever becomes of the file of blocks, what lies in a hole of the next one is never served.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_block_files_are_never_read_as_zeros() {
    let (world, bytes) = cluster(1).await;
    let node = &world.nodes[0];
    let path = node.directory.join(ID.to_string()).join("1/blocks/0");
    let first = FileIndex(0);
    let page = ReadManifest { volume: ID, first };
    let page = node.caches.read_manifest(page).await.expect("manifest");
    let ask = async |first: usize| {
        let call = agent_read(page.manifest, first as u64, 1);
        let read = node.caches.read_blocks(call, Deadline::after_ms(9_000));
        read.await.expect("read").1
    };
    let block = |n: usize| &bytes[n * BLOCK as usize..bytes.len().min((n + 1) * BLOCK as usize)];
    let gone: [fn(&std::path::Path); 3] = [
        |path| std::fs::remove_file(path).expect("remove"),
        |path| {
            std::fs::remove_file(path).expect("remove");
            std::os::unix::fs::symlink("/etc/hostname", path).expect("link");
        },
        |path| {
            let file = std::fs::OpenOptions::new().write(true).open(path);
            file.expect("open")
                .set_len(2 * u64::from(BLOCK) + 7)
                .expect("cut");
        },
    ];
    for lose in gone {
        assert!(read_all(&world, 0).await == bytes);
        world.wait_for_blocks(ID, BLOCKS as u64).await;
        lose(&path);
        assert!(ask(BLOCKS - 1).await == block(BLOCKS - 1));
        // It is kept in a file that has holes where the others were.
        let length = || std::fs::symlink_metadata(&path).map_or(0, |at| at.len());
        while length() < bytes.len() as u64 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        assert!(ask(2).await == block(2), "the place of block 2 is empty");
    }
}
