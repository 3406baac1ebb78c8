//! `bench planner`: the planner's predictions beside the simulator. Each part is a file of its own;
//! none needs a mount or a network.

mod golden;
mod graphs;
mod regret;

use anyhow::{Result, ensure};

use super::{BenchmarkReport, Options};

type PlannerPart = (
    &'static str,
    fn(&Options, &mut BenchmarkReport) -> Result<()>,
);

const PARTS: &[PlannerPart] = &[
    ("golden", golden::check_thesis_table),
    ("baselines", golden::compare_baselines),
    ("regret", regret::run_studies),
    ("validation", regret::run_validation),
    ("graphs", graphs::run),
];

/// Runs the wanted parts.
pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    let names: Vec<_> = PARTS.iter().map(|part| part.0).collect();
    let is_known = |name: &String| names.contains(&name.as_str());
    ensure!(
        options.only.iter().all(is_known),
        "the parts are {}",
        names.join(", ")
    );
    for (name, part) in PARTS.iter().filter(|part| options.is_part_selected(part.0)) {
        report.print_section(name);
        part(options, report)?;
    }
    Ok(())
}
