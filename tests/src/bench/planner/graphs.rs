//! Graphs that are not canonical: how long it takes to plan one of a thousand jobs, by its
//! bottleneck and by simulating every candidate.

use std::fmt::Write;

use anyhow::{Result, anyhow, ensure};
use bafs_sim::planner::{Environment, Shape, Strategy, StrategyAllocation, plan_workload};
use bafs_sim::seeded_rng::SeededRng;
use bafs_sim::simulator::study::thesis_environment;
use bafs_sim::simulator::{
    LoadModel, Policy, Scenario, Simulation, SimulationResult, TrialScope, TrialsOutcome,
    decide_by_simulation,
};
use bafs_workflow::{Workflow, parse_workflow};

use super::super::measure::{Samples, time_seconds};
use super::super::{BenchmarkReport, Options};

/// Time limit for planning a graph of a thousand jobs, in seconds.
const PLAN_S_MAX: f64 = 1.0;

/// Some node fails so often, in seconds.
const MTBF_S: u64 = 6 * 3_600;

/// Plans graphs of a thousand jobs with unequal volumes, several parents, fan-out and fan-in, and
/// simulates every strategy with other seeds to see how good the choice was.
pub(super) fn run(options: &Options, report: &mut BenchmarkReport) -> Result<()> {
    let (mut by_shape, mut whole, mut regrets) = (Vec::new(), Vec::new(), Vec::new());
    let (mut by_model, mut over_need) = (Vec::new(), Vec::new());
    let environment = thesis_environment();
    let mut failing = Vec::new();
    for seed in 0..options.choose(10, 3) {
        let workflow = build_graph(seed)?;
        let load = LoadModel::Declared {
            variability_ppm: 100_000,
        };
        let (taken, (shape, mut planned)) = time_seconds(|| {
            let (shape, _) = Shape::from_largest_levels(&workflow, 0.1);
            let planned = plan_workload(shape.clone(), &environment);
            Ok((shape, planned))
        })?;
        by_shape.push(taken);
        let by_bottleneck = planned.choice.as_ref().map(|choice| choice.strategy);
        let (simulating, _) = time_seconds(|| {
            let work = (workflow.jobs.len() as u64, || workflow.clone());
            let doubts =
                decide_by_simulation(&mut planned, TrialScope::All, work, &environment, &load)?;
            ensure!(
                matches!(doubts, TrialsOutcome::Completed(_)),
                "nothing was simulated"
            );
            Ok(())
        })?;
        whole.push(taken + simulating);
        failing.push(time_plan_with_failures(&workflow, &load)?);
        let found = run_trials(&workflow, &shape, &environment, &load, seed)?;
        // No choice, or one that does not end, takes forever.
        let taken_s = |policy: Option<Policy>| {
            let run = found.iter().find(|(other, _)| Some(*other) == policy);
            let ended = run.filter(|(_, run)| run.is_complete());
            ended.map_or(f64::INFINITY, |(_, run)| run.seconds())
        };
        let each = found.iter().map(|(policy, _)| taken_s(Some(*policy)));
        let best_s = each.fold(f64::INFINITY, f64::min);
        ensure!(best_s.is_finite(), "no strategy ends graph {seed}");
        let choice_s = taken_s(planned.choice.map(|choice| Policy::from(choice.strategy)));
        by_model.push(taken_s(by_bottleneck.map(Policy::from)) / best_s);
        regrets.push(choice_s / best_s);
        over_need.push(choice_s / taken_s(Some(Policy::Need)));
    }
    let never = regrets.iter().filter(|regret| regret.is_infinite()).count();
    report.add_figure_with_target("graph_never_done", never as f64, 0.0..=0.0);
    let longest_s = whole.iter().copied().fold(0.0, f64::max);
    report.add_figure_with_target("graph_plan_longest_s", longest_s, 0.0..=PLAN_S_MAX);
    report.add_samples("graph_model_s", &Samples::new(by_shape));
    report.add_samples("graph_plan_s", &Samples::new(whole));
    report.add_samples("graph_plan_failing_s", &Samples::new(failing));
    for (figure, regrets) in [
        ("graph_model_regret", by_model),
        ("graph_regret", regrets),
        ("graph_over_need", over_need),
    ] {
        let ended: Vec<f64> = regrets.into_iter().filter(|it| it.is_finite()).collect();
        match ended.is_empty() {
            true => report.add_missing(figure, "no choice ended"),
            false => report.add_samples(figure, &Samples::new(ended)),
        }
    }
    Ok(())
}

/// Runs without a plan, and under every strategy that its bottleneck allows but remote I/O.
fn run_trials(
    workflow: &Workflow,
    shape: &Shape,
    environment: &Environment,
    load: &LoadModel,
    seed: u64,
) -> Result<Vec<(Policy, SimulationResult)>> {
    let possible = Strategy::THESIS_STRATEGIES
        .into_iter()
        .filter(|strategy| strategy.plan_allocation(shape, environment).is_planned());
    let policies = std::iter::once(Policy::Need).chain(possible.map(Policy::Strategy));
    let trial = |policy| {
        let scenario = Scenario::new(environment.clone(), policy, load.clone(), seed);
        let run = Simulation::new(workflow.clone(), scenario).run()?;
        Ok((policy, run))
    };
    policies.map(trial).collect()
}

/// How long it takes where nodes fail, so that each candidate is simulated with several seeds.
fn time_plan_with_failures(workflow: &Workflow, load: &LoadModel) -> Result<f64> {
    let environment = Environment {
        mtbf_s: Some(MTBF_S),
        ..thesis_environment()
    };
    let (taken, ()) = time_seconds(|| {
        let (shape, _) = Shape::from_largest_levels(workflow, 0.1);
        let mut planned = plan_workload(shape, &environment);
        let work = (workflow.jobs.len() as u64, || workflow.clone());
        decide_by_simulation(&mut planned, TrialScope::All, work, &environment, load)?;
        Ok(())
    })?;
    Ok(taken)
}

/// A hundred parts of ten jobs: a first one, eight beside each other, a last one that reads all.
fn build_graph(seed: u64) -> Result<Workflow> {
    let mut rng = SeededRng::new(seed);
    let mut text = String::new();
    for cache in 0..4 {
        let size = 1 + rng.next_below(40);
        writeln!(
            text,
            "volume db{cache} cache bafs://home/db{cache} {size} GB"
        )?;
    }
    for part in 0..100 {
        let size = |rng: &mut SeededRng| 10 + rng.next_below(500);
        writeln!(
            text,
            "volume in{part} scratch {} MB from bafs://home/in{part}",
            size(&mut rng)
        )?;
        for job in 0..10 {
            let runtime = 100 + rng.next_below(5_000);
            writeln!(
                text,
                "job j{part}x{job} {{\nexecutable = x\nruntime = {runtime} s\n}}"
            )?;
            writeln!(text, "volume v{part}x{job} scratch {} MB", size(&mut rng))?;
            writeln!(text, "mount v{part}x{job} j{part}x{job} /out")?;
            let cache = rng.next_below(4);
            writeln!(text, "mount db{cache} j{part}x{job} /db")?;
            match job {
                0 => writeln!(text, "mount in{part} j{part}x0 /in")?,
                1..9 => {
                    writeln!(text, "parent j{part}x0 child j{part}x{job}")?;
                    writeln!(text, "mount v{part}x0 j{part}x{job} /in ro")?;
                }
                _ => {
                    for middle in 1..9 {
                        writeln!(text, "parent j{part}x{middle} child j{part}x9")?;
                        writeln!(text, "mount v{part}x{middle} j{part}x9 /in{middle} ro")?;
                    }
                    writeln!(text, "extract v{part}x9 out bafs://home/out{part}")?;
                }
            }
        }
    }
    let none = |_: &str| Err("no files".to_owned());
    let parsed = parse_workflow("graph.bafs", &text, &none);
    Ok(parsed.map_err(|error| anyhow!("{error:?}"))?.workflow)
}
