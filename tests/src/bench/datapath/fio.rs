//! Data that fio reads and writes, and its place before the start.

use anyhow::{Result, ensure};

use crate::bench::shell::Shell;

/// Place of the data before fio starts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum InitialState {
    /// No file.
    NoFile,
    /// The file, none of it in memory.
    PagesCold,
    /// The file, of which the host has the pages, and the kernel none for FUSE.
    FusePagesCold,
    /// The file, all of it in memory.
    PagesWarm,
    /// The file, written anew: where its pages came to lie is then chance for each round, and not
    /// for all rounds of a side at once.
    Rewritten,
}

/// A way to read or write.
pub(super) struct FioPattern {
    pub(super) figure: &'static str,
    pub(super) name: &'static str,
    /// Of fio: its engine, the kind of access, the size of each.
    pub(super) options: &'static str,
    pub(super) initial_state: InitialState,
    /// Part of the file that each process moves: one in so many bytes.
    pub(super) size_divisor: u64,
    /// At once.
    pub(super) processes: u64,
}

/// The mounter of a file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum FileProvider {
    /// A file system of FUSE, for which the kernel keeps pages of its own.
    Fuse,
    /// The host's file system.
    Host,
}

impl FioPattern {
    pub(super) fn is_read_only(&self) -> bool {
        self.options.contains("--readonly")
    }
}

/// Moves the bytes of a file once: MB/s of all processes.
pub(super) fn run_pattern(
    shell: &mut Shell,
    (file, bytes): (&str, u64),
    pattern: &FioPattern,
    mounter: FileProvider,
) -> Result<f64> {
    prepare_file(shell, (file, bytes), pattern.initial_state)?;
    let moved = bytes / pattern.size_divisor;
    // fio drops the pages of the file that it names: those that are kept for FUSE, not the host's.
    // Of a plain directory those are the same.
    let is_dropped =
        mounter == FileProvider::Fuse && pattern.initial_state == InitialState::FusePagesCold;
    let line = format!(
        "--name=data --invalidate={} --filename={file} --size={bytes} --io_size={moved} \
         --numjobs={} --group_reporting {}",
        u8::from(is_dropped),
        pattern.processes,
        pattern.options
    );
    shell.run_fio(&line, moved * pattern.processes)
}

fn prepare_file(shell: &mut Shell, (file, bytes): (&str, u64), before: InitialState) -> Result<()> {
    let made = format!("head -c {bytes} /dev/urandom >{file}");
    let is_there = format!("test \"$(stat -c %s {file} 2>/dev/null)\" = {bytes}");
    match before {
        InitialState::NoFile => drop(shell.run_line(&format!("rm -f {file}; sync"))?),
        InitialState::Rewritten => {
            drop(shell.run_line(&format!("rm -f {file} && {made} && sync"))?)
        }
        InitialState::FusePagesCold | InitialState::PagesWarm => {
            shell.run_line(&format!(
                "{is_there} || {made}; sync; cat {file} >/dev/null"
            ))?;
        }
        InitialState::PagesCold => {
            let said = shell.run_line(&format!(
                "{{ {is_there} || {made}; }} && sync && \
                 echo 3 >/proc/sys/vm/drop_caches && echo cold"
            ))?;
            ensure!(said.trim() == "cold", "only root can empty the page cache");
        }
    }
    Ok(())
}
