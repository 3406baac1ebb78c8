//! The choice of a plan made sure by simulation: where the model's best predictions are closer than
//! its error, and for workflows whose shape no equation knows. Predicts nothing itself.
//!
//! Bounded by the number of jobs that are simulated and by how often each is tried, not by a clock,
//! so that equal arguments give equal plans on every machine.

use serde::Serialize;

use super::engine::Simulation;
use super::load::Load;
use super::policy::{Policy, Scenario};
use super::record::{Run, Stuck};
use crate::planner::{Choice, Environment, Plan, Strategy, predict};
use crate::workflow::Workflow;

/// Jobs of all simulations for one plan; some seconds on a slow machine. A workflow with more is
/// not simulated.
pub const PLAN_JOBS_MAX: usize = 40_000;
/// Seeds of simulations where nodes fail, as far as [`PLAN_JOBS_MAX`] allows.
const SEEDS_MAX: u64 = 8;
/// Seeds of these simulations begin here, so that they are not those that users compare with.
const SEED_FIRST: u64 = 0x91a7_0000;
/// Predictions up to so much longer than the shortest are tried, as a share of it: on the studies
/// and on random workloads without failures the model is off by less between strategies. With
/// failures it is off by more than twice, and everything is tried.
const MODEL_ERROR: f64 = 0.35;
/// Where nodes fail, a simulation ends early when it takes so much longer than the best so far, as
/// a share of it: one run may just have bad luck. Otherwise it ends as soon as it cannot be best.
const HOPELESS_FAILING: f64 = 2.0;
/// So many times as long as predicted without failures, where there is no best yet.
const HOPELESS_FIRST: f64 = 20.0;

/// Executions and failures of nodes for each job, after which a strategy is given up: others are
/// done with far fewer.
const ATTEMPTS_FOR_JOB: u32 = 20;

/// What a simulation for a plan found.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Tried {
    /// What was simulated.
    pub strategy: Strategy,
    /// Mean time over the seeds, in seconds; nothing when it was given up as slower than the best,
    /// or failed.
    pub simulated_s: Option<f64>,
    /// Why the workflow could not be done so, if it could not.
    pub failed: Option<String>,
}

/// Which candidates of a plan are simulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doubt {
    /// Those that the model cannot tell from its choice: its equations describe the workload.
    Ties,
    /// All that are possible: the equations only bound the workload.
    All,
}

/// What came of doubts about a plan.
#[derive(Debug, Clone, PartialEq)]
pub enum Doubts {
    /// There were none: the model's choice stands.
    None,
    /// There were, but too many jobs to simulate: the model's choice stands all the same.
    TooManyJobs,
    /// What was found, in the order of trying.
    Tried(Vec<Tried>),
}

/// Simulates candidates of a plan and lets the fastest be its choice. The workflow has so many
/// `jobs`, and is made only when they are few enough.
///
/// # Errors
/// When a simulated run does not come to an end: a defect.
pub fn decide(
    plan: &mut Plan,
    doubt: Doubt,
    (jobs, workflow): (u64, impl FnOnce() -> Workflow),
    environment: &Environment,
    load: &Load,
) -> Result<Doubts, Stuck> {
    let is_failing = environment.mtbf_s.is_some();
    let candidates = doubtful(plan, doubt, is_failing);
    let least = match doubt {
        Doubt::Ties => 2,
        Doubt::All => 1,
    };
    if candidates.len() < least {
        return Ok(Doubts::None);
    }
    let jobs = usize::try_from(jobs.max(1)).unwrap_or(usize::MAX);
    let affordable = PLAN_JOBS_MAX / jobs.saturating_mul(candidates.len());
    if affordable == 0 {
        return Ok(Doubts::TooManyJobs);
    }
    let workflow = workflow();
    let (seeds, hopeless) = match is_failing {
        true => (SEEDS_MAX.min(affordable as u64), HOPELESS_FAILING),
        false => (1, 0.0),
    };
    let first_limit_s = HOPELESS_FIRST * calm_s(plan, environment);
    let (mut tried, mut best_s) = (Vec::new(), f64::INFINITY);
    for strategy in candidates {
        let (mut sum_s, mut failed) = (Some(0.0), None);
        for seed in 0..seeds {
            let (policy, seed) = (Policy::Strategy(strategy), SEED_FIRST + seed);
            let scenario = Scenario {
                attempts_for_job: ATTEMPTS_FOR_JOB,
                ..Scenario::new(environment.clone(), policy, load.clone(), seed)
            };
            let limit_s = first_limit_s.min(best_s * (1.0 + hopeless));
            let run = Simulation::new(workflow.clone(), scenario).run_until(limit_s)?;
            failed = run.as_ref().and_then(Run::failure);
            let seconds = run.filter(Run::is_complete).map(|run| run.seconds());
            sum_s = sum_s.zip(seconds).map(|(sum, seconds)| sum + seconds);
            if sum_s.is_none() {
                break;
            }
        }
        let simulated_s = sum_s.map(|sum| sum / seeds as f64);
        best_s = best_s.min(simulated_s.unwrap_or(f64::INFINITY));
        tried.push(Tried {
            strategy,
            simulated_s,
            failed,
        });
    }
    choose(plan, &tried);
    Ok(Doubts::Tried(tried))
}

/// The longest prediction without failures. Remote I/O may take a thousand times as long.
fn calm_s(plan: &Plan, environment: &Environment) -> f64 {
    let calm = Environment {
        mtbf_s: None,
        ..environment.clone()
    };
    let strategies = plan.candidates.iter().map(|c| c.allocation.strategy);
    let strategies = strategies.filter(|strategy| *strategy != Strategy::Remote);
    let predicted = strategies.filter_map(|strategy| predict(strategy, &plan.shape, &calm));
    // A workload of no known length still ends.
    predicted.fold(86_400.0, f64::max)
}

/// The candidates in the order of their predictions.
fn doubtful(plan: &Plan, doubt: Doubt, is_failing: bool) -> Vec<Strategy> {
    let possible = plan.candidates.iter().filter(|candidate| {
        let allocation = &candidate.allocation;
        allocation.is_possible() && allocation.strategy != Strategy::Remote
    });
    let seconds = |predicted: Option<f64>| predicted.unwrap_or(f64::INFINITY);
    let mut timed: Vec<(f64, Strategy)> = possible
        .map(|candidate| {
            (
                seconds(candidate.predicted_s),
                candidate.allocation.strategy,
            )
        })
        .collect();
    timed.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
    let least_s = timed.first().map_or(f64::INFINITY, |first| first.0);
    let is_near = |(predicted_s, _): &(f64, Strategy)| match doubt {
        Doubt::Ties => is_failing || *predicted_s <= least_s * (1.0 + MODEL_ERROR),
        Doubt::All => true,
    };
    let near = timed.into_iter().filter(is_near);
    near.map(|(_, strategy)| strategy).collect()
}

/// The fastest is the choice. When all failed there is none; when some were only slower than can
/// be waited for, the model's stands.
fn choose(plan: &mut Plan, tried: &[Tried]) {
    if let Some(why) = tried.first().and_then(|first| first.failed.clone())
        && tried.iter().all(|tried| tried.failed.is_some())
    {
        plan.choice = None;
        plan.refusal = Some(why);
        return;
    }
    let timed = tried
        .iter()
        .filter_map(|t| Some((t.strategy, t.simulated_s?)));
    let mut timed: Vec<(Strategy, f64)> = timed.collect();
    timed.sort_by(|a, b| a.1.total_cmp(&b.1));
    let Some(&(strategy, seconds)) = timed.first() else {
        return;
    };
    let mut reason = format!("{strategy} takes {seconds:.0} s in the simulation");
    match timed.get(1) {
        Some((other, slower)) => {
            let saved = 100.0 * (1.0 - seconds / slower);
            reason += &format!(", {saved:.1} % less than {other} ({slower:.0} s)");
        }
        None => reason += ", and no other strategy is faster",
    }
    plan.choice = Some(Choice { strategy, reason });
    plan.refusal = None;
}
