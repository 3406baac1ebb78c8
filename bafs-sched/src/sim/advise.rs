//! What a scheduler that plans by itself is told before a run: the plan with its candidates
//! simulated, as `bafs plan` makes it. Follows nothing.

use super::decide::{Doubt, Doubts, decide};
use super::load::Load;
use super::record::Stuck;
use crate::planner::{Advice, Canonical, Environment, Plan, Shape, Strategy, plan};
use crate::workflow::Workflow;

/// Advice for a workflow on the nodes of an environment. None when there is nothing to choose or
/// too much to simulate, and none where sizes or run times are not known: a simulation without them
/// says nothing.
///
/// # Errors
/// When a simulated run does not come to an end: a defect.
pub fn advise(
    workflow: &Workflow,
    variability: f64,
    environment: &Environment,
    load: &Load,
) -> Result<Option<Advice>, Stuck> {
    let is_size_unknown = workflow.volumes.iter().any(|it| it.size_bytes == 0);
    let is_time_unknown = match load {
        Load::Declared { .. } => workflow.jobs.iter().any(|it| it.runtime_s.is_none()),
        Load::Measured(_) => false,
    };
    if is_size_unknown || is_time_unknown {
        return Ok(None);
    }
    let doubt = match Canonical::recognise(workflow, variability) {
        Ok(_) => Doubt::Ties,
        Err(_) => Doubt::All,
    };
    let mut plan = plan(Shape::of(workflow, variability), environment);
    let work = (workflow.jobs.len() as u64, || workflow.clone());
    let doubts = decide(&mut plan, doubt, work, environment, load)?;
    Ok(advice(&plan, environment, &doubts))
}

/// What was found, as advice: nothing when nothing was simulated.
pub(super) fn advice(plan: &Plan, environment: &Environment, doubts: &Doubts) -> Option<Advice> {
    let Doubts::Tried(tried) = doubts else {
        return None;
    };
    Advice::new(plan, environment, |strategy: Strategy| {
        let found = tried.iter().find(|tried| tried.strategy == strategy)?;
        found.simulated_s
    })
}
