//! Files that take a while to be compared with their digests.

use bafs_proto::ids::VolumeId;
use bafs_proto::volume::Replacement;

use crate::near::{Agent, eventually, whole};
use crate::world::{BLOCK, World, cache, content};

const ID: VolumeId = VolumeId(1);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_file_is_compared_as_soon_as_it_is_here_and_given_to_the_first_who_opens_it() {
    const BLOCKS: u64 = (32 << 20) / BLOCK as u64;
    let world = World::new(1);
    let bytes = content(1, BLOCKS as usize * BLOCK as usize);
    world.home.put("db/a", bytes.clone(), 1);
    world.create(&cache(1, 64 << 20, Replacement::Lru)).await;
    let node = &world.nodes[0];
    let compared = || node.count("cache_whole_files_compared");
    for first in (0..BLOCKS).step_by(64) {
        assert_eq!(compared(), 0, "it is not wholly here");
        node.read(ID, 0, first, 64).await.expect("read");
    }
    eventually(|| compared() == 1).await;
    // Whoever asks for it again changes nothing.
    node.read(ID, 0, 0, 64).await.expect("read");
    let opened = Agent::new(node).await.hold(0).await.expect("it is whole");
    assert!(whole(&opened, bytes.len()) == bytes);
    assert_eq!(compared(), 1, "nobody had to wait for that");
}
