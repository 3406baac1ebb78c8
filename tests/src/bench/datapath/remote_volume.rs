//! One large file of a remote volume, and several at once, against the rate of the wire.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};

use super::file_work::{FileWork, MIB, measure_rate};
use super::mounted_scratch::MountedScratch;
use super::wire::{FarEnd, TransferDirection};
use crate::bench::measure::{BenchmarkVariant, Samples, run_interleaved, table_row, time_seconds};
use crate::bench::{BenchmarkReport, Options};

/// Files that are moved at once, each by a process of its own.
const CONCURRENT_FILES: u64 = 16;

pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    let mib = options.choose(1024, 128);
    let shown = MountedScratch::start_remote("20GB")?;
    let wire = FarEnd::start(&shown.test_cluster.cluster.identity())?;
    report.print_section(&format!(
        "{mib} MiB of a volume behind the network, over loopback: MB/s"
    ));
    let at = shown.path();
    let mut ways = [
        BenchmarkVariant::new("write: bare QUIC stream", || {
            wire.measure_quic(TransferDirection::Write, mib)
        }),
        BenchmarkVariant::new("write: plain TCP", || {
            wire.measure_tcp(TransferDirection::Write, mib)
        }),
        BenchmarkVariant::new("write: volume", || measure_rate(FileWork::Write, at, mib)),
        BenchmarkVariant::new("write+fsync: volume", || {
            measure_rate(FileWork::WriteSync, at, mib)
        }),
        BenchmarkVariant::new("read: bare QUIC stream", || {
            wire.measure_quic(TransferDirection::Read, mib)
        }),
        BenchmarkVariant::new("read: plain TCP", || {
            wire.measure_tcp(TransferDirection::Read, mib)
        }),
        BenchmarkVariant::new("read: volume", || {
            // Every second round goes backwards, so there must be a file already.
            if !at.join("large").exists() {
                measure_rate(FileWork::Write, at, mib)?;
            }
            measure_rate(FileWork::ReadCold, at, mib)
        }),
        BenchmarkVariant::new("write: volume, 16 files", || {
            measure_concurrent(FileWork::Write, at, mib / CONCURRENT_FILES)
        }),
        BenchmarkVariant::new("read: volume, 16 files", || {
            if !file_path(at, 0).exists() {
                measure_concurrent(FileWork::Write, at, mib / CONCURRENT_FILES)?;
            }
            measure_concurrent(FileWork::ReadCold, at, mib / CONCURRENT_FILES)
        }),
        BenchmarkVariant::new("write: bare QUIC stream, again", || {
            wire.measure_quic(TransferDirection::Write, mib)
        }),
        BenchmarkVariant::new("read: bare QUIC stream, again", || {
            wire.measure_quic(TransferDirection::Read, mib)
        }),
    ];
    let samples = run_interleaved(options.choose(5, 2), &mut ways)?;
    let mut rows = vec![table_row(["way", "MB/s", "to the bare stream", "to TCP"])];
    for (way, rate) in ways.iter().zip(&samples) {
        let first = if way.name.starts_with("write") { 0 } else { 4 };
        let of = |other: usize| rate.ratio_to(&samples[other]).to_string();
        rows.push(table_row([
            way.name,
            &rate.to_string(),
            &of(first),
            &of(first + 1),
        ]));
    }
    report.print_table(&rows);
    report_figures(report, &samples);
    Ok(())
}

/// Each way's rate to that of another; ways are numbered as `run` lists them.
fn report_figures(report: &mut BenchmarkReport, samples: &[Samples]) {
    let figures = [
        ("remote_write_vs_quinn", 2, 0),
        ("remote_write_vs_tcp", 2, 1),
        ("remote_read_vs_quinn", 6, 4),
        ("remote_read_vs_tcp", 6, 5),
        ("remote_write_16_vs_quinn", 7, 0),
        ("remote_read_16_vs_quinn", 8, 4),
        ("remote_write_control", 9, 0),
        ("remote_read_control", 10, 4),
    ];
    for (key, own, other) in figures {
        report.add_samples(key, &samples[own].ratio_to(&samples[other]));
    }
}

/// So many files of `mib` MiB each, from the start of the first to the end of the last: MB/s.
fn measure_concurrent(work: FileWork, at: &Path, mib: u64) -> Result<f64> {
    for number in 0..CONCURRENT_FILES {
        let place = file_path(at, number);
        fs::create_dir_all(&place)?;
        if work == FileWork::Write {
            // Not part of the measurement.
            let removed = fs::remove_file(place.join("large"));
            removed.or_else(|error| match error.kind() {
                std::io::ErrorKind::NotFound => Ok(()),
                _ => Err(error),
            })?;
        }
    }
    let (took, ()) = time_seconds(|| {
        std::thread::scope(|scope| {
            let one = |number| scope.spawn(move || measure_rate(work, &file_path(at, number), mib));
            let all: Vec<_> = (0..CONCURRENT_FILES).map(one).collect();
            all.into_iter().try_for_each(|it| {
                let ended = it
                    .join()
                    .map_err(|_| anyhow!("a process was not started"))?;
                ended.map(drop)
            })
        })
    })?;
    Ok((CONCURRENT_FILES * mib * MIB) as f64 / took / 1e6)
}

/// Where the file of one process is.
fn file_path(at: &Path, number: u64) -> PathBuf {
    at.join(format!("process-{number}"))
}
