//! The pictures of a report, from a run's intervals.

use std::collections::BTreeMap;

use anyhow::Result;
use bafs_sched::timeline::{ExecutionOutcome, ExecutionRecord, Timeline, VolumeRole};

use crate::gantt_chart::{Bar, Gantt};
use crate::svg_chart::{Axis, Chart, Colour, Curve, CurveStyle};

fn seconds(ms: u64) -> f64 {
    ms as f64 / 1e3
}

/// Which execution ran where and when: a row for each slot that was used.
pub(super) fn draw_gantt(timeline: &Timeline) -> String {
    let mut by_node: BTreeMap<&str, Vec<&ExecutionRecord>> = BTreeMap::new();
    for execution in &timeline.executions {
        by_node.entry(&execution.node).or_default().push(execution);
    }
    let (mut rows, mut bars) = (Vec::new(), Vec::new());
    for (node, executions) in by_node {
        let first = rows.len();
        let mut free_at: Vec<u64> = Vec::new();
        for execution in executions {
            let until = execution.ended_ms.unwrap_or(timeline.wall_ms);
            let free = free_at.iter().position(|at| *at <= execution.requested_ms);
            let lane = free.unwrap_or(free_at.len());
            if free.is_none() {
                free_at.push(0);
                let name = format!("{node} {}", lane + 1);
                rows.push(name);
            }
            free_at[lane] = until;
            bars.push(Bar {
                row: first + lane,
                from: seconds(execution.requested_ms),
                until: seconds(until),
                colour: outcome_colour(execution.outcome),
                label: describe_execution(timeline, execution, until),
            });
        }
    }
    let kinds = [
        ("done", ExecutionOutcome::Done),
        ("rolled back", ExecutionOutcome::RolledBack),
        ("failed", ExecutionOutcome::Failed),
        ("abandoned", ExecutionOutcome::Abandoned),
        ("running", ExecutionOutcome::Running),
    ];
    let has = |health: ExecutionOutcome| timeline.executions.iter().any(|e| e.outcome == health);
    let kinds = kinds.into_iter().filter(|(_, health)| has(*health));
    let gantt = Gantt {
        title: "Executions by node".to_owned(),
        x: "time, s".to_owned(),
        rows,
        bars,
        legend: kinds
            .map(|(name, health)| (name.to_owned(), outcome_colour(health)))
            .collect(),
    };
    gantt.render_svg()
}

/// The job first: a bar that has room shows what is before the comma.
fn describe_execution(timeline: &Timeline, execution: &ExecutionRecord, until_ms: u64) -> String {
    let name = &timeline.jobs[execution.job.as_usize()].name;
    let how = match execution.outcome {
        ExecutionOutcome::Done => "done",
        ExecutionOutcome::RolledBack => "done, but its output was lost",
        ExecutionOutcome::Running => "running",
        ExecutionOutcome::Failed | ExecutionOutcome::Abandoned => &execution.end_description,
    };
    let (from, until) = (seconds(execution.requested_ms), seconds(until_ms));
    format!("{name}, {from:.1} s to {until:.1} s: {how}")
}

fn outcome_colour(health: ExecutionOutcome) -> Colour {
    match health {
        ExecutionOutcome::Done => Colour::SUCCESS,
        ExecutionOutcome::RolledBack => Colour::LOST,
        ExecutionOutcome::Failed => Colour::FAILURE,
        ExecutionOutcome::Abandoned => Colour::NEUTRAL,
        ExecutionOutcome::Running => Colour::ACTIVE,
    }
}

/// Slots that jobs occupied, and slots that were there.
pub(super) fn draw_processors(timeline: &Timeline) -> Result<String> {
    let end = timeline.wall_ms;
    let ran = timeline.executions.iter().map(|execution| {
        let until = execution.ended_ms.unwrap_or(end);
        (execution.requested_ms, until, f64::from(execution.slots))
    });
    let present = timeline.nodes.iter().flat_map(|node| {
        let intervals = node.presence.iter();
        intervals.map(|(from, until)| (*from, until.unwrap_or(end), f64::from(node.slots)))
    });
    let curves = vec![
        sum_intervals("slots of jobs", ran, end),
        sum_intervals("slots present", present, end),
    ];
    draw_chart("Processors", "slots at once", curves)
}

/// Bytes that volumes reserved, and bytes that nodes offered.
pub(super) fn draw_space(timeline: &Timeline) -> Result<String> {
    let end = timeline.wall_ms;
    let of = |holding: VolumeRole| {
        let volumes = timeline.volumes.iter();
        let volumes = volumes.filter(move |volume| volume.role == holding);
        volumes.map(move |volume| {
            let until = volume.deleted_ms.unwrap_or(end);
            (volume.requested_ms, until, volume.bytes as f64)
        })
    };
    let offered = timeline.nodes.iter().flat_map(|node| {
        let intervals = node.presence.iter();
        intervals.map(|(from, until)| (*from, until.unwrap_or(end), node.capacity_bytes as f64))
    });
    let mut curves = vec![
        sum_intervals("scratch volumes", of(VolumeRole::Scratch), end),
        sum_intervals("cache volumes", of(VolumeRole::Cache), end),
        sum_intervals("copies", of(VolumeRole::Copy), end),
        sum_intervals("offered", offered, end),
    ];
    curves.retain(|curve| curve.points.iter().any(|(_, y)| *y > 0.0));
    draw_chart("Space", "bytes reserved", curves)
}

/// What a journal knows of the traffic to home.
pub(super) fn draw_home_traffic(timeline: &Timeline) -> Result<String> {
    let end = timeline.wall_ms;
    let sent = timeline.extract_attempts.iter().filter_map(|sending| {
        let at = sending.ended_ms?;
        Some((at, end, sending.bytes? as f64))
    });
    let filled = timeline.volumes.iter().filter_map(|volume| {
        let at = volume.created_ms.filter(|_| volume.is_filled)?;
        Some((at, end, volume.bytes as f64))
    });
    let read = timeline.executions.iter().filter_map(|execution| {
        let at = execution.ended_ms?;
        Some((at, end, execution.distinct_bytes as f64))
    });
    let mut curves = vec![
        sum_intervals("files sent home", sent, end),
        sum_intervals("volumes filled from home (as declared)", filled, end),
        sum_intervals("read by jobs from caches and home", read, end),
    ];
    curves.retain(|curve| curve.points.iter().any(|(_, y)| *y > 0.0));
    draw_chart("Home", "bytes so far", curves)
}

fn draw_chart(title: &str, y: &str, curves: Vec<Curve>) -> Result<String> {
    let chart = Chart {
        title: title.to_owned(),
        x: Axis::new("time, s"),
        y: Axis::new(y),
        curve_style: CurveStyle::Steps,
        curves,
    };
    chart.render_svg()
}

/// The sum of amounts, each of which counts in an interval of time.
fn sum_intervals(name: &str, intervals: impl Iterator<Item = (u64, u64, f64)>, end: u64) -> Curve {
    let mut changes: BTreeMap<u64, f64> = BTreeMap::from([(0, 0.0), (end, 0.0)]);
    for (from, until, amount) in intervals {
        *changes.entry(from).or_default() += amount;
        if until < end {
            *changes.entry(until).or_default() -= amount;
        }
    }
    let mut sum: f64 = 0.0;
    let points = changes.into_iter().map(|(at, change)| {
        sum += change;
        (seconds(at), sum.max(0.0))
    });
    Curve {
        name: name.to_owned(),
        points: points.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interval_amounts_are_summed_over_time() {
        let intervals = [(0, 2_000, 1.0), (1_000, 3_000, 2.0), (2_000, 9_000, 1.0)];
        let curve = sum_intervals("x", intervals.into_iter(), 4_000);
        let expected = [(0.0, 1.0), (1.0, 3.0), (2.0, 3.0), (3.0, 1.0), (4.0, 1.0)];
        assert_eq!(curve.points, expected);
    }
}
