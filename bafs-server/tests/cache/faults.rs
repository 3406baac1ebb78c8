//! Peers that die, cannot be reached or lie; homes that fail; sources that change.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bafs_proto::ErrorCode;
use bafs_proto::hash::Digest;
use bafs_proto::ids::{BlockIndex, FileIndex, VolumeId};
use bafs_proto::message::{
    BlockRange, CacheRef, FetchPriority, FetchScope, ReadBlocks, ReadManifest,
};
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::volume::{ReplacementPolicy, VolumeKind, VolumeSource};
use tokio::task::JoinSet;

use super::test_cluster::{BLOCK, CacheCluster, HOME, MemoryHome, NAME, cache, content};

pub(crate) const LARGE: u64 = 64 << 20;
pub(crate) const BLOCKS: usize = 60;
pub(crate) const ID: VolumeId = VolumeId(1);

pub(crate) async fn cluster(nodes: u64) -> (CacheCluster, Vec<u8>) {
    let world = CacheCluster::new(nodes);
    let bytes = content(1, BLOCKS * BLOCK as usize - 5);
    world.home.put("db/large", bytes.clone(), 1);
    world.create(&cache(1, LARGE, ReplacementPolicy::Lru)).await;
    world.announce_nodes();
    (world, bytes)
}

/// An agent's read of blocks of the first file.
pub(crate) fn agent_read(manifest: Digest, first: u64, count: u32) -> ReadBlocks {
    ReadBlocks {
        range: BlockRange {
            cache: CacheRef::Volume(ID),
            manifest,
            file: FileIndex(0),
            first: BlockIndex(first),
            count,
        },
        scope: FetchScope::AnyNode,
        priority: FetchPriority::Urgent,
        must_verify: false,
    }
}

pub(crate) async fn read_all(world: &CacheCluster, index: usize) -> Vec<u8> {
    let mut whole = Vec::new();
    for first in (0..BLOCKS as u64).step_by(10) {
        whole.extend(
            world.nodes[index]
                .read(ID, 0, first, 10)
                .await
                .expect("read"),
        );
    }
    whole
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dead_peer_costs_only_its_blocks() {
    let (mut world, bytes) = cluster(4).await;
    assert!(read_all(&world, 0).await == bytes);
    assert_eq!(world.home_bytes(), bytes.len() as u64);
    let dead = world.kill(3);
    let lost = dead.counter("cache_home_bytes");
    assert!(lost > 0);
    // The catalog still believes in it.
    assert!(read_all(&world, 1).await == bytes);
    assert!(world.nodes[1].counter("cache_fallbacks") > 0);
    assert!(world.home_bytes() <= bytes.len() as u64 + lost);
    world.announce_nodes();
    let before = (world.home_bytes(), world.counter_sum("cache_fallbacks"));
    assert!(read_all(&world, 2).await == bytes);
    assert_eq!(
        world.counter_sum("cache_fallbacks"),
        before.1,
        "nobody believes in it any more"
    );
    assert!(world.home_bytes() <= bytes.len() as u64 + lost);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_home_outage_makes_no_peer_suspect() {
    let (world, bytes) = cluster(4).await;
    world.network.kill(HOME);
    let failures = Arc::new(AtomicU64::new(0));
    let mut readers = JoinSet::new();
    for node in &world.nodes {
        let (node, bytes, failures) = (node.clone(), bytes.clone(), failures.clone());
        readers.spawn(async move {
            for block in 0..BLOCKS {
                let read = loop {
                    match node.read(ID, 0, block as u64, 1).await {
                        Ok(read) => break read,
                        Err(error) => {
                            assert!(error.is_transient(), "{error}");
                            failures.fetch_add(1, Ordering::Relaxed);
                            tokio::time::sleep(Duration::from_millis(2)).await;
                        }
                    }
                };
                let start = block * BLOCK as usize;
                assert!(read == bytes[start..start + read.len()], "block {block}");
            }
        });
    }
    while failures.load(Ordering::Relaxed) < 400 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    world.network.listen(HOME, world.home.clone());
    while let Some(reader) = readers.join_next().await {
        reader.expect("a reader is content");
    }
    assert_eq!(world.home_bytes(), bytes.len() as u64);
    assert_eq!(world.counter_sum("cache_fallbacks"), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_leaving_one_cache_still_serves_others() {
    let (world, bytes) = cluster(2).await;
    let mut other = cache(2, LARGE, ReplacementPolicy::Lru);
    if let VolumeKind::Cache { cooperative, .. } = &mut other.kind {
        "other".clone_into(cooperative);
    }
    world.create(&other).await;
    world.announce_nodes();
    let all = BLOCKS as u32;
    let [one, two] = [&world.nodes[0], &world.nodes[1]];
    assert!(two.read(other.id, 0, 0, all).await.expect("read") == bytes);
    two.caches.remove(ID).await;
    // Nobody has told the first one.
    assert!(one.read(ID, 0, 0, all).await.expect("read") == bytes);
    let before = world.home_bytes();
    assert!(one.read(other.id, 0, 0, all).await.expect("read") == bytes);
    assert_eq!(world.home_bytes(), before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_partially_unreachable_peer_is_skipped() {
    let (world, bytes) = cluster(3).await;
    let (one, two) = (
        world.nodes[0].address.clone(),
        world.nodes[1].address.clone(),
    );
    world.network.cut_link(&one, &two);
    assert!(read_all(&world, 0).await == bytes);
    assert!(world.nodes[0].counter("cache_fallbacks") > 0);
    // The third one reaches it, and no byte is wrong.
    assert!(read_all(&world, 2).await == bytes);
    assert_eq!(world.nodes[2].counter("cache_fallbacks"), 0);
    // Who stood in for the primary asked it, not home.
    assert_eq!(world.home_bytes(), bytes.len() as u64);
    let shown = world.nodes[0].status(ID).peers;
    let peer = shown.iter().find(|peer| peer.address == two);
    let peer = peer.expect("it shares the cache");
    assert!(
        peer.is_unresponsive && peer.counters["failures"] > 0 && peer.counters["fallbacks"] > 0
    );
    let others = world.nodes[2].status(ID).peers;
    let gave = others
        .iter()
        .find(|peer| peer.counters.contains_key("bytes"));
    let gave = gave.expect("the third one has read what others keep");
    assert!(gave.counters["wait_us"] > 0, "what they gave took a while");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_home_causes_no_fallback() {
    let (world, bytes) = cluster(3).await;
    world.home.read_ms.store(1_500, Ordering::Relaxed);
    let read = world.nodes[0].read(ID, 0, 0, 20).await.expect("read");
    assert!(read == bytes[..20 * BLOCK as usize]);
    assert_eq!(world.nodes[0].counter("cache_fallbacks"), 0);
    assert_eq!(world.home_bytes(), 20 * u64::from(BLOCK));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_home_does_not_block_another_home() {
    let (world, bytes) = cluster(1).await;
    let other = Arc::new(MemoryHome::default());
    other.put("db/large", bytes.clone(), 1);
    world.network.listen("home:2", other);
    let mut spec = cache(2, LARGE, ReplacementPolicy::Lru);
    if let VolumeKind::Cache { source, .. } = &mut spec.kind {
        *source = VolumeSource::Home {
            address: "home:2".to_owned(),
            path: "db".to_owned(),
            id: None,
        };
    }
    world.create(&spec).await;
    world.home.read_ms.store(60_000, Ordering::Relaxed);
    let before = world.network.call_count();
    for block in 0..BLOCKS as u64 {
        let node = world.nodes[0].clone();
        tokio::spawn(async move { node.read(ID, 0, block, 1).await });
    }
    // As many as may ask a home at once.
    while world.network.call_count() < before + 32 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let read = world.nodes[0]
        .read_until(spec.id, 0, 0, 4, Deadline::after_ms(20_000))
        .await;
    assert!(read.expect("read") == bytes[..4 * BLOCK as usize]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abandoned_fetch_serves_the_next_reader() {
    let (world, bytes) = cluster(2).await;
    world.home.read_ms.store(400, Ordering::Relaxed);
    let node = &world.nodes[0];
    let early = node.read_until(ID, 0, 0, 10, Deadline::after_ms(100)).await;
    assert_eq!(early.map_err(|e| e.code), Err(ErrorCode::DeadlineExceeded));
    assert_eq!(
        node.read(ID, 0, 0, 10).await.expect("read"),
        bytes[..10 * BLOCK as usize]
    );
    assert_eq!(world.home_bytes(), 10 * u64::from(BLOCK));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unreachable_home_is_a_transient_error() {
    let (world, bytes) = cluster(2).await;
    world.network.kill(HOME);
    let away = world.nodes[0]
        .read(ID, 0, 0, 4)
        .await
        .map_err(|e| e.is_transient());
    assert_eq!(away, Err(true));
    world.network.listen(HOME, world.home.clone());
    // Who joins a fetch that was under way then hears the same, and asks again as agents do.
    let again = async || world.nodes[0].read(ID, 0, 0, 4).await;
    while again().await.is_err_and(|error| error.is_transient()) {}
    assert!(read_all(&world, 0).await == bytes);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_damaged_in_transit_are_fetched_again() {
    let (world, bytes) = cluster(1).await;
    world.home.damaged_replies.store(1, Ordering::Relaxed);
    assert!(read_all(&world, 0).await == bytes);
    assert_eq!(world.counter_sum("cache_digest_failures"), 1);
    world.nodes[0].forget(ID).await;
    world.create(&cache(1, LARGE, ReplacementPolicy::Lru)).await;
    world
        .home
        .damaged_replies
        .store(u64::MAX, Ordering::Relaxed);
    let broken = world.nodes[0]
        .read(ID, 0, 0, 1)
        .await
        .map_err(|e| e.is_transient());
    assert_eq!(broken, Err(true), "never served");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_known_digest_exposes_a_lying_peer() {
    let world = CacheCluster::new(2);
    let bytes = content(1, 40 * BLOCK as usize);
    world.home.put("db/large", bytes.clone(), 1);
    // Room for four blocks: the digests of the others stay known after they left.
    world
        .create(&cache(1, 4 * u64::from(BLOCK), ReplacementPolicy::Lru))
        .await;
    let node = &world.nodes[0];
    for block in 0..40 {
        node.read(ID, 0, block, 1).await.expect("read");
    }
    world.nodes[1].false_replies.store(1, Ordering::Relaxed);
    let fresh = node.counter("cache_hit_peer_bytes");
    assert!(fresh > 0);
    for block in 0..40usize {
        let place = block * BLOCK as usize..(block + 1) * BLOCK as usize;
        let read = node.read(ID, 0, block as u64, 1).await.expect("read");
        if node.counter("cache_digest_failures") > 0 {
            assert!(read == bytes[place], "block {block}");
        }
    }
    assert!(node.counter("cache_digest_failures") > 0);
    assert!(node.counter("cache_fallbacks") > 0);
    let shown = node.status(ID).peers;
    assert!(
        shown[0].counters["digest_failures"] > 0,
        "the peer is named"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_and_new_source_states_are_never_mixed() {
    let (world, bytes) = cluster(2).await;
    let node = &world.nodes[0];
    let half = node.read(ID, 0, 0, 30).await.expect("read");
    assert!(half == bytes[..30 * BLOCK as usize]);
    let changed = content(2, bytes.len());
    world.home.put("db/large", changed.clone(), 2);
    world.home.put("db/a-new", content(3, 9), 2);
    let rest = node.read(ID, 0, 30, 30).await.map_err(|e| e.code);
    assert_eq!(rest, Err(ErrorCode::SourceChanged));
    let old = node
        .caches
        .read_manifest(ReadManifest {
            volume: ID,
            first: FileIndex(0),
        })
        .await;
    let old = old.expect("manifest").manifest;
    for node in &world.nodes {
        let deadline = Deadline::after_ms(9_000);
        let new = node
            .caches
            .invalidate(ID, Token::none(), deadline)
            .await
            .expect("invalidate");
        assert_ne!(new, old);
    }
    world.announce_nodes();
    // Whoever works with the old state is told, even for blocks that were here.
    let call = agent_read(old, 0, 1);
    let told = node
        .caches
        .read_blocks(call, Deadline::after_ms(9_000))
        .await;
    assert_eq!(told.map_err(|e| e.code), Err(ErrorCode::SourceChanged));
    assert!(node.read(ID, 1, 0, 60).await.expect("read") == changed);
    // What home did not give is not counted as had.
    let [came, wanted] =
        ["cache_home_bytes", "cache_home_unique_bytes"].map(|c| world.counter_sum(c));
    assert_eq!(came, wanted);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_block_requests_are_refused() {
    let (world, _) = cluster(2).await;
    let node = &world.nodes[0];
    let page = node
        .caches
        .read_manifest(ReadManifest {
            volume: ID,
            first: FileIndex(0),
        })
        .await;
    let manifest = page.expect("manifest").manifest;
    let good = BlockRange {
        cache: CacheRef::Cooperative(NAME.to_owned()),
        ..agent_read(manifest, 0, 1).range
    };
    let ask = async |range: BlockRange| {
        let call = ReadBlocks {
            range,
            scope: FetchScope::Home,
            ..agent_read(manifest, 0, 1)
        };
        let answer = node
            .caches
            .read_blocks(call, Deadline::after_ms(9_000))
            .await;
        answer
            .map(|(blocks, _)| blocks.digests.len())
            .map_err(|e| e.code)
    };
    assert_eq!(ask(good.clone()).await, Ok(1));
    let many = BlockRange {
        count: 257,
        ..good.clone()
    };
    assert_eq!(ask(many).await, Err(ErrorCode::Malformed));
    let too_many = BlockRange {
        count: u32::MAX,
        ..good.clone()
    };
    assert_eq!(ask(too_many).await, Err(ErrorCode::Malformed));
    let behind = BlockRange {
        first: BlockIndex(u64::MAX),
        ..good.clone()
    };
    assert_eq!(ask(behind).await, Ok(0));
    let end = BlockRange {
        first: BlockIndex(BLOCKS as u64 - 1),
        count: 9,
        ..good.clone()
    };
    assert_eq!(ask(end).await, Ok(1));
    let no_file = BlockRange {
        file: FileIndex(1),
        ..good.clone()
    };
    assert_eq!(ask(no_file).await, Err(ErrorCode::Malformed));
    for cache in [
        CacheRef::Cooperative("x".to_owned()),
        CacheRef::Volume(VolumeId(9)),
    ] {
        assert_eq!(
            ask(BlockRange {
                cache,
                ..good.clone()
            })
            .await,
            Err(ErrorCode::VolumeLost)
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_of_a_silent_home_fail_in_time() {
    let (world, _) = cluster(1).await;
    let node = &world.nodes[0];
    world.home.read_ms.store(60_000, Ordering::Relaxed);
    let first = FileIndex(0);
    let page = ReadManifest { volume: ID, first };
    let page = node.caches.read_manifest(page).await.expect("manifest");
    let call = agent_read(page.manifest, 3, 2);
    let deadline = Deadline::after_ms(2_000);
    let told = node.caches.read_blocks(call, deadline).await;
    let told = told.expect_err("home sends nothing");
    assert!(!deadline.remaining().is_zero(), "the answer comes too late");
    assert_eq!(told.code, ErrorCode::HomeUnreachable, "{told}");
    assert!(told.detail.contains(HOME), "{told}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_from_a_slow_home_answer_in_progress() {
    let (world, bytes) = cluster(1).await;
    let node = &world.nodes[0];
    node.read(ID, 0, 0, 1).await.expect("read");
    // Slower than the agent's deadline.
    world.home.read_ms.store(2_500, Ordering::Relaxed);
    let early = node.read_until(ID, 0, 3, 2, Deadline::after_ms(2_000));
    let told = early.await.expect_err("home takes longer");
    assert_eq!(told.code, ErrorCode::InProgress, "{told}");
    // So it asks again, and home is not asked again.
    let come = node.read(ID, 0, 3, 2).await.expect("they came");
    let block = BLOCK as usize;
    assert!(come == bytes[3 * block..5 * block]);
    assert_eq!(node.counter("cache_home_bytes"), 3 * u64::from(BLOCK));
}

/// Two nodes, and a block whose primary is the second of them, which had the block before it from
/// home; the first had nothing from there.
async fn remote_primary_cluster() -> (CacheCluster, Vec<u8>, u64) {
    // The same in each such world.
    let mut of_second = Vec::new();
    for block in (0..BLOCKS as u64).step_by(7) {
        let (world, _) = cluster(2).await;
        let read = world.nodes[1].read(ID, 0, block, 1).await;
        read.expect("read");
        if world.nodes[0].counter("cache_home_bytes") == 0 {
            of_second.push(block);
        }
    }
    let (world, bytes) = cluster(2).await;
    let read = world.nodes[1].read(ID, 0, of_second[0], 1).await;
    read.expect("read");
    (world, bytes, of_second[1])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_through_a_slow_primary_answer_in_progress() {
    let (world, bytes, wanted) = remote_primary_cluster().await;
    let [one, two] = [&world.nodes[0], &world.nodes[1]];
    // Slower than the agent's deadline.
    world.home.read_ms.store(2_500, Ordering::Relaxed);
    let early = one.read_until(ID, 0, wanted, 1, Deadline::after_ms(2_000));
    let told = early.await.expect_err("home takes longer");
    assert_eq!(told.code, ErrorCode::InProgress, "{told}");
    let come = one.read(ID, 0, wanted, 1).await.expect("they came");
    let (block, at) = (BLOCK as usize, wanted as usize);
    assert!(come == bytes[at * block..(at + 1) * block]);
    let home = [one, two].map(|node| node.counter("cache_home_bytes"));
    assert_eq!(
        home,
        [0, 2 * u64::from(BLOCK)],
        "the primary has read each once"
    );
}
