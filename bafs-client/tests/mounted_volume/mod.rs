//! A volume shown on a directory of this host, over each kind of tree; what the tests of real
//! mounts share.
#![allow(clippy::unwrap_used, reason = "all of this is test")]

use std::fs::{self, OpenOptions, Permissions};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

use bafs_client::fuse::{FuseMount, MountKind};
use bafs_client::logic::manifest_tree::Owner;
use bafs_client::sandbox::Access;
use bafs_client::tree::{CacheTree, LocalTree, RemoteTree, Tree};
use bafs_client::usage::VolumeUsage;
use bafs_client::volume::{Ownership, Volume, VolumeMode};
use bafs_client::volume_health::{VolumeHealth, VolumeLoss};
use bafs_proto::ids::AgentId;
use bafs_proto::message::TreeRef;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

use crate::test_server::{FakeServer, VOLUME};

/// Says loudly that a test could not run here.
pub(crate) fn skip(test: &str, reason: &str) {
    let line = format!("SKIPPED: {test}: {reason}\n");
    eprint!("{line}");
    if let Some(log) = std::env::var_os("BAFS_SKIP_LOG") {
        let mut log = OpenOptions::new()
            .append(true)
            .create(true)
            .open(log)
            .unwrap();
        log.write_all(line.as_bytes()).unwrap();
    }
}

pub(crate) fn can_mount(test: &str) -> bool {
    let why = if !nix::unistd::geteuid().is_root() {
        "not root"
    } else if OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/fuse")
        .is_err()
    {
        "no /dev/fuse"
    } else {
        return true;
    };
    skip(test, why);
    false
}

pub(crate) struct MountedVolume {
    pub(crate) mount: Option<FuseMount>,
    pub(crate) server: Arc<FakeServer>,
    pub(crate) losses: mpsc::UnboundedReceiver<VolumeLoss>,
    pub(crate) store: tempfile::TempDir,
    pub(crate) mount_point: tempfile::TempDir,
    _runtime: Runtime,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum TreeKind {
    Local,
    Scratch,
    Home,
    Cache,
}

impl MountedVolume {
    pub(crate) fn new(kind: TreeKind, fill: impl FnOnce(&Path), op_deadline_ms: u64) -> Self {
        let (store, place) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::set_permissions(store.path(), Permissions::from_mode(0o777)).unwrap();
        fill(store.path());
        let runtime = Runtime::new().unwrap();
        let server = FakeServer::new(store.path());
        let (sender, losses) = mpsc::unbounded_channel();
        let health = VolumeHealth::new("v", sender);
        let called = server.server(op_deadline_ms);
        let agent = AgentId::random();
        let (tree, mode, usage) = runtime.block_on(async {
            match kind {
                TreeKind::Local => {
                    let tree = bafs_tree::Tree::open(store.path(), None).unwrap();
                    let session = bafs_tree::Session::new(tree, true);
                    let run = LocalTree::new(move |caller, op, data, read| {
                        session.run(caller, op, data, read)
                    });
                    (
                        Tree::Local(run),
                        VolumeMode::scratch(Access::ReadWrite),
                        VolumeUsage::new(),
                    )
                }
                TreeKind::Scratch => {
                    let tree = TreeRef::Volume(VOLUME);
                    let tree = RemoteTree::open(called, tree, agent, true, health.clone())
                        .await
                        .unwrap();
                    (
                        Tree::Remote(tree),
                        VolumeMode::scratch(Access::ReadWrite),
                        VolumeUsage::new(),
                    )
                }
                TreeKind::Home => {
                    let tree = TreeRef::Home(String::new());
                    let tree = RemoteTree::open(called, tree, agent, true, health.clone())
                        .await
                        .unwrap();
                    (
                        Tree::Remote(tree),
                        VolumeMode::home(Access::ReadWrite),
                        VolumeUsage::with_pages(),
                    )
                }
                TreeKind::Cache => {
                    let owner = Owner::default();
                    let tree = CacheTree::open(called, VOLUME, owner, health.clone())
                        .await
                        .unwrap();
                    (
                        Tree::Cache(tree),
                        VolumeMode::cache(),
                        VolumeUsage::with_pages(),
                    )
                }
            }
        });
        let volume = Volume::new("v", tree, mode, Ownership::AsStored, health, usage);
        let mounted =
            FuseMount::mount(Arc::new(volume), place.path(), MountKind::MountSystemCall).unwrap();
        Self {
            mount: Some(mounted),
            server,
            losses,
            store,
            mount_point: place,
            _runtime: runtime,
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.mount_point.path()
    }

    pub(crate) fn volume(&self) -> &Volume {
        self.mount.as_ref().unwrap().volume()
    }
}

impl Drop for MountedVolume {
    fn drop(&mut self) {
        if let Some(mounted) = self.mount.take() {
            mounted.unmount();
        }
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(
            !mounts.contains(self.mount_point.path().to_str().unwrap()),
            "a mount is left"
        );
    }
}

pub(crate) fn for_each_writable_kind(test: &str, run: impl Fn(&MountedVolume)) {
    if can_mount(test) {
        for kind in [TreeKind::Local, TreeKind::Scratch, TreeKind::Home] {
            run(&MountedVolume::new(kind, |_| {}, 10_000));
        }
    }
}
