//! The directory of a node: who may read it, what a killed node left in it, how full its disk is,
//! and what was deleted and is still there. Looks at no content.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, flock, statvfs};

use super::{RepairMode, broken_check, check_mode, fine_check, repaired_check};
use crate::clock;
use crate::sandbox::Check;

/// A disk with less than this is full, unless it is small, of which a tenth is enough: a node
/// writes tables and journals in steps of megabytes.
const FREE_BYTES_MIN: u64 = 64 << 20;

/// So with files, where the file system counts them.
const FREE_FILES_MIN: u64 = 1_000;

/// What was deleted is removed at once by a node that runs. What is still there after this time
/// cannot be removed.
const TRASH_AGE_S_MAX: i64 = 600;

/// Most files of a store that are looked at to tell what takes its space.
const SCANNED_FILES_MAX: usize = 1 << 20;

/// The parts of a store that may be large.
const STORE_DIRECTORIES: [&str; 6] = ["volumes", "cache", "making", "trash", "logs", "temporary"];

/// What a disk has in all and free.
struct DiskSpace {
    bytes: u64,
    free_bytes: u64,
    files: u64,
    free_files: u64,
}

/// What some directories take.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct DirectoryUsage {
    bytes: u64,
    files: usize,
}

/// Looks at the directory of a node: who may read it, how full its disk is, what was deleted and is
/// still there, and what a killed node left.
pub fn check_store(store: &Path, treatment: RepairMode) -> Vec<Check> {
    let subject = format!("store {}", store.display());
    let lock = match fs::File::open(store.join("lock")) {
        Ok(lock) => lock,
        Err(error) => {
            let text = format!("no store: {error}");
            return vec![broken_check(
                subject,
                text,
                "name the directory of `bafs node --store`",
            )];
        }
    };
    let is_served = flock(&lock, FlockOperation::NonBlockingLockShared).is_err();
    let mut checks = vec![check_mode(&subject, store, 0o700, treatment)];
    let found = if is_served {
        "a node serves it"
    } else {
        "no node serves it"
    };
    checks.push(fine_check(subject.clone(), found));
    checks.push(check_disk(store));
    let served = if is_served {
        NodeState::Running
    } else {
        NodeState::Stopped
    };
    checks.extend(check_trash(
        store,
        served,
        treatment,
        clock::time_of_day().seconds,
    ));
    if is_served {
        return checks;
    }
    for entry in fs::read_dir(store).into_iter().flatten().flatten() {
        if !entry.file_type().is_ok_and(|kind| kind.is_socket()) {
            continue;
        }
        let subject = format!("socket {}", entry.path().display());
        if treatment == RepairMode::Repair && fs::remove_file(entry.path()).is_ok() {
            checks.push(repaired_check(
                subject,
                "no process listened at it; removed",
            ));
        } else {
            checks.push(broken_check(
                subject,
                "no process listens at it",
                "bafs doctor --repair",
            ));
        }
    }
    checks
}

/// Whether a node serves the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NodeState {
    Running,
    Stopped,
}

/// How full the disk of the store is.
fn check_disk(store: &Path) -> Check {
    let subject = format!("disk of {}", store.display());
    let found = match statvfs(store) {
        Ok(found) => found,
        Err(error) => {
            return broken_check(subject, io::Error::from(error), "check its file system");
        }
    };
    let room = DiskSpace {
        bytes: found.f_blocks * found.f_frsize,
        free_bytes: found.f_bavail.saturating_mul(found.f_frsize),
        files: found.f_files,
        free_files: found.f_favail,
    };
    room.check(subject, || describe_usage(store, SCANNED_FILES_MAX))
}

impl DiskSpace {
    fn check(&self, subject: String, what_takes: impl FnOnce() -> String) -> Check {
        let bytes = format!("{} of {} bytes are free", self.free_bytes, self.bytes);
        // Some file systems make files as they are needed, and say 0.
        let files = match self.files {
            0 => String::new(),
            all => format!(", {} of {all} files", self.free_files),
        };
        let found = format!("{bytes}{files}");
        let lacks_files = self.free_files < FREE_FILES_MIN.min(self.files / 10);
        if self.free_bytes >= FREE_BYTES_MIN.min(self.bytes / 10) && !lacks_files {
            return fine_check(subject, found);
        }
        let found = format!("full: {found}; {}", what_takes());
        let remedy = "remove other data from this disk, or delete volumes that you no longer need \
                      (bafs volume list, bafs volume delete ID; caches shrink by themselves), or \
                      give the node its own disk; then start it with a --size below the disk's";
        broken_check(subject, found, remedy)
    }
}

/// What each part of a store takes.
fn describe_usage(store: &Path, mut looks: usize) -> String {
    let parts = STORE_DIRECTORIES.map(|part| {
        let taken = measure_usage(&store.join(part), &mut looks);
        format!("{part} {} bytes in {} files", taken.bytes, taken.files)
    });
    let least = if looks == 0 { " at least" } else { "" };
    format!("the store takes{least}: {}", parts.join(", "))
}

/// What lies below a directory, as far as so many looks go. A file with several names counts
/// for each.
fn measure_usage(top: &Path, looks: &mut usize) -> DirectoryUsage {
    let (mut sum, mut waiting) = (DirectoryUsage::default(), vec![top.to_owned()]);
    while let Some(at) = waiting.pop() {
        for entry in fs::read_dir(at).into_iter().flatten().flatten() {
            if *looks == 0 {
                return sum;
            }
            *looks -= 1;
            let Ok(about) = entry.metadata() else {
                continue;
            };
            sum.bytes += about.blocks() * 512;
            sum.files += 1;
            if about.is_dir() {
                waiting.push(entry.path());
            }
        }
    }
    sum
}

/// What was deleted and should be gone.
fn check_trash(store: &Path, state: NodeState, treatment: RepairMode, now_s: i64) -> Option<Check> {
    let trash = store.join("trash");
    let subject = format!("trash {}", trash.display());
    let left = match find_abandoned(&trash, state, now_s) {
        Ok(left) => left,
        Err(error) => return Some(broken_check(subject, error, "check its owner")),
    };
    if left.is_empty() {
        return None;
    }
    let mut looks = SCANNED_FILES_MAX;
    let sums = left.iter().map(|at| measure_usage(at, &mut looks));
    let DirectoryUsage { bytes, files } =
        sums.fold(DirectoryUsage::default(), |sum, one| DirectoryUsage {
            bytes: sum.bytes + one.bytes,
            files: sum.files + one.files,
        });
    let found = format!(
        "{} deleted volumes remain on disk, with {files} files of {bytes} bytes",
        left.len()
    );
    if state == NodeState::Stopped {
        if treatment == RepairMode::ReportOnly {
            let remedy = "bafs doctor --repair, or start the node, which removes them";
            return Some(broken_check(subject, found, remedy));
        }
        let removed = left
            .iter()
            .try_for_each(|path| bafs_tree::remove_tree(path));
        return Some(match removed {
            Ok(()) => repaired_check(subject, &format!("{found}; removed")),
            Err(error) => broken_check(
                subject,
                format!("{found}: {error}"),
                obstacle_remedy(&trash),
            ),
        });
    }
    let found = format!("{found}; the node cannot remove them, so their space stays reserved");
    let remedy = format!(
        "{}; then restart the node, which removes them",
        obstacle_remedy(&trash)
    );
    Some(broken_check(subject, found, remedy))
}

/// Deleted volumes that nobody is about to remove.
fn find_abandoned(trash: &Path, state: NodeState, now_s: i64) -> io::Result<Vec<PathBuf>> {
    let mut left = Vec::new();
    for entry in fs::read_dir(trash)? {
        let entry = entry?;
        let Ok(about) = entry.metadata() else {
            continue;
        };
        // It came when its name changed.
        if state == NodeState::Stopped || now_s - about.ctime() > TRASH_AGE_S_MAX {
            left.push(entry.path());
        }
    }
    Ok(left)
}

fn obstacle_remedy(trash: &Path) -> String {
    let trash = trash.display();
    format!(
        "see the node's log for the reason: a mount inside (findmnt -R {trash}), immutable files \
         (lsattr -R {trash}), or files of another user"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::CheckStatus;

    #[test]
    fn a_full_disk_report_names_its_consumers() {
        let store = tempfile::tempdir().unwrap();
        fs::create_dir_all(store.path().join("volumes/1/tree")).unwrap();
        fs::write(store.path().join("volumes/1/tree/x"), [1; 5_000]).unwrap();
        let check = |free_bytes, files, free_files| {
            let room = DiskSpace {
                bytes: 1 << 40,
                free_bytes,
                files,
                free_files,
            };
            room.check("disk".to_owned(), || {
                describe_usage(store.path(), SCANNED_FILES_MAX)
            })
        };
        for (free_bytes, files, free_files) in [(FREE_BYTES_MIN, 0, 0), (1 << 39, 1 << 20, 5_000)] {
            let fine = check(free_bytes, files, free_files);
            assert_eq!((fine.status, fine.remedy.as_str()), (CheckStatus::Fine, ""));
        }
        for (free_bytes, files, free_files) in [(4096, 0, 0), (1 << 39, 1 << 20, 7)] {
            let full = check(free_bytes, files, free_files);
            assert_eq!(full.status, CheckStatus::Broken);
            assert!(
                full.found.contains(&free_bytes.to_string()),
                "{}",
                full.found
            );
            assert!(full.found.contains("volumes "), "{}", full.found);
            assert!(full.found.contains(" bytes in 3 files"), "{}", full.found);
            assert!(full.remedy.contains("bafs volume delete"));
        }
        assert!(describe_usage(store.path(), 2).contains("at least"));
    }

    #[test]
    fn the_free_space_threshold_scales_with_the_disk() {
        let check = |free_bytes| {
            let room = DiskSpace {
                bytes: 50_000_000,
                free_bytes,
                files: 500,
                free_files: 400,
            };
            room.check("disk".to_owned(), String::new).status
        };
        assert_eq!(check(49_000_000), CheckStatus::Fine);
        assert_eq!(check(4_000_000), CheckStatus::Broken);
    }

    #[test]
    fn stale_trash_is_reported_and_repaired_offline() {
        let store = tempfile::tempdir().unwrap();
        let left = store.path().join("trash/7-0/tree");
        let now = clock::time_of_day().seconds;
        let look = |served, treatment, now| check_trash(store.path(), served, treatment, now);
        assert!(
            look(NodeState::Stopped, RepairMode::ReportOnly, now).is_some(),
            "no directory"
        );
        fs::create_dir_all(&left).unwrap();
        fs::write(left.join("x"), [1; 5_000]).unwrap();
        // The node is at it.
        assert_eq!(look(NodeState::Running, RepairMode::ReportOnly, now), None);
        let late = now + TRASH_AGE_S_MAX + 2;
        for (served, now) in [(NodeState::Running, late), (NodeState::Stopped, now)] {
            let told = look(served, RepairMode::ReportOnly, now).unwrap();
            assert_eq!(told.status, CheckStatus::Broken);
            assert!(told.found.contains("1 deleted volumes"), "{}", told.found);
            assert!(told.found.contains("2 files"), "{}", told.found);
        }
        // A node that runs does that itself.
        look(NodeState::Running, RepairMode::Repair, late).unwrap();
        assert!(left.exists());
        let mended = look(NodeState::Stopped, RepairMode::Repair, now).unwrap();
        assert_eq!(mended.status, CheckStatus::Repaired);
        assert!(!left.exists());
        assert_eq!(look(NodeState::Stopped, RepairMode::ReportOnly, now), None);
    }
}
