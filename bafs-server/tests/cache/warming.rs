//! What is fetched before anyone asks for it: ahead of readers, by warming; and what stays.

use std::path::PathBuf;
use std::process::Command;

use bafs_proto::ErrorCode;
use bafs_proto::cache::{Pinning, WarmCache, WarmingState};
use bafs_proto::ids::VolumeId;
use bafs_proto::message::FetchScope;
use bafs_proto::volume::ReplacementPolicy;

use super::test_cluster::{BLOCK, CacheCluster, HOME, cache, content};

const LARGE: u64 = 64 << 20;
const ID: VolumeId = VolumeId(1);

fn bytes_of(blocks: u64) -> u64 {
    blocks * u64::from(BLOCK)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefetched_scan_fetches_each_byte_once() {
    let world = CacheCluster::new(3);
    let bytes = content(1, 700 * BLOCK as usize + 5);
    world.home.put("db/scan", bytes.clone(), 1);
    world.create(&cache(1, LARGE, ReplacementPolicy::Lru)).await;
    world.announce_nodes();
    let node = &world.nodes[0];
    let mut whole = Vec::new();
    for first in (0..701).step_by(8) {
        whole.extend(node.read(ID, 0, first, 8).await.expect("read"));
    }
    assert!(whole == bytes);
    assert_eq!(world.home_bytes(), bytes.len() as u64);
    assert_eq!(
        world.counter_sum("cache_home_unique_bytes"),
        bytes.len() as u64
    );
    let ahead = node.counter("cache_read_ahead_bytes");
    assert!(ahead > bytes.len() as u64 / 4, "{ahead}");
    let used = node.counter("cache_read_ahead_used_bytes");
    assert!(used >= ahead, "all of it was read: {used} of {ahead}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_readahead_is_counted_once() {
    let world = CacheCluster::new(1);
    let bytes = content(1, 700 * BLOCK as usize);
    world.home.put("db/scan", bytes.clone(), 1);
    world.create(&cache(1, LARGE, ReplacementPolicy::Lru)).await;
    let node = &world.nodes[0];
    // What both read themselves is here, and who asked for it reads nothing ahead.
    for first in (0..264).step_by(8) {
        let read = node.read_as(FetchScope::Home, ID, 0, first, 8).await;
        read.expect("read");
    }
    world.wait_for_blocks(ID, 264).await;
    // What the first wants stays on its way until the second has wanted it too.
    let home_waits = world.home.reads_paused.write().await;
    let scan = async |blocks: std::ops::Range<u64>| {
        for first in blocks.step_by(8) {
            node.read(ID, 0, first, 8).await.expect("read");
        }
    };
    // A quarter of what it has read: up to block 280, and the other one up to 290.
    scan(200..264).await;
    scan(0..240).await;
    assert_eq!(node.counter("cache_read_ahead_bytes"), 0);
    drop(home_waits);
    world.wait_for_blocks(ID, 290).await;
    // It is counted a moment after it is here.
    while node.counter("cache_read_ahead_bytes") < bytes_of(26) {
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    assert_eq!(node.counter("cache_read_ahead_bytes"), bytes_of(26));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tight_caches_transfer_each_peer_block_once() {
    let world = CacheCluster::new(4);
    let bytes = content(1, 2_048 * BLOCK as usize);
    world.home.put("db/tight", bytes.clone(), 1);
    let whole = bytes.len() as u64;
    // A sixteenth is for copies: far less than is fetched ahead of a reader that has the room.
    let part = whole / 4 + whole / 64;
    world.create(&cache(1, part, ReplacementPolicy::Lru)).await;
    world.announce_nodes();
    for node in &world.nodes {
        assert_eq!(
            node.warm(ID, "tight", Pinning::FetchOnly).await,
            WarmingState::Done
        );
    }
    let node = &world.nodes[0];
    for first in (0..2_048).step_by(8) {
        let read = node.read(ID, 0, first, 8).await.expect("read");
        let start = first as usize * BLOCK as usize;
        assert!(read == bytes[start..start + 8 * BLOCK as usize]);
    }
    let (came, absent) = (node.counter("cache_hit_peer_bytes"), whole - part);
    assert!(came >= absent, "{came} of {absent}");
    assert!(came <= absent + whole / 64, "{came} bytes came of {absent}");
    assert_eq!(world.home_bytes(), whole);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_reads_fetch_only_the_requested_blocks() {
    let world = CacheCluster::new(3);
    let bytes = content(1, 3_000 * BLOCK as usize);
    world.home.put("db/random", bytes.clone(), 1);
    world
        .create(&cache(1, 2 * LARGE, ReplacementPolicy::Lru))
        .await;
    world.announce_nodes();
    let mut unique = std::collections::BTreeSet::new();
    for n in 0..300u64 {
        let block = (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20) % 3_000;
        unique.insert(block);
        let read = world.nodes[0].read(ID, 0, block, 1).await.expect("read");
        let start = block as usize * BLOCK as usize;
        assert!(read == bytes[start..start + BLOCK as usize]);
    }
    assert_eq!(world.home_bytes(), bytes_of(unique.len() as u64));
    assert_eq!(world.counter_sum("cache_read_ahead_bytes"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn warming_makes_home_unnecessary_for_reads() {
    let world = CacheCluster::new(4);
    let files = [
        content(1, 300 * BLOCK as usize),
        content(2, 50 * BLOCK as usize + 1),
    ];
    world.home.put("db/in/a", files[0].clone(), 1);
    world.home.put("db/in/b", files[1].clone(), 1);
    world.home.put("db/out", content(3, 40 * BLOCK as usize), 1);
    world.create(&cache(1, LARGE, ReplacementPolicy::Lru)).await;
    world.announce_nodes();
    let whole = files.iter().map(|file| file.len() as u64).sum::<u64>();
    for round in 0..2 {
        for node in &world.nodes {
            assert_eq!(
                node.warm(ID, "in", Pinning::FetchOnly).await,
                WarmingState::Done
            );
            let warming = node.status(ID).warming.expect("it has begun");
            assert_eq!(warming.present_bytes, warming.total_bytes, "round {round}");
        }
        assert_eq!(world.home_bytes(), whole, "round {round}");
    }
    for node in &world.nodes {
        let shown = node.status(ID);
        let share = shown.primary_bytes as f64 / whole as f64;
        assert!((0.17..0.33).contains(&share), "{share}");
        assert_eq!(shown.secondary_bytes, 0);
    }
    assert_eq!(world.counter_sum("cache_warmed_bytes"), whole);
    world.network.kill(HOME);
    for node in &world.nodes {
        assert!(
            node.read(ID, 0, 0, 250).await.expect("read") == files[0][..bytes_of(250) as usize]
        );
        assert!(node.read(ID, 1, 0, 51).await.expect("read") == files[1]);
    }
    let call = WarmCache {
        volume: ID,
        path: "nowhere".to_owned(),
        pinning: Pinning::FetchOnly,
    };
    let refused = world.nodes[0].caches.warm(call).await.map_err(|e| e.code);
    assert_eq!(refused, Err(ErrorCode::NotFound));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pinned_blocks_survive_scans_and_restarts() {
    for replacement in [ReplacementPolicy::Lru, ReplacementPolicy::Mru] {
        let mut world = CacheCluster::new(1);
        let pinned = content(1, 10 * BLOCK as usize);
        let other = content(2, 50 * BLOCK as usize);
        world.home.put("db/a", pinned.clone(), 1);
        world.home.put("db/b", other.clone(), 1);
        world.create(&cache(1, bytes_of(15), replacement)).await;
        // Some of it is here already, as any block.
        world.nodes[0].read(ID, 0, 3, 2).await.expect("read");
        let state = world.nodes[0].warm(ID, "a", Pinning::Pin).await;
        assert_eq!(state, WarmingState::Done);
        for round in 0..2 {
            for first in (0..50).step_by(5) {
                world.nodes[0].read(ID, 1, first, 5).await.expect("read");
            }
            assert_eq!(
                world.nodes[0].status(ID).pinned_bytes,
                bytes_of(10),
                "{round}"
            );
            drop(world.kill(0));
            world.start(1);
            world.announce_nodes();
        }
        let node = &world.nodes[0];
        assert_eq!(node.status(ID).pinned_paths, ["a"]);
        world.network.kill(HOME);
        assert!(node.read(ID, 0, 0, 10).await.expect("read") == pinned);
        world.network.listen(HOME, world.home.clone());
        node.warm(ID, "a", Pinning::Unpin).await;
        let shown = node.status(ID);
        assert_eq!((shown.pinned_bytes, shown.pinned_paths), (0, Vec::new()));
        for _ in 0..2 {
            assert!(node.read(ID, 1, 0, 50).await.expect("read") == other);
        }
        // Blocks are kept after their readers have them.
        for _ in 0..2_000 {
            if node.counter("cache_evicted_primary") > 0 {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        let evicted = node.counter("cache_evicted_primary");
        assert!(evicted > 0, "they may leave now: {evicted}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn warming_stops_when_the_volume_is_full() {
    let world = CacheCluster::new(1);
    let bytes = content(1, 30 * BLOCK as usize);
    world.home.put("db/a", bytes.clone(), 1);
    world.home.put("db/b", content(2, BLOCK as usize), 1);
    world
        .create(&cache(1, bytes_of(10), ReplacementPolicy::Lru))
        .await;
    let node = &world.nodes[0];
    assert_eq!(
        node.warm(ID, "a", Pinning::FetchOnly).await,
        WarmingState::Full
    );
    let evicted = node.counter("cache_evicted_primary");
    assert_eq!(evicted, 0, "warming drives out nothing");
    assert_eq!(node.warm(ID, "a", Pinning::Pin).await, WarmingState::Full);
    assert_eq!(node.status(ID).pinned_bytes, bytes_of(10));
    for _ in 0..3 {
        node.read(ID, 1, 0, 1).await.expect("read");
    }
    // A reader has its block before it is known whether that is kept.
    while node.counter("cache_bypassed_blocks") == 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(node.caches.usage(ID).map(|used| used.0), Some(bytes_of(10)));
}

/// Reads a file in order, and returns how often home sent each byte of it.
async fn scan(world: &CacheCluster, file: u32, bytes: &[u8]) -> f64 {
    let before = world.home_bytes();
    let blocks = bytes.len().div_ceil(BLOCK as usize) as u64;
    for first in (0..blocks).step_by(4) {
        let read = world.nodes[0].read(ID, file, first, 4).await.expect("read");
        let start = bytes_of(first) as usize;
        assert!(
            read == bytes[start..start + read.len()],
            "blocks from {first}"
        );
    }
    (world.home_bytes() - before) as f64 / bytes.len() as f64
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_volume_fetches_sequential_reads_once() {
    let world = CacheCluster::new(1);
    let bytes = content(1, 1_000 * BLOCK as usize);
    world.home.put("db/a", content(2, 40 * BLOCK as usize), 1);
    world.home.put("db/b", bytes.clone(), 1);
    world
        .create(&cache(1, bytes_of(40), ReplacementPolicy::Lru))
        .await;
    let node = &world.nodes[0];
    assert_eq!(node.warm(ID, "a", Pinning::Pin).await, WarmingState::Done);
    assert!(scan(&world, 1, &bytes).await <= 1.0);
    assert!(node.counter("cache_bypassed_blocks") > 0);
    assert_eq!(node.counter("cache_read_ahead_bytes"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readahead_is_bounded_in_small_volumes() {
    for replacement in [ReplacementPolicy::Lru, ReplacementPolicy::Mru] {
        let world = CacheCluster::new(1);
        let bytes = content(1, 1_000 * BLOCK as usize);
        world.home.put("db/a", bytes.clone(), 1);
        world.create(&cache(1, bytes_of(64), replacement)).await;
        for round in 0..2 {
            let ratio = scan(&world, 0, &bytes).await;
            assert!(ratio <= 1.0, "{replacement:?}, round {round}: {ratio}");
        }
        let node = &world.nodes[0];
        assert!(
            node.counter("cache_read_ahead_bytes") > 0,
            "{replacement:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeated_lru_scan_finds_many_blocks() {
    for nodes in [1, 4] {
        let world = CacheCluster::new(nodes);
        let bytes = content(1, 1_640 * BLOCK as usize);
        world.home.put("db/a", bytes.clone(), 1);
        let part = bytes_of(1_600 / nodes);
        world.create(&cache(1, part, ReplacementPolicy::Lru)).await;
        world.announce_nodes();
        assert!(scan(&world, 0, &bytes).await <= 1.0);
        let again = scan(&world, 0, &bytes).await;
        assert!((0.01..0.75).contains(&again), "{nodes} nodes: {again}");
    }
}

/// A file system of its own, so small that it fills up.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn mount(path: PathBuf, size: &str) -> Option<Self> {
        std::fs::create_dir_all(&path).expect("directory");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", size, "tmpfs"])
            .arg(&path)
            .output();
        mounted
            .is_ok_and(|done| done.status.success())
            .then_some(Self(path))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).output();
    }
}

/// A node on a disk of 3 MB, and a volume that is allowed far more, of a file that does not fit;
/// nothing where no disk can be mounted.
async fn node_on_small_disk(test: &str) -> Option<(CacheCluster, SmallDisk, Vec<u8>)> {
    let mut world = CacheCluster::new(0);
    let Some(disk) = SmallDisk::mount(world.root().join("1"), "size=3m") else {
        print_skip(test);
        return None;
    };
    world.start(1);
    let bytes = content(1, 600 * BLOCK as usize);
    world.home.put("db/large", bytes.clone(), 1);
    world.create(&cache(1, LARGE, ReplacementPolicy::Lru)).await;
    Some((world, disk, bytes))
}

/// Says that a test is skipped, which cannot mount a disk of its own.
fn print_skip(test: &str) {
    let text = format!("SKIPPED: {test}: cannot mount a tmpfs\n");
    eprint!("{text}");
    if let Some(log) = std::env::var_os("BAFS_SKIP_LOG") {
        let mut options = std::fs::OpenOptions::new();
        let log = options.append(true).create(true).open(log);
        std::io::Write::write_all(&mut log.expect("log"), text.as_bytes()).expect("log");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn warming_reports_a_full_disk_as_full() {
    for pinning in [Pinning::FetchOnly, Pinning::Pin] {
        let test = "warming_reports_a_full_disk_as_full";
        let Some((world, _disk, bytes)) = node_on_small_disk(test).await else {
            return;
        };
        let node = &world.nodes[0];
        let state = node.warm(ID, "", pinning).await;
        assert_eq!(state, WarmingState::Full, "{pinning:?}");
        // It does not go on to fetch what drives out what it fetched.
        let sent = world.home_bytes();
        assert!(sent < bytes.len() as u64 * 3 / 4, "{sent} bytes");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_disk_evicts_instead_of_failing() {
    let test = "a_full_disk_evicts_instead_of_failing";
    let Some((world, _disk, bytes)) = node_on_small_disk(test).await else {
        return;
    };
    let node = &world.nodes[0];
    for _ in 0..2 {
        for first in (0..600).step_by(20) {
            let read = node.read(ID, 0, first, 20).await.expect("read");
            let start = bytes_of(first) as usize;
            assert!(
                read == bytes[start..start + read.len()],
                "blocks from {first}"
            );
        }
    }
    assert!(node.counter("cache_evicted_for_full_disk") > 0);
    assert_eq!(node.counter("cache_digest_failures"), 0);
    // The latest blocks are here, not the first ones.
    let before = world.home_bytes();
    let last = node.read(ID, 0, 590, 5).await.expect("read");
    assert!(last == bytes[bytes_of(590) as usize..bytes_of(595) as usize]);
    assert_eq!(world.home_bytes(), before);
}
