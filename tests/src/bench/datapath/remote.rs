//! One large file of a volume behind the network, and several at once, beside what the wire gives.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};

use super::shown::Shown;
use super::wire::{Direction, Wire};
use super::work::{Work, rate};
use super::{MIB, row};
use crate::bench::measure::{Way, interleave, seconds};
use crate::bench::{Options, Report};

/// Files that are moved at once, each by a process of its own.
const AT_ONCE: u64 = 16;

pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    let mib = options.pick(1024, 128);
    let shown = Shown::start("20GB")?;
    let wire = Wire::start(&shown.world.cluster.identity())?;
    report.section(&format!(
        "{mib} MiB of a volume behind the network, over loopback: MB/s"
    ));
    let at = shown.path();
    let mut ways = [
        Way::new("write: bare QUIC stream", || {
            wire.quic(Direction::Write, mib)
        }),
        Way::new("write: plain TCP", || wire.tcp(Direction::Write, mib)),
        Way::new("write: volume", || rate(Work::Write, at, mib)),
        Way::new("write+fsync: volume", || rate(Work::WriteSync, at, mib)),
        Way::new("read: bare QUIC stream", || wire.quic(Direction::Read, mib)),
        Way::new("read: plain TCP", || wire.tcp(Direction::Read, mib)),
        Way::new("read: volume", || {
            // Every second round goes backwards, so there must be a file already.
            if !at.join("large").exists() {
                rate(Work::Write, at, mib)?;
            }
            rate(Work::ReadCold, at, mib)
        }),
        Way::new("write: volume, 16 files", || {
            at_once(Work::Write, at, mib / AT_ONCE)
        }),
        Way::new("read: volume, 16 files", || {
            if !place(at, 0).exists() {
                at_once(Work::Write, at, mib / AT_ONCE)?;
            }
            at_once(Work::ReadCold, at, mib / AT_ONCE)
        }),
        Way::new("write: bare QUIC stream, again", || {
            wire.quic(Direction::Write, mib)
        }),
        Way::new("read: bare QUIC stream, again", || {
            wire.quic(Direction::Read, mib)
        }),
    ];
    let samples = interleave(options.pick(5, 2), &mut ways)?;
    let mut rows = vec![row(["way", "MB/s", "to the bare stream", "to TCP"])];
    for (way, rate) in ways.iter().zip(&samples) {
        let first = if way.name.starts_with("write") { 0 } else { 4 };
        let of = |other: usize| rate.ratio_to(&samples[other]).to_string();
        rows.push(row([
            way.name,
            &rate.to_string(),
            &of(first),
            &of(first + 1),
        ]));
    }
    report.table(&rows);
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
        report.measured(key, &samples[own].ratio_to(&samples[other]));
    }
    Ok(())
}

/// So many files of `mib` MiB each, from the start of the first to the end of the last: MB/s.
fn at_once(work: Work, at: &Path, mib: u64) -> Result<f64> {
    for number in 0..AT_ONCE {
        let place = place(at, number);
        fs::create_dir_all(&place)?;
        if work == Work::Write {
            // Not what is measured.
            let removed = fs::remove_file(place.join("large"));
            removed.or_else(|error| match error.kind() {
                std::io::ErrorKind::NotFound => Ok(()),
                _ => Err(error),
            })?;
        }
    }
    let (took, ()) = seconds(|| {
        std::thread::scope(|scope| {
            let one = |number| scope.spawn(move || rate(work, &place(at, number), mib));
            let all: Vec<_> = (0..AT_ONCE).map(one).collect();
            all.into_iter().try_for_each(|it| {
                let ended = it
                    .join()
                    .map_err(|_| anyhow!("a process was not started"))?;
                ended.map(drop)
            })
        })
    })?;
    Ok((AT_ONCE * mib * MIB) as f64 / took / 1e6)
}

/// Where the file of one process is.
fn place(at: &Path, number: u64) -> PathBuf {
    at.join(format!("process-{number}"))
}
