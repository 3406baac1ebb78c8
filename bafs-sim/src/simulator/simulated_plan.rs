//! The advice for a scheduler that plans by itself, made before a run: the plan with its candidates
//! simulated, as `bafs plan` makes it. Follows nothing.

use bafs_workflow::Workflow;

use super::load::LoadModel;
use super::simulation_result::StalledRunError;
use super::strategy_trials::{TrialScope, TrialsOutcome, decide_by_simulation};
use crate::planner::{
    CanonicalWorkload, Environment, Plan, Shape, SimulatedPlan, Strategy, plan_workload,
    summarise_simulations,
};

/// Largest share of unknown volume sizes or run times: an unknown value counts as zero in a
/// simulation, so with more of them the result means little.
const UNKNOWN_PERCENT_MAX: usize = 25;

/// Advice for a workflow on the nodes of an environment. `None` without a choice, if it is too
/// large to simulate, or if more than a quarter of the sizes or run times is unknown.
///
/// # Errors
/// When a simulated run stalls: a defect.
pub fn derive_simulated_plan(
    workflow: &Workflow,
    variability: f64,
    environment: &Environment,
    load: &LoadModel,
) -> Result<Option<SimulatedPlan>, StalledRunError> {
    let volumes = workflow.volumes.iter();
    let sizes = volumes.filter(|it| it.size_bytes == 0).count();
    let times = match load {
        LoadModel::Declared { .. } => {
            let jobs = workflow.jobs.iter();
            jobs.filter(|it| it.runtime_s.is_none()).count()
        }
        LoadModel::Measured(_) => 0,
    };
    let is_many = |unknown: usize, all: usize| unknown * 100 > all * UNKNOWN_PERCENT_MAX;
    if is_many(sizes, workflow.volumes.len()) || is_many(times, workflow.jobs.len()) {
        return Ok(None);
    }
    let doubt = match CanonicalWorkload::recognise(workflow, variability) {
        Ok(_) => TrialScope::Ties,
        Err(_) => TrialScope::All,
    };
    let mut plan = plan_workload(Shape::from_workflow(workflow, variability), environment);
    let work = (workflow.jobs.len() as u64, || workflow.clone());
    let doubts = decide_by_simulation(&mut plan, doubt, work, environment, load)?;
    Ok(plan_from_trials(&plan, environment, &doubts))
}

/// The results as advice; `None` without a simulation.
pub(super) fn plan_from_trials(
    plan: &Plan,
    environment: &Environment,
    doubts: &TrialsOutcome,
) -> Option<SimulatedPlan> {
    let TrialsOutcome::Completed(tried) = doubts else {
        return None;
    };
    summarise_simulations(plan, environment, |strategy: Strategy| {
        let found = tried.iter().find(|tried| tried.strategy == strategy)?;
        found.simulated_s
    })
}
