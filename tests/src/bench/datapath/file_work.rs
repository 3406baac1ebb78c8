//! File operations of programs, in a process of their own, so that only its own waiting is
//! measured.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use rustix::fs::statvfs;

use crate::bench::measure::time_seconds;
use crate::bench::shell::run_program;

pub(super) const MIB: u64 = 1 << 20;

/// Hidden first argument: this process works on files and prints how many seconds that took.
pub(in crate::bench) const WORK_PROCESS: &str = "--datapath-work";

/// Bytes of a small file.
const SMALL_FILE_BYTES: usize = 4 << 10;

/// Work on one large file or on many small ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum FileWork {
    /// Writes a file of so many MiB and closes it; ends when another program could see it all.
    Write,
    /// The same, with fsync before the close.
    WriteSync,
    /// Reads it when this machine's kernel has nothing of it.
    ReadCold,
    /// Reads it once more.
    ReadWarm,
    /// Makes so many files of 4 KiB.
    Create,
    /// Asks for their attributes.
    Stat,
    /// Asks for them four times more.
    StatRepeated,
    /// Lists the directory and asks for the attributes of each.
    List,
    /// Does that four times more.
    ListRepeated,
    /// Asks for so many files that are not there, twice.
    LookupMissing,
    /// Gives each another name, and its own again.
    Rename,
    /// Opens and reads each.
    OpenRead,
    /// Asks for their attributes when the kernels of both sides have nothing of them,
    StatCold,
    /// opens and reads each then,
    OpenReadCold,
    /// or lists the directory and asks for the attributes of each.
    ListCold,
    /// Removes them.
    Unlink,
}

impl FileWork {
    /// The operations to measure against peers.
    pub(super) const COMPARED_WITH_PEERS: [Self; 11] = [
        Self::Write,
        Self::WriteSync,
        Self::ReadCold,
        Self::ReadWarm,
        Self::Create,
        Self::Stat,
        Self::OpenRead,
        Self::StatCold,
        Self::OpenReadCold,
        Self::ListCold,
        Self::Unlink,
    ];

    /// Those of many small files that no kernel has in memory.
    pub(super) const COLD_SMALL_FILES: [Self; 3] =
        [Self::StatCold, Self::OpenReadCold, Self::ListCold];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::WriteSync => "write+fsync",
            Self::ReadCold => "read-cold",
            Self::ReadWarm => "read-again",
            Self::Create => "create",
            Self::Stat => "stat",
            Self::StatRepeated => "stat-again",
            Self::List => "list+stat",
            Self::ListRepeated => "list+stat-again",
            Self::LookupMissing => "absent",
            Self::Rename => "rename",
            Self::OpenRead => "open+read",
            Self::StatCold => "stat-cold",
            Self::OpenReadCold => "open+read-cold",
            Self::ListCold => "list+stat-cold",
            Self::Unlink => "unlink",
        }
    }

    pub(super) fn is_bulk(self) -> bool {
        matches!(
            self,
            Self::Write | Self::WriteSync | Self::ReadCold | Self::ReadWarm
        )
    }

    fn parse(name: &str) -> Result<Self> {
        let others = [
            Self::StatRepeated,
            Self::List,
            Self::ListRepeated,
            Self::LookupMissing,
            Self::Rename,
        ];
        let mut all = Self::COMPARED_WITH_PEERS.into_iter().chain(others);
        let found = all.find(|work| work.name() == name);
        found.with_context(|| format!("'{name}' is no work"))
    }
}

/// Arguments of the process that does `work` on `amount` MiB or files below `directory`.
pub(super) fn process_arguments(work: FileWork, directory: &str, amount: u64) -> [String; 4] {
    let amount = amount.to_string();
    [WORK_PROCESS, work.name(), directory, &amount].map(str::to_owned)
}

/// Does it in a process of its own: MB/s, or files per second.
pub(super) fn measure_rate(work: FileWork, directory: &Path, amount: u64) -> Result<f64> {
    let directory = directory.to_str().context("a temporary path is text")?;
    let mut command = Command::new(std::env::current_exe()?);
    let output = run_program(command.args(process_arguments(work, directory, amount)))?;
    let name = work.name();
    ensure!(
        output.status.success(),
        "{name} on {directory}: {}",
        crate::printed_text(&output)
    );
    parse_rate(work, amount, &String::from_utf8_lossy(&output.stdout))
}

/// The rate in the process's output.
pub(super) fn parse_rate(work: FileWork, amount: u64, said: &str) -> Result<f64> {
    let took: f64 = said.trim().parse().with_context(|| said.to_owned())?;
    let done = if work.is_bulk() {
        (amount * MIB) as f64 / 1e6
    } else {
        amount as f64
    };
    Ok(done / took)
}

/// The process. Arguments: work, directory, amount.
pub(in crate::bench) fn run_work_process(arguments: &[String]) -> Result<()> {
    let [work, directory, amount] = arguments else {
        bail!("work needs a name, a directory and an amount");
    };
    let (work, directory) = (FileWork::parse(work)?, Path::new(directory));
    let amount: u64 = amount.parse()?;
    let file = directory.join("large");
    let took = match work {
        FileWork::Write | FileWork::WriteSync => {
            // Not part of the measurement: an older file would have to be truncated first.
            if file.exists() {
                fs::remove_file(&file)?;
            }
            let sync = work == FileWork::WriteSync;
            time_seconds(|| write_file(directory, &file, amount, sync))?.0
        }
        FileWork::ReadCold => {
            let opened = File::open(&file)?;
            posix_fadvise(&opened, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)?;
            drop(opened);
            time_seconds(|| read_file(&file, amount))?.0
        }
        FileWork::ReadWarm => time_seconds(|| read_file(&file, amount))?.0,
        _ => {
            let directory = directory.join("small");
            fs::create_dir_all(&directory)?;
            if FileWork::COLD_SMALL_FILES.contains(&work) {
                // Written pages cannot be dropped.
                nix::unistd::sync();
                fs::write("/proc/sys/vm/drop_caches", "3").context("caches are dropped by root")?;
            }
            time_seconds(|| run_on_files(work, &directory, amount))?.0
        }
    };
    println!("{took}");
    Ok(())
}

fn write_file(directory: &Path, path: &Path, mib: u64, sync: bool) -> Result<()> {
    let piece: Vec<u8> = (0..MIB).map(|at| (at * 31 / 7) as u8).collect();
    let mut file = File::create(path)?;
    for _ in 0..mib {
        file.write_all(&piece)?;
    }
    if sync {
        file.sync_all()?;
    }
    drop(file);
    wait_for_server(directory)
}

/// The server reports the free space, so it must have seen all earlier operations.
fn wait_for_server(directory: &Path) -> Result<()> {
    statvfs(directory)?;
    Ok(())
}

fn read_file(path: &Path, mib: u64) -> Result<()> {
    let mut file = File::open(path)?;
    let mut piece = vec![0; MIB as usize];
    let mut found = 0;
    loop {
        match file.read(&mut piece)? {
            0 => break,
            count => found += count as u64,
        }
    }
    ensure!(found == mib * MIB, "{found} bytes were read");
    Ok(())
}

fn run_on_files(work: FileWork, directory: &Path, files: u64) -> Result<()> {
    let rounds = match work {
        FileWork::StatRepeated | FileWork::ListRepeated => 4,
        FileWork::LookupMissing => 2,
        _ => 1,
    };
    match work {
        FileWork::List | FileWork::ListRepeated | FileWork::ListCold => {
            (0..rounds).try_for_each(|_| list_directory(directory, files))?
        }
        _ => (0..files * rounds)
            .try_for_each(|number| run_on_file(work, directory, number % files))?,
    }
    if matches!(work, FileWork::Create | FileWork::Rename | FileWork::Unlink) {
        wait_for_server(directory)?;
    }
    Ok(())
}

fn run_on_file(work: FileWork, directory: &Path, number: u64) -> Result<()> {
    let path = directory.join(format!("file-{number}"));
    match work {
        FileWork::Create => {
            let options = OpenOptions::new().write(true).create_new(true).clone();
            options
                .open(path)?
                .write_all(&[number as u8; SMALL_FILE_BYTES])?;
        }
        FileWork::Stat | FileWork::StatRepeated | FileWork::StatCold => {
            let bytes = fs::metadata(&path)?.len();
            ensure!(
                bytes == SMALL_FILE_BYTES as u64,
                "{bytes} bytes in {path:?}"
            );
        }
        FileWork::OpenRead | FileWork::OpenReadCold => {
            let found = fs::read(&path)?;
            ensure!(
                found == [number as u8; SMALL_FILE_BYTES],
                "wrong bytes in {path:?}"
            );
        }
        FileWork::LookupMissing => {
            let there = directory.join(format!("absent-{number}")).exists();
            ensure!(!there, "a file that nobody made");
        }
        FileWork::Rename => {
            let other = directory.join(format!("other-{number}"));
            fs::rename(&path, &other)?;
            fs::rename(&other, &path)?;
        }
        _ => fs::remove_file(&path)?,
    }
    Ok(())
}

fn list_directory(directory: &Path, files: u64) -> Result<()> {
    let mut bytes = 0;
    for entry in fs::read_dir(directory)? {
        bytes += entry?.metadata()?.len();
    }
    ensure!(
        bytes == files * SMALL_FILE_BYTES as u64,
        "{bytes} bytes in all"
    );
    Ok(())
}
