//! Remote I/O beside the choice of a plan: never a candidate, because every byte crosses the link
//! to home, but reported if it is faster. Chooses nothing.

use bafs_workflow::Workflow;

use super::load::LoadModel;
use super::strategy_trials::{
    PLAN_CACHE_PARTS_MAX, PLAN_JOBS_MAX, PLAN_RECORDS_MAX, TrialResult, count_cache_parts,
    trial_scenario,
};
use super::trial_candidate::TrialCandidate;
use crate::planner::{Environment, Plan, Strategy};

/// Simulates remote I/O with the seeds of the choice, only where the model takes it to be faster,
/// and only for as long as it is. The workflow has so many `jobs`, and is built only for a
/// simulation. `None` if it is too large to simulate, or does not finish.
pub fn compare_remote_io(
    plan: &Plan,
    tried: &[TrialResult],
    (jobs, workflow): (u64, impl FnOnce() -> Workflow),
    environment: &Environment,
    load: &LoadModel,
) -> Option<TrialResult> {
    let choice = plan.choice.as_ref()?.strategy;
    let chosen = tried.iter().find(|it| it.strategy == choice)?;
    let chosen_s = chosen.simulated_s?;
    let mut candidates = plan.candidates.iter();
    let found = candidates.find(|it| it.allocation.strategy == Strategy::Remote)?;
    let is_faster = found
        .predicted_s
        .is_some_and(|remote_s| remote_s < chosen_s);
    if !is_faster || jobs.saturating_mul(chosen.seeds) > PLAN_JOBS_MAX as u64 {
        return None;
    }
    let workflow = workflow();
    if count_cache_parts(&workflow, environment) > PLAN_CACHE_PARTS_MAX {
        return None;
    }
    let (mut remote, mut left) = (TrialCandidate::new(Strategy::Remote), PLAN_RECORDS_MAX / 4);
    let most_us = (chosen_s * chosen.seeds as f64 * 1e6) as u64;
    for seed in 0..chosen.seeds {
        let scenario = |strategy| {
            let (environment, load) = (environment.clone(), load.clone());
            trial_scenario(environment, strategy, load, seed, left)
        };
        let limit_us = most_us.saturating_sub(remote.sum_us());
        let looked_at = remote.run_seed(&workflow, scenario, limit_us).ok()?;
        left = left.saturating_sub(looked_at);
    }
    Some(remote.into_result())
}
