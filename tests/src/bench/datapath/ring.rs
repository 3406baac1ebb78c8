//! A volume of this machine whose requests come by rings (FUSE over io_uring), beside one whose
//! requests come by threads that read the device.

use std::cell::RefCell;

use anyhow::Result;

use super::local::at_once;
use super::shown::Shown;
use super::work::Work;
use super::{MIB, row};
use crate::bench::measure::{Samples, Way, interleave};
use crate::bench::shell::Shell;
use crate::bench::{Options, Report};
use crate::ring::RingSetting;

/// Name, figure, options of fio, and how many times the file's bytes are read.
const DATA: [(&str, &str, &str, u64); 4] = [
    (
        "read 4 KiB at random past the kernel's pages",
        "rand_1",
        "--rw=randread --bs=4k --norandommap",
        1,
    ),
    // Who wakes on another processor pays for that, whatever it has asked.
    (
        "the same by one that keeps its processor",
        "rand_kept",
        "--rw=randread --bs=4k --norandommap --cpus_allowed=0",
        1,
    ),
    (
        "the same by two at once",
        "rand_2",
        "--rw=randread --bs=4k --norandommap --numjobs=2 --group_reporting",
        2,
    ),
    (
        "read by 1 MiB past the kernel's pages",
        "seq",
        "--rw=read --bs=1M",
        1,
    ),
];

/// Work on names, in an order in which each finds what it needs.
const NAMES: [Work; 4] = [Work::Create, Work::Stat, Work::OpenRead, Work::Unlink];

pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    let ring = Shown::by_rings("4GB")?;
    let device = {
        let _none = RingSetting::disable()?;
        Shown::near("4GB")?
    };
    let shell = RefCell::new(Shell::host()?);
    report.section("a volume of this machine by rings, beside one by threads");
    let mut rows = vec![row(["work", "ring", "threads", "ring / threads"])];
    let mut compare = |name: &str, figure: &str, each: &dyn Fn(&str) -> Result<f64>| {
        let way = |name, shown: &Shown| {
            let place = shown.path().display().to_string();
            Way::new(name, move || each(&place))
        };
        let mut ways = [way("ring", &ring), way("threads", &device)];
        let found: Vec<Samples> = interleave(options.pick(5, 3), &mut ways)?;
        let ratio = found[0].ratio_to(&found[1]);
        report.measured(&format!("ring_{figure}"), &ratio);
        let (by_ring, by_device) = (found[0].to_string(), found[1].to_string());
        rows.push(row([name, &by_ring, &by_device, &ratio.to_string()]));
        anyhow::Ok(())
    };
    let bytes = MIB * options.pick(256, 32);
    for (name, figure, fio, times) in DATA {
        compare(name, figure, &|place| {
            let line = format!(
                "--name=ring --ioengine=psync --direct=1 --readonly --filename={place}/data \
                 --size={bytes} --io_size={bytes} {fio}"
            );
            let mut shell = shell.borrow_mut();
            shell.run(&format!(
                "test -e {place}/data || head -c {bytes} /dev/urandom >{place}/data"
            ))?;
            shell.fio(&line, bytes * times)
        })?;
    }
    let files = options.pick(5_000, 500);
    for processes in [1, 2] {
        for work in NAMES {
            let name = format!("{} by {processes}", work.name());
            compare(&name, &format!("{}_{processes}", work.name()), &|place| {
                // Each round needs what the works before it made.
                prepare(&mut shell.borrow_mut(), work, place, files, processes)?;
                at_once(&mut shell.borrow_mut(), work, place, files, processes)
            })?;
        }
    }
    report.table(&rows);
    Ok(())
}

/// Makes or removes the files that a work needs or makes.
fn prepare(shell: &mut Shell, work: Work, place: &str, files: u64, processes: usize) -> Result<()> {
    shell.run(&format!("rm -rf {place}/process-*"))?;
    if work != Work::Create {
        at_once(shell, Work::Create, place, files, processes)?;
    }
    Ok(())
}
