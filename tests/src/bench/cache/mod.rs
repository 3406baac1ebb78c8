//! `bench cache`: the cooperative cache on real processes. Each part is a file of its
//! own.

mod blast;
mod block_sizes;
mod capacity_knee;
mod home_link;
mod node_churn;
mod part_outcome;
mod peer_read;
mod warm_read;

use anyhow::{Result, ensure};

use self::part_outcome::PartOutcome;
pub(super) use self::peer_read::{SOURCE_PROCESS, run_source_process};
pub(super) use self::warm_read::run_passthrough;
use super::measure::Stopwatch;
use super::{BenchmarkReport, Options};

/// A part with the figures that are missing when it fails.
struct CachePart {
    name: &'static str,
    figures: &'static [&'static str],
    run: fn(&Options, &mut BenchmarkReport) -> Result<PartOutcome>,
}

const PARTS: &[CachePart] = &[
    CachePart {
        name: "link",
        figures: &["home_read_ratio", "time_vs_link"],
        run: home_link::run_cold,
    },
    CachePart {
        name: "factors",
        figures: &["stand_alone_vs_cooperative"],
        run: home_link::run_factors,
    },
    CachePart {
        name: "warm",
        figures: &[
            "warm_seq_vs_native",
            "warm_rand_vs_native",
            "warm_mmap_vs_native",
        ],
        run: warm_read::run,
    },
    CachePart {
        name: "peer",
        figures: &["peer_vs_quinn"],
        run: peer_read::run,
    },
    CachePart {
        name: "knee",
        figures: &["knee_percent"],
        run: capacity_knee::run,
    },
    CachePart {
        name: "blast",
        figures: &["blast_alone_vs_cooperative"],
        run: blast::run,
    },
    CachePart {
        name: "blocks",
        figures: &[],
        run: block_sizes::run,
    },
    CachePart {
        name: "churn",
        figures: &["churn_home_read_ratio", "churn_time_vs_calm"],
        run: node_churn::run,
    },
];

/// The last line, in this order.
const SUMMARY_FIGURES: &[&str] = &[
    "home_read_ratio",
    "time_vs_link",
    "warm_seq_vs_native",
    "warm_rand_vs_native",
    "warm_mmap_vs_native",
    "peer_vs_quinn",
    "knee_percent",
    "wrong_bytes",
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
    report.set_summary_figures(SUMMARY_FIGURES);
    let (mut wrong_bytes, mut failed) = (0, Vec::new());
    for part in PARTS
        .iter()
        .filter(|part| options.is_part_selected(part.name))
    {
        let watch = Stopwatch::start();
        match (part.run)(options, report) {
            Ok(outcome) => wrong_bytes += outcome.wrong_bytes,
            Err(error) => {
                failed.push(part.name);
                for figure in part.figures {
                    report.add_missing(figure, &format!("{error:#}"));
                }
            }
        }
        report.print_line(&format!(
            "  ({}: {:.0} s)",
            part.name,
            watch.elapsed().as_secs_f64()
        ));
    }
    report.add_figure("wrong_bytes", wrong_bytes as f64);
    ensure!(
        failed.is_empty(),
        "these parts failed: {}",
        failed.join(", ")
    );
    ensure!(wrong_bytes == 0, "{wrong_bytes} wrong bytes were read");
    Ok(())
}
