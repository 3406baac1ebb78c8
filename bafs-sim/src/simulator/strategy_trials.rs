//! The choice of a plan made sure by simulation: where the model's best predictions are closer than
//! its error, and for workflows whose shape no equation knows. Predicts nothing itself.
//!
//! Bounded by the number of jobs that are simulated, by how often each is tried, and by the records
//! that are looked at for that, not by a clock, so that equal arguments give equal plans on every
//! machine.

use bafs_workflow::{VolumeKind, Workflow};
use serde::Serialize;

use super::load::LoadModel;
use super::policy::{Policy, Scenario};
use super::simulation_result::StalledRunError;
use super::trial_candidate::{
    TrialCandidate, discard_seed, drop_hopeless, drop_slower, find_twin, is_clear, is_undecided,
    time_limit_us, us_to_s,
};
use crate::planner::{
    Allocation, Environment, Plan, Strategy, StrategyCandidate, StrategyChoice, is_need_worthwhile,
};

/// Jobs of all simulations for one plan; some seconds on a slow machine. A workflow with more is
/// not simulated.
pub const PLAN_JOBS_MAX: usize = 40_000;
/// The same where nodes fail.
pub const PLAN_JOBS_FAILING_MAX: usize = 60_000;
/// Jobs of all simulations with further seeds then: strategies differ less than seeds do, so the
/// remaining ones need more of them.
const SEEDS_JOBS_FAILING_MAX: usize = 200_000;
/// Simulations for one plan then, of all candidates together: a third of them finds the clearly
/// slower ones, and two close candidates get all seeds.
const PLAN_RUNS_FAILING_MAX: usize = 100;
/// Parts of caches, were each on every node, of a workflow that is simulated for a plan: dividing
/// caches among more nodes takes minutes.
pub(super) const PLAN_CACHE_PARTS_MAX: u64 = 100_000;
/// Records that all simulations for one plan look at: a minute or two at most. Other plans need far
/// fewer than absurd environments, where nodes fail before any job finishes.
pub(super) const PLAN_RECORDS_MAX: u64 = 4_000_000_000;
/// Seeds of simulations if run times vary, within [`PLAN_JOBS_MAX`].
const SEEDS_VARYING_MAX: u64 = 8;
/// The same where nodes fail.
const SEEDS_FAILING_MAX: u64 = 30;
/// Seeds of these simulations begin here, so that they are not those that users compare with.
const SEED_FIRST: u64 = 0x91a7_0000;
/// Predictions up to so much longer than the shortest are tried, as a share of it: on the studies
/// and on random workloads without failures the model is off by less between strategies. With
/// failures it is off by more than twice, and everything is tried.
const MODEL_ERROR_MAX: f64 = 0.35;
/// A simulation stops early when it takes so much longer than the best, as a share of it. Where
/// nodes fail, one run may just have bad luck; where run times vary, another seed may bring
/// strategies nearer. Otherwise it ends as soon as it cannot be best.
pub(super) const HOPELESS_FACTOR_FAILING: f64 = 2.0;
pub(super) const HOPELESS_FACTOR_VARYING: f64 = 0.25;

/// Executions and node failures for each job after which a strategy is stopped: other strategies
/// need far fewer.
const ATTEMPTS_PER_JOB_MAX: u32 = 20;

/// The result of simulations for a plan.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct TrialResult {
    /// The simulated strategy.
    pub strategy: Strategy,
    /// Mean time over the seeds, in seconds; `None` if it was stopped as slower than the best, or
    /// failed.
    pub simulated_s: Option<f64>,
    /// How many seeds it ended with.
    pub seeds: u64,
    /// Why the workflow could not be done so, if it could not.
    pub failure: Option<String>,
}

/// Which candidates of a plan are simulated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrialScope {
    /// Strategies that the model cannot tell from its choice: its equations describe the workload.
    /// Where nodes differ they do not, and all are simulated.
    Ties,
    /// All possible strategies, and [`Strategy::Need`] in any case: the equations only bound the
    /// workload.
    All,
}

/// The outcome of trials for a plan.
#[derive(Debug, Clone, PartialEq)]
pub enum TrialsOutcome {
    /// No trial was needed: the model's choice stands.
    NotNeeded,
    /// There were too many jobs or cache partitions to simulate: the model's choice stands.
    TooLarge,
    /// The results, in the order of trial.
    Completed(Vec<TrialResult>),
}

/// Simulates candidates of a plan and chooses the fastest. The workflow has so many `jobs`, and is
/// built only if they are few enough.
///
/// # Errors
/// When a simulated run stalls: a defect.
pub fn decide_by_simulation(
    plan: &mut Plan,
    doubt: TrialScope,
    (jobs, workflow): (u64, impl FnOnce() -> Workflow),
    environment: &Environment,
    load: &LoadModel,
) -> Result<TrialsOutcome, StalledRunError> {
    let work = (jobs, workflow);
    decide_within_records(plan, doubt, work, environment, load, PLAN_RECORDS_MAX)
}

/// The same, with a bound on the examined records.
fn decide_within_records(
    plan: &mut Plan,
    doubt: TrialScope,
    (jobs, workflow): (u64, impl FnOnce() -> Workflow),
    environment: &Environment,
    load: &LoadModel,
    records_max: u64,
) -> Result<TrialsOutcome, StalledRunError> {
    let is_failing = environment.mtbf_s.is_some();
    // No equation covers nodes that differ.
    let doubt = match environment.is_uniform() {
        true => doubt,
        false => TrialScope::All,
    };
    let mut candidates = select_candidates(plan, doubt, is_failing);
    // By the table, no strategy fits.
    let is_last_resort = !plan.candidates.iter().any(|it| it.allocation.is_planned());
    let least = match doubt {
        TrialScope::Ties if !is_failing => 2,
        // The model's prediction for it does not hold either.
        _ => 1,
    };
    if candidates.len() < least {
        return Ok(TrialsOutcome::NotNeeded);
    }
    let jobs = usize::try_from(jobs.max(1)).unwrap_or(usize::MAX);
    let jobs_max = match is_failing {
        true => PLAN_JOBS_FAILING_MAX,
        false => PLAN_JOBS_MAX,
    };
    // The model chooses no strategy if none fits.
    let too_large = match is_last_resort {
        true => TrialsOutcome::NotNeeded,
        false => TrialsOutcome::TooLarge,
    };
    let affordable = |candidates: usize| jobs_max / jobs.saturating_mul(candidates);
    // Strategies that seem impossible take no simulation time from possible ones.
    if affordable(candidates.len()) == 0 && !is_last_resort {
        let is_possible = |strategy: &Strategy| {
            let mut all = plan.candidates.iter().map(|it| &it.allocation);
            all.any(|it| it.strategy == *strategy && it.is_planned())
        };
        candidates.retain(is_possible);
    }
    let affordable = affordable(candidates.len());
    if affordable == 0 {
        return Ok(too_large);
    }
    let workflow = workflow();
    if count_cache_parts(&workflow, environment) > PLAN_CACHE_PARTS_MAX {
        return Ok(too_large);
    }
    let runs_max = match is_failing {
        true => (SEEDS_JOBS_FAILING_MAX / jobs).min(PLAN_RUNS_FAILING_MAX),
        false => affordable * candidates.len(),
    };
    let (seeds, hopeless) = match (is_failing, load.is_variable()) {
        (true, _) => (SEEDS_FAILING_MAX, HOPELESS_FACTOR_FAILING),
        (false, true) => (
            SEEDS_VARYING_MAX.min(affordable as u64),
            HOPELESS_FACTOR_VARYING,
        ),
        (false, false) => (1, 0.0),
    };
    let field = TrialRunner {
        workflow: &workflow,
        environment,
        load,
        seeds,
        runs_max,
        hopeless_factor: hopeless,
    };
    let mut trials: Vec<TrialCandidate> = candidates.into_iter().map(TrialCandidate::new).collect();
    field.run_trials(&mut trials, records_max)?;
    match trials.iter().any(|trial| trial.mean_s().is_some()) {
        false if is_last_resort => plan.refusal = describe_last_resort(plan, &trials),
        _ => choose_fastest(plan, &trials),
    }
    let tried = trials.into_iter().map(TrialCandidate::into_result);
    Ok(TrialsOutcome::Completed(tried.collect()))
}

/// The scenario of a candidate with one of the seeds.
pub(super) fn trial_scenario(
    environment: Environment,
    strategy: Strategy,
    load: LoadModel,
    seed: u64,
    looked_at_max: u64,
) -> Scenario {
    let policy = Policy::from(strategy);
    Scenario {
        attempts_per_job_max: ATTEMPTS_PER_JOB_MAX,
        records_examined_max: looked_at_max,
        ..Scenario::new(environment, policy, load, SEED_FIRST + seed)
    }
}

/// Parts of all caches, were each on every node.
pub(super) fn count_cache_parts(workflow: &Workflow, environment: &Environment) -> u64 {
    let volumes = workflow.volumes.iter();
    let caches = volumes.filter(|volume| matches!(volume.kind, VolumeKind::Cache { .. }));
    (caches.count() as u64).saturating_mul(environment.storing_nodes())
}

/// Where candidates are simulated.
struct TrialRunner<'f> {
    workflow: &'f Workflow,
    environment: &'f Environment,
    load: &'f LoadModel,
    /// Seeds at most.
    seeds: u64,
    /// Simulations at most, of all candidates together.
    runs_max: usize,
    /// How much longer than the best is too long, as a share of it.
    hopeless_factor: f64,
}

impl TrialRunner<'_> {
    /// Simulates all with one seed after the other, until the best is known or so many records are
    /// examined.
    fn run_trials(
        &self,
        trials: &mut [TrialCandidate],
        mut records: u64,
    ) -> Result<(), StalledRunError> {
        let is_failing = self.environment.mtbf_s.is_some();
        let mut runs = self.runs_max;
        for seed in 0..self.seeds {
            let is_run = |at: &usize| !trials[*at].is_dropped && find_twin(trials, *at).is_none();
            let running = (0..trials.len()).filter(is_run).count();
            let Some(runs_left) = runs.checked_sub(running) else {
                break;
            };
            runs = runs_left;
            let looked_at = self.run_seed(trials, seed, records)?;
            records = records.saturating_sub(looked_at);
            if trials.iter().any(TrialCandidate::is_over_budget_later) {
                discard_seed(trials, seed);
                break;
            }
            if is_failing {
                drop_slower(trials);
            }
            // The only candidate is the choice, whatever its time with more seeds.
            if trials.iter().filter(|trial| !trial.is_dropped).count() <= 1 {
                break;
            }
            if !is_failing && seed == 0 && self.seeds > 1 {
                drop_hopeless(trials, self.hopeless_factor);
            }
            if !is_failing && is_clear(trials) {
                break;
            }
            // Another seed would take about as much again.
            if looked_at > records {
                break;
            }
        }
        Ok(())
    }

    /// Simulates the remaining candidates with one seed; returns the examined records.
    fn run_seed(
        &self,
        trials: &mut [TrialCandidate],
        seed: u64,
        records: u64,
    ) -> Result<u64, StalledRunError> {
        let is_failing = self.environment.mtbf_s.is_some();
        let mut left = records;
        for at in 0..trials.len() {
            let same =
                find_twin(trials, at).and_then(|twin| trials[twin].times_us.get(seed as usize));
            if let Some(&same) = same.filter(|_| !trials[at].is_dropped) {
                trials[at].times_us.push(same);
                continue;
            }
            // Candidates that were close with one seed are simulated with the others.
            let limit_us = match seed == 0 || is_failing {
                true => time_limit_us(trials, at, self.hopeless_factor),
                false => u64::MAX,
            };
            // With the first seed each may use the rest of its predecessors' budget.
            let to_come = match seed {
                0 => trials.len() - at,
                _ => 1,
            };
            let looked_at_max = left / to_come as u64;
            let scenario = |strategy| {
                let (environment, load) = (self.environment.clone(), self.load.clone());
                trial_scenario(environment, strategy, load, seed, looked_at_max)
            };
            let looked_at = trials[at].run_seed(self.workflow, scenario, limit_us)?;
            left = left.saturating_sub(looked_at);
        }
        Ok(records - left)
    }
}

/// The candidates in the order of their predictions. A strategy without waits and refetches is
/// always included: the model may be wrong by a factor of two for those. So is [`Strategy::Need`],
/// for which the model has no time if storage is short.
fn select_candidates(plan: &Plan, doubt: TrialScope, is_failing: bool) -> Vec<Strategy> {
    // Without an exact equation for the workload, its shortage is an upper bound.
    let is_tried_anyway = |candidate: &StrategyCandidate| {
        doubt == TrialScope::All && candidate.allocation.strategy == Strategy::Need
    };
    let candidates = plan.candidates.iter();
    let possible = candidates.filter(|it| it.allocation.is_planned() || is_tried_anyway(it));
    let mut timed: Vec<(f64, &Allocation)> = possible
        .map(|candidate| {
            let predicted_s = candidate.predicted_s.unwrap_or(f64::INFINITY);
            (predicted_s, &candidate.allocation)
        })
        .collect();
    timed.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.strategy.cmp(&b.1.strategy)));
    let least_s = timed.first().map_or(f64::INFINITY, |first| first.0);
    let widest = timed.iter().map(|(_, it)| it.concurrency).max();
    let forbids_nothing =
        |it: &Allocation| (it.barriers, it.refetches) == (0, 0) && Some(it.concurrency) == widest;
    let is_near = |(predicted_s, allocation): &(f64, &Allocation)| match doubt {
        TrialScope::Ties => {
            is_failing
                || *predicted_s <= least_s * (1.0 + MODEL_ERROR_MAX)
                || allocation.strategy == Strategy::Need
                || forbids_nothing(allocation)
        }
        TrialScope::All => true,
    };
    let near = timed.into_iter().filter(is_near);
    near.map(|(_, allocation)| allocation.strategy).collect()
}

/// The fastest is the choice, of equally fast ones the first of the table, which accepts the fewest
/// pitfalls; no plan only when it is surely the fastest. If none remains, the candidates that
/// finished with the most seeds count. If no strategy ever finished, there is no choice, because
/// the model's predictions do not hold then; strategies that were too large to simulate are the
/// exception.
fn choose_fastest(plan: &mut Plan, trials: &[TrialCandidate]) {
    let timed = trials
        .iter()
        .filter_map(|t| Some((t.strategy, t.mean_s()?)));
    let mut timed: Vec<(Strategy, f64)> = timed.collect();
    timed.sort_by(|a, b| a.1.total_cmp(&b.1).then(a.0.cmp(&b.0)));
    let Some(&(strategy, seconds)) = timed.first() else {
        return choose_by_finished_seeds(plan, trials);
    };
    if let Some(&(other, slower)) = timed.get(1)
        && strategy == Strategy::Need
        && (is_undecided(trials, other) || !is_need_worthwhile(seconds, slower))
    {
        let saved = 100.0 * (1.0 - seconds / slower);
        let reason = format!(
            "{other} takes {slower:.0} s in the simulation; {strategy}, not guaranteed to finish, \
             takes {saved:.1} % less ({seconds:.0} s), too little to be significant{}",
            describe_over_budget(trials)
        );
        let strategy = other;
        plan.choice = Some(StrategyChoice { strategy, reason });
        plan.refusal = None;
        return;
    }
    let mut reason = format!("{strategy} takes {seconds:.0} s in the simulation");
    match timed.get(1) {
        Some((other, same)) if *same == seconds => {
            reason += &format!(", as does {other}, which is later in the table");
        }
        Some((other, slower)) => {
            let saved = 100.0 * (1.0 - seconds / slower);
            reason += &format!(", {saved:.1} % less than {other} ({slower:.0} s)");
        }
        None if trials.len() == 1 => reason += ", and no other strategy is possible",
        None => reason += ", and no other strategy is faster",
    }
    reason += &describe_over_budget(trials);
    plan.choice = Some(StrategyChoice { strategy, reason });
    plan.refusal = None;
}

/// The strategies that were too large to simulate, as the end of a sentence: they may still be
/// good.
fn describe_over_budget(trials: &[TrialCandidate]) -> String {
    match strategies_over_budget(trials) {
        names if names.is_empty() => String::new(),
        names => format!("; too large to simulate: {names}"),
    }
}

/// Their names.
fn strategies_over_budget(trials: &[TrialCandidate]) -> String {
    let cut = trials.iter().filter(|trial| trial.is_over_budget);
    let names: Vec<String> = cut.map(|trial| trial.strategy.to_string()).collect();
    names.join(", ")
}

/// No strategy finished with all its seeds. The choice is the strategy that finished with most of
/// them, of these the fastest.
fn choose_by_finished_seeds(plan: &mut Plan, trials: &[TrialCandidate]) {
    let seeds = trials.iter().map(|trial| trial.times_us.len()).max();
    let seeds = seeds.filter(|seeds| *seeds > 0);
    let most = trials
        .iter()
        .filter(|trial| Some(trial.times_us.len()) == seeds);
    let Some(best) = most.min_by_key(|trial| trial.sum_us()) else {
        return choose_by_model(plan, trials);
    };
    let (strategy, ended) = (best.strategy, best.times_us.len());
    let mean_s = us_to_s(best.sum_us()) / ended as f64;
    let mut reason = format!(
        "{strategy} finished in {ended} of {} simulations, after {mean_s:.0} s; no strategy \
         finished more often",
        ended + 1
    );
    reason += &describe_over_budget(trials);
    plan.choice = Some(StrategyChoice { strategy, reason });
    plan.refusal = None;
}

/// No strategy has a time. The choice is the model's best of those that were too large to simulate.
fn choose_by_model(plan: &mut Plan, trials: &[TrialCandidate]) {
    let cut: Vec<Strategy> = trials
        .iter()
        .filter(|trial| trial.is_over_budget)
        .map(|trial| trial.strategy)
        .collect();
    let models = plan.choice.take().map(|choice| choice.strategy);
    let models = models.filter(|strategy| cut.contains(strategy));
    let Some(strategy) = models.or_else(|| cut.first().copied()) else {
        plan.refusal = Some(describe_failures(trials));
        return;
    };
    let reason = format!(
        "no strategy finished in the simulation; of those too large to simulate, the model prefers \
         {strategy}: {}",
        strategies_over_budget(trials)
    );
    plan.choice = Some(StrategyChoice { strategy, reason });
    plan.refusal = None;
}

/// The refusal if no strategy fits and the simulated attempt failed too: it suggests a plain run
/// only if that was too large to simulate.
fn describe_last_resort(plan: &Plan, trials: &[TrialCandidate]) -> Option<String> {
    let failed = trials.iter().find(|trial| !trial.is_over_budget);
    let Some(why) = failed.and_then(|trial| trial.failure.as_deref()) else {
        return plan.refusal.clone();
    };
    Some(format!(
        "no strategy fits into the storage, and a run without a strategy does not finish in the \
         simulation ({why}); `bafs run --remote-io` needs no storage, but reads and writes every \
         byte over the link to home"
    ))
}

/// The failures of all strategies, if none finished. Strategies with the same failure are listed
/// together.
fn describe_failures(trials: &[TrialCandidate]) -> String {
    let mut failures: Vec<(&str, Vec<String>)> = Vec::new();
    for trial in trials {
        let Some(why) = trial.failure.as_deref() else {
            continue;
        };
        let name = trial.strategy.to_string();
        match failures.iter_mut().find(|(other, _)| *other == why) {
            Some((_, names)) => names.push(name),
            None => failures.push((why, vec![name])),
        }
    }
    let told = failures
        .iter()
        .map(|(why, names)| format!("{}: {why}", names.join(", ")));
    let told: Vec<String> = told.collect();
    format!(
        "no strategy finished in the simulation ({})",
        told.join("; ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::planner::CanonicalWorkload;
    use crate::simulator::build_canonical_workflow;
    use crate::simulator::trial_candidate::tests::{
        candidates_of, failed_candidate, timed_candidate,
    };

    const HARD_WORKLOAD: &str = "width=60,depth=3,batch=5GB,private=0.5GB,run=5000s,var=0.1";

    /// Ten nodes of the thesis, of which one fails every `mtbf_s` seconds.
    fn failing_environment(mtbf_s: u64) -> Environment {
        let text = include_str!("../../../examples/environments/thesis.toml");
        let mut environment = Environment::parse(text).expect("the example is right");
        environment.nodes[0].count = 10;
        environment.mtbf_s = Some(mtbf_s);
        environment
    }

    #[test]
    fn barrier_free_strategies_are_tried_despite_the_model() {
        let canonical = CanonicalWorkload::parse(HARD_WORKLOAD).expect("a workload");
        let text = include_str!("../../../examples/environments/thesis.toml");
        let environment = Environment::parse(text).expect("the example is right");
        let mut plan = crate::planner::plan_workload(canonical.shape(), &environment);
        let waits = |strategy| matches!(strategy, Strategy::Slice | Strategy::Minimal);
        for candidate in &mut plan.candidates {
            let (strategy, allocation) = (candidate.allocation.strategy, &mut candidate.allocation);
            (allocation.shortage, allocation.concurrency) = (None, 20);
            (allocation.barriers, allocation.refetches) = (u64::from(waits(strategy)), 0);
            let is_best = strategy == Strategy::Slice;
            candidate.predicted_s = Some(if is_best { 100.0 } else { 250.0 });
        }
        let tried = select_candidates(&plan, TrialScope::Ties, false);
        assert_eq!(tried[0], Strategy::Slice);
        assert!(tried.contains(&Strategy::All), "{tried:?}");
        assert!(!tried.contains(&Strategy::Minimal), "it waits: {tried:?}");
    }

    /// For the first seed of all possible strategies: examined records and results.
    fn run_first_seed(environment: &Environment, records: u64) -> (u64, Vec<TrialCandidate>) {
        let canonical = CanonicalWorkload::parse(HARD_WORKLOAD).expect("a workload");
        let workflow = build_canonical_workflow(&canonical);
        let load = LoadModel::Declared {
            variability_ppm: 100_000,
        };
        let field = TrialRunner {
            workflow: &workflow,
            environment,
            load: &load,
            seeds: 1,
            runs_max: usize::MAX,
            hopeless_factor: HOPELESS_FACTOR_FAILING,
        };
        let plan = crate::planner::plan_workload(canonical.shape(), environment);
        let mut trials = candidates_of(&select_candidates(&plan, TrialScope::Ties, true));
        let looked_at = field.run_seed(&mut trials, 0, records).expect("it ends");
        (looked_at, trials)
    }

    fn decide_plan(environment: &Environment, records: u64) -> (Plan, TrialsOutcome) {
        let canonical = CanonicalWorkload::parse(HARD_WORKLOAD).expect("a workload");
        let mut plan = crate::planner::plan_workload(canonical.shape(), environment);
        let load = LoadModel::Declared {
            variability_ppm: 100_000,
        };
        let work = (canonical.jobs(), || build_canonical_workflow(&canonical));
        let doubts = decide_within_records(
            &mut plan,
            TrialScope::Ties,
            work,
            environment,
            &load,
            records,
        );
        (plan, doubts.expect("it ends"))
    }

    /// Nodes live for an hour and jobs take longer: each strategy would be tried a thousand times.
    #[test]
    fn planning_for_failing_nodes_is_bounded() {
        let environment = failing_environment(360);
        let few = 300_000;
        let (all, _) = run_first_seed(&environment, u64::MAX);
        assert!(all > 4 * few, "it is much: {all}");
        let (looked_at, trials) = run_first_seed(&environment, few);
        assert!(looked_at < few + few / 4, "{looked_at}");
        assert!(
            trials.iter().all(|trial| trial.is_over_budget),
            "{trials:?}"
        );
        let (plan, doubts) = decide_plan(&environment, few);
        let reason = plan.choice.clone().expect("the model's").reason;
        assert!(reason.contains("too large to simulate"), "{reason}");
        assert_eq!(
            decide_plan(&environment, few),
            (plan, doubts),
            "the same again"
        );
    }

    #[test]
    fn finished_strategy_is_chosen_before_a_cut_one() {
        let environment = failing_environment(7_200);
        // Some end sooner than others, so that with some number of records only these do.
        for records in (1..100).map(|count| 100_000 * count) {
            let (_, trials) = run_first_seed(&environment, records);
            let ended: Vec<Strategy> = trials
                .iter()
                .filter(|trial| trial.mean_s().is_some())
                .map(|trial| trial.strategy)
                .collect();
            if !ended.is_empty() && trials.iter().any(|trial| trial.is_over_budget) {
                let (plan, _) = decide_plan(&environment, records);
                let chosen = plan.choice.expect("one ended").strategy;
                assert!(ended.contains(&chosen), "{chosen}: {trials:?}");
                return;
            }
        }
        panic!("none ends before another");
    }

    fn choose_from(trials: &[TrialCandidate]) -> Plan {
        let canonical = CanonicalWorkload::parse(HARD_WORKLOAD).expect("a workload");
        let mut plan =
            crate::planner::plan_workload(canonical.shape(), &failing_environment(7_200));
        choose_fastest(&mut plan, trials);
        plan
    }

    #[test]
    fn strategy_ending_with_some_seeds_may_be_chosen() {
        let mut slow = timed_candidate(Strategy::AllBatch, &[]);
        slow.is_dropped = true;
        let plan = choose_from(&[
            slow.clone(),
            failed_candidate(Strategy::Slice, &[100.0, 300.0], "bad luck"),
            failed_candidate(Strategy::Minimal, &[90.0, 350.0], "bad luck"),
        ]);
        let choice = plan.choice.expect("two came to their ends");
        assert_eq!(choice.strategy, Strategy::Slice);
        let expected = "Slice finished in 2 of 3 simulations, after 200 s";
        assert!(choice.reason.starts_with(expected), "{}", choice.reason);
        let plan = choose_from(&[failed_candidate(Strategy::Slice, &[], "bad luck"), slow]);
        assert_eq!(plan.choice, None);
        let refusal = plan.refusal.expect("none ever ended");
        assert!(refusal.contains("Slice: bad luck"), "{refusal}");
    }

    #[test]
    fn need_is_chosen_only_when_surely_faster() {
        let slice = timed_candidate(Strategy::Slice, &[100.0, 120.0, 110.0]);
        let choice = |need: &[f64]| {
            let plan = choose_from(&[slice.clone(), timed_candidate(Strategy::Need, need)]);
            plan.choice.expect("both ended")
        };
        assert_eq!(choice(&[98.0, 117.0, 108.0]).strategy, Strategy::Need);
        let open = choice(&[98.0, 111.0, 114.0]);
        assert_eq!(open.strategy, Strategy::Slice);
        assert!(
            open.reason.contains("need, not guaranteed to finish"),
            "{open:?}"
        );
        assert_eq!(choice(&[98.0]).strategy, Strategy::Need, "no seed to doubt");
        let close = choice(&[109.9]);
        assert_eq!(close.strategy, Strategy::Slice, "hardly faster");
    }

    #[test]
    fn choice_names_strategies_too_costly_to_simulate() {
        let mut cut = failed_candidate(Strategy::Minimal, &[], "too much");
        cut.is_over_budget = true;
        let plan = choose_from(&[timed_candidate(Strategy::Slice, &[100.0]), cut]);
        let reason = plan.choice.expect("one ended").reason;
        assert!(
            reason.ends_with("too large to simulate: Minimal"),
            "{reason}"
        );
    }
}
