//! One large file of a volume behind the network, beside what the wire gives.

use anyhow::Result;

use super::row;
use super::shown::Shown;
use super::wire::{Direction, Wire};
use super::work::{Work, rate};
use crate::bench::measure::{Way, interleave};
use crate::bench::{Options, Report};

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
    ];
    let samples = interleave(options.pick(5, 2), &mut ways)?;
    let mut rows = vec![row(["way", "MB/s", "to the bare stream", "to TCP"])];
    for (index, (way, rate)) in ways.iter().zip(&samples).enumerate() {
        let first = if index < 4 { 0 } else { 4 };
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
    ];
    for (key, own, other) in figures {
        report.measured(key, &samples[own].ratio_to(&samples[other]));
    }
    Ok(())
}
