//! A volume of this machine whose requests come by rings (FUSE over io_uring), beside one whose
//! requests come by threads that read the device.

use std::cell::RefCell;

use anyhow::Result;

use super::file_work::{FileWork, MIB};
use super::local_volume::measure_concurrent;
use super::mounted_scratch::MountedScratch;
use crate::bench::measure::{BenchmarkVariant, Samples, run_interleaved, table_row};
use crate::bench::shell::Shell;
use crate::bench::{BenchmarkReport, Options};
use crate::uring::RingSetting;

/// Name, figure, options of fio, and how many times the file's bytes are read.
const DATA_WORK: [(&str, &str, &str, u64); 4] = [
    (
        "read 4 KiB at random past the kernel's pages",
        "rand_1",
        "--rw=randread --bs=4k --norandommap",
        1,
    ),
    // Waking on another processor has a price, for any request.
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

/// Name operations, in an order in which each finds its input.
const NAME_WORK: [FileWork; 4] = [
    FileWork::Create,
    FileWork::Stat,
    FileWork::OpenRead,
    FileWork::Unlink,
];

pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    let ring = MountedScratch::start_with_rings("4GB")?;
    let device = {
        let _none = RingSetting::disable()?;
        MountedScratch::start_local("4GB")?
    };
    let shell = RefCell::new(Shell::start_on_host()?);
    report.print_section("a volume of this machine by rings, beside one by threads");
    let mut rows = vec![table_row(["work", "ring", "threads", "ring / threads"])];
    let mut compare = |name: &str, figure: &str, each: &dyn Fn(&str) -> Result<f64>| {
        let way = |name, shown: &MountedScratch| {
            let place = shown.path().display().to_string();
            BenchmarkVariant::new(name, move || each(&place))
        };
        let mut ways = [way("ring", &ring), way("threads", &device)];
        let found: Vec<Samples> = run_interleaved(options.choose(5, 3), &mut ways)?;
        let ratio = found[0].ratio_to(&found[1]);
        report.add_samples(&format!("ring_{figure}"), &ratio);
        let (by_ring, by_device) = (found[0].to_string(), found[1].to_string());
        rows.push(table_row([name, &by_ring, &by_device, &ratio.to_string()]));
        anyhow::Ok(())
    };
    let bytes = MIB * options.choose(256, 32);
    for (name, figure, fio, times) in DATA_WORK {
        compare(name, figure, &|place| {
            let line = format!(
                "--name=ring --ioengine=psync --direct=1 --readonly --filename={place}/data \
                 --size={bytes} --io_size={bytes} {fio}"
            );
            let mut shell = shell.borrow_mut();
            shell.run_line(&format!(
                "test -e {place}/data || head -c {bytes} /dev/urandom >{place}/data"
            ))?;
            shell.run_fio(&line, bytes * times)
        })?;
    }
    let files = options.choose(5_000, 500);
    for processes in [1, 2] {
        for work in NAME_WORK {
            let name = format!("{} by {processes}", work.name());
            compare(&name, &format!("{}_{processes}", work.name()), &|place| {
                // Each round needs the results of the earlier operations.
                prepare_files(&mut shell.borrow_mut(), work, place, files, processes)?;
                measure_concurrent(&mut shell.borrow_mut(), work, place, files, processes)
            })?;
        }
    }
    report.print_table(&rows);
    Ok(())
}

/// Makes or removes the files that a work needs or makes.
fn prepare_files(
    shell: &mut Shell,
    work: FileWork,
    place: &str,
    files: u64,
    processes: usize,
) -> Result<()> {
    shell.run_line(&format!("rm -rf {place}/process-*"))?;
    if work != FileWork::Create {
        measure_concurrent(shell, FileWork::Create, place, files, processes)?;
    }
    Ok(())
}
