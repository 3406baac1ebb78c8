//! What a job did to one of its volumes: bytes, touched pages, which file first, the longest wait.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bafs_proto::file_op::{ByName, Errno, FileOp, TreeStat};
use bafs_proto::ids::InodeNo;
use bafs_proto::job_report::{TouchedPages, VolumeUse};
use bafs_proto::path::from_bytes;

use nix::libc;

use crate::limits::TOUCHED_FILES_MAX;
use crate::logic::page_set::PageSet;

/// Names that were looked up lately and are remembered until the first file was opened.
const REMEMBERED_NAMES_MAX: usize = 4_096;

/// Counts what happens on one volume. All methods may be called from any thread.
#[derive(Debug, Default)]
pub struct VolumeUsage {
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    longest_call_ms: AtomicU64,
    waiting: Mutex<CallWaiting>,
    /// Files opened for reading, and changes of files or directories.
    opened_for_reading: AtomicU64,
    changes: AtomicU64,
    /// What is neither, but tells the job something.
    lookups: AtomicU64,
    refused_for_space: AtomicU64,
    /// The first of each; nothing is remembered once both are known.
    first_paths: Mutex<FirstPaths>,
    has_first_paths: AtomicBool,
    /// Whether the job is over, so that it reads nothing any more.
    has_stopped_counting_reads: AtomicBool,
    /// Files that count as read wholly.
    whole_reads: Mutex<BTreeSet<InodeNo>>,
    /// `None` when touched pages are not counted.
    touched_files: Option<Mutex<TouchedFiles>>,
}

/// Calls under way, and for how long there were any.
#[derive(Debug, Default)]
struct CallWaiting {
    calls: u32,
    since: Option<Instant>,
    total: Duration,
}

#[derive(Debug, Default)]
struct TouchedFiles {
    files: BTreeMap<InodeNo, TouchedFile>,
    /// Where files were seen last; only the files of `files` are worth a path.
    names: BTreeMap<InodeNo, (InodeNo, ByName)>,
}

#[derive(Debug, Default)]
struct FirstPaths {
    first_read: Option<String>,
    first_change: Option<String>,
    names: BTreeMap<InodeNo, (InodeNo, ByName)>,
}

impl FirstPaths {
    fn path_in(&self, parent: InodeNo, name: &ByName) -> String {
        let name = from_bytes(name);
        if parent == InodeNo::ROOT {
            return name;
        }
        let parent = path_of(&self.names, parent);
        format!("{parent}/{name}")
    }
}

#[derive(Debug, Default)]
struct TouchedFile {
    size: u64,
    pages: PageSet,
}

impl VolumeUsage {
    /// Counts bytes and waits only.
    pub fn new() -> Self {
        Self::default()
    }

    /// Counts touched pages as well.
    pub fn with_pages() -> Self {
        Self {
            touched_files: Some(Mutex::default()),
            ..Self::default()
        }
    }

    /// A call began.
    pub fn begin_call(&self, now: Instant) {
        let mut waiting = self.lock_waiting();
        waiting.calls += 1;
        waiting.since.get_or_insert(now);
    }

    /// A call that had `Self::begun` ended.
    pub fn end_call(&self, begun: Instant, now: Instant) {
        let took = now.saturating_duration_since(begun);
        self.longest_call_ms
            .fetch_max(to_ms(took), Ordering::Relaxed);
        let mut waiting = self.lock_waiting();
        waiting.calls = waiting.calls.saturating_sub(1);
        if waiting.calls == 0
            && let Some(since) = waiting.since.take()
        {
            waiting.total += now.saturating_duration_since(since);
        }
    }

    /// The volume cannot be changed: the name of the first change is not waited for.
    pub fn expect_no_changes(&self) {
        let mut firsts = self
            .first_paths
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        firsts.first_change = Some(String::new());
    }

    /// What is read and opened for reading from now on does not count.
    pub fn stop_counting_reads(&self) {
        self.has_stopped_counting_reads
            .store(true, Ordering::Relaxed);
    }

    /// An operation was asked for: takes note of what it opens or changes.
    pub fn record_operation(&self, op: &FileOp) {
        match op {
            FileOp::Open { ino, flags } => {
                let mode = flags & libc::O_ACCMODE;
                if mode != libc::O_WRONLY
                    && !self.has_stopped_counting_reads.load(Ordering::Relaxed)
                {
                    self.opened_for_reading.fetch_add(1, Ordering::Relaxed);
                    self.note_first(|firsts| {
                        let path = path_of(&firsts.names, *ino);
                        firsts.first_read.get_or_insert(path);
                    });
                }
                if mode != libc::O_RDONLY || flags & libc::O_TRUNC != 0 {
                    self.record_change(|firsts| path_of(&firsts.names, *ino));
                }
            }
            FileOp::Create { parent, name, .. }
            | FileOp::MakeNode { parent, name, .. }
            | FileOp::MakeDirectory { parent, name, .. }
            | FileOp::MakeSymlink { parent, name, .. }
            | FileOp::MakeLink { parent, name, .. }
            | FileOp::Unlink { parent, name }
            | FileOp::RemoveDirectory { parent, name }
            | FileOp::Rename { parent, name, .. } => {
                self.record_change(|firsts| firsts.path_in(*parent, name));
            }
            FileOp::SetAttr { ino, .. }
            | FileOp::SetXattr { ino, .. }
            | FileOp::RemoveXattr { ino, .. } => {
                self.record_change(|firsts| path_of(&firsts.names, *ino));
            }
            // The kernel asks for the top of a volume by itself, and for these before it writes.
            FileOp::GetAttr { ino, .. } if *ino == InodeNo::ROOT => {}
            FileOp::GetXattr { name, .. } if name.starts_with(b"security.") => {}
            FileOp::Lookup { .. }
            | FileOp::GetAttr { .. }
            | FileOp::ReadLink { .. }
            | FileOp::OpenDirectory { .. }
            | FileOp::ReadDirectory { .. }
            | FileOp::GetXattr { .. }
            | FileOp::ListXattr { .. }
            | FileOp::StatFs => {
                self.lookups.fetch_add(1, Ordering::Relaxed);
            }
            _ => {}
        }
    }

    /// A name led to a file.
    pub fn record_lookup(&self, ino: InodeNo, parent: InodeNo, name: &ByName) {
        self.note_first(|firsts| {
            if firsts.names.len() >= REMEMBERED_NAMES_MAX {
                firsts.names.clear();
            }
            firsts.names.insert(ino, (parent, name.clone()));
        });
    }

    /// A listing told of a name: it takes the place of none that was looked up.
    pub fn record_listing(&self, ino: InodeNo, parent: InodeNo, name: &ByName) {
        self.note_first(|firsts| {
            if firsts.names.len() < REMEMBERED_NAMES_MAX {
                firsts.names.insert(ino, (parent, name.clone()));
            }
        });
    }

    /// Whether names still matter to [`Self::record_lookup`].
    pub fn is_collecting_names(&self) -> bool {
        !self.has_first_paths.load(Ordering::Relaxed)
    }

    fn record_change(&self, path: impl FnOnce(&FirstPaths) -> String) {
        self.changes.fetch_add(1, Ordering::Relaxed);
        self.note_first(|firsts| {
            if firsts.first_change.is_none() {
                firsts.first_change = Some(path(firsts));
            }
        });
    }

    fn note_first(&self, note: impl FnOnce(&mut FirstPaths)) {
        if !self.is_collecting_names() {
            return;
        }
        let mut firsts = self
            .first_paths
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        note(&mut firsts);
        if firsts.first_read.is_some() && firsts.first_change.is_some() {
            firsts.names.clear();
            self.has_first_paths.store(true, Ordering::Relaxed);
        }
    }

    /// Bytes were written.
    pub fn record_write(&self, bytes: u64) {
        self.written_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// A call failed: takes note of it if the volume had no space.
    pub fn record_failure(&self, errno: Errno) {
        if matches!(errno.0, libc::ENOSPC | libc::EDQUOT) {
            self.refused_for_space.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Bytes were read.
    pub fn record_read(&self, ino: InodeNo, offset: u64, bytes: u64) {
        if self.has_stopped_counting_reads.load(Ordering::Relaxed) {
            return;
        }
        self.read_bytes.fetch_add(bytes, Ordering::Relaxed);
        let Some(mut touched) = self.lock_touched() else {
            return;
        };
        if touched.files.len() < TOUCHED_FILES_MAX || touched.files.contains_key(&ino) {
            let file = touched.files.entry(ino).or_default();
            file.pages.touch(offset, bytes);
            file.size = file.size.max(offset.saturating_add(bytes));
        }
    }

    /// The kernel was given a file to read by itself: how much of it, nobody sees. It counts once.
    pub fn record_whole_read(&self, ino: InodeNo, size: u64) {
        let is_first = {
            let mut whole = self
                .whole_reads
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            whole.len() < TOUCHED_FILES_MAX && whole.insert(ino)
        };
        if is_first {
            self.record_read(ino, 0, size);
        }
    }

    /// A file was seen at a name, with this size.
    pub fn record_name(&self, ino: InodeNo, parent: InodeNo, name: &ByName, size: u64) {
        let Some(mut touched) = self.lock_touched() else {
            return;
        };
        if touched.names.len() < TOUCHED_FILES_MAX || touched.names.contains_key(&ino) {
            touched.names.insert(ino, (parent, name.clone()));
        }
        if let Some(file) = touched.files.get_mut(&ino) {
            file.size = file.size.max(size);
        }
    }

    /// A file has this size.
    pub fn record_size(&self, ino: InodeNo, size: u64) {
        let Some(mut touched) = self.lock_touched() else {
            return;
        };
        if touched.files.len() < TOUCHED_FILES_MAX || touched.files.contains_key(&ino) {
            touched.files.entry(ino).or_default().size = size;
        }
    }

    /// The report on the volume of this name, which held so much at the end. `describe` gives path
    /// and size of a file; without an answer what was seen at lookups and reads is taken.
    pub fn report(
        &self,
        name: &str,
        final_stat: Option<TreeStat>,
        describe: impl Fn(InodeNo) -> Option<(String, u64)>,
    ) -> VolumeUse {
        let mut pages = Vec::new();
        if let Some(touched) = self.lock_touched() {
            for (ino, file) in &touched.files {
                let runs = file.pages.runs();
                if runs.is_empty() {
                    continue;
                }
                let (path, size) =
                    describe(*ino).unwrap_or_else(|| (path_of(&touched.names, *ino), file.size));
                pages.push(TouchedPages {
                    path,
                    size,
                    page_runs: runs,
                });
            }
        }
        let firsts = self
            .first_paths
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let used = |size: u64, free: u64| size.saturating_sub(free);
        // A number says nothing to a user.
        let mut named = pages.iter().filter(|page| !is_inode_path(&page.path));
        let first_page = named.next().map(|page| page.path.clone());
        VolumeUse {
            read_opens: self.opened_for_reading.load(Ordering::Relaxed),
            changes: self.changes.load(Ordering::Relaxed),
            metadata_ops: self.lookups.load(Ordering::Relaxed),
            has_no_counts: false,
            first_read_path: firsts.first_read.clone().or(first_page).unwrap_or_default(),
            first_changed_path: firsts.first_change.clone().unwrap_or_default(),
            used_bytes: final_stat.map_or(0, |stat| used(stat.size_bytes, stat.free_bytes)),
            used_files: final_stat.map_or(0, |stat| used(stat.size_files, stat.free_files)),
            disk_free_bytes: final_stat.and_then(|stat| stat.disk_free_bytes),
            disk_free_files: final_stat.and_then(|stat| stat.disk_free_files),
            name: name.to_owned(),
            read_bytes: self.read_bytes.load(Ordering::Relaxed),
            written_bytes: self.written_bytes.load(Ordering::Relaxed),
            pages,
            call_ms_max: self.longest_call_ms.load(Ordering::Relaxed),
            wait_ms: to_ms(self.lock_waiting().total),
            no_space_errors: self.refused_for_space.load(Ordering::Relaxed),
            access_path: String::new(),
            inputs: None,
        }
    }

    fn lock_waiting(&self) -> MutexGuard<'_, CallWaiting> {
        // No holder leaves the sums half-changed.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_touched(&self) -> Option<MutexGuard<'_, TouchedFiles>> {
        // No holder leaves the counts half-changed.
        self.touched_files
            .as_ref()
            .map(|touched| touched.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A report of a volume where nobody counts operations, if that is so: all that is known is whether
/// anything differs from what it was.
pub fn without_counts(
    used: VolumeUse,
    is_changed: Option<bool>,
    first_read: Option<String>,
) -> VolumeUse {
    match is_changed {
        Some(is_changed) => VolumeUse {
            has_no_counts: true,
            changes: u64::from(is_changed),
            read_opens: u64::from(first_read.is_some()),
            first_read_path: first_read.unwrap_or_default(),
            ..used
        },
        None => used,
    }
}

fn to_ms(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// How a file is called of which no name was seen.
const INODE_PREFIX: &str = "inode ";

fn is_inode_path(path: &str) -> bool {
    let number = path.strip_prefix(INODE_PREFIX);
    number.is_some_and(|number| number.parse::<u64>().is_ok())
}

/// The path that the seen names give; a file whose way to the root is unknown is named by number.
fn path_of(names: &BTreeMap<InodeNo, (InodeNo, ByName)>, ino: InodeNo) -> String {
    let mut path = Vec::new();
    let mut at = ino;
    // A rename may have made a circle of stale names: no path is deeper than there are names.
    for _ in 0..=names.len() {
        if at == InodeNo::ROOT {
            return path.join("/");
        }
        let Some((parent, name)) = names.get(&at) else {
            break;
        };
        path.insert(0, from_bytes(name));
        at = *parent;
    }
    format!("{INODE_PREFIX}{ino}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listed_names_displace_no_earlier_names() {
        let usage = VolumeUsage::new();
        usage.record_lookup(InodeNo(5), InodeNo::ROOT, &b"d".to_vec());
        usage.record_listing(InodeNo(6), InodeNo(5), &b"f".to_vec());
        for ino in 7..7 + REMEMBERED_NAMES_MAX as u64 {
            usage.record_listing(InodeNo(ino), InodeNo(5), &b"other".to_vec());
        }
        let flags = libc::O_RDONLY;
        let ino = InodeNo(6);
        usage.record_operation(&FileOp::Open { ino, flags });
        let used = usage.report("v", None, |_| None);
        assert_eq!(used.first_read_path, "d/f");
    }

    #[test]
    fn lookups_and_listings_count_as_looks() {
        let looked = |op: FileOp| {
            let usage = VolumeUsage::new();
            usage.record_operation(&op);
            let used = usage.report("v", None, |_| None);
            assert_eq!((used.read_opens, used.changes), (0, 0), "{op:?}");
            used.metadata_ops
        };
        let (ino, root) = (InodeNo(5), InodeNo::ROOT);
        let xattr = |name: &[u8]| FileOp::GetXattr {
            ino,
            name: name.to_vec(),
        };
        let parent = root;
        let name = b"ready".to_vec();
        assert_eq!(looked(FileOp::Lookup { parent, name }), 1);
        assert_eq!(looked(FileOp::OpenDirectory { ino: root }), 1);
        assert_eq!(looked(FileOp::ReadLink { ino }), 1);
        assert_eq!(looked(xattr(b"user.done")), 1);
        assert_eq!(looked(FileOp::ListXattr { ino: root }), 1);
        // Nothing that a program asked for.
        assert_eq!(looked(xattr(b"security.capability")), 0);
        assert_eq!(looked(FileOp::Forget { ino, count: 1 }), 0);
    }

    #[test]
    fn reads_after_the_job_do_not_count() {
        let usage = VolumeUsage::with_pages();
        usage.stop_counting_reads();
        let (ino, flags) = (InodeNo(6), libc::O_RDONLY);
        usage.record_operation(&FileOp::Open { ino, flags });
        usage.record_read(ino, 0, 5_000);
        usage.record_whole_read(ino, 5_000);
        usage.record_write(3);
        let used = usage.report("v", None, |_| None);
        assert_eq!((used.read_bytes, used.written_bytes), (0, 3));
        assert_eq!((used.read_opens, used.pages.len()), (0, 0));
        assert_eq!(used.first_read_path, "");
    }

    #[test]
    fn pages_are_reported_by_path() {
        let usage = VolumeUsage::with_pages();
        usage.record_name(InodeNo(5), InodeNo::ROOT, &b"db".to_vec(), 0);
        usage.record_name(InodeNo(6), InodeNo(5), &b"a.phr".to_vec(), 10_000);
        usage.record_size(InodeNo(6), 10_000);
        usage.record_read(InodeNo(6), 0, 5_000);
        usage.record_read(InodeNo(6), 4_096, 1);
        usage.record_read(InodeNo(9), 4_096, 1);
        usage.record_write(3);
        let report = usage.report("v", None, |_| None);
        assert_eq!((report.read_bytes, report.written_bytes), (5_002, 3));
        assert_eq!(report.pages.len(), 2);
        assert_eq!(report.pages[0].path, "db/a.phr");
        assert_eq!(
            (report.pages[0].size, &*report.pages[0].page_runs),
            (10_000, &[(0, 2)][..])
        );
        assert_eq!(report.pages[1].path, "inode 9");
        let described = usage.report("v", None, |_| Some(("known".into(), 1)));
        assert_eq!(described.pages[1].path, "known");
    }

    #[test]
    fn kernel_read_files_count_once_and_wholly() {
        let usage = VolumeUsage::with_pages();
        usage.record_read(InodeNo(2), 0, 1);
        usage.record_whole_read(InodeNo(2), 9_000);
        usage.record_whole_read(InodeNo(2), 9_000);
        let report = usage.report("v", None, |_| None);
        assert_eq!(report.read_bytes, 9_001);
        assert_eq!(report.pages[0].page_runs, [(0, 3)]);
        let of_scratch = VolumeUsage::new();
        of_scratch.record_whole_read(InodeNo(2), 9_000);
        of_scratch.record_whole_read(InodeNo(2), 9_000);
        assert_eq!(of_scratch.report("v", None, |_| None).read_bytes, 9_000);
    }

    #[test]
    fn concurrent_calls_count_waiting_time_once() {
        let usage = VolumeUsage::new();
        let start = crate::clock::now();
        let at = |ms| start + Duration::from_millis(ms);
        usage.begin_call(at(0));
        usage.begin_call(at(10));
        usage.end_call(at(0), at(30));
        usage.end_call(at(10), at(50));
        usage.begin_call(at(100));
        usage.end_call(at(100), at(101));
        usage.begin_call(at(200));
        let report = usage.report("v", None, |_| None);
        assert_eq!((report.call_ms_max, report.wait_ms), (40, 51));
    }

    #[test]
    fn cyclic_stale_names_cause_no_endless_path() {
        let usage = VolumeUsage::with_pages();
        usage.record_name(InodeNo(2), InodeNo(3), &b"a".to_vec(), 0);
        usage.record_name(InodeNo(3), InodeNo(2), &b"b".to_vec(), 0);
        usage.record_read(InodeNo(2), 0, 1);
        let report = usage.report("v", None, |_| None);
        assert_eq!(report.pages[0].path, "inode 2");
        assert_eq!(
            report.first_read_path, "",
            "a number says nothing to a user"
        );
    }

    #[test]
    fn the_first_read_and_changed_files_are_named() {
        let usage = VolumeUsage::new();
        usage.record_lookup(InodeNo(5), InodeNo::ROOT, &b"out".to_vec());
        usage.record_lookup(InodeNo(6), InodeNo(5), &b"a".to_vec());
        let open = |flags| FileOp::Open {
            ino: InodeNo(6),
            flags,
        };
        usage.record_operation(&open(libc::O_RDONLY));
        let report = usage.report("v", None, |_| None);
        assert_eq!((report.read_opens, report.changes), (1, 0));
        assert_eq!(
            (&*report.first_read_path, &*report.first_changed_path),
            ("out/a", "")
        );
        assert!(usage.is_collecting_names());
        let (parent, name) = (InodeNo(5), b"b".to_vec());
        usage.record_operation(&FileOp::Unlink { parent, name });
        usage.record_operation(&open(libc::O_RDWR));
        assert!(!usage.is_collecting_names(), "nothing more is remembered");
        let stat = TreeStat {
            size_bytes: 10,
            free_bytes: 3,
            size_files: 5,
            free_files: 4,
            disk_free_bytes: Some(2),
            disk_free_files: None,
        };
        let report = usage.report("v", Some(stat), |_| None);
        assert_eq!((report.read_opens, report.changes), (2, 2));
        assert_eq!(report.first_changed_path, "out/b");
        assert_eq!((report.used_bytes, report.used_files), (7, 1));
        assert_eq!(
            (report.disk_free_bytes, report.disk_free_files),
            (Some(2), None)
        );
    }

    #[test]
    fn only_space_errors_count_as_lack_of_space() {
        let usage = VolumeUsage::new();
        for errno in [libc::ENOSPC, libc::ENOENT, libc::EDQUOT] {
            usage.record_failure(Errno(errno));
        }
        assert_eq!(usage.report("v", None, |_| None).no_space_errors, 2);
    }

    #[test]
    fn without_pages_only_bytes_count() {
        let usage = VolumeUsage::new();
        usage.record_read(InodeNo(2), 0, 10);
        let report = usage.report("v", None, |_| None);
        assert_eq!((report.read_bytes, report.pages.len()), (10, 0));
    }
}
