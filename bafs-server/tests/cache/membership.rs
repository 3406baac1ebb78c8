//! Nodes that come, go and come back while others read.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use bafs_proto::cache::{CacheMember, Pinning, WarmingState};
use bafs_proto::hash::Digest;
use bafs_proto::ids::{BlockIndex, FileIndex, VolumeId};
use bafs_proto::message::{
    BlockRange, CacheRef, Probe, ProbePurpose, Promote, ReadManifest, Touch,
};
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::volume::ReplacementPolicy;
use bafs_server::counters::Counters;
use tokio::task::JoinSet;

use super::test_cluster::{BLOCK, CacheCluster, CacheNode, NAME, cache, content};

const LARGE: u64 = 64 << 20;
const BLOCKS: u64 = 300;
const ID: VolumeId = VolumeId(1);

async fn cluster(nodes: u64) -> (CacheCluster, Arc<Vec<u8>>) {
    let world = CacheCluster::new(nodes);
    let bytes = content(1, BLOCKS as usize * BLOCK as usize - 9);
    world.home.put("db/large", bytes.clone(), 1);
    world.create(&cache(1, LARGE, ReplacementPolicy::Lru)).await;
    world.announce_nodes();
    (world, Arc::new(bytes))
}

async fn scan(node: &CacheNode, bytes: &[u8]) {
    for first in (0..BLOCKS).step_by(10) {
        let read = node.read(ID, 0, first, 10).await.expect("read");
        let start = first as usize * BLOCK as usize;
        assert!(read == bytes[start..start + read.len()], "from {first}");
    }
}

async fn create_on(node: &CacheNode) {
    let deadline = Deadline::after_ms(30_000);
    let spec = cache(1, LARGE, ReplacementPolicy::Lru);
    let made = node.caches.create(&spec, Token::none(), deadline).await;
    made.expect("create");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_node_rejoins_without_home_reads() {
    let (mut world, bytes) = cluster(3).await;
    scan(&world.nodes[0], &bytes).await;
    assert_eq!(world.home_bytes(), bytes.len() as u64);
    let gone = world.kill(2);
    // The others learn that it is gone, and take over its share.
    world.announce_nodes();
    scan(&world.nodes[1], &bytes).await;
    let before = world.home_bytes();
    let lost = gone.counter("cache_home_bytes");
    assert!(before <= bytes.len() as u64 + lost);
    drop(gone);
    world.start(3);
    // Nobody told the others; it introduces itself before it goes home for anything.
    scan(&world.nodes[2], &bytes).await;
    assert_eq!(world.home_bytes(), before);
    for node in &world.nodes {
        assert_eq!(node.status(ID).peers.len(), 2, "{}", node.address);
    }
    let fallbacks = world.counter_sum("cache_fallbacks");
    scan(&world.nodes[0], &bytes).await;
    assert_eq!(
        (world.home_bytes(), world.counter_sum("cache_fallbacks")),
        (before, fallbacks)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn membership_changes_reclassify_copies() {
    let (mut world, bytes) = cluster(1).await;
    scan(&world.nodes[0], &bytes).await;
    world.wait_for_blocks(ID, BLOCKS).await;
    let classes = |node: &CacheNode| {
        let shown = node.status(ID);
        (shown.primary_bytes, shown.secondary_bytes)
    };
    let whole = BLOCKS * u64::from(BLOCK);
    assert_eq!(classes(&world.nodes[0]), (whole, 0));
    world.start(2);
    create_on(&world.nodes[1]).await;
    world.announce_nodes();
    world.nodes[0].caches.maintain().await;
    assert_eq!(
        classes(&world.nodes[0]),
        (whole, 0),
        "the new primary has none of its blocks yet"
    );
    scan(&world.nodes[1], &bytes).await;
    let halved = |when: &str| {
        let (primary, secondary) = classes(&world.nodes[0]);
        assert_eq!(primary + secondary, whole, "{when}");
        let part = primary as f64 / whole as f64;
        assert!((0.4..0.6).contains(&part), "{when}: {primary}");
    };
    halved("the new primary has its blocks from here");
    while world.nodes[1].caches.usage(ID).expect("used").0 < whole {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(world.kill(1));
    world.announce_nodes();
    world.nodes[0].caches.maintain().await;
    assert_eq!(classes(&world.nodes[0]), (whole, 0));
    world.start(2);
    world.announce_nodes();
    world.nodes[0].caches.maintain().await;
    let (primary, secondary) = classes(&world.nodes[0]);
    assert_eq!(primary + secondary, whole);
    assert!(
        secondary > whole / 3,
        "the other one is back with its blocks"
    );
    // What was changed is still so after a restart.
    drop(world.kill(1));
    world.announce_nodes();
    world.nodes[0].caches.maintain().await;
    drop(world.kill(0));
    world.start(1);
    assert_eq!(classes(&world.nodes[0]), (whole, 0));
    assert_eq!(world.home_bytes(), bytes.len() as u64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_catalog_causes_no_home_reads() {
    let (mut world, bytes) = cluster(4).await;
    world.ttl_ms = 4_000;
    world.announce_nodes();
    let half = BLOCKS as u32 / 2;
    world.nodes[0].read(ID, 0, 0, half).await.expect("read");
    // So far nobody has told it anything.
    for node in &world.nodes {
        node.caches.set_peers(Vec::new());
    }
    for node in &world.nodes {
        scan(node, &bytes).await;
    }
    assert_eq!(world.home_bytes(), bytes.len() as u64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn repeated_membership_changes_cause_no_refetches() {
    let (mut world, bytes) = cluster(2).await;
    scan(&world.nodes[0], &bytes).await;
    for number in 3..=6 {
        world.start(number);
        let joined = world.nodes.last().expect("node");
        create_on(joined).await;
        world.announce_nodes();
        for node in &world.nodes {
            node.caches.maintain().await;
        }
        scan(joined, &bytes).await;
    }
    let whole = BLOCKS * u64::from(BLOCK);
    while world.nodes[5].caches.usage(ID).expect("used").0 < whole {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // One of them comes and goes while nobody reads.
    for _ in 0..3 {
        drop(world.kill(5));
        world.announce_nodes();
        for node in &world.nodes {
            node.caches.maintain().await;
        }
        world.start(6);
        world.announce_nodes();
        for node in &world.nodes {
            node.caches.maintain().await;
        }
    }
    for node in &world.nodes {
        scan(node, &bytes).await;
    }
    assert_eq!(world.home_bytes(), bytes.len() as u64);
}

/// Nobody reads while four come, one after the other: the last one knows only who was there just
/// before it, unless it is told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_joining_idle_caches_cause_no_refetches() {
    let (mut world, bytes) = cluster(2).await;
    scan(&world.nodes[0], &bytes).await;
    for number in 3..=6 {
        world.start(number);
        create_on(world.nodes.last().expect("node")).await;
        world.announce_nodes();
        for node in &world.nodes {
            node.caches.maintain().await;
        }
    }
    for node in world.nodes.iter().rev() {
        scan(node, &bytes).await;
    }
    assert_eq!(world.home_bytes(), bytes.len() as u64);
}

/// Who comes last is told nothing by those who could, and knows most of them only by their adverts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_is_found_through_intermediate_peers() {
    let (mut world, bytes) = cluster(1).await;
    scan(&world.nodes[0], &bytes).await;
    world.wait_for_blocks(ID, BLOCKS).await;
    for number in 2..=7 {
        let last = number == 7;
        for other in (1..7).filter(|_| last) {
            world.network.cut_link("node:7", &format!("node:{other}"));
        }
        world.start(number);
        create_on(world.nodes.last().expect("node")).await;
        world.network.heal_links();
        world.announce_nodes();
        for node in &world.nodes {
            node.caches.maintain().await;
        }
    }
    scan(&world.nodes[6], &bytes).await;
    assert_eq!(world.home_bytes(), bytes.len() as u64);
}

/// Of twelve nodes one asks another for a block in vain, and may have it since. Whoever asks the
/// same node after it is told of it, though the block was never placed there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unsuccessful_reader_is_named_to_later_readers() {
    let (world, _) = cluster(12).await;
    let asked = &world.nodes[0];
    let named = async |peer: &CacheNode| {
        let purpose = ProbePurpose::HomeRead(CacheMember {
            server: peer.server,
            address: peer.address.clone(),
            capacity_bytes: LARGE,
        });
        let page = ReadManifest {
            volume: ID,
            first: FileIndex(0),
        };
        let manifest = asked.caches.read_manifest(page).await.expect("listed");
        let call = Probe {
            range: BlockRange {
                cache: CacheRef::Cooperative(NAME.to_owned()),
                manifest: manifest.manifest,
                file: FileIndex(0),
                first: BlockIndex(0),
                count: 1,
            },
            purpose,
            must_verify: false,
        };
        let deadline = Deadline::after_ms(30_000);
        let answer = asked.caches.probe(call, deadline).await;
        let (blocks, bytes) = answer.expect("an answer");
        assert!(bytes.is_empty(), "nobody has read it");
        let others = blocks.other_holders.into_iter();
        others.map(|other| other.server).collect::<Vec<_>>()
    };
    let second = &world.nodes[1];
    let by_place = named(second).await;
    let is_elsewhere = |node: &&CacheNode| !by_place.contains(&node.server);
    let claimant = world.nodes[2..].iter().find(is_elsewhere);
    let claimant = claimant.expect("blocks are not placed everywhere");
    named(claimant).await;
    assert!(named(second).await.contains(&claimant.server));
}

/// Only a read fetches.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_promotions_and_touches_fetch_nothing() {
    let (world, _) = cluster(2).await;
    let (asked, prober) = (&world.nodes[0], &world.nodes[1]);
    let first = FileIndex(0);
    let page = ReadManifest { volume: ID, first };
    let manifest = asked.caches.read_manifest(page).await.expect("listed");
    let range = || BlockRange {
        cache: CacheRef::Cooperative(NAME.to_owned()),
        manifest: manifest.manifest,
        file: first,
        first: BlockIndex(0),
        count: 4,
    };
    let member = CacheMember {
        server: prober.server,
        address: prober.address.clone(),
        capacity_bytes: LARGE,
    };
    for purpose in [ProbePurpose::Presence, ProbePurpose::HomeRead(member)] {
        let call = Probe {
            range: range(),
            purpose,
            must_verify: false,
        };
        let answer = asked.caches.probe(call, Deadline::after_ms(9_000)).await;
        let (blocks, bytes) = answer.expect("an answer");
        assert_eq!(blocks.digests, [Digest::ABSENT; 4]);
        assert!(bytes.is_empty());
    }
    let touched = asked.caches.touch(&Touch { range: range() });
    let promoted = asked.caches.promote(&Promote { range: range() });
    assert_eq!((touched, promoted), (Ok(()), Ok(())));
    assert_eq!(world.home_bytes(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn joining_during_reads_and_hangs_causes_no_refetch() {
    let (mut world, bytes) = cluster(3).await;
    world.home.read_ms.store(20, Ordering::Relaxed);
    for number in [1, 2, 4] {
        world.network.cut_link(&format!("node:{number}"), "node:3");
    }
    let bytes = Arc::new(bytes.to_vec());
    let mut readers = JoinSet::new();
    let mut read = |node: &CacheNode, seed: u64| {
        let (node, bytes) = (node.clone(), bytes.clone());
        readers.spawn(async move {
            for step in 0..BLOCKS {
                let block = (seed * 37 + step * 7) % BLOCKS;
                let read = node.read(ID, 0, block, 1).await.expect("read");
                let start = block as usize * BLOCK as usize;
                assert!(read == bytes[start..start + read.len()], "block {block}");
            }
        });
    };
    for seed in 0..24 {
        read(&world.nodes[0], seed);
        read(&world.nodes[1], seed + 100);
    }
    world.start(4);
    let joined = world.nodes[3].clone();
    create_on(&joined).await;
    for seed in 0..16 {
        read(&joined, seed + 200);
    }
    while let Some(reader) = readers.join_next().await {
        reader.expect("a reader is content");
    }
    assert_eq!(world.home.duplicate_blocks.load(Ordering::Relaxed), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_joining_full_caches_avoids_home_reads() {
    let mut world = CacheCluster::new(2);
    let bytes = content(1, BLOCKS as usize * BLOCK as usize);
    world.home.put("db/large", bytes.clone(), 1);
    // Each keeps its own half, and has little room for copies of the other one.
    let spec = cache(
        1,
        BLOCKS * 11 / 20 * u64::from(BLOCK),
        ReplacementPolicy::Lru,
    );
    world.create(&spec).await;
    world.announce_nodes();
    for node in &world.nodes {
        assert_eq!(
            node.warm(ID, "", Pinning::FetchOnly).await,
            WarmingState::Done
        );
    }
    assert_eq!(world.home_bytes(), bytes.len() as u64);
    world.start(3);
    world.create(&spec).await;
    world.announce_nodes();
    for _ in 0..2 {
        for node in &world.nodes[..2] {
            node.caches.maintain().await;
            scan(node, &bytes).await;
        }
    }
    scan(&world.nodes[2], &bytes).await;
    assert_eq!(world.home_bytes(), bytes.len() as u64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_joining_node_pins_its_share() {
    let (mut world, bytes) = cluster(2).await;
    for node in &world.nodes {
        assert_eq!(
            node.warm(ID, "large", Pinning::Pin).await,
            WarmingState::Done
        );
    }
    world.start(3);
    create_on(&world.nodes[2]).await;
    world.announce_nodes();
    let whole = BLOCKS * u64::from(BLOCK);
    let pinned = |world: &CacheCluster| {
        let pinned = world.nodes.iter().map(|node| node.status(ID).pinned_bytes);
        pinned.collect::<Vec<_>>()
    };
    assert_eq!(world.nodes[2].status(ID).pinned_paths, ["large"]);
    for _ in 0..2_000 {
        for node in &world.nodes {
            node.caches.maintain().await;
        }
        if pinned(&world).iter().sum::<u64>() == whole && pinned(&world)[2] > whole / 5 {
            assert_eq!(world.home_bytes(), bytes.len() as u64);
            return;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    panic!("{:?} of {whole} are pinned", pinned(&world));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refetches_by_another_primary_count_in_the_ratio() {
    let mut world = CacheCluster::new(1);
    let bytes = content(1, BLOCKS as usize * BLOCK as usize);
    world.home.put("db/large", bytes.clone(), 1);
    // The first one has read everything and kept little.
    let small = cache(1, 20 * u64::from(BLOCK), ReplacementPolicy::Lru);
    world.create(&small).await;
    scan(&world.nodes[0], &bytes).await;
    world.start(2);
    create_on(&world.nodes[1]).await;
    world.announce_nodes();
    scan(&world.nodes[1], &bytes).await;
    let home = world.counter_sum("cache_home_bytes");
    assert!(home > bytes.len() as u64 * 3 / 2, "{home}");
    assert_eq!(
        world.counter_sum("cache_home_unique_bytes"),
        bytes.len() as u64
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refetches_after_a_restart_count_in_the_ratio() {
    let mut world = CacheCluster::new(1);
    let part = 12 * u64::from(BLOCK);
    for (name, seed) in [("db/first", 1), ("db/second", 2)] {
        world.home.put(name, content(seed, part as usize), 1);
    }
    world
        .create(&cache(1, 20 * u64::from(BLOCK), ReplacementPolicy::Lru))
        .await;
    world.nodes[0].read(ID, 0, 0, 12).await.expect("read");
    world.wait_for_blocks(ID, 12).await;
    drop(world.kill(0));
    world.start(1);
    let node = world.nodes[0].clone();
    let ratio = || node.status(ID).home_ratio();
    assert_eq!(ratio(), Some(1.0), "what is here came once");
    assert_eq!(node.counter("cache_recovered_bytes"), part);
    // The second file drives out four blocks of the first, and the first comes back.
    node.read(ID, 1, 0, 12).await.expect("read");
    world.wait_for_blocks(ID, 20).await;
    assert_eq!(ratio(), Some(1.0), "each byte came once so far");
    node.read(ID, 0, 0, 12).await.expect("read");
    let again = node.counter("cache_home_bytes") - part;
    assert!(again > 0, "nothing came again: nothing was tested");
    let whole = 2 * part;
    assert_eq!(ratio(), Some((whole + again) as f64 / whole as f64));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_stay_correct_while_nodes_join_and_leave() {
    let (mut world, bytes) = cluster(4).await;
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
    let mut dead_nodes = Vec::new();
    for _ in 0..6 {
        tokio::time::sleep(Duration::from_millis(60)).await;
        // One dies, of which the catalog tells later; another one comes.
        let dead = world.kill(3);
        dead_nodes.push(dead.counters);
        tokio::time::sleep(Duration::from_millis(60)).await;
        world.announce_nodes();
        number += 1;
        world.start(number);
        create_on(world.nodes.last().expect("node")).await;
        world.announce_nodes();
        for node in &world.nodes {
            node.caches.maintain().await;
        }
    }
    done.store(true, Ordering::Relaxed);
    while let Some(reader) = readers.join_next().await {
        reader.expect("reader");
    }
    assert!(scans.load(Ordering::Relaxed) >= 8);
    // What only a dead node may have had, as it had read it from home; its last requests were under
    // way when it died. A few blocks more, of which only one of two nodes knew who has them.
    let home = |counts: Counters| counts.snapshot().get("cache_home_bytes").copied();
    let lost = dead_nodes.into_iter().filter_map(home).sum::<u64>() / u64::from(BLOCK);
    let doubles = world.home.duplicate_blocks.load(Ordering::Relaxed);
    assert!(
        doubles <= lost + BLOCKS / 10,
        "{doubles} blocks were read again, {lost} were lost"
    );
    assert_eq!(world.counter_sum("cache_digest_failures"), 0);
}
