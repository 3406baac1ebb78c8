//! A report as tables of text.

use std::fmt::Write as _;

use crate::cache_curve::CachePoint;
use crate::home_scaling::HOME_RATES_MB;
use crate::report::{Report, UseRow};
use crate::role::Role;
use crate::traffic::{OperationCounts, Volume};
use crate::variability::Spread;

/// A table: its first column is text, the others are numbers.
struct Table {
    title: String,
    rows: Vec<Vec<String>>,
}

impl Table {
    fn new(title: &str, head: &[&str]) -> Self {
        Self {
            title: title.to_owned(),
            rows: vec![head.iter().map(|it| (*it).to_owned()).collect()],
        }
    }

    fn push(&mut self, row: Vec<String>) {
        self.rows.push(row);
    }

    fn write(&self, text: &mut String) {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width_of = |column: usize| {
            let cells = self.rows.iter().filter_map(|row| row.get(column));
            cells.map(|cell| cell.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width_of).collect();
        let _ = writeln!(text, "\n{}", self.title);
        for row in &self.rows {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                let width = widths[column];
                let _ = match column {
                    0 => write!(line, "  {cell:<width$}"),
                    _ => write!(line, "  {cell:>width$}"),
                };
            }
            let _ = writeln!(text, "{}", line.trim_end());
        }
    }
}

fn mb(bytes: u64) -> String {
    let mb = bytes as f64 / 1e6;
    match bytes {
        0 => "0".to_owned(),
        1..100_000 => format!("{mb:.4}"),
        _ => format!("{mb:.2}"),
    }
}

fn volume_cells(volume: Volume) -> Vec<String> {
    vec![
        volume.files.to_string(),
        mb(volume.traffic_bytes),
        mb(volume.unique_bytes),
        mb(volume.static_bytes),
    ]
}

fn row_name(row: &UseRow) -> String {
    match row.is_program {
        true => format!("· {}", row.name),
        false => row.name.clone(),
    }
}

/// All tables; `files_max` bounds the list of files.
pub fn format_tables(report: &Report, files_max: usize) -> String {
    let mut text = String::new();
    let names = report.instances.join(", ");
    let _ = writeln!(text, "{} instances: {names}", report.instances.len());
    for note in &report.notes {
        let _ = writeln!(text, "note: {note}");
    }
    write_resources(report, &mut text);
    write_volumes(report, &mut text);
    write_operations(report, &mut text);
    write_roles(report, &mut text);
    write_files(report, files_max, &mut text);
    write_cache(
        "Cache for batch data, blocks of 4 KiB, all instances",
        &report.batch_cache,
        &mut text,
    );
    write_cache("Cache for pipeline data", &report.pipeline_cache, &mut text);
    write_timeline(report, &mut text);
    write_scaling(report, &mut text);
    write_variability(report, &mut text);
    write_canonical(report, &mut text);
    text
}

fn write_resources(report: &Report, text: &mut String) {
    let head = [
        "stage",
        "real s",
        "cpu s",
        "memory MB",
        "I/O MB",
        "operations",
        "MB/s",
        "working set MB",
    ];
    let mut table = Table::new("Resources (first instance)", &head);
    for row in report.rows.iter().filter(|row| !row.is_program) {
        let traffic = row.traffic.total.traffic_bytes;
        table.push(vec![
            row_name(row),
            format!("{:.2}", row.wall_s),
            format!("{:.2}", row.cpu_s),
            mb(row.memory_bytes_max),
            mb(traffic),
            row.traffic.operations.total().to_string(),
            format!("{:.2}", traffic as f64 / 1e6 / row.wall_s.max(1e-6)),
            mb(row.working_set_bytes),
        ]);
    }
    table.write(text);
}

fn write_volumes(report: &Report, text: &mut String) {
    let head = [
        "stage",
        "files",
        "traffic",
        "unique",
        "static",
        "files read",
        "traffic",
        "unique",
        "static",
        "files written",
        "traffic",
        "unique",
        "static",
    ];
    let mut table = Table::new("I/O volume, MB: total, reads, writes", &head);
    for row in &report.rows {
        let mut cells = vec![row_name(row)];
        for volume in [row.traffic.total, row.traffic.reads, row.traffic.writes] {
            cells.extend(volume_cells(volume));
        }
        table.push(cells);
    }
    table.write(text);
}

fn write_operations(report: &Report, text: &mut String) {
    let head = [
        "stage", "open", "close", "read", "write", "seek", "stat", "other",
    ];
    let mut table = Table::new("Operations", &head);
    for row in &report.rows {
        let OperationCounts {
            open,
            close,
            read,
            write,
            seek,
            stat,
            other,
        } = row.traffic.operations;
        let mut cells = vec![row_name(row)];
        cells.extend([open, close, read, write, seek, stat, other].map(|it| it.to_string()));
        table.push(cells);
    }
    table.write(text);
}

fn write_roles(report: &Report, text: &mut String) {
    let head = [
        "stage",
        "endpoint files",
        "traffic",
        "unique",
        "static",
        "pipeline files",
        "traffic",
        "unique",
        "static",
        "batch files",
        "traffic",
        "unique",
        "static",
    ];
    let mut table = Table::new("Roles, MB: endpoint, pipeline, batch", &head);
    for row in &report.rows {
        let mut cells = vec![row_name(row)];
        for role in Role::ALL {
            cells.extend(volume_cells(row.traffic.role(role)));
        }
        table.push(cells);
    }
    table.write(text);
}

fn write_files(report: &Report, files_max: usize, text: &mut String) {
    let head = [
        "file",
        "role",
        "instances",
        "read MB",
        "written MB",
        "unique MB",
        "static MB",
    ];
    let mut table = Table::new("Files (all instances)", &head);
    let mut files: Vec<_> = report.files.iter().collect();
    files.sort_by_key(|file| std::cmp::Reverse(file.read_bytes + file.written_bytes));
    for file in files.iter().take(files_max) {
        table.push(vec![
            file.path.clone(),
            file.role.name().to_owned(),
            file.instances.to_string(),
            mb(file.read_bytes),
            mb(file.written_bytes),
            mb(file.unique_bytes),
            mb(file.static_bytes),
        ]);
    }
    table.write(text);
    if files.len() > files_max {
        let _ = writeln!(
            text,
            "  … and {} files with less traffic",
            files.len() - files_max
        );
    }
}

fn write_cache(title: &str, points: &[CachePoint], text: &mut String) {
    if points.is_empty() {
        return;
    }
    let mut table = Table::new(title, &["cache MB", "hit rate"]);
    for point in points {
        let size = format!("{:.3}", point.cache_bytes as f64 / 1e6);
        table.push(vec![size, format!("{:.3}", point.hit_rate)]);
    }
    table.write(text);
}

/// The time of the first instance in a dozen parts.
fn write_timeline(report: &Report, text: &mut String) {
    const PARTS: usize = 12;
    let head = [
        "from s",
        "read MB/s",
        "written MB/s",
        "processors",
        "working set MB",
    ];
    let mut table = Table::new("Timeline (first instance)", &head);
    let slices_each = report.timeline.len().div_ceil(PARTS).max(1);
    for slices in report.timeline.chunks(slices_each) {
        let length_s: f64 = slices.iter().map(|it| it.length_s).sum();
        let rate = |bytes: u64| format!("{:.2}", bytes as f64 / 1e6 / length_s);
        let processors: f64 = slices.iter().map(|it| it.processors).sum();
        let working_set = slices.iter().map(|it| it.working_set_bytes).max();
        table.push(vec![
            format!("{:.2}", slices[0].start_s),
            rate(slices.iter().map(|it| it.read_bytes).sum()),
            rate(slices.iter().map(|it| it.written_bytes).sum()),
            format!("{:.2}", processors / slices.len() as f64),
            mb(working_set.unwrap_or(0)),
        ]);
    }
    table.write(text);
}

fn write_scaling(report: &Report, text: &mut String) {
    let rates = HOME_RATES_MB.map(|rate| format!("at {rate} MB/s"));
    let mut head = vec!["traffic that goes home", "MB per cpu s"];
    head.extend(rates.iter().map(String::as_str));
    let mut table = Table::new("Pipelines that a home can serve", &head);
    for scaling in &report.home_scaling {
        let mut cells = vec![
            scaling.discipline.name().to_owned(),
            format!("{:.4}", scaling.mb_per_cpu_s),
        ];
        let count = |pipelines: Option<f64>| match pipelines {
            Some(count) => format!("{count:.1}"),
            None => "any".to_owned(),
        };
        cells.extend(scaling.pipelines.map(count));
        table.push(cells);
    }
    table.write(text);
}

fn write_variability(report: &Report, text: &mut String) {
    let head = [
        "stage",
        "instances",
        "real s",
        "cpu s",
        "traffic MB",
        "unique MB",
        "memory MB",
    ];
    let mut table = Table::new("Variability: mean ± standard deviation", &head);
    let cell = |spread: Spread, unit: f64| {
        let percent = spread.variation * 100.0;
        format!("{:.2} ± {percent:.0} %", spread.mean / unit)
    };
    for stage in &report.variability {
        table.push(vec![
            stage.stage.clone(),
            stage.instances.to_string(),
            cell(stage.wall_s, 1.0),
            cell(stage.cpu_s, 1.0),
            cell(stage.traffic_bytes, 1e6),
            cell(stage.unique_bytes, 1e6),
            cell(stage.memory_bytes, 1e6),
        ]);
    }
    table.write(text);
}

fn write_canonical(report: &Report, text: &mut String) {
    let mut table = Table::new(
        "Distance from a canonical workload",
        &["condition", "distance"],
    );
    for condition in &report.canonical.conditions {
        let distance = format!("{:.2}", condition.distance);
        table.push(vec![condition.condition.to_owned(), distance]);
    }
    table.push(vec![
        "mean".to_owned(),
        format!("{:.2}", report.canonical.mean),
    ]);
    table.write(text);
}
