//! `bench experiments`: the experiments of chapter 3 of the thesis (its figures 3.3 to 3.7), scaled
//! to one machine: real processes, real bytes, synthetic jobs; computing is sleeping.
//!
//! Each part has its own scale. The link to home has a twelfth of the rate of a node's link. The
//! data go to `target/experiments/*.json`, the pictures beside them.

mod batch_intensive;
mod job_orders;
mod measured_applications;
mod node_failures;
mod pipe_intensive;
mod scoping;
mod simulator_accuracy;
mod synthetic_job;
mod test_bed;

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use bafs::svg_chart::{Axis, Chart, Curve, CurveStyle};
use serde_json::json;

pub(super) use self::synthetic_job::{JOB_PROCESS, run_job_process};
use super::measure::{Stopwatch, format_number};
use super::{BenchmarkReport, Options};

/// Rate of the link to home: a twelfth of a node's, which is taken for 96 MB/s as all nodes share
/// the processors of one machine.
const HOME_RATE: &str = "8MB/s";

/// The same in bytes per second.
const HOME_BYTES_PER_S: u64 = 8_000_000;

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

/// Curves over one axis, as they grow.
struct CurvePlot {
    name: &'static str,
    title: &'static str,
    x: &'static str,
    y: &'static str,
    curves: Vec<Curve>,
}

impl CurvePlot {
    fn new(name: &'static str, title: &'static str, x: &'static str, y: &'static str) -> Self {
        Self {
            name,
            title,
            x,
            y,
            curves: Vec::new(),
        }
    }

    /// Another point of a curve.
    fn add_point(&mut self, curve: &str, x: f64, y: f64) {
        // Some parts take many minutes.
        println!(
            "  {}: {curve} at {}: {}",
            self.name,
            format_number(x),
            format_number(y)
        );
        let found = self.curves.iter_mut().find(|known| known.name == curve);
        match found {
            Some(known) => known.points.push((x, y)),
            None => self.curves.push(Curve {
                name: curve.to_owned(),
                points: vec![(x, y)],
            }),
        }
    }

    /// Writes the data and the picture, and prints the table.
    fn write_files(self, report: &BenchmarkReport) -> Result<()> {
        let directory = output_directory()?;
        std::fs::create_dir_all(&directory)?;
        let mut rows = vec![vec![self.x.to_owned()]];
        rows[0].extend(self.curves.iter().map(|curve| curve.name.clone()));
        let longest = self.curves.iter().map(|curve| curve.points.len()).max();
        for at in 0..longest.unwrap_or(0) {
            let x = self.curves.iter().find_map(|curve| curve.points.get(at));
            let mut row = vec![format_number(x.map_or(0.0, |(x, _)| *x))];
            let values = self.curves.iter().map(|curve| curve.points.get(at));
            row.extend(
                values.map(|point| point.map_or_else(String::new, |(_, y)| format_number(*y))),
            );
            rows.push(row);
        }
        report.print_line(&format!("  {}: {}", self.title, self.y));
        report.print_table(&rows);
        let curves: serde_json::Map<_, _> = self
            .curves
            .iter()
            .map(|curve| (curve.name.clone(), json!(curve.points)))
            .collect();
        let data = json!({ "title": self.title, "x": self.x, "y": self.y, "curves": curves });
        std::fs::write(
            directory.join(format!("{}.json", self.name)),
            data.to_string(),
        )?;
        let chart = Chart {
            title: self.title.to_owned(),
            x: Axis::new(self.x),
            y: Axis::new(self.y),
            curve_style: CurveStyle::Lines,
            curves: self.curves,
        };
        let picture = directory.join(format!("{}.svg", self.name));
        std::fs::write(&picture, chart.render_svg()?)?;
        report.print_line(&format!("  picture: {}", picture.display()));
        Ok(())
    }
}

/// Keeps the journal of a run, for an analysis of its time.
fn keep_journal(journal: &Path, name: &str) -> Result<()> {
    let directory = output_directory()?.join("journals");
    std::fs::create_dir_all(&directory)?;
    std::fs::copy(journal, directory.join(name)).context("keep a journal")?;
    Ok(())
}

/// Where data and pictures go: beside the programs' directory.
fn output_directory() -> Result<PathBuf> {
    let program = std::env::current_exe()?;
    let target = program.ancestors().nth(2).context("a program in target")?;
    Ok(target.join("experiments"))
}
