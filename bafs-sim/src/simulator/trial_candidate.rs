//! Candidates of a plan during simulation, one seed after the other: the remaining ones, and the
//! clearly slower ones. Neither chooses nor knows plans.

use bafs_workflow::Workflow;

use super::engine::Simulation;
use super::policy::Scenario;
use super::simulation_result::{SimulationResult, StalledRunError};
use super::strategy_trials::TrialResult;
use crate::planner::Strategy;

/// With fewer nothing is known of how much the seeds differ.
const SEEDS_MIN: usize = 3;
/// The same if nodes fail: with three, a strategy was dropped that was the best by 9 % with thirty.
const SEEDS_MIN_FAILING: usize = 6;
/// The faster of two strategies is known when the mean of their differences, seed by seed, is so
/// many times its standard error.
const CLEAR_STANDARD_ERRORS: f64 = 3.0;
/// A run without a plan has no guarantee, so it must be faster than the best plan by so many of
/// these errors.
const NEED_STANDARD_ERRORS: f64 = 1.0;

/// A candidate that is simulated with one seed after the other.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TrialCandidate {
    pub(super) strategy: Strategy,
    /// The time with each seed so far, in microseconds.
    pub(super) times_us: Vec<u64>,
    /// It failed, or took longer than can be waited for.
    pub(super) is_dropped: bool,
    /// It is out because it was too much to simulate: nothing speaks against it.
    pub(super) is_over_budget: bool,
    pub(super) failure: Option<String>,
}

impl TrialCandidate {
    pub(super) fn new(strategy: Strategy) -> Self {
        Self {
            strategy,
            times_us: Vec::new(),
            is_dropped: false,
            is_over_budget: false,
            failure: None,
        }
    }

    /// Simulates it with another seed; returns the examined records.
    pub(super) fn run_seed(
        &mut self,
        workflow: &Workflow,
        scenario: impl FnOnce(Strategy) -> Scenario,
        limit_us: u64,
    ) -> Result<u64, StalledRunError> {
        if self.is_dropped {
            return Ok(0);
        }
        // A plan need not say that there are plans.
        let scenario = Scenario {
            suggests_plan: false,
            ..scenario(self.strategy)
        };
        let most = scenario.records_examined_max;
        let simulation = Simulation::new(workflow.clone(), scenario);
        let (run, looked_at) = simulation.run_until(limit_us)?;
        self.failure = run.as_ref().and_then(SimulationResult::failure);
        match run.filter(SimulationResult::is_complete) {
            Some(run) => self.times_us.push(run.elapsed_us),
            None => {
                self.is_dropped = true;
                self.is_over_budget = self.failure.is_some() && looked_at > most;
            }
        }
        Ok(looked_at)
    }

    /// Whether only a seed after the first was too much.
    pub(super) fn is_over_budget_later(&self) -> bool {
        self.is_over_budget && !self.times_us.is_empty()
    }

    /// The mean over the seeds so far.
    pub(super) fn mean_s(&self) -> Option<f64> {
        let is_known = !self.is_dropped && !self.times_us.is_empty();
        is_known.then(|| us_to_s(self.sum_us()) / self.times_us.len() as f64)
    }

    /// All times so far together, in microseconds.
    pub(super) fn sum_us(&self) -> u64 {
        let times = self.times_us.iter();
        times.fold(0, |sum, us| sum.saturating_add(*us))
    }

    pub(super) fn into_result(self) -> TrialResult {
        TrialResult {
            strategy: self.strategy,
            simulated_s: self.mean_s(),
            seeds: self.times_us.len() as u64,
            failure: self.failure,
        }
    }
}

pub(super) fn us_to_s(us: u64) -> f64 {
    us as f64 / 1e6
}

/// The shortest mean so far.
fn best_mean_s(trials: &[TrialCandidate]) -> f64 {
    let means = trials.iter().filter_map(TrialCandidate::mean_s);
    means.fold(f64::INFINITY, f64::min)
}

/// How long a trial may take with its next seed, until its times together cannot be the best. It is
/// compared with candidates that finished with the same seeds, because a seed may bring bad luck to
/// all. Before the first finish there is no limit, so one always remains as the best, unless all
/// fail.
pub(super) fn time_limit_us(trials: &[TrialCandidate], at: usize, hopeless: f64) -> u64 {
    let own = &trials[at];
    let seeds = own.times_us.len() + 1;
    let peers = trials.iter().filter(|trial| !trial.is_dropped);
    let peers = peers.filter(|trial| trial.times_us.len() == seeds);
    let Some(least_us) = peers.map(TrialCandidate::sum_us).min() else {
        return u64::MAX;
    };
    // To the microsecond: a candidate as fast as the best is not slower.
    let beyond_us = (least_us as f64 * hopeless) as u64;
    let most_us = least_us.saturating_add(beyond_us);
    most_us.saturating_sub(own.sum_us())
}

/// Drops the candidates that took much longer with the first seed than the fastest: earlier
/// candidates were not stopped by it.
pub(super) fn drop_hopeless(trials: &mut [TrialCandidate], hopeless: f64) {
    let limit_s = best_mean_s(trials) * (1.0 + hopeless);
    for trial in trials {
        trial.is_dropped |= trial.mean_s().is_some_and(|mean_s| mean_s > limit_s);
    }
}

/// A seed was too much for one of them: all are compared by the seeds before it. Candidates that
/// failed with that seed are dropped too.
pub(super) fn discard_seed(trials: &mut [TrialCandidate], seed: u64) {
    for trial in trials {
        trial.times_us.truncate(seed as usize);
        if trial.failure.is_some() && trial.times_us.len() as u64 == seed {
            (trial.is_dropped, trial.is_over_budget, trial.failure) = (false, false, None);
        }
    }
}

/// Drops candidates that are clearly slower than the fastest, so that others get more seeds.
pub(super) fn drop_slower(trials: &mut [TrialCandidate]) {
    let best = find_fastest(trials).filter(|best| best.times_us.len() >= SEEDS_MIN_FAILING);
    let Some(best) = best.cloned() else {
        return;
    };
    for trial in trials {
        trial.is_dropped |=
            trial.strategy != best.strategy && is_slower(trial, &best, CLEAR_STANDARD_ERRORS);
    }
}

/// The one before it that took as long to the microsecond with so many seeds that they may be taken
/// for the same: it is not simulated any more.
pub(super) fn find_twin(trials: &[TrialCandidate], at: usize) -> Option<usize> {
    let own = &trials[at];
    let is_known = own.times_us.len() >= SEEDS_MIN_FAILING;
    let is_same =
        |other: &TrialCandidate| !other.is_dropped && other.times_us.starts_with(&own.times_us);
    trials[..at].iter().position(|it| is_known && is_same(it))
}

/// Whether further seeds would hardly show another one as the best.
pub(super) fn is_clear(trials: &[TrialCandidate]) -> bool {
    let Some(best) = find_fastest(trials) else {
        return true;
    };
    let mut others = trials
        .iter()
        .filter(|trial| !trial.is_dropped && trial.strategy != best.strategy);
    // A candidate that was as fast with each of few seeds may be slower with another.
    let is_twin = |other: &TrialCandidate| {
        other.times_us == best.times_us && best.times_us.len() < SEEDS_MIN_FAILING
    };
    others.all(|other| !is_twin(other) && is_slower(other, best, CLEAR_STANDARD_ERRORS))
}

fn find_fastest(trials: &[TrialCandidate]) -> Option<&TrialCandidate> {
    let left = trials.iter().filter(|trial| !trial.is_dropped);
    left.min_by(|a, b| {
        let mean_s = |trial: &TrialCandidate| trial.mean_s().unwrap_or(f64::INFINITY);
        mean_s(a).total_cmp(&mean_s(b))
    })
}

/// Whether one is slower than another by so many standard errors of their differences. With one
/// seed jobs compute as long under every strategy, and nodes fail at the same times, so that
/// strategies differ by less than seeds do.
fn is_slower(other: &TrialCandidate, best: &TrialCandidate, errors: f64) -> bool {
    let pairs = other.times_us.iter().zip(&best.times_us);
    let differences: Vec<f64> = pairs
        .map(|(other, best)| us_to_s(*other) - us_to_s(*best))
        .collect();
    let count = differences.len() as f64;
    let mean_s = differences.iter().sum::<f64>() / count;
    let squares = differences.iter().map(|d| (d - mean_s).powi(2));
    let error_s = (squares.sum::<f64>() / (count - 1.0) / count).sqrt();
    differences.len() >= SEEDS_MIN && mean_s >= errors * error_s
}

/// Whether several seeds leave open that a run without a plan is faster than another strategy.
pub(super) fn is_undecided(trials: &[TrialCandidate], other: Strategy) -> bool {
    let of = |strategy| trials.iter().find(|trial| trial.strategy == strategy);
    match (of(Strategy::Need), of(other)) {
        (Some(need), Some(other)) => {
            let has_seeds = need.times_us.len() >= SEEDS_MIN;
            has_seeds && !is_slower(other, need, NEED_STANDARD_ERRORS)
        }
        _ => false,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::simulator::strategy_trials::{HOPELESS_FACTOR_FAILING, HOPELESS_FACTOR_VARYING};

    pub(in crate::simulator) fn timed_candidate(
        strategy: Strategy,
        times_s: &[f64],
    ) -> TrialCandidate {
        TrialCandidate {
            times_us: times_s.iter().map(|s| (s * 1e6) as u64).collect(),
            ..TrialCandidate::new(strategy)
        }
    }

    pub(in crate::simulator) fn failed_candidate(
        strategy: Strategy,
        times_s: &[f64],
        why: &str,
    ) -> TrialCandidate {
        TrialCandidate {
            is_dropped: true,
            failure: Some(why.to_owned()),
            ..timed_candidate(strategy, times_s)
        }
    }

    pub(in crate::simulator) fn candidates_of(strategies: &[Strategy]) -> Vec<TrialCandidate> {
        strategies
            .iter()
            .copied()
            .map(TrialCandidate::new)
            .collect()
    }

    #[test]
    fn best_strategy_is_clear_only_beyond_the_scatter() {
        let slice = timed_candidate(Strategy::Slice, &[100.0, 120.0, 110.0]);
        let is_clear_from = |other_s: &[f64]| {
            is_clear(&[slice.clone(), timed_candidate(Strategy::Minimal, other_s)])
        };
        assert!(
            is_clear_from(&[103.0, 122.5, 113.5]),
            "seed by seed it is always 3 s longer"
        );
        assert!(
            !is_clear_from(&[101.0, 119.0, 113.0]),
            "once it was the faster one"
        );
        assert!(
            !is_clear_from(&[100.0, 120.0, 110.0]),
            "another seed may tell them apart"
        );
        let few = [
            timed_candidate(Strategy::Slice, &[100.0, 120.0]),
            timed_candidate(Strategy::Minimal, &[150.0, 170.0]),
        ];
        assert!(!is_clear(&few), "two seeds tell nothing of the scatter");
    }

    #[test]
    fn hopeless_candidates_are_dropped_whatever_their_order() {
        let mut trials = [
            timed_candidate(Strategy::AllBatch, &[130.0]),
            timed_candidate(Strategy::Slice, &[100.0]),
            timed_candidate(Strategy::Minimal, &[109.0]),
        ];
        drop_hopeless(&mut trials, HOPELESS_FACTOR_VARYING);
        let left = trials.iter().filter(|trial| !trial.is_dropped);
        let left: Vec<Strategy> = left.map(|trial| trial.strategy).collect();
        assert_eq!(left, [Strategy::Slice, Strategy::Minimal]);
    }

    #[test]
    fn clearly_slower_candidates_are_dropped_after_enough_seeds() {
        let mut trials = [
            timed_candidate(Strategy::AllBatch, &[103.0, 122.5, 113.5]),
            timed_candidate(Strategy::Slice, &[100.0, 120.0, 110.0]),
            timed_candidate(Strategy::Minimal, &[101.0, 119.0, 113.0]),
        ];
        drop_slower(&mut trials);
        assert!(
            trials.iter().all(|it| !it.is_dropped),
            "three seeds are few"
        );
        for it in &mut trials {
            it.times_us.extend_from_within(..);
        }
        drop_slower(&mut trials);
        assert_eq!(
            trials.each_ref().map(|it| it.is_dropped),
            [true, false, false]
        );
    }

    #[test]
    fn unlucky_seed_raises_the_time_limit_for_all() {
        let mut trials = [
            timed_candidate(Strategy::Slice, &[100.0]),
            timed_candidate(Strategy::Minimal, &[110.0]),
        ];
        assert_eq!(time_limit_us(&trials, 0, HOPELESS_FACTOR_FAILING), u64::MAX);
        trials[0].times_us.push(900_000_000);
        let limit_us = time_limit_us(&trials, 1, HOPELESS_FACTOR_FAILING);
        assert_eq!(limit_us, 3 * (100 + 900) * 1_000_000 - 110_000_000);
    }

    /// In seconds some numbers of microseconds came back as one less.
    #[test]
    fn time_limit_allows_a_tie_with_the_best() {
        let mut trials = candidates_of(&[Strategy::All, Strategy::AllPrivate]);
        for us in [1_090_061_256_103, 4, 9_007_199_254_740_993] {
            trials[0].times_us = vec![us];
            assert_eq!(time_limit_us(&trials, 1, 0.0), us);
        }
    }

    #[test]
    fn candidates_equal_over_six_seeds_are_twins() {
        let times = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
        let mut trials = [
            timed_candidate(Strategy::Slice, &times),
            timed_candidate(Strategy::Minimal, &times),
        ];
        assert_eq!(
            (find_twin(&trials, 0), find_twin(&trials, 1)),
            (None, Some(0))
        );
        trials[0].times_us.push(7);
        assert_eq!(find_twin(&trials, 1), Some(0), "it ran with one more");
        trials[0].times_us[2] += 1;
        assert_eq!(find_twin(&trials, 1), None);
        let few = [
            timed_candidate(Strategy::Slice, &times[..5]),
            timed_candidate(Strategy::Minimal, &times[..5]),
        ];
        assert_eq!(find_twin(&few, 1), None);
    }

    #[test]
    fn dropped_candidate_is_not_waited_for() {
        let mut slow = timed_candidate(Strategy::Minimal, &[]);
        slow.is_dropped = true;
        assert!(is_clear(&[
            timed_candidate(Strategy::Slice, &[100.0]),
            slow
        ]));
    }

    #[test]
    fn seed_exceeding_the_budget_counts_for_no_candidate() {
        let mut trials = [
            timed_candidate(Strategy::Slice, &[100.0, 90.0]),
            timed_candidate(Strategy::Minimal, &[110.0]),
            timed_candidate(Strategy::AllBatch, &[]),
        ];
        for at in [1, 2] {
            (trials[at].is_dropped, trials[at].is_over_budget) = (true, true);
            trials[at].failure = Some("too much".to_owned());
        }
        discard_seed(&mut trials, 1);
        let means = trials.each_ref().map(TrialCandidate::mean_s);
        assert_eq!(means, [Some(100.0), Some(110.0), None]);
    }

    #[test]
    fn failure_with_a_discarded_seed_is_forgiven() {
        let mut trials = [
            failed_candidate(Strategy::Slice, &[100.0], "bad luck"),
            failed_candidate(Strategy::Minimal, &[110.0], "too much"),
        ];
        trials[1].is_over_budget = true;
        discard_seed(&mut trials, 1);
        let means = trials.each_ref().map(TrialCandidate::mean_s);
        assert_eq!(means, [Some(100.0), Some(110.0)]);
    }
}
