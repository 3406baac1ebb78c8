//! A scratch volume of this machine, as `bafs mount` shows it, beside a plain directory of the same
//! file system: data by fio, names and attributes by a process of our own, alone and four at once.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::MIB;
use super::row;
use super::shown::Shown;
use super::work::{Work, rate_at_once};
use crate::bench::machine::{Cold, drop_caches};
use crate::bench::measure::{Samples, Way, interleave};
use crate::bench::{Options, Report};

/// What is where before fio starts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Before {
    /// No file.
    Nothing,
    /// The file, none of it in memory.
    Cold,
    /// The file, all of it in memory.
    Warm,
}

/// A way to read or write, as fio calls it.
struct Pattern {
    figure: &'static str,
    name: &'static str,
    options: &'static str,
    before: Before,
    /// Part of the file that is moved: one in so many bytes.
    part: u64,
}

const PATTERNS: [Pattern; 9] = [
    Pattern {
        figure: "local_read_cold",
        name: "read, cold",
        options: "--ioengine=psync --rw=read --bs=1M --readonly",
        before: Before::Cold,
        part: 1,
    },
    Pattern {
        figure: "local_read_warm",
        name: "read, warm",
        options: "--ioengine=psync --rw=read --bs=1M --readonly",
        before: Before::Warm,
        part: 1,
    },
    Pattern {
        figure: "local_rand_read",
        name: "read 4 KiB at random, warm",
        options: "--ioengine=psync --rw=randread --bs=4k --norandommap --readonly",
        before: Before::Warm,
        part: 1,
    },
    Pattern {
        figure: "local_mmap_read",
        name: "read by mmap, warm",
        options: "--ioengine=mmap --rw=read --bs=4k --readonly",
        before: Before::Warm,
        part: 1,
    },
    Pattern {
        figure: "local_write",
        name: "write",
        options: "--ioengine=psync --rw=write --bs=1M",
        before: Before::Nothing,
        part: 1,
    },
    Pattern {
        figure: "local_write_sync",
        name: "write and fsync",
        options: "--ioengine=psync --rw=write --bs=1M --end_fsync=1",
        before: Before::Nothing,
        part: 1,
    },
    Pattern {
        figure: "local_overwrite",
        name: "write over it",
        options: "--ioengine=psync --rw=write --bs=1M --overwrite=1",
        before: Before::Warm,
        part: 1,
    },
    Pattern {
        figure: "local_append",
        name: "write by 4 KiB",
        options: "--ioengine=psync --rw=write --bs=4k",
        before: Before::Nothing,
        part: 4,
    },
    Pattern {
        figure: "local_rand_write",
        name: "write 4 KiB at random",
        options: "--ioengine=psync --rw=randwrite --bs=4k --norandommap",
        before: Before::Warm,
        part: 8,
    },
];

/// Work on names, in an order in which each finds what it needs.
const NAMES: [Work; 8] = [
    Work::Create,
    Work::Stat,
    Work::StatAgain,
    Work::OpenRead,
    Work::List,
    Work::Absent,
    Work::Rename,
    Work::Unlink,
];

pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    let shown = Shown::near("20GB")?;
    let native = tempfile::tempdir()?;
    data(options, report, shown.path(), native.path())?;
    for processes in [1, 4] {
        names(options, report, shown.path(), native.path(), processes)?;
    }
    Ok(())
}

fn data(options: &Options, report: &mut Report, shown: &Path, native: &Path) -> Result<()> {
    let bytes = MIB * options.pick(512, 64);
    report.section(&format!(
        "{} MiB in a volume of this machine and in a plain directory, by fio: MB/s",
        bytes / MIB
    ));
    let mut rows = vec![row(["work", "volume", "directory", "volume / directory"])];
    for pattern in &PATTERNS {
        let way = |name, place: &Path| {
            let file = place.join("data");
            Way::new(name, move || fio(&file, bytes, pattern))
        };
        let mut ways = [way("volume", shown), way("directory", native)];
        let found = interleave(options.pick(5, 2), &mut ways)?;
        rows.push(compared(report, pattern.figure, pattern.name, &found));
    }
    report.table(&rows);
    Ok(())
}

/// One row, and its figure.
fn compared(report: &mut Report, figure: &str, name: &str, found: &[Samples]) -> Vec<String> {
    let ratio = found[0].ratio_to(&found[1]);
    report.measured(figure, &ratio);
    let cells = [name, &found[0].to_string(), &found[1].to_string()];
    [&cells[..], &[&ratio.to_string()]]
        .concat()
        .iter()
        .map(|cell| (*cell).to_owned())
        .collect()
}

/// Moves the bytes of a file once: MB/s.
fn fio(file: &Path, bytes: u64, pattern: &Pattern) -> Result<f64> {
    if pattern.before == Before::Nothing {
        if file.exists() {
            fs::remove_file(file)?;
        }
    } else if !fs::metadata(file).is_ok_and(|found| found.len() == bytes) {
        let fill = "--ioengine=psync --rw=write --bs=1M --end_fsync=1";
        call_fio(file, bytes, bytes, fill)?;
    }
    match pattern.before {
        Before::Nothing => nix::unistd::sync(),
        Before::Cold => ensure!(
            drop_caches(&[file])? == Cold::Everything,
            "only root can empty the page cache"
        ),
        Before::Warm => {
            std::io::copy(&mut fs::File::open(file)?, &mut std::io::sink())?;
        }
    }
    call_fio(file, bytes, bytes / pattern.part, pattern.options)
}

fn call_fio(file: &Path, bytes: u64, moved: u64, options: &str) -> Result<f64> {
    let output = Command::new("fio")
        .args(["--output-format=json", "--name=local", "--invalidate=0"])
        .arg(format!("--filename={}", file.display()))
        .arg(format!("--size={bytes}"))
        .arg(format!("--io_size={moved}"))
        .args(options.split(' '))
        .output()
        .context("fio")?;
    ensure!(output.status.success(), crate::said(&output));
    let found: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let part = |name: &str, field: &str| found["jobs"][0][name][field].as_u64().unwrap_or(0);
    let done = part("read", "io_bytes") + part("write", "io_bytes");
    ensure!(done == moved, "fio moved {done} bytes, not {moved}");
    // In whole milliseconds.
    let seconds = (part("read", "runtime") + part("write", "runtime")) as f64 / 1e3;
    ensure!(seconds > 0.0, "too short to be measured");
    Ok(moved as f64 / seconds / 1e6)
}

fn names(
    options: &Options,
    report: &mut Report,
    shown: &Path,
    native: &Path,
    processes: usize,
) -> Result<()> {
    let files = options.pick(5_000, 500);
    report.section(&format!(
        "{processes} x {files} files of 4 KiB in a volume of this machine and in a plain \
         directory: files/s"
    ));
    let places = [shown, native];
    let values = std::cell::RefCell::new(vec![[Vec::new(), Vec::new()]; NAMES.len()]);
    let mut ways = [0, 1].map(|place| {
        let values = &values;
        Way::new(["volume", "directory"][place], move || {
            for (index, work) in NAMES.into_iter().enumerate() {
                let found = rate_at_once(work, places[place], files, processes)?;
                values.borrow_mut()[index][place].push(found);
            }
            Ok(0.0)
        })
    });
    interleave(options.pick(5, 2), &mut ways)?;
    drop(ways);
    let mut rows = vec![row(["work", "volume", "directory", "volume / directory"])];
    for (work, values) in NAMES.iter().zip(values.into_inner()) {
        let found = values.map(Samples::new);
        let figure = format!("local_{}_{processes}", work.name());
        rows.push(compared(report, &figure, work.name(), &found));
    }
    report.table(&rows);
    Ok(())
}
