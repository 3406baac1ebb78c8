//! Damage on the disk under files that agents have whole.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use bafs_proto::ErrorCode;
use bafs_proto::volume::ReplacementPolicy;

use super::local::{ID, LocalAgent, block_of, scan, wait_until};
use super::test_cluster::{BLOCK, CacheCluster, cache, content};

/// A disk that forgets changes no time of the file.
fn damage_block(world: &CacheCluster, block: u64) {
    let path = world.root().join("1").join(ID.to_string());
    let path = path.join("1/blocks/0");
    let file = File::options().write(true).open(&path).expect("open");
    let modified = file.metadata().expect("file").modified().expect("time");
    file.write_all_at(b"damage", block * u64::from(BLOCK) + 5)
        .expect("damage");
    file.set_modified(modified).expect("time");
}

/// A file of ten blocks that one agent has whole and open, and whose damage another one noticed.
struct DamagedFile {
    world: CacheCluster,
    bytes: Vec<u8>,
    holder: LocalAgent,
    other: LocalAgent,
    opened: File,
}

impl DamagedFile {
    async fn make() -> Self {
        let world = CacheCluster::new(1);
        let bytes = content(1, 10 * BLOCK as usize);
        world.home.put("db/file", bytes.clone(), 1);
        let size = 10 * u64::from(BLOCK);
        world.create(&cache(1, size, ReplacementPolicy::Lru)).await;
        let node = &world.nodes[0];
        let (mut holder, other) = (LocalAgent::new(node).await, LocalAgent::new(node).await);
        scan(node, 0, &bytes).await;
        wait_until(|| (0..10).all(|block| holder.map.has_block(0, block))).await;
        let opened = holder.hold(0).await.expect("it is wholly here");
        damage_block(&world, 3);
        assert!(other.read(0, 3, BLOCK as usize).is_none(), "it is noticed");
        scan(node, 0, &bytes).await;
        assert_eq!(node.counter("cache_digest_failures"), 1);
        Self {
            world,
            bytes,
            holder,
            other,
            opened,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn former_holders_of_a_damaged_file_are_recalled() {
    let hurt = DamagedFile::make().await;
    let (node, mut holder) = (&hurt.world.nodes[0], hurt.holder);
    drop(hurt.opened);
    holder.release(0).await;
    node.caches.maintain().await;
    let told = |agent: &LocalAgent| agent.handoff.recall.borrow().as_ref().map(|why| why.code);
    wait_until(|| told(&holder) == Some(ErrorCode::VolumeLost)).await;
    // Who comes while everything is taken back is told, too; later ones have read nothing of that.
    let mut looks = 0;
    while told(&LocalAgent::new(node).await).is_some() {
        looks += 1;
        assert!(looks < 1_000, "whoever comes is told, for ever");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damage_recalls_readers_of_an_open_file() {
    let DamagedFile {
        world,
        bytes,
        mut holder,
        mut other,
        opened,
    } = DamagedFile::make().await;
    let (node, size) = (&world.nodes[0], bytes.len() as u64);
    assert!(other.hold(0).await.is_none(), "nobody else is given it");
    node.caches.maintain().await;
    let mut recall = holder.handoff.recall.clone();
    let why = recall.wait_for(Option::is_some).await.expect("told");
    assert_eq!(
        why.as_ref().map(|why| why.code),
        Some(ErrorCode::VolumeLost)
    );
    // What it had to keep is free then, and the block can be kept again.
    drop(opened);
    holder.release(0).await;
    wait_until(|| node.caches.usage(ID).expect("used").0 == size - u64::from(BLOCK)).await;
    scan(node, 0, &bytes).await;
    wait_until(|| other.map.has_block(0, 3)).await;
    let read = other.read(0, 3, BLOCK as usize);
    assert!(read.as_deref() == Some(block_of(&bytes, 3)));
    assert_eq!(node.caches.usage(ID), Some((size, 1)));
}
