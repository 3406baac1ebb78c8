//! Data of a volume of this machine that goes through its agent, by threads and by rings, beside
//! the smallest file system of the same crate, which passes a plain directory on, and beside such a
//! directory itself. Reads find no pages that the kernel keeps for FUSE, but all of the host's;
//! warm ones find both, which is what the kernel gives without any agent.

use std::cell::RefCell;
use std::path::Path;

use anyhow::Result;

use super::fio::{self, Before, Pattern, Shower};
use super::shown::Shown;
use super::{MIB, row};
use crate::bench::machine::Spread;
use crate::bench::measure::{Way, interleave};
use crate::bench::shell::Shell;
use crate::bench::smallest::least::{Kind, LeastShown};
use crate::bench::{Options, Report};

const PATTERNS: [Pattern; 7] = [
    Pattern {
        name: "read",
        figure: "read",
        options: "--ioengine=psync --rw=read --bs=1M --readonly",
        before: Before::KernelCold,
        processes: 1,
        part: 1,
    },
    Pattern {
        name: "read 4 KiB at random",
        figure: "rand_1",
        options: "--ioengine=psync --rw=randread --bs=4k --norandommap --readonly",
        before: Before::KernelCold,
        processes: 1,
        part: 4,
    },
    Pattern {
        name: "the same by two at once",
        figure: "rand_2",
        options: "--ioengine=psync --rw=randread --bs=4k --norandommap --readonly",
        before: Before::KernelCold,
        processes: 2,
        part: 4,
    },
    Pattern {
        name: "read, warm",
        figure: "warm",
        options: "--ioengine=psync --rw=read --bs=1M --readonly",
        before: Before::Warm,
        processes: 1,
        part: 1,
    },
    Pattern {
        name: "read 4 KiB at random, warm",
        figure: "warm_rand",
        options: "--ioengine=psync --rw=randread --bs=4k --norandommap --readonly",
        before: Before::Warm,
        processes: 1,
        part: 1,
    },
    Pattern {
        name: "write",
        figure: "write",
        options: "--ioengine=psync --rw=write --bs=1M",
        before: Before::Nothing,
        processes: 1,
        part: 1,
    },
    Pattern {
        name: "write by 4 KiB",
        figure: "append",
        options: "--ioengine=psync --rw=write --bs=4k",
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
        ("volume", shown.path(), Shower::Fuse),
        ("bare FUSE", least.path(), Shower::Fuse),
        ("directory", directory.as_path(), Shower::Host),
    ];
    let ring = ring
        .as_ref()
        .map(|ring| ("by rings", ring.path(), Shower::Fuse));
    places.extend(ring);
    report.section("data through the agent, beside the smallest FUSE: MB/s");
    let mut head: Vec<String> = vec!["work".to_owned()];
    head.extend(places.iter().map(|(name, ..)| (*name).to_owned()));
    let ratios = ["volume / bare", "volume / directory", "bare / directory"];
    head.extend(ratios.map(str::to_owned));
    let mut rows = vec![head];
    let shell = RefCell::new(Shell::host()?);
    let bytes = MIB * options.pick(512, 64);
    for pattern in &PATTERNS {
        let way = |(name, place, shower): &(&'static str, &Path, Shower)| {
            let file = format!("{}/data", place.display());
            let (shell, shower) = (&shell, *shower);
            Way::new(name, move || {
                fio::run(&mut shell.borrow_mut(), (&file, bytes), pattern, shower)
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
