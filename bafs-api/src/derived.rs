//! What is served beside the views themselves, computed from them: pages of jobs, levels, the Gantt
//! chart, series over time, the graph, groups of failures. Pure.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::parameters::JobQuery;
use crate::views::{
    ExecutionOutcomeView, FailureView, JobStateView, JobView, NodeView, RunView, TrafficSample,
    VolumeRoleView,
};

/// Bars of a Gantt chart: the last attempts. A chart with more cannot be read, and takes a second
/// to draw.
pub(crate) const BARS_MAX: usize = 20_000;

/// Lines of a graph: with more than some per job nobody sees where they go.
pub(crate) const EDGES_MAX: usize = 20_000;

/// Names of jobs in a group.
const EXAMPLES_MAX: usize = 10;

/// Groups of failures.
const FAILURE_GROUPS_MAX: usize = 100;

/// A page of jobs.
#[derive(Debug, Serialize)]
pub(crate) struct JobPage<'v> {
    /// Jobs that match.
    pub(crate) total: usize,
    pub(crate) offset: u32,
    pub(crate) jobs: Vec<&'v JobView>,
}

/// The jobs that match, those of the window only.
pub(crate) fn select_jobs<'v>(view: &'v RunView, query: &JobQuery) -> JobPage<'v> {
    let search = query.search.as_deref().unwrap_or_default().to_lowercase();
    let is_wanted = |job: &&JobView| {
        query.state.is_none_or(|state| job.state == state)
            && (search.is_empty() || job.name.to_lowercase().contains(&search))
    };
    let found: Vec<&JobView> = view.jobs.iter().filter(is_wanted).collect();
    JobPage {
        total: found.len(),
        offset: query.offset,
        jobs: found
            .into_iter()
            .skip(query.offset as usize)
            .take(query.limit as usize)
            .collect(),
    }
}

/// Jobs of one level.
#[derive(Debug, Default, Serialize)]
pub(crate) struct LevelCounts {
    pub(crate) level: u32,
    pub(crate) total: u64,
    pub(crate) done: u64,
    pub(crate) active: u64,
    pub(crate) failed: u64,
}

pub(crate) fn count_levels(jobs: &[JobView]) -> Vec<LevelCounts> {
    let mut levels: BTreeMap<u32, LevelCounts> = BTreeMap::new();
    for job in jobs {
        let counts = levels.entry(job.level).or_default();
        counts.level = job.level;
        counts.total += 1;
        match job.state {
            JobStateView::Done => counts.done += 1,
            JobStateView::Active => counts.active += 1,
            JobStateView::Failed | JobStateView::Skipped => counts.failed += 1,
            _ => {}
        }
    }
    levels.into_values().collect()
}

/// Jobs of each state.
pub(crate) fn count_states(jobs: &[JobView]) -> BTreeMap<JobStateView, u64> {
    let mut counts = BTreeMap::new();
    for job in jobs {
        *counts.entry(job.state).or_default() += 1;
    }
    counts
}

/// A bar of a Gantt chart.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct GanttBar<'v> {
    /// Position of its row.
    pub(crate) row: usize,
    pub(crate) job: &'v str,
    pub(crate) started_ms: u64,
    pub(crate) ended_ms: u64,
    pub(crate) outcome: ExecutionOutcomeView,
}

/// Which attempt ran where and when.
#[derive(Debug, Serialize)]
pub(crate) struct Gantt<'v> {
    pub(crate) wall_ms: u64,
    /// A node and a lane: one for each attempt that it ran at once.
    pub(crate) rows: Vec<String>,
    pub(crate) bars: Vec<GanttBar<'v>>,
    /// Earlier attempts that are left out.
    pub(crate) omitted: usize,
}

pub(crate) fn draw_gantt(view: &RunView) -> Gantt<'_> {
    let omitted = view.executions.len().saturating_sub(BARS_MAX);
    let mut by_node: BTreeMap<&str, Vec<_>> = BTreeMap::new();
    for execution in &view.executions[omitted..] {
        by_node.entry(&execution.node).or_default().push(execution);
    }
    let wall_ms = view.summary.wall_ms;
    let (mut rows, mut bars) = (Vec::new(), Vec::new());
    for (node, executions) in by_node {
        let first = rows.len();
        let mut free_at: Vec<u64> = Vec::new();
        for execution in executions {
            let ended_ms = execution.ended_ms.unwrap_or(wall_ms);
            let free = free_at.iter().position(|at| *at <= execution.started_ms);
            let lane = free.unwrap_or(free_at.len());
            if free.is_none() {
                free_at.push(0);
                rows.push(format!("{node} {}", lane + 1));
            }
            free_at[lane] = ended_ms;
            bars.push(GanttBar {
                row: first + lane,
                job: &view.jobs[execution.job as usize].name,
                started_ms: execution.started_ms,
                ended_ms,
                outcome: execution.outcome,
            });
        }
    }
    Gantt {
        wall_ms,
        rows,
        bars,
        omitted,
    }
}

/// Amounts at the same times.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct Series {
    pub(crate) times_ms: Vec<u64>,
    pub(crate) curves: Vec<SeriesCurve>,
}

/// One amount over time.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct SeriesCurve {
    /// Which: stable, for programs.
    pub(crate) name: &'static str,
    /// Which chart it belongs to.
    pub(crate) chart: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) values: Vec<u64>,
}

/// Space, slots and the link to home over time, in so many steps.
pub(crate) fn compute_series(view: &RunView, points: u32) -> Series {
    let end = view.summary.wall_ms;
    let points = u64::from(points.max(2));
    let times_ms: Vec<u64> = (0..points).map(|at| end * at / (points - 1)).collect();
    let mut curves = slot_curves(view, &times_ms);
    curves.extend(space_curves(view, &times_ms));
    curves.extend(home_curves(view, &times_ms));
    curves.extend(link_curves(view, &times_ms));
    Series { times_ms, curves }
}

fn curve(
    (name, chart, unit): (&'static str, &'static str, &'static str),
    times_ms: &[u64],
    amounts: impl Iterator<Item = Interval>,
) -> SeriesCurve {
    SeriesCurve {
        name,
        chart,
        unit,
        values: sum_at(times_ms, amounts),
    }
}

/// An amount of each node while it is there.
fn present(view: &RunView, amount: fn(&NodeView) -> u64) -> impl Iterator<Item = Interval> {
    view.nodes.iter().flat_map(move |node| {
        let times = node.presence.iter();
        times.map(move |(from, until)| (*from, *until, amount(node)))
    })
}

fn slot_curves(view: &RunView, times_ms: &[u64]) -> Vec<SeriesCurve> {
    let running = view.executions.iter();
    let running = running.map(|it| (it.started_ms, it.ended_ms, u64::from(it.slots)));
    let slots = present(view, |node| u64::from(node.slots));
    vec![
        curve(("slots_used", "slots", "slots"), times_ms, running),
        curve(("slots_present", "slots", "slots"), times_ms, slots),
    ]
}

fn space_curves(view: &RunView, times_ms: &[u64]) -> Vec<SeriesCurve> {
    let of_role = |name, role: VolumeRoleView| {
        let volumes = view.volumes.iter().filter(|volume| volume.role == role);
        let volumes = volumes.map(|it| (it.requested_ms, it.deleted_ms, it.bytes));
        curve((name, "space", "bytes"), times_ms, volumes)
    };
    let offered = present(view, |node| node.capacity_bytes);
    vec![
        of_role("scratch", VolumeRoleView::Scratch),
        of_role("cache", VolumeRoleView::Cache),
        of_role("copies", VolumeRoleView::Copy),
        curve(("offered", "space", "bytes"), times_ms, offered),
    ]
}

/// What a journal knows of the traffic to home.
fn home_curves(view: &RunView, times_ms: &[u64]) -> Vec<SeriesCurve> {
    let sent = view.deliveries.iter();
    let sent = sent.filter_map(|it| Some((it.ended_ms?, None, it.bytes?)));
    let filled = view.volumes.iter().filter(|volume| volume.is_filled);
    let filled = filled.filter_map(|volume| Some((volume.created_ms?, None, volume.bytes)));
    let read = view.executions.iter();
    let read = read.filter_map(|it| Some((it.ended_ms?, None, it.read_bytes)));
    vec![
        curve(("sent_home", "home", "bytes"), times_ms, sent),
        curve(("filled_from_home", "home", "bytes"), times_ms, filled),
        curve(("read_by_jobs", "home", "bytes"), times_ms, read),
    ]
}

/// What servers counted, if somebody looked.
fn link_curves(view: &RunView, times_ms: &[u64]) -> Vec<SeriesCurve> {
    if view.traffic.is_empty() {
        return Vec::new();
    }
    let sample_at = |at: &u64| {
        let position = view.traffic.partition_point(|sample| sample.at_ms <= *at);
        position.checked_sub(1).map(|last| view.traffic[last])
    };
    let of = |name, amount: fn(TrafficSample) -> u64| SeriesCurve {
        name,
        chart: "link",
        unit: "bytes",
        values: times_ms
            .iter()
            .map(|at| sample_at(at).map_or(0, amount))
            .collect(),
    };
    vec![
        of("home_link", |sample| sample.home_bytes),
        of("between_nodes", |sample| sample.node_bytes),
    ]
}

/// Start, end and amount.
type Interval = (u64, Option<u64>, u64);

/// The sum of the amounts that count at each of these times, which ascend.
fn sum_at(times_ms: &[u64], intervals: impl Iterator<Item = Interval>) -> Vec<u64> {
    let mut changes: BTreeMap<u64, i128> = BTreeMap::new();
    for (from, until, amount) in intervals {
        *changes.entry(from).or_default() += i128::from(amount);
        if let Some(until) = until {
            *changes.entry(until).or_default() -= i128::from(amount);
        }
    }
    let mut changes = changes.into_iter().peekable();
    let mut sum: i128 = 0;
    let value_at = |at: &u64| {
        while let Some((_, change)) = changes.next_if(|(when, _)| when <= at) {
            sum += change;
        }
        u64::try_from(sum.max(0)).unwrap_or(u64::MAX)
    };
    times_ms.iter().map(value_at).collect()
}

/// The graph of jobs.
#[derive(Debug, Serialize)]
pub(crate) struct Graph<'v> {
    pub(crate) jobs: Vec<GraphJob<'v>>,
    /// Positions of a job and of one that waits for it.
    pub(crate) edges: Vec<(u32, u32)>,
    /// Edges that are left out.
    pub(crate) omitted_edges: usize,
}

/// A job of a graph.
#[derive(Debug, Serialize)]
pub(crate) struct GraphJob<'v> {
    pub(crate) name: &'v str,
    pub(crate) state: JobStateView,
    pub(crate) level: u32,
}

pub(crate) fn draw_graph(view: &RunView) -> Graph<'_> {
    let all = view.jobs.iter().map(|job| job.parents.len()).sum::<usize>();
    let edges = view.jobs.iter().enumerate().flat_map(|(at, job)| {
        let parents = job.parents.iter();
        parents.map(move |parent| (*parent, u32::try_from(at).unwrap_or(u32::MAX)))
    });
    let jobs = view.jobs.iter().map(|job| GraphJob {
        name: &job.name,
        state: job.state,
        level: job.level,
    });
    Graph {
        jobs: jobs.collect(),
        edges: edges.take(EDGES_MAX).collect(),
        omitted_edges: all.saturating_sub(EDGES_MAX),
    }
}

/// Failures that are alike.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct FailureGroup<'v> {
    /// Jobs that failed so.
    pub(crate) count: usize,
    /// Names of the first of them.
    pub(crate) jobs: Vec<&'v str>,
    pub(crate) node: &'v str,
    pub(crate) reason: &'v str,
    pub(crate) advice: &'v str,
    pub(crate) output_tail: &'v str,
}

/// Failures, those that are alike together, in the order of the first of each.
pub(crate) fn group_failures(failures: &[FailureView]) -> Vec<FailureGroup<'_>> {
    let mut groups: Vec<FailureGroup<'_>> = Vec::new();
    let mut known = BTreeMap::new();
    for failure in failures {
        // What nodes say of a job has its name in quotes.
        let reason = failure.reason.replace(&format!("'{}'", failure.job), "");
        let at = *known
            .entry((reason, failure.output_tail.as_str()))
            .or_insert_with(|| {
                groups.push(FailureGroup {
                    count: 0,
                    jobs: Vec::new(),
                    node: &failure.node,
                    reason: &failure.reason,
                    advice: &failure.advice,
                    output_tail: &failure.output_tail,
                });
                groups.len() - 1
            });
        groups[at].count += 1;
        if groups[at].jobs.len() < EXAMPLES_MAX {
            groups[at].jobs.push(&failure.job);
        }
    }
    groups.truncate(FAILURE_GROUPS_MAX);
    groups
}

/// Jobs that wait for the same.
#[derive(Debug, PartialEq, Serialize)]
pub(crate) struct WaitGroup {
    pub(crate) reason: String,
    pub(crate) count: usize,
    /// Names of the first of them.
    pub(crate) jobs: Vec<String>,
}

/// Groups jobs by why they wait, the largest group first.
pub(crate) fn group_reasons(reasons: impl Iterator<Item = (String, String)>) -> Vec<WaitGroup> {
    let mut groups: BTreeMap<String, WaitGroup> = BTreeMap::new();
    for (job, reason) in reasons {
        let new = || WaitGroup {
            reason: reason.clone(),
            count: 0,
            jobs: Vec::new(),
        };
        let group = groups.entry(reason.clone()).or_insert_with(new);
        group.count += 1;
        if group.jobs.len() < EXAMPLES_MAX {
            group.jobs.push(job);
        }
    }
    let mut groups: Vec<WaitGroup> = groups.into_values().collect();
    groups.sort_by_key(|group| std::cmp::Reverse(group.count));
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::example_source::example_view;

    #[test]
    fn amounts_are_summed_at_each_time() {
        let intervals = [(0, Some(20), 1), (10, Some(30), 2), (20, None, 4)];
        let sums = sum_at(&[0, 10, 15, 20, 30, 40], intervals.into_iter());
        assert_eq!(sums, [1, 3, 3, 6, 4, 4]);
    }

    #[test]
    fn attempts_at_once_get_lanes() {
        let view = example_view(6);
        let gantt = draw_gantt(&view);
        for (at, bar) in gantt.bars.iter().enumerate() {
            let overlaps = |other: &&GanttBar<'_>| {
                other.row == bar.row
                    && other.started_ms < bar.ended_ms
                    && bar.started_ms < other.ended_ms
            };
            assert_eq!(gantt.bars[at + 1..].iter().find(overlaps), None);
        }
        assert!(gantt.rows.len() > 1 && gantt.omitted == 0);
    }

    #[test]
    fn like_failures_form_one_group() {
        let failure = |job: &str, reason: &str| FailureView {
            job: job.to_owned(),
            node: "n1".to_owned(),
            reason: reason.to_owned(),
            advice: "mend it".to_owned(),
            output_tail: String::new(),
        };
        let failures = [
            failure("a", "job 'a' ran longer than 1 s"),
            failure("b", "exited with code 2"),
            failure("c", "job 'c' ran longer than 1 s"),
        ];
        let groups = group_failures(&failures);
        let counts: Vec<_> = groups
            .iter()
            .map(|group| (group.count, &group.jobs))
            .collect();
        assert_eq!(counts, [(2, &vec!["a", "c"]), (1, &vec!["b"])]);
    }

    #[test]
    fn large_graph_omits_edges() {
        let mut view = example_view(3);
        view.jobs[2].parents = vec![0; EDGES_MAX + 7];
        let graph = draw_graph(&view);
        assert_eq!(graph.edges.len(), EDGES_MAX);
        assert!(graph.omitted_edges >= 7);
    }

    #[test]
    fn series_has_equal_lengths() {
        let view = example_view(9);
        let series = compute_series(&view, 17);
        assert_eq!(series.times_ms.len(), 17);
        assert!(series.curves.iter().all(|curve| curve.values.len() == 17));
        let used = series
            .curves
            .iter()
            .find(|curve| curve.name == "slots_used");
        assert!(used.is_some_and(|curve| curve.values.iter().any(|value| *value > 0)));
    }
}
