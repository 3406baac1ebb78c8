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
use crate::planner::{Choice, Environment, Plan, Strategy};
use crate::workflow::Workflow;

/// Jobs of all simulations for one plan; some seconds on a slow machine. A workflow with more is
/// not simulated.
pub const PLAN_JOBS_MAX: usize = 40_000;
/// Seeds of simulations where nodes fail or run times vary, as far as [`PLAN_JOBS_MAX`] allows.
const SEEDS_MAX: u64 = 8;
/// With fewer nothing is known of how much the seeds differ.
const SEEDS_LEAST: usize = 3;
/// Of two strategies the faster one is known when the mean of their differences, seed by seed, is
/// so many times its standard error.
const CLEAR_ERRORS: f64 = 3.0;
/// Seeds of these simulations begin here, so that they are not those that users compare with.
const SEED_FIRST: u64 = 0x91a7_0000;
/// Predictions up to so much longer than the shortest are tried, as a share of it: on the studies
/// and on random workloads without failures the model is off by less between strategies. With
/// failures it is off by more than twice, and everything is tried.
const MODEL_ERROR: f64 = 0.35;
/// A simulation ends early when it takes so much longer than the best so far, as a share of it:
/// where nodes fail, one run may just have bad luck; where run times vary, another seed may bring
/// strategies nearer. Otherwise it ends as soon as it cannot be best.
const HOPELESS_FAILING: f64 = 2.0;
const HOPELESS_VARYING: f64 = 0.1;

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
    let (seeds, hopeless) = match (is_failing, load.varies()) {
        (true, _) => (SEEDS_MAX.min(affordable as u64), HOPELESS_FAILING),
        (false, true) => (SEEDS_MAX.min(affordable as u64), HOPELESS_VARYING),
        (false, false) => (1, 0.0),
    };
    let mut trials: Vec<Trial> = candidates.into_iter().map(Trial::new).collect();
    for seed in 0..seeds {
        for at in 0..trials.len() {
            // Who was near with one seed is waited for with the others.
            let limit_s = match seed == 0 || is_failing {
                true => limit_s(&trials, at, hopeless),
                false => f64::INFINITY,
            };
            let scenario = |strategy| Scenario {
                attempts_for_job: ATTEMPTS_FOR_JOB,
                ..Scenario::new(
                    environment.clone(),
                    Policy::Strategy(strategy),
                    load.clone(),
                    SEED_FIRST + seed,
                )
            };
            trials[at].run(&workflow, scenario, limit_s)?;
        }
        // Who is alone is the choice, whatever more seeds would say of its time.
        if trials.iter().filter(|trial| !trial.is_out).count() <= 1 {
            break;
        }
        if is_failing {
            continue;
        }
        if seed == 0 && seeds > 1 {
            leave_behind(&mut trials, hopeless);
        }
        if is_clear(&trials) {
            break;
        }
    }
    let tried = trials.into_iter().map(Trial::tried).collect::<Vec<_>>();
    choose(plan, &tried);
    Ok(Doubts::Tried(tried))
}

/// A candidate that is simulated with one seed after the other.
#[derive(Debug, Clone, PartialEq)]
struct Trial {
    strategy: Strategy,
    /// The time with each seed so far.
    times_s: Vec<f64>,
    /// It failed, or took longer than can be waited for.
    is_out: bool,
    failed: Option<String>,
}

impl Trial {
    fn new(strategy: Strategy) -> Self {
        Self {
            strategy,
            times_s: Vec::new(),
            is_out: false,
            failed: None,
        }
    }

    fn run(
        &mut self,
        workflow: &Workflow,
        scenario: impl FnOnce(Strategy) -> Scenario,
        limit_s: f64,
    ) -> Result<(), Stuck> {
        if self.is_out {
            return Ok(());
        }
        let simulation = Simulation::new(workflow.clone(), scenario(self.strategy));
        let run = simulation.run_until(limit_s)?;
        self.failed = run.as_ref().and_then(Run::failure);
        match run.filter(Run::is_complete) {
            Some(run) => self.times_s.push(run.seconds()),
            None => self.is_out = true,
        }
        Ok(())
    }

    /// The mean over the seeds so far.
    fn mean_s(&self) -> Option<f64> {
        let is_known = !self.is_out && !self.times_s.is_empty();
        is_known.then(|| self.sum_s() / self.times_s.len() as f64)
    }

    /// All times so far together.
    fn sum_s(&self) -> f64 {
        self.times_s.iter().sum()
    }

    fn tried(self) -> Tried {
        Tried {
            strategy: self.strategy,
            simulated_s: self.mean_s(),
            failed: self.failed,
        }
    }
}

/// The shortest mean so far.
fn best_s(trials: &[Trial]) -> f64 {
    let means = trials.iter().filter_map(Trial::mean_s);
    means.fold(f64::INFINITY, f64::min)
}

/// How long a trial may take with its next seed, until its times together cannot be the best. It is
/// compared with those that ended with the same seeds: a seed may bring bad luck to all. While none
/// has there is no limit, so that one is always left as the best, unless all fail.
fn limit_s(trials: &[Trial], at: usize, hopeless: f64) -> f64 {
    let own = &trials[at];
    let seeds = own.times_s.len() + 1;
    let peers = trials.iter().filter(|trial| !trial.is_out);
    let peers = peers.filter(|trial| trial.times_s.len() == seeds);
    let least_s = peers.map(Trial::sum_s).fold(f64::INFINITY, f64::min);
    least_s * (1.0 + hopeless) - own.sum_s()
}

/// Gives up those that took so much longer with the first seed than the fastest: who was tried
/// before it was not stopped then.
fn leave_behind(trials: &mut [Trial], hopeless: f64) {
    let limit_s = best_s(trials) * (1.0 + hopeless);
    for trial in trials {
        trial.is_out |= trial.mean_s().is_some_and(|mean_s| mean_s > limit_s);
    }
}

/// Whether further seeds would hardly show another one as the best. With one seed jobs compute as
/// long under every strategy, so that strategies differ by less than seeds do.
fn is_clear(trials: &[Trial]) -> bool {
    let left = || trials.iter().filter(|trial| !trial.is_out);
    let by_mean = |a: &&Trial, b: &&Trial| {
        let mean_s = |trial: &Trial| trial.mean_s().unwrap_or(f64::INFINITY);
        mean_s(a).total_cmp(&mean_s(b))
    };
    let Some(best) = left().min_by(by_mean) else {
        return true;
    };
    let mut others = left().filter(|trial| trial.strategy != best.strategy);
    others.all(|other| {
        let pairs = other.times_s.iter().zip(&best.times_s);
        let differences: Vec<f64> = pairs.map(|(other_s, best_s)| other_s - best_s).collect();
        let count = differences.len() as f64;
        let mean_s = differences.iter().sum::<f64>() / count;
        let squares = differences.iter().map(|d| (d - mean_s).powi(2));
        let error_s = (squares.sum::<f64>() / (count - 1.0) / count).sqrt();
        differences.len() >= SEEDS_LEAST && mean_s >= CLEAR_ERRORS * error_s
    })
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

/// The fastest is the choice, of equally fast ones the first of the table, which
/// accepts the fewest pitfalls. When none is left there is no choice: what the model predicts does
/// not hold then.
fn choose(plan: &mut Plan, tried: &[Tried]) {
    let timed = tried
        .iter()
        .filter_map(|t| Some((t.strategy, t.simulated_s?)));
    let mut timed: Vec<(Strategy, f64)> = timed.collect();
    timed.sort_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)));
    let Some(&(strategy, seconds)) = timed.first() else {
        plan.choice = None;
        // Who was stopped was compared with one that failed with a later seed.
        plan.refusal = tried.iter().find_map(|tried| tried.failed.clone());
        return;
    };
    let mut reason = format!("{strategy} takes {seconds:.0} s in the simulation");
    match timed.get(1) {
        Some((other, same)) if *same == seconds => {
            reason += &format!(", as does {other}, which may wait or fetch again more often");
        }
        Some((other, slower)) => {
            let saved = 100.0 * (1.0 - seconds / slower);
            reason += &format!(", {saved:.1} % less than {other} ({slower:.0} s)");
        }
        None => reason += ", and no other strategy is faster",
    }
    plan.choice = Some(Choice { strategy, reason });
    plan.refusal = None;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trial(strategy: Strategy, times_s: &[f64]) -> Trial {
        Trial {
            times_s: times_s.to_vec(),
            ..Trial::new(strategy)
        }
    }

    #[test]
    fn seeds_are_tried_until_the_best_is_clear_from_their_scatter() {
        let slice = trial(Strategy::Slice, &[100.0, 120.0, 110.0]);
        let is_clear_from =
            |other_s: &[f64]| is_clear(&[slice.clone(), trial(Strategy::Minimal, other_s)]);
        assert!(
            is_clear_from(&[103.0, 122.5, 113.5]),
            "seed by seed it is always 3 s longer"
        );
        assert!(
            !is_clear_from(&[101.0, 119.0, 113.0]),
            "once it was the faster one"
        );
        assert!(is_clear_from(&[100.0, 120.0, 110.0]), "they are the same");
        let few = [
            trial(Strategy::Slice, &[100.0, 120.0]),
            trial(Strategy::Minimal, &[150.0, 170.0]),
        ];
        assert!(!is_clear(&few), "two seeds tell nothing of the scatter");
    }

    #[test]
    fn who_was_tried_before_the_fastest_is_left_behind_as_those_after_it_are() {
        let mut trials = [
            trial(Strategy::AllBatch, &[130.0]),
            trial(Strategy::Slice, &[100.0]),
            trial(Strategy::Minimal, &[109.0]),
        ];
        leave_behind(&mut trials, HOPELESS_VARYING);
        let left = trials.iter().filter(|trial| !trial.is_out);
        let left: Vec<Strategy> = left.map(|trial| trial.strategy).collect();
        assert_eq!(left, [Strategy::Slice, Strategy::Minimal]);
    }

    #[test]
    fn a_seed_with_bad_luck_for_all_stops_nobody() {
        let (calm, unlucky) = (100.0, 900.0);
        let mut trials = [
            trial(Strategy::Slice, &[calm]),
            trial(Strategy::Minimal, &[110.0]),
        ];
        assert_eq!(limit_s(&trials, 0, HOPELESS_FAILING), f64::INFINITY);
        trials[0].times_s.push(unlucky);
        let limit_s = limit_s(&trials, 1, HOPELESS_FAILING);
        assert_eq!(limit_s, 3.0 * (calm + unlucky) - 110.0);
    }

    #[test]
    fn one_that_was_given_up_is_not_waited_for() {
        let mut slow = trial(Strategy::Minimal, &[]);
        slow.is_out = true;
        assert!(is_clear(&[trial(Strategy::Slice, &[100.0]), slow]));
    }
}
