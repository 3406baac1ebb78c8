//! `bench sim`: the speed of the scheduler core and of the simulator, from 10⁴ to 10⁶ jobs, by a
//! strategy's rules and by need with safe starts. It also counts the examined records, because time
//! depends on memory latency as well. It needs no mount and no network.

use std::time::Duration;

use anyhow::{Result, ensure};
use bafs_sim::planner::{CanonicalWorkload, Environment, NodeClass, Strategy};
use bafs_sim::simulator::{
    LoadModel, Policy, Scenario, Simulation, SimulationResult, StepTimer, build_canonical_workflow,
};

use super::measure::Stopwatch;
use super::{BenchmarkReport, Options};

/// Jobs, and nodes in clusters of a hundred.
const JOBS_AND_NODES: [(u32, u32); 3] = [(10_000, 100), (100_000, 1_000), (1_000_000, 10_000)];
/// Time limit of a million jobs, and of fewer, in seconds.
const SECONDS_MAX: f64 = 120.0;
const DECISIONS_PER_S_MIN: f64 = 50_000.0;
/// Time limit of 99 of a hundred decisions, in milliseconds.
const DECISION_MS_MAX: f64 = 5.0;
/// Decisions at the beginning of a run, while nearly all jobs wait.
const EARLY_DECISIONS: usize = 100_000;

/// Takes the time of each decision, in nanoseconds.
#[derive(Default)]
struct DecisionTimes(Vec<u32>);

impl StepTimer for DecisionTimes {
    fn time_step(&mut self, step: impl FnOnce()) {
        let watch = Stopwatch::start();
        step();
        let nanoseconds = watch.elapsed().as_nanos().min(u128::from(u32::MAX));
        self.0.push(nanoseconds as u32);
    }
}

impl DecisionTimes {
    fn total_s(&self) -> f64 {
        self.0.iter().map(|time| f64::from(*time)).sum::<f64>() / 1e9
    }

    /// The time that so many of a thousand do not exceed, of the first `count`, in milliseconds.
    fn quantile_ms(&self, permille: usize, count: usize) -> f64 {
        let mut first = self.0[..count.min(self.0.len())].to_vec();
        first.sort_unstable();
        let at = (first.len() * permille / 1_000).min(first.len().saturating_sub(1));
        f64::from(first.get(at).copied().unwrap_or(0)) / 1e6
    }
}

/// Simulates each size under both policies.
pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    ensure!(options.only.is_empty(), "this benchmark has no parts");
    let sizes = options.choose(&JOBS_AND_NODES[..], &JOBS_AND_NODES[..2]);
    report.print_section("by the rules of the strategy `all`");
    simulate_series(sizes, Policy::Strategy(Strategy::All), "", report)?;
    report.print_section(
        "by need: each start is checked for pipelines that would wait for each other",
    );
    simulate_series(sizes, Policy::Need, "need_", report)?;
    report.add_figure_with_target("peak_mib", read_peak_mib(), 0.0..=4_096.0);
    Ok(())
}

/// Simulates each size; the names of all figures begin with `prefix`.
fn simulate_series(
    sizes: &[(u32, u32)],
    policy: Policy,
    prefix: &str,
    report: &mut BenchmarkReport,
) -> Result<()> {
    let mut rows = vec![[
        "jobs",
        "nodes",
        "s",
        "decisions/s",
        "p99 ms",
        "max ms",
        "failures",
        "looked at, of each job",
    ]];
    let mut lines: Vec<[String; 8]> = Vec::new();
    let mut taken: Vec<(u32, f64, f64)> = Vec::new();
    for &(jobs, nodes) in sizes {
        let mut times = DecisionTimes::default();
        let watch = Stopwatch::start();
        let run = simulate(jobs, nodes, policy, &mut times)?;
        let seconds = watch.elapsed().as_secs_f64();
        let decisions = times.0.len();
        let per_s = decisions as f64 / times.total_s();
        let (p99, max) = (
            times.quantile_ms(990, decisions),
            times.quantile_ms(1_000, decisions),
        );
        report.add_figure_with_target(
            &format!("{prefix}jobs_{jobs}_s"),
            seconds,
            0.0..=SECONDS_MAX,
        );
        let key = format!("{prefix}jobs_{jobs}_decisions_per_s");
        report.add_figure_with_target(&key, per_s, DECISIONS_PER_S_MIN..=f64::INFINITY);
        let key = format!("{prefix}jobs_{jobs}_decision_p99_ms");
        report.add_figure_with_target(&key, p99, 0.0..=DECISION_MS_MAX);
        let early = times.quantile_ms(990, EARLY_DECISIONS);
        let key = format!("{prefix}jobs_{jobs}_early_decision_p99_ms");
        report.add_figure_with_target(&key, early, 0.0..=DECISION_MS_MAX);
        report.add_figure(&format!("{prefix}jobs_{jobs}_decision_max_ms"), max);
        // Each record is found in a map or a heap of as many as there are jobs, at most.
        let work = run.records_examined as f64 * f64::from(jobs).ln();
        if let Some(&(fewer, before_s, work_before)) = taken.last() {
            let n_log_n = |n: u32| f64::from(n) * f64::from(n).ln();
            let over = |growth: f64| growth / (n_log_n(jobs) / n_log_n(fewer));
            let sizes = format!("over_n_log_n_{fewer}_{jobs}");
            let growth = over(seconds / before_s);
            report.add_figure_with_target(&format!("{prefix}growth_{sizes}"), growth, 0.0..=1.0);
            let growth = over(work / work_before);
            report.add_figure(&format!("{prefix}work_growth_{sizes}"), growth);
        }
        taken.push((jobs, seconds, work));
        let looked_at = run.records_examined as f64 / f64::from(jobs);
        report.add_figure(&format!("{prefix}jobs_{jobs}_looked_at_each"), looked_at);
        let texts = [seconds, per_s, p99, max].map(|value| format!("{value:.3}"));
        let [s, rate, p99, max] = texts;
        let failures = run.failures.to_string();
        lines.push([
            jobs.to_string(),
            nodes.to_string(),
            s,
            rate,
            p99,
            max,
            failures,
            format!("{looked_at:.0}"),
        ]);
    }
    let head = rows.pop().unwrap_or_default().map(str::to_owned).to_vec();
    let body = lines.into_iter().map(|line| line.to_vec());
    report.print_table(&std::iter::once(head).chain(body).collect::<Vec<_>>());
    Ok(())
}

fn simulate(
    jobs: u32,
    nodes: u32,
    policy: Policy,
    times: &mut DecisionTimes,
) -> Result<SimulationResult> {
    let clusters = nodes / 100;
    let class = |cluster| NodeClass {
        cluster: format!("c{cluster}"),
        ..NodeClass::new(nodes / clusters, 1, 20_000_000_000)
    };
    let environment = Environment {
        nodes: (0..clusters).map(class).collect(),
        home_bytes_per_s: 100_000_000,
        local_bytes_per_s: 100_000_000,
        // Each node fails once in a month.
        mtbf_s: Some(Duration::from_secs(30 * 86_400).as_secs() / u64::from(nodes) + 1),
        restart_s: 300,
    };
    let width = jobs / 5;
    let text = format!("width={width},depth=5,batch=20GB,private=0.1GB,run=1000s,var=0.2");
    let load = LoadModel::Declared {
        variability_ppm: 200_000,
    };
    let scenario = Scenario::new(environment, policy, load, 1);
    let workflow = build_canonical_workflow(&CanonicalWorkload::parse(&text)?);
    let run = Simulation::new(workflow, scenario).run_timed(times)?;
    ensure!(run.is_complete(), "{jobs} jobs: {:?}", run.outcome);
    ensure!(run.executions > u64::from(jobs), "no failure cost anything");
    Ok(run)
}

/// The most memory that this process had, in MiB.
pub(super) fn read_peak_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kib = line.and_then(|line| line.split_whitespace().next()?.parse::<f64>().ok());
    kib.unwrap_or(f64::NAN) / 1024.0
}
