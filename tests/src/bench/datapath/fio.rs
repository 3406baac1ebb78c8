//! Data that fio reads and writes, and what is where before it starts.

use anyhow::{Result, ensure};

use crate::bench::shell::Shell;

/// What is where before fio starts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Before {
    /// No file.
    Nothing,
    /// The file, none of it in memory.
    Cold,
    /// The file, of which the host has the pages, and the kernel none for FUSE.
    KernelCold,
    /// The file, all of it in memory.
    Warm,
    /// The file, written anew: where its pages came to lie is then chance for each round, and not
    /// for all rounds of a side at once.
    Remade,
}

/// A way to read or write.
pub(super) struct Pattern {
    pub(super) figure: &'static str,
    pub(super) name: &'static str,
    /// Of fio: its engine, the kind of access, the size of each.
    pub(super) options: &'static str,
    pub(super) before: Before,
    /// Part of the file that each process moves: one in so many bytes.
    pub(super) part: u64,
    /// At once.
    pub(super) processes: u64,
}

/// Who shows a file.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Shower {
    /// A file system of FUSE, for which the kernel keeps pages of its own.
    Fuse,
    /// The host's file system.
    Host,
}

impl Pattern {
    pub(super) fn only_reads(&self) -> bool {
        self.options.contains("--readonly")
    }
}

/// Moves the bytes of a file once: MB/s of all processes.
pub(super) fn run(
    shell: &mut Shell,
    (file, bytes): (&str, u64),
    pattern: &Pattern,
    shower: Shower,
) -> Result<f64> {
    prepare(shell, (file, bytes), pattern.before)?;
    let moved = bytes / pattern.part;
    // fio drops the pages of the file that it names: those that are kept for FUSE, not the host's.
    // Of a plain directory those are the same.
    let is_dropped = shower == Shower::Fuse && pattern.before == Before::KernelCold;
    let line = format!(
        "--name=data --invalidate={} --filename={file} --size={bytes} --io_size={moved} \
         --numjobs={} --group_reporting {}",
        u8::from(is_dropped),
        pattern.processes,
        pattern.options
    );
    shell.fio(&line, moved * pattern.processes)
}

fn prepare(shell: &mut Shell, (file, bytes): (&str, u64), before: Before) -> Result<()> {
    let made = format!("head -c {bytes} /dev/urandom >{file}");
    let is_there = format!("test \"$(stat -c %s {file} 2>/dev/null)\" = {bytes}");
    match before {
        Before::Nothing => drop(shell.run(&format!("rm -f {file}; sync"))?),
        Before::Remade => drop(shell.run(&format!("rm -f {file} && {made} && sync"))?),
        Before::KernelCold | Before::Warm => {
            shell.run(&format!(
                "{is_there} || {made}; sync; cat {file} >/dev/null"
            ))?;
        }
        Before::Cold => {
            let said = shell.run(&format!(
                "{{ {is_there} || {made}; }} && sync && \
                 echo 3 >/proc/sys/vm/drop_caches && echo cold"
            ))?;
            ensure!(said.trim() == "cold", "only root can empty the page cache");
        }
    }
    Ok(())
}
