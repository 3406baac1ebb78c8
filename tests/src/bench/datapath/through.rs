//! Data of a volume of this machine that goes through its agent, by threads and by rings, beside
//! the smallest file system of the same crate, which passes a plain directory on, and beside such a
//! directory itself. Reads find no pages that the kernel keeps for FUSE, but all of the host's;
//! warm ones find both, which is what the kernel gives without any agent.

use std::cell::RefCell;

use anyhow::Result;

use super::least::{Kind, LeastShown};
use super::shown::Shown;
use super::{MIB, row};
use crate::bench::machine::Spread;
use crate::bench::measure::{Way, interleave};
use crate::bench::shell::Shell;
use crate::bench::{Options, Report};

/// What is where before fio starts.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Before {
    /// No file.
    Nothing,
    /// The file, of which the host has the pages, and the kernel none for FUSE.
    KernelCold,
    /// The file, with the kernel's pages too.
    Warm,
}

/// A way to read or write.
struct Pattern {
    name: &'static str,
    figure: &'static str,
    /// Of fio.
    options: &'static str,
    before: Before,
    /// Processes, each of which moves a part of the file: one in so many bytes.
    processes: u64,
    part: u64,
}

const PATTERNS: [Pattern; 7] = [
    Pattern {
        name: "read",
        figure: "read",
        options: "--rw=read --bs=1M --readonly",
        before: Before::KernelCold,
        processes: 1,
        part: 1,
    },
    Pattern {
        name: "read 4 KiB at random",
        figure: "rand_1",
        options: "--rw=randread --bs=4k --norandommap --readonly",
        before: Before::KernelCold,
        processes: 1,
        part: 4,
    },
    Pattern {
        name: "the same by two at once",
        figure: "rand_2",
        options: "--rw=randread --bs=4k --norandommap --readonly --numjobs=2 --group_reporting",
        before: Before::KernelCold,
        processes: 2,
        part: 4,
    },
    Pattern {
        name: "read, warm",
        figure: "warm",
        options: "--rw=read --bs=1M --readonly",
        before: Before::Warm,
        processes: 1,
        part: 1,
    },
    Pattern {
        name: "read 4 KiB at random, warm",
        figure: "warm_rand",
        options: "--rw=randread --bs=4k --norandommap --readonly",
        before: Before::Warm,
        processes: 1,
        part: 1,
    },
    Pattern {
        name: "write",
        figure: "write",
        options: "--rw=write --bs=1M",
        before: Before::Nothing,
        processes: 1,
        part: 1,
    },
    Pattern {
        name: "write by 4 KiB",
        figure: "append",
        options: "--rw=write --bs=4k",
        before: Before::Nothing,
        processes: 1,
        part: 4,
    },
];

pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    let shown = Shown::near("4GB")?;
    let least = LeastShown::start(Kind::Bare)?;
    let native = Spread::new()?;
    let directory = native.directory("directory")?;
    let ring = Shown::by_rings("4GB");
    let ring = ring.inspect_err(|reason| {
        report.not_measured("through_ring", &format!("{reason:#}"));
    });
    let ring = ring.ok();
    let mut places = vec![
        ("volume", shown.path()),
        ("bare FUSE", least.path()),
        ("directory", directory.as_path()),
    ];
    places.extend(ring.as_ref().map(|ring| ("by rings", ring.path())));
    report.section("data through the agent, beside the smallest FUSE: MB/s");
    let mut head: Vec<String> = vec!["work".to_owned()];
    head.extend(places.iter().map(|(name, _)| (*name).to_owned()));
    let ratios = ["volume / bare", "volume / directory", "bare / directory"];
    head.extend(ratios.map(str::to_owned));
    let mut rows = vec![head];
    let shell = RefCell::new(Shell::host()?);
    let bytes = MIB * options.pick(512, 64);
    for pattern in &PATTERNS {
        let way = |(name, place): &(&'static str, &std::path::Path)| {
            let file = format!("{}/data", place.display());
            let is_native = *name == "directory";
            let shell = &shell;
            Way::new(name, move || {
                fio(&mut shell.borrow_mut(), &file, bytes, pattern, is_native)
            })
        };
        let mut ways: Vec<Way<'_>> = places.iter().map(way).collect();
        let found = interleave(options.pick(5, 2), &mut ways)?;
        let mut cells = row([pattern.name]);
        cells.extend(found.iter().map(ToString::to_string));
        let pairs = [(0, 1, "vs_least"), (0, 2, "vs_native"), (1, 2, "floor")];
        for (one, other, end) in pairs {
            let ratio = found[one].ratio_to(&found[other]);
            report.measured(&format!("through_{}_{end}", pattern.figure), &ratio);
            cells.push(ratio.to_string());
        }
        if let Some(ring) = found.get(3) {
            let ratio = ring.ratio_to(&found[1]);
            report.measured(&format!("through_{}_ring_vs_least", pattern.figure), &ratio);
        }
        rows.push(cells);
    }
    report.table(&rows);
    Ok(())
}

/// Moves bytes once: MB/s.
fn fio(
    shell: &mut Shell,
    file: &str,
    bytes: u64,
    pattern: &Pattern,
    is_native: bool,
) -> Result<f64> {
    shell.run(&match pattern.before {
        Before::Nothing => format!("rm -f {file}; sync"),
        Before::KernelCold | Before::Warm => format!(
            "test \"$(stat -c %s {file} 2>/dev/null)\" = {bytes} || \
             head -c {bytes} /dev/urandom >{file}; sync; cat {file} >/dev/null"
        ),
    })?;
    let moved = bytes / pattern.part;
    // fio drops the pages of the file that it names: those that FUSE keeps, not the host's. Of a
    // plain directory those are the same.
    let invalidate = u8::from(!is_native && pattern.before == Before::KernelCold);
    let line = format!(
        "--name=through --ioengine=psync --invalidate={invalidate} --filename={file} \
         --size={bytes} --io_size={moved} {}",
        pattern.options
    );
    shell.fio(&line, moved * pattern.processes)
}
