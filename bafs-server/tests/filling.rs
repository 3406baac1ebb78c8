//! What volumes take that are filled from elsewhere, and how it comes there.

use std::os::unix::fs::{FileExt, MetadataExt};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::test_nodes::{
    A, FaultyHome, HOME, NodeCluster, from_home, from_volume, random_bytes, spec, tree,
};
use bafs_proto::ErrorCode;
use bafs_proto::ids::VolumeId;
use bafs_proto::message::SourceKind;
use bafs_proto::volume::{VolumeSource, VolumeSpec, VolumeState};
use bafs_server::home_server;

const B: &str = "b:1";
const C: &str = "c:1";

#[tokio::test(flavor = "multi_thread")]
async fn filling_a_volume_respects_its_reserved_size() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let home = Arc::new(FaultyHome::default());
    home.add("in", SourceKind::Directory);
    home.add("in/deep", SourceKind::Directory);
    for number in 0..60 {
        home.file(&format!("in/deep/{number:02}"), &[b'x'; 100], 0o644);
    }
    world.network.listen(HOME, home);
    let node = world.node(A, world.config(store.path())).await;
    let bytes = |id, size_bytes| VolumeSpec {
        size_bytes,
        ..spec(id, from_home("in"))
    };
    // 60 files of 100 bytes take 60 blocks of the disk.
    let small = world.create(A, bytes(1, 100_000)).await.expect("status");
    let code = small.error.as_ref().map(|fault| fault.code);
    assert_eq!(code, Some(ErrorCode::TooLarge), "{small:?}");
    let large = world.create(A, bytes(2, 1_000_000)).await.expect("status");
    assert_eq!(large.state, VolumeState::Ready, "{large:?}");
    assert!(large.used_bytes >= 60 * 4096, "{large:?}");
    // What was counted while it was filled is what its tree counts.
    let exact = world.create(A, bytes(3, large.used_bytes)).await;
    let exact = exact.expect("status");
    assert_eq!(exact.state, VolumeState::Ready, "{exact:?}");
    let short = world.create(A, bytes(4, large.used_bytes - 1)).await;
    assert_eq!(short.expect("status").state, VolumeState::Failed);
    // Copies count alike.
    let other = tempfile::tempdir().expect("store");
    let _replica = world.node(B, world.config(other.path())).await;
    let copy = |id, size_bytes| VolumeSpec {
        size_bytes,
        ..spec(id, from_volume(2))
    };
    let exact = world.create(B, copy(12, large.used_bytes)).await;
    assert_eq!(exact.expect("status").state, VolumeState::Ready);
    let short = world.create(B, copy(13, large.used_bytes - 1)).await;
    assert_eq!(short.expect("status").state, VolumeState::Failed);
    drop(node);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_undersized_file_limit_copies_nothing() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let home = Arc::new(FaultyHome::default());
    home.add("in", SourceKind::Directory);
    // Several pages of the listing.
    for number in 0..20 {
        home.file(&format!("in/{number:02}"), b"x", 0o644);
    }
    world.network.listen(HOME, home.clone());
    let node = world.node(A, world.config(store.path())).await;
    let files = |id, size_files| VolumeSpec {
        size_files,
        ..spec(id, from_home("in"))
    };
    let short = world.create(A, files(1, 19)).await.expect("status");
    let fault = short.error.as_ref().expect("it does not fit");
    assert_eq!(fault.code, ErrorCode::TooLarge);
    assert_eq!(home.reads.load(Ordering::Relaxed), 0, "nothing was copied");
    let enough = world.create(A, files(2, 20)).await.expect("status");
    assert_eq!(enough.state, VolumeState::Ready, "{enough:?}");
    assert_eq!(enough.used_files, 20);
    drop(node);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sparse_file_is_replicated_without_its_holes() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let _node = world.node(A, world.config(store.path())).await;
    world.create(A, spec(1, None)).await.expect("create");
    // A thousand times as large as the volume, in which it takes little.
    let path = tree(store.path(), 1).join("sparse");
    let file = std::fs::File::create(&path).expect("create");
    file.set_len(8 << 30).expect("size");
    let written = [0, 3 << 20, (5 << 30) + 4096];
    for (number, at) in written.into_iter().enumerate() {
        file.write_all_at(&random_bytes(4096, number as u64), at)
            .expect("write");
    }
    let (other, world) = (tempfile::tempdir().expect("store"), Arc::new(world));
    let _replica = world.node(B, world.config(other.path())).await;
    let copy = world.create(B, spec(11, from_volume(1))).await;
    let copy = copy.expect("replicate");
    assert_eq!(copy.state, VolumeState::Ready, "{copy:?}");
    let copied = std::fs::File::open(tree(other.path(), 11).join("sparse")).expect("open");
    let stat = copied.metadata().expect("stat");
    assert_eq!(stat.len(), 8 << 30);
    assert!(stat.blocks() <= file.metadata().expect("stat").blocks());
    for (number, at) in written.into_iter().enumerate() {
        let mut found = vec![0; 4096];
        copied.read_exact_at(&mut found, at).expect("read");
        assert!(found == random_bytes(4096, number as u64), "at {at}");
    }
    assert!(
        world.counter(A, "calls.ReadVolumeFile").await <= 3,
        "holes stay"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn small_files_of_a_replica_come_in_packs() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let _node = world.node(A, world.config(store.path())).await;
    let many = |id, fill| VolumeSpec {
        size_files: 400,
        ..spec(id, fill)
    };
    world.create(A, many(1, None)).await.expect("create");
    let content = |number: usize| random_bytes(number * 50, number as u64);
    for number in 0..300 {
        let path = tree(store.path(), 1).join(format!("{number:03}"));
        std::fs::write(path, content(number)).expect("write");
    }
    let other = tempfile::tempdir().expect("store");
    let _replica = world.node(B, world.config(other.path())).await;
    let copy = world.create(B, many(11, from_volume(1))).await;
    let copy = copy.expect("replicate");
    assert_eq!((copy.state, copy.used_files), (VolumeState::Ready, 300));
    for number in 0..300 {
        let found = std::fs::read(tree(other.path(), 11).join(format!("{number:03}")));
        assert!(found.expect("read") == content(number), "{number}");
    }
    let calls = world.counter(A, "calls.ReadVolumeFile").await
        + world.counter(A, "calls.ReadVolumeFiles").await;
    assert!(calls <= 2, "{calls} calls for 300 small files");
}

#[tokio::test(flavor = "multi_thread")]
async fn small_files_of_a_home_come_in_packs() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let root = tempfile::tempdir().expect("root");
    let content = |number: usize| random_bytes(number * 50, number as u64);
    for number in 0..300 {
        let directory = root.path().join(format!("in/{}", number % 3));
        std::fs::create_dir_all(&directory).expect("directory");
        std::fs::write(directory.join(format!("{number:03}")), content(number)).expect("write");
    }
    let large = random_bytes(1_500_000, 7);
    std::fs::write(root.path().join("in/large"), &large).expect("write");
    let verifier = world.config(store.path()).identity.verifier;
    let home = home_server::HomeServer::open(root.path(), verifier, None).expect("home");
    world.network.listen(HOME, home);
    let _node = world.node(A, world.config(store.path())).await;
    let many = VolumeSpec {
        size_files: 400,
        ..spec(1, from_home("in"))
    };
    let filled = world.create(A, many).await.expect("create");
    assert_eq!(filled.state, VolumeState::Ready, "{filled:?}");
    for number in 0..300 {
        let path = format!("{}/{number:03}", number % 3);
        let found = std::fs::read(tree(store.path(), 1).join(&path)).expect("read");
        assert!(found == content(number), "{path}");
    }
    let found = std::fs::read(tree(store.path(), 1).join("large")).expect("read");
    assert!(found == large);
    // Those of 2.2 MB in packs of 1 MiB at most, and the large one by pieces.
    let packs = world.counter(HOME, "calls.ReadSources").await;
    let pieces = world.counter(HOME, "calls.ReadSource").await;
    assert!(packs <= 4 && pieces == 2, "{packs} packs, {pieces} pieces");
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_of_a_volume_preserve_hard_links() {
    let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
    let _node = world.node(A, world.config(store.path())).await;
    // One that is read by ranges, and one that comes in a pack. Twice they would not fit, by bytes
    // or by files: two, and two directories.
    let tight = |id, fill| VolumeSpec {
        size_bytes: 3 << 20,
        size_files: 4,
        ..spec(id, fill)
    };
    world.create(A, tight(1, None)).await.expect("create");
    let root = tree(store.path(), 1);
    for directory in ["a", "z"] {
        std::fs::create_dir(root.join(directory)).expect("directory");
    }
    let names = [
        ["m-large", "a/large", "z/large"],
        ["a/small", "m-small", "z/small"],
    ];
    for (names, bytes) in names.iter().zip([2_500_000, 5_000]) {
        std::fs::write(root.join(names[0]), random_bytes(bytes, 3)).expect("write");
        for name in &names[1..] {
            std::fs::hard_link(root.join(names[0]), root.join(name)).expect("link");
        }
    }
    let (other, third) = [(); 2].map(|()| tempfile::tempdir().expect("store")).into();
    let _replica = world.node(B, world.config(other.path())).await;
    let copy = world.create(B, tight(11, from_volume(1))).await;
    let copy = copy.expect("replicate");
    assert_eq!(copy.state, VolumeState::Ready, "{copy:?}");
    assert_eq!(copy.used_files, 4, "{copy:?}");
    let whole = copy.received_bytes;
    assert!(
        (2_505_000..2_600_000).contains(&whole),
        "each once: {whole}"
    );
    // And so in a copy of the copy.
    let _again = world.node(C, world.config(third.path())).await;
    let source = Some(VolumeSource::Volume {
        address: B.to_owned(),
        volume: VolumeId(11),
    });
    let again = world.create(C, tight(21, source)).await.expect("replicate");
    assert_eq!(again.state, VolumeState::Ready, "{again:?}");
    for copy in [tree(other.path(), 11), tree(third.path(), 21)] {
        for names in names {
            let about = |name: &str| std::fs::metadata(copy.join(name)).expect("metadata");
            let one = about(names[0]);
            for name in names {
                let (own, source) = (about(name), root.join(name));
                assert_eq!((own.ino(), own.nlink()), (one.ino(), 3), "{name}");
                assert_eq!(own.mtime(), source.metadata().expect("metadata").mtime());
                let same = std::fs::read(copy.join(name)).expect("read");
                assert!(same == std::fs::read(source).expect("read"), "{name}");
            }
        }
    }
}
