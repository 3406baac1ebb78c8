//! `bench experiments`: the experiments of chapter 3 of the thesis (its figures 3.3 to 3.7), scaled
//! to one machine: real processes, real bytes, synthetic jobs; computing is sleeping.
//!
//! Each part has its own scale. The link to home has a twelfth of the rate of a node's link. The
//! data go to `target/experiments/*.json`, the pictures beside them.

mod batch_intensive;
mod curve_plot;
mod job_orders;
mod measured_applications;
mod node_failures;
mod pipe_intensive;
mod scoping;
mod simulator_accuracy;
mod synthetic_job;
mod test_bed;

use anyhow::{Result, ensure};

pub(super) use self::synthetic_job::{JOB_PROCESS, run_job_process};
use super::measure::Stopwatch;
use super::{BenchmarkReport, Options};

struct ExperimentPart {
    name: &'static str,
    /// Figures that are missing when it fails.
    figures: &'static [&'static str],
    run: fn(&Options, &mut BenchmarkReport) -> Result<()>,
}

const PARTS: &[ExperimentPart] = &[
    ExperimentPart {
        name: "scoping",
        figures: &["scoping_home_vs_minimum_max"],
        run: scoping::run,
    },
    ExperimentPart {
        name: "batch",
        figures: &[
            "batch_vs_breadth_first_max",
            "batch_vs_depth_first_max",
            "batch_knee",
            "batch_simulated_time_error_max",
            "batch_simulated_home_error_max",
            "batch_simulated_knee",
        ],
        run: batch_intensive::run,
    },
    ExperimentPart {
        name: "pipe",
        figures: &[
            "pipe_failed_jobs",
            "pipe_vs_best_other_max",
            "pipe_simulated_time_error_max",
        ],
        run: pipe_intensive::run,
    },
    ExperimentPart {
        name: "failures",
        figures: &[
            "copies_calm_vs_never",
            "copies_failing_vs_never",
            "copies_failing_vs_always",
            "copies_simulated_failing_vs_never",
            "copies_simulated_failing_vs_always",
            "copies_simulated_time_error_max",
        ],
        run: node_failures::run,
    },
    ExperimentPart {
        name: "twins",
        figures: &[
            "twins_vs_best_other_max",
            "twins_blast_far",
            "twins_blast_far_warm",
            "twins_hf_far",
        ],
        run: measured_applications::run,
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
    let mut failed = Vec::new();
    for part in PARTS
        .iter()
        .filter(|part| options.is_part_selected(part.name))
    {
        let watch = Stopwatch::start();
        if let Err(error) = (part.run)(options, report) {
            failed.push(part.name);
            for figure in part.figures {
                report.add_missing(figure, &format!("{error:#}"));
            }
        }
        let took = watch.elapsed().as_secs_f64();
        report.print_line(&format!("  ({}: {took:.0} s)", part.name));
    }
    ensure!(
        failed.is_empty(),
        "these parts failed: {}",
        failed.join(", ")
    );
    Ok(())
}
