//! Random operations on a tree and, by plain system calls, on a plain directory: same results,
//! same trees; and the tree's accounting equals what a fresh count finds.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::Path;

use crate::test_tree::{ROOT, TreeFixture};
use bafs_proto::file_op::{AttrChange, FileOp, FileReply};
use bafs_proto::ids::InodeNo;
use bafs_tree::{Limit, Tree};
use nix::libc;
use proptest::prelude::*;

const LIMIT: Limit = Limit {
    bytes: 1 << 30,
    files: 100_000,
};

#[derive(Debug, Clone)]
enum Step {
    Create(String),
    Write(String, u64, usize),
    Truncate(String, u64),
    MakeDirectory(String),
    Symlink(String),
    Link(String, String),
    Unlink(String),
    RemoveDirectory(String),
    Rename(String, String, bool),
    Chmod(String, u32),
}

/// Few names, so that steps meet each other.
fn name() -> impl Strategy<Value = String> {
    prop::sample::select(vec!["a", "b", "c", "d/a", "d/b", "d/e/a", "d", "d/e", "e"])
        .prop_map(str::to_owned)
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        name().prop_map(Step::Create),
        (name(), 0_u64..40_000, 0_usize..20_000).prop_map(|(n, o, l)| Step::Write(n, o, l)),
        (name(), 0_u64..60_000).prop_map(|(n, size)| Step::Truncate(n, size)),
        name().prop_map(Step::MakeDirectory),
        name().prop_map(Step::Symlink),
        (name(), name()).prop_map(|(a, b)| Step::Link(a, b)),
        name().prop_map(Step::Unlink),
        name().prop_map(Step::RemoveDirectory),
        (name(), name(), any::<bool>()).prop_map(|(a, b, keep)| Step::Rename(a, b, keep)),
        (name(), 0_u32..0o1000).prop_map(|(n, mode)| Step::Chmod(n, mode)),
    ]
}

/// Walks to a path as the kernel does for an agent. Links lead to a device, so that a path through
/// one ends in `ENOTDIR` on both sides, although only the plain side follows it.
fn resolve_path(fixture: &TreeFixture, path: &str) -> Result<InodeNo, i32> {
    let mut at = ROOT;
    for part in path.split('/') {
        at = fixture.lookup(at, part).map_err(|error| error.0)?.ino;
    }
    Ok(at)
}

fn parent_and_name(fixture: &TreeFixture, path: &str) -> Result<(InodeNo, Vec<u8>), i32> {
    match path.rsplit_once('/') {
        None => Ok((ROOT, path.as_bytes().to_vec())),
        Some((above, name)) => Ok((resolve_path(fixture, above)?, name.as_bytes().to_vec())),
    }
}

fn run_on_tree(fixture: &TreeFixture, step: &Step) -> Result<(), i32> {
    let run = |op| fixture.run(op).map_err(|error| error.0);
    let reply = run(operation(fixture, step)?)?;
    let FileReply::Opened { handle, .. } = reply else {
        return Ok(());
    };
    let done = match step {
        Step::Write(_, offset, length) => fixture.write(handle, *offset, &vec![7; *length]),
        _ => Ok(0),
    };
    run(FileOp::Release { handle })?;
    done.map(|_| ()).map_err(|error| error.0)
}

fn operation(fixture: &TreeFixture, step: &Step) -> Result<FileOp, i32> {
    let set = |path, change| {
        let ino = resolve_path(fixture, path)?;
        Ok(FileOp::SetAttr {
            ino,
            handle: None,
            change,
        })
    };
    if let Step::Truncate(path, size) = step {
        return set(
            path,
            AttrChange {
                size: Some(*size),
                ..AttrChange::default()
            },
        );
    }
    if let Step::Chmod(path, mode) = step {
        return set(
            path,
            AttrChange {
                mode: Some(*mode),
                ..AttrChange::default()
            },
        );
    }
    if let Step::Write(path, _, _) = step {
        return Ok(FileOp::Open {
            ino: resolve_path(fixture, path)?,
            flags: libc::O_WRONLY,
        });
    }
    if let Step::Link(path, new) = step {
        let ino = resolve_path(fixture, path)?;
        let (parent, name) = parent_and_name(fixture, new)?;
        return Ok(FileOp::MakeLink { ino, parent, name });
    }
    operation_on_name(fixture, step)
}

fn operation_on_name(fixture: &TreeFixture, step: &Step) -> Result<FileOp, i32> {
    let (Step::Create(path)
    | Step::MakeDirectory(path)
    | Step::Symlink(path)
    | Step::Unlink(path)
    | Step::RemoveDirectory(path)
    | Step::Rename(path, _, _)) = step
    else {
        unreachable!("the others have returned")
    };
    let (parent_of, name) = parent_and_name(fixture, path)?;
    Ok(match step {
        Step::Create(_) => {
            let flags = libc::O_RDWR | libc::O_EXCL;
            FileOp::Create {
                parent: parent_of,
                name,
                mode: 0o644,
                flags,
            }
        }
        Step::MakeDirectory(_) => FileOp::MakeDirectory {
            parent: parent_of,
            name,
            mode: 0o755,
        },
        Step::Symlink(_) => {
            let target = b"/dev/null".to_vec();
            FileOp::MakeSymlink {
                parent: parent_of,
                name,
                target,
            }
        }
        Step::Unlink(_) => FileOp::Unlink {
            parent: parent_of,
            name,
        },
        Step::RemoveDirectory(_) => FileOp::RemoveDirectory {
            parent: parent_of,
            name,
        },
        Step::Rename(_, new, keep) => {
            let flags = if *keep { libc::RENAME_NOREPLACE } else { 0 };
            let (new_parent, new_name) = parent_and_name(fixture, new)?;
            FileOp::Rename {
                parent: parent_of,
                name,
                new_parent,
                new_name,
                flags,
            }
        }
        _ => unreachable!("the others have returned"),
    })
}

fn run_on_directory(root: &Path, step: &Step) -> Result<(), i32> {
    let at = |path: &String| root.join(path);
    let open = |path: &String| {
        use std::os::unix::fs::OpenOptionsExt;
        OpenOptions::new()
            .write(true)
            .custom_flags(libc::O_NOFOLLOW)
            .open(at(path))
    };
    let done: io::Result<()> = match step {
        Step::Create(path) => OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(at(path))
            .map(|_| ()),
        Step::Write(path, offset, length) => {
            open(path).and_then(|file| file.write_all_at(&vec![7; *length], *offset))
        }
        Step::Truncate(path, size) => {
            // The kernel follows links before it asks an agent; the tree is asked directly.
            match fs::symlink_metadata(at(path)) {
                Ok(found) if found.is_symlink() => Err(io::Error::from_raw_os_error(libc::EINVAL)),
                Ok(_) => open(path).and_then(|file| file.set_len(*size)),
                Err(error) => Err(error),
            }
        }
        Step::MakeDirectory(path) => fs::create_dir(at(path)),
        Step::Symlink(path) => symlink("/dev/null", at(path)),
        Step::Link(path, new) => fs::hard_link(at(path), at(new)),
        Step::Unlink(path) => nix::unistd::unlink(&at(path)).map_err(Into::into),
        Step::RemoveDirectory(path) => fs::remove_dir(at(path)),
        Step::Rename(path, new, keep) => {
            let flag = rustix::fs::RenameFlags::NOREPLACE;
            let flags = if *keep {
                flag
            } else {
                rustix::fs::RenameFlags::empty()
            };
            let here = rustix::fs::CWD;
            rustix::fs::renameat_with(here, at(path), here, at(new), flags).map_err(Into::into)
        }
        Step::Chmod(path, mode) => match fs::symlink_metadata(at(path)) {
            Ok(found) if found.is_symlink() => Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
            Ok(_) => fs::set_permissions(at(path), fs::Permissions::from_mode(*mode)),
            Err(error) => Err(error),
        },
    };
    done.map_err(|error| error.raw_os_error().unwrap_or(-1))
}

/// Everything below a directory that a program could see, times and owners apart. What steps
/// closed to its owner is opened first, or only root could see it.
fn directory_contents(root: &Path) -> BTreeMap<String, (u32, u64, u64, Vec<u8>)> {
    fn add(root: &Path, below: &str, found: &mut BTreeMap<String, (u32, u64, u64, Vec<u8>)>) {
        for entry in fs::read_dir(root.join(below)).expect("directory") {
            let entry = entry.expect("entry");
            let path = format!("{below}{}", entry.file_name().to_str().expect("text"));
            let meta = entry.metadata().expect("metadata");
            if !meta.is_symlink() && meta.mode() & 0o500 != 0o500 {
                let opened = fs::Permissions::from_mode(meta.mode() | 0o500);
                fs::set_permissions(entry.path(), opened).expect("it is ours");
            }
            let content = if meta.is_file() {
                fs::read(entry.path()).expect("read")
            } else {
                Vec::new()
            };
            let size = if meta.is_dir() { 0 } else { meta.size() };
            found.insert(path.clone(), (meta.mode(), meta.nlink(), size, content));
            if meta.is_dir() {
                add(root, &format!("{path}/"), found);
            }
        }
    }
    let mut found = BTreeMap::new();
    add(root, "", &mut found);
    found
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]

    #[test]
    fn a_tree_behaves_like_a_plain_directory(
        steps in prop::collection::vec(step(), 1..60),
        is_alone in any::<bool>(),
    ) {
        let fixture = if is_alone {
            TreeFixture::without_btimes(Some(LIMIT))
        } else {
            TreeFixture::new(Some(LIMIT))
        };
        let plain = tempfile::tempdir().expect("directory");
        for step in &steps {
            let tree = run_on_tree(&fixture, step);
            let direct = run_on_directory(plain.path(), step);
            prop_assert_eq!(tree, direct, "{:?}", step);
        }
        let counted = Tree::open(&fixture.path(""), Some(LIMIT)).expect("open");
        prop_assert_eq!(counted.used(), fixture.used());
        prop_assert_eq!(directory_contents(&fixture.path("")), directory_contents(plain.path()));
    }
}
