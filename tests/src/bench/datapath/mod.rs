//! `bench datapath`: a program's rate on a volume, against the machine's rate. Each part is a file
//! of its own; to add one, a line in [`PARTS`] with the figures that it measures.

mod cache_files;
mod create_storm;
mod delayed_link;
mod file_work;
mod fio;
mod job_starts;
mod local_volume;
mod mounted_scratch;
mod peer_file_systems;
mod programs;
mod remote_volume;
mod through_agent;
mod uring_volume;
mod volume_copies;
mod wire;

use anyhow::{Result, ensure};

pub(super) use self::delayed_link::{DELAY_PROCESS, run_delay_process};
pub(super) use self::file_work::{WORK_PROCESS, run_work_process};
pub(super) use self::wire::{WIRE_PROCESS, run_wire_process};
use super::machine;
use super::measure::Stopwatch;
use super::{BenchmarkReport, Options, cache};

/// Memory to touch before each part, in bytes: a bare stream keeps nothing, and file writers would
/// be charged for memory that the machine gets from its host only then.
const WARM_MEMORY_BYTES: usize = 8 << 30;

/// A part with the figures that are missing when it fails.
struct DatapathPart {
    name: &'static str,
    figures: &'static [&'static str],
    run: fn(&Options, &mut BenchmarkReport) -> Result<()>,
}

/// The last line, in this order.
const SUMMARY_FIGURES: &[&str] = &[
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
    "small_volumes",
    "own_node_data_min",
    "own_node_names_min",
    "own_node_programs_min",
    "net_min_vs_best_peer",
    "net_cold_small_vs_best",
    "exec_ms_1",
    "exec_ms_6",
    "jobs_per_s",
    "rsync_min",
    "peers_behind",
];

const PARTS: &[DatapathPart] = &[
    DatapathPart {
        name: "pass",
        figures: &[
            "pass_seq_read",
            "pass_rand4k",
            "pass_mmap",
            "pass_seq_write",
        ],
        run: run_passthrough,
    },
    DatapathPart {
        name: "local",
        figures: &[
            "local_data",
            "local_meta",
            "unpriv_warm",
            "meta_vs_min_fuse",
            "meta_vs_strict_fuse",
        ],
        run: local_volume::run,
    },
    DatapathPart {
        name: "collected",
        figures: &[
            "collected_write",
            "collected_append",
            "collected_rand_write",
            "collected_bytes",
        ],
        run: local_volume::run_write_back,
    },
    DatapathPart {
        name: "ring",
        figures: &[
            "ring_rand_1",
            "ring_rand_kept",
            "ring_rand_2",
            "ring_create_1",
        ],
        run: uring_volume::run,
    },
    DatapathPart {
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
        run: through_agent::run,
    },
    DatapathPart {
        name: "bound",
        figures: &[
            "direct_data",
            "direct_meta",
            "own_node_data_min",
            "own_node_names_min",
            "own_node_programs_min",
        ],
        run: local_volume::run_bind_mount,
    },
    DatapathPart {
        name: "starts",
        figures: &["exec_ms_1", "exec_ms_6", "jobs_per_s", "small_volumes"],
        run: job_starts::run,
    },
    DatapathPart {
        name: "cached",
        figures: &[
            "cache_open_read",
            "cache_absent",
            "cache_stat_again",
            "cache_list",
        ],
        run: cache_files::run,
    },
    DatapathPart {
        name: "remote",
        figures: &["remote_read_vs_quinn", "remote_write_vs_quinn"],
        run: remote_volume::run,
    },
    DatapathPart {
        name: "storm",
        figures: &["delegation_gain"],
        run: create_storm::run,
    },
    DatapathPart {
        name: "copies",
        figures: &[
            "replicate_large_vs_rsync",
            "extract_large_vs_rsync",
            "rsync_min",
        ],
        run: volume_copies::run,
    },
    DatapathPart {
        name: "peers",
        figures: &[
            "peers_behind",
            "net_min_vs_best_peer",
            "net_cold_small_vs_best",
        ],
        run: peer_file_systems::run,
    },
];

/// Runs the wanted parts. One that fails does not keep the others from running.
pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
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
    report.set_summary_figures(SUMMARY_FIGURES);
    let mut failed = Vec::new();
    for part in PARTS
        .iter()
        .filter(|part| options.is_part_selected(part.name))
    {
        machine::warm_memory(WARM_MEMORY_BYTES.min(machine::read_free_bytes() / 2));
        let watch = Stopwatch::start();
        if let Err(error) = (part.run)(options, report) {
            failed.push(part.name);
            for figure in part.figures {
                report.add_missing(figure, &format!("{error:#}"));
            }
        }
        let seconds = watch.elapsed().as_secs_f64();
        report.print_line(&format!("  ({}: {seconds:.0} s)", part.name));
    }
    ensure!(
        failed.is_empty(),
        "these parts failed: {}",
        failed.join(", ")
    );
    Ok(())
}

/// Files that the kernel reads by itself: those of caches, when this node has them whole.
fn run_passthrough(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    cache::run_passthrough(options, report)?;
    report.add_missing(
        "pass_seq_write",
        "the kernel writes no file by itself: that needs project quotas (docs/decisions/0020)",
    );
    Ok(())
}
