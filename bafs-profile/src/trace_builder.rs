//! Builds a trace from operations as they come. Reads no clock and no file.

use std::collections::BTreeMap;

use crate::trace::{Access, AccessKind, FileTrace, Trace};

/// An open file of a trace, as the builder knows it.
#[derive(Debug, Clone, Copy)]
struct OpenFile {
    file: u32,
    program: u32,
    /// Where the last read or write ended.
    position: u64,
    has_written: bool,
    /// Whether a writer had closed the file when it was opened.
    is_after_writer: bool,
}

/// What one operation on data was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DataOperation {
    /// The open file, as the caller numbers them.
    pub handle: u64,
    /// A read or a write.
    pub kind: AccessKind,
    /// Where it began, in bytes.
    pub offset: u64,
    /// How many bytes it moved.
    pub bytes: u64,
}

/// A trace under construction.
#[derive(Debug, Default)]
pub struct TraceBuilder {
    trace: Trace,
    program_numbers: BTreeMap<String, u32>,
    file_numbers: BTreeMap<String, u32>,
    open_files: BTreeMap<u64, OpenFile>,
    /// Whether a writer of each file has closed it.
    has_closed_writer: Vec<bool>,
    has_read: Vec<bool>,
}

impl TraceBuilder {
    /// The number of a file that exists, or is made now; it stays with the file when it is renamed.
    fn file_number(&mut self, path: &str, size_bytes: u64) -> u32 {
        let number = match self.file_numbers.get(path) {
            Some(number) => *number,
            None => self.insert_file(path),
        };
        let size = &mut self.trace.files[number as usize].size_bytes_max;
        *size = (*size).max(size_bytes);
        number
    }

    fn insert_file(&mut self, path: &str) -> u32 {
        if let Some((directory, _)) = path.rsplit_once('/') {
            self.trace.used_directories.insert(directory.to_owned());
        }
        let number = self.trace.files.len() as u32;
        self.trace.files.push(FileTrace {
            path: path.to_owned(),
            ..FileTrace::default()
        });
        self.has_closed_writer.push(false);
        self.has_read.push(false);
        self.file_numbers.insert(path.to_owned(), number);
        number
    }

    fn program_number(&mut self, program: &str) -> u32 {
        if let Some(number) = self.program_numbers.get(program) {
            return *number;
        }
        let number = self.trace.programs.len() as u32;
        self.trace.programs.push(program.to_owned());
        self.program_numbers.insert(program.to_owned(), number);
        number
    }

    /// A file was opened; `is_new` if it did not exist before.
    pub fn record_open(
        &mut self,
        now_us: u64,
        program: &str,
        (path, size_bytes): (&str, u64),
        handle: u64,
        is_new: bool,
    ) {
        let (program, file) = (
            self.program_number(program),
            self.file_number(path, size_bytes),
        );
        if is_new {
            self.trace.files[file as usize].is_created = true;
        }
        let open = OpenFile {
            file,
            program,
            position: 0,
            has_written: false,
            is_after_writer: self.has_closed_writer[file as usize],
        };
        self.open_files.insert(handle, open);
        self.push(now_us, (program, file), AccessKind::Open);
    }

    /// Bytes were read or written by an open file.
    pub fn record_data(&mut self, now_us: u64, operation: DataOperation) {
        let DataOperation {
            handle,
            kind,
            offset,
            bytes,
        } = operation;
        let Some(open) = self.open_files.get_mut(&handle) else {
            return;
        };
        let is_seek = open.position != offset;
        open.position = offset.saturating_add(bytes);
        open.has_written |= kind.is_write();
        let OpenFile {
            file,
            program,
            is_after_writer,
            ..
        } = *open;
        let traced = &mut self.trace.files[file as usize];
        if kind.is_write() {
            traced.size_bytes_max = traced.size_bytes_max.max(offset.saturating_add(bytes));
        } else {
            traced.is_read_back |= is_after_writer && bytes > 0;
            self.has_read[file as usize] |= bytes > 0;
        }
        let access = Access {
            program,
            file,
            kind,
            offset,
            bytes,
            count: 1,
            seeks: u64::from(is_seek),
            start_us: now_us,
            end_us: now_us,
        };
        match self.trace.accesses.last_mut() {
            Some(last) if !is_seek && is_continued(last, &access) => {
                last.count += 1;
                last.end_us = now_us;
            }
            _ => self.trace.accesses.push(access),
        }
    }

    /// A program closed an open file once, and may go on with copies of it.
    pub fn record_close(&mut self, now_us: u64, handle: u64) {
        if let Some(open) = self.open_files.get(&handle) {
            let OpenFile { program, file, .. } = *open;
            self.has_closed_writer[file as usize] |= open.has_written;
            self.push(now_us, (program, file), AccessKind::Close);
        }
    }

    /// Nobody has an open file any more.
    pub fn forget_handle(&mut self, handle: u64) {
        if let Some(open) = self.open_files.remove(&handle) {
            self.has_closed_writer[open.file as usize] |= open.has_written;
        }
    }

    /// A program looked at a file, or did something else to it that moves no bytes.
    pub fn record_use(
        &mut self,
        now_us: u64,
        program: &str,
        (path, size_bytes): (&str, u64),
        kind: AccessKind,
    ) {
        let (program, file) = (
            self.program_number(program),
            self.file_number(path, size_bytes),
        );
        self.push(now_us, (program, file), kind);
    }

    /// A file got another size.
    pub fn record_truncation(&mut self, now_us: u64, program: &str, path: &str, size_bytes: u64) {
        self.record_use(now_us, program, (path, size_bytes), AccessKind::Other);
        let file = self.file_numbers[path] as usize;
        if size_bytes == 0 && !self.has_read[file] {
            // What was there before is not of this command.
            self.trace.files[file].is_created = true;
            self.trace.files[file].size_bytes_max = 0;
        }
    }

    /// A file is gone from its path.
    pub fn record_removal(&mut self, now_us: u64, program: &str, path: &str) {
        self.record_use(now_us, program, (path, 0), AccessKind::Other);
        if let Some(number) = self.file_numbers.remove(path) {
            self.trace.files[number as usize].is_removed = true;
        }
    }

    /// A file or a directory has another path, and what was there is gone.
    pub fn record_rename(&mut self, now_us: u64, program: &str, source: &str, target: &str) {
        let below = format!("{source}/");
        let is_moved = |path: &&String| *path == source || path.starts_with(&below);
        let moved: Vec<String> = self.file_numbers.keys().filter(is_moved).cloned().collect();
        for path in moved {
            let new_path = format!("{target}{}", &path[source.len()..]);
            if let Some(replaced) = self.file_numbers.remove(&new_path) {
                self.trace.files[replaced as usize].is_removed = true;
            }
            if let Some(number) = self.file_numbers.remove(&path) {
                new_path.clone_into(&mut self.trace.files[number as usize].path);
                self.file_numbers.insert(new_path.clone(), number);
                let program = self.program_number(program);
                self.push(now_us, (program, number), AccessKind::Other);
            }
        }
        let made = self.trace.made_directories.iter();
        let moved = made.filter(|made| *made == source || made.starts_with(&below));
        let moved = moved.map(|made| format!("{target}{}", &made[source.len()..]));
        let moved: Vec<String> = moved.collect();
        self.trace.made_directories.extend(moved);
        if let Some((directory, _)) = target.rsplit_once('/') {
            self.trace.used_directories.insert(directory.to_owned());
        }
    }

    /// A symbolic link was followed.
    pub fn record_link(&mut self, path: &str, target: &str) {
        let link = (path.to_owned(), target.to_owned());
        if !self.trace.links.contains(&link) {
            self.trace.links.push(link);
        }
    }

    /// A directory was made.
    pub fn record_made_directory(&mut self, path: &str) {
        self.trace.made_directories.push(path.to_owned());
    }

    /// Processor time was used until now.
    pub fn record_cpu(&mut self, now_us: u64, cpu_us: u64) {
        self.trace.cpu_samples.push((now_us, cpu_us));
    }

    /// The trace so far; the caller fills in the rest.
    pub fn finish(self) -> Trace {
        self.trace
    }

    fn push(&mut self, now_us: u64, (program, file): (u32, u32), kind: AccessKind) {
        self.trace.accesses.push(Access {
            program,
            file,
            kind,
            offset: 0,
            bytes: 0,
            count: 1,
            seeks: 0,
            start_us: now_us,
            end_us: now_us,
        });
    }
}

fn is_continued(last: &Access, next: &Access) -> bool {
    let is_same = |of: &Access| (of.program, of.file, of.kind, of.bytes);
    is_same(last) == is_same(next) && next.bytes > 0 && last.range().1 == next.offset
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(handle: u64, kind: AccessKind, offset: u64, bytes: u64) -> DataOperation {
        DataOperation {
            handle,
            kind,
            offset,
            bytes,
        }
    }

    #[test]
    fn equal_neighbours_become_one_access() {
        let mut builder = TraceBuilder::default();
        builder.record_open(1, "cat", ("/a", 30), 7, false);
        for (at, offset) in [0, 10, 20, 5].into_iter().enumerate() {
            builder.record_data(at as u64 + 2, data(7, AccessKind::Read, offset, 10));
        }
        let trace = builder.finish();
        let counts: Vec<_> = trace
            .accesses
            .iter()
            .map(|it| (it.count, it.seeks))
            .collect();
        assert_eq!(counts, [(1, 0), (3, 0), (1, 1)]);
        assert_eq!(trace.accesses[1].range(), (0, 30));
    }

    #[test]
    fn renamed_files_keep_their_accesses() {
        let mut builder = TraceBuilder::default();
        builder.record_open(1, "sort", ("/out.tmp", 0), 1, true);
        builder.record_data(2, data(1, AccessKind::Write, 0, 10));
        builder.record_use(3, "sort", ("/out", 4), AccessKind::Stat);
        builder.record_rename(4, "sort", "/out.tmp", "/out");
        let files = builder.finish().files;
        assert_eq!(
            (files[0].path.as_str(), files[0].is_created),
            ("/out", true)
        );
        assert_eq!(
            (files[1].path.as_str(), files[1].is_removed),
            ("/out", true)
        );
    }

    #[test]
    fn directories_of_renamed_files_are_kept() {
        let mut builder = TraceBuilder::default();
        builder.record_made_directory("/made");
        builder.record_open(1, "sort", ("/tmp/out", 0), 1, true);
        builder.record_rename(2, "sort", "/tmp/out", "/made/out");
        builder.record_rename(3, "sh", "/made", "/final");
        let trace = builder.finish();
        assert!(trace.used_directories.contains("/tmp"), "{trace:?}");
        assert_eq!(trace.made_directories, ["/made", "/final"]);
        assert_eq!(trace.files[0].path, "/final/out");
    }

    #[test]
    fn reads_after_a_closed_writer_are_seen() {
        let mut builder = TraceBuilder::default();
        builder.record_open(1, "a", ("/own", 0), 1, true);
        builder.record_data(2, data(1, AccessKind::Write, 0, 10));
        builder.record_data(3, data(1, AccessKind::Read, 0, 10));
        assert!(!builder.trace.files[0].is_read_back);
        builder.record_close(4, 1);
        builder.record_open(5, "a", ("/own", 10), 2, false);
        builder.record_data(6, data(2, AccessKind::Read, 0, 10));
        assert!(builder.finish().files[0].is_read_back);
    }
}
