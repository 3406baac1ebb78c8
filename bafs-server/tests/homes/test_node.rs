//! A node with its store, and what tests of every kind of home ask of it.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bafs_proto::hash::Digest;
use bafs_proto::ids::{BlockIndex, ExtractionId, FileIndex, VolumeId};
use bafs_proto::message::{
    BlockRange, CacheRef, ExtractFile, FetchPriority, FetchScope, GetVolume, PutReceipt,
    ReadBlocks, ReadManifest, SourceEntry,
};
use bafs_proto::source_warning::SourceWarning;
use bafs_proto::time::Deadline;
use bafs_proto::token::Token;
use bafs_proto::volume::{ReplacementPolicy, VolumeKind, VolumeSource, VolumeSpec};
use bafs_proto::{Error, ErrorCode, Result};
use bafs_server::home_clients::HomeSettings;
use bafs_server::node::Node;
use bytes::Bytes;

use crate::test_nodes::{NodeCluster, random_bytes, spec};

pub(crate) const NODE: &str = "node:1";

/// Block size of the caches of these tests, in bytes.
pub(crate) const BLOCK: u32 = 64 << 10;

/// One node.
pub(crate) struct HomesFixture {
    pub(crate) world: NodeCluster,
    store: tempfile::TempDir,
    _node: Arc<Node>,
}

impl HomesFixture {
    /// A node whose `homes.toml` is this text.
    pub(crate) async fn new(homes: &str) -> Self {
        let (world, store) = (NodeCluster::new(), tempfile::tempdir().expect("store"));
        let mut config = world.config(store.path());
        let file = store.path().join("homes.toml");
        std::fs::write(&file, homes).expect("settings");
        let mode = std::fs::Permissions::from_mode(0o600);
        std::fs::set_permissions(&file, mode).expect("settings");
        config.homes = HomeSettings::load(&file).expect("settings");
        let node = world.node(NODE, config).await;
        Self {
            world,
            store,
            _node: node,
        }
    }

    /// Fills scratch volume `id` from a home; its directory.
    pub(crate) async fn fill_volume(&self, id: u128, address: &str, path: &str) -> Result<PathBuf> {
        let spec = spec(id, Some(source(address, path)));
        self.create(spec).await?;
        let volume = self.store.path().join("volumes");
        Ok(volume.join(VolumeId(id).to_string()).join("tree"))
    }

    /// Makes cache volume `id` of a home.
    pub(crate) async fn cache(&self, id: u128, address: &str, path: &str) -> Result<()> {
        let spec = VolumeSpec {
            kind: VolumeKind::Cache {
                source: source(address, path),
                cooperative: String::new(),
                replacement: ReplacementPolicy::Lru,
                block_bytes: BLOCK,
            },
            ..spec(id, None)
        };
        self.create(spec).await
    }

    async fn create(&self, spec: VolumeSpec) -> Result<()> {
        let made = self.world.create(NODE, spec).await?;
        made.error.map_or(Ok(()), Err)
    }

    /// What a cache volume shows, with the digest of it.
    pub(crate) async fn manifest(&self, id: u128) -> (Digest, Vec<SourceEntry>) {
        let call = ReadManifest {
            volume: VolumeId(id),
            first: FileIndex(0),
        };
        let page = self.world.call(NODE, call).await.expect("manifest");
        assert!(!page.has_more);
        (page.manifest, page.entries)
    }

    /// What a volume does not have as its source has it.
    pub(crate) async fn warnings(&self, id: u128) -> Vec<SourceWarning> {
        let volume = VolumeId(id);
        let status = self.world.call(NODE, GetVolume { volume }).await;
        status.expect("status").warnings.warnings
    }

    /// The whole content of a file of a cache volume, as an agent reads it.
    pub(crate) async fn read(&self, id: u128, path: &str) -> Result<Vec<u8>> {
        let (manifest, entries) = self.manifest(id).await;
        let file = entries.iter().position(|entry| entry.path == path);
        let file = file.unwrap_or_else(|| panic!("no {path} among {entries:?}"));
        let mut content = Vec::new();
        let size = entries[file].identity.size;
        while (content.len() as u64) < size {
            let call = ReadBlocks {
                range: BlockRange {
                    cache: CacheRef::Volume(VolumeId(id)),
                    manifest,
                    file: FileIndex(file as u32),
                    first: BlockIndex(content.len() as u64 / u64::from(BLOCK)),
                    count: 4,
                },
                scope: FetchScope::AnyNode,
                priority: FetchPriority::Urgent,
                must_verify: false,
            };
            let (pool, token) = (&self.world.pool, &self.world.token);
            let deadline = Deadline::after_ms(20_000);
            let (_, data) = pool
                .call_with_body(NODE, token, call, Bytes::new(), deadline)
                .await?;
            assert!(!data.is_empty(), "{path} ends too early");
            content.extend_from_slice(&data);
        }
        Ok(content)
    }
}

impl HomesFixture {
    /// Sends a file of scratch volume `id` to a home, as upload `extract`.
    pub(crate) async fn extract(
        &self,
        extract: u128,
        (id, path): (u128, &str),
        (address, target): (&str, &str),
    ) -> Result<PutReceipt> {
        let token = self.world.token.clone();
        self.extract_for((&token, 20_000), extract, (id, path), (address, target))
            .await
    }

    /// As [`HomesFixture::extract`], for who has only this token at home, within so many
    /// milliseconds.
    pub(crate) async fn extract_for(
        &self,
        (home_token, ms): (&Token, u64),
        extract: u128,
        (id, path): (u128, &str),
        (address, target): (&str, &str),
    ) -> Result<PutReceipt> {
        let call = ExtractFile {
            volume: VolumeId(id),
            path: path.to_owned(),
            selections: Vec::new(),
            extraction: ExtractionId(extract),
            home_address: address.to_owned(),
            home_id: None,
            target_path: target.to_owned(),
            home_token: home_token.clone(),
            fence: None,
        };
        self.world.call_for(NODE, call, ms).await
    }

    /// Extractions that find a part of an upload, `directory` being where `at` is for the server: a
    /// right part is gone on with, a wrong or overlong one is replaced.
    pub(crate) async fn check_resumption(&self, address: &str, (directory, at): (&Path, &str)) {
        let content = random_bytes(2_500_000, 9);
        self.volume_with(90, "result", &content).await;
        let parts = [
            &content[..1_500_000],
            b"something else",
            &random_bytes(3_000_000, 1),
        ];
        for (extract, part) in (90..).zip(parts) {
            let upload = directory.join(format!(".bafs-put-{}", ExtractionId(extract)));
            std::fs::write(&upload, part).expect("part");
            let target = format!("{at}result");
            let receipt = self
                .extract(extract, (90, "result"), (address, &target))
                .await;
            assert_eq!(receipt.expect("extract").digest, Digest::of(&content));
            assert!(std::fs::read(directory.join("result")).expect("result") == content);
            assert!(!upload.exists());
            std::fs::remove_file(directory.join("result")).expect("result");
        }
    }

    /// An upload that finds another file at its target than when it began does not replace it.
    /// `directory` is where `at` is for the server.
    pub(crate) async fn check_changed_target(&self, address: &str, (directory, at): (&Path, &str)) {
        self.volume_with(95, "result", &random_bytes(6_000_000, 9))
            .await;
        let upload = directory.join(format!(".bafs-put-{}", ExtractionId(95)));
        let (place, target) = (directory.join("raced"), format!("{at}raced"));
        let written = place.clone();
        let other = std::thread::spawn(move || {
            let mut waits = 0..20_000;
            while !upload.exists() && waits.next().is_some() {
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
            std::fs::write(&written, b"newer").expect("write");
        });
        let late = self.extract(95, (95, "result"), (address, &target)).await;
        other.join().expect("it writes");
        let late = check_error(late, &["changed during this upload"]);
        assert_eq!(late.code, ErrorCode::UploadFenced);
        assert_eq!(std::fs::read(&place).expect("read"), b"newer");
        let anew = self.extract(96, (95, "result"), (address, &target)).await;
        anew.expect("whoever still wants it asks anew");
    }

    /// Scratch volume `id` with a file in it.
    pub(crate) async fn volume_with(&self, id: u128, path: &str, content: &[u8]) {
        self.create(spec(id, None)).await.expect("volume");
        let volume = self.store.path().join("volumes");
        let tree = volume.join(VolumeId(id).to_string()).join("tree");
        std::fs::write(tree.join(path), content).expect("write");
    }
}

/// The text of an error, checked to say what it must.
pub(crate) fn check_error<T>(result: Result<T>, words: &[&str]) -> Error {
    let error = result.err().expect("an error");
    for word in words {
        assert!(error.detail.contains(word), "'{word}' is not in: {error}");
    }
    error
}

fn source(address: &str, path: &str) -> VolumeSource {
    VolumeSource::Home {
        address: address.to_owned(),
        path: path.to_owned(),
        id: None,
    }
}
