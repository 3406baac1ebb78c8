//! What a scheduler that plans by itself is told before a run: the plan with its candidates
//! simulated, as `bafs plan` makes it. Follows nothing.

use super::decide::{Doubt, Doubts, decide};
use super::load::Load;
use super::record::Stuck;
use crate::planner::{Advice, Canonical, Environment, Plan, Shape, Strategy, plan};
use crate::workflow::Workflow;

/// Sizes of volumes, or run times of jobs, that may be unknown, as a share of all of them: what is
/// unknown counts as nothing in a simulation, and of little else it says nothing.
const UNKNOWN_PERCENT_MAX: usize = 25;

/// Advice for a workflow on the nodes of an environment. None when there is nothing to choose or
/// too much to simulate, and none where more than a quarter of the sizes or run times is not known.
///
/// # Errors
/// When a simulated run does not come to an end: a defect.
pub fn advise(
    workflow: &Workflow,
    variability: f64,
    environment: &Environment,
    load: &Load,
) -> Result<Option<Advice>, Stuck> {
    let volumes = workflow.volumes.iter();
    let sizes = volumes.filter(|it| it.size_bytes == 0).count();
    let times = match load {
        Load::Declared { .. } => {
            let jobs = workflow.jobs.iter();
            jobs.filter(|it| it.runtime_s.is_none()).count()
        }
        Load::Measured(_) => 0,
    };
    let is_many = |unknown: usize, all: usize| unknown * 100 > all * UNKNOWN_PERCENT_MAX;
    if is_many(sizes, workflow.volumes.len()) || is_many(times, workflow.jobs.len()) {
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
