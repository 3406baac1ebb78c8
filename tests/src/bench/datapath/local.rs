//! A scratch volume of this machine, as `bafs mount` shows it, beside a plain directory of the same
//! file system: data by fio, names and attributes by a process of our own, alone and four at once.

use std::cell::RefCell;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::fio::{self, Before, Pattern, Shower};
use super::shown::{Shown, near_world};
use super::work::{Work, arguments, rate_of};
use super::{MIB, row};
use crate::bench::machine::Spread;
use crate::bench::measure::{Samples, Way, interleave};
use crate::bench::shell::Shell;
use crate::bench::smallest::least::{Kind, LeastShown};
use crate::bench::{Options, Report};

const PATTERNS: [Pattern; 9] = [
    Pattern {
        figure: "read_cold",
        name: "read, cold",
        options: "--ioengine=psync --rw=read --bs=1M --readonly",
        before: Before::Cold,
        part: 1,
        processes: 1,
    },
    Pattern {
        figure: "read_warm",
        name: "read, warm",
        options: "--ioengine=psync --rw=read --bs=1M --readonly",
        before: Before::Warm,
        part: 1,
        processes: 1,
    },
    Pattern {
        figure: "rand_read",
        name: "read 4 KiB at random, warm",
        options: "--ioengine=psync --rw=randread --bs=4k --norandommap --readonly",
        before: Before::Warm,
        part: 1,
        processes: 1,
    },
    Pattern {
        figure: "mmap_read",
        name: "read by mmap, warm",
        options: "--ioengine=mmap --rw=read --bs=4k --readonly",
        before: Before::Warm,
        part: 1,
        processes: 1,
    },
    Pattern {
        figure: "write",
        name: "write",
        options: "--ioengine=psync --rw=write --bs=1M",
        before: Before::Nothing,
        part: 1,
        processes: 1,
    },
    Pattern {
        figure: "write_sync",
        name: "write and fsync",
        options: "--ioengine=psync --rw=write --bs=1M --end_fsync=1",
        before: Before::Nothing,
        part: 1,
        processes: 1,
    },
    Pattern {
        figure: "overwrite",
        name: "write over it",
        options: "--ioengine=psync --rw=write --bs=1M --overwrite=1",
        before: Before::Remade,
        part: 1,
        processes: 1,
    },
    Pattern {
        figure: "append",
        name: "write by 4 KiB",
        options: "--ioengine=psync --rw=write --bs=4k",
        before: Before::Nothing,
        part: 4,
        processes: 1,
    },
    Pattern {
        figure: "rand_write",
        name: "write 4 KiB at random",
        options: "--ioengine=psync --rw=randwrite --bs=4k --norandommap",
        before: Before::Remade,
        part: 8,
        processes: 1,
    },
];

/// Only where the kernel collects writes: elsewhere each byte is a message.
const BYTES: Pattern = Pattern {
    figure: "bytes",
    name: "write by single bytes",
    options: "--ioengine=psync --rw=write --bs=1",
    before: Before::Nothing,
    part: 256,
    processes: 1,
};

/// Work on names, in an order in which each finds what it needs.
const NAMES: [Work; 9] = [
    Work::Create,
    Work::Stat,
    Work::StatAgain,
    Work::OpenRead,
    Work::List,
    Work::ListAgain,
    Work::Absent,
    Work::Rename,
    Work::Unlink,
];

/// How figures end that compare a plain directory with another one: the scatter of all others.
const CONTROL: &str = "_control";

/// Which place is compared with which, and how the figure ends: the volume with a plain directory,
/// another such directory with that one; the volume with the smallest file systems, bare and
/// strict; the volume by rings with the bare one.
const PAIRS: [(usize, usize, &str); 5] = [
    (0, 1, ""),
    (2, 1, CONTROL),
    (0, 3, "_vs_least"),
    (0, 4, "_vs_strict"),
    (5, 3, "_ring_vs_least"),
];

/// Where the programs of a comparison run, and where the two sides are there.
struct Comparison<'a> {
    /// Figures begin so.
    prefix: &'a str,
    /// The figure of reads of pages in memory.
    warm: &'a str,
    shell: RefCell<Shell>,
    volume: String,
    directory: String,
    /// A second plain directory, made as the first one.
    control: String,
    /// Where the smallest file systems of the same crate, bare and strict, show a plain directory.
    least: Option<[String; 2]>,
    /// Where a volume is that the kernel asks by rings, beside those.
    ring: Option<String>,
}

pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    let shown = Shown::near("20GB")?;
    let native = Spread::new()?;
    let (bare, strict) = (
        LeastShown::start(Kind::Bare)?,
        LeastShown::start(Kind::Strict)?,
    );
    let ring = Shown::by_rings("20GB");
    let ring = ring.inspect_err(|reason| {
        report.not_measured("meta_ring_vs_min_fuse", &format!("{reason:#}"));
    });
    let ring = ring.ok();
    let comparison = Comparison {
        prefix: "local",
        warm: "unpriv_warm",
        shell: RefCell::new(Shell::host()?),
        volume: text(shown.path())?,
        directory: text(&native.directory("directory")?)?,
        control: text(&native.directory("control")?)?,
        least: Some([text(bare.path())?, text(strict.path())?]),
        ring: ring.as_ref().map(|shown| text(shown.path())).transpose()?,
    };
    report.section("a volume of this machine as `bafs mount` shows it, beside a plain directory");
    compare(options, report, &comparison)
}

/// The same in a job, of a volume whose limit is watched: its directory itself is shown.
pub(super) fn run_bound(options: &Options, report: &mut Report) -> Result<()> {
    let world = near_world("20GB", &["--limit", "watched"])?;
    let native = Spread::new()?;
    let comparison = Comparison {
        prefix: "direct",
        warm: "direct_warm",
        shell: RefCell::new(Shell::job(&world, "work:/data")?),
        volume: "/data".to_owned(),
        directory: text(&native.directory("directory")?)?,
        control: text(&native.directory("control")?)?,
        least: None,
        ring: None,
    };
    report.section("a watched volume of this machine in a job, beside a plain directory");
    compare(options, report, &comparison)
}

/// The same data of a volume whose writes the kernel collects: what is written.
pub(super) fn run_collected(options: &Options, report: &mut Report) -> Result<()> {
    let shown = Shown::collecting("20GB")?;
    let native = Spread::new()?;
    let comparison = Comparison {
        prefix: "collected",
        warm: "collected_warm",
        shell: RefCell::new(Shell::host()?),
        volume: text(shown.path())?,
        directory: text(&native.directory("directory")?)?,
        control: text(&native.directory("control")?)?,
        least: None,
        ring: None,
    };
    report.section("a volume of this machine that collects writes, beside a plain directory");
    let written = PATTERNS
        .iter()
        .filter(|it| !it.only_reads())
        .chain([&BYTES]);
    data(options, report, &comparison, written)?;
    Ok(())
}

fn text(path: &Path) -> Result<String> {
    let path = path.to_str().context("a temporary path is text")?;
    Ok(path.to_owned())
}

/// All rows; the least of the data rows and that of the others are figures of their own.
fn compare(options: &Options, report: &mut Report, comparison: &Comparison<'_>) -> Result<()> {
    let [data, data_control] = data(options, report, comparison, PATTERNS.iter())?;
    let warm = PATTERNS.iter().zip(&data);
    let warm = warm.filter(|(pattern, _)| pattern.only_reads());
    let warm = warm.filter(|(pattern, _)| pattern.before == Before::Warm);
    report.figure(comparison.warm, least(warm.map(|(_, ratio)| *ratio)));
    let mut by: [Vec<f64>; PAIRS.len()] = Default::default();
    for processes in [1, 4] {
        for ratios in names(options, report, comparison, processes)? {
            by.iter_mut()
                .zip(ratios)
                .for_each(|(all, it)| all.extend(it));
        }
    }
    let [by_directory, control, by_bare, by_strict, ring_by_bare] = by;
    for (kind, ratios, control) in [
        ("data", data, data_control),
        ("meta", by_directory, control),
    ] {
        let figure = format!("{}_{kind}", comparison.prefix);
        report.figure(&figure, least(ratios.into_iter()));
        report.figure(&(figure + CONTROL), least(control.into_iter()));
    }
    if comparison.least.is_some() {
        report.figure("meta_vs_min_fuse", least(by_bare.into_iter()));
        report.figure("meta_vs_strict_fuse", least(by_strict.into_iter()));
    }
    if comparison.ring.is_some() {
        report.figure("meta_ring_vs_min_fuse", least(ring_by_bare.into_iter()));
    }
    Ok(())
}

fn least(ratios: impl Iterator<Item = f64>) -> f64 {
    ratios.fold(f64::INFINITY, f64::min)
}

/// The ratios of the volume to the directory, and of the control to it.
fn data<'p>(
    options: &Options,
    report: &mut Report,
    comparison: &Comparison<'_>,
    patterns: impl Iterator<Item = &'p Pattern>,
) -> Result<[Vec<f64>; 2]> {
    let bytes = MIB * options.pick(512, 64);
    report.say(&format!("{} MiB by fio: MB/s", bytes / MIB));
    let mut rows = vec![row([
        "work",
        "volume",
        "directory",
        "volume / directory",
        "control / directory",
    ])];
    let mut ratios = [Vec::new(), Vec::new()];
    for pattern in patterns {
        let way = |name, place: &str| {
            let file = format!("{place}/data");
            Way::new(name, move || {
                let mut shell = comparison.shell.borrow_mut();
                fio::run(&mut shell, (&file, bytes), pattern, Shower::Host)
            })
        };
        let mut ways = [
            way("volume", &comparison.volume),
            way("directory", &comparison.directory),
            way("control", &comparison.control),
        ];
        let found = interleave(options.pick(5, 2), &mut ways)?;
        let figure = format!("{}_{}", comparison.prefix, pattern.figure);
        let both = compared(report, &figure, pattern.name, &found, &mut rows);
        ratios
            .iter_mut()
            .zip(both)
            .for_each(|(all, it)| all.push(it));
    }
    report.table(&rows);
    Ok(ratios)
}

/// Adds a row of a volume, a directory and another one with its figures, and returns the ratios of
/// the first and of the last to the directory.
fn compared(
    report: &mut Report,
    figure: &str,
    name: &str,
    found: &[Samples],
    rows: &mut Vec<Vec<String>>,
) -> [f64; 2] {
    let (ratio, control) = (found[0].ratio_to(&found[1]), found[2].ratio_to(&found[1]));
    report.measured(figure, &ratio);
    report.measured(&format!("{figure}{CONTROL}"), &control);
    rows.push(row([
        name,
        &found[0].to_string(),
        &found[1].to_string(),
        &ratio.to_string(),
        &control.to_string(),
    ]));
    [ratio.median(), control.median()]
}

/// For each work the ratios of [`PAIRS`].
fn names(
    options: &Options,
    report: &mut Report,
    comparison: &Comparison<'_>,
    processes: usize,
) -> Result<Vec<[Option<f64>; PAIRS.len()]>> {
    let files = options.pick(5_000, 500);
    report.say(&format!("{processes} x {files} files of 4 KiB: files/s"));
    let mut places = vec![
        ("volume", &comparison.volume),
        ("directory", &comparison.directory),
        ("control", &comparison.control),
    ];
    if let Some([bare, strict]) = &comparison.least {
        places.extend([("bare FUSE", bare), ("strict FUSE", strict)]);
    }
    if let Some(ring) = &comparison.ring {
        places.push(("by rings", ring));
    }
    let values = RefCell::new(vec![vec![Vec::new(); places.len()]; NAMES.len()]);
    let mut ways: Vec<Way<'_>> = Vec::new();
    for (place, (name, path)) in places.iter().enumerate() {
        let values = &values;
        ways.push(Way::new(name, move || {
            for (index, work) in NAMES.into_iter().enumerate() {
                let mut shell = comparison.shell.borrow_mut();
                if matches!(work, Work::Create | Work::Stat) {
                    // What others wrote, and these files, would else be written meanwhile.
                    shell.run("sync")?;
                }
                let found = at_once(&mut shell, work, path, files, processes)?;
                values.borrow_mut()[index][place].push(found);
            }
            Ok(0.0)
        }));
    }
    interleave(options.pick(5, 2), &mut ways)?;
    drop(ways);
    let mut head: Vec<String> = vec!["work".to_owned()];
    head.extend(places.iter().map(|(name, _)| (*name).to_owned()));
    head.extend(PAIRS.iter().filter_map(|(one, other, _)| {
        let (one, other) = (places.get(*one)?.0, places.get(*other)?.0);
        Some(format!("{one} / {other}"))
    }));
    let (mut rows, mut ratios) = (vec![head], Vec::new());
    for (work, values) in NAMES.iter().zip(values.into_inner()) {
        let found: Vec<Samples> = values.into_iter().map(Samples::new).collect();
        let name = work.name();
        let mut cells = vec![name.to_owned()];
        cells.extend(found.iter().map(Samples::to_string));
        let medians = PAIRS.map(|(one, other, end)| {
            let ratio = found.get(one)?.ratio_to(found.get(other)?);
            let figure = format!("{}_{name}_{processes}{end}", comparison.prefix);
            report.measured(&figure, &ratio);
            cells.push(ratio.to_string());
            Some(ratio.median())
        });
        rows.push(cells);
        ratios.push(medians);
    }
    report.table(&rows);
    Ok(ratios)
}

/// The rate of so many processes at once, each with files of its own.
pub(super) fn at_once(
    shell: &mut Shell,
    work: Work,
    place: &str,
    files: u64,
    processes: usize,
) -> Result<f64> {
    let program = std::env::current_exe()?;
    let program = program.display();
    let one = arguments(work, "$own", files).join(" ");
    let line = format!(
        "for i in $(seq {processes}); do own={place}/process-$i; mkdir -p $own; {program} {one} & \
         done; wait"
    );
    let said = shell.run(&line)?;
    let rates: Result<Vec<f64>> = said
        .lines()
        .map(|line| rate_of(work, files, line))
        .collect();
    let rates = rates?;
    ensure!(rates.len() == processes, "{}: {said}", work.name());
    Ok(rates.iter().sum())
}
