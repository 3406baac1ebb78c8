//! Data of a volume of this machine that goes through its agent, by threads and by rings, beside
//! the smallest file system of the same crate, which passes a plain directory on, and beside such a
//! directory itself. Reads find no pages that the kernel keeps for FUSE, but all of the host's.
//! Warm reads find both, as with a file system without an agent.

use std::cell::RefCell;
use std::path::Path;

use anyhow::Result;

use super::file_work::MIB;
use super::fio::{self, FileProvider, FioPattern, InitialState};
use super::mounted_scratch::MountedScratch;
use crate::bench::machine::SpreadDirectories;
use crate::bench::measure::{BenchmarkVariant, run_interleaved, table_row};
use crate::bench::minimal_file_systems::forwarding::{ForwardingMode, ForwardingMount};
use crate::bench::shell::Shell;
use crate::bench::{BenchmarkReport, Options};

const PATTERNS: [FioPattern; 7] = [
    FioPattern {
        name: "read",
        figure: "read",
        options: "--ioengine=psync --rw=read --bs=1M --readonly",
        initial_state: InitialState::FusePagesCold,
        processes: 1,
        size_divisor: 1,
    },
    FioPattern {
        name: "read 4 KiB at random",
        figure: "rand_1",
        options: "--ioengine=psync --rw=randread --bs=4k --norandommap --readonly",
        initial_state: InitialState::FusePagesCold,
        processes: 1,
        size_divisor: 4,
    },
    FioPattern {
        name: "the same by two at once",
        figure: "rand_2",
        options: "--ioengine=psync --rw=randread --bs=4k --norandommap --readonly",
        initial_state: InitialState::FusePagesCold,
        processes: 2,
        size_divisor: 4,
    },
    FioPattern {
        name: "read, warm",
        figure: "warm",
        options: "--ioengine=psync --rw=read --bs=1M --readonly",
        initial_state: InitialState::PagesWarm,
        processes: 1,
        size_divisor: 1,
    },
    FioPattern {
        name: "read 4 KiB at random, warm",
        figure: "warm_rand",
        options: "--ioengine=psync --rw=randread --bs=4k --norandommap --readonly",
        initial_state: InitialState::PagesWarm,
        processes: 1,
        size_divisor: 1,
    },
    FioPattern {
        name: "write",
        figure: "write",
        options: "--ioengine=psync --rw=write --bs=1M",
        initial_state: InitialState::NoFile,
        processes: 1,
        size_divisor: 1,
    },
    FioPattern {
        name: "write by 4 KiB",
        figure: "append",
        options: "--ioengine=psync --rw=write --bs=4k",
        initial_state: InitialState::NoFile,
        processes: 1,
        size_divisor: 4,
    },
];

pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    let shown = MountedScratch::start_local("4GB")?;
    let least = ForwardingMount::start(ForwardingMode::Bare)?;
    let native = SpreadDirectories::new()?;
    let directory = native.create_directory("directory")?;
    let ring = MountedScratch::start_with_rings("4GB");
    let ring = ring.inspect_err(|reason| {
        report.add_missing("through_ring", &format!("{reason:#}"));
    });
    let ring = ring.ok();
    let mut places = vec![
        ("volume", shown.path(), FileProvider::Fuse),
        ("bare FUSE", least.path(), FileProvider::Fuse),
        ("directory", directory.as_path(), FileProvider::Host),
    ];
    let ring = ring
        .as_ref()
        .map(|ring| ("by rings", ring.path(), FileProvider::Fuse));
    places.extend(ring);
    report.print_section("data through the agent, beside the smallest FUSE: MB/s");
    let mut head: Vec<String> = vec!["work".to_owned()];
    head.extend(places.iter().map(|(name, ..)| (*name).to_owned()));
    let ratios = ["volume / bare", "volume / directory", "bare / directory"];
    head.extend(ratios.map(str::to_owned));
    let mut rows = vec![head];
    let shell = RefCell::new(Shell::start_on_host()?);
    let bytes = MIB * options.choose(512, 64);
    for pattern in &PATTERNS {
        let way = |(name, place, mounter): &(&'static str, &Path, FileProvider)| {
            let file = format!("{}/data", place.display());
            let (shell, mounter) = (&shell, *mounter);
            BenchmarkVariant::new(name, move || {
                fio::run_pattern(&mut shell.borrow_mut(), (&file, bytes), pattern, mounter)
            })
        };
        let mut ways: Vec<BenchmarkVariant<'_>> = places.iter().map(way).collect();
        let found = run_interleaved(options.choose(5, 2), &mut ways)?;
        let mut cells = table_row([pattern.name]);
        cells.extend(found.iter().map(ToString::to_string));
        let pairs = [(0, 1, "vs_least"), (0, 2, "vs_native"), (1, 2, "floor")];
        for (one, other, end) in pairs {
            let ratio = found[one].ratio_to(&found[other]);
            report.add_samples(&format!("through_{}_{end}", pattern.figure), &ratio);
            cells.push(ratio.to_string());
        }
        if let Some(ring) = found.get(3) {
            let ratio = ring.ratio_to(&found[1]);
            report.add_samples(&format!("through_{}_ring_vs_least", pattern.figure), &ratio);
        }
        rows.push(cells);
    }
    report.print_table(&rows);
    Ok(())
}
