//! A mirror: its directory, the files that the kernel knows, and the recorder. Answers no request.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt, lchown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bafs_profile::trace::AccessKind;
use fuser::{FileAttr, FileHandle, FileType, INodeNo, Request};
use rustix::fs::{AtFlags, CWD, OFlags, Timestamps, utimensat};

use super::conversions::{file_attributes, open_path, stale, to_file_type};
use super::file_table::{FileTable, OpenObject};
use crate::trace_recorder::{RecordedFile, TraceRecorder};

/// A directory that is shown, and whose use is recorded.
pub(super) struct MirrorFileSystem {
    pub(super) source: PathBuf,
    shown: String,
    pub(super) recorder: Arc<TraceRecorder>,
    table: Mutex<FileTable>,
}

/// Handles differ between all mirrors of a recorder.
static NEXT_HANDLE: AtomicU64 = AtomicU64::new(1);

impl MirrorFileSystem {
    pub(super) fn new(source: &Path, shown: &str, recorder: Arc<TraceRecorder>) -> Self {
        Self {
            source: source.to_owned(),
            shown: shown.to_owned(),
            recorder,
            table: Mutex::default(),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, FileTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn relative_path(&self, ino: INodeNo) -> io::Result<PathBuf> {
        self.lock().path(ino).map(Path::to_owned).ok_or_else(stale)
    }

    pub(super) fn child_path(&self, parent: INodeNo, name: &OsStr) -> io::Result<PathBuf> {
        self.lock().child(parent, name).ok_or_else(stale)
    }

    pub(super) fn real(&self, path: &Path) -> PathBuf {
        // Joining an empty path would end with a slash.
        match path.as_os_str().is_empty() {
            true => self.source.clone(),
            false => self.source.join(path),
        }
    }

    /// The path as the program sees it.
    pub(super) fn shown_path(&self, path: &Path) -> String {
        match path.as_os_str().is_empty() {
            true => self.shown.clone(),
            false => format!("{}/{}", self.shown, path.display()),
        }
    }

    pub(super) fn find(&self, path: &Path) -> io::Result<(FileAttr, Metadata)> {
        let found = fs::symlink_metadata(self.real(path))?;
        let ino = self.lock().number(path);
        Ok((file_attributes(ino, &found), found))
    }

    pub(super) fn record_use(
        &self,
        request: &Request,
        path: &Path,
        size_bytes: u64,
        kind: AccessKind,
    ) {
        let file = RecordedFile {
            path: &self.shown_path(path),
            size_bytes,
        };
        self.recorder.record_use(request.pid(), file, kind);
    }

    pub(super) fn open_file(&self, handle: FileHandle) -> io::Result<Arc<File>> {
        match self.lock().open_object(handle.0) {
            Some(OpenObject::File(file, _)) => Ok(file),
            _ => Err(rustix::io::Errno::BADF.into()),
        }
    }

    /// Attributes by the path, or by an open file if that is gone.
    pub(super) fn metadata(&self, ino: INodeNo) -> io::Result<Metadata> {
        match self.relative_path(ino) {
            Ok(path) => fs::symlink_metadata(self.real(&path)),
            Err(error) => {
                let open = self.lock().open_file_of(ino);
                open.ok_or(error)?.metadata()
            }
        }
    }

    pub(super) fn insert_file(
        &self,
        request: &Request,
        (path, ino): (&Path, INodeNo),
        file: File,
        is_new: bool,
    ) -> io::Result<FileHandle> {
        let recorded = RecordedFile {
            path: &self.shown_path(path),
            size_bytes: file.metadata()?.len(),
        };
        let handle = NEXT_HANDLE.fetch_add(1, Ordering::Relaxed);
        self.recorder
            .record_open(request.pid(), recorded, handle, is_new);
        let object = OpenObject::File(Arc::new(file), ino);
        self.lock().insert_open(handle, object);
        Ok(FileHandle(handle))
    }

    /// Opens a file again whose path is gone, as programs do by `/proc/self/fd`. What they do to it
    /// is not recorded: no other job can see the file.
    pub(super) fn reopen_removed(
        &self,
        ino: INodeNo,
        access: OFlags,
        error: io::Error,
    ) -> io::Result<FileHandle> {
        let open = self.lock().open_file_of(ino).ok_or(error)?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", open.as_raw_fd()));
        let file = open_path(&path, access)?;
        let handle = NEXT_HANDLE.fetch_add(1, Ordering::Relaxed);
        let object = OpenObject::File(Arc::new(file), ino);
        self.lock().insert_open(handle, object);
        Ok(FileHandle(handle))
    }

    pub(super) fn list_directory(&self, ino: INodeNo) -> io::Result<FileHandle> {
        let path = self.relative_path(ino)?;
        let mut all = vec![
            (OsString::from("."), FileType::Directory),
            (OsString::from(".."), FileType::Directory),
        ];
        for entry in fs::read_dir(self.real(&path))? {
            let entry = entry?;
            all.push((entry.file_name(), to_file_type(entry.file_type()?)));
        }
        let handle = NEXT_HANDLE.fetch_add(1, Ordering::Relaxed);
        self.lock()
            .insert_open(handle, OpenObject::Directory(Arc::new(all)));
        Ok(FileHandle(handle))
    }

    pub(super) fn change_attributes(
        &self,
        request: &Request,
        ino: INodeNo,
        (mode, uid, gid): (Option<u32>, Option<u32>, Option<u32>),
        size: Option<u64>,
        times: Option<Timestamps>,
    ) -> io::Result<FileAttr> {
        let path = self.relative_path(ino);
        let open = self.lock().open_file_of(ino);
        if let Some(size) = size {
            // An open file may be written whose path may not any more.
            let writable = || {
                OpenOptions::new()
                    .write(true)
                    .open(self.real(path.as_ref().ok()?))
                    .ok()
            };
            match writable() {
                Some(file) => file.set_len(size)?,
                None => open.as_ref().ok_or_else(stale)?.set_len(size)?,
            }
            if let Ok(path) = &path {
                let file = RecordedFile {
                    path: &self.shown_path(path),
                    size_bytes: size,
                };
                self.recorder.record_truncation(request.pid(), file);
            }
        }
        if let Ok(path) = &path {
            let real = self.real(path);
            if let Some(mode) = mode {
                fs::set_permissions(&real, fs::Permissions::from_mode(mode))?;
            }
            if uid.is_some() || gid.is_some() {
                lchown(&real, uid, gid)?;
            }
            if let Some(times) = times {
                utimensat(CWD, &real, &times, AtFlags::SYMLINK_NOFOLLOW)?;
            }
        }
        Ok(file_attributes(ino, &self.metadata(ino)?))
    }

    pub(super) fn make_file(
        &self,
        request: &Request,
        (parent, name): (INodeNo, &OsStr),
        mode: u32,
        flags: i32,
    ) -> io::Result<(FileAttr, FileHandle)> {
        let path = self.child_path(parent, name)?;
        let real = self.real(&path);
        let flags = OFlags::from_bits_retain(flags as u32);
        let mut options = OpenOptions::new();
        options.read(true).write(true).mode(mode);
        // Another program may have made it in this moment.
        let (file, is_new) = match options.clone().create_new(true).open(&real) {
            Ok(file) => (file, true),
            Err(error) if flags.contains(OFlags::EXCL) => return Err(error),
            Err(_) => (options.open(&real)?, false),
        };
        if is_new {
            // The kernel has taken the caller's mask off.
            file.set_permissions(fs::Permissions::from_mode(mode))?;
        }
        let (attributes, _) = self.find(&path)?;
        let handle = self.insert_file(request, (&path, attributes.ino), file, is_new)?;
        Ok((attributes, handle))
    }
}
