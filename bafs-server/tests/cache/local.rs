//! What agents on the node's machine read without asking: always the right bytes, whatever the
//! node does with its blocks meanwhile, and whoever dies.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bafs_proto::ErrorCode;
use bafs_proto::fd_passing::{HandoffReply, HandoffRequest};
use bafs_proto::hash::Digest;
use bafs_proto::ids::{BlockIndex, FileIndex, VolumeId};
use bafs_proto::message::ReadManifest;
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::volume::ReplacementPolicy;
use bafs_server::fd_passing::Handoff;
use bafs_tree::{BlockLayout, BlockMap};
use rustix::fs::{Mode, OFlags, openat};

use super::test_cluster::{BLOCK, CacheCluster, CacheNode, cache, content};

pub(crate) const ID: VolumeId = VolumeId(1);
const LARGE: u64 = 64 << 20;

/// What an agent gets at the door, used as the agent does.
pub(crate) struct LocalAgent {
    pub(crate) handoff: Handoff,
    pub(crate) map: BlockMap,
}

impl LocalAgent {
    pub(crate) async fn new(node: &CacheNode) -> Self {
        let received = prepare_handoff(node, manifest(node).await).await;
        let first = FileIndex(0);
        let read = ReadManifest { volume: ID, first };
        let page = node.caches.read_manifest(read).await.expect("manifest");
        let places = BlockLayout::from_manifest(&page.entries, page.block_bytes).expect("places");
        let files = [received.files[1].as_fd(), received.files[2].as_fd()];
        let map = BlockMap::open(places, files).expect("map");
        Self {
            handoff: received,
            map,
        }
    }

    /// A block of `length` bytes, if it is here.
    pub(crate) fn read(&self, file: u32, block: u64, length: usize) -> Option<Vec<u8>> {
        let flags = OFlags::RDONLY | OFlags::CLOEXEC;
        let opened = openat(
            &self.handoff.files[0],
            file.to_string(),
            flags,
            Mode::empty(),
        );
        let opened = File::from(opened.ok()?);
        let mut bytes = vec![0; length];
        let at = block * u64::from(BLOCK);
        let read = || {
            opened.read_exact_at(&mut bytes, at).ok()?;
            Some(vec![Digest::of(&bytes)])
        };
        let here = self.map.read_if_unchanged(file, block..block + 1, read);
        self.map.count_read(BLOCK >> 10, 1);
        here.then_some(bytes)
    }

    pub(crate) async fn hold(&mut self, file: u32) -> Option<File> {
        let file = FileIndex(file);
        let asked = self
            .handoff
            .handler
            .answer(HandoffRequest::PinFile { file });
        match asked.await {
            Ok((HandoffReply::Pinned, mut files)) => Some(files.remove(0).into()),
            Ok(other) => panic!("{other:?}"),
            Err(error) => {
                assert_eq!(error.code, ErrorCode::WrongState);
                None
            }
        }
    }

    pub(crate) async fn release(&mut self, file: u32) {
        let file = FileIndex(file);
        let asked = self
            .handoff
            .handler
            .answer(HandoffRequest::ReleaseFile { file });
        assert!(matches!(asked.await, Ok((HandoffReply::Done, _))));
    }
}

async fn manifest(node: &CacheNode) -> Digest {
    let first = FileIndex(0);
    let read = ReadManifest { volume: ID, first };
    let page = node.caches.read_manifest(read).await;
    page.expect("manifest").manifest
}

async fn prepare_handoff(node: &CacheNode, manifest: Digest) -> Handoff {
    let grant = node.caches.prepare_handoff(ID, manifest).expect("grant");
    grant().await.expect("hand-over")
}

pub(crate) fn block_of(bytes: &[u8], block: u64) -> &[u8] {
    let start = block as usize * BLOCK as usize;
    &bytes[start..bytes.len().min(start + BLOCK as usize)]
}

/// Reads all blocks of a file by calls, one by one, and compares.
pub(crate) async fn scan(node: &CacheNode, file: u32, bytes: &[u8]) {
    for block in 0..bytes.len().div_ceil(BLOCK as usize) as u64 {
        let read = node.read(ID, file, block, 1).await.expect("read");
        assert!(read == block_of(bytes, block), "block {block}");
    }
}

pub(crate) async fn wait_until(what: impl Fn() -> bool) {
    for _ in 0..2_000 {
        if what() {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
    panic!("it never happens");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn local_reads_stay_correct_under_eviction() {
    const BLOCKS: u64 = 120;
    for replacement in [ReplacementPolicy::Lru, ReplacementPolicy::Mru] {
        let world = CacheCluster::new(1);
        let bytes = Arc::new(content(1, BLOCKS as usize * BLOCK as usize - 77));
        world.home.put("db/file", bytes.to_vec(), 1);
        let size_bytes = BLOCKS / 3 * u64::from(BLOCK);
        world.create(&cache(1, size_bytes, replacement)).await;
        let world = Arc::new(world);
        let (near, asked) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let mut readers = tokio::task::JoinSet::new();
        for reader in 0..64u64 {
            let agent = LocalAgent::new(&world.nodes[0]).await;
            let (world, bytes) = (world.clone(), bytes.clone());
            let (near, asked) = (near.clone(), asked.clone());
            readers.spawn(async move {
                let mut state = reader + 1;
                for _ in 0..150 {
                    state = state
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1);
                    let block = (state >> 33) % BLOCKS;
                    let right = block_of(&bytes, block);
                    let read = agent.read(0, block, right.len());
                    match read {
                        Some(read) => {
                            assert!(read == right, "block {block} from its file");
                            near.fetch_add(1, Ordering::Relaxed);
                        }
                        None => {
                            let read = world.nodes[0].read(ID, 0, block, 1).await;
                            assert!(read.expect("read") == right, "block {block} by a call");
                            asked.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
        while let Some(reader) = readers.join_next().await {
            reader.expect("a reader is content");
        }
        let node = &world.nodes[0];
        assert!(near.load(Ordering::Relaxed) > 0 && asked.load(Ordering::Relaxed) > 0);
        // Blocks are kept after their readers have them.
        wait_until(|| node.counter("cache_evicted_primary") > BLOCKS / 3).await;
        let used = node.caches.usage(ID).expect("used").0;
        assert!(used <= size_bytes);
        // What was read without asking is counted all the same.
        let counts =
            || ["cache_hit_local_bytes", "cache_hits_local"].map(|name| node.counter(name));
        let before = counts();
        node.caches.count_local_reads();
        let after = counts();
        let near = near.load(Ordering::Relaxed);
        assert!(after[0] - before[0] >= near * u64::from(BLOCK));
        assert!(after[1] - before[1] >= near);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locally_used_blocks_stay_longer() {
    let world = CacheCluster::new(1);
    let bytes = content(1, 40 * BLOCK as usize);
    world.home.put("db/file", bytes.clone(), 1);
    let size = 20 * u64::from(BLOCK);
    world.create(&cache(1, size, ReplacementPolicy::Lru)).await;
    let node = &world.nodes[0];
    let agent = LocalAgent::new(node).await;
    node.read(ID, 0, 0, 20).await.expect("read");
    wait_until(|| (0..20).all(|block| agent.map.has_block(0, block))).await;
    // The oldest ones are used, where the node does not see it.
    for block in 0..10 {
        assert!(agent.read(0, block, BLOCK as usize).is_some());
    }
    node.read(ID, 0, 20, 8).await.expect("read");
    wait_until(|| (20..28).all(|block| agent.map.has_block(0, block))).await;
    assert!((0..10).all(|block| agent.map.has_block(0, block)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restored_blocks_are_published_only_after_verification() {
    let mut world = CacheCluster::new(1);
    let bytes = content(1, 10 * BLOCK as usize);
    world.home.put("db/file", bytes.clone(), 1);
    world.create(&cache(1, LARGE, ReplacementPolicy::Lru)).await;
    world.nodes[0].read(ID, 0, 0, 10).await.expect("read");
    world.wait_for_blocks(ID, 10).await;
    drop(world.kill(0));
    let path = world
        .root()
        .join("1")
        .join(ID.to_string())
        .join("1/blocks/0");
    let file = File::options().write(true).open(path).expect("open");
    file.write_all_at(b"damage", 3 * u64::from(BLOCK) + 5)
        .expect("damage");
    world.start(1);
    let node = &world.nodes[0];
    let mut agent = LocalAgent::new(node).await;
    assert!((0..10).all(|block| !agent.map.has_block(0, block)));
    assert!(agent.hold(0).await.is_none(), "not before it was checked");
    scan(node, 0, &bytes).await;
    assert_eq!(node.counter("cache_digest_failures"), 1);
    wait_until(|| (0..10).all(|block| agent.map.has_block(0, block))).await;
    for block in 0..10 {
        let read = agent.read(0, block, BLOCK as usize);
        assert!(
            read.as_deref() == Some(block_of(&bytes, block)),
            "block {block}"
        );
    }
    assert!(agent.hold(0).await.is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disk_damage_is_detected_before_readers_see_it() {
    let world = CacheCluster::new(1);
    let bytes = content(1, 10 * BLOCK as usize);
    world.home.put("db/file", bytes.clone(), 1);
    world.create(&cache(1, LARGE, ReplacementPolicy::Lru)).await;
    let node = &world.nodes[0];
    let mut agent = LocalAgent::new(node).await;
    scan(node, 0, &bytes).await;
    wait_until(|| (0..10).all(|block| agent.map.has_block(0, block))).await;
    assert!(agent.hold(0).await.is_some());
    agent.release(0).await;
    let path = world.root().join("1").join(ID.to_string());
    let file = File::options().write(true).open(path.join("1/blocks/0"));
    let file = file.expect("open");
    file.write_all_at(b"damage", 3 * u64::from(BLOCK) + 5)
        .expect("damage");
    // Held again it is compared again, since it was written.
    let asked = agent
        .handoff
        .handler
        .answer(HandoffRequest::PinFile { file: FileIndex(0) });
    assert_eq!(
        asked.await.map_err(|e| e.code).err(),
        Some(ErrorCode::ServerFault)
    );
    assert!(agent.read(0, 2, BLOCK as usize).is_some());
    assert!(agent.read(0, 3, BLOCK as usize).is_none());
    let before = world.home_bytes();
    scan(node, 0, &bytes).await;
    assert_eq!(node.counter("cache_digest_failures"), 1);
    assert_eq!(world.home_bytes() - before, u64::from(BLOCK));
    wait_until(|| agent.map.has_block(0, 3)).await;
    let read = agent.read(0, 3, BLOCK as usize);
    assert!(read.as_deref() == Some(block_of(&bytes, 3)));
    assert!(agent.hold(0).await.is_some());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_requested_over_fd_passing_are_always_delivered() {
    let world = CacheCluster::new(2);
    let bytes = content(1, 10 * BLOCK as usize - 7);
    world.home.put("db/file", bytes.clone(), 1);
    for (number, size, here) in [(1, LARGE, true), (2, u64::from(BLOCK) * 2, false)] {
        let id = VolumeId(number);
        world
            .create(&cache(number, size, ReplacementPolicy::Lru))
            .await;
        world.announce_nodes();
        let node = &world.nodes[0];
        let read = ReadManifest {
            volume: id,
            first: FileIndex(0),
        };
        let page = node.caches.read_manifest(read).await.expect("manifest");
        let grant = node
            .caches
            .prepare_handoff(id, page.manifest)
            .expect("grant");
        let mut received = grant().await.expect("hand-over");
        // A disk that is slow to take them gets them later, and then they are there.
        for round in 0.. {
            let asked = received.handler.answer(HandoffRequest::ReadBlocks {
                file: FileIndex(0),
                first: BlockIndex(0),
                count: 20,
            });
            match asked.await.expect("blocks") {
                (HandoffReply::NowLocal, files) => {
                    assert!(here && files.is_empty());
                    let places = BlockLayout::from_manifest(&page.entries, page.block_bytes)
                        .expect("places");
                    let files = [received.files[1].as_fd(), received.files[2].as_fd()];
                    let map = BlockMap::open(places, files).expect("map");
                    assert!((0..10).all(|block| map.has_block(0, block)));
                    break;
                }
                (HandoffReply::Blocks(digests), mut files) => {
                    assert_eq!(digests.len(), 10);
                    let memory = File::from(files.remove(0));
                    assert!(read_whole(&memory, bytes.len()) == bytes);
                    if !here {
                        break;
                    }
                    assert!(round < 2_000, "there is room for them");
                    tokio::time::sleep(std::time::Duration::from_millis(5)).await;
                }
                other => panic!("{other:?}"),
            }
        }
        for node in &world.nodes {
            node.forget(id).await;
        }
    }
    // What found no room came once all the same.
    assert_eq!(world.home_bytes(), 2 * bytes.len() as u64);
}

/// Two files, of which the first is small, in a cache that has no room for the second.
async fn two_files() -> (CacheCluster, [Vec<u8>; 2]) {
    let world = CacheCluster::new(1);
    let files = [
        content(1, 10 * BLOCK as usize - 9),
        content(2, 60 * BLOCK as usize),
    ];
    world.home.put("db/a", files[0].clone(), 1);
    world.home.put("db/b", files[1].clone(), 1);
    let size = 30 * u64::from(BLOCK);
    world.create(&cache(1, size, ReplacementPolicy::Lru)).await;
    (world, files)
}

pub(crate) fn read_whole(file: &File, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    file.read_exact_at(&mut bytes, 0).expect("read");
    bytes
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_open_whole_file_is_not_evicted() {
    let (world, [small, large]) = two_files().await;
    let node = &world.nodes[0];
    let (mut agent, mut other) = (LocalAgent::new(node).await, LocalAgent::new(node).await);
    assert!(agent.hold(0).await.is_none(), "it is not here yet");
    scan(node, 0, &small).await;
    wait_until(|| (0..10).all(|block| agent.map.has_block(0, block))).await;
    assert!(agent.hold(1).await.is_none());
    let opened = agent.hold(0).await.expect("it is wholly here");
    let again = other.hold(0).await.expect("others may have it too");
    let stays = async || {
        scan(node, 1, &large).await;
        assert!((0..10).all(|block| agent.map.has_block(0, block)));
        assert!(read_whole(&opened, small.len()) == small);
    };
    stays().await;
    // A dead agent is no reason while the kernel, on behalf of a program, has the file.
    drop(other);
    stays().await;
    drop(again);
    stays().await;
    agent.release(0).await;
    scan(node, 1, &large).await;
    assert!(read_whole(&opened, small.len()) == small);
    drop(opened);
    for _ in 0..100 {
        scan(node, 1, &large).await;
        if (0..10).all(|block| !agent.map.has_block(0, block)) {
            let used = node.caches.usage(ID).expect("used").0;
            assert!(used <= 30 * u64::from(BLOCK));
            return;
        }
    }
    panic!("it stays for ever");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_file_released_before_arrival_is_not_held() {
    let (world, [small, large]) = two_files().await;
    let node = &world.nodes[0];
    let mut agent = LocalAgent::new(node).await;
    scan(node, 0, &small).await;
    wait_until(|| (0..10).all(|block| agent.map.has_block(0, block))).await;
    // The agent has asked, does not wait for the answer, and gives back what it may have got.
    let file = FileIndex(0);
    let asked = agent
        .handoff
        .handler
        .answer(HandoffRequest::PinFile { file });
    agent.release(0).await;
    let late = asked.await.map_err(|error| error.code).err();
    assert_eq!(late, Some(ErrorCode::WrongState));
    for _ in 0..100 {
        scan(node, 1, &large).await;
        if (0..10).all(|block| !agent.map.has_block(0, block)) {
            return;
        }
    }
    panic!("it stays for ever");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cache_full_of_open_files_passes_through() {
    let (world, [small, large]) = two_files().await;
    let node = &world.nodes[0];
    node.caches.remove(ID).await;
    let size = 10 * u64::from(BLOCK);
    world.create(&cache(1, size, ReplacementPolicy::Mru)).await;
    let mut agent = LocalAgent::new(node).await;
    scan(node, 0, &small).await;
    wait_until(|| (0..10).all(|block| agent.map.has_block(0, block))).await;
    let opened = agent.hold(0).await.expect("it is wholly here");
    scan(node, 1, &large).await;
    assert!(node.counter("cache_bypassed_blocks") > 0);
    assert!(read_whole(&opened, small.len()) == small);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn agents_of_an_old_source_state_are_recalled() {
    let (world, [small, large]) = two_files().await;
    let node = &world.nodes[0];
    scan(node, 0, &small).await;
    let mut agent = LocalAgent::new(node).await;
    wait_until(|| (0..10).all(|block| agent.map.has_block(0, block))).await;
    let opened = agent.hold(0).await.expect("it is wholly here");
    let old = manifest(node).await;
    let changed = content(3, large.len());
    world.home.put("db/b", changed.clone(), 2);
    let (caches, mut recall) = (node.caches.clone(), agent.handoff.recall.clone());
    let renewing = tokio::spawn(async move {
        let deadline = Deadline::after_ms(30_000);
        caches.invalidate(ID, Token::none(), deadline).await
    });
    let why = recall
        .wait_for(Option::is_some)
        .await
        .expect("told")
        .clone();
    assert_eq!(why.map(|why| why.code), Some(ErrorCode::SourceChanged));
    // Nothing moves under it while it has the file, and it gets no other one.
    assert!(read_whole(&opened, small.len()) == small);
    let file = FileIndex(0);
    let asked = agent
        .handoff
        .handler
        .answer(HandoffRequest::PinFile { file });
    assert_eq!(
        asked.await.map_err(|e| e.code).err(),
        Some(ErrorCode::SourceChanged)
    );
    drop(opened);
    agent.release(0).await;
    let new = renewing.await.expect("task").expect("invalidate");
    assert_ne!(new, old);
    assert!((0..10).all(|block| !agent.map.has_block(0, block)));
    assert!(node.caches.prepare_handoff(ID, old).is_err());
    // The file that did not change is still here, for those who work with the new state.
    let fresh = LocalAgent::new(node).await;
    let before = world.home_bytes();
    scan(node, 0, &small).await;
    assert_eq!(world.home_bytes(), before);
    assert!(fresh.read(0, 3, BLOCK as usize).as_deref() == Some(block_of(&small, 3)));
    scan(node, 1, &changed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restarted_node_leaves_surviving_readers_unaffected() {
    let (mut world, [small, large]) = two_files().await;
    let mut agent = LocalAgent::new(&world.nodes[0]).await;
    scan(&world.nodes[0], 0, &small).await;
    wait_until(|| (0..10).all(|block| agent.map.has_block(0, block))).await;
    let opened = agent.hold(0).await.expect("it is wholly here");
    let directory: OwnedFd = agent.handoff.files[0].try_clone().expect("clone");
    let path = openat(&directory, "0", OFlags::RDONLY, Mode::empty());
    let mapped_file = File::from(path.expect("open"));
    drop(world.kill(0));
    world.start(1);
    world.announce_nodes();
    let node = &world.nodes[0];
    // It fills its cache anew, and the old agent reads on as if nothing had happened.
    scan(node, 1, &large).await;
    assert!(read_whole(&opened, small.len()) == small);
    assert!(read_whole(&mapped_file, small.len()) == small);
    let before = world.home_bytes();
    scan(node, 0, &small).await;
    assert!(world.home_bytes() > before, "the survivors kept it");
    // Without the map, only the file that somebody has open is left behind.
    drop((agent, mapped_file, directory));
    scan(node, 0, &small).await;
    let mut agent = LocalAgent::new(node).await;
    wait_until(|| (0..10).all(|block| agent.map.has_block(0, block))).await;
    let newer = agent.hold(0).await.expect("it is wholly here");
    drop(agent);
    drop(world.kill(0));
    world.start(1);
    let node = &world.nodes[0];
    let used = node.caches.usage(ID).expect("used").0;
    assert!(used > 0, "blocks of the other file are still here");
    let before = world.home_bytes();
    scan(node, 0, &small).await;
    assert_eq!(world.home_bytes() - before, small.len() as u64);
    assert_eq!(node.counter("cache_digest_failures"), 0);
    assert!(read_whole(&newer, small.len()) == small && read_whole(&opened, small.len()) == small);
}
