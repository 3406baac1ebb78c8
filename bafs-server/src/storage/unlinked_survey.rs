//! Files without a name that processes of this machine hold open in volumes: they take space that
//! no walk finds. Read from `/proc`, where this user may inspect a process. Ends nothing.
//!
//! One survey serves all volumes, and is taken again when twenty times of what it took have passed:
//! so at most a twentieth of one processor goes into it, as into walks.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use bafs_proto::time::Time;
use rustix::fs::{AtFlags, CWD, StatxFlags, makedev, statx};

use crate::clock;

/// The kernel's suffix of the path of an open file without a name.
const DELETED: &[u8] = b" (deleted)";

/// A survey that took a time is repeated after so many times that.
const SURVEY_PAUSE_FACTOR: u64 = 20;

/// Bytes and files of each directory, by its inode: of all levels below it.
type HeldByDirectory = BTreeMap<u64, (u64, u64)>;

/// The last survey.
#[derive(Debug, Default)]
pub(super) struct UnlinkedSurvey(Mutex<LastSurvey>);

#[derive(Debug, Default)]
struct LastSurvey {
    device: u64,
    next: Time,
    held: HeldByDirectory,
}

impl UnlinkedSurvey {
    /// Bytes and files without a name that are open below a directory, by a survey that may be a
    /// moment old. Blocks.
    ///
    /// # Errors
    /// The directory cannot be looked at.
    pub(super) fn measure(&self, directory: &Path) -> io::Result<(u64, u64)> {
        self.look(directory, SurveyAge::Recent)
    }

    /// The same, as it is now.
    ///
    /// # Errors
    /// As for [`Self::measure`].
    pub(super) fn measure_now(&self, directory: &Path) -> io::Result<(u64, u64)> {
        self.look(directory, SurveyAge::New)
    }

    fn look(&self, directory: &Path, age: SurveyAge) -> io::Result<(u64, u64)> {
        let found = fs::metadata(directory)?;
        let mut last = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let start = clock::now();
        let is_old = start >= last.next || last.device != found.dev();
        if is_old || age == SurveyAge::New {
            let held = survey(found.dev());
            let now = clock::now();
            let pause_ms = now.ms_since(start).max(1) * SURVEY_PAUSE_FACTOR;
            *last = LastSurvey {
                device: found.dev(),
                next: now.plus_ms(pause_ms),
                held,
            };
        }
        Ok(last.held.get(&found.ino()).copied().unwrap_or((0, 0)))
    }
}

/// Which survey is good enough.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SurveyAge {
    Recent,
    New,
}

/// All open files without a name on a device.
fn survey(device: u64) -> HeldByDirectory {
    let mut held = HeldByDirectory::new();
    let mut seen = BTreeSet::new();
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let process = process.path();
        // Of others, and of those that end, nothing is known.
        for descriptor in fs::read_dir(process.join("fd"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let Some(file) = find_unlinked(&descriptor.path(), device) else {
                continue;
            };
            if !seen.insert(file.inode) {
                continue;
            }
            for directory in directories_above(&process, &file.path, device) {
                let (bytes, files) = held.entry(directory).or_default();
                *bytes += file.bytes;
                *files += 1;
            }
        }
    }
    held
}

/// A file without a name.
struct UnlinkedFile {
    inode: u64,
    bytes: u64,
    /// Where it was, in the name space of its process.
    path: PathBuf,
}

fn find_unlinked(descriptor: &Path, device: u64) -> Option<UnlinkedFile> {
    let path = fs::read_link(descriptor).ok()?;
    let path = path.as_os_str().as_bytes().strip_suffix(DELETED)?;
    // A file system whose server hangs is asked nothing.
    let flags = AtFlags::STATX_DONT_SYNC;
    let found = statx(CWD, descriptor, flags, StatxFlags::BASIC_STATS).ok()?;
    let is_here = makedev(found.stx_dev_major, found.stx_dev_minor) == device;
    (is_here && found.stx_nlink == 0).then(|| UnlinkedFile {
        inode: found.stx_ino,
        bytes: found.stx_blocks * 512,
        path: PathBuf::from(OsStr::from_bytes(path)),
    })
}

/// The directories above a file of a process, as far as they are on its device and still there. A
/// volume is mounted in the process, wherever its directory is on this machine.
fn directories_above(process: &Path, path: &Path, device: u64) -> Vec<u64> {
    let root = process.join("root");
    let mut found = Vec::new();
    for above in path.ancestors().skip(1) {
        let Ok(below_root) = above.strip_prefix("/") else {
            break;
        };
        match fs::symlink_metadata(root.join(below_root)) {
            Ok(directory) if directory.dev() == device => found.push(directory.ino()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            _ => break,
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn removed_open_files_count_for_their_volume() {
        let store = tempfile::tempdir().expect("a directory");
        let (one, other) = (store.path().join("one"), store.path().join("other"));
        for directory in [&one, &other] {
            fs::create_dir(directory).expect("mkdir");
        }
        fs::create_dir(one.join("gone")).expect("mkdir");
        let mut file = fs::File::create(one.join("gone/f")).expect("a file");
        file.write_all(&vec![1; 1_000_000]).expect("write");
        file.sync_all().expect("sync");
        let measure = |directory: &Path| {
            let survey = UnlinkedSurvey::default();
            survey.measure(directory).expect("it is there")
        };
        assert_eq!(measure(&one), (0, 0), "it has a name");
        fs::remove_dir_all(one.join("gone")).expect("remove");
        let (bytes, files) = measure(&one);
        assert_eq!(files, 1);
        assert!((1_000_000..1_100_000).contains(&bytes), "{bytes}");
        assert_eq!(measure(&other), (0, 0));
        drop(file);
        assert_eq!(measure(&one), (0, 0));
    }
}
