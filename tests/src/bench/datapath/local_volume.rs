//! A scratch volume of this machine, as `bafs mount` shows it, beside a plain directory of the same
//! file system: data by fio, names and attributes by a process of our own, alone and four at once.

use std::cell::RefCell;
use std::path::Path;

use anyhow::{Context, Result, ensure};

use super::file_work::{FileWork, MIB, parse_rate, process_arguments};
use super::fio::{self, FileProvider, FioPattern, InitialState};
use super::mounted_scratch::{MountedScratch, start_local_cluster};
use super::programs::{self, PROGRAMS};
use crate::bench::machine::SpreadDirectories;
use crate::bench::measure::{BenchmarkVariant, Samples, run_interleaved, table_row};
use crate::bench::minimal_file_systems::forwarding::{ForwardingMode, ForwardingMount};
use crate::bench::shell::Shell;
use crate::bench::{BenchmarkReport, Options};

const PATTERNS: [FioPattern; 9] = [
    FioPattern {
        figure: "read_cold",
        name: "read, cold",
        options: "--ioengine=psync --rw=read --bs=1M --readonly",
        initial_state: InitialState::PagesCold,
        size_divisor: 1,
        processes: 1,
    },
    FioPattern {
        figure: "read_warm",
        name: "read, warm",
        options: "--ioengine=psync --rw=read --bs=1M --readonly",
        initial_state: InitialState::PagesWarm,
        size_divisor: 1,
        processes: 1,
    },
    FioPattern {
        figure: "rand_read",
        name: "read 4 KiB at random, warm",
        options: "--ioengine=psync --rw=randread --bs=4k --norandommap --readonly",
        initial_state: InitialState::PagesWarm,
        size_divisor: 1,
        processes: 1,
    },
    FioPattern {
        figure: "mmap_read",
        name: "read by mmap, warm",
        options: "--ioengine=mmap --rw=read --bs=4k --readonly",
        initial_state: InitialState::PagesWarm,
        size_divisor: 1,
        processes: 1,
    },
    FioPattern {
        figure: "write",
        name: "write",
        options: "--ioengine=psync --rw=write --bs=1M",
        initial_state: InitialState::NoFile,
        size_divisor: 1,
        processes: 1,
    },
    FioPattern {
        figure: "write_sync",
        name: "write and fsync",
        options: "--ioengine=psync --rw=write --bs=1M --end_fsync=1",
        initial_state: InitialState::NoFile,
        size_divisor: 1,
        processes: 1,
    },
    FioPattern {
        figure: "overwrite",
        name: "write over it",
        options: "--ioengine=psync --rw=write --bs=1M --overwrite=1",
        initial_state: InitialState::Rewritten,
        size_divisor: 1,
        processes: 1,
    },
    FioPattern {
        figure: "append",
        name: "write by 4 KiB",
        options: "--ioengine=psync --rw=write --bs=4k",
        initial_state: InitialState::NoFile,
        size_divisor: 4,
        processes: 1,
    },
    FioPattern {
        figure: "rand_write",
        name: "write 4 KiB at random",
        options: "--ioengine=psync --rw=randwrite --bs=4k --norandommap",
        initial_state: InitialState::Rewritten,
        size_divisor: 8,
        processes: 1,
    },
];

/// Only where the kernel collects writes: elsewhere each byte is a message.
const BYTES_PATTERN: FioPattern = FioPattern {
    figure: "bytes",
    name: "write by single bytes",
    options: "--ioengine=psync --rw=write --bs=1",
    initial_state: InitialState::NoFile,
    size_divisor: 256,
    processes: 1,
};

/// Name operations, in an order in which each finds its input.
const NAME_WORK: [FileWork; 9] = [
    FileWork::Create,
    FileWork::Stat,
    FileWork::StatRepeated,
    FileWork::OpenRead,
    FileWork::List,
    FileWork::ListRepeated,
    FileWork::LookupMissing,
    FileWork::Rename,
    FileWork::Unlink,
];

/// How figures end that compare a plain directory with another one: the scatter of all others.
const CONTROL_SUFFIX: &str = "_control";

/// The compared places, and the suffix of the figure: the volume with a plain directory, another
/// such directory with that one; the volume with the smallest file systems, bare and strict; the
/// volume by rings with the bare one.
const COMPARED_PAIRS: [(usize, usize, &str); 5] = [
    (0, 1, ""),
    (2, 1, CONTROL_SUFFIX),
    (0, 3, "_vs_least"),
    (0, 4, "_vs_strict"),
    (5, 3, "_ring_vs_least"),
];

/// Where the programs of a comparison run, and the paths of its two sides.
struct VolumeComparison<'a> {
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
    minimal: Option<[String; 2]>,
    /// Where a volume is that the kernel asks by rings, beside those.
    ring: Option<String>,
}

pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    let shown = MountedScratch::start_local("20GB")?;
    let native = SpreadDirectories::new()?;
    let (bare, strict) = (
        ForwardingMount::start(ForwardingMode::Bare)?,
        ForwardingMount::start(ForwardingMode::Strict)?,
    );
    let ring = MountedScratch::start_with_rings("20GB");
    let ring = ring.inspect_err(|reason| {
        report.add_missing("meta_ring_vs_min_fuse", &format!("{reason:#}"));
    });
    let ring = ring.ok();
    let comparison = VolumeComparison {
        prefix: "local",
        warm: "unpriv_warm",
        shell: RefCell::new(Shell::start_on_host()?),
        volume: path_text(shown.path())?,
        directory: path_text(&native.create_directory("directory")?)?,
        control: path_text(&native.create_directory("control")?)?,
        minimal: Some([path_text(bare.path())?, path_text(strict.path())?]),
        ring: ring
            .as_ref()
            .map(|shown| path_text(shown.path()))
            .transpose()?,
    };
    report.print_section(
        "a volume of this machine as `bafs mount` shows it, beside a plain directory",
    );
    compare_volume(options, report, &comparison)
}

/// The same in a job, of a volume that is made without options: its directory itself is shown.
pub(super) fn run_bind_mount(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    let world = start_local_cluster("20GB", &[], "16GB")?;
    let native = SpreadDirectories::new()?;
    let comparison = VolumeComparison {
        prefix: "direct",
        warm: "direct_warm",
        shell: RefCell::new(Shell::start_in_job(&world, "work:/data")?),
        volume: "/data".to_owned(),
        directory: path_text(&native.create_directory("directory")?)?,
        control: path_text(&native.create_directory("control")?)?,
        minimal: None,
        ring: None,
    };
    report.print_section("a volume of this machine in a job, beside a plain directory");
    compare_volume(options, report, &comparison)?;
    compare_programs(options, report, &comparison, &native)
}

/// Programs in the volume and in the directory; the figures of the own node.
fn compare_programs(
    options: &Options,
    report: &mut BenchmarkReport,
    comparison: &VolumeComparison<'_>,
    native: &SpreadDirectories,
) -> Result<()> {
    let inputs = native.create_directory("inputs")?;
    programs::make_inputs(&inputs, options.choose(100, 10))?;
    let inputs = path_text(&inputs)?;
    report.print_line("programs: runs/s");
    let mut rows = vec![table_row([
        "program",
        "volume",
        "directory",
        "volume / directory",
    ])];
    let mut ratios = Vec::new();
    let places = [&comparison.volume, &comparison.directory];
    let values = RefCell::new(vec![vec![Vec::new(); places.len()]; PROGRAMS.len()]);
    let mut ways: Vec<BenchmarkVariant<'_>> = Vec::new();
    for (place, path) in places.into_iter().enumerate() {
        let (values, inputs) = (&values, &inputs);
        ways.push(BenchmarkVariant::new("programs", move || {
            for (index, work) in PROGRAMS.into_iter().enumerate() {
                let mut shell = comparison.shell.borrow_mut();
                let rate = programs::measure_program(&mut shell, work, path, inputs)?;
                values.borrow_mut()[index][place].push(rate);
            }
            Ok(0.0)
        }));
    }
    run_interleaved(options.choose(5, 2), &mut ways)?;
    drop(ways);
    for (work, places) in PROGRAMS.iter().zip(values.into_inner()) {
        let found: Vec<Samples> = places.into_iter().map(Samples::new).collect();
        let ratio = found[0].ratio_to(&found[1]);
        let name = work.name;
        let cells = [
            name,
            &found[0].to_string(),
            &found[1].to_string(),
            &ratio.to_string(),
        ];
        rows.push(table_row(cells));
        report.add_samples(&format!("own_node_{name}"), &ratio);
        ratios.push(ratio);
    }
    report.print_table(&rows);
    report.add_figure("own_node_programs_min", programs::min_median(ratios.iter()));
    Ok(())
}

/// The same data of a volume in write-back mode: the writes.
pub(super) fn run_write_back(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    let shown = MountedScratch::start_write_back("20GB")?;
    let native = SpreadDirectories::new()?;
    let comparison = VolumeComparison {
        prefix: "collected",
        warm: "collected_warm",
        shell: RefCell::new(Shell::start_on_host()?),
        volume: path_text(shown.path())?,
        directory: path_text(&native.create_directory("directory")?)?,
        control: path_text(&native.create_directory("control")?)?,
        minimal: None,
        ring: None,
    };
    report.print_section("a volume of this machine that collects writes, beside a plain directory");
    let written = PATTERNS
        .iter()
        .filter(|it| !it.is_read_only())
        .chain([&BYTES_PATTERN]);
    compare_data(options, report, &comparison, written)?;
    Ok(())
}

fn path_text(path: &Path) -> Result<String> {
    let path = path.to_str().context("a temporary path is text")?;
    Ok(path.to_owned())
}

/// All rows; the least of the data rows and that of the others are figures of their own.
fn compare_volume(
    options: &Options,
    report: &mut BenchmarkReport,
    comparison: &VolumeComparison<'_>,
) -> Result<()> {
    let [data, data_control] = compare_data(options, report, comparison, PATTERNS.iter())?;
    let warm = PATTERNS.iter().zip(&data);
    let warm = warm.filter(|(pattern, _)| pattern.is_read_only());
    let warm = warm.filter(|(pattern, _)| pattern.initial_state == InitialState::PagesWarm);
    report.add_figure(comparison.warm, min_ratio(warm.map(|(_, ratio)| *ratio)));
    let mut by: [Vec<f64>; COMPARED_PAIRS.len()] = Default::default();
    for processes in [1, 4] {
        for ratios in compare_names(options, report, comparison, processes)? {
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
        let least = min_ratio(ratios.into_iter());
        report.add_figure(&figure, least);
        if comparison.prefix == "direct" {
            let own = if kind == "data" { "data" } else { "names" };
            report.add_figure(&format!("own_node_{own}_min"), least);
        }
        report.add_figure(&(figure + CONTROL_SUFFIX), min_ratio(control.into_iter()));
    }
    if comparison.minimal.is_some() {
        report.add_figure("meta_vs_min_fuse", min_ratio(by_bare.into_iter()));
        report.add_figure("meta_vs_strict_fuse", min_ratio(by_strict.into_iter()));
    }
    if comparison.ring.is_some() {
        report.add_figure("meta_ring_vs_min_fuse", min_ratio(ring_by_bare.into_iter()));
    }
    Ok(())
}

fn min_ratio(ratios: impl Iterator<Item = f64>) -> f64 {
    ratios.fold(f64::INFINITY, f64::min)
}

/// The ratios of the volume to the directory, and of the control to it.
fn compare_data<'p>(
    options: &Options,
    report: &mut BenchmarkReport,
    comparison: &VolumeComparison<'_>,
    patterns: impl Iterator<Item = &'p FioPattern>,
) -> Result<[Vec<f64>; 2]> {
    let bytes = MIB * options.choose(512, 64);
    report.print_line(&format!("{} MiB by fio: MB/s", bytes / MIB));
    let mut rows = vec![table_row([
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
            BenchmarkVariant::new(name, move || {
                let mut shell = comparison.shell.borrow_mut();
                fio::run_pattern(&mut shell, (&file, bytes), pattern, FileProvider::Host)
            })
        };
        let mut ways = [
            way("volume", &comparison.volume),
            way("directory", &comparison.directory),
            way("control", &comparison.control),
        ];
        let found = run_interleaved(options.choose(5, 2), &mut ways)?;
        let figure = format!("{}_{}", comparison.prefix, pattern.figure);
        let both = add_row(report, &figure, pattern.name, &found, &mut rows);
        ratios
            .iter_mut()
            .zip(both)
            .for_each(|(all, it)| all.push(it));
    }
    report.print_table(&rows);
    Ok(ratios)
}

/// Adds a row of a volume, a directory and another one with its figures, and returns the ratios of
/// the first and of the last to the directory.
fn add_row(
    report: &mut BenchmarkReport,
    figure: &str,
    name: &str,
    found: &[Samples],
    rows: &mut Vec<Vec<String>>,
) -> [f64; 2] {
    let (ratio, control) = (found[0].ratio_to(&found[1]), found[2].ratio_to(&found[1]));
    report.add_samples(figure, &ratio);
    report.add_samples(&format!("{figure}{CONTROL_SUFFIX}"), &control);
    rows.push(table_row([
        name,
        &found[0].to_string(),
        &found[1].to_string(),
        &ratio.to_string(),
        &control.to_string(),
    ]));
    [ratio.median(), control.median()]
}

/// For each work the ratios of [`COMPARED_PAIRS`].
fn compare_names(
    options: &Options,
    report: &mut BenchmarkReport,
    comparison: &VolumeComparison<'_>,
    processes: usize,
) -> Result<Vec<[Option<f64>; COMPARED_PAIRS.len()]>> {
    let files = options.choose(5_000, 500);
    report.print_line(&format!("{processes} x {files} files of 4 KiB: files/s"));
    let mut places = vec![
        ("volume", &comparison.volume),
        ("directory", &comparison.directory),
        ("control", &comparison.control),
    ];
    if let Some([bare, strict]) = &comparison.minimal {
        places.extend([("bare FUSE", bare), ("strict FUSE", strict)]);
    }
    if let Some(ring) = &comparison.ring {
        places.push(("by rings", ring));
    }
    let values = RefCell::new(vec![vec![Vec::new(); places.len()]; NAME_WORK.len()]);
    let mut ways: Vec<BenchmarkVariant<'_>> = Vec::new();
    for (place, (name, path)) in places.iter().enumerate() {
        let values = &values;
        ways.push(BenchmarkVariant::new(name, move || {
            for (index, work) in NAME_WORK.into_iter().enumerate() {
                let mut shell = comparison.shell.borrow_mut();
                if matches!(work, FileWork::Create | FileWork::Stat) {
                    // Otherwise earlier writes, and these files, would be written back meanwhile.
                    shell.run_line("sync")?;
                }
                let found = measure_concurrent(&mut shell, work, path, files, processes)?;
                values.borrow_mut()[index][place].push(found);
            }
            Ok(0.0)
        }));
    }
    run_interleaved(options.choose(5, 2), &mut ways)?;
    drop(ways);
    let mut head: Vec<String> = vec!["work".to_owned()];
    head.extend(places.iter().map(|(name, _)| (*name).to_owned()));
    head.extend(COMPARED_PAIRS.iter().filter_map(|(one, other, _)| {
        let (one, other) = (places.get(*one)?.0, places.get(*other)?.0);
        Some(format!("{one} / {other}"))
    }));
    let (mut rows, mut ratios) = (vec![head], Vec::new());
    for (work, values) in NAME_WORK.iter().zip(values.into_inner()) {
        let found: Vec<Samples> = values.into_iter().map(Samples::new).collect();
        let name = work.name();
        let mut cells = vec![name.to_owned()];
        cells.extend(found.iter().map(Samples::to_string));
        let medians = COMPARED_PAIRS.map(|(one, other, end)| {
            let ratio = found.get(one)?.ratio_to(found.get(other)?);
            let figure = format!("{}_{name}_{processes}{end}", comparison.prefix);
            report.add_samples(&figure, &ratio);
            cells.push(ratio.to_string());
            Some(ratio.median())
        });
        rows.push(cells);
        ratios.push(medians);
    }
    report.print_table(&rows);
    Ok(ratios)
}

/// The rate of so many processes at once, each with files of its own.
pub(super) fn measure_concurrent(
    shell: &mut Shell,
    work: FileWork,
    place: &str,
    files: u64,
    processes: usize,
) -> Result<f64> {
    let program = std::env::current_exe()?;
    let program = program.display();
    let one = process_arguments(work, "$own", files).join(" ");
    let line = format!(
        "for i in $(seq {processes}); do own={place}/process-$i; mkdir -p $own; {program} {one} & \
         done; wait"
    );
    let said = shell.run_line(&line)?;
    let rates: Result<Vec<f64>> = said
        .lines()
        .map(|line| parse_rate(work, files, line))
        .collect();
    let rates = rates?;
    ensure!(rates.len() == processes, "{}: {said}", work.name());
    Ok(rates.iter().sum())
}
