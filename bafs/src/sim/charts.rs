//! `bafs sim --plot`: pictures of simulated runs. Decides nothing.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{Context, Result, anyhow};
use bafs_sim::planner::{CanonicalWorkload, Environment, Strategy, plan_workload};
use bafs_sim::simulator::SimulationResult;
use bafs_sim::simulator::study::{StudyPoint, StudyVariable, sketch_point};
use bafs_workflow::Workflow;

use super::SimulatedRun;
use crate::gantt_chart::{Bar, Gantt};
use crate::graph;
use crate::svg_chart::{Axis, CategoryMap, Chart, Colour, Curve, CurveStyle};

/// Points of a sensitivity curve.
const SENSITIVITY_POINTS: u32 = 6;

/// Jobs of a point at most, and parts of its batch volumes on nodes; where there are more, the
/// curve has none.
const POINT_JOBS_MAX: u64 = 50_000;
const POINT_CACHES_MAX: u64 = 100_000;

/// Squares along each side of the map, and their values as shares of all storage.
const MAP_CELLS: u32 = 24;
const BATCH_SHARES: (f64, f64) = (0.005, 0.96);
const PRIVATE_SHARES: (f64, f64) = (0.000_05, 0.02);

/// Makes the directory of the pictures, before anything is simulated for them.
pub(super) fn create_directory(directory: &Path) -> Result<()> {
    std::fs::create_dir_all(directory)
        .with_context(|| format!("cannot make {}", directory.display()))
}

/// Writes the pictures of all runs.
pub(super) fn write_run_charts(
    directory: &Path,
    workflow: &Workflow,
    rows: &[SimulatedRun],
) -> Result<Vec<String>> {
    let mut files = ChartFiles {
        directory,
        written: Vec::new(),
    };
    files.write_file("workflow.dot", &graph::render_dot(workflow, None)?)?;
    let running = |run: &SimulationResult| curve_points(run, |moment| f64::from(moment.running));
    // Remote I/O may take a hundred times as long, and would leave no room for the others.
    let is_shown =
        |row: &&SimulatedRun| row.policy != Strategy::Remote.to_string() || rows.len() == 1;
    let curves = rows.iter().filter(is_shown).map(|row| Curve {
        name: row.policy.clone(),
        points: running(&row.run),
    });
    let chart = step_chart("Processors", "jobs on processors", curves.collect());
    files.write_file("processors.svg", &chart.render_svg()?)?;
    for row in rows {
        let name = row.policy.to_lowercase();
        let chart = storage_chart(row);
        files.write_file(&format!("storage-{name}.svg"), &chart.render_svg()?)?;
        files.write_file(&format!("gantt-{name}.svg"), &gantt_chart(row).render_svg())?;
    }
    Ok(files.written)
}

/// Writes what is special to canonical workloads: which strategy the model chooses for which
/// sizes, and how each strategy's simulated time depends on each quantity, as far as it ends and
/// has few enough jobs.
pub(super) fn write_canonical_charts(
    directory: &Path,
    canonical: &CanonicalWorkload,
    environment: &Environment,
) -> Result<Vec<String>> {
    let mut files = ChartFiles {
        directory,
        written: Vec::new(),
    };
    files.write_file("map.svg", &choice_map(canonical, environment).render_svg()?)?;
    for varied in StudyVariable::ALL {
        let mut curves: BTreeMap<Strategy, Vec<(f64, f64)>> = BTreeMap::new();
        for step in 0..SENSITIVITY_POINTS {
            let point = varied.point_in(environment, canonical, step, SENSITIVITY_POINTS);
            if is_large(&point) {
                continue;
            }
            for timed in sketch_point(&point).map_err(|stuck| anyhow!("{stuck}"))? {
                let points = curves.entry(timed.strategy).or_default();
                points.extend(timed.simulated_s.map(|seconds| (point.x, seconds)));
            }
        }
        let curves = curves.into_iter().map(|(strategy, points)| Curve {
            name: strategy.to_string(),
            points,
        });
        let chart = Chart {
            title: format!("Sensitivity: {}", varied.name()),
            x: Axis {
                title: varied.axis_label().to_owned(),
                is_logarithmic: varied.is_logarithmic(),
            },
            y: Axis::new("simulated time, s"),
            curve_style: CurveStyle::Lines,
            curves: curves.collect(),
        };
        let name = format!("sensitivity-{}.svg", varied.name());
        files.write_file(&name, &chart.render_svg()?)?;
    }
    Ok(files.written)
}

/// Whether a point would take minutes.
fn is_large(point: &StudyPoint) -> bool {
    let parts = u64::from(point.canonical.depth) * point.environment.storing_nodes();
    point.canonical.jobs() > POINT_JOBS_MAX || parts > POINT_CACHES_MAX
}

struct ChartFiles<'d> {
    directory: &'d Path,
    written: Vec<String>,
}

impl ChartFiles<'_> {
    fn write_file(&mut self, name: &str, text: &str) -> Result<()> {
        let path = self.directory.join(name);
        // Under its own name it is whole, also when the disk fills up meanwhile.
        let unfinished = self.directory.join(format!(".{name}.unfinished"));
        let written = std::fs::write(&unfinished, text);
        let named = written.and_then(|()| std::fs::rename(&unfinished, &path));
        if named.is_err() {
            let _ = std::fs::remove_file(&unfinished);
        }
        named.with_context(|| format!("cannot write {}", path.display()))?;
        self.written.push(name.to_owned());
        Ok(())
    }
}

fn curve_points(
    run: &SimulationResult,
    of: impl Fn(&bafs_sim::simulator::UsageSample) -> f64,
) -> Vec<(f64, f64)> {
    let moments = run.samples.iter();
    moments.map(|m| (m.at_us as f64 / 1e6, of(m))).collect()
}

fn step_chart(title: &str, y: &str, curves: Vec<Curve>) -> Chart {
    Chart {
        title: title.to_owned(),
        x: Axis::new("time, s"),
        y: Axis::new(y),
        curve_style: CurveStyle::Steps,
        curves,
    }
}

fn storage_chart(row: &SimulatedRun) -> Chart {
    let curve = |name: &str, points| Curve {
        name: name.to_owned(),
        points,
    };
    let curves = vec![
        curve(
            "scratch volumes",
            curve_points(&row.run, |m| m.scratch_bytes as f64),
        ),
        curve(
            "cache volumes",
            curve_points(&row.run, |m| m.cache_bytes as f64),
        ),
    ];
    step_chart(
        &format!("Storage, {}", row.policy),
        "bytes allocated",
        curves,
    )
}

/// A row for each job that a node ran at once with others.
fn gantt_chart(row: &SimulatedRun) -> Gantt {
    let mut by_node: BTreeMap<u32, Vec<_>> = BTreeMap::new();
    for spell in &row.run.execution_spans {
        by_node.entry(spell.node).or_default().push(spell);
    }
    let (mut rows, mut bars) = (Vec::new(), Vec::new());
    for (node, mut spells) in by_node {
        spells.sort_by_key(|spell| spell.start_us);
        let first = rows.len();
        let mut free_at: Vec<u64> = Vec::new();
        for spell in spells {
            let free = free_at.iter().position(|at| *at <= spell.start_us);
            let lane = free.unwrap_or(free_at.len());
            if free.is_none() {
                free_at.push(0);
                rows.push(format!("node {node}, {}", lane + 1));
            }
            free_at[lane] = spell.end_us;
            bars.push(Bar {
                row: first + lane,
                from: spell.start_us as f64 / 1e6,
                until: spell.end_us as f64 / 1e6,
                colour: if spell.has_succeeded {
                    Colour::SUCCESS
                } else {
                    Colour::FAILURE
                },
                label: String::new(),
            });
        }
    }
    Gantt {
        title: format!("Executions, {}", row.policy),
        x: "time, s".to_owned(),
        rows,
        bars,
        legend: vec![
            ("done".to_owned(), Colour::SUCCESS),
            ("lost".to_owned(), Colour::FAILURE),
        ],
    }
}

pub(super) fn choice_map(canonical: &CanonicalWorkload, environment: &Environment) -> CategoryMap {
    let storage = environment.storage_bytes() as f64;
    let values = |(low, high): (f64, f64)| -> Vec<f64> {
        let part = |at: u32| f64::from(at) / f64::from(MAP_CELLS - 1);
        (0..MAP_CELLS)
            .map(|at| storage * low * (high / low).powf(part(at)))
            .collect()
    };
    let (columns, rows) = (values(BATCH_SHARES), values(PRIVATE_SHARES));
    let mut kinds: Vec<String> = Vec::new();
    let mut kind = |strategy: Strategy| {
        let name = strategy.to_string();
        kinds
            .iter()
            .position(|known| *known == name)
            .unwrap_or_else(|| {
                kinds.push(name);
                kinds.len() - 1
            })
    };
    let mut cells = Vec::new();
    for private in &rows {
        let mut row = Vec::new();
        for batch in &columns {
            let point = CanonicalWorkload {
                batch_bytes: *batch as u64,
                private_bytes: *private as u64,
                ..canonical.clone()
            };
            let choice = plan_workload(point.shape(), environment).choice;
            row.push(choice.map(|choice| kind(choice.strategy)));
        }
        cells.push(row);
    }
    let axis = |title: &str| Axis {
        title: title.to_owned(),
        is_logarithmic: true,
    };
    CategoryMap {
        title: "Strategy chosen by the model".to_owned(),
        x: axis("batch volume, bytes"),
        y: axis("private volume, bytes"),
        columns,
        rows,
        cells,
        categories: kinds,
    }
}
