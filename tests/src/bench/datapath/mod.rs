//! `bench datapath`: what a program gets of a volume, beside what the machine could give. Each part
//! is a file of its own; to add one, a line in [`PARTS`] with the figures that it measures.

mod cached;
mod copies;
mod delay;
mod fio;
mod local;
mod peers;
mod remote;
mod ring;
mod shown;
mod storm;
mod through;
mod wire;
mod work;

use anyhow::{Result, ensure};

pub(super) use self::delay::{DELAY_PROCESS, delay_process};
pub(super) use self::wire::{WIRE_PROCESS, wire_process};
pub(super) use self::work::{WORK_PROCESS, work_process};
use super::machine;
use super::measure::Watch;
use super::{Options, Report, cache};

const MIB: u64 = 1 << 20;

/// Memory that is touched before each part, in bytes: a bare stream keeps nothing, and who writes
/// files would be charged for memory that the machine gets from its host only then.
const WARM_BYTES: usize = 8 << 30;

/// A part with the figures that are missing when it fails.
struct Part {
    name: &'static str,
    figures: &'static [&'static str],
    run: fn(&Options, &mut Report) -> Result<()>,
}

/// The last line, in this order.
const PROMISED: &[&str] = &[
    "pass_seq_read",
    "pass_seq_write",
    "pass_rand4k",
    "pass_mmap",
    "direct_data",
    "direct_meta",
    "unpriv_warm",
    "remote_read_vs_quinn",
    "remote_write_vs_quinn",
    "meta_vs_min_fuse",
    "delegation_gain",
    "peers_behind",
];

const PARTS: &[Part] = &[
    Part {
        name: "pass",
        figures: &[
            "pass_seq_read",
            "pass_rand4k",
            "pass_mmap",
            "pass_seq_write",
        ],
        run: pass,
    },
    Part {
        name: "local",
        figures: &[
            "local_data",
            "local_meta",
            "unpriv_warm",
            "meta_vs_min_fuse",
            "meta_vs_strict_fuse",
        ],
        run: local::run,
    },
    Part {
        name: "collected",
        figures: &[
            "collected_write",
            "collected_append",
            "collected_rand_write",
            "collected_bytes",
        ],
        run: local::run_collected,
    },
    Part {
        name: "ring",
        figures: &[
            "ring_rand_1",
            "ring_rand_kept",
            "ring_rand_2",
            "ring_create_1",
        ],
        run: ring::run,
    },
    Part {
        name: "through",
        figures: &[
            "through_read_vs_least",
            "through_rand_1_vs_least",
            "through_rand_2_vs_least",
            "through_write_vs_least",
            "through_append_vs_least",
            "through_warm_vs_native",
            "through_warm_rand_vs_native",
        ],
        run: through::run,
    },
    Part {
        name: "bound",
        figures: &["direct_data", "direct_meta"],
        run: local::run_bound,
    },
    Part {
        name: "cached",
        figures: &[
            "cache_open_read",
            "cache_absent",
            "cache_stat_again",
            "cache_list",
        ],
        run: cached::run,
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
        name: "copies",
        figures: &["replicate_large_vs_rsync", "extract_large_vs_rsync"],
        run: copies::run,
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
    if let Some(reason) = crate::mount_obstacle() {
        anyhow::bail!("volumes cannot be mounted here: {reason}");
    }
    report.promise(PROMISED);
    let mut failed = Vec::new();
    for part in PARTS.iter().filter(|part| options.wants(part.name)) {
        machine::warm_memory(WARM_BYTES.min(machine::free_bytes() / 2));
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

/// Files that the kernel reads by itself: those of caches, when this node has them whole.
fn pass(options: &Options, report: &mut Report) -> Result<()> {
    cache::passed(options, report)?;
    report.not_measured(
        "pass_seq_write",
        "the kernel writes no file by itself: that needs project quotas (docs/decisions/0020)",
    );
    Ok(())
}

fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(str::to_owned).to_vec()
}
