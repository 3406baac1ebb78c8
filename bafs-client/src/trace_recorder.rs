//! Records the file use of one command while it runs: time, program and file of each operation.
//! Serves no file.

use std::fs;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bafs_profile::trace::{AccessKind, Trace};
use bafs_profile::trace_builder::{DataOperation, TraceBuilder};

use crate::clock;

/// The recorder of one command, for all directories that are traced.
#[derive(Debug)]
pub(crate) struct TraceRecorder {
    start: Instant,
    builder: Mutex<TraceBuilder>,
}

/// A file at the moment of an operation.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RecordedFile<'a> {
    /// Its path as the program sees it.
    pub(crate) path: &'a str,
    /// What it holds, in bytes.
    pub(crate) size_bytes: u64,
}

impl TraceRecorder {
    /// A recorder whose time begins now.
    pub(crate) fn start() -> Self {
        Self {
            start: clock::now(),
            builder: Mutex::default(),
        }
    }

    /// The time of the trace, in microseconds.
    pub(crate) fn now_us(&self) -> u64 {
        clock::now()
            .saturating_duration_since(self.start)
            .as_micros() as u64
    }

    /// The time is read under the lock, so that the trace is in the order of time.
    fn lock(&self) -> (u64, MutexGuard<'_, TraceBuilder>) {
        let builder = self.builder.lock().unwrap_or_else(PoisonError::into_inner);
        (self.now_us(), builder)
    }

    pub(crate) fn record_open(
        &self,
        process: u32,
        file: RecordedFile<'_>,
        handle: u64,
        is_new: bool,
    ) {
        let program = find_program(process);
        let (now_us, mut builder) = self.lock();
        builder.record_open(
            now_us,
            &program,
            (file.path, file.size_bytes),
            handle,
            is_new,
        );
    }

    pub(crate) fn record_data(&self, handle: u64, kind: AccessKind, offset: u64, bytes: u64) {
        let operation = DataOperation {
            handle,
            kind,
            offset,
            bytes,
        };
        let (now_us, mut builder) = self.lock();
        builder.record_data(now_us, operation);
    }

    pub(crate) fn record_close(&self, handle: u64) {
        let (now_us, mut builder) = self.lock();
        builder.record_close(now_us, handle);
    }

    pub(crate) fn forget_handle(&self, handle: u64) {
        self.lock().1.forget_handle(handle);
    }

    pub(crate) fn record_use(&self, process: u32, file: RecordedFile<'_>, kind: AccessKind) {
        let program = find_program(process);
        let (now_us, mut builder) = self.lock();
        builder.record_use(now_us, &program, (file.path, file.size_bytes), kind);
    }

    pub(crate) fn record_truncation(&self, process: u32, file: RecordedFile<'_>) {
        let program = find_program(process);
        let (now_us, mut builder) = self.lock();
        builder.record_truncation(now_us, &program, file.path, file.size_bytes);
    }

    pub(crate) fn record_removal(&self, process: u32, path: &str) {
        let program = find_program(process);
        let (now_us, mut builder) = self.lock();
        builder.record_removal(now_us, &program, path);
    }

    pub(crate) fn record_rename(&self, process: u32, source: &str, target: &str) {
        let program = find_program(process);
        let (now_us, mut builder) = self.lock();
        builder.record_rename(now_us, &program, source, target);
    }

    pub(crate) fn record_link(&self, path: &str, target: &str) {
        self.lock().1.record_link(path, target);
    }

    pub(crate) fn record_made_directory(&self, path: &str) {
        self.lock().1.record_made_directory(path);
    }

    pub(crate) fn record_cpu(&self, cpu_us: u64) {
        let (now_us, mut builder) = self.lock();
        builder.record_cpu(now_us, cpu_us);
    }

    /// The trace so far.
    pub(crate) fn finish(&self) -> Trace {
        std::mem::take(&mut *self.lock().1).finish()
    }
}

/// The name of the program that a process runs. A process that has ended has none any more; its
/// changed pages come from the kernel.
fn find_program(process: u32) -> String {
    let executable: Option<PathBuf> = fs::read_link(format!("/proc/{process}/exe")).ok();
    let name = executable.as_deref().and_then(|path| path.file_name());
    let short = || fs::read_to_string(format!("/proc/{process}/comm")).ok();
    match name {
        Some(name) => name.to_string_lossy().into_owned(),
        None => short().map_or_else(|| "kernel".to_owned(), |name| name.trim().to_owned()),
    }
}
