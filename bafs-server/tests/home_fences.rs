//! Uploads that come late never replace what a later one brought, whatever happened between.

use std::fs;
use std::path::Path;

use bafs_proto::ErrorCode;
use bafs_proto::error::Result;
use bafs_proto::file_set::{FileSelection, MANIFEST_NAME};
use bafs_proto::hash::Digest;
use bafs_proto::ids::{ExtractionId, UploadEpoch, VolumeId};
use bafs_proto::message::{
    BeginPut, CommitPut, ExtractFile, IssueUploadEpoch, PutFile, PutFiles, PutReceipt, UploadFence,
};
use bafs_server::home_server::HomeServer;

use crate::test_home::{HomeFixture, begin, error_code};
use crate::test_nodes::{A, HOME, NodeCluster, random_bytes, spec, tree};

impl HomeFixture {
    async fn fence(&self) -> UploadFence {
        self.ordered_fence(0).await
    }

    async fn ordered_fence(&self, order: u64) -> UploadFence {
        let call = IssueUploadEpoch {
            home_address: None,
            home_id: None,
            path: "f".to_owned(),
        };
        let epoch = self.call(call).await.expect("an epoch").epoch;
        UploadFence { epoch, order }
    }

    /// Sends a file in ranges, up to its commit.
    async fn send_ranges(
        &self,
        id: u128,
        path: &str,
        data: &[u8],
        fence: UploadFence,
    ) -> Result<CommitPut> {
        let fence = Some(fence);
        let begin = BeginPut {
            fence,
            ..begin(id, path)
        };
        self.call(begin).await?;
        self.put_range(id, 0, data).await?;
        Ok(CommitPut {
            extraction: ExtractionId(id),
            size: data.len() as u64,
            digest: Digest::of(data),
            fence,
        })
    }

    async fn put_in_ranges(
        &self,
        id: u128,
        path: &str,
        data: &[u8],
        fence: UploadFence,
    ) -> Result<PutReceipt> {
        let commit = self.send_ranges(id, path, data, fence).await?;
        self.call(commit).await
    }

    async fn put_packed(
        &self,
        id: u128,
        path: &str,
        data: &[u8],
        fence: UploadFence,
    ) -> Result<PutReceipt> {
        let file = PutFile {
            extraction: ExtractionId(id),
            path: path.to_owned(),
            mode: 0o640,
            size: data.len() as u32,
            digest: Digest::of(data),
            token: self.token.clone(),
            fence: Some(fence),
        };
        let call = PutFiles { files: vec![file] };
        let (mut told, _) = self.send(&self.token, call, data).await?;
        told.results.remove(0)
    }

    fn read(&self, path: &str) -> Vec<u8> {
        fs::read(self.root.path().join(path)).expect("a file")
    }

    fn staged_files(&self) -> usize {
        let data = self.root.path().join(".bafs-put/data");
        fs::read_dir(data).expect("a directory").count()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn late_uploads_replace_no_later_file() {
    let world = HomeFixture::new();
    let (old, new) = (world.fence().await, world.fence().await);
    let late = world.send_ranges(1, "f", b"old", old).await.expect("begin");
    let done = world.put_in_ranges(2, "f", b"new", new).await;
    done.expect("it is the latest");
    // Also for a home that begins anew.
    world.start(None);
    let refused = world.call(late).await;
    assert_eq!(error_code(refused), ErrorCode::UploadFenced);
    assert_eq!(world.staged_files(), 0, "its bytes would take room");
    let refused = world.put_in_ranges(1, "f", b"old", old).await;
    assert_eq!(error_code(refused), ErrorCode::UploadFenced);
    let refused = world.put_packed(3, "f", b"old", old).await;
    assert_eq!(error_code(refused), ErrorCode::UploadFenced);
    assert_eq!(world.staged_files(), 0);
    assert_eq!(world.read("f"), b"new");
    let elsewhere = world.put_packed(4, "g", b"old", old).await;
    elsewhere.expect("nothing later is there");
}

#[tokio::test(flavor = "multi_thread")]
async fn late_senders_of_published_files_get_receipts() {
    let world = HomeFixture::new();
    let (old, new) = (world.fence().await, world.fence().await);
    let first = world.put_in_ranges(1, "f", b"old", old).await;
    let first = first.expect("it is the latest");
    let done = world.put_packed(2, "f", b"new", new).await;
    done.expect("it is the latest");
    // Who lost the answer hears that it was there.
    let again = world.call(begin(1, "f")).await.expect("begin");
    assert_eq!(again.receipt, Some(first));
    assert_eq!(world.read("f"), b"new");
}

#[tokio::test(flavor = "multi_thread")]
async fn orders_count_within_an_epoch() {
    let world = HomeFixture::new();
    let later = world.ordered_fence(7).await;
    let earlier = UploadFence { order: 6, ..later };
    let done = world.put_packed(1, "f", b"new", later).await;
    done.expect("it is the first");
    let refused = world.put_packed(2, "f", b"old", earlier).await;
    assert_eq!(error_code(refused), ErrorCode::UploadFenced);
    let same = world.put_packed(3, "f", b"newer", later).await;
    same.expect("the parts of a set have one fence");
    assert_eq!(world.read("f"), b"newer");
}

#[tokio::test(flavor = "multi_thread")]
async fn late_files_join_no_later_set() {
    let world = HomeFixture::new();
    let (old, new) = (world.fence().await, world.fence().await);
    let manifest = format!("out/set/{MANIFEST_NAME}");
    let begun = world.put_packed(1, &manifest, b"{}", new).await;
    begun.expect("the set begins");
    for path in ["out/set/gone", "out/set/deep/gone", &manifest] {
        let refused = world.put_packed(2, path, b"old", old).await;
        assert_eq!(error_code(refused), ErrorCode::UploadFenced, "{path}");
    }
    let beside = world.put_packed(3, "out/other", b"old", old).await;
    beside.expect("it is none of the set's");
    let own = world.put_packed(4, "out/set/deep/file", b"new", new).await;
    own.expect("it is of the set");
}

#[tokio::test(flavor = "multi_thread")]
async fn links_lead_to_one_fenced_place() {
    let world = HomeFixture::new();
    fs::create_dir(world.root.path().join("real")).expect("mkdir");
    std::os::unix::fs::symlink("real", world.root.path().join("link")).expect("link");
    let (old, new) = (world.fence().await, world.fence().await);
    let late = world.send_ranges(1, "real/f", b"old", old).await;
    let late = late.expect("begin");
    let done = world.put_packed(2, "link/f", b"new", new).await;
    done.expect("it is the latest");
    assert_eq!(error_code(world.call(late).await), ErrorCode::UploadFenced);
    assert_eq!(world.read("real/f"), b"new");
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_uploads_may_begin_anew() {
    let world = HomeFixture::new();
    let (old, new) = (world.fence().await, world.fence().await);
    let done = world.put_packed(1, "f", b"other", new).await;
    done.expect("it is the latest");
    let refused = world.put_in_ranges(2, "f", b"mine", old).await;
    assert_eq!(error_code(refused), ErrorCode::UploadFenced);
    let fence = world.fence().await;
    let anew = world.put_in_ranges(2, "f", b"mine", fence).await;
    anew.expect("it is the latest now");
    assert_eq!(world.read("f"), b"mine");
}

#[tokio::test(flavor = "multi_thread")]
async fn epochs_grow_over_processes_and_restarts() {
    let world = HomeFixture::new();
    let verifier = world.signer.verifier();
    let other = HomeServer::open(world.root.path(), verifier, None).expect("home");
    world.network.listen("other", other);
    let mut last = UploadEpoch(0);
    for round in 0..12 {
        let call = IssueUploadEpoch {
            home_address: None,
            home_id: None,
            path: "f".to_owned(),
        };
        let server = ["home", "other"][round % 2];
        let deadline = bafs_proto::time::Deadline::after_ms(20_000);
        let issued = world.pool.call(server, &world.token, call, deadline);
        let epoch = issued.await.expect("an epoch").epoch;
        assert!(epoch > last, "{epoch} after {last}");
        last = epoch;
        if round % 5 == 4 {
            world.start(None);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fences_of_a_lost_table_are_refused() {
    let world = HomeFixture::new();
    let (old, new) = (world.fence().await, world.fence().await);
    let done = world.put_packed(1, "f", b"new", new).await;
    done.expect("it is the latest");
    // As the message of a damaged table says.
    world.network.kill("home");
    let table = world.root.path().join(".bafs-put/uploads.redb");
    fs::rename(&table, world.root.path().join("damaged")).expect("rename");
    world.start(None);
    let refused = world.put_packed(2, "f", b"old", old).await;
    assert_eq!(error_code(refused), ErrorCode::UploadFenced);
    assert!(world.fence().await > new);
    assert_eq!(world.read("f"), b"new");
}

fn start_home(world: &NodeCluster, store: &Path, root: &Path) {
    let verifier = world.config(store).identity.verifier;
    let home = HomeServer::open(root, verifier, None).expect("home");
    world.network.listen(HOME, home);
}

async fn issue_fence(world: &NodeCluster) -> UploadFence {
    let call = IssueUploadEpoch {
        home_address: None,
        home_id: None,
        path: "out".to_owned(),
    };
    let epoch = world.call(HOME, call).await.expect("an epoch").epoch;
    UploadFence { epoch, order: 0 }
}

/// A file or set of volume 1 that goes to `out/r`.
fn extract(id: u128, word: &str, fence: UploadFence, world: &NodeCluster) -> ExtractFile {
    let is_set = word.ends_with('/');
    ExtractFile {
        volume: VolumeId(1),
        path: word.to_owned(),
        selections: is_set
            .then(|| FileSelection::of_word(word))
            .into_iter()
            .collect(),
        extraction: ExtractionId(id),
        home_address: HOME.to_owned(),
        home_id: None,
        target_path: "out/r".to_owned(),
        home_token: world.token.clone(),
        fence: Some(fence),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_that_comes_late_is_refused() {
    for bytes in [3, 2_500_000] {
        let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
        let root = tempfile::tempdir().expect("root");
        start_home(&world, store.path(), root.path());
        let _node = world.node(A, world.config(store.path())).await;
        world.create(A, spec(1, None)).await.expect("create");
        let volume = tree(store.path(), 1);
        fs::write(volume.join("old"), random_bytes(bytes, 1)).expect("write");
        fs::write(volume.join("new"), random_bytes(bytes, 2)).expect("write");
        let (old, new) = (issue_fence(&world).await, issue_fence(&world).await);
        let sent = world.call(A, extract(2, "new", new, &world)).await;
        sent.expect("it is the latest");
        let late = world.call(A, extract(1, "old", old, &world)).await;
        let late = late.expect_err("it is late");
        assert_eq!(late.code, ErrorCode::UploadFenced);
        assert!(late.detail.contains("a later upload"), "{late}");
        let there = fs::read(root.path().join("out/r")).expect("read");
        assert!(there == random_bytes(bytes, 2));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_set_leaves_the_later_one_whole() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let root = tempfile::tempdir().expect("root");
    start_home(&world, store.path(), root.path());
    let _node = world.node(A, world.config(store.path())).await;
    world.create(A, spec(1, None)).await.expect("create");
    let volume = tree(store.path(), 1);
    for (set, names) in [("old", ["a", "b"]), ("new", ["a", "c"])] {
        fs::create_dir(volume.join(set)).expect("mkdir");
        for name in names {
            fs::write(volume.join(set).join(name), set).expect("write");
        }
    }
    let (old, new) = (issue_fence(&world).await, issue_fence(&world).await);
    let sent = world.call(A, extract(2, "new/", new, &world)).await;
    sent.expect("it is the latest");
    let late = world.call(A, extract(1, "old/", old, &world)).await;
    let late = late.expect_err("it is late");
    assert_eq!(late.code, ErrorCode::UploadFenced);
    let out = root.path().join("out/r");
    let text = fs::read_to_string(out.join(MANIFEST_NAME)).expect("a manifest");
    assert!(text.contains("\"complete\": true"), "{text}");
    assert_eq!(fs::read(out.join("a")).expect("read"), b"new");
    assert!(!out.join("b").exists());
}
