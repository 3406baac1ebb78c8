//! `bench datapath`: what a program gets of a volume, beside what the machine could give. Each part
//! is a file of its own; to add one, a line in [`PARTS`] with the figures that it measures.

mod delay;
mod local;
mod peers;
mod remote;
mod shown;
mod storm;
mod wire;
mod work;

use anyhow::{Result, ensure};

pub(super) use self::delay::{DELAY_PROCESS, delay_process};
pub(super) use self::wire::{WIRE_PROCESS, wire_process};
pub(super) use self::work::{WORK_PROCESS, work_process};
use super::measure::Watch;
use super::{Options, Report};

const MIB: u64 = 1 << 20;

/// A part with the figures that are missing when it fails.
struct Part {
    name: &'static str,
    figures: &'static [&'static str],
    run: fn(&Options, &mut Report) -> Result<()>,
}

const PARTS: &[Part] = &[
    Part {
        name: "local",
        figures: &["local_data", "local_meta"],
        run: local::run,
    },
    Part {
        name: "bound",
        figures: &["direct_data", "direct_meta"],
        run: local::run_bound,
    },
    Part {
        name: "remote",
        figures: &["remote_read_vs_quinn", "remote_write_vs_quinn"],
        run: remote::run,
    },
    Part {
        name: "storm",
        figures: &["delegation_gain"],
        run: storm::run,
    },
    Part {
        name: "peers",
        figures: &["peers_behind"],
        run: peers::run,
    },
];

/// Runs the wanted parts. One that fails does not keep the others from running.
pub(super) fn run(options: &Options, report: &mut Report) -> Result<()> {
    let known = |name: &String| PARTS.iter().any(|part| part.name == name);
    let names: Vec<_> = PARTS.iter().map(|part| part.name).collect();
    ensure!(
        options.only.iter().all(known),
        "the parts are {}",
        names.join(", ")
    );
    if let Some(reason) = crate::cannot_mount() {
        anyhow::bail!("volumes cannot be mounted here: {reason}");
    }
    let mut failed = Vec::new();
    for part in PARTS.iter().filter(|part| options.wants(part.name)) {
        let watch = Watch::start();
        if let Err(error) = (part.run)(options, report) {
            failed.push(part.name);
            for figure in part.figures {
                report.not_measured(figure, &format!("{error:#}"));
            }
        }
        let seconds = watch.elapsed().as_secs_f64();
        report.say(&format!("  ({}: {seconds:.0} s)", part.name));
    }
    ensure!(
        failed.is_empty(),
        "these parts failed: {}",
        failed.join(", ")
    );
    Ok(())
}

fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(str::to_owned).to_vec()
}
