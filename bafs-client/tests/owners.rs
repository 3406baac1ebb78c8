//! Changes of owners as a volume sees them: what they take away beside that, and from whom.
#![allow(
    clippy::unwrap_used,
    reason = "all of this is test, but clippy looks for `#[test]`"
)]

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use bafs_client::logic::manifest_tree::Owner;
use bafs_client::sandbox::Access;
use bafs_client::tree::{LocalTree, Tree};
use bafs_client::usage::VolumeUsage;
use bafs_client::volume::{Ownership, Volume, VolumeMode};
use bafs_client::volume_health::VolumeHealth;
use bafs_proto::file_op::{Attr, AttrChange, Caller, Errno, FileOp, FileReply};
use bafs_proto::ids::InodeNo;
use nix::libc;

/// The owner of all files in the eyes of the kernel.
const VISIBLE_OWNER: Owner = Owner { uid: 7, gid: 8 };

/// A volume whose files all belong to one user.
struct OwnershipFixture {
    volume: Arc<Volume>,
    directory: tempfile::TempDir,
}

impl OwnershipFixture {
    fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let tree = bafs_tree::Tree::open(directory.path(), None).unwrap();
        let session = bafs_tree::Session::new(tree, true);
        let run =
            move |caller, op: &_, data: &[u8], out: &mut _| session.run(caller, op, data, out);
        let ownership = Ownership::SingleOwner {
            visible_owner: VISIBLE_OWNER,
            stored_owner: Owner::default(),
        };
        let (losses, _) = tokio::sync::mpsc::unbounded_channel();
        let volume = Arc::new(Volume::new(
            "v",
            Tree::Local(LocalTree::new(run)),
            VolumeMode::scratch(Access::ReadWrite),
            ownership,
            VolumeHealth::new("v", losses),
            VolumeUsage::new(),
        ));
        Self { volume, directory }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("f")
    }

    fn attr_of(&self, op: FileOp) -> Result<Attr, Errno> {
        let caller = Caller {
            uid: VISIBLE_OWNER.uid,
            gid: VISIBLE_OWNER.gid,
            pid: 0,
        };
        let (told, answer) = mpsc::channel();
        let done = move |result, _: &[u8]| told.send(result).unwrap();
        self.volume.run(caller, op, &[], Box::new(done));
        match answer.recv().unwrap()? {
            FileReply::Attr(attr) => Ok(attr),
            other => panic!("{other:?}"),
        }
    }

    fn chown(&self, (uid, gid): (Option<u32>, Option<u32>)) -> Result<Attr, Errno> {
        let found = self.attr_of(FileOp::Lookup {
            parent: InodeNo::ROOT,
            name: b"f".to_vec(),
        })?;
        let change = AttrChange {
            uid,
            gid,
            ..AttrChange::default()
        };
        self.attr_of(FileOp::SetAttr {
            ino: found.ino,
            handle: None,
            change,
        })
    }
}

#[test]
fn chown_to_the_apparent_owner_clears_setuid() {
    let world = OwnershipFixture::new();
    fs::write(world.path(), b"x").unwrap();
    let (uid, gid) = (Some(VISIBLE_OWNER.uid), Some(VISIBLE_OWNER.gid));
    for (before, after) in [
        (0o6755, 0o755),
        (0o4644, 0o644),
        (0o2745, 0o2745),
        (0o640, 0o640),
    ] {
        for owner in [(uid, gid), (uid, None), (None, gid)] {
            fs::set_permissions(world.path(), Permissions::from_mode(before)).unwrap();
            let changed = || {
                let found = fs::metadata(world.path()).unwrap();
                (found.ctime(), found.ctime_nsec())
            };
            let earlier = changed();
            // The file system's clock ticks a few hundred times in a second.
            thread::sleep(Duration::from_millis(20));
            let told = world.chown(owner).unwrap();
            assert_eq!(told.mode & 0o7777, after, "{before:o} {owner:?}");
            assert_eq!((told.uid, told.gid), (VISIBLE_OWNER.uid, VISIBLE_OWNER.gid));
            assert!(changed() > earlier, "{before:o} {owner:?}: ctime stays");
            assert_eq!(fs::metadata(world.path()).unwrap().mode() & 0o7777, after);
        }
    }
    for other in [
        (Some(0), None),
        (None, Some(0)),
        (uid, Some(VISIBLE_OWNER.uid)),
    ] {
        assert_eq!(world.chown(other), Err(Errno(libc::EPERM)), "{other:?}");
    }
    fs::set_permissions(world.path(), Permissions::from_mode(0o6755)).unwrap();
    assert_eq!(world.chown((None, None)).unwrap().mode & 0o7777, 0o6755);
}

#[test]
fn chown_keeps_bits_of_directories_and_links() {
    let world = OwnershipFixture::new();
    fs::create_dir(world.path()).unwrap();
    fs::set_permissions(world.path(), Permissions::from_mode(0o2771)).unwrap();
    let own = (Some(VISIBLE_OWNER.uid), Some(VISIBLE_OWNER.gid));
    assert_eq!(world.chown(own).unwrap().mode & 0o7777, 0o2771);
    fs::remove_dir(world.path()).unwrap();
    symlink("nowhere", world.path()).unwrap();
    assert!(world.chown(own).unwrap().is_symlink());
}
