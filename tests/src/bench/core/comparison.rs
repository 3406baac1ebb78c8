//! Compares what two builds of the program decide: seeded runs are simulated by both, each under
//! all policies that it can follow. What counts is the outcome: how long a run takes, what is done
//! again, whether limits are kept.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, anyhow, ensure};
use bafs_proto::ids::ServerId;
use bafs_proto::time::Time;
use bafs_sched::{Event, NullSelector, Scheduler, Space};
use bafs_sim::planner::{CanonicalWorkload, Environment, Strategy};
use bafs_sim::simulator::{
    LoadModel, Policy, Scenario, Simulation, StepTimer, build_canonical_workflow,
};
use bafs_workflow::{Workflow, parse_workflow};
use nix::sys::resource::UsageWho;
use serde_json::Value;

use super::SPEED_MIN;
use super::graphs::{ComparedCase, ComparedWorkload};
use super::measured_parts::read_processor_s;
use crate::bafs_program;
use crate::bench::{BenchmarkReport, Options};

/// Of the makespans, new over old: the 99th percentile may be so much.
const MAKESPAN_RATIO_MAX: f64 = 1.02;

/// Of so many cases one is run by the strategy selector, which simulates strategies itself.
const CASES_PER_ADAPTIVE: u64 = 8;

/// So many of the runs that became slowest are told one by one.
const SLOWEST_SHOWN: usize = 20;

/// Run times vary so much where a workflow file says nothing, in millionths: the default of
/// `bafs sim --variability`.
const VARIABILITY_PPM: u64 = 100_000;

/// Machines of the large run whose processor time is compared.
const LARGE_ENVIRONMENT: &str = "home-rate = \"100 MB/s\"\nlocal-rate = \"100 MB/s\"\n\
    [[nodes]]\ncount = 1000\ncpus = 2\nstorage = \"2 GB\"\n";

/// Odd, so that one round is the median.
const SPEED_ROUNDS: usize = 5;

/// One run, as `bafs sim --json` tells it.
#[derive(Debug, Clone)]
struct SimulatedRun {
    policy: String,
    elapsed_us: u64,
    is_complete: bool,
    executions: f64,
    home_bytes: f64,
}

impl SimulatedRun {
    fn parse(run: &Value) -> Option<Self> {
        Some(Self {
            policy: run["policy"].as_str()?.to_owned(),
            elapsed_us: run["elapsed_us"].as_u64()?,
            is_complete: run["outcome"] == "Complete",
            executions: run["executions"].as_f64()?,
            home_bytes: run["home_bytes"].as_f64()?,
        })
    }
}

/// A run as both simulate it.
struct ComparedRun {
    seed: u64,
    class: String,
    old: SimulatedRun,
    new: SimulatedRun,
}

impl ComparedRun {
    fn makespan_ratio(&self) -> f64 {
        self.new.elapsed_us as f64 / self.old.elapsed_us.max(1) as f64
    }
}

/// Simulates runs with both programs until at least `count` are compared.
pub(super) fn compare_programs(
    before: &Path,
    count: usize,
    report: &mut BenchmarkReport,
) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let mut compared: Vec<ComparedRun> = Vec::new();
    let (mut old_alone, mut new_alone, mut violations) = (0, 0, 0);
    for seed in 1.. {
        if compared.len() >= count {
            break;
        }
        let case = ComparedCase::of_seed(seed);
        let old = simulate(before, &case, directory.path())?;
        let mut new = simulate(&bafs_program(), &case, directory.path())?;
        violations += count_violations(&case, new.values())?;
        for (policy, old) in old {
            let Some(new) = new.remove(&policy) else {
                old_alone += u64::from(old.is_complete);
                continue;
            };
            match (old.is_complete, new.is_complete) {
                (true, true) => compared.push(ComparedRun {
                    seed,
                    class: case.class(&policy),
                    old,
                    new,
                }),
                (true, false) => old_alone += 1,
                (false, true) => new_alone += 1,
                (false, false) => {}
            }
        }
    }
    report_classes(&compared, report);
    report_slowest(&compared, report);
    report.add_figure("scenarios_compared", compared.len() as f64);
    report.add_figure("complete_before_alone", old_alone as f64);
    report.add_figure("complete_now_alone", new_alone as f64);
    let summary = summarize(compared.iter());
    report.add_figure("makespan_ratio_mean", summary.mean);
    let p99 = summary.p99;
    report.add_figure_with_target("makespan_ratio_p99", p99, 0.0..=MAKESPAN_RATIO_MAX);
    report.add_figure_with_target("reruns_ratio", summary.executions, 0.0..=1.0);
    report.add_figure("home_bytes_ratio", summary.home_bytes);
    report.add_figure_with_target("limit_violations", violations as f64, 0.0..=0.0);
    Ok(())
}

/// Simulates one large run by both programs in turn, and compares the processor time. No journal is
/// written, so this is the core and the simulator around it.
pub(super) fn compare_speed(
    before: &Path,
    options: &Options,
    report: &mut BenchmarkReport,
) -> Result<()> {
    let directory = tempfile::tempdir()?;
    let environment = directory.path().join("environment.toml");
    std::fs::write(&environment, LARGE_ENVIRONMENT)?;
    let width = options.choose(20_000, 500);
    let workload = format!("width={width},depth=5,batch=100MB,private=5MB,run=60s,var=0.1");
    let simulate_large = |program: &Path| -> Result<f64> {
        let mut command = Command::new(program);
        command.args(["sim", "--json", "--seed", "1", "--canonical", &workload]);
        command.arg("--environment").arg(&environment);
        let earlier_s = read_processor_s(UsageWho::RUSAGE_CHILDREN);
        let output = command.output()?;
        ensure!(output.status.success(), "{}", program.display());
        Ok(read_processor_s(UsageWho::RUSAGE_CHILDREN) - earlier_s)
    };
    let mut ratios = Vec::new();
    for _ in 0..SPEED_ROUNDS {
        let before_s = simulate_large(before)?;
        ratios.push(before_s / simulate_large(&bafs_program())?);
    }
    ratios.sort_by(f64::total_cmp);
    let median = ratios[SPEED_ROUNDS / 2];
    report.add_figure_with_target("simulated_speed_vs_before", median, SPEED_MIN..=1e9);
    Ok(())
}

/// What a program makes of a case, by policy; nothing of what it refuses.
fn simulate(
    program: &Path,
    case: &ComparedCase,
    directory: &Path,
) -> Result<BTreeMap<String, SimulatedRun>> {
    let environment = directory.join("environment.toml");
    std::fs::write(&environment, &case.environment)?;
    let mut command = Command::new(program);
    command
        .args(["sim", "--json", "--environment"])
        .arg(environment);
    command.args(["--seed", &case.seed.to_string()]);
    match &case.workload {
        ComparedWorkload::Pipelines(text) => command.args(["--canonical", text]),
        ComparedWorkload::Graph(text) => {
            let path = directory.join("graph.bafs");
            std::fs::write(&path, text)?;
            command.arg(path)
        }
    };
    match case.seed % CASES_PER_ADAPTIVE {
        0 => command.args(["--strategy", "adaptive"]),
        _ => command.arg("--all"),
    };
    let output = command
        .output()
        .with_context(|| program.display().to_string())?;
    if !output.status.success() {
        return Ok(BTreeMap::new());
    }
    let said: Value = serde_json::from_slice(&output.stdout)?;
    let runs = said["runs"].as_array().into_iter().flatten();
    let by_policy = runs.map(|run| {
        let run = SimulatedRun::parse(run).context("a run without its figures")?;
        Ok((run.policy.clone(), run))
    });
    by_policy.collect()
}

/// Compared runs in a few numbers, new over old.
struct ComparisonSummary {
    runs: usize,
    /// Of the makespans.
    mean: f64,
    p99: f64,
    slowest: f64,
    /// Runs that are more than 2 % faster and slower.
    faster: usize,
    slower: usize,
    /// Of all executions, and of all traffic of the links to home.
    executions: f64,
    home_bytes: f64,
}

fn summarize<'r>(runs: impl Iterator<Item = &'r ComparedRun>) -> ComparisonSummary {
    let (mut ratios, mut executions, mut bytes) = (Vec::new(), [0.0; 2], [0.0; 2]);
    for run in runs {
        ratios.push(run.makespan_ratio());
        for (at, one) in [&run.new, &run.old].into_iter().enumerate() {
            executions[at] += one.executions;
            bytes[at] += one.home_bytes;
        }
    }
    ratios.sort_by(f64::total_cmp);
    let count = ratios.len().max(1);
    let at = |part: usize| ratios.get(part.min(count - 1)).copied().unwrap_or(1.0);
    ComparisonSummary {
        runs: ratios.len(),
        mean: ratios.iter().sum::<f64>() / count as f64,
        p99: at(count * 99 / 100),
        slowest: at(count),
        faster: ratios.iter().filter(|ratio| **ratio < 0.98).count(),
        slower: ratios.iter().filter(|ratio| **ratio > 1.02).count(),
        executions: executions[0] / executions[1].max(1.0),
        home_bytes: bytes[0] / bytes[1].max(1.0),
    }
}

fn report_classes(compared: &[ComparedRun], report: &BenchmarkReport) {
    let mut classes: BTreeMap<&str, Vec<&ComparedRun>> = BTreeMap::new();
    for run in compared {
        classes.entry(&run.class).or_default().push(run);
    }
    let head = [
        "class",
        "runs",
        "time",
        "p99",
        "slowest",
        "faster",
        "slower",
        "executions",
        "home",
    ];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let all = ("all", compared.iter().collect());
    for (class, runs) in classes.into_iter().chain([all]) {
        let summary = summarize(runs.into_iter());
        let ratio = |value: f64| format!("{value:.3}");
        rows.push(vec![
            class.to_owned(),
            summary.runs.to_string(),
            ratio(summary.mean),
            ratio(summary.p99),
            ratio(summary.slowest),
            summary.faster.to_string(),
            summary.slower.to_string(),
            ratio(summary.executions),
            ratio(summary.home_bytes),
        ]);
    }
    report.print_section("runs of both programs, new over old");
    report.print_table(&rows);
}

/// Tells which runs became slowest, so that each can be looked into.
fn report_slowest(compared: &[ComparedRun], report: &BenchmarkReport) {
    let head = ["seed", "policy", "class", "time", "executions", "home"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    let mut slowest: Vec<&ComparedRun> = compared.iter().collect();
    slowest.sort_by(|one, other| other.makespan_ratio().total_cmp(&one.makespan_ratio()));
    for run in slowest.into_iter().take(SLOWEST_SHOWN) {
        let ratio = |new: f64, old: f64| format!("{:.3}", new / old.max(1.0));
        rows.push(vec![
            run.seed.to_string(),
            run.old.policy.clone(),
            run.class.clone(),
            format!("{:.3}", run.makespan_ratio()),
            ratio(run.new.executions, run.old.executions),
            ratio(run.new.home_bytes, run.old.home_bytes),
        ]);
    }
    report.print_section("runs that became slowest, new over old");
    report.print_table(&rows);
}

/// Follows a run, and counts the nodes that have more than they offer after each fact.
struct LimitWatch {
    scheduler: Scheduler,
    violations: u64,
}

impl StepTimer for LimitWatch {
    fn note_event(&mut self, now: Time, event: &Event) {
        let mut actions = Vec::new();
        self.scheduler.step(now, event.clone(), &mut actions);
        let mut running: BTreeMap<ServerId, u32> = BTreeMap::new();
        for (_, server) in self.scheduler.running_executions() {
            *running.entry(server).or_default() += 1;
        }
        for (server, node) in self.scheduler.nodes() {
            let free: Space = node.capacity.saturating_sub(node.foreign_space);
            let is_over = !free.can_hold(self.scheduler.reserved(server))
                || running.get(&server).is_some_and(|jobs| *jobs > node.slots);
            self.violations += u64::from(is_over);
        }
    }

    fn time_step(&mut self, step: impl FnOnce()) {
        step();
    }
}

/// How often a node had more than it offers in runs of a case.
fn count_violations<'r>(
    case: &ComparedCase,
    runs: impl Iterator<Item = &'r SimulatedRun>,
) -> Result<u64> {
    let mut violations = 0;
    for run in runs {
        // What the selector does is not told here.
        let Some(policy) = parse_policy(&run.policy) else {
            continue;
        };
        let (workflow, variability_ppm) = build_workflow(&case.workload)?;
        let environment = Environment::parse(&case.environment);
        let environment = environment.map_err(|error| anyhow!("{}", error.message))?;
        let load = LoadModel::Declared { variability_ppm };
        let simulation = Simulation::new(
            workflow,
            Scenario::new(environment, policy, load, case.seed),
        );
        let mut watch = LimitWatch {
            scheduler: simulation.journal_header().new_scheduler(&NullSelector),
            violations: 0,
        };
        let simulated = simulation.run_timed(&mut watch)?;
        let is_same = simulated.elapsed_us == run.elapsed_us;
        ensure!(is_same, "seed {}, {}: another run", case.seed, run.policy);
        violations += watch.violations;
    }
    Ok(violations)
}

fn parse_policy(name: &str) -> Option<Policy> {
    let mut strategies = Strategy::THESIS_STRATEGIES.into_iter();
    match name {
        "need" => Some(Policy::Need),
        _ => {
            let strategy = strategies.find(|strategy| strategy.to_string() == name)?;
            Some(Policy::Strategy(strategy))
        }
    }
}

/// The workflow, and how much its run times vary, in millionths.
fn build_workflow(workload: &ComparedWorkload) -> Result<(Workflow, u64)> {
    match workload {
        ComparedWorkload::Pipelines(text) => {
            let canonical = CanonicalWorkload::parse(text).map_err(|error| anyhow!("{error}"))?;
            let variability_ppm = (canonical.shape().variability * 1e6).round() as u64;
            Ok((build_canonical_workflow(&canonical), variability_ppm))
        }
        ComparedWorkload::Graph(text) => {
            let none = |path: &str| Err(path.to_owned());
            let parsed = parse_workflow("graph.bafs", text, &none);
            let parsed = parsed.map_err(|error| anyhow!("{error}"))?;
            Ok((parsed.workflow, VARIABILITY_PPM))
        }
    }
}
