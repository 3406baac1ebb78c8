//! The demo's table. Measures nothing.

use super::{DemoMeasurement, DemoSummary};

/// `part` in units of `whole`; 0 when there is no whole.
pub(super) fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 / whole as f64
    }
}

/// The table, for people.
pub(super) fn render_table(summary: &DemoSummary) -> String {
    let empty = || String::from("-");
    let bafs = &summary.bafs;
    let remote = summary.remote_io.as_ref();
    let other = |value: &dyn Fn(&DemoMeasurement) -> String| remote.map_or_else(empty, value);
    let quotient = |value: &dyn Fn(&DemoMeasurement) -> f64| match remote {
        Some(remote) if value(bafs) > 0.0 => format!("{:.1} x", value(remote) / value(bafs)),
        _ => empty(),
    };
    let wall = |m: &DemoMeasurement| m.wall_s / f64::from(m.pipelines);
    let read = |m: &DemoMeasurement| m.home_read_bytes as f64 / f64::from(m.pipelines);
    let written = |m: &DemoMeasurement| m.home_written_bytes as f64 / f64::from(m.pipelines);
    let needed = |m: &DemoMeasurement| ratio(m.home_read_bytes, m.unique_bytes);
    let mut text = format!(
        "\n{:<38}{:>14}{:>14}{:>12}\n",
        "", "BAFS", "remote I/O", "factor"
    );
    let mut row = |name: &str, value: &dyn Fn(&DemoMeasurement) -> String, factor: String| {
        text += &format!(
            "{name:<38}{:>14}{:>14}{factor:>12}\n",
            value(bafs),
            other(value)
        );
    };
    let none = String::new();
    row("pipelines", &|m| m.pipelines.to_string(), none.clone());
    row(
        "wall time, all",
        &|m| format!("{:.1} s", m.wall_s),
        none.clone(),
    );
    row(
        "wall time for each pipeline",
        &|m| format!("{:.2} s", wall(m)),
        quotient(&wall),
    );
    row(
        "read from home, all",
        &|m| format_mb(m.home_read_bytes as f64),
        none.clone(),
    );
    row(
        "read from home for each pipeline",
        &|m| format_mb(read(m)),
        quotient(&read),
    );
    row(
        "written to home for each pipeline",
        &|m| format_mb(written(m)),
        quotient(&written),
    );
    row(
        "unique bytes needed, all",
        &|m| format_mb(m.unique_bytes as f64),
        none,
    );
    row(
        "read from home / unique bytes",
        &|m| format!("{:.3}", needed(m)),
        quotient(&needed),
    );
    let verdict = if summary.identical {
        "identical to"
    } else {
        "DIFFERENT FROM"
    };
    text + &format!("\nall results are {verdict} those of plain directories\n")
}

fn format_mb(bytes: f64) -> String {
    format!("{:.3} MB", bytes / 1e6)
}
