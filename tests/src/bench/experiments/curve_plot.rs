//! The files of an experiment: its curves as data and picture, and its journals.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use bafs::svg_chart::{Axis, Chart, Curve, CurveStyle};
use serde_json::json;

use crate::bench::BenchmarkReport;
use crate::bench::measure::format_number;

/// Curves over one axis, as they grow.
pub(super) struct CurvePlot {
    name: &'static str,
    title: &'static str,
    x: &'static str,
    y: &'static str,
    curves: Vec<Curve>,
}

impl CurvePlot {
    pub(super) fn new(
        name: &'static str,
        title: &'static str,
        x: &'static str,
        y: &'static str,
    ) -> Self {
        Self {
            name,
            title,
            x,
            y,
            curves: Vec::new(),
        }
    }

    /// Another point of a curve.
    pub(super) fn add_point(&mut self, curve: &str, x: f64, y: f64) {
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
    pub(super) fn write_files(self, report: &BenchmarkReport) -> Result<()> {
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
pub(super) fn keep_journal(journal: &Path, name: &str) -> Result<()> {
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
