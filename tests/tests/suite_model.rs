//! Random system calls on a mount and on a plain directory of this host: the same results, errors
//! and trees. What a call should do is nowhere said; the host's own file system knows.
#![allow(clippy::print_stdout, reason = "figures are what a suite is run for")]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use bafs_tests::mounted_volume::{DataPath, MountedVolume};
use bafs_tests::seeded_rng::SeededRng;
use bafs_tests::{mount_obstacle, report_skip};
use rustix::fs::{self as sys, AtFlags, FallocateFlags, Mode, OFlags, SeekFrom};
use rustix::io::Errno;

use crate::random_operations::{FileOperation, OPEN_FILES_MAX, draw_operation};

/// One of the two directories, with what is open in it.
struct ModelDirectory {
    path: PathBuf,
    root: OwnedFd,
    open: [Option<OwnedFd>; OPEN_FILES_MAX as usize],
    /// Numbers of files for which space was kept that nobody has written.
    preallocated: BTreeSet<u64>,
    /// Whether any file may be told to be all data.
    may_report_all_data: bool,
}

impl ModelDirectory {
    fn new(path: &Path, is_all_data: bool) -> Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self {
            path: path.to_owned(),
            root: sys::open(path, flags, Mode::empty())?,
            open: Default::default(),
            preallocated: BTreeSet::new(),
            may_report_all_data: is_all_data,
        })
    }

    /// Does a step, and says what came of it.
    fn run_operation(&mut self, step: &FileOperation) -> String {
        let done = match step {
            FileOperation::Open(slot, path, flags, mode) => {
                let mode = Mode::from_raw_mode(*mode & 0o777);
                sys::openat(&self.root, path, *flags | OFlags::CLOEXEC, mode).map(|fd| {
                    self.open[*slot as usize] = Some(fd);
                    String::new()
                })
            }
            FileOperation::Close(slot) => {
                self.open[*slot as usize] = None;
                Ok(String::new())
            }
            FileOperation::Read(..)
            | FileOperation::Write(..)
            | FileOperation::Append(..)
            | FileOperation::Truncate(..)
            | FileOperation::Allocate(..)
            | FileOperation::SeekData(..)
            | FileOperation::Copy(..)
            | FileOperation::Sync(..)
            | FileOperation::StatOpen(_) => self.run_on_open(step),
            _ => self.run_on_names(step),
        };
        if let (FileOperation::Allocate(slot, mode, ..), Ok(_)) = (step, &done)
            && !mode.contains(FallocateFlags::PUNCH_HOLE)
            && let Ok(stat) = self.open_file(*slot).and_then(sys::fstat)
        {
            self.preallocated.insert(stat.st_ino);
        }
        done.unwrap_or_else(|errno| format!("{errno:?}"))
    }

    fn open_file(&self, slot: u64) -> Result<&OwnedFd, Errno> {
        self.open[slot as usize].as_ref().ok_or(Errno::BADF)
    }

    fn run_on_open(&self, step: &FileOperation) -> Result<String, Errno> {
        let nothing = |()| String::new();
        let bytes = |length: u64| vec![length as u8 | 1; length as usize];
        match *step {
            FileOperation::Read(slot, at, length) => {
                let mut data = vec![0; length as usize];
                let count = rustix::io::pread(self.open_file(slot)?, &mut data, at)?;
                Ok(format!("{count} {:x}", checksum(&data[..count])))
            }
            FileOperation::Write(slot, at, length) => {
                rustix::io::pwrite(self.open_file(slot)?, &bytes(length), at).map(|n| n.to_string())
            }
            FileOperation::Append(slot, length) => {
                let file = self.open_file(slot)?;
                let end = sys::seek(file, SeekFrom::End(0))?;
                let wrote = rustix::io::write(file, &bytes(length))?;
                Ok(format!("{end} {wrote}"))
            }
            FileOperation::Truncate(slot, size) => {
                sys::ftruncate(self.open_file(slot)?, size).map(nothing)
            }
            FileOperation::Allocate(slot, mode, at, length) => {
                sys::fallocate(self.open_file(slot)?, mode, at, length).map(nothing)
            }
            FileOperation::SeekData(slot, hole, at) => {
                // In a directory every file system has places of its own.
                let stat = sys::fstat(self.open_file(slot)?)?;
                if sys::FileType::from_raw_mode(stat.st_mode).is_dir() {
                    return Ok(String::new());
                }
                let place = if hole {
                    SeekFrom::Hole(at)
                } else {
                    SeekFrom::Data(at)
                };
                sys::seek(self.open_file(slot)?, place).map(|at| at.to_string())
            }
            FileOperation::Copy(source, target, mut from, mut to, length) => {
                let (source, target) = (self.open_file(source)?, self.open_file(target)?);
                let (from, to) = (Some(&mut from), Some(&mut to));
                sys::copy_file_range(source, from, target, to, length as usize)
                    .map(|count| count.to_string())
            }
            FileOperation::Sync(slot, true) => sys::fdatasync(self.open_file(slot)?).map(nothing),
            FileOperation::Sync(slot, false) => sys::fsync(self.open_file(slot)?).map(nothing),
            FileOperation::StatOpen(slot) => {
                sys::fstat(self.open_file(slot)?).map(|stat| format_stat(&stat))
            }
            _ => unreachable!("needs no open file"),
        }
    }

    /// Whether a place that SEEK_DATA or SEEK_HOLE gave is a true one, though not the host's. Where
    /// space is kept but nothing was written, ext4 calls data what lies in memory because
    /// somebody has read it, and that is different for each way to a file.
    fn is_valid_seek_result(&self, step: &FileOperation, found: &str) -> bool {
        let FileOperation::SeekData(slot, hole, at) = *step else {
            return false;
        };
        let Ok((file, stat)) = self
            .open_file(slot)
            .and_then(|file| Ok((file, sys::fstat(file)?)))
        else {
            return false;
        };
        if !self.may_report_all_data && !self.preallocated.contains(&stat.st_ino) {
            return false;
        }
        let size = stat.st_size as u64;
        // It may be open to be written only.
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let reader = sys::open(path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty());
        let is_zero = |from: u64, to: u64| {
            let mut data = vec![1; (to - from) as usize];
            let read = reader
                .as_ref()
                .map(|file| rustix::io::pread(file, &mut data, from));
            let read = read.map_err(|errno| *errno).flatten();
            read.is_ok_and(|count| count == data.len()) && data.iter().all(|byte| *byte == 0)
        };
        match (hole, found.parse::<u64>()) {
            (true, Ok(place)) if (at..size).contains(&place) => {
                let next = sys::seek(file, SeekFrom::Data(place)).unwrap_or(size);
                next > place && is_zero(place, next)
            }
            (true, Ok(place)) => place == size && at < size,
            (false, Ok(place)) => (at..size).contains(&place) && is_zero(at, place),
            (false, Err(_)) => {
                found == format!("{:?}", Errno::NXIO) && at < size && is_zero(at, size)
            }
            (true, Err(_)) => false,
        }
    }

    fn run_on_names(&self, step: &FileOperation) -> Result<String, Errno> {
        let (root, nothing) = (&self.root, |()| String::new());
        let bits = |mode: u32| Mode::from_raw_mode(mode);
        let none = AtFlags::empty();
        match step {
            FileOperation::MakeDirectory(path, mode) => {
                sys::mkdirat(root, path, bits(mode & 0o1777)).map(nothing)
            }
            FileOperation::MakeNode(path, kind, mode) => {
                sys::mknodat(root, path, *kind, bits(mode & 0o777), 0).map(nothing)
            }
            FileOperation::MakeSymlink(target, path) => {
                sys::symlinkat(*target, root, path).map(nothing)
            }
            FileOperation::MakeLink(path, new, follow) => {
                let flags = if *follow {
                    AtFlags::SYMLINK_FOLLOW
                } else {
                    none
                };
                sys::linkat(root, path, root, new, flags).map(nothing)
            }
            FileOperation::Unlink(path) => sys::unlinkat(root, path, none).map(nothing),
            FileOperation::RemoveDirectory(path) => {
                sys::unlinkat(root, path, AtFlags::REMOVEDIR).map(nothing)
            }
            FileOperation::Rename(path, new, flags) => {
                sys::renameat_with(root, path, root, new, *flags).map(nothing)
            }
            FileOperation::Chmod(path, mode) => {
                sys::chmodat(root, path, bits(*mode), none).map(nothing)
            }
            FileOperation::Chown(path, uid, gid) => {
                let (uid, gid) = (sys::Uid::from_raw(*uid), sys::Gid::from_raw(*gid));
                let flags = AtFlags::SYMLINK_NOFOLLOW;
                sys::chownat(root, path, Some(uid), Some(gid), flags).map(nothing)
            }
            FileOperation::Touch(path, tv_sec, tv_nsec) => self.set_times(path, *tv_sec, *tv_nsec),
            FileOperation::Stat(path) => {
                sys::statat(root, path, AtFlags::SYMLINK_NOFOLLOW).map(|stat| format_stat(&stat))
            }
            FileOperation::List(path) => self.list_names(path),
            FileOperation::ReadLink(path) => {
                sys::readlinkat(root, path, Vec::new()).map(|it| format!("{it:?}"))
            }
            FileOperation::TruncatePath(path, size) => {
                let file = sys::openat(root, path, OFlags::WRONLY | OFlags::NONBLOCK, bits(0))?;
                sys::ftruncate(file, *size).map(nothing)
            }
            _ => self.run_on_xattrs(step),
        }
    }

    fn run_on_xattrs(&self, step: &FileOperation) -> Result<String, Errno> {
        match step {
            FileOperation::SetXattr(path, key, length, flags) => {
                let value = vec![b'v'; *length as usize];
                sys::setxattr(self.path.join(path), *key, &value, *flags).map(|()| String::new())
            }
            FileOperation::GetXattr(path, key) => {
                let mut value = vec![0_u8; 300];
                let length = sys::getxattr(self.path.join(path), *key, &mut value[..])?;
                Ok(format!("{length} {:x}", checksum(&value[..length])))
            }
            FileOperation::RemoveXattr(path, key) => {
                sys::removexattr(self.path.join(path), *key).map(|()| String::new())
            }
            _ => unreachable!("needs no attribute"),
        }
    }

    fn set_times(&self, path: &str, tv_sec: i64, tv_nsec: i64) -> Result<String, Errno> {
        let time = sys::Timespec { tv_sec, tv_nsec };
        let times = sys::Timestamps {
            last_access: time,
            last_modification: time,
        };
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        sys::utimensat(&self.root, path, &times, flags)?;
        let stat = sys::statat(&self.root, path, flags)?;
        Ok(format!("{} {}", stat.st_mtime, stat.st_mtime_nsec))
    }

    fn list_names(&self, path: &str) -> Result<String, Errno> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let directory = sys::openat(&self.root, path, flags, Mode::empty())?;
        let mut buffer = [MaybeUninit::uninit(); 2048];
        let mut entries = sys::RawDir::new(directory, &mut buffer);
        let mut names = Vec::new();
        while let Some(entry) = entries.next() {
            let entry = entry?;
            names.push(format!("{:?} {:?}", entry.file_name(), entry.file_type()));
        }
        names.sort();
        Ok(names.join(","))
    }
}

fn checksum(data: &[u8]) -> u64 {
    let step = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    data.iter().fold(0xcbf2_9ce4_8422_2325, step)
}

/// What `stat` tells, apart from what differs between any two directories.
fn format_stat(stat: &sys::Stat) -> String {
    let is_directory = sys::FileType::from_raw_mode(stat.st_mode).is_dir();
    let size = if is_directory { 0 } else { stat.st_size };
    format!(
        "{:o} links {} size {size} owner {}:{}",
        stat.st_mode, stat.st_nlink, stat.st_uid, stat.st_gid
    )
}

/// Everything below a directory that a program could see, times apart.
fn snapshot_tree(root: &Path, below: &str, found: &mut BTreeMap<String, String>) -> Result<()> {
    for entry in fs::read_dir(root.join(below))? {
        let entry = entry?;
        let (path, meta) = (entry.path(), entry.metadata()?);
        let name = format!("{below}{}", entry.file_name().to_string_lossy());
        let size = if meta.is_dir() { 0 } else { meta.size() };
        let mut text = format!(
            "{:o} links {} size {size} owner {}:{}",
            meta.mode(),
            meta.nlink(),
            meta.uid(),
            meta.gid()
        );
        if meta.is_file() {
            write!(text, " content {:x}", checksum(&fs::read(&path)?))?;
        } else if meta.is_symlink() {
            write!(text, " to {:?}", fs::read_link(&path)?)?;
        }
        let mut names = vec![0_u8; 4096];
        let length = sys::llistxattr(&path, &mut names[..])?;
        let mut names: Vec<_> = names[..length].split(|byte| *byte == 0).collect();
        names.sort_unstable();
        write!(text, " attributes {names:?}")?;
        found.insert(name.clone(), text);
        if meta.is_dir() {
            snapshot_tree(root, &format!("{name}/"), found)?;
        }
    }
    Ok(())
}

fn compare_directories(test: &str, ways: &[DataPath], rounds: u64, steps: u64) -> Result<()> {
    if let Some(reason) = mount_obstacle() {
        report_skip(test, &reason);
        return Ok(());
    }
    let mut rng = SeededRng::new(2026);
    for &way in ways {
        let is_all_data = DataPath::WRITE_BACK.contains(&way);
        let (stand, plain) = (MountedVolume::start(way)?, tempfile::tempdir()?);
        for round in 0..rounds {
            let (there, here) = (
                stand.create_directory(&round.to_string())?,
                plain.path().join(round.to_string()),
            );
            fs::create_dir(&here)?;
            fs::set_permissions(&here, fs::metadata(&there)?.permissions())?;
            let mut mount = ModelDirectory::new(&there, is_all_data)?;
            let mut host = ModelDirectory::new(&here, false)?;
            let mut past = Vec::new();
            for number in 0..steps {
                let step = draw_operation(&mut rng);
                let (found, expected) = (mount.run_operation(&step), host.run_operation(&step));
                past.push(format!("{step:?}: {expected}"));
                ensure!(
                    found == expected || mount.is_valid_seek_result(&step, &found),
                    "{way:?}, round {round}, step {number}: {step:?}: {found}, not {expected}; \
                     before: {past:#?}"
                );
            }
            let (mut found, mut expected) = (BTreeMap::new(), BTreeMap::new());
            snapshot_tree(&there, "", &mut found)?;
            snapshot_tree(&here, "", &mut expected)?;
            ensure!(
                found == expected,
                "{way:?}, round {round}: {found:#?} is not {expected:#?}"
            );
        }
        println!("model {way:?}: {} operations, none differs", rounds * steps);
    }
    Ok(())
}

#[test]
fn mount_behaves_like_a_directory() -> Result<()> {
    compare_directories("mount_behaves_like_a_directory", &DataPath::ALL, 20, 300)
}

#[test]
fn mount_with_write_back_behaves_like_a_directory() -> Result<()> {
    let name = "mount_with_write_back_behaves_like_a_directory";
    compare_directories(name, &DataPath::WRITE_BACK, 20, 300)
}

#[test]
#[ignore = "long: `cargo xtask soak` runs it"]
fn mount_behaves_like_a_directory_for_long() -> Result<()> {
    compare_directories(
        "mount_behaves_like_a_directory_for_long",
        &DataPath::ALL,
        500,
        1_000,
    )
}
