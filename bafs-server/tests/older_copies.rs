//! Copies that are made from an older copy: only what changed travels, and what comes of it is
//! what the source has, whatever the older one is.

use std::fs::{self, File, FileTimes, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;

use crate::test_nodes::{A, FOREVER, NodeCluster, from_volume, random_bytes, spec, tree};
use bafs_proto::identity::Authority;
use bafs_proto::ids::VolumeId;
use bafs_proto::message::{CreateVolume, DeleteVolume};
use bafs_proto::net::pool::Pool;
use bafs_proto::time::Deadline;
use bafs_proto::token::{Resource, Right};
use bafs_proto::volume::{VolumeState, VolumeStatus};
use bafs_proto::{ErrorCode, Result};
use bafs_server::node::Node;
use tempfile::TempDir;

const B: &str = "b:1";
const CHUNK: u64 = 64 << 10;
const LARGE: usize = 3 << 20;

/// Volume 1 on node A, which copies on node B are made of.
struct CopyFixture {
    world: NodeCluster,
    stores: [TempDir; 2],
    nodes: Vec<Arc<Node>>,
}

impl CopyFixture {
    async fn new() -> Self {
        let world = NodeCluster::new();
        let stores = [(); 2].map(|()| tempfile::tempdir().expect("store"));
        let mut nodes = Vec::new();
        for (address, store) in [A, B].into_iter().zip(&stores) {
            nodes.push(world.node(address, world.config(store.path())).await);
        }
        world.create(A, spec(1, None)).await.expect("create");
        let stage = Self {
            world,
            stores,
            nodes,
        };
        let root = stage.source();
        fs::create_dir(root.join("deep")).expect("directory");
        fs::write(root.join("large"), random_bytes(LARGE, 1)).expect("write");
        for name in ["same", "deep/rewritten", "removed", "old-name"] {
            fs::write(root.join(name), random_bytes(5_000, name.len() as u64)).expect("write");
        }
        let sparse = File::create(root.join("sparse")).expect("create");
        sparse.set_len(1 << 30).expect("size");
        sparse
            .write_all_at(&random_bytes(4096, 7), 9 << 20)
            .expect("write");
        std::os::unix::fs::symlink("same", root.join("link")).expect("link");
        stage
    }

    fn source(&self) -> std::path::PathBuf {
        tree(self.stores[0].path(), 1)
    }

    fn copy(&self, id: u128) -> std::path::PathBuf {
        tree(self.stores[1].path(), id)
    }

    async fn make_copy(&self, id: u128, base: Option<u128>) -> Result<VolumeStatus> {
        let call = CreateVolume {
            server: None,
            spec: spec(id, from_volume(1)),
            base: base.map(VolumeId),
            source_token: self.world.token.clone(),
        };
        self.world.call(B, call).await
    }

    /// Bytes that came for a copy that must be what the source is.
    async fn received_bytes(&self, id: u128, base: Option<u128>) -> u64 {
        let status = self.make_copy(id, base).await.expect("status");
        assert_eq!(status.state, VolumeState::Ready, "{status:?}");
        assert_eq!(snapshot_tree(&self.copy(id)), snapshot_tree(&self.source()));
        status.received_bytes
    }
}

/// Everything in a tree: path, bits, time, whether it is sparse, and content or target.
fn snapshot_tree(root: &Path) -> Vec<(String, u32, i64, bool, Vec<u8>)> {
    let mut seen = Vec::new();
    let mut waiting = vec![root.to_owned()];
    while let Some(directory) = waiting.pop() {
        for entry in fs::read_dir(directory).expect("directory") {
            let path = entry.expect("entry").path();
            let about = fs::symlink_metadata(&path).expect("metadata");
            let mut content = Vec::new();
            let mut is_sparse = false;
            if about.is_dir() {
                waiting.push(path.clone());
            } else if about.is_symlink() {
                let target = fs::read_link(&path).expect("target");
                content = target.into_os_string().into_encoded_bytes();
            } else {
                is_sparse = about.blocks() * 512 < about.len() / 2;
                content = data_of(&path, &about);
            }
            let name = path.strip_prefix(root).expect("below").to_string_lossy();
            let (bits, time) = (
                about.mode(),
                about.mtime() * 1_000_000_000 + about.mtime_nsec(),
            );
            seen.push((name.into_owned(), bits, time, is_sparse, content));
        }
    }
    seen.sort();
    seen
}

/// Of a large file the part that is not a hole, as this test makes them.
fn data_of(path: &Path, about: &fs::Metadata) -> Vec<u8> {
    if about.len() < 1 << 30 {
        return fs::read(path).expect("read");
    }
    let mut data = vec![0; 8 << 20];
    let file = File::open(path).expect("open");
    file.read_exact_at(&mut data, 8 << 20).expect("read");
    data
}

/// A change that size and modification time do not show.
fn change_secretly(path: &Path, at: u64, content: &[u8]) {
    let file = File::options().write(true).open(path).expect("open");
    let before = file.metadata().expect("metadata").modified().expect("time");
    file.write_all_at(content, at).expect("write");
    file.set_times(FileTimes::new().set_modified(before))
        .expect("times");
}

#[tokio::test(flavor = "multi_thread")]
async fn further_copies_transfer_only_changed_chunks() {
    let stage = CopyFixture::new().await;
    let whole = (LARGE + 4 * 5_000) as u64;
    let first = stage.received_bytes(11, None).await;
    assert!((whole..whole + 2 * CHUNK).contains(&first), "{first} bytes");
    assert_eq!(
        stage.received_bytes(12, Some(11)).await,
        0,
        "nothing changed"
    );

    let root = stage.source();
    change_secretly(&root.join("large"), 5 * CHUNK + 1, b"changed");
    change_secretly(&root.join("deep/rewritten"), 0, b"changed");
    let large = File::options().append(true).open(root.join("large"));
    std::io::Write::write_all(&mut large.expect("open"), b"more").expect("append");
    let sparse = File::options().write(true).open(root.join("sparse"));
    let sparse = sparse.expect("open");
    sparse
        .write_all_at(&random_bytes(4096, 8), 10 << 20)
        .expect("write");
    fs::remove_file(root.join("removed")).expect("remove");
    fs::rename(root.join("old-name"), root.join("new-name")).expect("rename");
    fs::set_permissions(root.join("same"), Permissions::from_mode(0o751)).expect("bits");
    let changed = CHUNK + 5_000 + 4 + 4096 + 5_000;
    assert_eq!(stage.received_bytes(13, Some(12)).await, changed);

    let file = File::options().write(true).open(root.join("large"));
    file.expect("open").set_len(CHUNK + 9).expect("truncate");
    fs::remove_file(root.join("same")).expect("remove");
    fs::create_dir(root.join("same")).expect("a directory where a file was");
    assert_eq!(
        stage.received_bytes(14, Some(13)).await,
        0,
        "what is left was there"
    );
    assert_eq!(stage.nodes.len(), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_older_copy_costs_only_extra_bytes() {
    let stage = CopyFixture::new().await;
    let whole = stage.received_bytes(11, None).await;
    change_secretly(&stage.copy(11).join("large"), 2 * CHUNK, b"rotten");
    fs::remove_file(stage.copy(11).join("same")).expect("remove");
    std::os::unix::fs::symlink("/etc/passwd", stage.copy(11).join("same")).expect("link");
    assert_eq!(stage.received_bytes(12, Some(11)).await, CHUNK + 5_000);
    assert_eq!(
        stage.received_bytes(13, Some(99)).await,
        whole,
        "it never was"
    );
    let volume = VolumeId(12);
    let deleted = stage.world.call(B, DeleteVolume { volume }).await;
    deleted.expect("delete");
    assert_eq!(
        stage.received_bytes(14, Some(12)).await,
        whole,
        "it is gone"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_base_volume_needs_its_own_right() {
    let stage = CopyFixture::new().await;
    stage.received_bytes(11, None).await;
    let authority: &Authority = &stage.world.authority;
    let rights = [Right::Read, Right::Write, Right::Manage];
    let own = [Resource::Volume(VolumeId(12))];
    let token = authority.signer().grant(&own, &rights, FOREVER);
    let token = token.expect("token");
    let call = |base| CreateVolume {
        server: None,
        spec: spec(12, from_volume(1)),
        base,
        source_token: stage.world.token.clone(),
    };
    let pool: &Pool = &stage.world.pool;
    let asked = |base| pool.call(B, &token, call(base), Deadline::after_ms(20_000));
    let refused = asked(Some(VolumeId(11))).await.expect_err("not theirs");
    assert_eq!(refused.code, ErrorCode::RightMissing);
    asked(None).await.expect("their own");
}
